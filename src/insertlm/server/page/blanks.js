// The blanks of the text: where they are, and a row of controls for each.
//
// A text can say itself what belongs into a blank, {day|Monday|Friday}: such a blank is shown and has no controls.

// As in insertlm/text/blanks.py and fields.py: underscores, or a brace, a name and what may be there, each with the
// backslashes before it.
const UNDERSCORES = /(?<!\\)(?<slashes>\\*)(?<blank>_+)/gu;
const FIELD = /(?<![\\{])(?<slashes>\\*)(?<blank>\{\p{L}(?:(?!___)[\p{L}\p{N}_])*(?:\|[^{}\n]*|:(?=\d|about |up to |\/)[^\n]*?)?\})/gu;
const AROUND = 28; // characters of the text shown on either side of a blank

/** {start, end, plain} of every blank; plain: it is nothing but underscores */
export function findBlanks(text) {
  const runs = [...text.matchAll(UNDERSCORES)].map((match) => {
    const length = match.groups.blank.length - (match.groups.slashes.length % 2); // one that a backslash makes plain
    const end = match.index + match[0].length;
    return length >= 3 && { start: end - length, end, plain: true };
  });
  const fields = [...text.matchAll(FIELD)].map((match) => {
    const { slashes, blank } = match.groups;
    const end = match.index + match[0].length;
    return slashes.length % 2 === 0 && { start: end - blank.length, end, plain: false };
  });
  const outside = (run) => !fields.some((field) => field && field.start < run.end && run.start < field.end);
  return [...runs.filter((run) => run && outside(run)), ...fields.filter(Boolean)].sort((a, b) => a.start - b.start);
}

export class Blanks {
  /** root: a fieldset with a list   area: the text */
  constructor(root, area) {
    this.root = root;
    this.list = root.querySelector("ol");
    this.area = area;
    this.blanks = [];
    this.rows = []; // those of blanks that are gone are kept: a reader may bring them back
    this.model = {};
  }

  get count() {
    return this.blanks.length;
  }

  /** model: of /v1/models */
  suit(model) {
    this.model = model;
    this.update();
  }

  /** After a change of the text. */
  update() {
    this.blanks = findBlanks(this.area.value);
    while (this.rows.length < this.count) this.rows.push(new Row(this.rows.length + 1));
    const shown = this.rows.slice(0, this.count);
    for (const [number, row] of shown.entries()) row.show(this.area.value, this.blanks[number], this.model);
    if (this.list.children.length !== shown.length) this.list.replaceChildren(...shown.map((row) => row.element));
    this.root.hidden = !this.count || !(this.model.takes_hints || this.model.bounds_tokens);
  }

  /** The fields of a request that these controls and the text stand for. */
  get asked() {
    const rows = this.rows.slice(0, this.count);
    const lengths = rows.map((row) => row.length);
    const choices = {};
    let text = this.area.value;
    for (const number of [...rows.keys()].reverse()) {
      const { start, end } = this.blanks[number];
      if (!rows[number].choices.length) continue;
      const name = `blank_${number + 1}`;
      text = `${text.slice(0, start)}{${name}}${text.slice(end)}`;
      choices[name] = rows[number].choices;
    }
    return {
      text,
      ...(Object.keys(choices).length && { choices }),
      ...(lengths.some((length) => length !== null) && { [this.model.takes_hints ? "words" : "max_length"]: lengths }),
    };
  }

  /** A request's text, and its lengths: one number or one for each blank. */
  set asked({ text, words, max_length, choices = {} }) {
    this.area.value = text;
    for (const row of this.rows) row.clear();
    this.#takeBack(choices);
    this.update();
    const lengths = words ?? max_length ?? null;
    for (const [number, row] of this.rows.entries()) row.length = Array.isArray(lengths) ? lengths[number] : lengths;
  }

  /** Choices that came from controls go back there, and into the text the underscores. */
  #takeBack(choices) {
    const blanks = findBlanks(this.area.value);
    for (const [number, { start, end }] of [...blanks.entries()].reverse()) {
      const name = `blank_${number + 1}`;
      const { value } = this.area;
      if (!Array.isArray(choices[name]) || value.slice(start, end) !== `{${name}}`) continue;
      this.area.value = `${value.slice(0, start)}___${value.slice(end)}`;
      while (this.rows.length <= number) this.rows.push(new Row(this.rows.length + 1));
      this.rows[number].choices = choices[name];
    }
  }
}

/** The controls of one blank. */
class Row {
  constructor(number) {
    this.element = document.querySelector("#blank").content.firstElementChild.cloneNode(true);
    this.where = this.element.querySelector(".where");
    this.lengths = this.element.querySelector(".length");
    this.lengthField = this.lengths.querySelector("input");
    this.list = this.element.querySelector(".choices");
    this.listField = this.list.querySelector("input");
    this.number = number;
    this.listField.addEventListener("input", () => this.#suitOneAnother());
  }

  /** blank: of findBlanks   model: of /v1/models */
  show(text, { start, end, plain }, { takes_hints: hints, left_to_right: leftToRight }) {
    const said = document.createElement(plain ? "b" : "code");
    said.textContent = plain ? "" : text.slice(start, end);
    this.where.replaceChildren(before(text.slice(0, start)), said, after(text.slice(end)));
    const [about, unit] = hints ? ["about", "words"] : ["up to", "tokens"];
    this.lengths.querySelector(".about").textContent = about;
    this.lengths.querySelector(".unit").textContent = unit;
    this.lengthField.setAttribute("aria-label", `Blank ${this.number}: ${about} how many ${unit}`);
    this.listField.setAttribute("aria-label", `Blank ${this.number}: one of these, with commas between them`);
    this.lengths.hidden = !plain;
    this.list.hidden = !plain || !leftToRight;
    this.#suitOneAnother();
  }

  clear() {
    this.length = null;
    this.choices = [];
  }

  get length() {
    const { value, valueAsNumber, disabled } = this.lengthField;
    return value === "" || disabled || this.lengths.hidden ? null : valueAsNumber;
  }

  set length(number) {
    this.lengthField.value = number ?? "";
  }

  get choices() {
    const parts = this.list.hidden ? [] : this.listField.value.split(",").map((part) => part.trim());
    return [...new Set(parts.filter(Boolean))];
  }

  set choices(texts) {
    this.listField.value = texts.join(", ");
  }

  /** A list says how long a blank is. */
  #suitOneAnother() {
    this.lengthField.disabled = this.choices.length > 0;
  }
}

// Around a blank, in whole words where there are any.

function before(text) {
  const line = text.replace(/\s+/g, " ");
  return line.length > AROUND ? `… ${line.slice(-AROUND).replace(/^\S* /, "")}` : line;
}

function after(text) {
  const line = text.replace(/\s+/g, " ");
  return line.length > AROUND ? `${line.slice(0, AROUND).replace(/ \S*$/, "")} …` : line;
}
