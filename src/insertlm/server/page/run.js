// One request at a time for a panel: its button starts and stops it, its player shows it, its lines tell how it went.

import { postEvents } from "./api.js";

export class Run {
  constructor(panel, button, player) {
    this.button = button;
    this.label = button.textContent.trim();
    this.player = player;
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
      if (error.name !== "AbortError") throw error;
      this.status.textContent = `Stopped after ${count(this.player.count, "token")}.`;
      return null;
    } finally {
      if (current()) this.#rest();
    }
  }

  async #follow(path, body, signal) {
    for await (const [name, data] of postEvents(path, body, signal)) {
      if (name === "start") this.player.start(data.cells.map((cell) => cell.text));
      else if (name === "insertion") this.player.insert(data);
      else if (name === "done") {
        await this.player.finish(data.pieces);
        return data;
      }
    }
  }

  #begin() {
    this.button.textContent = "Stop";
    this.problem.textContent = "";
    this.status.textContent = "";
  }

  #rest() {
    this.abort = null;
    this.button.textContent = this.label;
  }
}

export function count(number, name) {
  return `${number} ${name}${number === 1 ? "" : "s"}`;
}
