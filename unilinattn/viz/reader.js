// The reader of a board: one row of the active picture over its text or image, and its largest scores.

/** Write the reader: the chosen row of the active picture over its text or image, and its largest scores. */
function read(/** @type {Board} */ board) {
  const cell = board.active;
  const picture = board.picture(cell);
  const row = board.row(picture);
  if (!board.parts || board.parts.picture !== picture) buildReader(board, cell, picture);
  const { name, state, facts, chips, list, own, canvas } = board.parts;
  name.textContent = picture.rows > 1 ? board.name(picture, 0, row) : "";
  state.textContent = board.locked ? "locked" : "lock";
  state.setAttribute("aria-pressed", String(board.locked));
  state.hidden = picture.rows < 2;
  facts.textContent = Object.entries(picture.facts ?? {})
    .filter(([, numbers]) => numbers[row])
    .map(([fact, numbers]) => `${fact} ${digits(/** @type {number} */ (numbers[row]))}`).join(", ");
  const from = row * picture.columns;
  const place = board.apart ? ownColumn(picture, row) : -1;
  const limit = largest(picture, board, row, row + 1);
  const view = { limit, linear: board.linear, signed: board.data.signed, apart: board.apart, sinks: board.sinks };
  for (const [key, chip] of chips.entries()) {
    const value = picture.values[from + key];
    const reason = missing(picture, row, key);
    const out = leftOut(picture, row, key, board);
    const depth = reason || out ? 0 : 0.65 * Math.abs(shade(value, view));
    chip.style.setProperty("--a", depth.toFixed(2));
    chip.className = [
      value < 0 && "minus", reason && "missing", out && "own", picture.outlined?.[from + key] && "wanted",
      key === board.key && "here",
    ].filter(Boolean).join(" ");
  }
  if (canvas) paint(canvas, picture, view, { width: 260, image: board.beneath(picture), row, labelled: false });
  const best = board.ranked(picture, LISTED);
  list.replaceChildren(...best.map(key => {
    const value = picture.values[from + key];
    const bar = make("i", { class: value < 0 ? "minus" : "plus", style: `width:${(100 * Math.abs(value)) / (limit || 1)}%` });
    return make("li", {}, make("span", { class: "of" }, board.name(picture, 1, key).replace(/^key /, "")), make("b", {}, digits(value)), make("span", { class: "size" }, bar));
  }));
  if (!best.length) list.replaceChildren(make("li", { class: "none" }, "no other scores in this row"));
  const asides = picture.grid ? [...Array(picture.columns).keys()].filter(key => !picture.places.includes(key)) : [];
  own.textContent = [
    place >= 0 && !missing(picture, row, place) && `own token, apart: ${digits(picture.values[from + place])}`,
    ...(board.sinks ? picture.sinks : []).filter(key => key !== place && !missing(picture, row, key)).map(
      key => `attention sink ${board.name(picture, 1, key).replace(/^key /, "")}, apart: ${digits(picture.values[from + key])}`),
    ...asides.filter(key => !(board.sinks && picture.sinks.includes(key))).map(key => `${picture.columnTokens ? isolated(picture.columnTokens[key]) : `key ${key}`}, outside the image: ${digits(picture.values[from + key])}`),
  ].filter(Boolean).join("; ");
}

/** Build the reader of a picture: its tokens, its list and its controls. */
function buildReader(/** @type {Board} */ board, /** @type {Cell} */ cell, /** @type {Picture} */ picture) {
  const place = [board.cells.length > 1 && `${cell.column} \u00b7 ${cell.row}`, titled(picture)].filter(Boolean).join(" \u00b7 ");
  const patches = Boolean(picture.grid);
  const shown = patches ? [] : Array.from({ length: picture.columns }, (_, key) => key);
  const square = picture.rows === picture.columns && picture.rows > 1;
  const chips = shown.map(key => {
    const text = picture.columnTokens ? picture.columnTokens[key] || "\u00a0" : String(key * picture.step);
    const enter = (/** @type {PointerEvent} */ event) => {
      if (square && !board.locked) board.rows.set(board.axis(picture), key);
      board.key = key;
      board.show(event, picture, board.row(picture), key);
      board.refresh();
    };
    const click = () => {
      if (!square) return;
      board.locked = !(board.locked && board.row(picture) === key);
      board.rows.set(board.axis(picture), key);
      board.refresh();
    };
    return make("span", { pointerenter: enter, click, role: "listitem" }, text);
  });
  const toggle = () => {
    board.locked = !board.locked;
    board.refresh();
  };
  const save = (/** @type {string} */ kind, /** @type {() => void} */ write) => make("button", { type: "button", click: write, "aria-label": `Download ${place} as ${kind}` }, kind);
  board.parts = {
    picture,
    name: make("span"),
    state: make("button", { type: "button", class: "lock", click: toggle, title: "A locked row stays while the pointer moves; a click on a row or a token locks it too" }),
    facts: make("span", { class: "facts" }),
    chips,
    canvas: patches && picture.rows > 1 ? make("canvas", { class: "patches" }) : null,
    list: make("ol", { class: "ula-top", "aria-label": "Largest scores of this row" }),
    own: make("p", { class: "apart" }),
  };
  const { name, state, facts, canvas, list, own } = board.parts;
  board.reader.replaceChildren(
    make("div", { class: "head" }, make("h4", {}, place, " ", name), state, facts,
      make("span", { class: "save" }, "Download ", save("PNG", () => savePng(board, cell)), save("SVG", () => saveSvg(board, cell)), save("CSV", () => saveCsv(board, cell)))),
    make("div", { class: "body" },
      chips.length ? make("div", { class: "tokens", dir: "auto", role: "list", "aria-label": "Tokens coloured by this row", pointerleave: () => board.leave() }, ...chips) : "",
      canvas ?? "", make("div", { class: "best" }, list, own)),
  );
}
