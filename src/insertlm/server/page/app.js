// The page: tabs, models, the key, and the one place where failures are shown.

import { ServerError, getJson, useKey } from "./api.js";
import * as graph from "./graph.js";
import * as text from "./text.js";

const TASKS = { text: "text", graph: "star" }; // by panel
const $ = (selector) => document.querySelector(selector);
const tabs = [...document.querySelectorAll("[role=tab]")];
const names = tabs.map((tab) => tab.id.replace("tab-", ""));
const chosen = { text: null, graph: null };
const waiting = new Map(); // what to do once there is a key, by the line in which it failed

/** Runs an action; what fails is shown in the line, and a missing key is asked for. */
async function guard(line, action) {
  try {
    await action();
  } catch (error) {
    line.textContent = error.message;
    if (!(error instanceof ServerError)) throw error;
    if (error.status === 401) askForKey(line, action);
  }
}

function askForKey(line, action) {
  waiting.set(line, action);
  $("#key-form").hidden = false;
  $("#key").focus();
}

$("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("#key").value);
  $("#key").value = "";
  $("#key-form").hidden = true;
  for (const [line, action] of waiting) {
    line.textContent = "";
    guard(line, action);
  }
  waiting.clear();
});

function choose(name) {
  for (const [i, tab] of tabs.entries()) {
    const selected = names[i] === name;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
    $(`#panel-${names[i]}`).hidden = !selected;
  }
  if (name === "graph") openGraph();
}

for (const [i, tab] of tabs.entries()) {
  tab.addEventListener("click", () => {
    history.replaceState(null, "", `#${names[i]}`);
    choose(names[i]);
  });
  tab.addEventListener("keydown", ({ key }) => {
    const turn = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (!turn) return;
    const next = tabs.at((i + turn) % tabs.length);
    next.focus();
    next.click();
  });
}

function showModels(models) {
  for (const [panel, task] of Object.entries(TASKS)) {
    const fitting = models.filter((model) => model.task === task);
    if (fitting.length) take(panel, fitting[0]);
    if (fitting.length > 1) $(`#panel-${panel} [data-model]`).replaceChildren(...modelChoice(panel, fitting));
    if (!fitting.length) $(`#panel-${panel} .problem`).textContent = `This server has no model of the task “${task}”.`;
  }
}

function take(panel, model) {
  chosen[panel] = model.id;
  if (panel === "text") offerFor(model);
}

function modelChoice(panel, fitting) {
  const label = document.createElement("label");
  const select = document.createElement("select");
  label.textContent = "Model";
  label.htmlFor = select.id = `model-${panel}`;
  select.append(...fitting.map((model) => new Option(model.id)));
  select.addEventListener("change", () => take(panel, fitting[select.selectedIndex]));
  return [label, select];
}

/** A server for graphs alone opens with graphs. */
function chooseFirst() {
  const able = names.filter((name) => chosen[name]);
  if (!location.hash && able.length && !chosen[names[0]]) choose(able[0]);
}

const offerFor = text.setUp(() => chosen.text, guard);
const openGraph = graph.setUp(() => chosen.graph, guard);
choose(names.find((name) => `#${name}` === location.hash) ?? names[0]);
guard($("[role=tabpanel]:not([hidden]) > .problem"), async () => {
  showModels((await getJson("v1/models")).data);
  chooseFirst();
});
