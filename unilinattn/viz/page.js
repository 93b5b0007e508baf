// Boards: linked heat maps with pickers, a reader of one row, and downloads. Uses the functions of maps.js.

const SCALES = { own: "each picture", row: "each row", all: "all pictures" };
const LISTED = 6;
const WIDEST = { strip: 640, single: 520, several: 400 };

/** An element with attributes, properties of which a function is a listener, and children. */
function make(/** @type {string} */ tag, /** @type {Object<string, any>} */ attributes = {}, /** @type {any[]} */ ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}

/** A score to three digits. */
function digits(/** @type {number} */ value) {
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  return value === 0 ? "0" : size < 1e-3 || size >= 1e5 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

/** A choice among named values. */
function picker(
  /** @type {string} */ name, /** @type {Object<string, string>} */ choices, /** @type {string} */ chosen,
  /** @type {(value: string) => void} */ choose,
) {
  const options = Object.entries(choices).map(([value, text]) => make("option", { value, selected: value === chosen }, text));
  const select = /** @type {HTMLSelectElement} */ (make("select", { "aria-label": name }, ...options));
  select.addEventListener("change", () => choose(select.value));
  return select;
}

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
    for (const cell of this.cells) cell.layer = cell.start ?? 0;
    this.build();
  }

  pictures(cell) {
    return cell.pictures.filter(picture => picture.sequence === this.sequence);
  }

  picture(cell) {
    const pictures = this.pictures(cell);
    return pictures[Math.min(cell.layer, pictures.length - 1)];
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
    this.layers = /** @type {HTMLDetailsElement} */ (make("details", { class: "ula-layers" }));
    this.layers.open = this.cells.length === 1;
    this.layers.addEventListener("toggle", () => this.thumbnails());
    this.tip = make("div", { class: "ula-tip", "aria-hidden": "true" }, make("b"), make("span"));
    this.live = make("div", { class: "ula-live", "aria-live": "polite" });
    this.bar = make("div", { class: "ula-toolbar" });
    this.root.classList.toggle("single", this.cells.length === 1);
    this.root.append(this.bar, make("div", { class: "ula-main" }, this.grid, this.reader), this.layers, this.tip, this.live);
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
    const deepest = Math.max(...this.cells.map(cell => this.pictures(cell).length));
    if (deepest > 1 && this.cells.length > 1) {
      const choices = { start: "each its own", ...Object.fromEntries(Array.from({ length: deepest }, (_, i) => [`at ${i}`, String(i)])) };
      parts.push(field("Layer", this.layerPicker = picker("Layer", choices, "start", value => this.setLayers(value))));
    }
    if (this.cells.length > 1 || deepest > 1) {
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
      const last = this.pictures(cell).length - 1;
      cell.layer = value === "start" ? cell.start ?? 0 : Math.min(Number(value.slice(3)), last);
    }
    this.draw();
  }

  setLayer(cell, layer) {
    cell.layer = layer;
    if (this.layerPicker) this.layerPicker.value = "start";
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
      const pictures = this.pictures(cell);
      const width = Math.max(140, Math.min(cell.plot.parentElement.clientWidth || 300, this.widest(picture)));
      cell.area = paint(cell.canvas, picture, this.view(cell, picture), { width, image: this.image });
      const choices = Object.fromEntries(pictures.map((one, index) => [index, one.title]));
      const choose = value => this.setLayer(cell, Number(value));
      const name = `Layer of ${cell.column} ${cell.row}`;
      cell.title.replaceChildren(pictures.length > 1 ? picker(name, choices, String(cell.layer), choose) : picture.title);
      cell.notes_.textContent = [picture.notes, cell.notes?.[cell.layer]].filter(Boolean).join(", ");
      const size = `${picture.rows} x ${picture.columns} scores, ${picture.names[0]} by ${picture.names[1]}`;
      const keys = "Arrow keys move, Enter locks the row, page keys change the layer.";
      cell.plot.setAttribute("aria-label", `${cell.column}, ${cell.row}, ${picture.title}: ${size}. ${keys}`);
    }
    this.drawLegend();
    this.refresh();
    this.thumbnails();
  }

  drawLegend() {
    const { signed } = this.data;
    const view = { limit: 1, linear: this.linear, signed, apart: this.apart };
    const shares = signed ? [-1, -0.25, 0, 0.25, 1] : this.linear ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.1, 0.25, 0.5, 1];
    const limit = this.scale === "all" ? this.view(this.active, this.picture(this.active)).limit : 0;
    const marks = shares.map(share => {
      const place = shade(share, view);
      const text = limit ? digits(share * limit) : `${Math.round(share * 100)}%`;
      return make("span", { style: `left:${100 * (signed ? (place + 1) / 2 : place)}%` }, text);
    });
    const words = `${this.linear ? "linear" : "square root"}, ${
      { own: "share of each picture\u2019s largest", row: "share of the row\u2019s largest", all: "one scale for all" }[this.scale]}`;
    const kinds = this.cells.flatMap(cell => this.pictures(cell));
    const swatch = (name, text, shown) => (shown ? make("span", { class: "swatch" }, make("i", { class: name }), text) : null);
    this.legend.replaceChildren(
      make("div", { class: "scale" }, make("div", { class: `ramp ${signed ? "diverging" : "sequential"}` }), make("div", { class: "marks" }, ...marks)),
      make("span", { class: "words" }, words),
      ...[
        swatch("expected", "expected", kinds.some(one => one.outlined)),
        swatch("causal", "causal: key after query", kinds.some(one => one.causal || one.later)),
        swatch("own", "own token, apart", this.apart),
      ].filter(Boolean),
    );
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
    this.thumbnails();
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
      const to = cell.layer + (event.key === "PageDown" ? 1 : -1);
      if (to >= 0 && to < this.pictures(cell).length) this.setLayer(cell, to);
    } else if (event.key === "Enter" || event.key === " ") this.locked = !this.locked;
    else if (event.key === "Escape") this.locked = false;
    else return;
    event.preventDefault();
    this.active = cell;
    this.refresh();
    const now = this.picture(cell);
    const at = this.row(now);
    const score = this.key < 0 ? "" : `, ${this.name(now, 1, this.key)}: ${missing(now, at, this.key) || digits(now.values[at * now.columns + this.key])}`;
    this.live.textContent = `${now.title}, ${this.name(now, 0, at)}${score}. Largest: ${this.topText(now, 3)}`;
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
    this.read();
  }

  /** Write the reader: the chosen row of the active picture over its text or image, and its largest scores. */
  read() {
    const cell = this.active;
    const picture = this.picture(cell);
    const row = this.row(picture);
    if (!this.parts || this.parts.picture !== picture) this.buildReader(cell, picture);
    const { name, state, facts, chips, list, own, canvas } = this.parts;
    name.textContent = picture.rows > 1 ? this.name(picture, 0, row) : "";
    state.textContent = this.locked ? "locked" : "lock";
    state.setAttribute("aria-pressed", String(this.locked));
    state.hidden = picture.rows < 2;
    facts.textContent = Object.entries(picture.facts ?? {})
      .filter(([, numbers]) => numbers[row])
      .map(([fact, numbers]) => `${fact} ${digits(numbers[row])}`).join(", ");
    const from = row * picture.columns;
    const place = this.apart ? ownColumn(picture, row) : -1;
    const limit = largest(picture, this.apart, row, row + 1);
    const view = { limit, linear: this.linear, signed: this.data.signed, apart: this.apart };
    for (const [key, chip] of chips.entries()) {
      const value = picture.values[from + key];
      const reason = missing(picture, row, key);
      const depth = reason || key === place ? 0 : 0.65 * Math.abs(shade(value, view));
      chip.style.setProperty("--a", depth.toFixed(2));
      chip.className = [
        value < 0 && "minus", reason && "missing", key === place && "own", picture.outlined?.[from + key] && "wanted",
        key === this.key && "here",
      ].filter(Boolean).join(" ");
    }
    if (canvas) paint(canvas, picture, view, { width: 260, image: this.image, row, labelled: false });
    const best = this.ranked(picture, LISTED);
    list.replaceChildren(...best.map(key => {
      const value = picture.values[from + key];
      const bar = make("i", { class: value < 0 ? "minus" : "plus", style: `width:${(100 * Math.abs(value)) / (limit || 1)}%` });
      return make("li", {}, make("span", { class: "of" }, this.name(picture, 1, key).replace(/^key /, "")), make("b", {}, digits(value)), make("span", { class: "size" }, bar));
    }));
    if (!best.length) list.replaceChildren(make("li", { class: "none" }, "no scores in this row"));
    const asides = picture.grid ? [...Array(picture.columns).keys()].filter(key => !picture.places.includes(key)) : [];
    own.textContent = [
      place >= 0 && !missing(picture, row, place) && `own token, apart: ${digits(picture.values[from + place])}`,
      ...asides.map(key => `${picture.columnTokens ? picture.columnTokens[key] : `key ${key}`}, outside the image: ${digits(picture.values[from + key])}`),
    ].filter(Boolean).join("; ");
  }

  buildReader(cell, picture) {
    const place = [this.cells.length > 1 && `${cell.column} \u00b7 ${cell.row}`, picture.title].filter(Boolean).join(" \u00b7 ");
    const patches = Boolean(picture.grid);
    const shown = patches ? [] : Array.from({ length: picture.columns }, (_, key) => key);
    const square = picture.rows === picture.columns && picture.rows > 1;
    const chips = shown.map(key => {
      const text = picture.columnTokens ? picture.columnTokens[key] || "\u00a0" : String(key * picture.step);
      const enter = event => {
        if (square && !this.locked) this.rows.set(this.axis(picture), key);
        this.key = key;
        this.show(event, picture, this.row(picture), key);
        this.refresh();
      };
      const click = () => {
        if (!square) return;
        this.locked = !(this.locked && this.row(picture) === key);
        this.rows.set(this.axis(picture), key);
        this.refresh();
      };
      return make("span", { pointerenter: enter, click, role: "listitem" }, text);
    });
    const toggle = () => {
      this.locked = !this.locked;
      this.refresh();
    };
    const save = (kind, write) => make("button", { type: "button", click: write, "aria-label": `Download ${place} as ${kind}` }, kind);
    this.parts = {
      picture,
      name: make("span"),
      state: make("button", { type: "button", class: "lock", click: toggle, title: "A locked row stays while the pointer moves; a click on a row or a token locks it too" }),
      facts: make("span", { class: "facts" }),
      chips,
      canvas: patches && picture.rows > 1 ? make("canvas", { class: "patches" }) : null,
      list: make("ol", { class: "ula-top", "aria-label": "Largest scores of this row" }),
      own: make("p", { class: "apart" }),
    };
    const { name, state, facts, canvas, list, own } = this.parts;
    this.reader.replaceChildren(
      make("div", { class: "head" }, make("h4", {}, place, " ", name), state, facts,
        make("span", { class: "save" }, "Download ", save("PNG", () => this.savePng(cell)), save("SVG", () => this.saveSvg(cell)), save("CSV", () => this.saveCsv(cell)))),
      make("div", { class: "body" },
        chips.length ? make("div", { class: "tokens", role: "list", "aria-label": "Tokens coloured by this row", pointerleave: () => this.leave() }, ...chips) : "",
        canvas ?? "", make("div", { class: "best" }, list, own)),
    );
  }

  /** Draw a small map of every layer of the active cell. */
  thumbnails() {
    const cell = this.active;
    const pictures = this.pictures(cell);
    this.layers.hidden = pictures.length < 2;
    if (pictures.length < 2) return;
    const summary = make("summary", {}, `Every layer${this.cells.length > 1 ? ` of ${cell.column} \u00b7 ${cell.row}` : ""}`);
    const names = distinct(pictures.map(picture => picture.title));
    const maps = !this.layers.open ? [] : pictures.map((picture, layer) => {
      const canvas = make("canvas", { "aria-hidden": "true" });
      const choose = () => this.setLayer(cell, layer);
      const button = make(
        "button", { type: "button", click: choose, title: picture.title, "aria-label": picture.title, "aria-pressed": String(layer === cell.layer) },
        canvas, make("span", {}, names[layer]),
      );
      return { button, canvas, picture };
    });
    this.layers.replaceChildren(summary, make("div", { class: "ula-thumbs" }, ...maps.map(({ button }) => button)));
    for (const { canvas, picture } of maps) {
      paint(canvas, picture, this.view(cell, picture), { width: 104, labelled: false, image: this.image });
    }
  }

  print(on) {
    this.root.closest(".ula").toggleAttribute("data-print", on);
    this.draw();
  }

  title(cell) {
    const picture = this.picture(cell);
    return [cell.column, cell.row, picture.title].filter(Boolean).join(" \u00b7 ");
  }

  save(cell, ending, parts, type) {
    const name = this.title(cell).replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "scores";
    const link = make("a", { href: URL.createObjectURL(new Blob(parts, { type })), download: `${name}.${ending}` });
    this.root.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.getAttribute("href")), 1000);
  }

  savePng(cell) {
    const canvas = /** @type {HTMLCanvasElement} */ (make("canvas"));
    cell.plot.append(canvas);
    const picture = this.picture(cell);
    paint(canvas, picture, this.view(cell, picture), { width: cell.canvas.clientWidth, ratio: 3, image: this.image });
    canvas.remove();
    const context = canvas.getContext("2d");
    context.globalCompositeOperation = "destination-over";
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = getComputedStyle(this.root).getPropertyValue("--back");
    context.fillRect(0, 0, canvas.width, canvas.height);
    canvas.toBlob(blob => this.save(cell, "png", [blob], "image/png"));
  }

  saveSvg(cell) {
    const picture = this.picture(cell);
    const { area } = cell;
    const width = cell.canvas.clientWidth;
    const height = outerHeight(area) + 22;
    const holder = make("div");
    // A parsed element carries its namespace, which the serializer writes.
    holder.innerHTML = "<svg></svg>";
    const svg = holder.firstChild;
    const add = (tag, attributes, text = "") => {
      const element = document.createElementNS(svg.namespaceURI, tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
      element.textContent = text;
      svg.append(element);
    };
    const style = getComputedStyle(this.root);
    const colour = name => style.getPropertyValue(`--${name}`).trim();
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(name, String(value));
    add("rect", { width, height, fill: colour("back") });
    add("text", { x: area.left, y: 14, fill: colour("ink"), "font-family": "sans-serif", "font-size": 11 }, this.title(cell));
    const place = { x: area.left, y: area.top + 22, width: area.width, height: area.height };
    const over = Boolean(this.image && picture.grid && picture.rows === 1);
    const cells = cellPixels(this.root, picture, this.view(cell, picture), -1, 4096, over);
    if (over) add("image", { ...place, href: this.data.image, preserveAspectRatio: "none", style: "filter:grayscale(1);opacity:0.65" });
    add("image", { ...place, href: cells.toDataURL(), preserveAspectRatio: "none", style: "image-rendering:pixelated" });
    add("rect", { ...place, fill: "none", stroke: colour("line") });
    for (const { x, y, text, align, turned, strong } of area.labels) {
      const anchor = { center: "middle", right: "end", left: "start" }[align];
      const turn = turned ? { transform: `rotate(-90 ${x} ${y + 22})` } : {};
      add("text", { x, y: y + 22, fill: colour(strong ? "ink" : "faint"), "font-family": "sans-serif", "font-size": 10, "text-anchor": anchor, ...turn }, text);
    }
    this.save(cell, "svg", [new XMLSerializer().serializeToString(svg)], "image/svg+xml");
  }

  saveCsv(cell) {
    const picture = this.picture(cell);
    // A spreadsheet runs a cell that begins like a formula.
    const quoted = text => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
    const rows = picture.rowTitles ?? picture.rowTokens;
    const lines = [`${picture.names[0]},${picture.names[0]}_token,${picture.names[1]},${picture.names[1]}_token,score`];
    for (let row = 0; row < picture.rows; row += 1) {
      for (let key = 0; key < picture.columns; key += 1) {
        if (missing(picture, row, key)) continue;
        const texts = [rows?.[row] ?? "", picture.columnTokens?.[key] ?? ""].map(quoted);
        const score = Number(picture.values[row * picture.columns + key].toPrecision(5));
        lines.push([row * picture.step, texts[0], key * picture.step, texts[1], score].join(","));
      }
    }
    this.save(cell, "csv", [lines.join("\n"), "\n"], "text/csv");
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
