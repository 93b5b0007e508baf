// Boards: linked heat maps with pickers, hover, lock and keys. Uses the functions of the other scripts.

const SCALES = { own: "each picture", row: "each row", all: "all pictures" };
const LISTED = 6;
const WIDEST = { strip: 640, single: 520, several: 400, image: 240 };

class Board {
  /** @param {HTMLElement} root @param {any} data */
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.cells = /** @type {Cell[]} */ (data.cells);
    this.sequences = [...new Set(this.cells.flatMap(cell => cell.pictures.map(picture => picture.sequence)))];
    this.sequence = this.sequences[0];
    this.scale = "own";
    this.linear = false;
    this.apart = this.cells.some(cell => cell.apart);
    this.sinks = true;
    /** The images beneath patches that are loaded. */
    this.images = /** @type {HTMLImageElement[]} */ ([]);
    /** The chosen row of each axis, by its name and length: pictures with the same axis are linked. */
    this.rows = /** @type {Map<string, number>} */ (new Map());
    this.key = -1;
    this.locked = false;
    this.active = this.cells[0];
    this.grid = make("div", { class: "ula-cells" });
    this.reader = make("section", { class: "ula-reader", "aria-label": "Scores of one row" });
    /** The elements of the reader of `parts.picture`. */
    this.parts = /** @type {any} */ (null);
    this.heads = make("details", { class: "ula-layers" });
    this.layers = make("details", { class: "ula-layers" });
    this.layerPicker = /** @type {?HTMLSelectElement} */ (null);
    this.tip = make("div", { class: "ula-tip", "aria-hidden": "true" }, make("b"), make("span"));
    this.live = make("div", { class: "ula-live", "aria-live": "polite" });
    this.legend = make("div", { class: "ula-legend" });
    this.bar = make("div", { class: "ula-toolbar" });
    for (const cell of this.cells) [cell.layer, cell.head] = [cell.start ?? 0, 0];
    this.build();
  }

  pictures(/** @type {Cell} */ cell) {
    return cell.pictures.filter(picture => picture.sequence === this.sequence);
  }

  /** The pictures of each layer: one, or one for each of its heads. */
  layersOf(/** @type {Cell} */ cell) {
    return byLayer(this.pictures(cell));
  }

  /** The pictures of the heads of the chosen layer. */
  headsOf(/** @type {Cell} */ cell) {
    const layers = this.layersOf(cell);
    return layers[Math.min(cell.layer, layers.length - 1)];
  }

  picture(/** @type {Cell} */ cell) {
    const heads = this.headsOf(cell);
    return heads[Math.min(cell.head, heads.length - 1)];
  }

  /** The image beneath the patches of a picture, or null. */
  beneath(/** @type {Picture} */ picture) {
    return picture.image === undefined ? null : this.images[picture.image] ?? null;
  }

  axis(/** @type {Picture} */ picture) {
    return `${picture.names[0]} ${picture.rows}`;
  }

  row(/** @type {Picture} */ picture) {
    const known = this.rows.get(this.axis(picture));
    if (known !== undefined) return known;
    return picture.rowTitles ? 0 : picture.query ?? picture.rows - 1;
  }

  /** The limit of the colours of a picture, or of the pictures that share its scale. */
  view(/** @type {Cell} */ cell, /** @type {Picture} */ picture) {
    const others = this.scale === "all" ? this.cells : this.cells.filter(one => one.row === cell.row);
    const shared = this.scale === "own" ? [picture] : others.flatMap(one => this.pictures(one));
    const limit = Math.max(...shared.map(one => this.limit(one)));
    return { limit, linear: this.linear, signed: this.data.signed, apart: this.apart, sinks: this.sinks };
  }

  /** Whether a query's own token has a score. */
  hasOwn(/** @type {Picture} */ picture) {
    const row = picture.rows - 1;
    const own = ownColumn(picture, row);
    return own >= 0 && !Number.isNaN(picture.values[row * picture.columns + own]);
  }

  limit(/** @type {Picture} */ picture) {
    picture.limits ??= {};
    return picture.limits[`${this.apart} ${this.sinks}`] ??= largest(picture, this);
  }

  build() {
    const rows = [...new Set(this.cells.map(cell => cell.row))];
    const columns = Object.keys(this.data.columns);
    this.grid.style.setProperty("--columns", String(columns.length));
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
    for (const details of [this.heads, this.layers]) {
      details.open = this.cells.length === 1;
      details.addEventListener("toggle", () => thumbnails(this));
    }
    this.root.classList.toggle("single", this.cells.length === 1);
    this.root.append(this.bar, make("div", { class: "ula-main" }, this.grid, this.reader), this.heads, this.layers, this.tip, this.live);
    toolbar(this);
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
    for (const [index, source] of this.data.images.entries()) {
      const image = new Image();
      image.onload = () => {
        this.images[index] = image;
        this.draw();
      };
      image.src = source;
    }
  }

  frame(/** @type {Cell} */ cell, /** @type {boolean} */ several) {
    const listen = {
      pointermove: (/** @type {PointerEvent} */ event) => this.point(cell, event),
      pointerleave: () => this.leave(),
      click: (/** @type {PointerEvent} */ event) => this.lock(cell, event),
      keydown: (/** @type {KeyboardEvent} */ event) => this.press(cell, event),
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

  setLayers(/** @type {string} */ value) {
    for (const cell of this.cells) {
      const last = this.layersOf(cell).length - 1;
      cell.layer = value === "start" ? cell.start ?? 0 : Math.min(Number(value.slice(3)), last);
    }
    this.draw();
  }

  setLayer(/** @type {Cell} */ cell, /** @type {number} */ layer) {
    const { head } = this.picture(cell);
    cell.layer = layer;
    // The same head, if the page has it of this layer too.
    cell.head = Math.max(0, this.headsOf(cell).findIndex(picture => picture.head === head));
    if (this.layerPicker) this.layerPicker.value = "start";
    this.active = cell;
    this.draw();
  }

  setHead(/** @type {Cell} */ cell, /** @type {number} */ head) {
    cell.head = head;
    this.active = cell;
    this.draw();
  }

  /** The largest width of a picture, so that one and its reader fit in a window. */
  widest(/** @type {Picture} */ picture) {
    if (picture.rowTitles) return WIDEST.strip;
    if (this.cells.length === 1) return WIDEST.single;
    return picture.grid && picture.rows === 1 ? WIDEST.image : WIDEST.several;
  }

  /** Draw everything that depends on scores, colours and widths. */
  draw() {
    for (const cell of this.cells) {
      const picture = this.picture(cell);
      const width = Math.max(140, Math.min(cell.plot.parentElement?.clientWidth || 300, this.widest(picture)));
      cell.area = paint(cell.canvas, picture, this.view(cell, picture), { width, image: this.beneath(picture) });
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
  name(/** @type {Picture} */ picture, /** @type {number} */ axis, /** @type {number} */ index) {
    const texts = axis ? picture.columnTokens : picture.rowTitles ?? picture.rowTokens;
    const word = picture.names[axis];
    if (picture.step > 1) return `${word} ${index * picture.step}\u2013${(index + 1) * picture.step - 1}`;
    if (!axis && picture.rowTitles) return picture.rowTitles[index];
    if (picture.grid && (axis || picture.rows === picture.columns)) {
      const place = picture.places.indexOf(index);
      if (place >= 0) return `${axis ? "" : "query "}patch (${Math.floor(place / picture.grid[1])}, ${place % picture.grid[1]})`;
    }
    return texts ? `${word} ${index} \u201c${isolated(texts[index])}\u201d` : `${word} ${index}`;
  }

  at(/** @type {Cell} */ cell, /** @type {PointerEvent} */ event) {
    const picture = this.picture(cell);
    const { left, top, width, height, rows, columns } = cell.area;
    const box = cell.canvas.getBoundingClientRect();
    const clip = (/** @type {number} */ share, /** @type {number} */ count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    const row = clip((event.clientY - box.top - top) / height, rows);
    const column = clip((event.clientX - box.left - left) / width, columns);
    return picture.grid && picture.rows === 1 ? { row: 0, key: picture.places[row * columns + column] } : { row, key: column };
  }

  point(/** @type {Cell} */ cell, /** @type {PointerEvent} */ event) {
    const picture = this.picture(cell);
    const { row, key } = this.at(cell, event);
    this.active = cell;
    this.key = key;
    if (!this.locked) this.rows.set(this.axis(picture), row);
    this.show(event, picture, row, key);
    this.refresh();
  }

  show(/** @type {PointerEvent} */ event, /** @type {Picture} */ picture, /** @type {number} */ row, /** @type {number} */ key) {
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

  activate(/** @type {Cell} */ cell) {
    this.active = cell;
    this.refresh();
  }

  lock(/** @type {Cell} */ cell, /** @type {PointerEvent} */ event) {
    const picture = this.picture(cell);
    const { row } = this.at(cell, event);
    const same = this.row(picture) === row;
    this.locked = !(this.locked && same);
    this.rows.set(this.axis(picture), row);
    this.active = cell;
    this.refresh();
    thumbnails(this);
  }

  press(/** @type {Cell} */ cell, /** @type {KeyboardEvent} */ event) {
    const picture = this.picture(cell);
    const last = { row: picture.rows - 1, key: picture.columns - 1 };
    const row = this.row(picture);
    const key = Math.max(0, this.key);
    const patches = picture.grid && picture.rows === 1;
    const across = picture.grid ? picture.grid[1] : 0;
    const beside = (/** @type {number} */ step) => ({ key: picture.places[picture.places.indexOf(key) + step] ?? key });
    /** @type {Object<string, {row?: number, key?: number}>} */
    const moves = {
      ArrowUp: patches ? beside(-across) : { row: row - 1 },
      ArrowDown: patches ? beside(across) : { row: row + 1 },
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

  /** The columns of a row by decreasing absolute score, without missing ones and tokens that are apart. */
  ranked(/** @type {Picture} */ picture, /** @type {number} */ count) {
    const row = this.row(picture);
    const from = row * picture.columns;
    const order = [];
    for (let key = 0; key < picture.columns; key += 1) {
      const patch = !picture.grid || picture.places.includes(key);
      if (!leftOut(picture, row, key, this) && patch && !missing(picture, row, key) && picture.values[from + key]) order.push(key);
    }
    return order.sort((a, b) => Math.abs(picture.values[from + b]) - Math.abs(picture.values[from + a])).slice(0, count);
  }

  topText(/** @type {Picture} */ picture, /** @type {number} */ count) {
    const from = this.row(picture) * picture.columns;
    const short = (/** @type {number} */ key) => this.name(picture, 1, key).replace(`${picture.names[1]} `, "");
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
      /** @type {(mark: HTMLElement, shown: boolean, x: number, y: number, wide: number, high: number) => void} */
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

  print(/** @type {boolean} */ on) {
    this.root.closest(".ula")?.toggleAttribute("data-print", on);
    this.draw();
  }

}

// Each fragment of a notebook brings this script, which starts the boards that no earlier one has started.
for (const root of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".ula-board:not([data-started])"))) {
  root.setAttribute("data-started", "");
  const data = JSON.parse(root.querySelector("script")?.textContent ?? "");
  unpack(data).then(() => new Board(root, data)).then(
    () => root.setAttribute("data-ready", ""),
    error => root.append(make("p", { class: "failed" }, `The pictures could not be drawn: ${error}`)),
  );
}
