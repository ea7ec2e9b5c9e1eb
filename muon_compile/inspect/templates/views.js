// What the panel shows: a bucket, a parameter, a strategy, buckets that are drawn together, a node.

const section = (name, ...content) => h("section", {}, h("h3", {}, name), content);

const VIEWS = {
  bucket: (plan, { index, side }) => [
    plan.buckets[index].name,
    sideWords("Bucket", side),
    ...bucketView(plan, index, side, null),
  ],
  param: (plan, { index, side }) => [
    plan.params[index][0],
    sideWords("Parameter", side),
    ...paramView(plan, index, side),
  ],
  strategy: (plan, { name, side }) => [
    strategyName(name),
    sideWords("Strategy", side),
    h("p", {}, plan.strategies[name]),
    bucketList(
      plan,
      plan.buckets.map((_, index) => index).filter((index) => plan.buckets[index].strategy === name),
      side,
    ),
  ],
  buckets: (plan, { indices, side }) => [
    plural(indices.length, "bucket"),
    sideWords("Drawn together", side),
    bucketList(plan, indices, side),
  ],
  node: (plan, { graph, index }) => [
    graph.name(index),
    `Node: ${GRAPH_NAMES[graph.kind] || graph.kind}`,
    ...nodeView(plan, graph, index),
  ],
};

const sideWords = (what, side) => (COMPARED ? `${what}, ${SIDES[side].toLowerCase()}` : what);

function reason(bucket) {
  const times = [];
  if (bucket.seconds !== null) times.push([bucket.strategy, bucket.seconds, bucket.strategy]);
  if (bucket.runner_up)
    times.push([
      `${bucket.runner_up[0]}, ${bucket.runner_up[1] < bucket.seconds ? "alone" : "runner-up"}`,
      bucket.runner_up[1],
      bucket.runner_up[0],
    ]);
  return [
    h("p", { class: "verdict" }, chip(bucket.strategy)),
    h("p", { class: "reason" }, sentence(bucket.why)),
    times.length > 1 ? [h("p", { class: "muted" }, "Predicted for this bucket alone:"), duel(times)] : null,
  ];
}

function formRows(bucket) {
  return bucket.forms.map((form) =>
    h(
      "p",
      {},
      h("b", {}, form.form),
      ` on ${form.kernel}`,
      h("span", { class: "muted" }, ` for ${form.of}: `),
      form.reason,
      ".",
    ),
  );
}

function paramView(plan, index, side) {
  const [name, home, group, rank] = plan.params[index];
  const bucket = plan.buckets[home];
  const owner =
    rank &&
    facts([
      ["Orthogonalized by", rank],
      ["Hyperparameter group", count(group)],
    ]);
  return [
    owner || facts([["Hyperparameter group", count(group)]]),
    h(
      "p",
      {},
      "In bucket ",
      link(bucket.name, () => go("bucket", side, bucket.name), { class: "link mono" }),
      `, ${sizeText(bucket)}, with all that follows.`,
    ),
    ...bucketView(plan, home, side, index),
  ];
}

function bucketView(plan, index, side, param) {
  const bucket = plan.buckets[index];
  const [dtype, grad, state] = bucket.dtypes;
  const columns = columnsOf([plan]);
  return [
    section("Why this strategy", reason(bucket)),
    bucket.forms.length ? section("Form of the iteration", formRows(bucket)) : null,
    section(
      "Where it lies",
      facts([
        ["Size", sizeText(bucket)],
        ["As matrices", bucket.matrices],
        ["Placement", bucket.placement],
        ["Device", bucket.device],
        ["Parameters", dtype],
        ["Gradients", grad],
        [bucket.algorithm === "muon" ? "Momentum" : "Moments", state],
        ["On the wire", bucket.wire.join(", ")],
      ]),
    ),
    section(
      "Through the step",
      h(
        "div",
        { class: "through" },
        columns.map((column) => [
          h("span", {}, column.name),
          h("span", { class: "muted" }, column.what),
          h("span", { class: "right" }, amount(column, bucket.amounts[column.key])),
        ]),
      ),
    ),
    partsSection(bucket),
    section(plural(bucket.params.length, "parameter"), paramTable(plan, bucket, side, param)),
    ...GRAPHS.map((graph) =>
      section(
        `Subgraph: ${(GRAPH_NAMES[graph.kind] || graph.kind).toLowerCase()}`,
        subgraph(graph, index, (node) => go("node", graph.kind, graph.name(node))),
        link("Show these nodes in the whole graph", () =>
          filterGraph(graph.kind, { bucket: index, phase: "", text: "" }),
        ),
      ),
    ),
    GRAPHS.length || COMPARED
      ? null
      : section(
          "Subgraph",
          h("p", { class: "muted" }, "This report was made from a plan alone. A step's dump has its graph, too."),
        ),
    section("Mathematics", facts(bucket.config.map(([name, value]) => [title(name), valueText(value)]))),
  ];
}

