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

  /** pieces: the finished text, part by part. Its cells take over from them what they spell in the end. */
  finish(pieces) {
    const spelt = new Map(); // by the number of the insertion
    const before = new Map(); // what is given between it and the one before it
    let given = "";
    for (const { text, order } of pieces) {
      if (order === null) given += text;
      else {
        spelt.set(order, text);
        before.set(order, given);
        given = "";
      }
    }
    let open = null; // the first given cell since an inserted one: it takes all that is given up to the next
    for (const cell of this.cells) {
      cell.final = spelt.get(cell.number) ?? ""; // half a letter spells nothing: all of it belongs to the other half
      if (!cell.event) open ??= cell;
      else if (spelt.has(cell.number)) {
        if (open) open.final = before.get(cell.number);
        open = null;
      }
      // A token may bring a space that was given in the end, and still needs it where it stands alone.
      if (cell.event && cell.text !== ` ${cell.final}`) cell.text = cell.final;
    }
    if (open) open.final = given;
    this.ended = true;
  }

  /** Whether nothing is missing after so many events. */
  done(count) {
    return this.ended && count >= this.events.length;
  }

  /** The cells that are there after so many events, each with the text to show for it. */
  after(count) {
    const there = this.cells.filter((cell) => cell.number < count);
    return there.map((cell) => ({ cell, text: this.done(count) ? cell.final : cell.text }));
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
