// The second tab: a star graph, solved.

import { getJson } from "./api.js";
import { Drawing } from "./drawing.js";
import { Player } from "./player.js";
import { Run } from "./run.js";

const $ = (selector) => document.querySelector(selector);
const form = $("#graph-form");
const seed = $("#graph-seed");
let drawing = null; // of the graph with the seed `drawn`
let drawn = null;
const player = new Player($("#panel-graph .result"), (trajectory, count) => drawing?.show(trajectory, count));
const run = new Run($("#panel-graph"), $("#solve"), player);

/** model(): the chosen model's name   guard(line, action): runs it and shows in the line what fails
 * Returns what to do when the tab is opened. */
export function setUp(model, guard) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (run.running) run.stop();
    else guard(run.problem, () => solve(model()));
  });
  const load = () => guard(run.problem, fetchGraph);
  seed.addEventListener("change", () => seed.checkValidity() && load());
  $("#next-graph").addEventListener("click", () => {
    seed.value = Number(seed.value) + 1;
    load();
  });
  return () => drawing || load();
}

async function fetchGraph() {
  run.stop();
  const graph = await getJson(`v1/graphs/example?seed=${seed.valueAsNumber}`);
  drawing = new Drawing($(".graph"), graph);
  drawn = seed.value;
  player.clear();
  run.problem.textContent = "";
  run.status.textContent = "";
}

async function solve(model) {
  if (drawn !== seed.value) await fetchGraph();
  const { graph } = drawing;
  const answer = await run.go("v1/solve", { model, prompt: graph.prompt, seed: 0 });
  if (!answer) return;
  const found = String(answer.nodes) === String(graph.path);
  drawing.judge(found, answer.nodes);
  run.status.textContent = found
    ? `The path, found in ${player.trajectory.events.length} insertions.`
    : "This is not the path.";
}
