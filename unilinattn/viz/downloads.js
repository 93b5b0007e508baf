// Downloads of the picture of a cell: PNG, SVG and CSV files.

/** The place and the name of the picture of a cell. */
function titleOf(/** @type {Board} */ board, /** @type {Cell} */ cell) {
  const picture = board.picture(cell);
  return [cell.column, cell.row, titled(picture)].filter(Boolean).join(" \u00b7 ");
}

/** Let the browser save a file named like the picture of a cell. */
function save(/** @type {Board} */ board, /** @type {Cell} */ cell, /** @type {string} */ ending, /** @type {BlobPart[]} */ parts, /** @type {string} */ type) {
  const name = titleOf(board, cell).replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "scores";
  const link = make("a", { href: URL.createObjectURL(new Blob(parts, { type })), download: `${name}.${ending}` });
  board.root.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function savePng(/** @type {Board} */ board, /** @type {Cell} */ cell) {
  const canvas = make("canvas");
  cell.plot.append(canvas);
  const picture = board.picture(cell);
  paint(canvas, picture, board.view(cell, picture), { width: cell.canvas.clientWidth, ratio: 3, image: board.beneath(picture) });
  canvas.remove();
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.globalCompositeOperation = "destination-over";
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = getComputedStyle(board.root).getPropertyValue("--back");
  context.fillRect(0, 0, canvas.width, canvas.height);
  canvas.toBlob(blob => blob && save(board, cell, "png", [blob], "image/png"));
}

function saveSvg(/** @type {Board} */ board, /** @type {Cell} */ cell) {
  const picture = board.picture(cell);
  const { area } = cell;
  const width = cell.canvas.clientWidth;
  const height = outerHeight(area) + 22;
  const holder = make("div");
  // A parsed element carries its namespace, which the serializer writes.
  holder.innerHTML = "<svg></svg>";
  const svg = /** @type {Element} */ (holder.firstChild);
  const add = (/** @type {string} */ tag, /** @type {Object<string, string | number>} */ attributes, text = "") => {
    const element = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
    element.textContent = text;
    svg.append(element);
  };
  const style = getComputedStyle(board.root);
  const colour = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` })) svg.setAttribute(name, String(value));
  add("rect", { width, height, fill: colour("back") });
  add("text", { x: area.left, y: 14, fill: colour("ink"), "font-family": "sans-serif", "font-size": 11 }, titleOf(board, cell));
  const place = { x: area.left, y: area.top + 22, width: area.width, height: area.height };
  const over = picture.image !== undefined && picture.rows === 1;
  const cells = cellPixels(board.root, picture, board.view(cell, picture), -1, 4096, over);
  if (over) add("image", { ...place, href: board.data.images[/** @type {number} */ (picture.image)], preserveAspectRatio: "none", style: "filter:grayscale(1);opacity:0.65" });
  add("image", { ...place, href: cells.toDataURL(), preserveAspectRatio: "none", style: "image-rendering:pixelated" });
  add("rect", { ...place, fill: "none", stroke: colour("line") });
  for (const { x, y, text, align, turned, strong } of area.labels) {
    const anchor = align === "center" ? "middle" : align === "right" ? "end" : "start";
    /** @type {Object<string, string>} */
    const turn = turned ? { transform: `rotate(-90 ${x} ${y + 22})` } : {};
    add("text", { x, y: y + 22, fill: colour(strong ? "ink" : "faint"), "font-family": "sans-serif", "font-size": 10, "text-anchor": anchor, ...turn }, text);
  }
  save(board, cell, "svg", [new XMLSerializer().serializeToString(svg)], "image/svg+xml");
}

function saveCsv(/** @type {Board} */ board, /** @type {Cell} */ cell) {
  const picture = board.picture(cell);
  // A spreadsheet runs a cell that begins like a formula.
  const quoted = (/** @type {string} */ text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
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
  save(board, cell, "csv", [lines.join("\n"), "\n"], "text/csv");
}
