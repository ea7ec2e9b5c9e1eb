// A table of any length: only the rows in sight are in the page.

const ROW = 30;
const SPARE = 8;

class Table {
  // columns: {name, width, right, mono, tail, cell: row => text or node, sort: row => number or text}
  // open: row => void, where a row can be opened; key: row => whatever `select` is given
  constructor({ label, columns, rows, open, key, height = 400, minWidth = 0 }) {
    Object.assign(this, { columns, open, key, all: rows, rows: [...rows], at: 0, order: null, selected: undefined });
    this.head = h(
      "div",
      { role: "row", class: "row head" },
      columns.map((column, index) => this.heading(column, index)),
    );
    this.body = h("div", { role: "rowgroup", class: "body" });
    this.node = h(
      "div",
      { class: "table", role: open ? "grid" : "table", "aria-label": label, tabindex: open ? null : "0" },
      h("div", { role: "rowgroup", class: "heads" }, this.head),
      this.body,
    );
    const template = columns.map((column) => column.width || "minmax(0, 1fr)").join(" ");
    this.node.style.setProperty("--columns", template);
    this.node.style.setProperty("--least", `${minWidth}px`);
    this.node.style.maxHeight = `${height}px`;
    this.node.table = this;
    this.shown = new Map();
    this.node.addEventListener("scroll", () => this.draw());
    this.node.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(this.node);
    this.show(this.all);
  }

  heading(column, index) {
    const sort = column.sort && (() => this.sort(index));
    const content = sort ? h("button", { type: "button", class: "sort", onclick: sort }, column.name) : column.name;
    return h("div", { role: "columnheader", class: column.right ? "right" : null }, content);
  }

  // The rows to show, of which there may be none.
  show(rows) {
    this.all = rows;
    this.arrange();
  }

  sort(index) {
    const down = this.order && this.order.index === index ? !this.order.down : !!this.columns[index].right;
    this.order = { index, down };
    this.arrange();
  }

  arrange() {
    this.rows = [...this.all];
    if (this.order) {
      const { index, down } = this.order;
      const value = this.columns[index].sort;
      const sign = down ? -1 : 1;
      this.rows.sort((a, b) => {
        const [left, right] = [value(a), value(b)];
        return sign * (typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right);
      });
      [...this.head.children].forEach((cell, at) => {
        if (at === index) cell.setAttribute("aria-sort", down ? "descending" : "ascending");
        else cell.removeAttribute("aria-sort");
      });
    }
    this.at = Math.max(0, Math.min(this.at, this.rows.length - 1));
    this.node.setAttribute("aria-rowcount", this.rows.length + 1);
    this.body.style.height = `${this.rows.length * ROW}px`;
    this.body.replaceChildren();
    this.shown.clear();
    this.draw();
  }

  draw() {
    const { scrollTop, clientHeight } = this.node;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + (clientHeight || 400)) / ROW) + SPARE);
    for (const [index, row] of this.shown) {
      // The row that has the focus stays, or the keyboard would lose its place.
      if ((index < first || index >= last) && row !== document.activeElement) {
        row.remove();
        this.shown.delete(index);
      }
    }
    for (let index = first; index < last; index++) if (!this.shown.has(index)) this.add(index);
    // One row in sight is the table's place in the tab order.
    if (this.rows.length && !this.shown.has(this.at)) {
      this.at = Math.min(Math.ceil(scrollTop / ROW), this.rows.length - 1);
      this.shown.get(this.at).tabIndex = this.open ? 0 : -1;
    }
  }

  add(index) {
    const row = this.rows[index];
    const attributes = { role: "row", class: "row", "aria-rowindex": index + 2, style: { top: `${index * ROW}px` } };
    if (this.open) {
      attributes.tabindex = index === this.at ? "0" : "-1";
      attributes.onclick = (event) => event.target.closest("button") || this.openAt(index);
    }
    const node = h(
      "div",
      attributes,
      this.columns.map((column) => this.cell(column, row)),
    );
    if (this.key && this.key(row) === this.selected) node.setAttribute("aria-selected", "true");
    this.shown.set(index, node);
    this.body.append(node);
    return node;
  }

  cell(column, row) {
    const content = column.cell(row);
    const look = [column.right && "right", column.mono && "mono", column.tail && "tail"].filter(Boolean).join(" ");
    const text = typeof content === "string" ? content : null;
    const role = this.open ? "gridcell" : "cell";
    // Where it is cut, a name loses its start.
    const shown = column.tail ? h("bdi", { dir: "ltr" }, content) : content;
    return h("div", { role, class: look || null, title: text }, shown === null ? "" : shown);
  }

  openAt(index) {
    this.move(index);
    this.open(this.rows[index]);
  }

  move(index, focus = true) {
    const old = this.shown.get(this.at);
    if (old) old.tabIndex = -1;
    this.at = Math.max(0, Math.min(index, this.rows.length - 1));
    const top = this.at * ROW;
    const room = this.node.clientHeight - this.head.offsetHeight;
    if (top < this.node.scrollTop) this.node.scrollTop = top;
    else if (top + ROW > this.node.scrollTop + room) this.node.scrollTop = top + ROW - room;
    this.draw();
    const row = this.shown.get(this.at);
    if (!row) return;
    row.tabIndex = 0;
    if (focus) row.focus();
  }

  // Gives back the row that is the table's place in the tab order now, wherever it has been scrolled to.
  refinder() {
    const row = this.rows[this.at];
    return () => {
      const index = this.rows.indexOf(row);
      if (index < 0) return null;
      this.move(index, false);
      return this.shown.get(index);
    };
  }

  press(event) {
    if (!this.open || !event.target.matches("[role=row]")) return;
    const page = Math.max(1, Math.floor(this.node.clientHeight / ROW) - 2);
    const end = this.rows.length - 1;
    const targets = {
      ArrowDown: this.at + 1,
      ArrowUp: this.at - 1,
      PageDown: this.at + page,
      PageUp: this.at - page,
      Home: 0,
      End: end,
    };
    if (event.key in targets) this.move(targets[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.openAt(this.at);
    else return;
    event.preventDefault();
  }

  // Mark the row of that key, and bring it into sight if asked to.
  select(key, reveal = false) {
    this.selected = key;
    for (const [index, node] of this.shown) {
      if (this.key(this.rows[index]) === key) node.setAttribute("aria-selected", "true");
      else node.removeAttribute("aria-selected");
    }
    const index = reveal ? this.rows.findIndex((row) => this.key(row) === key) : -1;
    if (index < 0) return;
    this.node.scrollTop = Math.max(0, index * ROW - this.node.clientHeight / 3);
    this.at = index;
    this.draw();
  }
}
