// The median step: one row of intervals per rank on one clock, with a line where the last rank arrived at an exchange.

const KINDS = { data: "data_wait", host: "host_overhead", pause: "pause" };
const KIND_LABELS = { ...LABELS, data: "data wait", host: "host overhead", pause: "pause, not counted" };
const CLOSE = 2.5e-6; // seconds: times are rounded to microseconds, so the same moment may differ between ranks by one or two

function waterfall(body, median) {
  const intervals = median ? median.ranks.flatMap((list, rank) => list.map(([kind, name, start, end]) => ({ rank, kind, name, start, end }))) : [];
  if (!intervals.length) return body.replaceChildren(el("p", { class: "empty" }, "This report holds no single step in full: none was kept."));
  const start = intervals.reduce((least, interval) => Math.min(least, interval.start), Infinity);
  const end = intervals.reduce((most, interval) => Math.max(most, interval.end), -Infinity);
  const plot = { intervals, start, span: Math.max(1e-6, end - start), ranks: median.ranks.length, arrivals: arrivals(intervals, (end - start) / 100) };
  const row = Math.max(3, Math.min(28, Math.floor(640 / plot.ranks)));
  const shown = [...new Set(intervals.map(({ kind }) => kind))];
  const order = ["forward", "backward", "optimizer", "straggler_wait", "transfer", "wait", "data", "host", "unexplained", "pause"].filter((kind) => shown.includes(kind));
  const summary = `Step ${median.step} on ${plural(plot.ranks, "rank")}, ${duration(plot.span)} from the first start to the last end.`;
  return body.replaceChildren(
    el("ul", { class: "keys" }, ...order.map((kind) => el("li", {}, swatch(KINDS[kind] ?? kind), KIND_LABELS[kind]))),
    chart("waterfall-canvas", row * plot.ranks + 28, `Waterfall. ${summary}`, (context, width, self) => drawWaterfall(context, width, self, plot, row)),
    el("p", { class: "note" }, summary), el("ul", { class: "note waits" }, ...waits(plot)));
}

// Waits for one exchange end together; the rank that goes on to transfer at that moment without having waited was the last.
function arrivals(intervals, shortest) {
  const found = [];
  for (const interval of intervals.filter(({ kind }) => kind === "straggler_wait")) {
    const same = found.find((one) => one.name === interval.name && Math.abs(one.at - interval.end) <= CLOSE);
    if (same) { same.waiting.add(interval.rank); same.longest = Math.max(same.longest, interval.end - interval.start); }
    else found.push({ name: interval.name, at: interval.end, waiting: new Set([interval.rank]), longest: interval.end - interval.start });
  }
  for (const one of found) {
    const late = intervals.filter((interval) => interval.kind === "transfer" && interval.name === one.name
      && Math.abs(interval.start - one.at) <= CLOSE && !one.waiting.has(interval.rank));
    one.last = late.length === 1 ? late[0].rank : null;
  }
  return found.filter((one) => one.longest >= shortest).sort((a, b) => a.at - b.at);
}

function waits({ arrivals: all, start }) {
  return all.slice(0, 8).map((one) => el("li", {},
    `${one.name} at ${duration(one.at - start)}: ${plural(one.waiting.size, "rank")} waited up to ${duration(one.longest)}`
    + (one.last === null ? "." : ` for rank ${one.last}.`)));
}

function drawWaterfall(context, width, self, plot, row) {
  const left = 56, room = width - left - 8, height = row * plot.ranks;
  const x = (time) => left + ((time - plot.start) / plot.span) * room;
  const inset = row >= 14 ? 2 : 0.5;
  for (const { rank, kind, start, end } of plot.intervals) {
    context.fillStyle = colour(KINDS[kind] ?? kind);
    context.fillRect(x(start), rank * row + inset, Math.max(0.5, x(end) - x(start)), row - 2 * inset);
  }
  for (const rank of labelled(plot.ranks, height, 16)) text(context, `rank ${rank}`, left - 8, Math.max(7, (rank + 0.5) * row), "right");
  for (const tick of ticks(plot.span * 1e3, Math.max(2, room / 110))) {
    text(context, axisDuration(tick / 1e3), x(plot.start + tick / 1e3), height + 16, tick ? "center" : "left");
  }
  plot.arrivals.forEach((one) => drawArrival(context, x(one.at), height, row, one.last));
  self.stride = [4, row];
  self.origin = [left, row / 2];
  self.hit = (px, py) => {
    const rank = Math.floor(py / row), time = plot.start + ((px - left) / room) * plot.span;
    const interval = plot.intervals.find((one) => one.rank === rank && one.start <= time && time < one.end);
    return interval ? intervalText(plot, interval) : null;
  };
}

function drawArrival(context, x, height, row, last) {
  context.strokeStyle = colour("ink");
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(x, 0);
  context.lineTo(x, height);
  context.stroke();
  context.setLineDash([]);
  if (last === null) return;
  const y = (last + 0.5) * row, size = Math.min(5, row / 2);
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x - 1.6 * size, y - size);
  context.lineTo(x - 1.6 * size, y + size);
  context.closePath();
  context.fillStyle = colour("paper");
  context.fill();
  context.stroke();
}

function intervalText(plot, { rank, kind, name, start, end }) {
  const arrival = kind === "straggler_wait" && plot.arrivals.find((one) => one.name === name && Math.abs(one.at - end) <= CLOSE);
  const rows = [["for", duration((end - start))], ["from", duration((start - plot.start))], ["to", duration((end - plot.start))]];
  if (name) rows.unshift(["what", name]);
  if (arrival && arrival.last !== null) rows.push(["until", `rank ${arrival.last} arrived`]);
  return { title: `rank ${rank}, ${KIND_LABELS[kind] ?? kind}`, rows };
}
