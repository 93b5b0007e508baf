// Boards: linked heat maps with pickers, hover, lock and keys. Uses the functions of the other scripts.

const SCALES = { own: "each picture", row: "each row", all: "all pictures" };
const LISTED = 6;
const WIDEST = { strip: 640, single: 520, several: 400 };

class Board {
  /** @param {HTMLElement} root @param {any} data */
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.cells = data.cells;
    this.sequences = [...new Set(this.cells.flatMap(cell => cell.pictures.map(picture => picture.sequence)))];
    this.sequence = this.sequences[0];
    this.scale = "own";
    this.linear = false;
    this.apart = this.cells.some(cell => cell.apart);
    this.image = null;
    /** The chosen row of each axis, by its name and length: pictures with the same axis are linked. */
    this.rows = new Map();
    this.key = -1;
    this.locked = false;
    this.active = this.cells[0];
    for (const cell of this.cells) [cell.layer, cell.head] = [cell.start ?? 0, 0];
    this.build();
  }

  pictures(cell) {
    return cell.pictures.filter(picture => picture.sequence === this.sequence);
  }

  /** The pictures of each layer: one, or one for each of its heads. */
  layersOf(cell) {
    return byLayer(this.pictures(cell));
  }

  /** The pictures of the heads of the chosen layer. */
  headsOf(cell) {
    const layers = this.layersOf(cell);
    return layers[Math.min(cell.layer, layers.length - 1)];
  }

  picture(cell) {
    const heads = this.headsOf(cell);
    return heads[Math.min(cell.head, heads.length - 1)];
  }

  axis(picture) {
    return `${picture.names[0]} ${picture.rows}`;
  }

  row(picture) {
    const known = this.rows.get(this.axis(picture));
    if (known !== undefined) return known;
    return picture.rowTitles ? 0 : picture.query ?? picture.rows - 1;
  }

  /** The limit of the colours of a picture, or of the pictures that share its scale. */
  view(cell, picture) {
    const others = this.scale === "all" ? this.cells : this.cells.filter(one => one.row === cell.row);
    const shared = this.scale === "own" ? [picture] : others.flatMap(one => this.pictures(one));
    const limit = Math.max(...shared.map(one => this.limit(one)));
    return { limit, linear: this.linear, signed: this.data.signed, apart: this.apart };
  }

  /** Whether a query's own token has a score. */
  hasOwn(picture) {
    const row = picture.rows - 1;
    const own = ownColumn(picture, row);
    return own >= 0 && !Number.isNaN(picture.values[row * picture.columns + own]);
  }

  limit(picture) {
    picture.limits ??= [largest(picture, false), largest(picture, true)];
    return picture.limits[this.apart ? 1 : 0];
  }

  build() {
    const rows = [...new Set(this.cells.map(cell => cell.row))];
    const columns = Object.keys(this.data.columns);
    this.grid = make("div", { class: "ula-cells", style: `--columns:${columns.length}` });
    if (columns.length > 1) {
      for (const name of columns) {
        this.grid.append(make("div", { class: "column" }, make("b", {}, name), " ", make("small", {}, this.data.columns[name])));
      }
    }
    for (const row of rows) {
      if (rows.length > 1 || columns.length > 1) this.grid.append(make("h3", {}, row));
      for (const column of columns) {
        const cell = this.cells.find(one => one.row === row && one.column === column);
        this.grid.append(cell ? this.frame(cell, columns.length > 1) : make("div", { class: "absent" }, "not computed"));
      }
    }
    this.reader = make("section", { class: "ula-reader", "aria-label": "Scores of one row" });
    const folded = () => {
      const details = /** @type {HTMLDetailsElement} */ (make("details", { class: "ula-layers" }));
      details.open = this.cells.length === 1;
      details.addEventListener("toggle", () => thumbnails(this));
      return details;
    };
    [this.heads, this.layers] = [folded(), folded()];
    this.tip = make("div", { class: "ula-tip", "aria-hidden": "true" }, make("b"), make("span"));
    this.live = make("div", { class: "ula-live", "aria-live": "polite" });
    this.bar = make("div", { class: "ula-toolbar" });
    this.root.classList.toggle("single", this.cells.length === 1);
    this.root.append(this.bar, make("div", { class: "ula-main" }, this.grid, this.reader), this.heads, this.layers, this.tip, this.live);
    this.toolbar();
    this.draw();
    // A width is known only once the board is on the page, and changes with the window.
    let width = 0;
    new ResizeObserver(() => {
      if (this.grid.clientWidth !== width) {
        width = this.grid.clientWidth;
        this.draw();
      }
    }).observe(this.grid);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
    if (this.data.image) {
      const image = new Image();
      image.onload = () => {
        this.image = image;
        this.draw();
      };
      image.src = this.data.image;
    }
  }

  frame(cell, several) {
    const listen = {
      pointermove: event => this.point(cell, event),
      pointerleave: () => this.leave(),
      click: event => this.lock(cell, event),
      keydown: event => this.press(cell, event),
      focus: () => this.activate(cell),
    };
    cell.canvas = make("canvas", { "aria-hidden": "true" });
    cell.marks = { row: make("div", { class: "mark row" }), cell: make("div", { class: "mark cell" }) };
    cell.plot = make(
      "div", { class: "ula-plot", tabindex: "0", role: "application", "aria-roledescription": "heat map", ...listen },
      cell.canvas, cell.marks.row, cell.marks.cell,
    );
    cell.title = make("div", { class: "title" });
    cell.notes_ = make("p", { class: "notes" });
    cell.top = make("p", { class: "top" });
    const name = several ? make("b", { class: "where" }, cell.column) : null;
    return make("article", { class: "ula-cell" }, name, cell.title, cell.plot, cell.top, cell.notes_);
  }

  toolbar() {
    const field = (text, control) => make("label", {}, make("span", {}, text), control);
    const redraw = (name, read) => value => {
      this[name] = read(value);
      this.draw();
    };
    const parts = [];
    if (this.sequences.length > 1) {
      const choices = Object.fromEntries(this.sequences.map(index => [index, String(index)]));
      parts.push(field("Sequence", picker("Sequence", choices, String(this.sequence), redraw("sequence", Number))));
    }
    const deepest = Math.max(...this.cells.map(cell => this.layersOf(cell).length));
    if (deepest > 1 && this.cells.length > 1) {
      const choices = { start: "each its own", ...Object.fromEntries(Array.from({ length: deepest }, (_, i) => [`at ${i}`, String(i)])) };
      parts.push(field("Layer", this.layerPicker = picker("Layer", choices, "start", value => this.setLayers(value))));
    }
    if (this.cells.length > 1 || this.pictures(this.cells[0]).length > 1) {
      const { row, ...some } = SCALES;
      const choices = Object.keys(this.data.columns).length > 1 && this.cells.length > Object.keys(this.data.columns).length
        ? SCALES : some;
      parts.push(field("Scale of", picker("Scale", choices, this.scale, redraw("scale", String))));
    }
    const forms = { root: "square root", linear: "linear" };
    parts.push(field("Colours", picker("Colours", forms, "root", redraw("linear", value => value === "linear"))));
    if (this.cells.some(cell => cell.pictures.some(picture => this.hasOwn(picture)))) {
      const box = /** @type {HTMLInputElement} */ (make("input", { type: "checkbox", checked: this.apart }));
      box.addEventListener("change", () => redraw("apart", Boolean)(box.checked));
      parts.push(make("label", { class: "check" }, box, make("span", {}, "query's own token apart")));
    }
    this.legend = make("div", { class: "ula-legend" });
    this.bar.replaceChildren(...parts, this.legend);
  }

  setLayers(value) {
    for (const cell of this.cells) {
      const last = this.layersOf(cell).length - 1;
      cell.layer = value === "start" ? cell.start ?? 0 : Math.min(Number(value.slice(3)), last);
    }
    this.draw();
  }

  setLayer(cell, layer) {
    const { head } = this.picture(cell);
    cell.layer = layer;
    // The same head, if the page has it of this layer too.
    cell.head = Math.max(0, this.headsOf(cell).findIndex(picture => picture.head === head));
    if (this.layerPicker) this.layerPicker.value = "start";
    this.active = cell;
    this.draw();
  }

  setHead(cell, head) {
    cell.head = head;
    this.active = cell;
    this.draw();
  }

  /** The largest width of a picture, so that one and its reader fit in a window. */
  widest(picture) {
    if (picture.rowTitles) return WIDEST.strip;
    return this.cells.length === 1 ? WIDEST.single : WIDEST.several;
  }

  /** Draw everything that depends on scores, colours and widths. */
  draw() {
    for (const cell of this.cells) {
      const picture = this.picture(cell);
      const width = Math.max(140, Math.min(cell.plot.parentElement.clientWidth || 300, this.widest(picture)));
      cell.area = paint(cell.canvas, picture, this.view(cell, picture), { width, image: this.image });
      drawTitle(this, cell);
      cell.notes_.textContent = [picture.notes, cell.notes?.[cell.layer]].filter(Boolean).join(", ");
      const size = `${picture.rows} x ${picture.columns} scores, ${picture.names[0]} by ${picture.names[1]}`;
      const others = this.headsOf(cell).length > 1 ? `, with Shift the ${headWord(picture).toLowerCase()}` : "";
      const keys = `Arrow keys move, Enter locks the row, page keys change the layer${others}.`;
      cell.plot.setAttribute("aria-label", `${cell.column}, ${cell.row}, ${titled(picture)}: ${size}. ${keys}`);
    }
    drawLegend(this);
    this.refresh();
    thumbnails(this);
  }

  /** The name of a row or a column. */
  name(picture, axis, index) {
    const texts = axis ? picture.columnTokens : picture.rowTitles ?? picture.rowTokens;
    const word = picture.names[axis];
    if (picture.step > 1) return `${word} ${index * picture.step}\u2013${(index + 1) * picture.step - 1}`;
    if (!axis && picture.rowTitles) return texts[index];
    if (picture.grid && (axis || picture.rows === picture.columns)) {
      const place = picture.places.indexOf(index);
      if (place >= 0) return `${axis ? "" : "query "}patch (${Math.floor(place / picture.grid[1])}, ${place % picture.grid[1]})`;
    }
    return texts ? `${word} ${index} \u201c${texts[index]}\u201d` : `${word} ${index}`;
  }

  at(cell, event) {
    const picture = this.picture(cell);
    const { left, top, width, height, rows, columns } = cell.area;
    const box = cell.canvas.getBoundingClientRect();
    const clip = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    const row = clip((event.clientY - box.top - top) / height, rows);
    const column = clip((event.clientX - box.left - left) / width, columns);
    return picture.grid && picture.rows === 1 ? { row: 0, key: picture.places[row * columns + column] } : { row, key: column };
  }

  point(cell, event) {
    const picture = this.picture(cell);
    const { row, key } = this.at(cell, event);
    this.active = cell;
    this.key = key;
    if (!this.locked) this.rows.set(this.axis(picture), row);
    this.show(event, picture, row, key);
    this.refresh();
  }

  show(event, picture, row, key) {
    const reason = missing(picture, row, key);
    const [number, where] = /** @type {HTMLElement[]} */ ([...this.tip.children]);
    number.textContent = reason || digits(picture.values[row * picture.columns + key]);
    const names = [this.name(picture, 0, row), this.name(picture, 1, key)];
    where.textContent = picture.rows > 1 ? names.join(" \u2190 ") : names[1];
    this.tip.style.visibility = "visible";
    const right = event.clientX + 18 + this.tip.offsetWidth > document.documentElement.clientWidth;
    const x = right ? event.clientX - this.tip.offsetWidth - 12 : event.clientX + 16;
    const y = Math.min(event.clientY + 16, window.innerHeight - this.tip.offsetHeight - 8);
    this.tip.style.transform = `translate(${Math.max(4, x)}px, ${y}px)`;
  }

  leave() {
    this.tip.style.visibility = "hidden";
    this.key = -1;
    this.refresh();
  }

  activate(cell) {
    this.active = cell;
    this.refresh();
  }

  lock(cell, event) {
    const picture = this.picture(cell);
    const { row } = this.at(cell, event);
    const same = this.row(picture) === row;
    this.locked = !(this.locked && same);
    this.rows.set(this.axis(picture), row);
    this.active = cell;
    this.refresh();
    thumbnails(this);
  }

  press(cell, event) {
    const picture = this.picture(cell);
    const last = { row: picture.rows - 1, key: picture.columns - 1 };
    const row = this.row(picture);
    const key = Math.max(0, this.key);
    const patches = picture.grid && picture.rows === 1 ? picture.places : null;
    const beside = step => {
      const place = patches.indexOf(key) + step * picture.grid[1];
      return { key: patches[place] ?? key };
    };
    const moves = {
      ArrowUp: patches ? beside(-1) : { row: row - 1 },
      ArrowDown: patches ? beside(1) : { row: row + 1 },
      ArrowLeft: { key: key - 1 },
      ArrowRight: { key: this.key < 0 ? 0 : key + 1 },
      Home: { key: 0 },
      End: { key: last.key },
    };
    if (event.key in moves) {
      const move = { row, key: this.key, ...moves[event.key] };
      this.rows.set(this.axis(picture), Math.min(last.row, Math.max(0, move.row)));
      this.key = Math.min(last.key, Math.max(-1, move.key));
    } else if (event.key === "PageUp" || event.key === "PageDown") {
      const step = event.key === "PageDown" ? 1 : -1;
      const [to, count] = event.shiftKey
        ? [cell.head + step, this.headsOf(cell).length] : [cell.layer + step, this.layersOf(cell).length];
      if (to >= 0 && to < count) event.shiftKey ? this.setHead(cell, to) : this.setLayer(cell, to);
    } else if (event.key === "Enter" || event.key === " ") this.locked = !this.locked;
    else if (event.key === "Escape") this.locked = false;
    else return;
    event.preventDefault();
    this.active = cell;
    this.refresh();
    const now = this.picture(cell);
    const at = this.row(now);
    const score = this.key < 0 ? "" : `, ${this.name(now, 1, this.key)}: ${missing(now, at, this.key) || digits(now.values[at * now.columns + this.key])}`;
    this.live.textContent = `${titled(now)}, ${this.name(now, 0, at)}${score}. Largest: ${this.topText(now, 3)}`;
  }

  /** The columns of a row by decreasing absolute score; an own token that is apart and missing scores are left out. */
  ranked(picture, count) {
    const row = this.row(picture);
    const own = this.apart ? ownColumn(picture, row) : -1;
    const from = row * picture.columns;
    const order = [];
    for (let key = 0; key < picture.columns; key += 1) {
      const patch = !picture.grid || picture.places.includes(key);
      if (key !== own && patch && !missing(picture, row, key) && picture.values[from + key]) order.push(key);
    }
    return order.sort((a, b) => Math.abs(picture.values[from + b]) - Math.abs(picture.values[from + a])).slice(0, count);
  }

  topText(picture, count) {
    const from = this.row(picture) * picture.columns;
    const short = key => this.name(picture, 1, key).replace(`${picture.names[1]} `, "");
    return this.ranked(picture, count).map(key => `${short(key)} ${digits(picture.values[from + key])}`).join(", ") || "none";
  }

  /** Move the marks and rewrite the texts of the chosen row. */
  refresh() {
    for (const cell of this.cells) {
      const picture = this.picture(cell);
      const { left, top, width, height, rows, columns } = cell.area;
      const row = this.row(picture);
      const patches = picture.grid && picture.rows === 1;
      const place = patches ? picture.places.indexOf(this.key) : this.key;
      const [i, j] = patches ? [Math.floor(place / columns), place % columns] : [row, place];
      const put = (mark, shown, x, y, wide, high) => {
        mark.hidden = !shown;
        mark.style.cssText = `left:${x}px;top:${y}px;width:${wide}px;height:${high}px`;
      };
      const [wide, high] = [width / columns, height / rows];
      put(cell.marks.row, picture.rows > 1, left, top + row * high, width, high);
      put(cell.marks.cell, place >= 0 && place < rows * columns && j < columns, left + j * wide, top + i * high, wide, high);
      cell.plot.classList.toggle("locked", this.locked && picture.rows > 1);
      cell.plot.classList.toggle("active", cell === this.active && this.cells.length > 1);
      cell.top.textContent = `${picture.rows > 1 ? `${this.name(picture, 0, row)}: ` : ""}${this.topText(picture, 3)}`;
    }
    read(this);
  }

  print(on) {
    this.root.closest(".ula").toggleAttribute("data-print", on);
    this.draw();
  }

}

// Each fragment of a notebook brings this script, which starts the boards that no earlier one has started.
for (const root of document.querySelectorAll(".ula-board:not([data-started])")) {
  root.setAttribute("data-started", "");
  const data = JSON.parse(root.querySelector("script").textContent);
  unpack(data).then(() => new Board(root, data)).then(
    () => root.setAttribute("data-ready", ""),
    error => root.append(make("p", { class: "failed" }, `The pictures could not be drawn: ${error}`)),
  );
}
