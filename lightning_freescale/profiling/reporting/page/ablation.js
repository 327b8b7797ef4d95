// Comparison of runs with the first: bubble b, removed share r, and end-to-end speed-up.

const runLabel = ({ run }, index) => `${index + 1}. ${run.label}`;
const rate = ({ samples_per_s: found }) => (!known(found) ? UNKNOWN : found >= 1e5 ? short(found) : grouped(Number(digits(found))));

function ablation(body, reports, compared) {
  document.getElementById("ablation").hidden = !compared;
  if (!compared) return;
  const slowest = reports.reduce((most, { summary }) => Math.max(most, summary.step_s), 0) || 1;
  const per = compared.runs[0].per;
  body.replaceChildren(table("Runs compared with the first", [["run"], ["parts of a step", null, "parts wide"], ["step"], ["samples/s", null, "wide"],
    ["bubble b"], ["reduction r", `Removed share of the first run’s bubble time per ${per}.`], ["speed-up", `Time per ${per} of the first run / time per ${per} of this run.`],
    [`compute per ${per}`, "Relative change, which is the difference between the speed-up and 1/(1 − rb).", "wide"]],
  reports.map((report, index) => comparedRow(report, index, slowest, compared.runs[index - 1]))));
  if (compared.differences.length) body.append(el("div", { class: "warning", role: "note" },
    "These runs did different work, so their speed-ups are not comparable:", el("ul", {}, ...compared.differences.map((line) => el("li", {}, line)))));
  if (compared.remarks.length) body.append(el("ul", { class: "note" }, ...compared.remarks.map((line) => el("li", {}, line))));
}

function comparedRow(report, index, slowest, one) {
  const { run, summary, status } = report;
  const seconds = Object.fromEntries(PARTS.map(({ name }) => [name, summary.shares[name] * summary.step_s]));
  const wide = (content) => el("td", { class: "wide" }, content);
  const change = one && known(one.compute_change) ? Math.round(one.compute_change * 1e3) / 1e3 : null;
  return row([runLabel(report, index), ...(status.complete ? [] : [" ", el("mark", {}, "interrupted")])], [
    wide(stack(seconds, slowest, `Parts of a step of ${run.label}`, duration)), duration(summary.step_s), wide(rate(summary)), percent(summary.bubble),
    one ? percent(one.removed) : UNKNOWN, one ? el("b", {}, times(one.speed_up)) : times(1), wide((change > 0 ? "+" : "") + percent(change))], { "data-run": index });
}
