// The three pictures of Plotly: bubble by rank and step, the median step, and figures over the steps.

const MOST_HEIGHT = 520;
const KINDS = { data: "data_wait", host: "host_overhead", pause: "pause" };
const KIND_LABELS = { ...LABELS, data: "data wait", host: "host overhead", pause: "pause" };
const KIND_ORDER = ["forward", "backward", "optimizer", "straggler_wait", "transfer", "wait", "data", "host", "unexplained", "pause"];
const CLOSE = 2.5e-6; // seconds: times are rounded to microseconds, so the same moment may differ between ranks by one or two
const largest = (values) => values.reduce((a, b) => Math.max(a, b), 0);

// The unit of the times on an axis.
const timeUnit = (most) => (most >= 9.9995 ? { scale: 1, ticksuffix: `${GAP}s` } : { scale: 1e3, ticksuffix: `${GAP}ms` });
const PERCENT = { scale: 100, ticksuffix: `${GAP}%` };

// -- bubble by rank and step

// The label of a cell of the heat map, computed on demand.
class Cell {
  constructor(data, steps, ranks) { Object.assign(this, { data, steps, ranks }); }
  get text() {
    const { data, steps, ranks } = this, count = (steps[1] - steps[0]) * (ranks[1] - ranks[0]);
    const times = [...data.parts, { name: "hidden", label: "hidden" }].map(({ name, label }) => `${label} ${duration(data.sum(name, steps, ranks) / count)}`);
    const pairs = times.flatMap((one, i) => (i % 2 ? [] : [[one, ...times.slice(i + 1, i + 2)].join(", ")])); // Plotly does not show a label that is higher than its picture
    return told(`${rankName(ranks)}, ${stepName(data, steps)}`, [`bubble ${percent(data.bubble(steps, ranks))} of ${duration(data.sum("wall", steps, ranks) / count)}`, ...pairs]);
  }
}

function heatmap(body, data) {
  const height = Math.max(64, Math.min(26 * data.ranks, MOST_HEIGHT)), ranks = bins(data.ranks, height), summary = heatmapText(data);
  const most = ranks.reduce((found, row) => { for (let s = 0; s < data.steps; s += 1) found = Math.max(found, data.bubble([s, s + 1], row)); return found; }, 0);
  const top = Math.max(0.25, Math.ceil(most * 20) / 20); // independent of the zoom
  const stops = { rows: ranks.length };
  const note = el("p", { class: "note" });
  const make = (width, zoomed) => {
    const room = width - LEFT - RIGHT, steps = bins(data.steps, room / (zoomed ? Math.min(1, (zoomed[1] - zoomed[0]) / (data.step[data.steps - 1] - data.step[0] + 1)) : 1));
    Object.assign(stops, { columns: () => steps.length, at: (row, column) => [{ xval: middle(data, steps[column]), yval: ranks.length - 1 - row }, "xy"] });
    note.textContent = joined(data, steps, ranks);
    return heatmapFigure(data, ranks, steps, height, top, room / steps.length >= 6 && height / ranks.length >= 6 ? 1 : 0);
  };
  body.replaceChildren(picture("heatmap-picture", `Heat map of the bubble. ${summary}`, make, stops), el("p", { class: "note" }, summary), note);
}

function heatmapFigure(data, ranks, steps, height, top, gap) {
  const rows = [...ranks].reverse(); // from bottom to top
  const z = rows.map((row) => steps.map((column) => data.bubble(column, row)));
  const scale = { tickvals: [0, top], ticktext: ["bubble 0", axisPercent(top)], tickfont: { color: colour("quiet") } };
  return {
    data: [{
      type: "heatmap", z, x: steps.map((one) => middle(data, one)), y: rows.map(rankName), zmin: 0, zmax: top, xgap: gap, ygap: gap,
      customdata: rows.map((row) => steps.map((column) => new Cell(data, column, row))), hovertemplate: "%{customdata.text}<extra></extra>",
      colorscale: ["low", "middle", "high"].map((end, i) => [i / 2, colour(`heat-${end}`)]),
      colorbar: { orientation: "h", x: 0, xanchor: "left", y: 1, yanchor: "bottom", ypad: 6, len: 150, lenmode: "pixels", thickness: 8, outlinewidth: 0, ...scale },
    }],
    layout: { height: height + TOP + 48, margin: { t: TOP + 20 }, xaxis: { showgrid: false }, yaxis: { showgrid: false, ticks: "" } },
  };
}

