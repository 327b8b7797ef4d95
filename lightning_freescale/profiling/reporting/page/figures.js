// Formats of numbers, and elements whose text is never parsed as HTML.

const GAP = "\u00a0";
const UNKNOWN = "–";
const known = (value) => value !== null && value !== undefined;

function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : size >= 0.0995 ? 2 : 3);
}

function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const size = Math.abs(seconds);
  if (size >= 9.9995) return digits(seconds) + GAP + "s";
  if (size >= 1e-5 || size === 0) return digits(seconds * 1e3) + GAP + "ms";
  return digits(seconds * 1e6) + GAP + "µs";
}

function percent(share) {
  if (!known(share)) return UNKNOWN;
  const text = (share * 100).toFixed(share !== 0 && Math.abs(share) < 0.00995 ? 2 : 1);
  return (Number(text) === 0 ? text.replace("-", "") : text) + GAP + "%";
}

// On an axis a whole number needs no decimals.
const axisPercent = (share) => `${Number((share * 100).toPrecision(3))}${GAP}%`;

const times = (ratio) => (known(ratio) ? ratio.toFixed(2) + "×" : UNKNOWN);
const grouped = (count) => count.toLocaleString("en-US");
const plural = (count, word) => grouped(count) + " " + word + (count === 1 ? "" : "s");

function short(count, base = 1000, units = ["", "k", "M", "G", "T"]) {
  let unit = 0;
  while (count >= base && unit < units.length - 1) { count /= base; unit += 1; }
  const text = Number.isInteger(count) ? String(count) : digits(count);
  return units[unit] ? text + GAP + units[unit] : text;
}

const bytes = (count) => (known(count) ? short(count, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]) : UNKNOWN);

function moment(text) {
  const found = /^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*?(Z|\+00:00)?$/.exec(text);
  return found ? `${found[1]} ${found[2]}${found[3] ? " UTC" : ""}` : text;
}

// Strings become text nodes, so no content of a document is parsed as HTML.
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter(known));
  return node;
}

function table(caption, headings, rows) {
  const head = headings.map(([text, title, kind]) => el("th", { scope: "col", title: title ?? null, class: kind ?? null }, text));
  for (const { cells } of rows) [...cells].forEach((cell, column) => { cell.dataset.label = headings[column][0]; });
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("caption", {}, caption), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
}

function row(first, cells, attributes = {}) {
  return el("tr", attributes, el("th", { scope: "row" }, ...[first].flat()), ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : el("td", {}, cell))));
}
