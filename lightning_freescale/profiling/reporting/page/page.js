// Shows the selected run.

const body = (id) => document.querySelector(`#${id} .body`);
const put = (id, ...children) => document.getElementById(id).replaceChildren(...children.filter(known));

// A text in which addresses of the documentation are links.
function linked(text) {
  const { site } = document.getElementById("verdict").dataset, [first, ...others] = text.split(site);
  return [first, ...others.flatMap((rest) => {
    const [path] = rest.match(/^[\w/.#-]*/);
    return [el("a", { href: site + path }, site + path), rest.slice(path.length)];
  })];
}

function header({ run, status, summary, verdict, ranks: there }) {
  document.title = `${run.label}: bubble report`;
  put("label", run.label);
  const facts = [run.model, known(run.parameters) ? `${short(run.parameters)} parameters` : null, `strategy ${run.strategy}`, `${plural(run.world_size, "rank")} on ${run.device}`,
    `${plural(status.steps, "step")}${status.warmup ? ` after ${grouped(status.warmup)} of warm-up` : ""}`,
    run.accumulate_grad_batches > 1 ? `${run.accumulate_grad_batches} batches per update` : null, status.complete ? "complete" : "interrupted"];
  put("run", facts.filter(known).join(" · "));
  document.getElementById("status").className = status.complete ? "complete" : "interrupted";
  const lost = status.not_exchanged ? ` ${plural(status.not_exchanged, "further step")} ran, but the ranks could not exchange the records.` : "";
  const missing = there.length < run.world_size ? ` Only ${plural(there.length, "rank")} of ${run.world_size} are in the report.` : "";
  const reason = (status.reason ?? "unknown reason").replace(/\.$/, "");
  put("status", status.complete ? (lost + missing).trim() || null : `Interrupted: ${reason}. The report covers ${plural(status.steps, "step")}.${lost}${missing}`);
  const told = verdict ?? { verdict: `${percent(summary.shares.compute)} of the ranks’ time was compute.` };
  put("verdict", ...["verdict", "why", "next", "also"].filter((name) => told[name]).map((name) => el("p", { class: name }, el("b", {}, `${name[0].toUpperCase()}${name.slice(1)}: `), ...linked(told[name]))));
}

function figures({ summary, overhead, balance, status }) {
  const list = [
    ["bubble", percent(summary.bubble), "1 − compute / wall time"],
    ["limit", times(summary.limit), "speed-up without any bubble"],
    ["step time", duration(summary.step_s), "mean over ranks and steps"],
    ["samples per second", rate(summary), known(summary.samples_per_s) ? `${grouped(summary.samples)} samples of all ranks` : "samples unknown"],
    ["compute imbalance", summary.compute_imbalance.toFixed(2), "slowest rank / mean rank, measured" + (known(summary.predicted_imbalance) ? `; ${summary.predicted_imbalance.toFixed(2)} predicted${balance ? ` by ${costs(balance, status)}` : ""}` : "")],
    ["profiler overhead", percent(overhead.share), `${duration(overhead.total_s)} per step`],
  ];
  put("figures", ...list.map(([name, value, meaning]) => el("div", { "data-figure": name }, el("dt", {}, name), el("dd", {}, value), el("dd", { class: "quiet" }, meaning))));
}

function footer({ run, version }) {
  const versions = Object.entries(run.versions).map(([name, value]) => `${name} ${value}`);
  put("footer", el("p", {}, ["Started " + moment(run.started), ...versions, `report version ${version}`].join(" · ")));
}

// The section that explains the verdict's cause follows the shares.
const TELLS = { "data loading": "series", "imbalance of data": "imbalance", "slow hardware": "ranks", "uneven compute": "imbalance",
  "embedding exchange": "exchanges", "dense communication": "exchanges", "other communication": "exchanges", "host overhead": "host" };
const SECTIONS = Array.from(document.querySelectorAll("main > section"));

function arrange({ verdict }) {
  document.querySelector("main").append(...SECTIONS);
  const telling = verdict && TELLS[verdict.cause];
  if (telling) document.getElementById("shares").after(document.getElementById(telling));
}

function show(report, packed) {
  document.body.setAttribute("aria-busy", "true"); // until the pictures are drawn
  clearPictures();
  arrange(report);
  header(report);
  figures(report);
  shares(body("shares"), report);
  overTime(report, packed);
  waterfall(body("waterfall"), report.median_step);
  whatIf(body("what-if"), report);
  balance(body("balance"), report);
  imbalance(body("imbalance"), report.imbalance, report.summary.compute_imbalance);
  ranks(body("ranks"), report);
  memory(body("memory"), report.memory);
  exchanges(body("exchanges"), report.exchanges);
  heat(body("heat"), report.heat);
  host(body("host"), report.host_s, report.summary.step_s);
  device(body("device"), report.device_idle);
  certainty(body("certainty"), report);
  footer(report);
  return drawPictures();
}

function overTime(report, packed) {
  const data = prepared(report, packed);
  const sections = [[heatmap, "heatmap"], [series, "series"]];
  for (const [draw, id] of sections) {
    if (data.steps && data.ranks) draw(body(id), data, report.summary);
    else body(id).replaceChildren(el("p", { class: "empty" }, "No step was recorded."));
  }
}

async function start() {
  if (typeof DecompressionStream === "undefined") return put("status", "This browser does not support compressed data. Use a browser of 2023 or later. report.json contains the same figures.");
  const { reports, compared } = JSON.parse(await (await unpacked(document.getElementById("content"))).text());
  const series = await Promise.all(Array.from(document.querySelectorAll(".series"), async (place) => planes(await (await unpacked(place)).arrayBuffer())));
  const selector = document.getElementById("selector"), select = selector.querySelector("select");
  select.append(...reports.map((report, index) => el("option", { value: index }, runLabel(report, index))));
  select.addEventListener("change", () => show(reports[Number(select.value)], series[Number(select.value)]));
  selector.hidden = reports.length < 2;
  ablation(body("ablation"), reports, compared);
  return show(reports[0], series[0]);
}

start();
