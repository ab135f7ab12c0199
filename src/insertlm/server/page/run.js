// One request at a time for a panel: its button starts and stops it, its player shows it, its lines tell how it went.

import { postEvents } from "./api.js";

const ROOM = 90; // pixels, for a few lines more, or the bar of buttons on a phone
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Run {
  /** stage: the element in which the reader watches what happens */
  constructor(panel, button, player, stage) {
    this.button = button;
    this.label = button.textContent.trim();
    this.player = player;
    this.stage = stage;
    this.problem = panel.querySelector(".problem");
    this.status = panel.querySelector(".status");
    this.abort = null;
  }

  get running() {
    return this.abort !== null;
  }

  /** Ends the request, if it still runs, and the walk of the picture. */
  stop() {
    this.abort?.abort();
    this.player.end();
  }

  /** Returns the finished answer once it is shown, or null if it was stopped or another request took its place. */
  async go(path, body) {
    this.stop();
    const abort = (this.abort = new AbortController());
    const current = () => this.abort === abort;
    this.#begin();
    try {
      const answer = await this.#follow(path, body, abort.signal);
      return current() ? answer : null;
    } catch (error) {
      if (!current()) return null;
      this.player.end();
      this.status.textContent = "";
      if (error.name !== "AbortError") throw error;
      this.status.textContent = `Stopped after ${count(this.started ? this.player.shown : 0, "token")}.`;
      return null;
    } finally {
      if (current()) this.#rest();
    }
  }

  async #follow(path, body, signal) {
    const begun = performance.now();
    for await (const [name, data] of postEvents(path, body, signal)) {
      if (name === "start") {
        this.started = true;
        const given = data.cells.map((cell) => cell.text);
        this.player.start(given, body.samples);
        this.#bringIntoView();
      } else if (name === "insertion") this.player.insert(data);
      else if (name === "done") {
        const seconds = (performance.now() - begun) / 1000;
        await this.player.finish(data.samples ?? [data]);
        return { ...data, seconds };
      }
    }
  }

  /** Scrolls to where it happens, unless that is in view and has room to grow. */
  #bringIntoView() {
    const { top, bottom } = this.stage.getBoundingClientRect();
    if (top >= 0 && bottom + ROOM <= innerHeight) return;
    this.stage.scrollIntoView({ block: "start", behavior: calm.matches ? "auto" : "smooth" });
  }

  #begin() {
    this.started = false;
    this.button.textContent = "Stop";
    this.problem.textContent = "";
    this.status.textContent = "Writing …";
    this.stage.setAttribute("aria-busy", true);
  }

  #rest() {
    this.abort = null;
    this.button.textContent = this.label;
    this.stage.removeAttribute("aria-busy");
  }
}

export function count(number, name) {
  return `${number} ${name}${number === 1 ? "" : "s"}`;
}
