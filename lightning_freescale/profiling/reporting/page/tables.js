// Tables of all figures.

function ranks(body, report) {
  const slow = report.imbalance ? report.imbalance.slow_ranks : {};
  const lost = partsOf(report).filter((part) => LOST.includes(part));
  const longest = report.ranks.reduce((most, { step_s }) => Math.max(most, step_s), 0) || 1;
  const rows = report.ranks.map(({ rank, step_s, shares: parts, score, last }) => {
    const isSlow = String(rank) in slow;
    const seconds = Object.fromEntries(PARTS.map(({ name }) => [name, parts[name] * step_s]));
    return row([String(rank), ...(isSlow ? [" ", el("mark", {}, "slow")] : [])], [
      duration(step_s), stack(seconds, longest, `rank ${rank}`, duration), percent(1 - parts.compute),
      ...["compute", ...lost.map(({ name }) => name), "hidden"].map((name) => percent(parts[name])),
      known(score) ? score.toFixed(2) : UNKNOWN, known(last) ? grouped(last) : UNKNOWN], { class: isSlow ? "slow" : null, "data-rank": rank });
  });
  const explained = lost.map(({ label, text }) => [label, text]);
  body.replaceChildren(table("Time of each rank, as shares of its wall time", [["rank"], ["step"], ["parts", null, "parts"], ["bubble"], ["compute", "Forward, backward and optimizer."],
    ...explained, ["hidden", HIDDEN], ["score"], ["last"]], rows));
}

function memory(body, held) {
  document.getElementById("memory").hidden = !held;
  if (!held) return body.replaceChildren();
  const reserved = held.ranks.some((rank) => known(rank.reserved_bytes)), judged = held.ranks.some((rank) => known(rank.grows));
  const intro = `Read at every exchange of records, ${plural(held.step.length, "time")}. The maximum over ranks / mean is ${held.imbalance.toFixed(2)} for the memory in use and ${held.peak_imbalance.toFixed(2)} for the peaks.`
    + (judged ? "" : " There are too few readings to detect growth.");
  const rows = held.ranks.map(({ rank, current_bytes: now, peak_bytes: peak, reserved_bytes: kept, growth_bytes: growth, grows }) =>
    row([String(rank), ...(grows ? [" ", el("mark", {}, "grows")] : [])],
      [bytes(now), bytes(peak), ...(reserved ? [bytes(kept)] : []), ...(judged ? [growth < 0 ? `−${bytes(-growth)}` : bytes(growth)] : [])], { class: grows ? "slow" : null, "data-rank": rank }));
  return body.replaceChildren(el("p", { class: "lead" }, intro), table("Memory of each rank", [["rank"], ["now", "At the end of the last window."], ["peak", "The largest memory in use."],
    ...(reserved ? [["reserved", "The memory that the allocator holds, including now."]] : []), ...(judged ? [["growth per window", "Median over all pairs of windows. A mark shows steady growth above chance and of a relevant size."]] : [])], rows));
}

function exchanges(body, list) {
  if (!list.length) return body.replaceChildren(el("p", { class: "empty" }, "No exchange was recorded."));
  const undivided = list.some(({ wait_s: wait }) => wait > 0);
  const latest = (last) => {
    const total = last.reduce((a, b) => a + b, 0), most = last.reduce((a, b) => Math.max(a, b), 0);
    return total ? `rank ${last.indexOf(most)}, ${percent(most / total)}` : UNKNOWN;
  };
  return body.replaceChildren(table("Exchanges between ranks, per step", [["exchange"], ["per step"], ["straggler wait"], ["transfer"], ...(undivided ? [["wait for peers"]] : []), ["hidden"], ["bytes moved"], ["most often last"]],
    list.map((one) => row(one.name, [Number.isInteger(one.per_step) ? String(one.per_step) : one.per_step.toFixed(2), duration(one.straggler_wait_s),
      duration(one.transfer_s), ...(undivided ? [duration(one.wait_s)] : []), duration(one.hidden_s), bytes(one.moved_bytes), latest(one.last)]))));
}

