// The page's sections.

function card(id, name, ...content) {
  return h(
    "section",
    { class: "card", id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, name),
    content,
  );
}

function figures(plan) {
  const all = plan.figures;
  const ns = sum(plan.buckets.map((bucket) => bucket.amounts.solve_flops));
  const shown = [
    ["Parameters", count(all.params), `${large(all.elements)} elements`],
    ["Buckets", count(all.buckets), plural(all.waves, "wave")],
    ["Ranks", count(all.ranks), plan.mesh.axes.length ? plan.mesh.words : "no mesh"],
    ["Newton–Schulz", flops(ns), all.ranks > 1 ? "a rank on average" : "a step"],
    ["Collectives", count(all.collectives), all.collectives ? `${bytes(all.payload_bytes)} a rank` : "nothing is sent"],
    ["Temporaries", bytes(all.temp_bytes), "at most at once"],
  ];
  return h(
    "dl",
    { class: "figures" },
    shown.map(([name, value, more]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, h("b", {}, value), h("span", {}, more))),
    ),
  );
}

function flowCard(plan) {
  const columns = columnsOf([plan]);
  const scale = flowScale([plan], columns);
  const picture = flowPicture(plan, 0, columns, scale);
  return card(
    "flow",
    "The step",
    h("p", { class: "muted" }, flowWords(plan)),
    picture,
    legend([plan], (key) => go("strategy", 0, key)),
  );
}

function flowPicture(plan, side, columns, scale) {
  const open = (indices) =>
    indices.length === 1 ? go("bucket", side, plan.buckets[indices[0]].name) : go("buckets", side, indices.join(","));
  const label = COMPARED ? `Flow of the buckets, ${SIDES[side].toLowerCase()}` : "Flow of the buckets through the step";
  const picture = responsive((width) =>
    drawFlow(plan, width, { columns, scale, open, picked: pickedBucket(side), label }),
  );
  document.addEventListener("picked", () => {
    const picked = pickedBucket(side);
    const lanes = lanesOf(plan);
    picture
      .querySelectorAll(".lane")
      .forEach((node, at) =>
        node.setAttribute("aria-pressed", String(picked !== null && lanes[at].buckets.includes(picked))),
      );
  });
  return picture;
}

function flowWords(plan) {
  const ranks = plan.figures.ranks > 1 ? "on one rank" : "in a step";
  const sent = plan.collectives.length ? "" : " Nothing is sent, so there are no columns for it.";
  return `Each lane is a bucket: parameters that go through the step together. It is as thick as its bytes ${ranks}, all to one scale, and as its Newton–Schulz FLOPs, to their own; a thin line takes no part there.${sent} Choose a lane to see why.`;
}

function bucketTable(plan, indices, open, { height = 420, brief = false } = {}) {
  const of = (index) => plan.buckets[index];
  const sent = ({ amounts }) => amounts.send_bytes + amounts.return_bytes;
  const names = (index) => patternText(plan, of(index));
  const form = (index) =>
    of(index)
      .forms.map((one) => one.form)
      .join(", ");
  const size = (index) => of(index).amounts.update_bytes / of(index).count;
  // In the panel there is room for what tells the buckets apart.
  const mixed = !brief || new Set(indices.map((index) => of(index).strategy)).size > 1;
  const columns = [
    { name: "Bucket", width: "72px", mono: true, cell: (i) => of(i).name, sort: (i) => of(i).name },
    { name: "Parameters", width: "minmax(110px, 2fr)", mono: true, tail: true, cell: names, sort: names },
    !brief && { name: "Count", width: "52px", right: true, cell: (i) => count(of(i).count), sort: (i) => of(i).count },
    { name: "Shape", width: brief ? "92px" : "146px", right: true, cell: (i) => of(i).shape, sort: size },
    mixed && {
      name: "Strategy",
      width: brief ? "104px" : "138px",
      cell: (i) => chip(of(i).strategy),
      sort: (i) => strategyName(of(i).strategy),
    },
    !brief && { name: "Why", width: "minmax(150px, 2fr)", cell: (i) => of(i).why, sort: (i) => of(i).why },
    !brief && { name: "Form", width: "80px", cell: form, sort: form },
    !brief && {
      name: "Sent",
      width: "80px",
      right: true,
      cell: (i) => (sent(of(i)) ? bytes(sent(of(i))) : "–"),
      sort: (i) => sent(of(i)),
    },
    !brief && {
      name: "N–S",
      width: "96px",
      right: true,
      cell: (i) => (of(i).forms.length ? flops(of(i).amounts.solve_flops) : "–"),
      sort: (i) => of(i).amounts.solve_flops,
    },
  ].filter(Boolean);
  return new Table({
    label: "Buckets",
    columns,
    rows: indices,
    open,
    key: (index) => index,
    height,
    minWidth: brief ? 0 : 1060,
  });
}

function bucketsCard(plan) {
  const table = bucketTable(
    plan,
    plan.buckets.map((_, index) => index),
    (index) => go("bucket", 0, plan.buckets[index].name),
  );
  document.addEventListener("picked", () => table.select(pickedBucket(0)));
  return card("buckets", "Buckets", table.node);
}

function loadsCard(plan) {
  return card("loads", "Load of each rank", loadChart(plan, plan.loads.busiest));
}

const foundText = (found) => (typeof found === "number" ? bytes(found) : found);

