// One or several texts up to a moment, live and again: their tokens, one slider over the moments, a play button.
//
// Live and replay are one mechanism. Events are appended as the server sends them; the player walks towards the last one
// at a pace that can be watched. Whoever takes hold of the slider stops the walk. Several texts walk in step.

import { Tokens } from "./tokens.js";
import { Trajectory } from "./trajectory.js";

const PACE = 90; // ms from token to token
const LONGEST = 4000; // ms for a whole text: a long one goes faster
const FRAME = 16; // ms: more often is not seen, so several tokens come at once
const calm = matchMedia("(prefers-reduced-motion: reduce)"); // then nothing walks unless it is told to

export class Player {
  /** drawn(trajectory, count): called with the first text whenever another moment is shown */
  constructor(root, drawn = () => {}) {
    root.append(document.querySelector("#player").content.cloneNode(true));
    this.drawn = drawn;
    this.samples = root.querySelector(".samples");
    this.replay = root.querySelector(".replay");
    this.slider = this.replay.querySelector("input");
    this.button = this.replay.querySelector(".play");
    this.counter = this.replay.querySelector(".count");
    this.slider.addEventListener("input", () => this.seek(this.slider.valueAsNumber));
    this.button.addEventListener("click", () => (this.playing ? this.#pause() : this.#play()));
    addEventListener("resize", () => this.lanes.forEach(({ tokens }) => (tokens.root.style.minHeight = "")));
    this.clear();
  }

  clear() {
    this.start([]);
    this.end();
    this.replay.hidden = true;
  }

  /** New texts, so many; from now on the picture follows them. given: the cells they start from */
  start(given, many = 1) {
    this.#pause();
    this.samples.replaceChildren();
    this.lanes = Array.from({ length: many }, (_, number) => this.#lane(given, number, many));
    this.replay.hidden = false;
    this.live = true;
    this.#show(0);
    this.#play();
  }

  insert(event) {
    const { trajectory, tokens } = this.lanes[event.sample ?? 0];
    tokens.add(...trajectory.insert(event));
    this.#showCount();
  }

  /** The texts are finished, each in its pieces. Resolves when the picture has come to its end, or was stopped. */
  async finish(texts) {
    for (const [number, { pieces }] of texts.entries()) this.lanes[number].trajectory.finish(pieces);
    this.live = false;
    this.#show(this.count);
    if (this.playing && calm.matches) this.end();
    if (this.playing) await new Promise((resolve) => (this.settled = resolve));
  }

  /** No more will come: what is there is all there is. */
  end() {
    this.live = false;
    this.seek(this.total);
  }

  /** Walks through the texts once more, for a reader who has only now come to them. */
  again() {
    if (calm.matches) return;
    this.seek(0);
    this.#play();
  }

  /** Show the moment after so many insertions, and stay there. */
  seek(count) {
    this.#pause();
    this.#show(count);
  }

  /** Insertions of the longest text. */
  get total() {
    return Math.max(...this.lanes.map(({ trajectory }) => trajectory.events.length));
  }

  /** Insertions of all texts that are shown. */
  get shown() {
    return this.lanes.reduce((sum, { trajectory }) => sum + Math.min(this.count, trajectory.events.length), 0);
  }

  #lane(given, number, many) {
    const element = document.querySelector("#sample").content.firstElementChild.cloneNode(true);
    const root = element.querySelector(".tokens");
    if (many > 1) {
      root.setAttribute("aria-label", `Tokens of version ${number + 1}`);
      element.querySelector(".title").hidden = false;
      element.querySelector(".title span").textContent = `Version ${number + 1}`;
    }
    this.samples.append(element);
    const trajectory = new Trajectory(given);
    const tokens = new Tokens(root, (order) => this.seek(order + 1));
    tokens.start(trajectory);
    return { element, trajectory, tokens };
  }

  #play() {
    if (!this.live && this.count === this.total) this.#show(0);
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
    const last = this.total;
    const wait = Math.max(FRAME, Math.min(PACE, LONGEST / last));
    const step = Math.max(1, Math.round((wait * last) / LONGEST));
    if (this.count < last) this.#show(this.live && calm.matches ? last : Math.min(last, this.count + step));
    else if (!this.live) return this.#pause();
    this.timer = setTimeout(() => this.#walk(), wait);
  }

  #show(count) {
    this.count = count;
    for (const { tokens } of this.lanes) tokens.show(count);
    this.#showCount();
    this.drawn(this.lanes[0].trajectory, count);
  }

  #showCount() {
    const { total } = this;
    this.slider.max = total;
    this.slider.value = this.count;
    this.slider.setAttribute("aria-valuetext", `after ${this.count} of ${total} insertions`);
    this.counter.textContent = `${this.count} / ${total}`;
  }
}
