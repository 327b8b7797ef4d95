// The parts of a step, in the order in which they are stacked: compute first, then what is lost.

const PARTS = [
  ["forward", "forward", "Compute of the forward pass and the loss."],
  ["backward", "backward", "Compute of the gradients, without the time spent waiting for exchanges."],
  ["optimizer", "optimizer", "Compute of the parameter updates."],
  ["straggler_wait", "straggler wait", "Waiting at an exchange until the last rank has arrived. Balancing the ranks’ work makes it shorter."],
  ["transfer", "transfer", "From the arrival of the last rank until the result is there: bytes under way that no compute hid."],
  ["wait", "wait for peers", "Waiting at an exchange that is not divided into straggler wait and transfer, because the ranks’ clocks were not aligned."],
  ["data_wait", "data wait", "Waiting for the next batch, its copy to the device included."],
  ["host_overhead", "host overhead", "The training loop, its hooks, callbacks and loggers, between the stages of a step."],
  ["unexplained", "unexplained", "What is left over of the wall time."],
].map(([name, label, text]) => ({ name, label, text }));
const HIDDEN = "Compute behind which an exchange was under way. It is part of compute and adds nothing to the wall time.";
const COMPUTE = ["forward", "backward", "optimizer"];
const LOST = PARTS.filter((part) => !COMPUTE.includes(part.name));
const LABELS = Object.fromEntries(PARTS.map((part) => [part.name, part.label]));

// The parts that a run has: where all waits are divided, there is no other wait for peers.
const partsOf = ({ summary }) => PARTS.filter(({ name }) => name !== "wait" || summary.shares.wait > 0);

const swatch = (name) => el("span", { class: "swatch", "aria-hidden": "true", style: { background: `var(--${name})` } });

// Shares or seconds of the parts, side by side; `scale` is the value that fills the width.
function stack(values, scale, label, text) {
  const bars = PARTS.filter(({ name }) => values[name] > 0).map(({ name, label }) =>
    el("span", { title: `${label}: ${text(values[name])}`, "data-part": name,
      style: { width: `${(100 * values[name]) / scale}%`, background: `var(--${name})` } }));
  return el("div", { class: "stack", role: "img", "aria-label": label }, ...bars);
}

// Column-wise sums of a document's series, so that charts of any width are quick to draw.
function prepared(report) {
  const { columns, breakdown_s: cells, step } = report.series;
  const at = Object.fromEntries(columns.map((name, index) => [name, index]));
  const steps = cells.length;
  const ranks = steps ? cells[0].length : 0;
  const totals = Object.fromEntries(columns.map((name) => [name, new Float64Array(steps)]));
  const wall = new Float64Array(steps * ranks), compute = new Float64Array(steps * ranks);
  const [forward, backward, optimizer] = COMPUTE.map((name) => at[name]);
  for (let s = 0; s < steps; s += 1) {
    for (let r = 0; r < ranks; r += 1) {
      const cell = cells[s][r];
      for (let c = 0; c < columns.length; c += 1) totals[columns[c]][s] += cell[c];
      wall[s * ranks + r] = cell[at.wall];
      compute[s * ranks + r] = cell[forward] + cell[backward] + cell[optimizer];
    }
  }
  const part = (s, r, name) => cells[s][r][at[name]];
  return { parts: partsOf(report), steps, ranks, step, totals, wall, compute, part };
}

// At most `most` groups of equal size, as [from, to) pairs.
function bins(count, most) {
  const number = Math.max(1, Math.min(count, Math.floor(most)));
  return Array.from({ length: number }, (_, i) => [Math.floor((i * count) / number), Math.floor(((i + 1) * count) / number)]);
}

const stepsOf = (data, [from, to]) => (to - from === 1 ? `step ${data.step[from]}` : `steps ${data.step[from]}–${data.step[to - 1]}`);
