// What ranks do, and what they send.

// Round steps of an axis that reaches to `most`: three or four of them.
function ticks(most) {
  const raw = most / 3 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [5, 2.5, 2, 1].find((factor) => factor * power <= raw * 1.0001);
  const found = [];
  for (let value = 0; value <= most * 1.0001; value += step) found.push(value);
  return found;
}

function rankName(plan, rank) {
  const found = [];
  let rest = rank;
  for (const [axis, size] of [...plan.mesh.axes].reverse()) {
    found.unshift(`${axis} ${rest % size}`);
    rest = Math.floor(rest / size);
  }
  return found.length ? `rank ${count(rank)} (${found.join(", ")})` : `rank ${count(rank)}`;
}

// Ranks, or runs of them where there are more than bars: [{first, last, exchanged, own, mean}], of the busiest each.
function loadBars(loads, most) {
  const ranks = loads.which.length;
  const each = Math.ceil(ranks / most);
  const bars = [];
  for (let first = 0; first < ranks; first += each) {
    const last = Math.min(ranks, first + each) - 1;
    const pairs = loads.which.slice(first, last + 1).map((index) => loads.pairs[index]);
    const busiest = pairs.reduce((a, b) => (b[0] + b[1] > a[0] + a[1] ? b : a));
    bars.push({
      first,
      last,
      exchanged: busiest[0],
      own: busiest[1],
      mean: sum(pairs.map(([a, b]) => a + b)) / pairs.length,
    });
  }
  return bars;
}

function drawLoads(plan, width, most, say) {
  const { loads } = plan;
  const [left, right, top, height, foot] = [78, 6, 20, 150, 34];
  const bars = loadBars(loads, Math.floor((width - left - right) / 3));
  const each = bars[0].last - bars[0].first + 1;
  const step = (width - left - right) / bars.length;
  const wide = Math.min(46, Math.max(1, step - (step > 6 ? Math.min(6, step * 0.2) : step > 2.5 ? 1 : 0)));
  const y = (value) => top + height - (most ? (value / most) * height : 0);
  const x = (index) => left + index * step + (step - wide) / 2;
  const axis = ticks(most).map((value) => [
    svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    svg("text", { class: "tick", x: left - 8, y: y(value) + 4, "text-anchor": "end" }, flops(value)),
  ]);
  const drawn = bars.map((bar, index) => {
    const many = bar.last > bar.first;
    const who = many ? `ranks ${count(bar.first)} to ${count(bar.last)}, the busiest` : rankName(plan, bar.first);
    const parts = bar.own && bar.exchanged ? ` (${flops(bar.exchanged)} exchanged, ${flops(bar.own)} its own)` : "";
    const words = `${who}: ${flops(bar.exchanged + bar.own)}${parts}`;
    return svg(
      "g",
      { class: "load", onpointerenter: () => say(words), onpointerleave: () => say("") },
      svg("rect", { class: "hit", x: left + index * step, y: top, width: step, height }),
      svg("rect", {
        class: "own",
        x: x(index),
        y: y(bar.own),
        width: wide,
        height: Math.max(0, top + height - y(bar.own)),
      }),
      svg("rect", {
        class: "shared",
        x: x(index),
        y: y(bar.own + bar.exchanged),
        width: wide,
        height: Math.max(0, y(bar.own) - y(bar.own + bar.exchanged)),
      }),
    );
  });
  const every = Math.max(1, Math.ceil(bars.length / Math.max(2, Math.floor((width - left) / 56))));
  const names = bars.map((bar, index) =>
    index % every
      ? null
      : svg(
          "text",
          { class: "tick", x: left + (index + 0.5) * step, y: top + height + 16, "text-anchor": "middle" },
          count(bar.first),
        ),
  );
  const mean = svg(
    "g",
    {},
    svg("line", { class: "mean", x1: left, x2: width - right, y1: y(loads.mean), y2: y(loads.mean) }),
    svg(
      "text",
      { class: "meaning", x: width - right, y: Math.max(12, y(loads.mean) - 6), "text-anchor": "end" },
      `mean ${flops(loads.mean)}`,
    ),
  );
  const label = `Newton-Schulz FLOPs by rank: busiest ${flops(loads.busiest)}, mean ${flops(loads.mean)}`;
  return svg(
    "svg",
    {
      class: "chart",
      width,
      height: top + height + foot,
      viewBox: `0 0 ${width} ${top + height + foot}`,
      role: "img",
      "aria-label": label,
    },
    axis,
    drawn,
    mean,
    names,
    svg(
      "text",
      { class: "tick", x: left + (width - left - right) / 2, y: top + height + 32, "text-anchor": "middle" },
      each > 1 ? `rank; each bar is the busiest of ${count(each)}` : "rank",
    ),
  );
}

