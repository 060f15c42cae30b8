"use strict";
const Calculators = (() => {
/** Pixels of a drawing. */
const WIDEST = 660;
const DECIMAL = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"]];
const BINARY = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];
const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const digits = (value) => `${Number(value.toPrecision(3))}`;

/** Three significant digits, in the largest unit of which there is one, or the smallest. */
function scale(value, units) {
  const [size, unit] = units.find(([size]) => value >= size) ?? units.at(-1);
  return [value, `${digits(value / size)} ${unit}`];
}
const plain = (value) => [value, `${value}`];

function count(first, last) {
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, place) => first + place);
}

/** The table, the sentence and the drawing for what is chosen now. */
function update(section, compute) {
  const chosen = {}, settings = [];
  for (const control of section.querySelectorAll("input,select")) {
    const { values, texts } = control.dataset, label = control.closest("label").firstChild.textContent.trim();
    const text = texts ? texts.split("|")[control.value] : control.value;
    chosen[control.name] = values ? Number(values.split(" ")[control.value]) : control.value;
    settings.push(`${label.toLowerCase()} ${text}`);
    if (texts) {
      control.previousElementSibling.value = text;
      control.ariaValueText = text;
    }
  }
  const drawing = section.querySelector(".drawing"), { rows, says, draw } = compute(chosen);
  const [width, height, shapes] = draw(Math.min(WIDEST, drawing.clientWidth), drawing.clientWidth);
  for (const row of section.querySelectorAll("tbody tr")) {
    const name = row.firstChild.textContent;
    row.ariaCurrent = Object.values(chosen).includes(name) ? "true" : null;
    for (const [place, cell] of [...row.querySelectorAll("data")].entries()) {
      [cell.value, cell.textContent] = rows[name][place];
    }
  }
  section.querySelector("caption").textContent = settings.join(", ");
  section.querySelector(".result").textContent = says;
  const size = `viewBox="0 0 ${width} ${height}" width="${width}" height="${height}"`;
  drawing.innerHTML = `<svg ${size} role="img" aria-label="${says}">${shapes}</svg>`;
}

/** Have a calculator compute what its controls say, from now on. */
function start(name, compute) {
  for (const section of document.querySelectorAll(`.calculator[data-name=${name}]`)) {
    for (const part of section.querySelectorAll("[hidden]")) part.hidden = false;
    section.addEventListener("input", () => update(section, compute));
    addEventListener("resize", () => update(section, compute));
    update(section, compute);
  }
}

return { DECIMAL, BINARY, SECONDS, digits, scale, plain, count, start };
})();
