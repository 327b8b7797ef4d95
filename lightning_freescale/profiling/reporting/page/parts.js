// The parts of a step in the order of the stack: compute first, then the bubble.

const PARTS = [
  ["forward", "forward", "Compute of the forward pass and the loss."],
  ["backward", "backward", "Compute of the gradients, without the time spent waiting for exchanges."],
  ["optimizer", "optimizer", "Compute of the parameter updates."],
  ["straggler_wait", "straggler wait", "Wait at an exchange until the last rank has arrived. Balancing the ranks’ work reduces it."],
  ["transfer", "transfer", "Wait from the arrival of the last rank to the result: transfers that no compute hid."],
  ["wait", "wait for peers", "Wait at an exchange that is not divided into straggler wait and transfer, because the ranks’ clocks were not aligned."],
  ["data_wait", "data wait", "Wait for the next batch and its copy to the device."],
  ["host_overhead", "host overhead", "Training loop, hooks, callbacks and loggers between the stages of a step."],
  ["unexplained", "unexplained", "The remaining wall time."],
].map(([name, label, text]) => ({ name, label, text }));
const HIDDEN = "Compute during which an exchange ran. It is part of compute and does not add to the wall time.";
const COMPUTE = ["forward", "backward", "optimizer"];
const LOST = PARTS.filter((part) => !COMPUTE.includes(part.name));
const LABELS = Object.fromEntries(PARTS.map((part) => [part.name, part.label]));

// The parts of a run. If all waits are divided, there is no part for undivided waits.
const partsOf = ({ summary }) => PARTS.filter(({ name }) => name !== "wait" || summary.shares.wait > 0);

const swatch = (name) => el("span", { class: "swatch", "aria-hidden": "true", style: { background: `var(--${name})` } });

// Shares or seconds of the parts as a stacked bar; `scale` is the value of the full width.
function stack(values, scale, label, text) {
  const bars = PARTS.filter(({ name }) => values[name] > 0).map(({ name, label }) =>
    el("span", { title: `${label}: ${text(values[name])}`, "data-part": name,
      style: { width: `${(100 * values[name]) / scale}%`, background: `var(--${name})` } }));
  return el("div", { class: "stack", role: "img", "aria-label": label }, ...bars);
}

// Sums over the series of a report, in seconds, over [from, to) steps and [first, end) ranks.
function prepared(report, packed) {
  const { columns, step } = report.series, steps = step.length, ranks = report.ranks.length;
  const begin = Object.fromEntries(columns.map((name, index) => [name, index * ranks * steps]));
  const sum = (name, [from, to], [first, end]) => {
    let found = 0;
    for (let r = first; r < end; r += 1) for (let s = from; s < to; s += 1) found += packed[begin[name] + r * steps + s];
    return found / 1e6;
  };
  const bubble = (of, on) => { const wall = sum("wall", of, on); return wall ? 1 - COMPUTE.reduce((busy, name) => busy + sum(name, of, on), 0) / wall : 0; };
  return { parts: partsOf(report), steps, ranks, step, sum, bubble };
}