// At most `most` groups of equal size as [from, to) pairs; the last may be smaller.
function bins(count, most) {
  const size = Math.ceil(count / Math.max(1, Math.floor(most)));
  return Array.from({ length: Math.ceil(count / size) }, (_, i) => [i * size, Math.min(count, (i + 1) * size)]);
}

const middle = (data, [from, to]) => (data.step[from] + data.step[to - 1]) / 2;
const rankName = ([first, end]) => (end - first === 1 ? `rank ${first}` : `ranks ${first}–${end - 1}`);
const stepName = (data, [from, to]) => (to - from === 1 ? `step ${data.step[from]}` : `steps ${data.step[from]}–${data.step[to - 1]}`);

function joined(data, steps, ranks) {
  const parts = [];
  if (steps.length < data.steps) parts.push(`${grouped(data.steps)} steps in ${grouped(steps.length)} columns`);
  if (ranks.length < data.ranks) parts.push(`${grouped(data.ranks)} ranks in ${grouped(ranks.length)} rows`);
  return parts.length ? `There are more values than pixels: ${parts.join(", ")}. A cell shows the mean over its steps and ranks${steps.length < data.steps ? "; zoom in to see each step" : ""}.` : "";
}

function heatmapText(data) {
  const means = Array.from({ length: data.ranks }, (_, r) => data.bubble([0, data.steps], [r, r + 1]));
  const low = means.indexOf(Math.min(...means)), high = means.indexOf(Math.max(...means));
  const range = data.ranks > 1
    ? `Means of the ranks: from ${percent(means[low])} (rank ${low}) to ${percent(means[high])} (rank ${high}).`
    : `Mean: ${percent(means[0])}.`;
  return `${plural(data.ranks, "rank")}, ${plural(data.steps, "step")}. ${range}`;
}

// -- the median step

function waterfall(body, median) {
  const intervals = median ? median.ranks.flatMap((list, rank) => list.map(([kind, name, start, end]) => ({ rank, kind, name, start, end }))) : [];
  if (!intervals.length) return body.replaceChildren(el("p", { class: "empty" }, "This report contains no complete step."));
  const start = intervals.reduce((least, interval) => Math.min(least, interval.start), Infinity);
  const end = intervals.reduce((most, interval) => Math.max(most, interval.end), -Infinity);
  const late = arrivals(intervals, (end - start) / 100);
  const kinds = KIND_ORDER.map((kind) => [kind, intervals.filter((interval) => interval.kind === kind)]).filter(([, list]) => list.length);
  const { scale, ticksuffix } = timeUnit(end - start);
  const summary = `Step ${median.step} on ${plural(median.ranks.length, "rank")}, ${duration(end - start)} from the first start to the last end.`;
  const make = (width) => {
    const rows = Math.max(3, Math.min(28, Math.floor(640 / median.ranks.length))) * median.ranks.length;
    const legend = legendHeight(kinds.length, width), bars = kinds.map(([kind, list]) => kindBars(kind, list, start, late, scale));
    return {
      data: [...bars, lateRanks(late.filter(({ last }) => last !== null), start, scale)],
      layout: {
        height: rows + TOP + 34 + legend, barmode: "overlay", hovermode: "closest", bargap: 0.14, margin: { b: 34 + legend }, legend: { y: -30 / rows },
        xaxis: { autorangeoptions: { minallowed: 0, maxallowed: scale * Math.max(1e-6, end - start) }, ticksuffix, showgrid: false },
        yaxis: { categoryorder: "array", categoryarray: median.ranks.map((_, rank) => `rank ${rank}`).reverse(), showgrid: false },
        shapes: late.map(({ at }) => ({ type: "line", yref: "paper", x0: scale * (at - start), x1: scale * (at - start), y0: 0, y1: 1, line: { color: colour("ink"), width: 1, dash: "dot" } })),
      },
    };
  };
  return body.replaceChildren(picture("waterfall-picture", `Waterfall. ${summary}`, make, intervalStops(median.ranks, kinds)),
    el("p", { class: "note" }, summary), el("ul", { class: "note waits" }, ...waits(late, start)));
}

