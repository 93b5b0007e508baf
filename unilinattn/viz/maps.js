// Heat maps on canvases: packed scores, colours, axes. Knows no control of the page.

/**
 * @typedef {object} Picture one layer, or one head of it, of one sequence
 * @property {string} title
 * @property {string} [head]
 * @property {string} [notes]
 * @property {number} sequence
 * @property {string[]} names of the two axes
 * @property {number} rows
 * @property {number} columns
 * @property {number} step side of the blocks that cells stand for
 * @property {boolean} causal
 * @property {boolean} [later] whether the columns after the explained one cannot be read
 * @property {number} scale factor of the packed scores
 * @property {Float32Array} values row by row
 * @property {?string[]} rowTokens
 * @property {?string[]} columnTokens
 * @property {?string[]} rowTitles
 * @property {number} [query] first row to show; the explained column of rows with titles
 * @property {Uint8Array} [outlined]
 * @property {number[]} [grid] rows and columns of patches
 * @property {number[]} places the columns that are patches
 * @property {Object<string, (number | null)[]>} [facts]
 * @property {number} [image] index of the image beneath the patches
 * @property {number[]} sinks the columns of attention sinks
 * @property {Object<string, number>} [limits] largest scores by the cells that are left out
 *
 * @typedef {object} Cell the pictures at a row and a column of a board, and their elements
 * @property {string} row
 * @property {string} column
 * @property {Picture[]} pictures
 * @property {number} [start] layer to show first
 * @property {boolean} [apart]
 * @property {string[]} [notes] a text for each layer
 * @property {number} layer the shown layer
 * @property {number} head the shown head of the layer
 * @property {HTMLCanvasElement} canvas
 * @property {{row: HTMLElement, cell: HTMLElement}} marks
 * @property {HTMLElement} plot
 * @property {HTMLElement} title
 * @property {HTMLElement} top
 * @property {HTMLElement} notes_
 * @property {Area} area
 *
 * @typedef {object} View
 * @property {number} limit score of the strongest colour
 * @property {boolean} linear
 * @property {boolean} signed
 * @property {boolean} apart whether a query's own token has no colour
 * @property {boolean} sinks whether attention sinks have no colour
 *
 * @typedef {object} Area of the cells within a canvas, in CSS pixels
 * @property {number} left
 * @property {number} top
 * @property {number} width
 * @property {number} height
 * @property {number} rows of cells as drawn
 * @property {number} columns of cells as drawn
 * @property {Label[]} labels
 *
 * @typedef {{x: number, y: number, text: string, align: CanvasTextAlign, turned: boolean, strong: boolean}} Label
 */

const FONT = "10px system-ui, sans-serif";
const MOST_LABELS = 40;

