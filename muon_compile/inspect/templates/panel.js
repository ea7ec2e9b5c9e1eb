// The panel beside the page: one bucket, parameter, strategy, node or set of buckets, by the address after the #.

const panel = {
  node: h("aside", { class: "panel", id: "panel", tabindex: "-1", "aria-labelledby": "panel-title", hidden: true }),
  // Gives back what the panel was opened from, which may have been drawn anew meanwhile.
  opener: () => null,
};

// bucket/0/muon3: what, on which side of a comparison, and its name.
const address = (kind, side, name) => `#${kind}/${side}/${encodeURIComponent(name)}`;

function refinder(node) {
  const picture = node.closest(".drawn");
  const at = picture ? [...picture.querySelectorAll("[tabindex]")].indexOf(node) : -1;
  if (at >= 0) return () => picture.querySelectorAll("[tabindex]")[at];
  const table = node.matches(".body .row") && node.closest(".table").table;
  return table ? table.refinder() : () => node;
}

function go(kind, side, name) {
  if (panel.node.hidden) panel.opener = refinder(document.activeElement);
  const wanted = address(kind, side, name);
  if (location.hash === wanted) showPanel();
  else location.hash = wanted;
}

function closePanel() {
  if (panel.node.hidden) return;
  history.replaceState(null, "", location.href.split("#")[0]);
  showPanel();
  const back = panel.opener();
  (back && back.isConnected ? back : document.getElementById("search")).focus({ preventScroll: true });
}

// What the address names: {kind, side, name, index}, or null. A name that a file was edited to lack is null, too.
function parsed() {
  const match = /^#(bucket|param|strategy|node|buckets)\/(\w+)\/(.*)$/.exec(location.hash);
  if (!match) return null;
  const [, kind, side] = match;
  let name;
  try {
    name = decodeURIComponent(match[3]);
  } catch {
    return null;
  }
  if (kind === "node") {
    const graph = GRAPHS.find((one) => one.kind === side);
    const index = graph && graph.homes.get(name);
    return index === undefined ? null : { kind, side: 0, name, graph, index };
  }
  const plan = DATA.plans[Number(side)];
  if (!plan) return null;
  if (kind === "strategy") return name in plan.strategies ? { kind, side: Number(side), name } : null;
  if (kind === "buckets") {
    const indices = name
      .split(",")
      .map(Number)
      .filter((index) => plan.buckets[index]);
    return indices.length ? { kind, side: Number(side), name, indices } : null;
  }
  const index =
    kind === "bucket"
      ? plan.buckets.findIndex((one) => one.name === name)
      : plan.params.findIndex((one) => one[0] === name);
  return index < 0 ? null : { kind, side: Number(side), name, index };
}

function pickedBucket(side) {
  const view = parsed();
  if (!view || view.side !== side) return null;
  return view.kind === "bucket" ? view.index : view.kind === "param" ? DATA.plans[side].params[view.index][1] : null;
}

function showPanel() {
  const view = parsed();
  const was = panel.node.hidden;
  panel.node.hidden = !view;
  document.documentElement.classList.toggle("with-panel", !!view);
  const covered = !!view && matchMedia("(max-width: 900px)").matches;
  document.querySelector("main").inert = covered;
  panel.node.setAttribute("role", covered ? "dialog" : "complementary");
  if (covered) panel.node.setAttribute("aria-modal", "true");
  else panel.node.removeAttribute("aria-modal");
  document.dispatchEvent(new Event("picked"));
  if (!view) {
    panel.node.replaceChildren();
    return;
  }
  const plan = DATA.plans[view.side];
  const [name, about, ...content] = VIEWS[view.kind](plan, view);
  panel.node.replaceChildren(
    h(
      "header",
      { class: "panel-head" },
      h(
        "div",
        {},
        h("p", { class: "eyebrow" }, about),
        h("h2", { id: "panel-title", class: "mono", tabindex: "-1" }, name),
      ),
      h(
        "button",
        { type: "button", class: "quiet", onclick: closePanel, "aria-label": "Close the panel" },
        "Close",
        h("kbd", {}, "Esc"),
      ),
    ),
    h("div", { class: "panel-body" }, content),
  );
  panel.node.scrollTop = 0;
  panel.node.querySelectorAll(".table").forEach((node) => node.reveal && node.reveal());
  if (was || !panel.node.contains(document.activeElement))
    document.getElementById("panel-title").focus({ preventScroll: true });
}
