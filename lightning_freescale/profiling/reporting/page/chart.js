// A canvas that draws itself at the right size and in the theme's colours, with a tooltip for pointer and keyboard.

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const charts = new Set();

function chart(id, height, label, draw) {
  const canvas = el("canvas", { id, role: "img", "aria-label": label, tabindex: "0", style: { height: `${height}px` } });
  const self = { canvas, height, draw, hit: () => null, stride: [1, 1], at: null };
  canvas.addEventListener("pointermove", (event) => point(self, event.offsetX, event.offsetY));
  canvas.addEventListener("pointerdown", (event) => point(self, event.offsetX, event.offsetY));
  canvas.addEventListener("pointerleave", () => leave(self));
  canvas.addEventListener("blur", () => leave(self));
  canvas.addEventListener("keydown", (event) => walk(self, event));
  charts.add(self);
  return canvas;
}

function paint(self) {
  const width = self.canvas.clientWidth, ratio = window.devicePixelRatio || 1;
  if (!width) return;
  self.canvas.width = Math.round(width * ratio);
  self.canvas.height = Math.round(self.height * ratio);
  const context = self.canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  self.draw(context, width, self);
}

function point(self, x, y) {
  self.at = [x, y];
  const found = self.hit(x, y);
  if (!found) return leave(self);
  const tip = document.getElementById("tip");
  tip.replaceChildren(el("strong", {}, found.title), el("dl", {}, ...found.rows.flatMap(([name, value, key]) =>
    [el("dt", {}, key ? swatch(key) : null, name), el("dd", {}, value)])));
  tip.hidden = false;
  const box = self.canvas.getBoundingClientRect();
  const left = box.left + x + 16, top = box.top + y + 16;
  tip.style.left = `${Math.max(4, left + tip.offsetWidth > innerWidth - 4 ? left - tip.offsetWidth - 32 : left)}px`;
  tip.style.top = `${Math.max(4, top + tip.offsetHeight > innerHeight - 4 ? top - tip.offsetHeight - 32 : top)}px`;
  return undefined;
}

function leave(self) {
  self.at = null;
  document.getElementById("tip").hidden = true;
}

function walk(self, event) {
  const [across, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [0, 0];
  if (!across && !down) return;
  event.preventDefault();
  const [x, y] = self.at ?? self.origin ?? [0, 0];
  const width = self.canvas.clientWidth - 1;
  point(self, Math.min(width, Math.max(0, x + across * self.stride[0])), Math.min(self.height - 1, Math.max(0, y + down * self.stride[1])));
}

const paintAll = () => charts.forEach(paint);
let pending = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(paintAll); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paintAll);

// The values to label on an axis that ends at `top`: few and round.
function ticks(top, most) {
  if (!(top > 0)) return [0];
  const raw = top / most, unit = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].map((factor) => factor * unit).find((step) => step >= raw * 0.999);
  return Array.from({ length: Math.floor(top / size + 1e-9) + 1 }, (_, i) => i * size);
}

// Which of `count` rows or columns get a label if each label needs `room` pixels of `length`.
function labelled(count, length, room) {
  const every = [1, 2, 5].flatMap((f) => [f, f * 10, f * 100, f * 1000, f * 10000]).sort((a, b) => a - b)
    .find((step) => (length / count) * step >= room) ?? count;
  return Array.from({ length: Math.ceil(count / every) }, (_, i) => i * every);
}

// Labels the first column of every so many steps, at round numbers.
function stepAxis(context, data, columns, left, width, y) {
  const w = (width - left) / columns.length;
  for (const [i, step] of stepLabels(data, columns, width - left)) {
    const x = left + (i + 0.5) * w;
    text(context, step, Math.min(x, width - context.measureText(step).width / 2), y, "center");
  }
}

function stepLabels(data, columns, length) {
  const first = data.step[0], last = data.step[data.steps - 1];
  const [, every = 1] = ticks(Math.max(1, last - first + 1), Math.max(1, length / 72));
  const size = Math.max(1, every), found = new Map();
  columns.forEach(([from, to], i) => {
    const round = Math.ceil(data.step[from] / size) * size;
    if (round <= data.step[to - 1] && !found.has(round)) found.set(round, i);
  });
  return found.size ? Array.from(found, ([step, i]) => [i, step]) : [[0, first]];
}

function text(context, value, x, y, align = "left", shade = "quiet") {
  context.fillStyle = colour(shade);
  context.textAlign = align;
  context.fillText(value, x, y);
}
