// A text as it comes about: what was given, and the events that insert into it.

const SOFT = 12; // while it is being written, the first few tokens are all light

export class Trajectory {
  /** given: the texts of the given cells, between which tokens are inserted */
  constructor(given) {
    this.cells = given.map((text) => ({ text, event: null, number: -1 }));
    this.events = [];
    this.ended = false;
  }

  /** Returns the new cell and the one it comes before. */
  insert(event) {
    const cell = { text: event.text, event, number: this.events.length };
    const next = this.cells[event.at] ?? null;
    this.cells.splice(event.at, 0, cell);
    this.events.push(event);
    return [cell, next];
  }

  /** A token alone may spell less than in its place: half a letter, or a space that was given already. */
  finish(pieces) {
    this.ended = true;
    const spelt = new Map(pieces.map((piece) => [piece.order, piece.text]));
    for (const cell of this.cells) if (cell.event) cell.text = spelt.get(cell.number) ?? "";
  }

  /** The cells that are there after so many events, each with the text to show for it. */
  after(count) {
    const shown = [];
    const partial = !this.ended || count < this.events.length;
    for (const cell of this.cells) {
      if (cell.number >= count) continue;
      const before = shown.at(-1)?.cell;
      // While others are missing, a token may stand behind a given space and bring its own.
      const doubled = partial && cell.event && before && !before.event && before.text.endsWith(" ");
      shown.push({ cell, text: doubled ? cell.text.replace(/^ /, "") : cell.text });
    }
    return shown;
  }

  /** How dark a token is by its number, from 0 for the first to 1 for the last. */
  tone(number) {
    return number / Math.max(this.events.length - 1, this.ended ? 1 : SOFT);
  }

  text(count = this.events.length) {
    return this.after(count)
      .map(({ text }) => text)
      .join("");
  }
}
