// Shows a trajectory up to a moment, live and again: tokens in their places, a slider, a play button.
//
// Live and replay are one mechanism. Events are appended as the server sends them; the player walks towards the last one
// at a pace that can be watched, and faster when it falls behind. Whoever takes hold of the slider stops the walk.

import { Trajectory } from "./trajectory.js";
import { hideTip, showTip } from "./tip.js";

const PACE = 90; // ms from token to token
const LAG = 2500; // ms that the picture may be behind the server
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  /** drawn(trajectory, count): called whenever another moment is shown */
  constructor(root, drawn = () => {}) {
    root.append(document.querySelector("#player").content.cloneNode(true));
    this.drawn = drawn;
    this.tokens = root.querySelector(".tokens");
    this.replay = root.querySelector(".replay");
    this.slider = this.replay.querySelector("input");
    this.button = this.replay.querySelector(".play");
    this.counter = this.replay.querySelector(".count");
    this.slider.addEventListener("input", () => this.seek(this.slider.valueAsNumber));
    this.button.addEventListener("click", () => (this.playing ? this.#pause() : this.#play()));
    this.tokens.addEventListener("keydown", (event) => this.#onKey(event));
    this.clear();
  }

  clear() {
    this.start([]);
    this.end();
    this.replay.hidden = true;
  }

  /** A new trajectory; from now on the picture follows it. */
  start(given) {
    hideTip();
    this.#pause();
    this.trajectory = new Trajectory(given);
    this.elements = new Map();
    this.tokens.replaceChildren();
    for (const [number, cell] of this.trajectory.cells.entries()) {
      if (number) this.tokens.append(blank());
      this.#add(cell, null);
    }
    this.replay.hidden = false;
    this.live = true;
    this.#show(0);
    this.#play();
  }

  insert(event) {
    this.#add(...this.trajectory.insert(event));
    this.#show(this.count);
  }

  /** The text is finished, in these pieces. Resolves when the picture has come to its end, or was stopped. */
  async finish(pieces) {
    this.trajectory.finish(pieces);
    this.live = false;
    this.#show(this.count);
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
    this.#playing(true);
    this.#walk();
  }

  #pause() {
    clearTimeout(this.timer);
    this.#playing(false);
    this.settled?.();
  }

  #playing(on) {
    this.playing = on;
    this.button.setAttribute("aria-label", on ? "Pause" : "Play");
  }

  #walk() {
    const ahead = this.trajectory.events.length - this.count;
    if (ahead) this.#show(calm.matches && this.live ? this.trajectory.events.length : this.count + 1);
    else if (!this.live) return this.#pause();
    this.timer = setTimeout(() => this.#walk(), Math.min(PACE, LAG / Math.max(1, ahead)));
  }

  #show(count) {
    const { trajectory, tokens, slider } = this;
    const total = trajectory.events.length;
    this.count = count;
    const shown = new Map(trajectory.after(count).map(({ cell, text }) => [cell, text]));
    for (const [cell, element] of this.elements) fillElement(element, shown.get(cell));
    for (const [number, element] of this.#chips()) {
      element.style.setProperty("--t", trajectory.tone(number));
      element.classList.toggle("latest", number === count - 1 && !(trajectory.ended && count === total));
    }
    this.#showBlanks(trajectory.ended && count === total);
    this.#keepReachable();
    slider.max = total;
    slider.value = count;
    slider.setAttribute("aria-valuetext", `after ${count} of ${total} insertions`);
    this.counter.textContent = `${count} / ${total}`;
    tokens.dataset.count = count;
    this.drawn(trajectory, count);
  }

  #add(cell, next) {
    const element = cell.event ? this.#chip(cell) : document.createElement("span");
    this.elements.set(cell, element);
    const before = next ? this.elements.get(next) : null;
    // The mark of an open blank stays in front of the given text that follows it.
    this.tokens.insertBefore(element, before?.previousSibling?.matches?.(".blank") ? before.previousSibling : before);
  }

  /** A token, with the space before it outside of its colour. */
  #chip(cell) {
    const element = document.createElement("span");
    const chip = document.createElement("span");
    chip.className = "token";
    chip.tabIndex = -1;
    chip.setAttribute("role", "button");
    const tell = () => showTip(chip, cell, this.trajectory.events.length);
    chip.addEventListener("pointerenter", tell);
    chip.addEventListener("pointerleave", hideTip);
    chip.addEventListener("focus", tell);
    chip.addEventListener("blur", hideTip);
    chip.addEventListener("click", () => this.seek(cell.number + 1));
    element.append("", chip);
    return element;
  }

  *#chips() {
    for (const [cell, element] of this.elements) if (cell.event) yield [cell.number, element.lastChild];
  }

  /** A blank is marked until something is in it. */
  #showBlanks(done) {
    let empty = false;
    for (const element of this.tokens.children) {
      if (element.matches(".blank")) element.hidden = done || !empty;
      else if (!element.hidden) empty = !element.querySelector(".token");
    }
  }

  /** One stop for the tab key among all tokens; arrows lead to the others. */
  #keepReachable() {
    const visible = this.#visible();
    const current = visible.find((chip) => chip.tabIndex === 0) ?? visible[0];
    for (const [, chip] of this.#chips()) chip.tabIndex = chip === current ? 0 : -1;
  }

  #visible() {
    return [...this.tokens.querySelectorAll(":scope > :not([hidden]) > .token")];
  }

  #onKey(event) {
    const chips = this.#visible();
    const here = chips.indexOf(document.activeElement);
    if (here < 0) return;
    const targets = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: chips.length - 1 };
    if (event.key in targets) {
      const next = chips[targets[event.key]];
      if (next) {
        chips[here].tabIndex = -1;
        next.tabIndex = 0;
        next.focus();
      }
    } else if (event.key === "Enter" || event.key === " ") chips[here].click();
    else return;
    event.preventDefault();
  }
}

function blank() {
  const mark = document.createElement("span");
  mark.className = "blank";
  mark.append("\u00a0\u00a0\u00a0\u00a0\u00a0\u00a0");
  return mark;
}

function fillElement(element, text) {
  element.hidden = text === undefined;
  if (element.hidden) return;
  const chip = element.querySelector(".token");
  if (!chip) return void (element.textContent = text);
  const space = text.trim() ? text.match(/^\s*/)[0] : "";
  element.firstChild.data = space;
  chip.textContent = text.slice(space.length);
}
