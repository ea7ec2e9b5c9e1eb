// The page about two plans: what changed, and both steps to one scale.

const FIGURES = [
  ["Parameters", (plan) => plan.figures.params, count],
  ["Elements", (plan) => plan.figures.elements, count],
  ["Buckets", (plan) => plan.figures.buckets, count],
  ["Ranks", (plan) => plan.figures.ranks, count],
  ["Waves", (plan) => plan.figures.waves, count],
  ["Newton–Schulz, a rank on average", (plan) => plan.loads.mean, flops],
  ["Newton–Schulz, the busiest rank", (plan) => plan.loads.busiest, flops],
  ["Collectives", (plan) => plan.figures.collectives, count],
  ["Payload a rank", (plan) => plan.figures.payload_bytes, bytes],
  ["Temporaries at once", (plan) => plan.figures.temp_bytes, bytes],
];

function changeText(before, after) {
  if (before === after) return "same";
  if (!before) return "new";
  const ratio = after / before - 1;
  return `${ratio > 0 ? "+" : "−"}${percent(Math.abs(ratio))}`;
}

function figuresCard([before, after]) {
  const rows = FIGURES.map(([name, value, text]) => {
    const [old, now] = [value(before), value(after)];
    return h(
      "tr",
      { class: old === now ? "same" : null },
      h("th", { scope: "row" }, name),
      h("td", { class: "right" }, text(old)),
      h("td", { class: "right" }, text(now)),
      h("td", { class: "right" }, text(old) === text(now) ? "same" : changeText(old, now)),
    );
  });
  const settings = before.settings
    .map(([name, old], at) => [name, old, after.settings[at][1]])
    .filter(([, old, now]) => old !== now);
  for (const [name, old, now] of settings.filter(([name]) => name !== "Newton-Schulz batches"))
    rows.unshift(
      h(
        "tr",
        {},
        h("th", { scope: "row" }, name),
        h("td", { class: "right" }, old),
        h("td", { class: "right" }, now),
        h("td", { class: "right" }, "changed"),
      ),
    );
  const head = h(
    "tr",
    {},
    h("td", {}),
    ["Before", "After", "Change"].map((name) => h("th", { scope: "col", class: "right" }, name)),
  );
  return card("figures", "Figures", plainTable(head, rows));
}

function changesCard() {
  const lines = DATA.changes.map((line) => {
    const [what] = /^[^:]*?(?= of |:)/.exec(line) || [""];
    return h("li", {}, h("b", {}, what), line.slice(what.length));
  });
  return card(
    "changes",
    lines.length ? plural(lines.length, "change") : "No change",
    lines.length ? h("ul", { class: "changes" }, lines) : h("p", {}, "Both plans do the same."),
  );
}

// Every parameter of either plan: what is done with it before and after.
function pairedParams([before, after]) {
  const rows = new Map(before.params.map((param, index) => [param[0], { name: param[0], old: index, now: null }]));
  after.params.forEach((param, index) => {
    const row = rows.get(param[0]);
    if (row) row.now = index;
    else rows.set(param[0], { name: param[0], old: null, now: index });
  });
  const side = (plan, index) => {
    if (index === null) return { text: "not there", bucket: null };
    const bucket = plan.buckets[plan.params[index][1]];
    const form = bucket.forms.map((one) => `${one.form} on ${one.kernel}`).join(", ");
    const dtypes = [...new Set(bucket.dtypes)].join("/");
    const all = [
      bucket.shape,
      bucket.placement,
      strategyName(bucket.strategy),
      form,
      dtypes,
      bucket.config.join(),
      bucket.device,
    ];
    return {
      text: [strategyName(bucket.strategy), form].filter(Boolean).join(" · "),
      placement: bucket.placement,
      shape: bucket.shape,
      all: all.join("|"),
    };
  };
  return [...rows.values()].map((row) => {
    const [left, right] = [side(before, row.old), side(after, row.now)];
    const what =
      row.old === null
        ? "added"
        : row.now === null
          ? "removed"
          : left.all === right.all
            ? ""
            : [
                left.shape !== right.shape && "shape",
                left.placement !== right.placement && "placement",
                left.text !== right.text && "strategy or form",
              ]
                .filter(Boolean)
                .join(", ") || "dtype or mathematics";
    return { ...row, left: left.text, right: right.text, what };
  });
}

