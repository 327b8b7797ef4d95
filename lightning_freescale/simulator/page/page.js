// The sliders and switches of the page, and the table and bars that depend on them.

const content = JSON.parse(document.getElementById("content").textContent);
const LABELS = { balance: "balance", overlap: "overlap", dedup: "dedup", sm_free: "SM-free", split_backward: "split backward", two_level: "two levels" };
const TECHNIQUES = Object.keys(LABELS);
const SHARES = { exponent: [0, 2], contention: [0, 1], late_weights: [0, 0.6], split_cost: [0, 0.5] };
const STEPS = 400; // positions of a slider
const set = { ...content.values };
const on = Object.fromEntries(TECHNIQUES.map((name) => [name, ["balance", "overlap", "dedup"].includes(name)]));
on.micro_batches = 1;
let ranks = content.ranks[0].count;

const el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const times = (ratio) => `${ratio.toFixed(2)}x`;
const UNITS = { s: [[1, "s"], [1e3, "ms"], [1e6, "µs"], [1e9, "ns"]], B: [[1e-9, "GB"], [1e-6, "MB"], [1e-3, "kB"], [1, "B"]] };
UNITS["B/s"] = UNITS.B.map(([factor, unit]) => [factor, `${unit}/s`]);
function readable(value, unit) {
  const choices = UNITS[unit] ?? [[1, unit]];
  const [factor, shown] = choices.find(([each]) => value * each >= 1) ?? choices.at(-1);
  return `${Number((value * factor).toPrecision(3))} ${shown}`.trim();
}

// Sliders of shares are linear. All others are logarithmic, from a tenth of the range to ten times the range.
function ends({ name, low, value, high }) {
  return SHARES[name] ?? [(low || value / 10 || 1e-9) / 10, (high || 1e-6) * 10];
}
const isShare = (name) => name in SHARES;
function toSlider(known, value) {
  const [from, to] = ends(known);
  const share = isShare(known.name) ? (value - from) / (to - from) : Math.log(Math.max(value, from) / from) / Math.log(to / from);
  return Math.round(STEPS * Math.min(1, Math.max(0, share)));
}
function fromSlider(known, place) {
  const [from, to] = ends(known);
  return isShare(known.name) ? from + (to - from) * (place / STEPS) : from * (to / from) ** (place / STEPS);
}

function slider(known) {
  const input = el("input", { type: "range", min: 0, max: STEPS, id: known.name });
  input.value = toSlider(known, known.value);
  const shown = el("output", { for: known.name }, readable(known.value, known.unit));
  input.addEventListener("input", () => {
    const place = Number(input.value);
    // at its first position, the slider has exactly its first value
    set[known.name] = place === toSlider(known, known.value) ? known.value : fromSlider(known, place);
    shown.textContent = readable(set[known.name], known.unit);
    show();
  });
  const range = known.low < known.high ? ` ${readable(known.low, known.unit)} to ${readable(known.high, known.unit)}` : "";
  const said = `${known.word}${range}${known.source ? `: ${known.source}` : ""}`;
  return el("div", { class: "slider" }, el("label", { for: known.name }, known.label), shown, input, el("small", {}, said));
}

const NEEDS = { split_backward: ["overlap"], two_level: ["overlap", "dedup"] };
function switches() {
  const boxes = TECHNIQUES.map((name) => {
    const box = el("input", { type: "checkbox", id: `on-${name}` });
    box.checked = on[name];
    box.addEventListener("change", () => {
      on[name] = box.checked;
      show();
    });
    return el("label", {}, box, ` ${LABELS[name]}`);
  });
  const parts = el("select", { id: "micro_batches" }, ...[1, 2, 4, 8].map((count) => el("option", { value: count }, String(count))));
  parts.addEventListener("change", () => {
    on.micro_batches = Number(parts.value);
    show();
  });
  return [...boxes, el("label", {}, "micro-batches ", parts)];
}

// As in the package, a technique is off if another one that it needs is off.
function effective() {
  const chosen = { ...on };
  for (const [name, needed] of Object.entries(NEEDS)) chosen[name] &&= needed.every((each) => on[each]);
  if (!on.overlap) chosen.micro_batches = 1;
  return chosen;
}

function outlook(count, techniques) {
  const load = { ...content.fixed, ...set };
  return simulated(content.ranks.find((each) => each.count === count), load, load, content.edges, techniques);
}

const PLAIN = { ...Object.fromEntries(TECHNIQUES.map((name) => [name, false])), micro_batches: 1 };
function show() {
  const chosen = effective();
  for (const [name, needed] of Object.entries(NEEDS)) document.getElementById(`on-${name}`).disabled = !needed.every((each) => on[each]);
  document.getElementById("micro_batches").disabled = !on.overlap;
  const rows = content.ranks.map(({ count }) => {
    const [plain, yours] = [outlook(count, PLAIN), outlook(count, chosen)];
    const [lost, left] = [plain.step - plain.compute, yours.step - yours.compute];
    const cells = [readable(plain.step, "s"), percent(lost / plain.step), readable(yours.step, "s"), percent(left / yours.step),
      percent(lost > 0 ? Math.max(1 - left / lost, -1) : 0), times(plain.step / yours.step), times(plain.step / plain.compute)];
    return { count, plain, yours, row: el("tr", {}, el("th", { scope: "row" }, String(count)), ...cells.map((text) => el("td", {}, text))) };
  });
  document.querySelector("#outlook tbody").replaceChildren(...rows.map(({ row }) => row));
  const { plain, yours } = rows.find(({ count }) => count === ranks);
  const bar = (name, { step, compute }) => el("div", { class: "bar" }, el("span", {}, name), el("div", { class: "track" },
    el("i", { class: "compute", style: `width:${(100 * compute) / plain.step}%` }), el("i", { class: "bubble", style: `width:${(100 * Math.max(0, step - compute)) / Math.max(plain.step, step)}%` })));
  document.getElementById("bars").replaceChildren(bar("plain", plain), bar("chosen", yours));
}

document.getElementById("source").textContent = content.source;
document.getElementById("switches").replaceChildren(...switches());
document.getElementById("sliders").replaceChildren(...content.known.map(slider));
const selector = document.getElementById("ranks");
selector.replaceChildren(...content.ranks.map(({ count }) => el("option", { value: count }, String(count))));
selector.addEventListener("change", () => {
  ranks = Number(selector.value);
  show();
});
document.getElementById("reset").addEventListener("click", () => {
  for (const known of content.known) set[known.name] = known.value;
  document.getElementById("sliders").replaceChildren(...content.known.map(slider));
  show();
});
show();
