// The step as pipes: one lane for each bucket, as thick in each column as what is counted there.

// More lanes than this, and the smallest buckets of each algorithm share one.
const MOST_LANES = 14;
// The fonts that the style sheet gives labels, to measure with.
const rootStyle = getComputedStyle(document.documentElement);
const FONT = `12px ${rootStyle.getPropertyValue("--sans")}`;
const MONO = `12px ${rootStyle.getPropertyValue("--mono")}`;

// Lanes of a plan: [{label, detail, key, amounts, buckets}], Newton-Schulz's first, the heaviest of each on top.
function lanesOf(plan) {
  plan.lanes = plan.lanes || sortedLanes(plan);
  return plan.lanes;
}

// The lanes of the second plan in the order of the first, where they have the same label.
function alignLanes([first, second]) {
  const places = new Map(lanesOf(first).map(({ label }, index) => [label, index]));
  const place = (one, index) => places.get(one.label) ?? index;
  const placed = lanesOf(second).map((one, index) => [place(one, index), one]);
  second.lanes = placed.sort((a, b) => a[0] - b[0]).map(([, one]) => one);
}

function sortedLanes(plan) {
  const totals = Object.fromEntries(
    COLUMNS.map(({ key }) => [key, plan.buckets.reduce((sum, bucket) => sum + bucket.amounts[key], 0) || 1]),
  );
  const weight = (bucket) => Math.max(...COLUMNS.map(({ key }) => bucket.amounts[key] / totals[key]));
  const sorted = plan.buckets.map((_, index) => index);
  sorted.sort((a, b) => weight(plan.buckets[b]) - weight(plan.buckets[a]) || a - b);
  const alone = sorted.length <= MOST_LANES + 2 ? sorted : sorted.slice(0, MOST_LANES);
  const lanes = alone.map((index) => lane(plan, [index]));
  for (const algorithm of ["muon", "adamw", "lion"]) {
    const rest = sorted.slice(alone.length).filter((index) => plan.buckets[index].algorithm === algorithm);
    if (rest.length) lanes.push(lane(plan, rest));
  }
  const rank = (one) => (plan.buckets[one.buckets[0]].algorithm === "muon" ? 0 : 1);
  const size = ({ amounts }) => amounts.solve_flops || amounts.momentum_bytes;
  const order = (a, b) => rank(a) - rank(b) || (a.buckets.length > 1) - (b.buckets.length > 1) || size(b) - size(a);
  return lanes.sort(order);
}

const ALGORITHMS = { muon: "Muon", adamw: "AdamW", lion: "Lion" };

function lane(plan, indices) {
  const members = indices.map((index) => plan.buckets[index]);
  const [first] = members;
  const amounts = Object.fromEntries(
    COLUMNS.map(({ key }) => [key, members.reduce((sum, bucket) => sum + bucket.amounts[key], 0)]),
  );
  const key = members.every((bucket) => bucket.strategy === first.strategy) ? first.strategy : "mixed";
  if (members.length === 1) {
    const label = patternText(plan, first);
    return { label, name: first.name, detail: `${first.name} · ${sizeText(first)}`, key, amounts, buckets: indices };
  }
  const label = `${count(members.length)} more ${ALGORITHMS[first.algorithm]} buckets`;
  const params = members.reduce((sum, bucket) => sum + bucket.count, 0);
  return { label, name: "", detail: plural(params, "parameter"), key, amounts, buckets: indices };
}

const columnsOf = (plans) =>
  plans.some((plan) => plan.collectives.length) ? COLUMNS : COLUMNS.filter(({ key }) => !/send|return/.test(key));

