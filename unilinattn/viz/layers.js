// Layers and heads: the pickers above a picture, and the small maps below a board, which select them too.

/** The pictures of each layer: one, or one for each of its heads. */
function byLayer(/** @type {Picture[]} */ pictures) {
  const layers = /** @type {Picture[][]} */ ([]);
  for (const picture of pictures) {
    const heads = layers.at(-1);
    if (picture.head && heads && heads[0].title === picture.title) heads.push(picture);
    else layers.push([picture]);
  }
  return layers;
}

/** Write the title of a cell: the names of its layer and head, as pickers if there are several. */
function drawTitle(/** @type {Board} */ board, /** @type {Cell} */ cell) {
  const [layers, heads, picture] = [board.layersOf(cell), board.headsOf(cell), board.picture(cell)];
  const one = (
    /** @type {string} */ noun, /** @type {string[]} */ names, /** @type {number} */ chosen,
    /** @type {(index: number) => void} */ choose,
  ) => {
    if (names.length < 2) return names[0] ?? "";
    return picker(`${noun} of ${cell.column} ${cell.row}`, { ...names }, String(chosen), value => choose(Number(value)));
  };
  cell.title.replaceChildren(
    one("Layer", layers.map(([first]) => first.title), cell.layer, index => board.setLayer(cell, index)),
    one(headWord(picture), heads.map(each => each.head ?? ""), cell.head, index => board.setHead(cell, index)),
  );
}

/** Draw small maps of the heads of the active cell's layer, and of its layers. */
function thumbnails(/** @type {Board} */ board) {
  const cell = board.active;
  const [layers, heads, picture] = [board.layersOf(cell), board.headsOf(cell), board.picture(cell)];
  const where = board.cells.length > 1 ? `${cell.column} \u00b7 ${cell.row}` : "";
  smallMaps(board, board.heads, [`${headWord(picture)}s of ${picture.title}`, where].filter(Boolean).join(", "), heads, {
    names: heads.map(one => one.head ?? ""), chosen: cell.head, choose: index => board.setHead(cell, index),
  });
  const ofLayers = layers.map(each => each.find(one => one.head === picture.head) ?? each[0]);
  smallMaps(board, board.layers, `Every layer${where && ` of ${where}`}`, ofLayers, {
    names: distinct(ofLayers.map(one => one.title)), chosen: cell.layer, choose: index => board.setLayer(cell, index),
  });
}

/** Draw small maps of several pictures of the active cell, if they are unfolded. */
function smallMaps(
  /** @type {Board} */ board, /** @type {HTMLDetailsElement} */ details, /** @type {string} */ text, /** @type {Picture[]} */ pictures,
  /** @type {{names: string[], chosen: number, choose: (index: number) => void}} */ { names, chosen, choose },
) {
  details.hidden = pictures.length < 2;
  if (pictures.length < 2) return;
  const maps = !details.open ? [] : pictures.map((picture, index) => {
    const canvas = make("canvas", { "aria-hidden": "true" });
    const title = titled(picture);
    const button = make(
      "button", { type: "button", click: () => choose(index), title, "aria-label": title, "aria-pressed": String(index === chosen) },
      canvas, make("span", {}, names[index]),
    );
    return { button, canvas, picture };
  });
  details.replaceChildren(make("summary", {}, text), make("div", { class: "ula-thumbs" }, ...maps.map(({ button }) => button)));
  for (const { canvas, picture } of maps) {
    paint(canvas, picture, board.view(board.active, picture), { width: 104, labelled: false, image: board.beneath(picture) });
  }
}
