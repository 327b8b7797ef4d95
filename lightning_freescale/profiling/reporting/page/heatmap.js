// Bubble of each rank in each step as a painted grid; several steps or ranks share a cell where there are more than pixels.

const LEVELS = 48;
const TALLEST = 520;

function ramp() {
  const stops = ["heat-low", "heat-middle", "heat-high"].map((name) => colour(name).match(/[\da-f]{2}/gi).map((hex) => parseInt(hex, 16)));
  return Array.from({ length: LEVELS + 1 }, (_, level) => {
    const at = (2 * level) / LEVELS, low = Math.min(1, Math.floor(at));
    return `rgb(${stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (at - low))).join(" ")})`;
  });
}

function cellBubble(data, [from, to], [first, end]) {
  let wall = 0, compute = 0;
  for (let s = from; s < to; s += 1) {
    for (let r = first; r < end; r += 1) { wall += data.wall[s * data.ranks + r]; compute += data.compute[s * data.ranks + r]; }
  }
  return wall ? 1 - compute / wall : 0;
}

function heatmap(body, data) {
  const rows = bins(data.ranks, TALLEST), height = Math.max(40, Math.min(26 * data.ranks, TALLEST));
  const rankMeans = Array.from({ length: data.ranks }, (_, r) => cellBubble(data, [0, data.steps], [r, r + 1]));
  const note = el("p", { class: "note" }), scale = el("p", { class: "scale", "aria-hidden": "true" });
  const summary = heatmapText(data, rankMeans);
  body.replaceChildren(scale, chart("heatmap-canvas", height + 24, `Heat map of the bubble. ${summary}`, (context, width, self) =>
    drawHeatmap(context, width, self, { data, rows, height, note, scale })), el("p", { class: "note" }, summary), note);
}

function heatmapText(data, means) {
  const low = means.indexOf(Math.min(...means)), high = means.indexOf(Math.max(...means));
  const range = data.ranks > 1
    ? `Means of the ranks: from ${percent(means[low])} (rank ${low}) to ${percent(means[high])} (rank ${high}).`
    : `Mean: ${percent(means[0])}.`;
  return `${plural(data.ranks, "rank")}, ${plural(data.steps, "step")}. ${range}`;
}

function drawHeatmap(context, width, self, { data, rows, height, note, scale }) {
  const left = 56, room = width - left;
  const columns = bins(data.steps, room * (window.devicePixelRatio || 1));
  const values = rows.map((ranks) => columns.map((steps) => cellBubble(data, steps, ranks)));
  const top = Math.max(0.25, Math.ceil(values.reduce((most, line) => line.reduce((a, b) => Math.max(a, b), most), 0) * 20) / 20);
  const shades = ramp();
  const w = room / columns.length, h = height / rows.length, gap = w >= 6 && h >= 6 ? 1 : 0;
  values.forEach((line, y) => line.forEach((value, x) => {
    context.fillStyle = shades[Math.round((Math.max(0, Math.min(value, top)) / top) * LEVELS)];
    const edges = [left + x * w, y * h, left + (x + 1) * w, (y + 1) * h].map((v) => (gap ? Math.round(v) : v));
    context.fillRect(edges[0], edges[1], edges[2] - edges[0] - gap + (gap ? 0 : 0.5), edges[3] - edges[1] - gap);
  }));
  for (const y of labelled(rows.length, height, 16)) text(context, `rank ${rows[y][0]}`, left - 8, Math.max(7, (y + 0.5) * h), "right");
  stepAxis(context, data, columns, left, width, height + 14);
  note.textContent = joined(data, columns.length, rows.length);
  scale.replaceChildren("bubble 0", ...shades.filter((_, i) => i % 8 === 0).map((shade) => el("span", { style: { background: shade } })), axisPercent(top));
  self.stride = [Math.max(1, w), Math.max(1, h)];
  self.origin = [left - w / 2, h / 2];
  self.hit = (x, y) => {
    const column = columns[Math.floor((x - left) / w)], ranks = rows[Math.floor(y / h)];
    return x >= left && column && ranks ? cellText(data, column, ranks) : null;
  };
}

function joined(data, columns, rows) {
  const parts = [];
  if (columns < data.steps) parts.push(`${grouped(data.steps)} steps in ${grouped(columns)} columns`);
  if (rows < data.ranks) parts.push(`${grouped(data.ranks)} ranks in ${grouped(rows)} rows`);
  return parts.length ? `There are more values than pixels: ${parts.join(", ")}. A cell shows the mean over its steps and ranks.` : "";
}

function cellText(data, steps, ranks) {
  const count = (steps[1] - steps[0]) * (ranks[1] - ranks[0]);
  const mean = (name) => {
    let sum = 0;
    for (let s = steps[0]; s < steps[1]; s += 1) for (let r = ranks[0]; r < ranks[1]; r += 1) sum += data.part(s, r, name);
    return duration(sum / count);
  };
  const who = ranks[1] - ranks[0] === 1 ? `rank ${ranks[0]}` : `ranks ${ranks[0]}–${ranks[1] - 1}`;
  return { title: `${who}, ${stepsOf(data, steps)}`, rows: [["bubble", percent(cellBubble(data, steps, ranks))], ["wall", mean("wall")],
    ...data.parts.map(({ name, label }) => [label, mean(name), name]), ["hidden", mean("hidden")]] };
}
