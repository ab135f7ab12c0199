// A trajectory up to a moment, live and again: its tokens, a slider over its moments, a play button.
//
// Live and replay are one mechanism. Events are appended as the server sends them; the player walks towards the last one
// at a pace that can be watched. Whoever takes hold of the slider stops the walk.

import { Tokens } from "./tokens.js";
import { Trajectory } from "./trajectory.js";

const PACE = 90; // ms from token to token
const LONGEST = 4000; // ms for a whole text: a long one goes faster
const FRAME = 16; // ms: more often is not seen, so several tokens come at once
const calm = matchMedia("(prefers-reduced-motion: reduce)"); // then nothing walks unless it is told to

export class Player {
  /** drawn(trajectory, count): called whenever another moment is shown */
  constructor(root, drawn = () => {}) {
    root.append(document.querySelector("#player").content.cloneNode(true));
    this.drawn = drawn;
    this.tokens = new Tokens(root.querySelector(".tokens"), (number) => this.seek(number + 1));
    this.replay = root.querySelector(".replay");
    this.slider = this.replay.querySelector("input");
    this.button = this.replay.querySelector(".play");
    this.counter = this.replay.querySelector(".count");
    this.slider.addEventListener("input", () => this.seek(this.slider.valueAsNumber));
    this.button.addEventListener("click", () => (this.playing ? this.#pause() : this.#play()));
    this.clear();
  }

  clear() {
    this.start([]);
    this.end();
    this.replay.hidden = true;
  }

  /** A new trajectory; from now on the picture follows it. */
  start(given) {
    this.#pause();
    this.trajectory = new Trajectory(given);
    this.tokens.start(this.trajectory);
    this.replay.hidden = false;
    this.live = true;
    this.#show(0);
    this.#play();
  }

  insert(event) {
    this.tokens.add(...this.trajectory.insert(event));
    this.#showCount();
  }

  /** The text is finished, in these pieces. Resolves when the picture has come to its end, or was stopped. */
  async finish(pieces) {
    this.trajectory.finish(pieces);
    this.live = false;
    this.#show(this.count);
    if (this.playing && calm.matches) this.end();
    if (this.playing) await new Promise((resolve) => (this.settled = resolve));
  }

  /** No more will come: what is there is all there is. */
  end() {
    this.live = false;
    this.seek(this.trajectory.events.length);
  }

  /** Show the moment after so many insertions, and stay there. */
  seek(count) {
    this.#pause();
    this.#show(count);
  }

  #play() {
    if (!this.live && this.count === this.trajectory.events.length) this.#show(0);
    this.#setPlaying(true);
    this.#walk();
  }

  #pause() {
    clearTimeout(this.timer);
    this.#setPlaying(false);
    this.settled?.();
  }

  #setPlaying(on) {
    this.playing = on;
    this.button.setAttribute("aria-label", on ? "Pause" : "Play");
  }

  #walk() {
    const last = this.trajectory.events.length;
    const wait = Math.max(FRAME, Math.min(PACE, LONGEST / last));
    const step = Math.max(1, Math.round((wait * last) / LONGEST));
    if (this.count < last) this.#show(this.live && calm.matches ? last : Math.min(last, this.count + step));
    else if (!this.live) return this.#pause();
    this.timer = setTimeout(() => this.#walk(), wait);
  }

  #show(count) {
    this.count = count;
    this.tokens.show(count);
    this.#showCount();
    this.drawn(this.trajectory, count);
  }

  #showCount() {
    const total = this.trajectory.events.length;
    this.slider.max = total;
    this.slider.value = this.count;
    this.slider.setAttribute("aria-valuetext", `after ${this.count} of ${total} insertions`);
    this.counter.textContent = `${this.count} / ${total}`;
  }
}