// The load of every rank: the picture, the figures in words, and the same as a table.
function loadChart(plan, most) {
  const { loads } = plan;
  if (!loads.busiest) return h("p", { class: "muted" }, "No Newton–Schulz: no parameter here has products.");
  const ranks = loads.which.length;
  const left = loads.left_out.length
    ? h(
        "p",
        { class: "muted" },
        `Not in this chart: parameters on ${loads.left_out.join(", ")}, a mesh of other ranks.`,
      )
    : null;
  if (ranks === 1)
    return h("div", {}, h("p", {}, "One rank does all of it: ", h("b", {}, flops(loads.busiest)), "."), left);
  const more = loads.imbalance < 0.0005 ? "all ranks do the same." : `${percent(loads.imbalance)} above the mean.`;
  const words = `Busiest ${flops(loads.busiest)}, mean ${flops(loads.mean)}: ${more}`;
  const note = h("p", { class: "note", "aria-live": "off" }, words);
  const both = loads.pairs.some(([exchanged, own]) => exchanged && own);
  const key =
    both &&
    h(
      "p",
      { class: "legend" },
      h("span", { class: "chip" }, h("i", { class: "dot shared" }), "exchanged matrices"),
      h("span", { class: "chip" }, h("i", { class: "dot own" }), "matrices whole on the rank"),
    );
  const picture = responsive((width) => drawLoads(plan, width, most, (text) => (note.textContent = text || words)));
  const details = h("details", {}, h("summary", {}, "Every rank as a table"));
  details.addEventListener(
    "toggle",
    () => details.open && details.children.length === 1 && details.append(loadTable(plan)),
    false,
  );
  return h("div", {}, note, picture, key, left, details);
}

function loadTable(plan) {
  const { loads } = plan;
  const total = (rank) => sum(loads.pairs[loads.which[rank]]);
  return new Table({
    label: "Newton-Schulz FLOPs of every rank",
    height: 300,
    rows: loads.which.map((_, rank) => rank),
    columns: [
      { name: "Rank", cell: (rank) => rankName(plan, rank), sort: (rank) => rank },
      { name: "Newton–Schulz", width: "120px", right: true, cell: (rank) => flops(total(rank)), sort: total },
      {
        name: "Of the busiest",
        width: "120px",
        right: true,
        cell: (rank) => percent(total(rank) / loads.busiest),
        sort: total,
      },
    ],
  }).node;
}

const KINDS = ["all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"];
const kindClass = (kind) => `k${Math.max(0, KINDS.indexOf(kind))}`;

// All collectives in their order, as wide as their payload.
function drawSequence(plan, width, open) {
  const total = sum(plan.collectives.map(([, , size]) => size)) || 1;
  const number = plan.collectives.length;
  // Of very many, those without much payload are thinner than a pixel.
  const [gap, least] = number * 4 > width ? [0, (0.5 * width) / number] : [1, 2];
  const room = width - (gap + least) * number;
  let x = 0;
  const blocks = plan.collectives.map((row, index) => {
    const wide = least + (row[2] / total) * room;
    const words = `${index + 1}. ${row[0]} over ${row[1]}, ${bytes(row[2])}${row[5].length ? ", " + whose(plan, row) : ""}`;
    const block = svg(
      "rect",
      { class: `block ${kindClass(row[0])}`, x, y: 0, width: wide, height: 26, onclick: () => open(index) },
      svg("title", {}, words),
    );
    x += wide + gap;
    return block;
  });
  const label = `${number} collectives in their order, as wide as their payload`;
  return svg(
    "svg",
    { class: "sequence", width, height: 26, viewBox: `0 0 ${width} 26`, role: "img", "aria-label": label },
    blocks,
  );
}

function whose(plan, row) {
  const names = row[5].map((index) => plan.buckets[index].name);
  return names.length <= 3 ? names.join(", ") : `${count(names.length)} buckets`;
}

// Two predicted times as bars.
function duel(rows) {
  const most = Math.max(...rows.map(([, value]) => value)) || 1;
  return h(
    "div",
    { class: "duel" },
    rows.map(([name, value, key]) => [
      h("span", {}, name),
      h(
        "span",
        { class: "track" },
        h("span", { class: `bar s-${key}`, style: { width: `${Math.max(1, (100 * value) / most)}%` } }),
      ),
      h("span", { class: "right" }, seconds(value)),
    ]),
  );
}
