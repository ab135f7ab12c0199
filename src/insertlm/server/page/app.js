// The page: tabs, models, the key, and the one place where failures are shown.

import { ServerError, getJson, hasKey, useKey } from "./api.js";
import * as graph from "./graph.js";
import { fromLink } from "./share.js";
import * as filling from "./text.js";

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
    if (error.status === 401) return askForKey(line, action);
    line.textContent = error.message;
    if (!(error instanceof ServerError)) throw error;
  }
}

// --- The key

const keyForm = $("#key-form");
const keyField = $("#key");
const keyProblem = $("#key-problem");

function askForKey(line, action) {
  waiting.set(line, action);
  keyForm.hidden = false;
  if (hasKey()) refuseKey("This is not the key of this server.");
  keyField.focus();
}

function refuseKey(why) {
  keyProblem.textContent = why;
  if (why) keyField.setAttribute("aria-invalid", true);
  else keyField.removeAttribute("aria-invalid");
}

keyField.addEventListener("input", () => refuseKey(""));
keyForm.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(keyField.value);
  keyField.select();
  refuseKey("");
  keyForm.hidden = true; // it comes back if the key is wrong
  const actions = [...waiting];
  waiting.clear();
  for (const [line, action] of actions) guard(line, action);
});

// --- Tabs

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

// --- Models

async function showModels(models) {
  const wanted = fromLink()?.model;
  const fitting = Object.entries(TASKS).map(([panel, task]) => [panel, models.filter((model) => model.task === task)]);
  const able = fitting.filter(([, some]) => some.length);
  const firsts = able.map(([panel, some]) => [panel, some.find(({ id }) => id === wanted) ?? some[0], some]);
  for (const [panel, some] of fitting)
    if (!some.length) $(`#panel-${panel} .problem`).textContent = `This server has no model of the task “${TASKS[panel]}”.`;
  for (const [panel, first] of firsts) chosen[panel] = first.id;
  chooseFirst();
  await Promise.all(firsts.map((each) => take(...each)));
}

/** fitting: the models to choose from */
async function take(panel, model, fitting) {
  chosen[panel] = model.id;
  showModel($(`#panel-${panel} .model`), panel, model, fitting);
  if (panel === "text") await offerFor(model);
}

function showModel(root, panel, model, fitting) {
  const select = root.querySelector("select");
  const name = fitting.length > 1 ? (select ?? modelChoice(panel, fitting)) : text("b", model.id);
  const about = text("span", model.about ?? "");
  const kind = model.left_to_right ? "fills each blank from left to right" : "inserts words in any order";
  const facts = text("small", `${size(model.parameters)} parameters, ${kind}`);
  if (!select) root.replaceChildren(name);
  root.replaceChildren(root.firstElementChild, about, facts);
}

function modelChoice(panel, fitting) {
  const label = text("label", "Model ");
  const select = document.createElement("select");
  select.append(...fitting.map((model) => new Option(model.id)));
  select.value = chosen[panel];
  select.addEventListener("change", () =>
    guard($(`#panel-${panel} .problem`), () => take(panel, fitting[select.selectedIndex], fitting)),
  );
  label.append(select);
  return label;
}

/** 27.3 million, in two digits. */
function size(number) {
  const [share, unit] = number < 1e6 ? [1e3, "thousand"] : [1e6, "million"];
  return number < 1e3 ? `${number}` : `${Number((number / share).toPrecision(2))} ${unit}`;
}

function text(name, content) {
  const element = document.createElement(name);
  element.textContent = content;
  return element;
}

/** A server for graphs alone opens with graphs. */
function chooseFirst() {
  const able = names.filter((name) => chosen[name]);
  if (!location.hash && able.length && !chosen[names[0]]) choose(able[0]);
}

const offerFor = filling.setUp(() => chosen.text, guard);
const openGraph = graph.setUp(() => chosen.graph, guard);
const hash = location.hash.split("?")[0]; // behind it may be a request, see share.js
choose(names.find((name) => `#${name}` === hash) ?? names[0]);
guard($("[role=tabpanel]:not([hidden]) > .problem"), async () => showModels((await getJson("v1/models")).data));