function kindBars(kind, list, start, late, scale) {
  return {
    type: "bar", orientation: "h", name: KIND_LABELS[kind], y: list.map(({ rank }) => `rank ${rank}`), base: list.map((one) => scale * (one.start - start)),
    x: list.map((one) => scale * (one.end - one.start)), text: list.map((one) => intervalText(one, start, late)), textposition: "none",
    hovertemplate: "%{text}<extra></extra>", marker: { color: colour(KINDS[kind] ?? kind), line: { width: 0 } },
  };
}

function lateRanks(late, start, scale) {
  return {
    type: "scatter", mode: "markers", showlegend: false, x: late.map(({ at }) => scale * (at - start)), y: late.map(({ last }) => `rank ${last}`),
    text: late.map((one) => told(`rank ${one.last} arrives last`, [`at ${one.name}`, `after ${duration(one.at - start)}`])), hovertemplate: "%{text}<extra></extra>",
    marker: { symbol: "triangle-right", size: 9, color: colour("paper"), line: { color: colour("ink"), width: 1 } },
  };
}

// The arrow keys move between the intervals of a rank, and between ranks.
function intervalStops(ranks, kinds) {
  const found = ranks.map(() => []);
  kinds.forEach(([, list], curveNumber) => list.forEach(({ rank, start }, pointNumber) => found[rank].push({ start, stop: { curveNumber, pointNumber } })));
  found.forEach((list) => list.sort((a, b) => a.start - b.start));
  const filled = found.filter((list) => list.length);
  return { rows: filled.length, columns: (row) => filled[row].length, at: (row, column) => [[filled[row][column].stop]] };
}

// Waits for one exchange end together. A rank that starts its transfer at that time without a wait was the last.
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

function waits(late, start) {
  return late.slice(0, 8).map((one) => el("li", {},
    `${one.name} at ${duration(one.at - start)}: ${plural(one.waiting.size, "rank")} waited up to ${duration(one.longest)}`
    + (one.last === null ? "." : ` for rank ${one.last}.`)));
}

function intervalText({ rank, kind, name, start, end }, first, late) {
  const arrival = kind === "straggler_wait" && late.find((one) => one.name === name && Math.abs(one.at - end) <= CLOSE);
  const rows = [`for ${duration(end - start)}`, `from ${duration(start - first)} to ${duration(end - first)}`];
  if (name) rows.unshift(name);
  if (arrival && arrival.last !== null) rows.push(`until rank ${arrival.last} arrived`);
  return told(`rank ${rank}, ${KIND_LABELS[kind] ?? kind}`, rows);
}

// -- over the steps

const FEW = 100; // largest number of steps that are shown as bars; more are shown as areas
const PANELS = [[0.76, 1], [0.44, 0.66], [0, 0.34]]; // from top to bottom, as shares of the height

