// Plotly as these pages use it: in the page's colours, with the keyboard as well as a pointer.

const NO_PLOTLY = "This page has no pictures, because the Python package plotly was not installed when it was written. The tables and report.json have all figures. "
  + "To add the pictures, run pip install 'lightning-freescale[report]', then freescale profile page report.json -o report.html.";
const LEFT = 64;
const RIGHT = 10;
const TOP = 28; // room for the buttons, so that they cover nothing
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const touched = matchMedia("(pointer: coarse)").matches;
const pictures = new Map();

// A place for a picture. `make` returns { data, layout } in the colours of the moment, for a width in pixels and the range of the
// x-axis that was zoomed into, null for all of it; `stops` are the points that arrow keys lead to, as Plotly's hover takes them.
function picture(id, label, make, stops) {
  if (!LIBRARY) return el("p", { class: "empty", id }, NO_PLOTLY);
  const place = el("div", { id, class: "picture", role: "figure", "aria-label": label, tabindex: "0" });
  const at = { row: 0, column: -1 };
  place.addEventListener("keydown", (event) => walk(event, place, stops, at));
  place.addEventListener("blur", () => Plotly.Fx.unhover(place));
  pictures.set(place, make);
  return place;
}

function clearPictures() {
  for (const place of pictures.keys()) Plotly.purge(place);
  pictures.clear();
}

async function drawPictures() {
  if (pictures.size) await plotly();
  for (const [place, make] of pictures) {
    await draw(place, make);
    place.on("plotly_relayout", () => draw(place, make)); // zoomed into, or of another width
  }
  document.body.removeAttribute("aria-busy");
}

function draw(place, make) {
  const axes = Object.entries(place.layout ?? {}).filter(([name, axis]) => /^[xy]axis/.test(name) && axis.autorange === false);
  const zoomed = Object.fromEntries(axes.map(([name, { range }]) => [name, { range, autorange: false }]));
  const { data, layout } = make(place.clientWidth, zoomed.xaxis?.range ?? null);
  place.style.height = `${layout.height}px`;
  return Plotly.react(place, data, [frame(), layout, zoomed].reduce(merged), settings(place.id));
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => pictures.forEach((make, place) => draw(place, make)));

function frame() {
  const [paper, ink, quiet, rule] = ["paper", "ink", "quiet", "rule"].map(colour);
  const { fontFamily: family } = getComputedStyle(document.body);
  const axis = { gridcolor: rule, linecolor: rule, zeroline: false, tickfont: { color: quiet } };
  return {
    paper_bgcolor: paper, plot_bgcolor: paper, margin: { l: LEFT, r: RIGHT, t: TOP, b: 28 },
    font: { family, size: 12, color: ink },
    hoverlabel: { bgcolor: paper, bordercolor: quiet, font: { family, color: ink, size: 13 }, align: "left", namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: ink },
    legend: { orientation: "h", x: 0, xanchor: "left", yanchor: "top", entrywidth: 85, font: { color: quiet } },
    uirevision: true, // what was hidden stays so when it is drawn again
    dragmode: touched ? false : "zoom", // a finger that moves scrolls the page
    xaxis: axis, yaxis: axis, yaxis2: axis, yaxis3: axis,
  };
}

function settings(name) {
  const vector = { name: "svg", title: "Download as SVG", icon: Plotly.Icons.disk, click: (place) => Plotly.downloadImage(place, { format: "svg", filename: name }) };
  return {
    responsive: true, displaylogo: false, displayModeBar: touched ? true : "hover", doubleClick: "autosize", showTips: false,
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d"], ["toImage", vector]],
    toImageButtonOptions: { format: "png", scale: 2, filename: name },
  };
}

// The frame, and in each of its objects what the picture says otherwise.
function merged(base, own) {
  const plain = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  return Object.fromEntries([...new Set([...Object.keys(base), ...Object.keys(own)])].map((key) =>
    [key, plain(base[key]) && plain(own[key]) ? merged(base[key], own[key]) : own[key] ?? base[key]]));
}

function walk(event, place, stops, at) {
  const [across, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
  if (!across && !down) return;
  event.preventDefault();
  at.row = Math.min(stops.rows - 1, Math.max(0, at.row + down));
  at.column = Math.min(stops.columns(at.row) - 1, Math.max(0, at.column + across));
  Plotly.Fx.hover(place, ...stops.at(at.row, at.column));
}

// Plotly reads some markup in its texts: what a document holds must stay text there, too.
const plainText = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const told = (title, lines) => [`<b>${plainText(title)}</b>`, ...lines.map(plainText)].join("<br>");

// How high a legend of so many entries is.
const legendHeight = (count, width) => 20 * Math.ceil(count / Math.max(1, Math.floor((width - LEFT) / 130))) + 8;
