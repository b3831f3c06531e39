// -------------------------------------------------------------------------------- timeline

const STAGES = { step: "step", attend: "attention", dispatch: "dispatch ↓", combine: "combine ↑", ffn: "ffn" };
const KINDS = { step: "attention", attend: "attention", dispatch: "link", combine: "link", ffn: "ffn" };
let domains = 1; // lane i of the timeline is one of domain i modulo their number
let layers = 0; // of the model
let drawn = null; // what the timeline shows

const MEANINGS = {
  attention: "attention: norms, projections and attention over the KV cache, on the attention devices",
  ffn: "ffn: experts or dense ffn, on devices of their own",
  link: "link: a lane's rows on their way to the ffn (dispatch) or back (combine)",
  step: "step: all layers in one program, on all devices",
  bubble: "bubble: nothing runs on that side; the figure is the part of the time in which even the busier side waits",
};

function laneName(lane) {
  return domains > 1 ? `domain ${lane % domains}, lane ${Math.floor(lane / domains)}` : "lane " + lane;
}

/** Words for the layer of each stage: passes of prediction modules follow the model's layers. */
function layerNames(timeline) {
  const whole = new Set(timeline.filter(([stage]) => stage === "ffn").map(([, lane, layer, step]) => [lane, step, layer].join()));
  return (stage, lane, layer, step) => {
    if (!layers || layer < layers || stage === "step") return "layer " + layer;
    if (stage === "attend" && !whole.has([lane, step, layer].join())) return "head and sampling";
    return "drafts, pass " + (layer - layers + 1);
  };
}

/** The times in which any of these spans ran, as disjoint [start, end], by start. */
function union(spans) {
  const joined = [];
  for (const [start, end] of [...spans].sort((a, b) => a[0] - b[0])) {
    const before = joined.at(-1);
    if (before && start <= before[1]) before[1] = Math.max(before[1], end);
    else joined.push([start, end]);
  }
  return joined;
}

function drawTimeline(measured, width) {
  const bars = measured.timeline, lanes = [...new Set(bars.map((bar) => bar[1]))].sort((a, b) => a - b);
  const sides = bars.some(([stage]) => stage === "step") ? ["step"] : ["attend", "ffn"];
  const left = domains > 1 ? 112 : 74, right = width - 8, thin = 12, height = lanes.length > 8 ? 14 : 22, gap = 4;
  const top = sides.length * (thin + gap) + 4, bottom = top + lanes.length * (height + gap);
  const micros = Math.max(1, 1e6 * measured.window_seconds), scale = (right - left) / micros;
  const svg = $("timeline"), parts = [];
  const row = (name, y, tall) => {
    parts.push(shape("text", { x: 0, y: y + tall / 2 + 4 }, name));
    parts.push(shape("rect", { class: "track", x: left, y, width: right - left, height: tall }));
  };
  const bar = (kind, start, end, y, tall) => {
    const begin = Math.max(0, start), stop = Math.min(micros, end);
    return shape("rect", {
      class: kind, x: left + begin * scale, y, width: Math.max(0.75, (stop - begin) * scale - 0.4), height: tall,
    });
  };
  const inside = ([, , , , start, end]) => end >= 0 && start <= micros;
  sides.forEach((side, n) => {
    const y = n * (thin + gap);
    row(STAGES[side], y, thin);
    const ran = bars.filter((one) => one[0] === side && inside(one)).map((one) => [one[4], one[5]]);
    for (const [start, end] of union(ran)) parts.push(bar("side " + KINDS[side], start, end, y, thin));
  });
  lanes.forEach((lane, n) => row(laneName(lane), top + n * (height + gap), height));
  const tick = roundTick(micros / Math.max(2, width / 110));
  for (let at = 0; at <= micros; at += tick) {
    const x = left + at * scale;
    parts.push(shape("line", { class: "grid", x1: x, x2: x, y1: 0, y2: bottom }));
    if (x < width - 48) parts.push(shape("text", { x: x + 2, y: bottom + 12 }, at === 0 ? "0" : duration(at / 1e6)));
  }
  const named = layerNames(bars);
  for (const one of bars.filter(inside)) {
    const [stage, lane, layer, step, start, end] = one;
    const y = top + lanes.indexOf(lane) * (height + gap) + 2;
    const box = bar(KINDS[stage], start, end, y, height - 4);
    const took = end > start ? duration((end - start) / 1e6) : "too short to be told";
    box.append(shape("title", {}, `${STAGES[stage]}, ${named(stage, lane, layer, step)}, ${laneName(lane)}, step ${step}: ${took}`));
    parts.push(box);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${bottom + 20}`);
  svg.setAttribute("height", bottom + 20);
  svg.replaceChildren(...parts);
  showKey(sides[0] === "step" ? ["step", "bubble"] : ["attention", "ffn", "link", "bubble"], measured);
}

/** The legend: what the colours stand for, in words. */
function showKey(kinds, measured) {
  const key = kinds.map((kind) => {
    const mark = shape("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" });
    mark.append(shape("rect", { class: { step: "attention", bubble: "track" }[kind] ?? kind, width: 10, height: 10, rx: 2 }));
    return element("span", {}, mark, MEANINGS[kind]);
  });
  const untold = measured.timeline.filter(([, , , , start, end]) => end <= start).length / measured.timeline.length;
  if (untold > 0) key.push(element("span", {}, `${percent(untold)} of the stages were not seen to end after their input: they are drawn as lines.`));
  if (measured.timeline_cut) key.push(element("span", {}, "Shown are the first stages of the window."));
  $("lanes").replaceChildren(...key);
}

function roundTick(atLeast) {
  const power = 10 ** Math.floor(Math.log10(atLeast));
  return [1, 2, 5, 10].find((factor) => factor * power >= atLeast) * power;
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
  const stages = timeline.map(([stage, lane, layer, step, start_us, end_us]) => ({ stage, lane, layer, step, start_us, end_us }));
  const { model, mode, lanes, domains: parts, attention, ffn, layers: depth } = now;
  return JSON.stringify({ model, mode, attention, ffn, lanes, domains: parts, layers: depth, ...figures, timeline: stages }, null, 1);
}

/** The picture as a file of its own: the colours that the style gives are written into it. */
function timelineSvg() {
  const source = $("timeline"), copy = source.cloneNode(true);
  const shown = [...source.querySelectorAll("rect, line, text")];
  [...copy.querySelectorAll("rect, line, text")].forEach((one, n) => {
    const style = getComputedStyle(shown[n]);
    one.removeAttribute("class");
    one.setAttribute("fill", style.fill);
    if (one.tagName === "line") one.setAttribute("stroke", style.stroke);
    if (one.tagName === "text") {
      one.setAttribute("font-size", style.fontSize);
      one.setAttribute("font-family", "sans-serif");
    }
  });
  const paper = shape("rect", { width: "100%", height: "100%", fill: getComputedStyle(document.querySelector("section")).backgroundColor });
  copy.prepend(paper);
  copy.setAttribute("width", source.clientWidth);
  return new XMLSerializer().serializeToString(copy);
}

function save(form) {
  if (!last?.measured) return;
  const name = "timeline-" + new Date(1e3 * last.measured.at).toISOString().replace(/[:.]/g, "-");
  if (form === "svg") download(name + ".svg", "image/svg+xml", timelineSvg());
  else download(name + ".json", "application/json", timelineJson(last));
}
