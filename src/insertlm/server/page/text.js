// The first tab: a text with blanks, filled in.

import { getJson } from "./api.js";
import { Blanks } from "./blanks.js";
import { Player } from "./player.js";
import { Run, count } from "./run.js";
import { Settings } from "./settings.js";
import { asCurl, asLink, asPython, copy, fromLink } from "./share.js";

// For models whose folder brings no examples of their own (server/examples.py).
const GENERAL = [
  { name: "Two blanks", request: { text: "The old man ___, and then he ___ until the evening." } },
  { name: "A missing middle", request: { text: "It was raining when we left the house. ___ In the end we were glad to be home." } },
  { name: "Written on", request: { text: "Once upon a time ___" } },
];
const FORMS = { text: () => shownTexts.join("\n\n"), curl: asCurl, python: asPython, link: asLink };

const $ = (selector) => document.querySelector(selector);
const form = $("#text-form");
const area = $("#text");
const result = $("#panel-text .result");
const caption = result.querySelector(".caption");
const blanks = new Blanks($("#blanks"), area);
const settings = new Settings(form);
const player = new Player(result.querySelector(".player"));
const run = new Run($("#panel-text"), $("#fill"), player, result);
let shownTexts = [];
let last = {}; // the question that was answered last, without its seed, and the texts
let offered = ""; // the text that the page itself has put into the form

/**
 * model(): the chosen model's name   guard(line, action): runs it and shows in the line what fails
 *
 * Returns what to call with a model of /v1/models when it is chosen.
 */
export function setUp(model, guard) {
  const fill = () => guard(run.problem, () => fillIn(model()));
  area.addEventListener("input", noticeText);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  // A control that is folded away cannot say what is wrong with it.
  form.addEventListener("invalid", ({ target }) => target.closest("details")?.setAttribute("open", ""), true);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (run.running) run.stop();
    else fill();
  });
  $("#add-blank").addEventListener("click", addBlank);
  $("#another").addEventListener("click", () => {
    settings.seed.value = Number(settings.seed.value) + samples();
    if (form.reportValidity()) fill();
  });
  for (const button of result.querySelectorAll("[data-copy]"))
    button.addEventListener("click", () => copyAs(button, FORMS[button.dataset.copy](question(model()))));
  let linked = fromLink();
  return async (chosen) => {
    blanks.suit(chosen);
    settings.suit(chosen);
    const { examples } = await getJson(`v1/models/${encodeURIComponent(chosen.id)}/examples`);
    if (model() !== chosen.id) return; // the reader has gone on to another
    offer(examples?.length ? examples : GENERAL, fill);
    if (linked) {
      ask(linked);
      linked = null;
      fill();
    } else if (area.value === offered) open(examples?.[0] ?? GENERAL[0], chosen.id);
  };
}

/** The request that the form stands for. */
function question(model) {
  const many = samples();
  return { model, ...blanks.asked, ...(many > 1 && { samples: many }), ...settings.asked };
}

function samples() {
  return Number(form.elements.samples.value);
}

/** Puts a request into the form. */
function ask(request) {
  form.elements.samples.value = ["2", "3", "4"].includes(String(request.samples)) ? request.samples : 1;
  settings.asked = request;
  blanks.asked = request;
  noticeText();
}

async function fillIn(model) {
  const body = question(model);
  caption.textContent = "";
  const answer = await run.go("v1/infill", body);
  if (answer) tell(answer, body);
}

function tell(answer, body) {
  const texts = answer.samples ?? [answer];
  describe(texts, body.seed);
  const { seed, ...rest } = body;
  const now = { question: JSON.stringify(rest), texts: JSON.stringify(texts.map(({ text }) => text)) };
  const told = [`${count(player.shown, "token")} by ${answer.model} in ${answer.seconds.toFixed(1)} s.`];
  if (now.question === last.question && now.texts === last.texts)
    told.push("The same again: more daring (under More controls) brings others.");
  run.status.replaceChildren(told.join(" "), unseen(spoken(texts)));
  last = now;
}

