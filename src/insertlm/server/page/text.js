// The first tab: a text with blanks, filled in.

import { Player } from "./player.js";
import { Run, count } from "./run.js";

const EXAMPLES = {
  "Two blanks": [
    "Once upon a time, there was a little girl named Mia. She loved to play in the garden with her dog, Max. One sunny day, Mia lost her red ball. ___ Mia was very sad and started to cry.",
    "Max saw that Mia was sad. He wanted to help, so ___ He dug and dug until he saw something red. It was the ball! Max picked it up with his mouth and ran back to Mia as fast as he could.",
    "Mia was so happy. \"Thank you, Max! You are the best dog in the world,\" she said. They played with the red ball until the sun went down.",
  ].join("\n"),
  "A missing middle": "Tom and his dog went to the park. ___ In the end, they were tired and went home to sleep.",
  "The beginning": "___ “Thank you for helping me,” said the bird, and it flew up into the blue sky.",
  "A whole story": "___",
};
const OWN = "auto"; // what the model's recipe says

const $ = (selector) => document.querySelector(selector);
const form = $("#text-form");
const area = $("#text");
const seed = $("#seed");
const hints = $("#hints");
const words = $("#words");
const copyButton = $("#copy");
const player = new Player($("#panel-text .result"), (trajectory) => (copyButton.disabled = !trajectory.cells.length));
const run = new Run($("#panel-text"), $("#fill"), player);
let last = { text: "", question: "" };

/**
 * model(): the chosen model's name   guard(line, action): runs it and shows in the line what fails
 *
 * Returns what to call with a model of /v1/models when it is chosen.
 */
export function setUp(model, guard) {
  const fill = () => guard(run.problem, () => fillIn(model()));
  for (const [name, text] of Object.entries(EXAMPLES)) $(".examples").append(exampleButton(name, text));
  for (const slider of form.querySelectorAll("[type=range]")) setUpSlider(slider);
  area.value = Object.values(EXAMPLES)[0];
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (run.running) run.stop();
    else fill();
  });
  $("#another").addEventListener("click", () => {
    seed.value = Number(seed.value) + 1;
    if (form.reportValidity()) fill();
  });
  copyButton.addEventListener("click", () => copy(player.trajectory.text()));
  return ({ takes_hints }) => {
    hints.hidden = !takes_hints;
    words.disabled = !takes_hints; // or it would keep the form from being sent
  };
}

async function fillIn(model) {
  const question = { model, text: area.value, ...sliderValues(), words: wordCounts() };
  const answer = await run.go("v1/infill", { ...question, seed: seed.valueAsNumber });
  if (!answer) return;
  run.status.textContent = verdict(answer, JSON.stringify(question));
  last = { text: answer.text, question: JSON.stringify(question) };
}

function verdict(answer, question) {
  const told = [`${count(player.trajectory.events.length, "token")} by ${answer.model}.`];
  if (answer.note) told.push(`Not complete: ${answer.note}.`);
  if (question === last.question && answer.text === last.text)
    told.push("The same text again: a higher temperature brings others.");
  return told.join(" ");
}

function sliderValues() {
  const sliders = [...form.querySelectorAll("[type=range]")];
  return Object.fromEntries(sliders.map((slider) => [slider.id, isOwn(slider) ? null : Number(slider.value)]));
}

/** About how many words belong into every blank, or a list with one for each, or null. */
function wordCounts() {
  const counts = words.value.split(",").map((count) => (count.trim() ? Number(count) : null));
  return words.disabled || counts.every((count) => count === null) ? null : counts.length > 1 ? counts : counts[0];
}

/** The leftmost place of a slider leaves the choice to the model. */
function isOwn(slider) {
  return slider.value === slider.min;
}

function setUpSlider(slider) {
  const show = () => {
    const value = isOwn(slider) ? OWN : Number(slider.value).toFixed(2);
    form.querySelector(`output[for=${slider.id}]`).textContent = value;
    slider.setAttribute("aria-valuetext", isOwn(slider) ? "the model's own" : value);
  };
  slider.addEventListener("input", show);
  show();
}

function exampleButton(name, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.addEventListener("click", () => {
    area.value = text;
    area.focus();
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // the clipboard is closed to pages that come without encryption from another machine
  }
  run.status.textContent = "Copied.";
}

function copyBySelection(text) {
  const helper = document.createElement("textarea");
  helper.value = text;
  document.body.append(helper);
  helper.select();
  document.execCommand("copy");
  helper.remove();
  copyButton.focus();
}
