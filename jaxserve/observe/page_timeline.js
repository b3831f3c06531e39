// -------------------------------------------------------------------------------- timeline

const STAGES = { step: "step", attend: "attention", dispatch: "dispatch ↓", ffn: "ffn", combine: "combine ↑" };
/** Rows of the timeline, in the order in which a token passes them. */
const LANE_COLOURS = 4;
const SHOWN_STEPS = 2, WIDE = 900; // typical steps that are shown until somebody zooms, in as many pixels
let domains = 1; // lane i of the timeline is one of domain i modulo their number
let layers = 0; // of the model
let shown = null; // the measurement that is drawn, which stays while it is frozen
let range = null; // [from, to] in µs of the window; null: some typical steps

function laneName(lane) {
  if (lane < 0) return "other messages";
  return domains > 1 ? `domain ${lane % domains}, lane ${Math.floor(lane / domains)}` : "lane " + lane;
}

/** The layer of each stage, as short text and in words: passes of prediction modules follow the model's layers. */
function layerNames(timeline) {
  const whole = new Set(timeline.filter(([stage]) => stage === "ffn").map(([, lane, layer, step]) => [lane, step, layer].join()));
  const ffnSeen = whole.size > 0;
  return (stage, lane, layer, step) => {
    if (stage === "step") return [String(step), "step " + step];
    if (!layers || layer < layers) return [String(layer), "layer " + layer];
    if (stage === "attend" && (!ffnSeen || !whole.has([lane, step, layer].join()))) return ["H", "head and sampling"];
    return ["D" + (layer - layers + 1), "drafts, pass " + (layer - layers + 1)];
  };
}

/** Some typical steps: twice a step's median length, less on a phone, where most stages are. One that took far longer, because the
    process was preempted, is then seen and does not set the scale. */
function typicalRange(bars, whole) {
  const steps = new Map();
  for (const [, lane, , step, start, end] of bars) {
    if (lane < 0) continue;
    const [from, to] = steps.get(lane + "/" + step) ?? [Infinity, -Infinity];
    steps.set(lane + "/" + step, [Math.min(from, start), Math.max(to, end)]);
  }
  const lengths = [...steps.values()].map(([from, to]) => to - from).sort((a, b) => a - b);
  const steady = SHOWN_STEPS * Math.min(1, $("timeline").clientWidth / WIDE);
  const length = Math.min(whole, steady * (lengths[Math.floor(lengths.length / 2)] || whole));
  const inside = (from) => bars.filter((bar) => bar[4] >= from && bar[5] <= from + length).length;
  const starts = [0, ...[...steps.values()].map(([from]) => from)].map((from) => Math.max(0, Math.min(from, whole - length)));
  const best = starts.sort((a, b) => a - b).reduce((one, other) => (inside(other) > inside(one) ? other : one));
  return [best, best + length];
}

