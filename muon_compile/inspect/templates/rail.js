// A graph's nodes: read from their columns, listed, and drawn as rails from each value to its users.

const MOST_RAILS = 12;
const RAIL = 11;

class Graph {
  constructor(kind, columns) {
    Object.assign(this, { kind, columns, size: columns.name.length });
    this.homes = new Map(columns.name.map((name, index) => [name, index]));
    this.users = columns.name.map(() => []);
    columns.inputs.forEach((inputs, index) => new Set(inputs).forEach((input) => this.users[input].push(index)));
  }

  name(index) {
    return this.columns.name[index];
  }

  // One of op, target, shape, dtype, phase.
  text(column, index) {
    return this.columns.texts[this.columns[column][index]];
  }

  // A call's operator in short, without its namespace and its most common overloads.
  target(index) {
    if (!this.computes(index)) return this.text("op", index);
    return this.text("target", index)
      .replace(/^(torch\.ops\.)?(aten|_c10d_functional|muon_compile)\./, "")
      .replace(/\.(default|Tensor)$/, "");
  }

  // The parameter that an input is, or is the gradient of; null for all others. Their names are lower.trace's.
  param(index, plan) {
    const found = this.computes(index) ? null : /^(param|grad)_(\d+)$/.exec(this.name(index));
    const param = found && plan.params[Number(found[2])];
    return param ? { what: found[1] === "grad" ? "gradient of" : "", name: param[0] } : null;
  }

  // What a node is: a call's operator, or what an input holds.
  about(index, plan) {
    const param = this.param(index, plan);
    return param ? `${param.what} ${param.name}`.trim() : this.target(index);
  }

  computes(index) {
    return !["placeholder", "get_attr", "output"].includes(this.text("op", index));
  }

  type(index) {
    // As torch writes it: bf16[12, 2304, 768].
    return this.text("dtype", index).replace(/^(b?)float(\d+)$/, "$1f$2") + this.text("shape", index);
  }
}

// For every node of a subgraph, in its order: {node, rail, through: rails that pass, from: rails of its inputs,
// ends: rails that stop here, starts: whether anything of the subgraph uses it}.
function rails(graph, nodes) {
  const place = new Map(nodes.map((node, at) => [node, at]));
  const lastUse = nodes.map((node) => Math.max(-1, ...graph.users[node].map((user) => place.get(user) ?? -1)));
  const busy = [];
  const rows = nodes.map((node, at) => {
    const inputs = [...new Set(graph.columns.inputs[node])]
      .filter((input) => place.has(input))
      .map((input) => place.get(input));
    const from = inputs.map((input) => busy.findIndex((one) => one === input)).filter((rail) => rail >= 0);
    const ends = from.filter((rail) => lastUse[busy[rail]] === at);
    const before = busy
      .map((one, rail) => (one === null || one === undefined ? null : rail))
      .filter((rail) => rail !== null);
    ends.forEach((rail) => (busy[rail] = null));
    let rail = ends.length ? Math.min(...ends) : busy.findIndex((one) => one === null || one === undefined);
    if (rail < 0) rail = busy.length;
    const starts = lastUse[at] > at;
    busy[rail] = starts ? at : null;
    return { node, rail, through: before.filter((other) => !ends.includes(other)), from, ends, starts };
  });
  return rows;
}

function drawRail(row, width) {
  const x = (rail) => 8 + Math.min(rail, MOST_RAILS - 1) * RAIL;
  const half = ROW / 2;
  const lines = row.through.map((rail) => svg("path", { d: `M${x(rail)} 0V${ROW}` }));
  for (const rail of row.from)
    lines.push(svg("path", { d: `M${x(rail)} 0C${x(rail)} ${half} ${x(row.rail)} 0 ${x(row.rail)} ${half}` }));
  if (row.starts) lines.push(svg("path", { d: `M${x(row.rail)} ${half}V${ROW}` }));
  return svg(
    "svg",
    { class: "rail", width, height: ROW, "aria-hidden": "true" },
    lines,
    svg("circle", { cx: x(row.rail), cy: half, r: 3.5 }),
  );
}

// The nodes of a bucket that compute something, in order, with rails; its inputs are counted.
function subgraph(graph, index, open) {
  const mine = graph.columns.name.map((_, node) => node).filter((node) => graph.columns.buckets[node].includes(index));
  const nodes = mine.filter((node) => graph.computes(node));
  if (!nodes.length) return h("p", { class: "muted" }, "No node of this graph is the bucket's.");
  const rows = rails(graph, nodes);
  const used = Math.min(MOST_RAILS, 1 + Math.max(...rows.map((row) => row.rail)));
  const width = 12 + used * RAIL;
  const list = new Table({
    label: `Nodes of the bucket: ${GRAPH_NAMES[graph.kind] || graph.kind}`,
    height: 420,
    minWidth: 380,
    rows,
    open: (row) => open(row.node),
    columns: [
      { name: "", width: `${width}px`, cell: (row) => drawRail(row, width) },
      { name: "Node", width: "minmax(110px, 1fr)", mono: true, cell: (row) => graph.target(row.node) },
      { name: "Result", width: "minmax(110px, 1.2fr)", mono: true, cell: (row) => graph.type(row.node) },
      { name: "Phase", width: "98px", cell: (row) => graph.text("phase", row.node) },
    ],
  });
  list.node.classList.add("rails");
  const others = mine.length - nodes.length;
  return h(
    "div",
    {},
    h(
      "p",
      { class: "muted" },
      `${plural(nodes.length, "operator")}, ${plural(others, "input")}; a line runs from each result to its users.`,
    ),
    list.node,
  );
}