// Pixels for a byte and for a FLOP, the same for all plans that are shown together.
function flowScale(plans, columns) {
  const tallest = { bytes: 1, flops: 1 };
  const all = plans.map(lanesOf);
  for (const { amounts } of all.flat())
    for (const { key, unit } of columns) tallest[unit] = Math.max(tallest[unit], amounts[key]);
  const most = Math.max(...all.map((lanes) => lanes.length));
  const two = most <= 10;
  const room = Math.max(most * (two ? 46 : 26), Math.min(440, 120 + 40 * most));
  const needed = (thick) =>
    Math.max(...all.map((lanes) => sum(lanes.map((one) => slot(one, columns, scaleOf(thick), two)))));
  const scaleOf = (thick) => ({ bytes: thick / tallest.bytes, flops: thick / tallest.flops });
  let thick = 96;
  while (thick > 6 && needed(thick) > room) thick *= 0.96;
  return { ...scaleOf(thick), two };
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const thickness = (value, pixels) => (value ? Math.max(2.5, value * pixels) : 0);

function slot(one, columns, scale, two) {
  const tallest = Math.max(...columns.map(({ key, unit }) => thickness(one.amounts[key], scale[unit])));
  return Math.max(two ? 38 : 22, tallest + 10);
}

// An SVG of the plan, so many pixels wide. open: (buckets, element) => void; picked: the bucket that is shown.
function drawFlow(plan, width, { columns, scale, open, picked, label }) {
  const narrow = width < 760;
  const lanes = lanesOf(plan);
  const left = narrow ? 8 : Math.round(Math.min(330, width * 0.3));
  const last = narrow ? 70 : 84;
  const step = (width - left - last - 8) / (columns.length - 1);
  const x = columns.map((_, index) => left + index * step);
  // Where headings have no room beside each other, every other one stands lower.
  const lower = step < 92 ? 34 : 0;
  const top = 46 + lower;
  const nodes = [];
  let y = top;
  for (const one of lanes) {
    const height = slot(one, columns, scale, scale.two) + (narrow ? 18 : 0);
    nodes.push(drawLane(plan, one, { columns, scale, x, y, height, left, narrow, width, open, picked, step }));
    y += height;
  }
  const heads = columns.map((column, index) => {
    const total = plan.buckets.reduce((all, bucket) => all + bucket.amounts[column.key], 0);
    const down = index % 2 ? lower : 0;
    return svg(
      "g",
      { transform: `translate(${x[index]} ${down})` },
      svg("line", { class: "guide", x1: 0.5, x2: 0.5, y1: 38, y2: y - down }),
      svg("text", { class: "head", y: 14 }, narrow ? column.short : column.name),
      svg("text", { class: "total", y: 31 }, total || column.unit === "flops" ? amount(column, total) : "nothing"),
    );
  });
  const guides = svg("g", { "aria-hidden": "true" }, heads);
  const picture = svg(
    "svg",
    { class: "flow", width, height: y + 2, viewBox: `0 0 ${width} ${y + 2}`, role: "group", "aria-label": label },
    guides,
    nodes,
  );
  picture.addEventListener("keydown", (event) => {
    const at = nodes.indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: nodes.length - 1 }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    nodes[Math.max(0, Math.min(to, nodes.length - 1))].focus();
  });
  return picture;
}

function drawLane(plan, one, { columns, scale, x, y, height, left, narrow, width, open, picked, step }) {
  const middle = y + (narrow ? 18 : 0) + (height - (narrow ? 18 : 0)) / 2;
  const size = (index) => thickness(one.amounts[columns[index].key], scale[columns[index].unit]);
  const bar = 7;
  const parts = [];
  for (let index = 0; index + 1 < columns.length; index++) {
    const ends = [Math.max(size(index), 1.5) / 2, Math.max(size(index + 1), 1.5) / 2];
    const from = x[index] + (size(index) ? bar : 0);
    const bend = (from + x[index + 1]) / 2;
    const path =
      `M${from} ${middle - ends[0]}C${bend} ${middle - ends[0]} ${bend} ${middle - ends[1]} ${x[index + 1]} ${middle - ends[1]}` +
      `V${middle + ends[1]}C${bend} ${middle + ends[1]} ${bend} ${middle + ends[0]} ${from} ${middle + ends[0]}Z`;
    parts.push(svg("path", { class: "pipe", d: path }));
  }
  columns.forEach((column, index) => {
    const tall = size(index);
    if (!tall) return;
    parts.push(svg("rect", { class: "bar", x: x[index], y: middle - tall / 2, width: bar, height: tall, rx: 1.5 }));
    if (step >= 78)
      parts.push(
        svg(
          "text",
          { class: tall < 13 ? "value thin" : "value", x: x[index] + bar + 5, y: middle + 4 },
          amount(column, one.amounts[column.key]),
        ),
      );
  });
  const room = narrow ? width - 16 : left - 16;
  const two = scale.two && !narrow;
  const main = fitted(one.label, two ? room : room - (one.name ? 70 : 0), one.name ? MONO : FONT);
  const at = narrow ? y + 13 : middle + (two ? -3 : 4);
  parts.push(svg("text", { class: one.name ? "label mono" : "label", x: 4, y: at }, main));
  if (two) parts.push(svg("text", { class: "detail", x: 4, y: middle + 13 }, fitted(one.detail, room, FONT)));
  else if (one.name) parts.push(svg("text", { class: "detail", x: 4 + room, y: at, "text-anchor": "end" }, one.name));
  const shown = columns.map((column) => `${column.name} ${amount(column, one.amounts[column.key])}`);
  const words = `${one.label}, ${one.detail}, ${strategyName(one.key)}. ${shown.join(", ")}`;
  const act = () => open(one.buckets);
  return svg(
    "g",
    {
      class: `lane s-${one.key}`,
      role: "button",
      tabindex: "0",
      "aria-label": words,
      "aria-pressed": picked !== null && one.buckets.includes(picked) ? "true" : "false",
      onclick: act,
      onkeydown: (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        act();
      },
    },
    svg("title", {}, words),
    svg("rect", { class: "hit", x: 0.5, y: y + 0.5, width: width - 1, height: height - 1, rx: 5 }),
    parts,
  );
}

function legend(plans, open) {
  const keys = [...new Set(plans.flatMap((plan) => plan.buckets.map((bucket) => bucket.strategy)))];
  return h(
    "div",
    { class: "legend" },
    keys.map((key) =>
      h(
        "button",
        { type: "button", class: "chip", onclick: () => open(key) },
        h("i", { class: `dot s-${key}`, "aria-hidden": "true" }),
        strategyName(key),
      ),
    ),
  );
}