/** Fill in the values of all pictures from the packed text. */
async function unpack(/** @type {any} */ data) {
  const bytes = Uint8Array.from(atob(data.scores), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  let at = 0;
  const next = (/** @type {number} */ scale) => {
    const value = half(planes[at], planes[data.count + at]) * scale;
    at += 1;
    return value;
  };
  for (const cell of data.cells) {
    for (const picture of cell.pictures) {
      const { rows, columns, causal, scale } = picture;
      picture.values = new Float32Array(rows * columns);
      for (let row = 0; row < rows; row += 1) {
        const end = causal ? row + 1 : columns;
        for (let column = 0; column < end; column += 1) picture.values[row * columns + column] = next(scale);
      }
      for (const name of ["rowTokens", "columnTokens", "rowTitles"]) {
        picture[name] = name in picture ? data.texts[picture[name]] : null;
      }
      picture.sequence ??= 0;
      picture.places ??= [];
      picture.sinks ??= [];
      const runs = picture.expected;
      if (runs) picture.outlined = new Uint8Array(rows * columns);
      for (let i = 0; runs && i < runs.length; i += 2) picture.outlined.fill(1, runs[i], runs[i] + runs[i + 1]);
    }
  }
}

/** The number of half precision in two bytes. */
function half(/** @type {number} */ high, /** @type {number} */ low) {
  const sign = high & 128 ? -1 : 1;
  const exponent = (high >> 2) & 31;
  const mantissa = ((high & 3) << 8) | low;
  if (exponent === 31) return mantissa ? NaN : sign * Infinity;
  return exponent ? sign * (1 + mantissa / 1024) * 2 ** (exponent - 15) : sign * mantissa * 2 ** -24;
}

/** The column of a row's own token, or -1. */
function ownColumn(/** @type {Picture} */ picture, /** @type {number} */ row) {
  if (picture.rowTitles) return picture.query ?? -1;
  return picture.rows === picture.columns && picture.rows > 1 ? row : -1;
}

/** Whether a cell is left out of the colours and of the largest scores: an attention sink or a row's own token. */
function leftOut(
  /** @type {Picture} */ picture, /** @type {number} */ row, /** @type {number} */ column,
  /** @type {{apart: boolean, sinks: boolean}} */ view,
) {
  return (view.apart && column === ownColumn(picture, row)) || (view.sinks && picture.sinks.includes(column));
}

/** Why a cell has no score, or an empty text. */
function missing(/** @type {Picture} */ picture, /** @type {number} */ row, /** @type {number} */ column) {
  const query = picture.rowTitles ? picture.query : row;
  if ((picture.causal || picture.later) && query !== undefined && column > query) return "causal: key after query";
  return Number.isNaN(picture.values[row * picture.columns + column]) ? "no score" : "";
}

/** The largest finite absolute score of the cells that a view does not leave out, and in an image of its patches. */
function largest(
  /** @type {Picture} */ picture, /** @type {{apart: boolean, sinks: boolean}} */ view, from = 0, to = picture.rows,
) {
  let most = 0;
  const inside = picture.grid && to - from === 1 ? new Set(picture.places) : null;
  for (let row = from; row < to; row += 1) {
    for (let column = 0; column < picture.columns; column += 1) {
      const size = Math.abs(picture.values[row * picture.columns + column]);
      if (size > most && !leftOut(picture, row, column, view) && size < Infinity && (!inside || inside.has(column))) most = size;
    }
  }
  return most;
}

/** The position of a score on the colour scale: its share of the limit, or the square root of it, with its sign. */
function shade(/** @type {number} */ value, /** @type {View} */ view) {
  const share = view.limit ? Math.min(1, Math.abs(value) / view.limit) : 0;
  return Math.sign(value) * (view.linear ? share : Math.sqrt(share));
}

/** 256 colours of the scale `name` of the style in force. */
function palette(/** @type {Element} */ element, /** @type {string} */ name) {
  const stops = getComputedStyle(element).getPropertyValue(`--${name}`).split(",");
  const parts = stops.map(stop => [1, 3, 5].map(i => parseInt(stop.trim().slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, index) => {
    const where = (index / 255) * (parts.length - 1);
    const low = Math.min(Math.floor(where), parts.length - 2);
    return parts[low].map((part, i) => Math.round(part + (parts[low + 1][i] - part) * (where - low)));
  });
}

/**
 * A canvas with one pixel a cell, or fewer with the largest score of each; `most` bounds its sides. `row` is the row to
 * show as an image, or -1. Cells that lie over a picture are the more transparent the smaller the score.
 */
function cellPixels(
  /** @type {Element} */ element, /** @type {Picture} */ picture, /** @type {View} */ view,
  /** @type {number} */ row, /** @type {number} */ most, /** @type {boolean} */ over,
) {
  const patches = picture.grid && picture.rows === 1;
  const [rows, columns] = patches || row >= 0 ? /** @type {number[]} */ (picture.grid) : [picture.rows, picture.columns];
  const [high, wide] = [Math.min(rows, most), Math.min(columns, most)];
  const best = new Float32Array(high * wide).fill(NaN);
  const kind = new Uint8Array(high * wide);
  for (let i = 0; i < rows; i += 1) {
    for (let j = 0; j < columns; j += 1) {
      const source = patches || row >= 0 ? Math.max(row, 0) : i;
      const column = patches || row >= 0 ? /** @type {number[]} */ (picture.places)[i * columns + j] : j;
      const at = Math.floor((i * high) / rows) * wide + Math.floor((j * wide) / columns);
      const value = picture.values[source * picture.columns + column];
      if (leftOut(picture, source, column, view)) kind[at] = 2;
      else if (missing(picture, source, column)[0] === "c") kind[at] ||= 1;
      else if (!(Math.abs(value) <= Math.abs(best[at]))) best[at] = Number.isNaN(value) ? best[at] : value;
    }
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [wide, high];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const pixels = context.createImageData(wide, high);
  const colours = palette(element, view.signed ? "diverging" : "sequential");
  const hues = ["minus", "plus"].map(name => getComputedStyle(element).getPropertyValue(`--${name}`).split(",").map(Number));
  for (let at = 0; at < best.length; at += 1) {
    if (Number.isNaN(best[at])) {
      if (kind[at] === 2) pixels.data.set([128, 132, 146, 90], at * 4);
      else if (kind[at] === 0) pixels.data.set([128, 132, 146, 34], at * 4);
      continue;
    }
    const place = shade(best[at], view);
    if (over) {
      pixels.data.set([...hues[place < 0 ? 0 : 1], 230 * Math.abs(place)], at * 4);
      continue;
    }
    const index = Math.round((view.signed ? (place + 1) / 2 : Math.abs(place)) * 255);
    pixels.data.set([...colours[index], 255], at * 4);
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Names without the beginning and the end that all have in common. */
function distinct(/** @type {string[]} */ names) {
  const [first, ...others] = names;
  if (!others.length) return names;
  let [start, end] = [0, 0];
  const shortest = Math.min(...names.map(name => name.length));
  while (start < shortest && others.every(name => name[start] === first[start])) start += 1;
  while (end < shortest - start && others.every(name => name.at(-1 - end) === first.at(-1 - end))) end += 1;
  // A number is not cut in two.
  while (start && /\d/.test(first[start - 1])) start -= 1;
  while (end && /\d/.test(/** @type {string} */ (first.at(-end)))) end -= 1;
  const parts = names.map(name => name.slice(start, name.length - end));
  return parts.every(Boolean) ? parts : names;
}

/** The title of a picture, with its head. */
function titled(/** @type {Picture} */ picture) {
  return [picture.title, picture.head].filter(Boolean).join(" \u00b7 ");
}

/** "Head" or "Channel": the first word of the name of a picture's head. */
function headWord(/** @type {Picture} */ picture) {
  const [word] = (picture.head ?? "head").split(" ");
  return word[0].toUpperCase() + word.slice(1);
}

/** Where the cells and labels of a picture lie in a canvas of a width. */
function arrange(/** @type {Picture} */ picture, /** @type {number} */ width, /** @type {boolean} */ labelled) {
  const patches = Boolean(picture.grid && picture.rows === 1);
  const [rows, columns] = patches ? /** @type {number[]} */ (picture.grid) : [picture.rows, picture.columns];
  /** @type {Area} */
  const area = { left: 0, top: 0, width, height: 0, rows, columns, labels: [] };
  const measure = /** @type {CanvasRenderingContext2D} */ (document.createElement("canvas").getContext("2d"));
  measure.font = FONT;
  const clipped = (/** @type {string[]} */ tokens) => tokens.map(text => (text.length > 12 ? `${text.slice(0, 11)}\u2026` : text));
  const widest = (/** @type {string[]} */ tokens) => Math.max(0, ...tokens.map(text => measure.measureText(text).width));
  const rowTexts = picture.rowTitles ? distinct(picture.rowTitles) : picture.rowTokens;
  const named = (/** @type {?string[]} */ texts, /** @type {number} */ unit) =>
    texts && texts.length <= MOST_LABELS && unit >= 10 ? clipped(texts) : null;
  const across = patches ? null : named(picture.columnTokens, (width - 40) / columns);
  let down = patches || rows === 1 ? null : named(rowTexts, rows === columns ? (width - 40) / rows : 14);
  const narrow = width < 360;
  if (down && narrow && widest(down) > width / 5) down = null;
  if (labelled && !patches && rows > 1) [area.left, area.top] = [18 + widest(down ?? [String(rows * picture.step)]), 5];
  area.width = Math.min(width - area.left - 1, patches ? width : columns * 48);
  const unit = area.width / columns;
  area.height = rows === 1 && !patches ? 30 : Math.max(rows === columns || patches ? 0 : 20, rows * unit);
  if (rows !== columns && !patches && rows > 1) area.height = rows * Math.min(Math.max(unit, down ? 14 : 4), 26);
  if (!labelled || patches) return area;
  const ticks = (/** @type {number} */ count, /** @type {number} */ length) => {
    let every = 1;
    while (count / every > Math.max(2, length / 34)) every *= 2;
    return Array.from({ length: Math.ceil(count / every) }, (_, i) => i * every);
  };
  const { left, top, height } = area;
  const label = (/** @type {number} */ x, /** @type {number} */ y, /** @type {string} */ text, align = "center", turned = false, strong = false) =>
    area.labels.push({ x, y: y + top, text, align: /** @type {CanvasTextAlign} */ (align), turned, strong });
  const upright = !across || widest(across) <= unit - 2;
  for (const i of across ? across.keys() : ticks(columns, area.width)) {
    const text = across ? across[i] : String(i * picture.step);
    if (upright) label(left + (i + 0.5) * unit, height + 12, text);
    else label(left + (i + 0.5) * unit + 3, height + 5, text, "right", true);
  }
  const below = upright ? 14 : 8 + widest(across ?? []);
  label(left + area.width / 2, height + below + 11, picture.names[1], "center", false, true);
  if (rows === 1) return area;
  for (const i of down ? down.keys() : ticks(rows, height)) {
    label(left - 4, ((i + 0.5) * height) / rows + 3.5, down ? down[i] : String(i * picture.step), "right");
  }
  label(9, height / 2, picture.names[0], "center", true, true);
  return area;
}

/** The height that a labelled picture needs. */
function outerHeight(/** @type {Area} */ area) {
  return Math.max(area.top + area.height + 1, ...area.labels.filter(one => !one.turned).map(one => one.y + 4));
}

/** Draw a picture on a canvas and return the area of its cells. */
function paint(
  /** @type {HTMLCanvasElement} */ canvas, /** @type {Picture} */ picture, /** @type {View} */ view,
  /** @type {{width: number, labelled?: boolean, ratio?: number, image?: ?CanvasImageSource, row?: number}} */ options,
) {
  const { width, labelled = true, ratio = Math.min(3, window.devicePixelRatio || 1), image = null, row = -1 } = options;
  const area = row >= 0 ? arrange({ ...picture, rows: 1 }, width, false) : arrange(picture, width, labelled);
  const height = outerHeight(area);
  [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  const colour = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  const box = /** @type {const} */ ([area.left, area.top, area.width, area.height]);
  if (picture.causal || picture.later) hatch(context, area, picture, colour("hatch"));
  const over = Boolean(image && picture.grid && (row >= 0 || picture.rows === 1));
  if (over) {
    // Grey and pale, so that the only colour is that of the scores.
    context.filter = "grayscale(1)";
    context.drawImage(/** @type {CanvasImageSource} */ (image), ...box);
    context.filter = "none";
    context.fillStyle = "rgba(255, 255, 255, 0.35)";
    context.fillRect(...box);
  }
  context.imageSmoothingEnabled = false;
  context.drawImage(cellPixels(canvas, picture, view, row, Math.max(1, Math.floor(area.width * ratio)), over), ...box);
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  context.strokeRect(area.left + 0.5, area.top + 0.5, area.width - 1, area.height - 1);
  if (picture.outlined && row < 0) outlineCells(context, picture, area, colour("expected"), labelled ? 1.6 : 1);
  context.font = FONT;
  for (const { x, y, text, align, turned, strong } of area.labels) {
    context.fillStyle = colour(strong ? "ink" : "faint");
    context.textAlign = align;
    context.save();
    context.translate(x, y);
    if (turned) context.rotate(-Math.PI / 2);
    context.fillText(text, 0, 0);
    context.restore();
  }
  return area;
}

/** Hatch the cells above the diagonal, or the columns after the explained one. */
function hatch(
  /** @type {CanvasRenderingContext2D} */ context, /** @type {Area} */ area, /** @type {Picture} */ picture,
  /** @type {string} */ colour,
) {
  const { left, top, width, height } = area;
  context.save();
  context.beginPath();
  if (picture.causal) {
    context.moveTo(left, top);
    context.lineTo(left + width, top);
    context.lineTo(left + width, top + height);
  } else {
    const start = ((/** @type {number} */ (picture.query) + 1) * width) / picture.columns;
    context.rect(left + start, top, width - start, height);
  }
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let x = -height; x < width; x += 7) {
    context.moveTo(left + x, top + height);
    context.lineTo(left + x + height, top);
  }
  context.stroke();
  context.restore();
}

/** Draw the edges between outlined and other cells. */
function outlineCells(
  /** @type {CanvasRenderingContext2D} */ context, /** @type {Picture} */ picture, /** @type {Area} */ area,
  /** @type {string} */ colour, /** @type {number} */ thickness,
) {
  const { rows, columns } = area;
  const marked = (/** @type {number} */ i, /** @type {number} */ j) => {
    if (i < 0 || j < 0 || i >= rows || j >= columns) return 0;
    const patch = picture.grid && picture.rows === 1 && picture.places;
    return /** @type {Uint8Array} */ (picture.outlined)[patch ? patch[i * columns + j] : i * columns + j];
  };
  const x = (/** @type {number} */ j) => area.left + (j * area.width) / columns;
  const y = (/** @type {number} */ i) => area.top + (i * area.height) / rows;
  context.strokeStyle = colour;
  context.lineWidth = thickness;
  context.lineCap = "square";
  context.beginPath();
  for (let i = 0; i <= rows; i += 1) {
    for (let j = 0; j <= columns; j += 1) {
      if (marked(i, j) !== marked(i - 1, j)) {
        context.moveTo(x(j), y(i));
        context.lineTo(x(j + 1), y(i));
      }
      if (marked(i, j) !== marked(i, j - 1)) {
        context.moveTo(x(j), y(i));
        context.lineTo(x(j), y(i + 1));
      }
    }
  }
  context.stroke();
}