// All nodes of a graph that fit the filter, as a table with chips for its phases.
function graphTable(graph, plan, open) {
  const state = { phase: "", bucket: "", text: "" };
  const order = (phase) => DATA.phases.indexOf(phase) + 1 || DATA.phases.length + 1;
  const counts = new Map();
  for (let index = 0; index < graph.size; index++) {
    const phase = graph.text("phase", index);
    counts.set(phase, (counts.get(phase) || 0) + 1);
  }
  const phases = [...counts.keys()].sort((a, b) => order(a) - order(b));
  const buckets = (index) => graph.columns.buckets[index].map((bucket) => plan.buckets[bucket].name).join(", ");
  const wave = (index) => graph.columns.wave[index] ?? -1;
  const table = new Table({
    label: `Nodes: ${GRAPH_NAMES[graph.kind] || graph.kind}`,
    height: 520,
    minWidth: 860,
    rows: [],
    open,
    key: (index) => index,
    columns: [
      { name: "#", width: "64px", right: true, cell: (index) => count(index + 1), sort: (index) => index },
      {
        name: "Name",
        width: "minmax(150px, 1.4fr)",
        mono: true,
        cell: (index) => graph.name(index),
        sort: (index) => graph.name(index),
      },
      {
        name: "Operator or input",
        width: "minmax(150px, 1.6fr)",
        mono: true,
        cell: (index) => graph.about(index, plan),
        sort: (index) => graph.about(index, plan),
      },
      { name: "Result", width: "minmax(130px, 1fr)", mono: true, cell: (index) => graph.type(index) },
      {
        name: "Phase",
        width: "110px",
        cell: (index) => graph.text("phase", index),
        sort: (index) => order(graph.text("phase", index)),
      },
      {
        name: "Wave",
        width: "64px",
        right: true,
        cell: (index) => (wave(index) < 0 ? "" : count(wave(index) + 1)),
        sort: wave,
      },
      { name: "Bucket", width: "minmax(90px, 0.8fr)", mono: true, cell: buckets, sort: buckets },
    ],
  });
  const status = h("p", { class: "muted", "aria-live": "polite" });
  const filters = h("span", { class: "filters" });
  const chips = h("div", { class: "filters", role: "group", "aria-label": "Nodes of one phase" });
  const apply = (changes) => {
    Object.assign(state, changes);
    const needle = state.text.toLowerCase();
    const bucket = state.bucket === "" ? -1 : state.bucket;
    const rows = [];
    for (let index = 0; index < graph.size; index++) {
      if (state.phase && graph.text("phase", index) !== state.phase) continue;
      if (bucket >= 0 && !graph.columns.buckets[index].includes(bucket)) continue;
      if (
        needle &&
        !`${graph.name(index)} ${graph.text("target", index)} ${graph.about(index, plan)}`
          .toLowerCase()
          .includes(needle)
      )
        continue;
      rows.push(index);
    }
    table.node.scrollTop = 0;
    table.show(rows);
    status.textContent =
      rows.length === graph.size
        ? plural(graph.size, "node")
        : `${count(rows.length)} of ${plural(graph.size, "node")}`;
    const drop = (words, change) =>
      h(
        "button",
        { type: "button", class: "chip", onclick: () => apply(change), "aria-label": `Remove the filter ${words}` },
        words,
        " ✕",
      );
    filters.replaceChildren(
      ...[
        state.text && drop(`name contains “${state.text}”`, { text: "" }),
        bucket >= 0 && drop(`bucket ${plan.buckets[bucket].name}`, { bucket: "" }),
      ].filter(Boolean),
    );
    const one = (phase, words, number) =>
      h(
        "button",
        {
          type: "button",
          class: "chip",
          "aria-pressed": String(state.phase === phase),
          onclick: () => apply({ phase }),
        },
        words,
        h("span", { class: "muted" }, count(number)),
      );
    chips.replaceChildren(
      one("", "all", graph.size),
      ...phases.map((phase) => one(phase, phase || "no phase", counts.get(phase))),
    );
  };
  apply({});
  return { node: h("div", {}, chips, h("div", { class: "row-of" }, status, filters), table.node), apply, table };
}
