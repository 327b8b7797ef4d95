// Shares, what-ifs and the causes of imbalance as bars.

function shares(body, report) {
  const { summary, wait_attribution: waits } = report;
  const parts = partsOf(report).map((part) => (part.name === "wait" ? { ...part, label: `${part.label} (not divided: ${waits.reason})` } : part));
  const seconds = (name) => duration(summary.shares[name] * summary.step_s);
  const items = parts.map(({ name, label, text }) => el("li", { title: text, "data-part": name }, swatch(name), el("span", {}, label),
    el("b", {}, percent(summary.shares[name])), el("span", { class: "quiet" }, seconds(name))));
  const efficiency = known(summary.overlap_efficiency)
    ? ` The overlap efficiency, hidden / (hidden + transfer), is ${percent(summary.overlap_efficiency)}.` : "";
  const spoken = parts.map(({ name, label }) => `${label} ${percent(summary.shares[name])}`).join(", ");
  const bar = stack(summary.shares, 1, `Shares of wall time: ${spoken}`, percent), { padding } = summary; // reports of earlier versions lack padding
  const padded = padding && `Padding: ${percent(padding.tokens)} of the computed tokens, a part of compute. It takes ${percent(padding.time)} of the wall time (${duration(padding.time * summary.step_s)} per step) if compute is proportional to the tokens.`;
  if (padding) bar.append(el("span", { class: "padding", title: padded, "data-part": "padding", style: { width: `${100 * padding.time}%` } }));
  body.replaceChildren(bar, padding ? el("p", { class: "note padding-note" }, el("span", { class: "swatch padding", "aria-hidden": "true" }), padded) : "", el("ul", { class: "legend" }, ...items),
    el("p", { class: "note", title: HIDDEN }, `Compute hid exchanges for ${percent(summary.shares.hidden)} of the wall time (${seconds("hidden")} per step).${efficiency}`),
    el("details", {}, el("summary", {}, "What the parts mean"),
      el("dl", { class: "meanings" }, ...[...parts, { label: "hidden", text: HIDDEN }].flatMap(({ label, text }) => [el("dt", {}, label), el("dd", {}, text)]))));
}

const IDEAS = {
  "perfect balance": "all ranks compute equally long in every step",
  "full overlap": "compute hides every transfer",
  "balance + overlap": "both changes together; their gains overlap",
  "no data wait": "every batch is ready when a rank needs it",
  "no host overhead": "ranks only run the model between exchanges",
  "equal histories": "every rank has samples of mean cost; slow ranks stay slow",
  "no padding": "ranks compute no padding",
  "no contention": "pending transfers do not slow down compute", // in reports of earlier versions
};

function whatIf(body, { what_if: ideas, replay, status }) {
  if (!ideas.length) return body.replaceChildren(el("p", { class: "empty" }, "The steps of this run were not replayed."));
  const end = Math.max(1.05, ...ideas.flatMap(({ speed_up, limit }) => [speed_up, limit]).filter(known));
  const place = (ratio) => `${(100 * Math.max(0, ratio - 1)) / (end - 1)}%`;
  const rows = ideas.map(({ name, speed_up, limit, note }) => el("tr", { "data-what-if": name },
    el("th", { scope: "row" }, name, el("small", {}, [IDEAS[name], note].filter(Boolean).join("; "))),
    el("td", { class: "bar" }, !known(speed_up) ? "left out" : el("div", { class: "gauge", "aria-hidden": "true" },
      el("span", { class: "fill", style: { width: place(speed_up) } }), el("span", { class: "limit", style: { left: place(limit) } }))),
    el("td", {}, el("b", {}, times(speed_up))), el("td", {}, times(limit))));
  const whole = table("Speed-up of each what-if beside its limit", [["what if"], ["from 1× to the limit", null, "bar parts"], ["speed-up"], ["limit"]], rows);
  whole.classList.add("ideas");
  if (!replay || replay.steps === status.steps) return body.replaceChildren(whole); // reports of earlier versions lack replay
  const some = replay.last_step - replay.first_step + 1 === replay.steps ? "S" : `${replay.steps} of s`;
  const share = percent(replay.shares.compute);
  return body.replaceChildren(el("p", { class: "note" }, `${some}teps ${replay.first_step} to ${replay.last_step} were replayed; ${share} of their time is compute.`), whole);
}

const CAUSES = [
  ["data_s", "data", "Samples with higher cost. Balancing them removes this part."],
  ["hardware_s", "hardware", "Ranks that are slower in every step than their samples explain."],
  ["jitter_s", "jitter, up to", "Changing differences that neither explains."],
];

function imbalance(body, found, ratio) {
  if (!found) return body.replaceChildren(el("p", { class: "empty" }, "The causes are unknown for this run."));
  const total = CAUSES.reduce((sum, [name]) => sum + Math.max(0, found[name]), 0);
  const excess = CAUSES.reduce((sum, [name]) => sum + found[name], 0);
  const slow = Object.entries(found.slow_ranks);
  const label = CAUSES.map(([name, label]) => `${label} ${duration(found[name])}`).join(", ");
  return body.replaceChildren(
    el("p", { class: "lead" }, `The slowest rank of a step computes ${duration(excess)} longer than the mean rank; measured imbalance ${ratio.toFixed(2)}.`),
    el("div", { class: "stack", role: "img", "aria-label": label }, ...CAUSES.filter(([name]) => found[name] > 0).map(([name, label, text]) =>
      el("span", { title: text, style: { width: `${(100 * found[name]) / total}%`, background: `var(--${name})` } }))),
    el("ul", { class: "legend" }, ...CAUSES.map(([name, label, text]) => el("li", { title: text }, swatch(name), el("span", {}, label),
      el("b", {}, excess > 0 ? percent(found[name] / excess) : UNKNOWN), el("span", { class: "quiet" }, duration(found[name]))))),
    el("p", { class: "note" }, slow.length
      ? `Slow hardware: ${slow.map(([rank, score]) => `rank ${rank} takes ${score.toFixed(2)} times as long as its samples explain`).join(", ")}.`
      : "No rank stands out as slow hardware."),
    found.hardware_s < -0.01 * excess ? el("p", { class: "note" }, slow.length ? "The value of hardware is negative, because slow ranks received less work."
      : "The value of hardware is negative and within the error of the cost model.") : "",
    el("p", { class: "note" }, (found.method === "ranks" ? "The causes are divided by rank, without a cost model." : `The causes are divided by the ${found.method}.`)
      + (known(found.residual) ? ` Its median error is ${percent(found.residual)}.` : "")));
}