/** Rows of resources: what runs on each side and crosses each direction of the link, named by layer, coloured by lane. */
function drawTimeline() {
  if (!shown) return;
  const svg = $("timeline"), width = svg.clientWidth, bars = shown.timeline;
  if (!width) return;
  const micros = Math.max(1, 1e6 * shown.window_seconds);
  const [from, to] = range ?? typicalRange(bars, micros);
  const rows = Object.keys(STAGES).filter((stage) => bars.some((bar) => bar[0] === stage));
  const left = 104, right = width - 8, height = 24, gap = 6, bottom = rows.length * (height + gap);
  const scale = (right - left) / (to - from), named = layerNames(bars), parts = [];
  rows.forEach((stage, row) => {
    const y = row * (height + gap);
    const busy = shown.busy?.[stage];
    parts.push(shape("text", { x: 0, y: y + height / 2 + 4 }, STAGES[stage] + (busy === undefined ? "" : " " + percent(busy))));
    parts.push(shape("rect", { class: "track", x: left, y, width: right - left, height }));
  });
  const tick = roundTick((to - from) / Math.max(2, width / 110));
  for (let at = tick * Math.ceil(from / tick); at <= to; at += tick) {
    const x = left + (at - from) * scale;
    parts.push(shape("line", { class: "grid", x1: x, x2: x, y1: 0, y2: bottom }));
    if (x < width - 48) parts.push(shape("text", { x: x + 2, y: bottom + 10 }, at === 0 ? "0" : duration(at / 1e6)));
  }
  for (const [stage, lane, layer, step, start, end, fill] of bars) {
    if (end < from || start > to) continue;
    const [short, words] = named(stage, lane, layer, step), y = rows.indexOf(stage) * (height + gap);
    const x = left + (Math.max(from, start) - from) * scale, wide = (Math.min(to, end) - from) * scale + left - x;
    const box = shape("g", { class: lane < 0 ? "other" : "lane" + (lane % LANE_COLOURS) });
    // A pass of an ffn worker is as high as it is full.
    const [messages, places, late] = fill ?? [1, 1, 0], high = (height - 4) * Math.min(1, messages / places);
    const work = fill ? `, ${messages} of ${places} messages, ${late} left behind` : "";
    const took = end > start ? duration((end - start) / 1e6) : "too short to be told";
    box.append(
      shape("title", {}, `${STAGES[stage]}, ${words}, ${laneName(lane)}, step ${step}${work}: ${took}`),
      shape("rect", { x, y: y + height - 2 - high, width: Math.max(0.75, wide - 0.5), height: high }),
    );
    if (wide > 7 * short.length + 4 && lane >= 0) box.append(shape("text", { class: "layer", x: x + wide / 2, y: y + height / 2 + 4 }, short));
    parts.push(box);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${bottom + 14}`);
  svg.setAttribute("height", bottom + 14);
  svg.replaceChildren(...parts);
  $("shown").textContent = `${duration((to - from) / 1e6)} of ${duration(micros / 1e6)}`;
  showKey(bars, rows);
}

/** The legend: colours and numbers, in words. */
function showKey(bars, rows) {
  const lanes = [...new Set(bars.map((bar) => bar[1]))].sort((a, b) => a - b);
  const marks = lanes.map((lane) => {
    const mark = shape("svg", { viewBox: "0 0 10 10", "aria-hidden": "true", class: lane < 0 ? "other" : "lane" + (lane % LANE_COLOURS) });
    mark.append(shape("rect", { width: 10, height: 10, rx: 2 }));
    return element("span", {}, mark, laneName(lane));
  });
  const words = [rows[0] === "step" ? "Numbers are steps." : "Numbers are layers; H: head and sampling. Percentages: the part of the time in which a row is busy; its gaps are waiting."];
  const untold = bars.filter(([, , , , start, end]) => end <= start).length / bars.length;
  if (untold > 0) words.push(`${percent(untold)} of the stages were not seen to end after their input: they are drawn as lines.`);
  if (shown.timeline_cut) words.push("Shown are the first stages of the window.");
  $("lanes").replaceChildren(...marks, element("span", {}, words.join(" ")));
}

function roundTick(atLeast) {
  const power = 10 ** Math.floor(Math.log10(atLeast));
  return [1, 2, 5, 10].find((factor) => factor * power >= atLeast) * power;
}

/** Shows `factor` times as much time around a place (0 left, 1 right), moved by a share of it. */
function zoom(factor, place = 0.5, move = 0) {
  if (!shown) return;
  const whole = 1e6 * shown.window_seconds, [from, to] = range ?? typicalRange(shown.timeline, whole);
  const length = Math.min(whole, Math.max(20, factor * (to - from)));
  const begin = from + place * (to - from - length) + move * length;
  const start = Math.max(0, Math.min(begin, whole - length));
  range = [start, start + length];
  drawTimeline();
}

/** The buttons and keys above the timeline, the wheel with Ctrl, and dragging. */
function listenToTimeline() {
  const svg = $("timeline"), moves = { in: [0.5], out: [2], left: [1, 0.5, -0.4], right: [1, 0.5, 0.4] };
  for (const [name, move] of Object.entries(moves)) $("zoom-" + name).addEventListener("click", () => zoom(...move));
  $("zoom-fit").addEventListener("click", () => {
    range = range && range[0] === 0 && range[1] >= 1e6 * shown?.window_seconds ? null : [0, 1e6 * (shown?.window_seconds ?? 1)];
    drawTimeline();
  });
  svg.addEventListener("keydown", (event) => {
    const move = { "+": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right" }[event.key];
    if (!move) return;
    event.preventDefault();
    zoom(...moves[move]);
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / svg.clientWidth);
  }, { passive: false });
  svg.addEventListener("pointermove", (event) => {
    if (event.buttons === 1 && event.movementX) zoom(1, 0.5, -event.movementX / svg.clientWidth);
  });
  addEventListener("resize", drawTimeline);
}

// ---------------------------------------------------------------------------------- export

function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** The measured steps as JSON, every stage by its names. */
function timelineJson(now) {
  const { timeline, ...figures } = now.measured;
  const stages = timeline.map(([stage, lane, layer, step, start_us, end_us, fill]) => ({ stage, lane, layer, step, start_us, end_us, ...(fill && { messages: fill[0], places: fill[1], left_behind: fill[2] }) }));
  const { model, mode, lanes, domains: parts, attention, ffn, layers: depth } = now;
  return JSON.stringify({ model, mode, attention, ffn, lanes, domains: parts, layers: depth, ...figures, timeline: stages }, null, 1);
}

/** The picture as a file of its own: the colours that the style gives are written into it. */
function timelineSvg() {
  const source = $("timeline"), copy = source.cloneNode(true);
  const styled = [...source.querySelectorAll("rect, line, text")];
  [...copy.querySelectorAll("rect, line, text")].forEach((one, n) => {
    const style = getComputedStyle(styled[n]);
    one.removeAttribute("class");
    one.setAttribute("fill", style.fill);
    if (one.tagName === "line") one.setAttribute("stroke", style.stroke);
    if (one.tagName === "text") {
      one.setAttribute("font-size", style.fontSize);
      one.setAttribute("font-family", "sans-serif");
      one.setAttribute("text-anchor", style.textAnchor);
    }
  });
  const paper = shape("rect", { width: "100%", height: "100%", fill: getComputedStyle(document.querySelector("section")).backgroundColor });
  copy.prepend(paper);
  copy.setAttribute("width", source.clientWidth);
  return new XMLSerializer().serializeToString(copy);
}

function save(form) {
  if (!shown) return;
  const name = "timeline-" + new Date(1e3 * shown.at).toISOString().replace(/[:.]/g, "-");
  if (form === "svg") download(name + ".svg", "image/svg+xml", timelineSvg());
  else download(name + ".json", "application/json", timelineJson({ ...last, measured: shown }));
}
