// Step time, bubble and shares over the steps. Where steps outnumber pixels a column is a mean, and a band shows its extremes.

function series(body, data, summary) {
  const wall = Array.from(data.totals.wall, (sum) => sum / data.ranks);
  const bubbles = wall.map((_, s) => cellBubble(data, [s, s + 1], [0, data.ranks]));
  const note = el("p", { class: "note" });
  const time = { name: "step time", values: wall, mean: summary.step_s, format: duration, axis: axisDuration };
  const bubble = { name: "bubble", values: bubbles, mean: summary.bubble, format: percent, axis: axisPercent };
  body.replaceChildren(
    figure("Step time, mean over ranks", meanAndMost(time), lines("time-canvas", data, time, note)),
    figure("Bubble", meanAndMost(bubble), lines("bubble-canvas", data, bubble, note)),
    figure("Shares of wall time", null, shareColumns(data)),
    el("ul", { class: "keys" }, ...data.parts.map(({ name, label }) => el("li", {}, swatch(name), label))), note);
}

const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const meanAndMost = ({ mean, values, format }) => `mean ${format(mean)}, most ${format(largest(values))}`;
const figure = (caption, values, canvas) => el("figure", {}, el("figcaption", {}, caption, values && el("b", {}, values)), canvas);

function axes(context, width, height, top, data, columns, format) {
  const left = 56;
  for (const tick of ticks(top, 3)) {
    const y = height - (tick / top) * height;
    context.fillStyle = colour("rule");
    context.fillRect(left, Math.min(height - 1, Math.round(y)), width - left, 1);
    text(context, format(tick), left - 8, Math.max(7, Math.min(height - 3, y)), "right");
  }
  const w = (width - left) / columns.length;
  stepAxis(context, data, columns, left, width, height + 14);
  return { left, w };
}

// Top of an axis, so that its ticks need no more digits than they have.
const roof = (top) => { const size = ticks(top, 3)[1] ?? 1; return Math.ceil(top / size - 1e-9) * size; };

function lines(id, data, line, note) {
  const { name, values, mean, format, axis } = line, height = 120, top = roof(largest(values) || 1);
  return chart(id, height + 24, `Line of the ${name} over the steps: ${meanAndMost(line)}.`, (context, width, self) => {
    const columns = bins(data.steps, (width - 56) / 3);
    const { left, w } = axes(context, width, height, top, data, columns, axis);
    const y = (value) => height - (Math.max(0, value) / top) * height;
    const means = columns.map(([from, to]) => values.slice(from, to).reduce((a, b) => a + b, 0) / (to - from));
    if (columns.length < data.steps) drawBand(context, values, columns, left, w, y);
    drawLine(context, means, left, w, y);
    drawMean(context, left, width, y(mean));
    note.textContent = columns.length === data.steps ? ""
      : `A point of the lines is the mean of up to ${Math.ceil(data.steps / columns.length)} steps; the band spans the least and the greatest of them.`;
    reading(self, data, columns, left, w, height, (steps, i) => [[name, format(means[i])]]);
  });
}

function drawMean(context, left, width, y) {
  context.strokeStyle = colour("quiet");
  context.setLineDash([4, 4]);
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(width, y);
  context.stroke();
  context.setLineDash([]);
}

// Neighbours that begin and end at whole pixels have no seam between them.
const whole = (x, width) => [Math.round(x), Math.round(x + width) - Math.round(x)];

function drawBand(context, values, columns, left, w, y) {
  context.fillStyle = colour("band");
  columns.forEach(([from, to], i) => {
    const group = values.slice(from, to), low = y(Math.min(...group)), high = y(Math.max(...group));
    const [x, across] = whole(left + i * w, w);
    context.fillRect(x, high, across, Math.max(1, low - high));
  });
}

function drawLine(context, means, left, w, y) {
  context.strokeStyle = colour("ink");
  context.lineWidth = 1.25;
  context.lineJoin = "round";
  context.beginPath();
  if (means.length === 1) context.moveTo(left, y(means[0]));
  means.forEach((value, i) => context[i || means.length === 1 ? "lineTo" : "moveTo"](left + (means.length === 1 ? 1 : i + 0.5) * w, y(value)));
  context.stroke();
  context.lineWidth = 1;
}

function shareColumns(data) {
  const height = 160;
  return chart("shares-canvas", height + 24, "Shares of wall time over the steps, stacked. The means stand in the section Where the time went.", (context, width, self) => {
    const columns = bins(data.steps, (width - 56) / 2);
    const { left, w } = axes(context, width, height, 1, data, columns, axisPercent);
    const sums = (name) => columns.map(([from, to]) => data.totals[name].subarray(from, to).reduce((a, b) => a + b, 0));
    const walls = sums("wall"), floor = new Float64Array(columns.length);
    const shares = Object.fromEntries(data.parts.map(({ name }) => [name, sums(name).map((sum, i) => (walls[i] ? sum / walls[i] : 0))]));
    for (const { name } of data.parts) {
      context.fillStyle = colour(name);
      shares[name].forEach((share, i) => {
        const [x, across] = whole(left + i * w, w);
        context.fillRect(x, height * (1 - floor[i] - share), across - (w > 12 ? 1 : 0), height * share);
        floor[i] += share;
      });
    }
    reading(self, data, columns, left, w, height, (steps, i) => data.parts.map(({ name, label }) => [label, percent(shares[name][i]), name]));
  });
}

function reading(self, data, columns, left, w, height, rows) {
  self.stride = [Math.max(1, w), 0];
  self.origin = [left - w / 2, height / 2];
  self.hit = (x) => {
    const i = Math.floor((x - left) / w);
    return x >= left && columns[i] ? { title: stepsOf(data, columns[i]), rows: rows(columns[i], i) } : null;
  };
}