function series(body, data, summary) {
  const all = [0, data.ranks], steps = Array.from({ length: data.steps }, (_, s) => [s, s + 1]), sums = (name) => steps.map((one) => data.sum(name, one, all));
  const walls = sums("wall"), time = walls.map((wall) => wall / data.ranks), lost = steps.map((one) => data.bubble(one, all)), unit = timeUnit(largest(time));
  const captions = [`Step time: mean ${duration(summary.step_s)}, most ${duration(largest(time))}`,
    `Bubble: mean ${percent(summary.bubble)}, most ${percent(largest(lost))}`, "Shares of wall time"];
  const shares = data.parts.map((part) => ({ ...part, shares: sums(part.name).map((sum, s) => (walls[s] ? sum / walls[s] : 0)) }));
  const make = (width) => {
    const legend = legendHeight(shares.length, width), height = 430;
    return {
      data: [...overSteps("step time", data.step, time, summary.step_s, "y", unit, duration, width), ...overSteps("bubble", data.step, lost, summary.bubble, "y2", PERCENT, percent, width),
        ...shares.map((part) => shareOfSteps(part, data.step))],
      layout: {
        height: height + TOP + 28 + legend, margin: { t: TOP + 18, b: 28 + legend }, hovermode: "x unified", hoversubplots: "axis", barmode: "stack", bargap: data.steps > 40 ? 0 : 0.08,
        legend: { y: -28 / height, traceorder: "normal" },
        xaxis: { anchor: "y3", showgrid: false, unifiedhovertitle: { text: "<b>step %{x}</b>" }, ...(data.steps === 1 ? { dtick: 1 } : {}) },
        yaxis: { domain: PANELS[0], rangemode: "tozero", fixedrange: true, ticksuffix: unit.ticksuffix, nticks: 4 },
        yaxis2: { domain: PANELS[1], rangemode: "tozero", fixedrange: true, ticksuffix: PERCENT.ticksuffix, nticks: 4 },
        yaxis3: { domain: PANELS[2], range: [0, 100], fixedrange: true, ticksuffix: PERCENT.ticksuffix, nticks: 4 },
        annotations: captions.map((text, i) => ({ text, xref: "paper", yref: "paper", x: 0, xanchor: "left", xshift: -LEFT - 1, y: PANELS[i][1], yanchor: "bottom", yshift: 4, showarrow: false, font: { color: colour("quiet") } })),
      },
    };
  };
  const stops = { rows: 1, columns: () => data.steps, at: (_, column) => [{ xval: data.step[column] }, "xy"] };
  body.replaceChildren(picture("series-picture", `Over the steps. ${captions.slice(0, 2).join(". ")}. Stacked shares of wall time; the section Where the time went has their means.`, make, stops));
}

// A line over all steps and their mean. If the steps are closer than the width of a line, a second line has the means of neighbours.
function overSteps(name, x, values, mean, yaxis, { scale }, format, width) {
  const line = { type: "scatter", yaxis, showlegend: false }, groups = bins(x.length, (width - LEFT) / 3), crowded = groups.length < x.length;
  const of = (list, [from, to]) => list.slice(from, to).reduce((a, b) => a + b, 0) / (to - from);
  return [
    { ...line, mode: x.length < 3 ? "lines+markers" : "lines", name, x, y: values.map((value) => scale * value), text: values.map(format), hovertemplate: "%{text}", line: { color: colour(crowded ? "band" : "ink"), width: 1.25 } },
    ...(crowded ? [{ ...line, mode: "lines", x: groups.map((group) => of(x, group)), y: groups.map((group) => scale * of(values, group)), hoverinfo: "skip", line: { color: colour("ink"), width: 1.25 } }] : []),
    { ...line, mode: "lines", x: [x[0], x[x.length - 1]], y: [scale * mean, scale * mean], hoverinfo: "skip", line: { color: colour("quiet"), width: 1, dash: "dash" } },
  ];
}

function shareOfSteps({ name, label, shares }, x) {
  const shared = { name: label, x, y: shares.map((share) => PERCENT.scale * share), text: shares.map(percent), yaxis: "y3", hovertemplate: "%{text}" };
  if (x.length <= FEW) return { ...shared, type: "bar", textposition: "none", marker: { color: colour(name), line: { width: 0 } } };
  return { ...shared, type: "scatter", mode: "none", stackgroup: "parts", fillcolor: colour(name) };
}