/** At every text: what ended it, if not the model; and, if there are several, its seed and a button that copies it. */
function describe(texts, seed) {
  shownTexts = texts.map(({ text }) => text);
  for (const [number, { element }] of player.lanes.entries()) {
    const { text, note } = texts[number];
    element.querySelector(".title span").textContent = `Version ${number + 1}, seed ${seed + number}`;
    const button = element.querySelector(".title button");
    button.hidden = false;
    button.setAttribute("aria-label", `Copy version ${number + 1}`);
    button.addEventListener("click", () => copyAs(button, text));
    const notes = [...ranks(texts[number].probabilities), ...(note ? [`Not complete: ${note}.`] : [])];
    element.querySelector(".notes").replaceChildren(...notes.map(line));
  }
  result.querySelector(".share").hidden = false;
}

/** How likely each choice of a blank was. */
function ranks(probabilities = {}) {
  const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
  return Object.entries(probabilities).map(([name, choices]) => {
    const each = Object.entries(choices).map(([choice, share]) => `${choice} ${percent(share)}`);
    return `${name.replace(/^blank_(\d+)$/, "Blank $1")}: ${each.join(", ")}`;
  });
}

function line(text) {
  const element = document.createElement("p");
  element.textContent = text;
  return element;
}

/** What a screen reader says: the fills alone, since the rest is known. */
function spoken(texts) {
  const each = texts.map(({ fills }) => fills.map((fill) => fill.trim() || "nothing").join("; "));
  return texts.length > 1 ? each.map((fills, number) => ` Version ${number + 1}: ${fills}.`).join("") : ` ${each[0]}`;
}

function unseen(text) {
  const element = document.createElement("span");
  element.className = "unseen";
  element.textContent = text;
  return element;
}

// --- Examples

function offer(examples, fill) {
  $(".examples").replaceChildren("Try", ...examples.map((example) => exampleButton(example, fill)));
}

function exampleButton({ name, request }, fill) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain";
  button.textContent = name;
  button.addEventListener("click", () => {
    ask(request);
    offered = area.value;
    fill();
  });
  return button;
}

/** The page as it opens: with an example, which plays if it was written beforehand. */
function open({ request, written }, model) {
  ask(request);
  offered = area.value;
  result.querySelector(".share").hidden = true;
  player.clear();
  caption.textContent = "";
  if (!written) return;
  caption.textContent = `An example, as ${model} wrote it. Change the text, and press “Fill in”.`;
  player.start(written.cells, written.texts.length);
  for (const { events } of written.texts) for (const event of events) player.insert(event);
  player.finish(written.texts);
  describe(written.texts, request.seed ?? 0);
  // On a phone it stands below the form, so it plays when the reader gets there, unless another text is there by then.
  if (result.getBoundingClientRect().top > innerHeight) whenSeen(result, () => caption.textContent && player.again());
}

function whenSeen(element, action) {
  const observer = new IntersectionObserver(([{ isIntersecting }]) => {
    if (!isIntersecting) return;
    observer.disconnect();
    action();
  });
  observer.observe(element);
}

// --- Text and clipboard

function noticeText() {
  blanks.update();
  $("#no-blank").hidden = blanks.count > 0 || !area.value;
}

/** Where the caret is, or in place of what is selected. */
function addBlank() {
  const { selectionStart: start, selectionEnd: end, value } = area;
  const before = value && start && !/\s/.test(value[start - 1]) ? " ___" : "___";
  const after = /^\w/.test(value.slice(end)) ? " " : "";
  area.focus();
  area.setRangeText(before + after, start, end, "end");
  noticeText();
}

async function copyAs(button, text) {
  await copy(text);
  const label = button.textContent;
  run.status.textContent = "Copied.";
  button.textContent = "Copied";
  button.disabled = true;
  setTimeout(() => {
    button.textContent = label;
    button.disabled = false;
  }, 1200);
}
