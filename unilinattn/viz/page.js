(() => {
  "use strict";
  // Several fragments of one notebook each bring this script; one listener serves them all.
  if (window.unilinattnTips) return;
  window.unilinattnTips = true;
  const tip = document.createElement("div");
  tip.className = "ula-tip";
  const value = document.createElement("b");
  const place = document.createElement("span");
  tip.append(value, place);
  const known = new WeakMap();
  let marked = null;

  function read(cells) {
    if (!known.has(cells)) {
      const list = text => (text ? JSON.parse(text) : null);
      known.set(cells, {
        values: cells.dataset.values.split(";").map(row => row.split(",")),
        columns: Number(cells.dataset.width),
        step: Number(cells.dataset.step),
        names: JSON.parse(cells.dataset.names),
        tokens: [list(cells.dataset.rows), list(cells.dataset.columns)],
      });
    }
    return known.get(cells);
  }

  function describe(name, tokens, index, step) {
    if (step > 1) return `${name} ${index * step}\u2013${index * step + step - 1}`;
    return tokens ? `${name} ${index} \u201c${tokens[index]}\u201d` : `${name} ${index}`;
  }

  function hide() {
    tip.style.visibility = "hidden";
    if (marked) marked.style.visibility = "hidden";
    marked = null;
  }

  function show(event, number, where, root) {
    root.append(tip);
    value.textContent = number;
    place.textContent = where;
    const right = event.clientX + 18 + tip.offsetWidth > window.innerWidth;
    const x = right ? event.clientX - tip.offsetWidth - 14 : event.clientX + 16;
    const y = Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8);
    tip.style.transform = `translate(${Math.max(4, x)}px, ${y}px)`;
    tip.style.visibility = "visible";
  }

  function point(event) {
    const target = event.target instanceof Element ? event.target : null;
    const token = target && target.closest(".ula-strip .tokens span");
    const cells = target && target.closest(".ula-map .cells");
    hide();
    if (token) show(event, token.dataset.value, token.dataset.place, token.closest(".ula"));
    if (!cells) return;
    const { values, columns, step, names, tokens } = read(cells);
    const frame = cells.querySelector(".frame");
    const box = frame.getBoundingClientRect();
    const at = (offset, size, count) => Math.min(count - 1, Math.max(0, Math.floor((offset / size) * count)));
    const row = at(event.clientY - box.top, box.height, values.length);
    const column = at(event.clientX - box.left, box.width, columns);
    const text = values[row][column] || "0";
    const where = names.map((name, i) => describe(name, tokens[i], i ? column : row, step));
    const number = text === "n" ? "no score" : text;
    show(event, number, values.length > 1 ? where.join(" \u2190 ") : where[1], cells.closest(".ula"));
    marked = cells.querySelector(".here");
    const [width, height] = [frame.width.baseVal.value / columns, frame.height.baseVal.value / values.length];
    const set = { x: column * width, y: row * height, width, height };
    for (const [name, number] of Object.entries(set)) marked.setAttribute(name, number);
    marked.style.visibility = "visible";
  }

  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("scroll", hide, true);
})();
