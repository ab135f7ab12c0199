// A star graph as SVG: arms that lead to the junction on one side, arms that leave it on the other, an arm to a line.
//
// On narrow screens the picture stands upright. Nodes take the colour of their first insertion; an edge is drawn strong
// once its two nodes stand side by side in the text, and dashed if the graph has no such edge.

const HOP = 50; // from node to node along an arm
const LINE = 46; // from arm to arm
const RADIUS = 16;
const narrow = matchMedia("(max-width: 44rem)");

export class Drawing {
  constructor(root, graph) {
    this.root = root;
    this.graph = graph;
    this.last = [];
    this.#draw();
    narrow.onchange = () => {
      this.#draw();
      if (this.last.length) this.show(...this.last);
    };
  }

  /** The path as it is after so many insertions. */
  show(trajectory, count) {
    this.last = [trajectory, count];
    const cells = trajectory.after(count).map(({ cell }) => ({ node: Number(cell.text), number: cell.number }));
    const done = trajectory.done(count);
    const first = new Map();
    for (const { node, number } of cells) first.set(node, Math.min(number, first.get(node) ?? number));
    for (const [node, element] of this.nodes) {
      element.classList.toggle("on", first.has(node));
      if (first.has(node)) element.style.setProperty("--t", trajectory.tone(first.get(node)));
    }
    for (const element of this.lines.values()) element.classList.remove("on");
    this.extra.replaceChildren();
    for (let i = 1; i < cells.length; i += 1) {
      const tone = trajectory.tone(Math.max(cells[i - 1].number, cells[i].number));
      this.#step(cells[i - 1].node, cells[i].node, tone, done);
    }
  }

  judge(found, nodes) {
    this.svg.setAttribute("aria-label", `${this.label} ${found ? "Path" : "Not the path"}: ${nodes.join(", ")}.`);
  }

  #step(from, to, tone, done) {
    const line = this.lines.get(`${from},${to}`);
    if (line) {
      line.classList.add("on");
      line.style.setProperty("--t", tone);
    } else if (done && from !== to && this.places.has(from) && this.places.has(to)) {
      this.extra.append(make("path", { class: "wrong", d: curve(this.places.get(from), this.places.get(to)) }));
    }
  }

  #draw() {
    const { edges, source, goal } = this.graph;
    this.places = layOut(edges, narrow.matches);
    const points = [...this.places.values()];
    const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
    const [left, top] = [Math.min(...xs) - 1.6 * RADIUS, Math.min(...ys) - 1.6 * RADIUS];
    const [width, height] = [Math.max(...xs) + 1.6 * RADIUS - left, Math.max(...ys) + 1.6 * RADIUS - top];
    this.label = `A graph of ${points.length} nodes, from ${source} to ${goal}.`;
    this.svg = make("svg", { viewBox: `${left} ${top} ${width} ${height}`, role: "img", "aria-label": this.label });
    this.svg.style.maxWidth = `${width}px`;
    this.lines = new Map(edges.map(([a, b]) => [`${a},${b}`, this.#edge(a, b)]));
    this.extra = make("g");
    this.nodes = new Map([...this.places].map(([node, place]) => [node, this.#node(node, place, source, goal)]));
    this.svg.append(...this.lines.values(), this.extra, ...this.nodes.values());
    this.root.replaceChildren(this.svg);
  }

  #edge(from, to) {
    const [[x1, y1], [x2, y2]] = [this.places.get(from), this.places.get(to)];
    const [dx, dy] = narrow.matches ? [2 * (x2 - x1), y2 - y1] : [x2 - x1, 2 * (y2 - y1)]; // direction in the middle
    const turn = `rotate(${(180 / Math.PI) * Math.atan2(dy, dx)})`;
    const edge = make("g", { class: "edge" });
    edge.append(
      make("path", { d: curve([x1, y1], [x2, y2], narrow.matches) }),
      make("path", {
        class: "tip",
        d: "M-2.5 -4L2 0L-2.5 4",
        transform: `translate(${(x1 + x2) / 2} ${(y1 + y2) / 2}) ${turn}`,
      }),
    );
    return edge;
  }

  #node(node, [x, y], source, goal) {
    const kind = node === source ? "source" : node === goal ? "goal" : "inner";
    const group = make("g", { class: `node ${kind}`, transform: `translate(${x} ${y})` });
    const number = make("text", { y: 5 });
    number.textContent = node;
    group.append(shape(kind), number);
    return group;
  }
}

/** Where each node goes. Arms in the order of their edges, so that the picture gives nothing away. */
function layOut(edges, upright) {
  const [after, before] = [new Map(), new Map()];
  for (const [a, b] of edges) {
    after.set(a, [...(after.get(a) ?? []), b]);
    before.set(b, [...(before.get(b) ?? []), a]);
  }
  // All paths leave the junction. With two paths, others may have as many edges as it has, but not as many ways out.
  const exits = (node) => after.get(node).length;
  const junction = [...after.keys()].reduce((best, node) => (exits(node) > exits(best) ? node : best));
  const places = new Map([[junction, [0, 0]]]);
  for (const [following, side] of [
    [after, 1],
    [before, -1],
  ]) {
    const starts = following.get(junction) ?? [];
    for (const [line, start] of starts.entries()) {
      const across = LINE * (line - (starts.length - 1) / 2);
      let hop = 1.8;
      for (let node = start; node !== undefined && !places.has(node); node = following.get(node)?.[0]) {
        const along = side * HOP * hop;
        places.set(node, upright ? [across, along] : [along, across]);
        hop += 1;
      }
    }
  }
  return places;
}

/** From the rim of one node to the rim of another. */
function curve([x1, y1], [x2, y2], upright = false) {
  const [dx, dy] = [x2 - x1, y2 - y1];
  const bend = upright ? [0, dy / 2] : [dx / 2, 0];
  return `M${x1} ${y1}C${x1 + bend[0]} ${y1 + bend[1]} ${x2 - bend[0]} ${y2 - bend[1]} ${x2} ${y2}`;
}

function shape(kind) {
  const r = RADIUS;
  if (kind === "source") return make("rect", { x: -r, y: -r, width: 2 * r, height: 2 * r, rx: 4 });
  if (kind === "goal") return make("path", { d: `M0 ${-1.25 * r}L${1.25 * r} 0L0 ${1.25 * r}L${-1.25 * r} 0Z` });
  return make("circle", { r });
}

function make(name, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
