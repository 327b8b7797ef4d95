// The median step: one row of pieces per rank on one clock, with a line where the last rank arrived at an exchange.

const KINDS = { data: "data_wait", host: "host_overhead", pause: "pause" };
const KIND_LABELS = { ...LABELS, data: "data wait", host: "host overhead", pause: "pause, not counted" };
const CLOSE = 2; // µs: times are rounded, so that the same moment may differ between ranks by one or two

function waterfall(body, median) {
  const pieces = median ? median.ranks.flatMap((list, rank) => list.map(([kind, name, start, end]) => ({ rank, kind, name, start, end }))) : [];
  if (!pieces.length) return body.replaceChildren(el("p", { class: "empty" }, "This report holds no single step in full: none was kept."));
  const start = pieces.reduce((least, piece) => Math.min(least, piece.start), Infinity);
  const end = pieces.reduce((most, piece) => Math.max(most, piece.end), -Infinity);
  const plot = { pieces, start, span: Math.max(1, end - start), ranks: median.ranks.length, arrivals: arrivals(pieces, (end - start) / 100) };
  const row = Math.max(3, Math.min(28, Math.floor(640 / plot.ranks)));
  const shown = [...new Set(pieces.map(({ kind }) => kind))];
  const order = ["forward", "backward", "optimizer", "straggler_wait", "transfer", "data", "host", "unexplained", "pause"].filter((kind) => shown.includes(kind));
  const summary = `Step ${median.step} on ${plural(plot.ranks, "rank")}, ${duration(plot.span / 1e6)} from the first start to the last end.`;
  return body.replaceChildren(
    el("ul", { class: "keys" }, ...order.map((kind) => el("li", {}, swatch(KINDS[kind] ?? kind), KIND_LABELS[kind]))),
    chart("waterfall-canvas", row * plot.ranks + 28, `Waterfall. ${summary}`, (context, width, self) => drawWaterfall(context, width, self, plot, row)),
    el("p", { class: "note" }, summary), el("ul", { class: "note waits" }, ...waits(plot)));
}

// Waits for one exchange end together; the rank that goes on to transfer at that moment without having waited was the last.
function arrivals(pieces, shortest) {
  const found = [];
  for (const piece of pieces.filter(({ kind }) => kind === "straggler_wait")) {
    const same = found.find((one) => one.name === piece.name && Math.abs(one.at - piece.end) <= CLOSE);
    if (same) { same.waiting.add(piece.rank); same.longest = Math.max(same.longest, piece.end - piece.start); }
    else found.push({ name: piece.name, at: piece.end, waiting: new Set([piece.rank]), longest: piece.end - piece.start });
  }
  for (const one of found) {
    const late = pieces.filter((piece) => piece.kind === "transfer" && piece.name === one.name
      && Math.abs(piece.start - one.at) <= CLOSE && !one.waiting.has(piece.rank));
    one.last = late.length === 1 ? late[0].rank : null;
  }
  return found.filter((one) => one.longest >= shortest).sort((a, b) => a.at - b.at);
}

function waits({ arrivals: all, start }) {
  return all.slice(0, 8).map((one) => el("li", {},
    `${one.name} at ${duration((one.at - start) / 1e6)}: ${plural(one.waiting.size, "rank")} waited up to ${duration(one.longest / 1e6)}`
    + (one.last === null ? "." : ` for rank ${one.last}.`)));
}

function drawWaterfall(context, width, self, plot, row) {
  const left = 56, room = width - left - 8, height = row * plot.ranks;
  const x = (time) => left + ((time - plot.start) / plot.span) * room;
  const inset = row >= 14 ? 2 : 0.5;
  for (const { rank, kind, start, end } of plot.pieces) {
    context.fillStyle = colour(KINDS[kind] ?? kind);
    context.fillRect(x(start), rank * row + inset, Math.max(0.5, x(end) - x(start)), row - 2 * inset);
  }
  for (const rank of labelled(plot.ranks, height, 16)) text(context, `rank ${rank}`, left - 8, Math.max(7, (rank + 0.5) * row), "right");
  for (const tick of ticks(plot.span / 1e3, Math.max(2, room / 110))) {
    text(context, axisDuration(tick / 1e3), x(plot.start + tick * 1e3), height + 16, tick ? "center" : "left");
  }
  plot.arrivals.forEach((one) => drawArrival(context, x(one.at), height, row, one.last));
  self.stride = [4, row];
  self.origin = [left, row / 2];
  self.hit = (px, py) => {
    const rank = Math.floor(py / row), time = plot.start + ((px - left) / room) * plot.span;
    const piece = plot.pieces.find((one) => one.rank === rank && one.start <= time && time < one.end);
    return piece ? pieceText(plot, piece) : null;
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

function pieceText(plot, { rank, kind, name, start, end }) {
  const arrival = kind === "straggler_wait" && plot.arrivals.find((one) => one.name === name && Math.abs(one.at - end) <= CLOSE);
  const rows = [["for", duration((end - start) / 1e6)], ["from", duration((start - plot.start) / 1e6)], ["to", duration((end - plot.start) / 1e6)]];
  if (name) rows.unshift(["what", name]);
  if (arrival && arrival.last !== null) rows.push(["until", `rank ${arrival.last} arrived`]);
  return { title: `rank ${rank}, ${KIND_LABELS[kind] ?? kind}`, rows };
}
