// The second tab: a star graph, solved.

import { getJson } from "./api.js";
import { Drawing } from "./drawing.js";
import { Player } from "./player.js";
import { Run } from "./run.js";

const $ = (selector) => document.querySelector(selector);
const form = $("#graph-form");
const seed = $("#graph-seed");
let drawing = null;
let wanted = { seed: null, drawn: null }; // the graph that is shown or on its way, and a promise that it is shown
const player = new Player($("#panel-graph .result"), (trajectory, count) => drawing?.show(trajectory, count));
const run = new Run($("#panel-graph"), $("#solve"), player, $(".graph"));

/** model(): the chosen model's name   guard(line, action): runs it and shows in the line what fails
 * Returns what to do when the tab is opened. */
export function setUp(model, guard) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (run.running) run.stop();
    else guard(run.problem, () => solve(model()));
  });
  const load = () => guard(run.problem, () => graphDrawn(model()));
  seed.addEventListener("change", () => seed.checkValidity() && load());
  $("#next-graph").addEventListener("click", () => {
    seed.value = Number(seed.value) + 1;
    load();
  });
  return load;
}

/** Once the graph of the seed is there. */
function graphDrawn(model) {
  if (wanted.seed !== seed.value) wanted = { seed: seed.value, drawn: draw(seed.value, model) };
  return wanted.drawn;
}

async function draw(number, model) {
  run.stop();
  const query = new URLSearchParams({ seed: number, ...(model && { model }) });
  let graph;
  try {
    graph = await getJson(`v1/graphs/example?${query}`);
  } catch (error) {
    wanted = { seed: null, drawn: null };
    throw error;
  }
  if (number !== wanted.seed) return; // the reader has gone on to another
  drawing = new Drawing($(".graph"), graph);
  player.clear();
  run.problem.textContent = "";
  run.status.textContent = "";
}

async function solve(model) {
  await graphDrawn(model);
  const { graph } = drawing;
  const answer = await run.go("v1/solve", { model, prompt: graph.prompt, seed: 0 });
  if (!answer) return;
  const found = String(answer.nodes) === String(graph.path);
  drawing.judge(found, answer.nodes);
  run.status.textContent = found
    ? `The path, found in ${player.total} insertions.`
    : "This is not the path.";
}
