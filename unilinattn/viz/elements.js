// Elements and texts of the page's controls.

/**
 * An element with attributes, of which a function is a listener, and children.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Object<string, any>} attributes
 * @param {(string | Node | null | undefined)[]} children
 */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child != null));
  return element;
}

/** A token in a sentence of another direction: text from right to left stands in Unicode's isolates. */
function isolated(/** @type {string} */ token) {
  return /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u.test(token) ? `\u2068${token}\u2069` : token;
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
  const select = make("select", { "aria-label": name }, ...options);
  select.addEventListener("change", () => choose(select.value));
  return select;
}
