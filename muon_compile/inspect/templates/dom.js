// Elements. Every text goes in as a text node, so no name is ever read as markup.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const chip = (key) =>
  h("span", { class: "chip" }, h("i", { class: `dot s-${key}`, "aria-hidden": "true" }), strategyName(key));
const mono = (text) => h("span", { class: "mono" }, text);

// Pairs of a name and a text, a node, or nothing.
function facts(pairs) {
  const shown = pairs.filter((pair) => pair && pair[1] !== "" && pair[1] !== null && pair[1] !== undefined);
  return h(
    "dl",
    { class: "facts" },
    shown.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

function link(text, open, attributes) {
  return h("button", { type: "button", class: "link", onclick: open, ...attributes }, text);
}

// Draw now and whenever the width changes.
function responsive(draw) {
  const box = h("div", { class: "drawn" });
  let last = 0;
  const redraw = () => {
    const width = Math.floor(box.clientWidth);
    if (width && width !== last) {
      last = width;
      // What has the focus has it in the new picture, too.
      const at = [...box.querySelectorAll("[tabindex]")].indexOf(document.activeElement);
      box.replaceChildren(draw(width));
      if (at >= 0) box.querySelectorAll("[tabindex]")[at].focus({ preventScroll: true });
    }
  };
  new ResizeObserver(redraw).observe(box);
  box.redraw = () => {
    last = 0;
    redraw();
  };
  return box;
}

const THEMES = ["auto", "light", "dark"];

function stored(name, value) {
  // A page that was opened from a file may have no storage.
  try {
    if (value !== undefined) localStorage.setItem(name, value);
    return localStorage.getItem(name);
  } catch {
    return null;
  }
}

function themeButton() {
  const button = h("button", { type: "button", class: "quiet", id: "theme" });
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Colour theme: ${theme}. Change it`);
  };
  const saved = stored("muon_compile.theme");
  apply(THEMES.includes(saved) ? saved : "auto");
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    stored("muon_compile.theme", next);
    apply(next);
  });
  return button;
}
