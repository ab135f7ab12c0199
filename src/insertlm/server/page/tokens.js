// The tokens of a trajectory in their places: given text plain, inserted tokens coloured by their turn.
//
// All inserted tokens are one stop for the tab key; arrows, Home and End lead from one to the other. Each is a button that
// goes back to the moment of its insertion and tells, on hover and on focus, how likely it was.

import { hideTip, keepTip, showTip } from "./tip.js";

export class Tokens {
  /** picked(number): called when the token of that insertion is chosen */
  constructor(root, picked) {
    this.root = root;
    this.picked = picked;
    root.addEventListener("keydown", (event) => this.#onKey(event));
  }

  start(trajectory) {
    hideTip();
    this.trajectory = trajectory;
    this.marks = new Map(); // by cell: what stands for it
    this.focused = null;
    for (const [number, cell] of trajectory.cells.entries()) {
      if (number) this.root.append(blank());
      this.add(cell, null);
    }
  }

  /** next: the cell it comes before; null: it is the last */
  add(cell, next) {
    const element = document.createElement("span");
    const chip = cell.event ? this.#chip(cell) : null;
    if (chip) element.append("", chip); // the space before a token is not coloured
    element.hidden = chip !== null; // until it is its turn
    this.marks.set(cell, { element, chip, text: null, tone: null });
    const before = next && this.marks.get(next).element;
    // The mark of an open blank stays in front of the given text that follows it.
    this.root.insertBefore(element, before?.previousSibling?.matches(".blank") ? before.previousSibling : before);
  }

  show(count) {
    const { trajectory } = this;
    const latest = trajectory.done(count) ? null : count - 1;
    const texts = new Map(trajectory.after(count).map(({ cell, text }) => [cell, text]));
    for (const [cell, mark] of this.marks) {
      spell(mark, texts.get(cell) ?? "");
      if (cell.event && texts.has(cell)) colour(mark, trajectory.tone(cell.number), cell.number === latest);
    }
    this.root.dataset.count = count;
    this.#showBlanks(trajectory.done(count));
    this.#keepReachable();
    this.#keepHeight();
    keepTip();
  }

  #chip(cell) {
    const chip = document.createElement("span");
    chip.className = "token";
    chip.tabIndex = -1;
    chip.setAttribute("role", "button");
    const tell = () => showTip(chip, cell, this.trajectory.events.length);
    chip.addEventListener("pointerenter", tell);
    chip.addEventListener("pointerleave", hideTip);
    chip.addEventListener("focus", () => {
      this.focused = chip;
      this.#keepReachable();
      tell();
    });
    chip.addEventListener("blur", hideTip);
    chip.addEventListener("click", () => this.picked(cell.number));
    return chip;
  }

  /** A blank is marked until something is in it. */
  #showBlanks(done) {
    let empty = false;
    for (const element of this.root.children) {
      if (element.className === "blank") element.hidden = done || !empty;
      else if (!element.hidden) empty = !element.firstElementChild;
    }
  }

  /** It never shrinks: a slider must not run away from the hand that moves it. */
  #keepHeight() {
    if (this.root.offsetHeight) this.root.style.minHeight = `${this.root.offsetHeight}px`;
  }

  /** The tab key leads to the token that had the focus last, or to the first. */
  #keepReachable() {
    const chips = this.#visible();
    const reached = chips.find((chip) => chip === this.focused) ?? chips[0];
    for (const chip of chips) chip.tabIndex = chip === reached ? 0 : -1;
  }

  #visible() {
    return [...this.root.querySelectorAll(":scope > :not([hidden]) > .token")];
  }

  #onKey(event) {
    const chips = this.#visible();
    const here = chips.indexOf(document.activeElement);
    const targets = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: chips.length - 1 };
    const next = chips[targets[event.key]];
    if (next) next.focus();
    else if (event.key === "Enter" || event.key === " ") chips[here]?.click();
    else return;
    event.preventDefault();
  }
}

function blank() {
  const mark = document.createElement("span");
  mark.className = "blank";
  mark.append("\u00a0".repeat(6));
  return mark;
}

// What is as it should be is left alone: a reader may have selected it, and a text may be long.

function spell(mark, text) {
  if (mark.text === text) return;
  mark.text = text;
  if (!mark.chip) return void (mark.element.textContent = text);
  mark.element.hidden = !text;
  const space = text.trim() ? text.match(/^\s*/)[0] : "";
  mark.element.firstChild.data = space;
  mark.chip.textContent = text.slice(space.length);
  // A button needs a name, and a token may be nothing but a space or a line end.
  if (text.trim()) mark.chip.removeAttribute("aria-label");
  else mark.chip.setAttribute("aria-label", "blank space");
}

function colour(mark, tone, latest) {
  if (mark.tone !== tone) mark.chip.style.setProperty("--t", tone);
  mark.tone = tone;
  mark.chip.classList.toggle("latest", latest);
}