function heat(body, hot) {
  document.getElementById("heat").hidden = !hot;
  if (!hot) return body.replaceChildren();
  const intro = `${plural(hot.rows, "row")} in the current lists. A hot row is sent to a node once, for all ranks of the node. ${plural(hot.rows_of_half, "row")} make 50 % of all accesses, and ${grouped(hot.rows_of_most)} make 90 %.`
    + ` The owner with the most accesses has ${times(hot.largest_load)} the mean.` + (known(hot.colliding_share) ? ` ${percent(hot.colliding_share)} of the colliding rows of other nodes are hot.` : "");
  const spared = hot.hot_direct_bytes - hot.hot_far_bytes;
  return body.replaceChildren(el("p", { class: "lead" }, intro), table("Bytes that a rank sends per step", [[""], ["sent"], ["without the route", "If every rank had sent all rows directly."]], [
    row("hot rows, between nodes", [bytes(hot.hot_far_bytes), bytes(hot.hot_direct_bytes)]), row("hot rows, within the node", [bytes(hot.hot_near_bytes), bytes(0)]),
    row("all rows, between nodes", [bytes(hot.cross_node_bytes), bytes(hot.cross_node_bytes + spared)]), row("all rows", [bytes(hot.sent_bytes), bytes(hot.sent_bytes + spared - hot.hot_near_bytes)])]));
}

function host(body, sections, step) {
  const found = Object.entries(sections).sort((a, b) => b[1] - a[1]);
  if (!found.length) return body.replaceChildren(el("p", { class: "empty" }, "No host overhead was recorded."));
  return body.replaceChildren(table("Host overhead by section, per step", [["section"], ["per step"], ["share of the step"]],
    found.map(([name, seconds]) => row(name, [duration(seconds), step ? percent(seconds / step) : UNKNOWN]))));
}

function device(body, idle) {
  document.getElementById("device").hidden = !idle;
  if (!idle) return body.replaceChildren();
  const intro = `Kernels of the device during ${plural(idle.steps, "traced step")}: shares of the time with a kernel that computes, with kernels that only move data, and without kernels.`;
  return body.replaceChildren(el("p", { class: "lead" }, intro), table("Time of each device", [["rank"], ["compute"], ["moving data"], ["idle"]],
    idle.idle.map((share, rank) => row(String(rank), [percent(idle.compute[rank]), percent(idle.other[rank]), percent(share)]))));
}

// The origin of the costs in the plan.
function costs({ fitted_steps: fitted }, { steps }) {
  if (fitted === 0) return "the costs as given";
  if (fitted === steps) return "costs fitted to measured times";
  return `the costs as given in ${plural(steps - fitted, "step")}, fitted to measured times in ${grouped(fitted)}`;
}

function balance(body, { balance: plan, summary, status }) {
  document.getElementById("balance").hidden = !plan;
  if (!plan) return body.replaceChildren();
  const { compute, tokens } = plan, ratio = (value) => (known(value) ? value.toFixed(3) : UNKNOWN);
  const limit = tokens ? tokens.fullest : null;
  const rows = [row("compute", [ratio(compute.as_drawn), ratio(compute.balanced), ratio(compute.lower_bound), percent(compute.gap), ratio(summary.compute_imbalance), ...(known(limit) ? [UNKNOWN] : [])])];
  if (tokens) rows.push(row("tokens", [ratio(tokens.as_drawn), ratio(tokens.balanced), UNKNOWN, UNKNOWN, UNKNOWN, ...(known(limit) ? [percent(limit)] : [])]));
  const intro = `Maximum over ranks / mean. All values except the measured one are predicted by ${costs(plan, status)}.`
    + (known(compute.balanced) ? "" : " The samples of this run stayed as drawn.");
  return body.replaceChildren(el("p", { class: "lead" }, intro), table("Imbalance of compute and of tokens", [[""], ["as drawn"], ["balanced"],
    ["lower bound", "No assignment of the same steps with the same limits on the counts is lower."], ["gap", "The relative distance of balanced from the lower bound."], ["measured"],
    ...(known(limit) ? [["fullest rank", "The largest number of tokens of a rank in any step, as a share of its limit."]] : [])], rows));
}

function certainty(body, { wait_attribution: waits, run, overhead }) {
  const { clock } = waits;
  const divided = run.world_size === 1 ? "With one rank there are no waits for peers."
    : "Divided at the arrival of the last rank on one clock: straggler wait before, transfer after.";
  const facts = [
    ["Wait for peers", waits.aligned ? divided : `Not divided into straggler wait and transfer: ${waits.reason}`],
    ["Uncertainty of this time", waits.aligned ? `± ${duration(waits.uncertainty_s)}` : null],
    ["Clocks", clock && `compared ${plural(clock.syncs, "time")}, best round trip ${duration(clock.round_trip_s)}, ${plural(clock.rejected, "slow answer")} not used, `
      + `drift ${(clock.drift * 1e6).toFixed(2)} µs per second`],
    ["The profiler’s own cost", `${percent(overhead.share)} of the step: ${duration(overhead.total_s)}, ${duration(overhead.exchange_s)} for exchanges of records on a separate thread, `
      + `${duration(overhead.stamps_s)} for stamps inside the step`],
  ].filter(([, value]) => known(value));
  body.replaceChildren(el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}
