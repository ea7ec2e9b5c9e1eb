// One box for parameters, buckets, strategies and nodes.

const SHOWN = 6;

// Everything that can be found: {kind, words: what is looked in, name, about, why, open}.
function searchEntries() {
  const found = [];
  DATA.plans.forEach((plan, side) => {
    const where = COMPARED ? `${SIDES[side].toLowerCase()}: ` : "";
    plan.params.forEach(([name, home]) => {
      const bucket = plan.buckets[home];
      const form = bucket.forms.map((one) => one.form).join(", ");
      const about = `${where}${bucket.name} · ${strategyName(bucket.strategy)}${form ? " · " + form : ""}`;
      found.push({
        kind: "Parameters",
        name,
        words: name,
        about,
        why: bucket.why,
        open: () => go("param", side, name),
      });
    });
    plan.buckets.forEach((bucket) => {
      const about = `${where}${sizeText(bucket)} · ${strategyName(bucket.strategy)}`;
      const words = `${bucket.name} ${bucket.shape} ${bucket.shape.replaceAll(" × ", "x")}`;
      found.push({
        kind: "Buckets",
        name: bucket.name,
        words,
        about,
        why: bucket.why,
        open: () => go("bucket", side, bucket.name),
      });
    });
    Object.entries(plan.strategies).forEach(([key, words]) => {
      const about = where + plural(plan.buckets.filter((bucket) => bucket.strategy === key).length, "bucket");
      const name = strategyName(key);
      found.push({
        kind: "Strategies",
        name,
        words: `${key} ${name}`,
        about,
        why: words,
        open: () => go("strategy", side, key),
      });
    });
  });
  GRAPHS.forEach((graph) => {
    for (let index = 0; index < graph.size; index++) {
      const name = graph.name(index);
      const about = [GRAPHS.length > 1 ? graph.kind : "", graph.target(index), graph.text("phase", index)]
        .filter(Boolean)
        .join(" · ");
      found.push({
        kind: "Nodes",
        name,
        words: `${name} ${graph.text("op", index) === "placeholder" ? "" : graph.text("target", index)}`,
        about,
        why: "",
        open: () => go("node", graph.kind, name),
      });
    }
  });
  for (const entry of found) entry.words = entry.words.toLowerCase();
  return found;
}

// Better matches are lower: the whole name, its start, the start of a word, anywhere.
function rankOf(entry, tokens, whole) {
  for (const token of tokens) if (!entry.words.includes(token)) return -1;
  const name = entry.name.toLowerCase();
  if (name === whole) return 0;
  if (name.startsWith(whole)) return 1;
  const at = entry.words.indexOf(whole);
  return at > 0 && !/[a-z0-9]/.test(entry.words[at - 1]) ? 2 : 3;
}

function find(entries, text) {
  const whole = text.trim().toLowerCase();
  const tokens = whole.split(/\s+/).filter(Boolean);
  const kinds = new Map(["Parameters", "Buckets", "Strategies", "Nodes"].map((kind) => [kind, []]));
  if (tokens.length)
    for (const entry of entries) {
      const rank = rankOf(entry, tokens, whole);
      if (rank >= 0) kinds.get(entry.kind).push([rank, entry]);
    }
  for (const rows of kinds.values()) rows.sort((a, b) => a[0] - b[0]);
  return kinds;
}

function searchBox() {
  let entries = null;
  let options = [];
  let at = -1;
  const what = GRAPHS.length ? "parameters, buckets, strategies, nodes" : "parameters, buckets, strategies";
  const input = h("input", {
    id: "search",
    type: "search",
    role: "combobox",
    autocomplete: "off",
    spellcheck: "false",
    placeholder: `Find ${what}`,
    "aria-label": `Find ${what}`,
    "aria-expanded": "false",
    "aria-controls": "results",
    "aria-autocomplete": "list",
  });
  const list = h("div", { id: "results", role: "listbox", "aria-label": "Found", hidden: true });
  const status = h("span", { class: "unseen", role: "status" });

  const mark = (index) => {
    if (options[at]) options[at].node.removeAttribute("aria-selected");
    at = options.length ? (index + options.length) % options.length : -1;
    if (at < 0) return input.removeAttribute("aria-activedescendant");
    options[at].node.setAttribute("aria-selected", "true");
    options[at].node.scrollIntoView({ block: "nearest" });
    input.setAttribute("aria-activedescendant", options[at].node.id);
  };
  const close = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
  };
  const choose = (index) => {
    const option = options[index];
    close();
    if (option) option.open();
  };
  const option = (open, ...content) => {
    const index = options.length;
    const node = h(
      "div",
      {
        role: "option",
        id: `result-${index}`,
        class: "option",
        onmousedown: (event) => event.preventDefault(),
        onclick: () => choose(index),
      },
      content,
    );
    options.push({ node, open });
    return node;
  };
  const show = () => {
    entries = entries || searchEntries();
    options = [];
    const text = input.value.trim();
    if (!text) return close();
    const kinds = find(entries, text);
    let total = 0;
    const groups = [...kinds]
      .filter(([, rows]) => rows.length)
      .map(([kind, rows]) => {
        total += rows.length;
        return h(
          "div",
          { role: "group", "aria-label": kind },
          h("p", { class: "kind" }, kind, h("span", {}, count(rows.length))),
          rows
            .slice(0, SHOWN)
            .map(([, entry]) =>
              option(
                entry.open,
                h("span", { class: "mono name" }, entry.name),
                h("span", { class: "about" }, entry.about),
                entry.why && h("span", { class: "why" }, entry.why),
              ),
            ),
          kind === "Nodes" && rows.length > SHOWN
            ? option(
                () => filterGraph(GRAPHS[0].kind, { text, phase: "", bucket: "" }),
                h("span", { class: "more" }, `Show all nodes with “${text}” in the graph`),
              )
            : rows.length > SHOWN && h("p", { class: "more muted" }, `and ${count(rows.length - SHOWN)} more; type on`),
        );
      });
    list.replaceChildren(...(groups.length ? groups : [h("p", { class: "muted more" }, "Nothing has that name.")]));
    status.textContent = `${count(total)} found`;
    list.hidden = false;
    list.scrollTop = 0;
    input.setAttribute("aria-expanded", "true");
    at = -1;
    if (options.length) mark(0);
  };
  input.addEventListener("input", show);
  input.addEventListener("focus", show);
  input.addEventListener("blur", close);
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      if (list.hidden) show();
      else mark(at + (event.key === "ArrowDown" ? 1 : -1));
      event.preventDefault();
    } else if (event.key === "Enter" && !list.hidden) {
      choose(at);
    } else if (event.key === "Escape" && (!list.hidden || input.value)) {
      input.value = "";
      close();
      event.stopPropagation();
    }
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, textarea, select");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      input.focus();
      input.select();
      event.preventDefault();
    }
  });
  return h("div", { class: "search", role: "search" }, input, h("kbd", { "aria-hidden": "true" }, "/"), list, status);
}