function collectivesCard(plan) {
  const rows = plan.collectives;
  if (!rows.length)
    return card("collectives", "Collectives", h("p", { class: "muted" }, "None: nothing is sent between ranks."));
  const found = rows.some((row) => row[6] !== null);
  const kinds = [...new Set(rows.map((row) => row[0]))];
  const columns = [
    { name: "#", width: "30px", right: true, cell: (row) => count(rows.indexOf(row) + 1) },
    {
      name: "Kind",
      width: "minmax(172px, 1.4fr)",
      cell: (row) => h("span", {}, h("i", { class: `dot ${kindClass(row[0])}` }), row[0]),
      sort: (row) => row[0],
    },
    { name: "Axis", width: "minmax(80px, 0.7fr)", cell: (row) => row[1], sort: (row) => row[1] },
    {
      name: found ? "Promised" : "Bytes",
      width: "72px",
      right: true,
      cell: (row) => bytes(row[2]),
      sort: (row) => row[2],
    },
    { name: "Phase", width: "50px", cell: (row) => row[3], sort: (row) => row[3] },
    { name: "Bucket", width: "minmax(68px, 0.8fr)", cell: (row) => whose(plan, row), sort: (row) => whose(plan, row) },
    {
      name: "Wave",
      width: "44px",
      right: true,
      cell: (row) => (row[4] === null ? "" : count(row[4] + 1)),
      sort: (row) => row[4] ?? -1,
    },
    found && {
      name: "In the graph",
      width: "minmax(84px, 0.9fr)",
      right: true,
      cell: (row) => (/^(differs|missing)/.test(row[6]) ? h("b", { title: row[6] }, row[6]) : foundText(row[6])),
      sort: (row) => foundText(row[6]),
    },
  ].filter(Boolean);
  const table = new Table({
    label: "Collectives in their order",
    columns,
    rows,
    height: 300,
    minWidth: found ? 726 : 620,
    open: (row) =>
      row[5].length === 1
        ? go("bucket", 0, plan.buckets[row[5][0]].name)
        : row[5].length && go("buckets", 0, row[5].join(",")),
    key: (row) => row,
  });
  const strip = responsive((width) => drawSequence(plan, width, (index) => table.select(rows[index], true)));
  const total = sum(rows.map((row) => row[2]));
  return card(
    "collectives",
    "Collectives, in order",
    h(
      "p",
      { class: "muted" },
      `${plural(rows.length, "collective")} with a payload of ${bytes(total)} a rank. Each block is one, as wide as its payload. Ranks first agree on which gradients there are.`,
    ),
    strip,
    h(
      "p",
      { class: "legend" },
      kinds.map((kind) => h("span", { class: "chip" }, h("i", { class: `dot ${kindClass(kind)}` }), kind)),
    ),
    table.node,
  );
}

function settingsCard(plan) {
  return card("settings", "Settings", facts(plan.settings), facts([["Plan digest", mono(plan.digest)]]));
}

function hyperCard() {
  const names = [...new Set(DATA.hyper.flatMap((group) => Object.keys(group)))];
  const groups = DATA.hyper.map((_, index) => index);
  // Few groups stand beside each other, many below.
  const [rows, columns] = groups.length <= 4 ? [names, groups] : [groups, names];
  const label = (one) => (typeof one === "number" ? `Group ${one}` : mono(one));
  const cell = (row, column) => {
    const [group, name] = typeof row === "number" ? [row, column] : [column, row];
    return name in DATA.hyper[group] ? valueText(DATA.hyper[group][name]) : "–";
  };
  const head = h(
    "tr",
    {},
    h("td", {}),
    columns.map((column) => h("th", { scope: "col", class: "right" }, label(column))),
  );
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, label(row)),
      columns.map((column) => h("td", { class: "right" }, cell(row, column))),
    ),
  );
  return card("hyper", "Hyperparameters", plainTable(head, body));
}

// A short table. Where it is wider than the window it scrolls, by keyboard too.
const plainTable = (head, body) =>
  h(
    "div",
    { class: "wide", tabindex: "0" },
    h("table", { class: "plain" }, h("thead", {}, head), h("tbody", {}, body)),
  );

function statsCard() {
  return card(
    "stats",
    "Counters",
    facts(Object.entries(DATA.stats).map(([name, value]) => [title(name), statText(name, value)])),
  );
}

// -- the whole graph ------------------------------------------------------------------------------------------------

const GRAPHS = Object.entries(DATA.graphs || {}).map(([kind, columns]) => new Graph(kind, columns));
const graphViews = new Map();
let showGraph = () => {};

function graphCard(plan) {
  const place = h("div", {});
  const tabs = GRAPHS.map((graph) =>
    h(
      "button",
      { type: "button", class: "chip", onclick: () => showGraph(graph.kind) },
      GRAPH_NAMES[graph.kind] || graph.kind,
    ),
  );
  showGraph = (kind) => {
    const graph = GRAPHS.find((one) => one.kind === kind);
    if (!graphViews.has(kind))
      graphViews.set(
        kind,
        graphTable(graph, plan, (index) => go("node", kind, graph.name(index))),
      );
    tabs.forEach((tab, at) => tab.setAttribute("aria-pressed", String(GRAPHS[at].kind === kind)));
    place.replaceChildren(graphViews.get(kind).node);
    return graphViews.get(kind);
  };
  showGraph(GRAPHS[0].kind);
  return card(
    "graph",
    "The whole graph",
    GRAPHS.length > 1 ? h("div", { class: "filters", role: "group", "aria-label": "Graph" }, tabs) : null,
    place,
  );
}

function toGraph() {
  if (matchMedia("(max-width: 900px)").matches) closePanel();
  document.getElementById("graph").scrollIntoView({ block: "start" });
}

function filterGraph(kind, changes) {
  showGraph(kind).apply(changes);
  toGraph();
}

function revealNode(graph, index) {
  const view = showGraph(graph.kind);
  view.apply({ text: "", phase: "", bucket: "" });
  toGraph();
  view.table.select(index, true);
}
