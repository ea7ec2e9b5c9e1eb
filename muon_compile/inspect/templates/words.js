"use strict";

// Numbers and names as people read them.

const DATA = JSON.parse(document.getElementById("data").textContent);
const COMPARED = DATA.mode === "comparison";
const SIDES = COMPARED ? ["Before", "After"] : [""];
// Between a number and its unit: no line break.
const GAP = "\u00a0";

// What a step does with a bucket, in order, and what is counted of it.
const COLUMNS = [
  { key: "momentum_bytes", name: "Momentum", short: "Momentum", what: "gradients and momentum", unit: "bytes" },
  { key: "send_bytes", name: "Send", short: "Send", what: "payload of what is sent", unit: "bytes" },
  { key: "solve_flops", name: "Newton–Schulz", short: "N–S", what: "products", unit: "flops" },
  { key: "return_bytes", name: "Return", short: "Return", what: "payload of what comes back", unit: "bytes" },
  { key: "update_bytes", name: "Update", short: "Update", what: "parameters", unit: "bytes" },
];
const GRAPH_NAMES = { all: "All gradients present", masked: "Some gradients missing" };

function scaled(value, base, units) {
  let power = 0;
  while (Math.abs(value) >= base && power < units.length - 1) {
    value /= base;
    power += 1;
  }
  const size = Math.abs(value);
  const places = Number.isInteger(value) ? 0 : size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  const text = value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  return text + GAP + units[power];
}

const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const flops = (value) => scaled(value, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);
const seconds = (value) => scaled(value * 1e9, 1000, ["ns", "µs", "ms", "s"]);
const count = (value) => value.toLocaleString("en");
const large = (value) => scaled(value, 1000, ["", "thousand", "million", "billion", "trillion"]).trim();
const percent = (value) => {
  const places = value !== 0 && Math.abs(value) < 0.0995 ? 1 : 0;
  const text = (100 * value).toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  return `${text}${GAP}%`;
};
const plural = (value, one, many) => `${count(value)}${GAP}${value === 1 ? one : many || one + "s"}`;
const amount = (column, value) => (column.unit === "flops" ? flops : bytes)(value);

function strategyName(key) {
  return { none: "no exchange", adamw: "AdamW" }[key] || key;
}

// A value of a configuration, a counter or a hyperparameter.
function valueText(value) {
  if (value === null || value === undefined) return "none";
  if (value === true) return "yes";
  if (value === false) return "no";
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : String(Number(value.toPrecision(6)));
  if (Array.isArray(value)) return value.map(valueText).join(", ");
  if (typeof value === "object")
    return (
      Object.entries(value)
        .map(([k, v]) => `${k} ${valueText(v)}`)
        .join(", ") || "none"
    );
  return String(value);
}

const SUFFIXES = [
  [/_bytes$|^bytes$/, bytes],
  [/_seconds$|^seconds$/, seconds],
];

function statText(name, value) {
  const unit = typeof value === "number" && SUFFIXES.find(([pattern]) => pattern.test(name));
  return unit ? unit[1](value) : valueText(value);
}

const title = (name) => (name.charAt(0).toUpperCase() + name.slice(1)).replaceAll("_", " ");

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1) + ".";

// Names of one bucket with their numbers left out: layers.0.w and layers.1.w are layers.*.w.
function patterns(plan, bucket) {
  if (!bucket.patterns) {
    const found = new Set(bucket.params.map((index) => plan.params[index][0].replace(/\d+/g, "*")));
    bucket.patterns = bucket.params.length === 1 ? [plan.params[bucket.params[0]][0]] : [...found];
  }
  return bucket.patterns;
}

function patternText(plan, bucket) {
  const [first, ...more] = patterns(plan, bucket);
  return more.length ? `${first}, ${count(more.length)} more` : first;
}

const sizeText = (bucket) => (bucket.count === 1 ? bucket.shape : `${count(bucket.count)} of ${bucket.shape}`);

const context2d = document.createElement("canvas").getContext("2d");

// The text cut on its left to so many pixels: the end of a parameter's name tells it apart.
function fitted(text, pixels, font) {
  context2d.font = font;
  if (context2d.measureText(text).width <= pixels) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (context2d.measureText("…" + text.slice(middle)).width <= pixels) high = middle;
    else low = middle + 1;
  }
  return low < text.length ? "…" + text.slice(low) : "";
}