function paramsCard(plans) {
  const rows = pairedParams(plans);
  const changed = rows.filter((row) => row.what);
  const open = (row) => (row.now === null ? go("param", 0, row.name) : go("param", 1, row.name));
  const sorted = (name) => (row) => row[name];
  const table = new Table({
    label: "Parameters before and after",
    height: 420,
    minWidth: 900,
    rows: changed.length ? changed : rows,
    open,
    key: (row) => row.name,
    columns: [
      {
        name: "Parameter",
        width: "minmax(220px, 1.6fr)",
        mono: true,
        tail: true,
        cell: sorted("name"),
        sort: sorted("name"),
      },
      { name: "Before", width: "minmax(170px, 1fr)", cell: sorted("left"), sort: sorted("left") },
      { name: "After", width: "minmax(170px, 1fr)", cell: sorted("right"), sort: sorted("right") },
      { name: "Changed", width: "minmax(150px, 0.8fr)", cell: sorted("what"), sort: sorted("what") },
    ],
  });
  const choices = [
    [`Changed ${count(changed.length)}`, changed],
    [`All ${count(rows.length)}`, rows],
  ];
  const chips = choices.map(([name, which]) =>
    h("button", { type: "button", class: "chip", onclick: () => pick(which) }, name),
  );
  const pick = (which) => {
    table.show(which);
    chips.forEach((button, at) => button.setAttribute("aria-pressed", String(choices[at][1] === which)));
  };
  pick(changed.length ? changed : rows);
  return card(
    "params",
    "By parameter",
    h("div", { class: "filters", role: "group", "aria-label": "Which parameters" }, chips),
    table.node,
  );
}

function kindsCard(plans) {
  const totals = plans.map((plan) => {
    const found = new Map();
    for (const [kind, axis, size] of plan.collectives) {
      const name = `${kind} over ${axis}`;
      const [number, all] = found.get(name) || [0, 0];
      found.set(name, [number + 1, all + size]);
    }
    return found;
  });
  const names = [...new Set(totals.flatMap((found) => [...found.keys()]))];
  if (!names.length) return card("collectives", "Collectives", h("p", { class: "muted" }, "None in either plan."));
  const cells = (found, name) =>
    found.has(name) ? `${count(found.get(name)[0])} · ${bytes(found.get(name)[1])}` : "none";
  const rows = names.map((name) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name),
      totals.map((found) => h("td", { class: "right" }, cells(found, name))),
    ),
  );
  const head = h(
    "tr",
    {},
    h("td", {}),
    SIDES.map((name) => h("th", { scope: "col", class: "right" }, name)),
  );
  return card("collectives", "Collectives by kind", plainTable(head, rows));
}

function comparisonPage() {
  const { plans } = DATA;
  alignLanes(plans);
  const columns = columnsOf(plans);
  const scale = flowScale(plans, columns);
  const most = Math.max(...plans.map((plan) => plan.loads.busiest));
  const about = h("span", {}, "plan ", mono(plans[0].digest), " → ", mono(plans[1].digest));
  const links = [
    ["changes", "Changes"],
    ["figures", "Figures"],
    ["flow", "Step"],
    ["params", "Parameters"],
    ["loads", "Load"],
    ["collectives", "Collectives"],
  ];
  const both = (draw) => plans.map((plan, side) => h("div", {}, h("h3", {}, SIDES[side]), draw(plan, side)));
  return [
    header("What changed", about, links),
    h(
      "main",
      {},
      h("div", { class: "pair" }, changesCard(), figuresCard(plans)),
      card(
        "flow",
        "The step, before and after",
        h(
          "p",
          { class: "muted" },
          "Both to the same scale. Each lane is a bucket, as thick as its bytes on one rank, and as its Newton–Schulz FLOPs; choose one to see why.",
        ),
        both((plan, side) => flowPicture(plan, side, columns, scale)),
        legend(plans, (key) => go("strategy", plans[1].buckets.some((bucket) => bucket.strategy === key) ? 1 : 0, key)),
      ),
      paramsCard(plans),
      h(
        "div",
        { class: "pair" },
        card(
          "loads",
          "Load of each rank",
          both((plan) => loadChart(plan, most)),
        ),
        kindsCard(plans),
      ),
    ),
  ];
}
