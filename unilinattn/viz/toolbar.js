// The toolbar of a board: pickers of what all its pictures share.

/** Write the pickers of a board, followed by its legend. */
function toolbar(/** @type {Board} */ board) {
  const field = (/** @type {string} */ text, /** @type {HTMLElement} */ control) => make("label", {}, make("span", {}, text), control);
  const redraw = (/** @type {(value: any) => void} */ change) => (/** @type {any} */ value) => {
    change(value);
    board.draw();
  };
  const parts = [];
  if (board.sequences.length > 1) {
    const { word, names } = board.data.sequences;
    const choices = Object.fromEntries(board.sequences.map(index => [index, names[index] ?? String(index)]));
    parts.push(field(word, picker(word, choices, String(board.sequence), redraw(value => { board.sequence = Number(value); }))));
  }
  const deepest = Math.max(...board.cells.map(cell => board.layersOf(cell).length));
  if (deepest > 1 && board.cells.length > 1) {
    const choices = { start: "each its own", ...Object.fromEntries(Array.from({ length: deepest }, (_, i) => [`at ${i}`, String(i)])) };
    parts.push(field("Layer", board.layerPicker = picker("Layer", choices, "start", value => board.setLayers(value))));
  }
  if (board.cells.length > 1 || board.pictures(board.cells[0]).length > 1) {
    const { row, ...some } = SCALES;
    const choices = Object.keys(board.data.columns).length > 1 && board.cells.length > Object.keys(board.data.columns).length
      ? SCALES : some;
    parts.push(field("Scale of", picker("Scale", choices, board.scale, redraw(value => { board.scale = value; }))));
  }
  const forms = { root: "square root", linear: "linear" };
  parts.push(field("Colours", picker("Colours", forms, "root", redraw(value => { board.linear = value === "linear"; }))));
  const check = (/** @type {string} */ text, /** @type {boolean} */ checked, /** @type {(value: boolean) => void} */ change) => {
    const box = make("input", { type: "checkbox", checked });
    box.addEventListener("change", () => redraw(change)(box.checked));
    parts.push(make("label", { class: "check" }, box, make("span", {}, text)));
  };
  const pictures = board.cells.flatMap(cell => cell.pictures);
  if (pictures.some(picture => board.hasOwn(picture))) {
    check("query's own token apart", board.apart, value => { board.apart = value; });
  }
  if (pictures.some(picture => picture.sinks.length)) {
    check("attention sinks apart", board.sinks, value => { board.sinks = value; });
  }
  board.bar.replaceChildren(...parts, board.legend);
}
