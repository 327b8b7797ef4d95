// Puts the chosen run on the page.

const { reports, compared } = JSON.parse(document.getElementById("content").textContent);
const body = (id) => document.querySelector(`#${id} .body`);
const put = (id, ...children) => document.getElementById(id).replaceChildren(...children.filter(known));

function header({ run, status, summary, what_if: ideas, ranks: there }) {
  document.title = `${run.label}: bubble report`;
  put("label", run.label);
  const facts = [run.model, known(run.parameters) ? `${short(run.parameters)} parameters` : null, `strategy ${run.strategy}`, `${plural(run.world_size, "rank")} on ${run.device}`,
    `${plural(status.steps, "step")}${status.warmup ? ` after ${grouped(status.warmup)} of warm-up` : ""}`,
    run.accumulate_grad_batches > 1 ? `${run.accumulate_grad_batches} batches per update` : null, status.complete ? "complete" : "interrupted"];
  put("run", facts.filter(known).join(" · "));
  document.getElementById("status").className = status.complete ? "complete" : "interrupted";
  const lost = status.not_exchanged ? ` ${plural(status.not_exchanged, "further step")} ran, but the ranks’ records of them were not brought together.` : "";
  const missing = there.length < run.world_size ? ` Only ${plural(there.length, "rank")} of ${run.world_size} could be reported.` : "";
  const reason = (status.reason ?? "no reason is known").replace(/\.$/, "");
  put("status", status.complete ? (lost + missing).trim() || null : `Interrupted: ${reason}. The report covers ${plural(status.steps, "step")}.${lost}${missing}`);
  put("verdict", verdict(summary, ideas));
}

function verdict(summary, ideas) {
  const [worst] = [...LOST].sort((a, b) => summary.shares[b.name] - summary.shares[a.name]);
  if (!(summary.shares[worst.name] > 0)) return "No time was lost.";
  const [best] = ideas.filter(({ name, speed_up }) => name !== "both" && known(speed_up)).sort((a, b) => b.speed_up - a.speed_up);
  const hope = best && best.speed_up >= 1.005 ? ` Of the what-ifs, ${best.name} gains most: ${times(best.speed_up)}.` : "";
  return `${percent(summary.shares.compute)} of the ranks’ time was compute. The largest loss is ${worst.label}, ${percent(summary.shares[worst.name])}.${hope}`;
}

function figures({ summary, overhead }) {
  const list = [
    ["bubble", percent(summary.bubble), "1 − compute / wall time"],
    ["limit", times(summary.limit), "speed-up if all of it were gone"],
    ["step time", duration(summary.step_s), "mean over ranks and steps"],
    ["samples per second", rate(summary), known(summary.samples_per_s) ? `${grouped(summary.samples)} in all, all ranks` : "samples unknown"],
    ["compute imbalance", summary.compute_imbalance.toFixed(2), "slowest rank / mean rank, measured" + (known(summary.predicted_imbalance) ? `; ${summary.predicted_imbalance.toFixed(2)} predicted` : "")],
    ["profiler overhead", percent(overhead.share), `${duration(overhead.total_s)} per step`],
  ];
  put("figures", ...list.map(([name, value, meaning]) => el("div", { "data-figure": name }, el("dt", {}, name), el("dd", {}, value), el("dd", { class: "quiet" }, meaning))));
}

function footer({ run, version }) {
  const versions = Object.entries(run.versions).map(([name, value]) => `${name} ${value}`);
  put("footer", el("p", {}, ["Started " + moment(run.started), ...versions, `report version ${version}`].join(" · ")));
}

function show(report) {
  charts.clear();
  header(report);
  figures(report);
  shares(body("shares"), report);
  overTime(report);
  waterfall(body("waterfall"), report.median_step);
  whatIf(body("what-if"), report.what_if);
  imbalance(body("imbalance"), report.imbalance, report.summary.compute_imbalance);
  ranks(body("ranks"), report);
  exchanges(body("exchanges"), report.exchanges);
  host(body("host"), report.host_s, report.summary.step_s);
  device(body("device"), report.device_idle);
  certainty(body("certainty"), report);
  footer(report);
  paintAll();
}

function overTime(report) {
  const data = prepared(report);
  const sections = [[heatmap, "heatmap"], [series, "series"]];
  for (const [draw, id] of sections) {
    if (data.steps && data.ranks) draw(body(id), data, report.summary);
    else body(id).replaceChildren(el("p", { class: "empty" }, "No step was recorded."));
  }
}

function start() {
  const selector = document.getElementById("selector"), select = selector.querySelector("select");
  select.append(...reports.map((report, index) => el("option", { value: index }, runLabel(report, index))));
  select.addEventListener("change", () => show(reports[Number(select.value)]));
  selector.hidden = reports.length < 2;
  ablation(body("ablation"), reports, compared);
  show(reports[0]);
}

start();