function partTable(bucket) {
  const exchanged = bucket.parts.some((part) => part[2] !== null);
  const columns = [
    { name: "Part", width: "minmax(90px, 1fr)", mono: true, cell: (row) => row[0] },
    { name: "Wave", width: "54px", right: true, cell: (row) => (row[1] === null ? "" : count(row[1] + 1)) },
    exchanged && { name: "Units", width: "56px", right: true, cell: (row) => (row[2] === null ? "" : count(row[2])) },
    exchanged && { name: "Owners have", width: "minmax(150px, 1.6fr)", cell: (row) => row[4] },
  ].filter(Boolean);
  return new Table({ label: "Parts of the bucket", columns, rows: bucket.parts, height: 250 }).node;
}

function partsSection(bucket) {
  if (bucket.parts.length < 2 && bucket.parts.every((part) => part[2] === null)) return null;
  const calls = [...new Set(bucket.parts.map((part) => part[5]).filter(Boolean))];
  const sizes = [...new Set(bucket.parts.map((part) => part[3]).filter(Boolean))];
  return section(
    "Parts",
    facts([
      ["A unit is", sizes.join(", ")],
      ["Collectives of a part", calls.join("; ")],
    ]),
    partTable(bucket),
  );
}

function paramTable(plan, bucket, side, param) {
  const ranked = bucket.params.some((index) => plan.params[index][3]);
  const grouped = bucket.groups.length > 1;
  const table = new Table({
    label: `Parameters of ${bucket.name}`,
    height: 300,
    minWidth: ranked ? 400 : 0,
    rows: bucket.params,
    key: (index) => index,
    open: (index) => go("param", side, plan.params[index][0]),
    columns: [
      {
        name: "Name",
        width: "minmax(180px, 1.5fr)",
        mono: true,
        tail: true,
        cell: (index) => plan.params[index][0],
        sort: (index) => plan.params[index][0],
      },
      ranked && {
        name: "Orthogonalized by",
        width: "minmax(140px, 1fr)",
        cell: (index) => plan.params[index][3],
        sort: (index) => plan.params[index][3],
      },
      grouped && {
        name: "Group",
        width: "58px",
        right: true,
        cell: (index) => count(plan.params[index][2]),
        sort: (index) => plan.params[index][2],
      },
    ].filter(Boolean),
  });
  table.node.reveal = () => param !== null && table.select(param, true);
  return table.node;
}

function bucketList(plan, indices, side) {
  return bucketTable(plan, indices, (index) => go("bucket", side, plan.buckets[index].name), {
    height: 560,
    brief: true,
  }).node;
}

function nodeView(plan, graph, index) {
  const { columns } = graph;
  const linked = (nodes) =>
    nodes.length
      ? h(
          "ul",
          { class: "links" },
          nodes.slice(0, 200).map((node) =>
            h(
              "li",
              {},
              link(graph.name(node), () => go("node", graph.kind, graph.name(node)), { class: "link mono" }),
              h("span", { class: "muted" }, ` ${graph.target(node)} ${graph.type(node)}`),
            ),
          ),
          nodes.length > 200 ? h("li", { class: "muted" }, `and ${count(nodes.length - 200)} more`) : null,
        )
      : h("p", { class: "muted" }, "none");
  const wave = columns.wave[index];
  const param = graph.param(index, plan);
  const buckets = columns.buckets[index];
  return [
    facts([
      ["Operation", graph.text("op", index)],
      ["Operator", graph.computes(index) ? mono(graph.text("target", index)) : ""],
      ["Parameter", param && link(param.name, () => go("param", 0, param.name), { class: "link mono" })],
      ["Result", graph.type(index)],
      ["Phase", graph.text("phase", index)],
      ["Wave", wave === null ? "" : count(wave + 1)],
      ["Place in the graph", `${count(index + 1)} of ${count(graph.size)}`],
      [
        "Buckets",
        buckets.length
          ? h(
              "span",
              {},
              buckets.map((bucket, at) => [
                at ? ", " : "",
                link(plan.buckets[bucket].name, () => go("bucket", 0, plan.buckets[bucket].name), {
                  class: "link mono",
                }),
              ]),
            )
          : "",
      ],
    ]),
    section(plural(columns.inputs[index].length, "input"), linked(columns.inputs[index])),
    section(plural(graph.users[index].length, "user"), linked(graph.users[index])),
    link("Show it in the whole graph", () => revealNode(graph, index)),
  ];
}
