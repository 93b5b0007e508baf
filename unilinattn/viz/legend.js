// The legend of a board.

/** Draw the colour scale, its kind, and the keys of the marks that the pictures have. */
function drawLegend(/** @type {Board} */ board) {
  const { signed } = board.data;
  const view = { limit: 1, linear: board.linear, signed, apart: board.apart, sinks: board.sinks };
  const shares = signed ? [-1, -0.25, 0, 0.25, 1] : board.linear ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.1, 0.25, 0.5, 1];
  const limit = board.scale === "all" ? board.view(board.active, board.picture(board.active)).limit : 0;
  const marks = shares.map(share => {
    const place = shade(share, view);
    const text = limit ? digits(share * limit) : `${Math.round(share * 100)}%`;
    return make("span", { style: `left:${100 * (signed ? (place + 1) / 2 : place)}%` }, text);
  });
  const words = `${board.linear ? "linear" : "square root"}, ${
    { own: "share of each picture\u2019s largest", row: "share of the row\u2019s largest", all: "one scale for all" }[board.scale]}`;
  // Over a picture, small scores are transparent.
  const over = board.cells.every(cell => board.beneath(board.picture(cell)) && board.picture(cell).rows === 1);
  const ramp = `ramp ${signed ? "diverging" : "sequential"}${over ? " over" : ""}`;
  const kinds = board.cells.flatMap(cell => board.pictures(cell));
  const swatch = (/** @type {string} */ name, /** @type {string} */ text, /** @type {boolean} */ shown) => (shown ? make("span", { class: "swatch" }, make("i", { class: name }), text) : null);
  board.legend.replaceChildren(
    make("div", { class: "scale" }, make("div", { class: ramp }), make("div", { class: "marks" }, ...marks)),
    make("span", { class: "words" }, words),
    ...[
      swatch("expected", "expected", kinds.some(one => one.outlined)),
      swatch("causal", "causal: key after query", kinds.some(one => one.causal || one.later)),
      swatch("own", "own token, apart", board.apart && kinds.some(one => board.hasOwn(one))),
      swatch("own", "attention sink, apart", board.sinks && kinds.some(one => one.sinks.length)),
    ].filter(one => one !== null),
  );
}
