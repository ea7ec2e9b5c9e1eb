// The page, for one plan or for two.

function header(heading, about, links) {
  return h(
    "header",
    { class: "top" },
    h("a", { class: "skip", href: "#flow" }, "Skip to the step"),
    h(
      "div",
      { class: "bar-top" },
      h("div", { class: "titles" }, h("h1", {}, heading), h("p", { class: "muted" }, about)),
      searchBox(),
      themeButton(),
    ),
    h(
      "nav",
      { "aria-label": "Sections" },
      links.filter(Boolean).map(([id, name]) => h("a", { href: `#${id}` }, name)),
    ),
  );
}

function reportPage() {
  const [plan] = DATA.plans;
  const named = DATA.title.includes(plan.digest) ? [] : ["plan ", mono(plan.digest), " · "];
  const about = h("span", {}, named, plan.mesh.axes.length ? plan.mesh.words : "one rank");
  const hyper = DATA.hyper.length ? hyperCard() : null;
  const stats = Object.keys(DATA.stats).length ? statsCard() : null;
  const links = [
    ["flow", "Step"],
    ["buckets", "Buckets"],
    ["loads", "Load"],
    ["collectives", "Collectives"],
    hyper && ["hyper", "Hyperparameters"],
    stats && ["stats", "Counters"],
    ["settings", "Settings"],
    GRAPHS.length && ["graph", "Graph"],
  ];
  return [
    header(DATA.title, about, links),
    h(
      "main",
      {},
      figures(plan),
      flowCard(plan),
      bucketsCard(plan),
      h("div", { class: "pair uneven" }, loadsCard(plan), collectivesCard(plan)),
      h("div", { class: "pair" }, hyper, stats, settingsCard(plan)),
      GRAPHS.length ? graphCard(plan) : null,
    ),
  ];
}

document.title = DATA.title;
document.body.prepend(...(COMPARED ? comparisonPage() : reportPage()), panel.node);
window.addEventListener("hashchange", showPanel);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") closePanel();
});
showPanel();
