// ------------------------------------------------------------------------------- live view

const KEPT = 120; // answers that the curves show, a second each
const SPAN_SECONDS = 15; // quantiles and rates are those of as many seconds
const MOST_REQUESTS = 20, ID_CHARACTERS = 10;
let last = null; // the answer before
let answers = []; // the last ones, oldest first
let active = 0; // when something last ran, as far as this page has seen; seconds of the epoch
let layerShown = null;

async function look() {
  const response = await fetch("/pipeline", { headers: headers() }).catch(() => {
    throw new Error("the server does not answer");
  });
  if (!response.ok) throw await describe(response);
  show(await response.json());
}

async function describe(response) {
  try {
    return new Error((await response.json()).error.message);
  } catch {
    return new Error("the server answered " + response.status);
  }
}

async function watch() {
  if ($("watch").checked && !document.hidden) {
    try {
      await look();
    } catch (error) {
      note(error.message, "gone");
      last = null;
      answers = [];
    }
  }
  setTimeout(watch, 1000);
}

function note(text, state) {
  $("live-note").textContent = state === "gone" ? text : "";
  $("status").textContent = state === "gone" ? "no figures" : text;
  $("state").querySelector(".dot").className = "dot " + state;
}

function show(now) {
  note(now.status, now.status === "ready" ? "ready" : "");
  domains = now.domains;
  layers = now.layers;
  const layout = now.mode === "afd" ? `attention ${now.attention} · ffn ${now.ffn}` : now.attention;
  $("about").textContent = `${now.model} · ${now.mode} · ${layout} · ${now.lanes} lane${now.lanes === 1 ? "" : "s"}${domains > 1 ? ` in each of ${domains} domains` : ""} · ${now.max_length} tokens`;
  $("no-chat").hidden = now.chat;
  $("tab-chat").disabled = !now.chat;
  answers = [...answers, now].slice(-KEPT);
  if (now.load.running || (last && now.generated_tokens > last.generated_tokens)) active = now.time;
  last = now;
  showFigures(now);
  showVerdict(now);
  showRequests(now.requests);
  showWorkers(now);
  showDrafts(now.load.drafts);
  showPages(now.load);
  $("domains-part").hidden = domains < 2;
  if (domains > 1) meters($("domains"), now.load.domains.map((load, domain) => {
    const attends = (now.measured?.timeline ?? []).filter(([stage, lane]) => stage === "attend" && lane % domains === domain);
    const micros = attends.reduce((sum, [, , , , start, end]) => sum + Math.max(0, end - Math.max(0, start)), 0);
    return [`${domain}: ${load.running} running, ${load.waiting} waiting`, Math.min(1, micros / (1e6 * now.measured?.window_seconds || 1))];
  }));
  showExperts(now.experts);
  showRanks(now.experts);
  for (const form of ["json", "svg"]) $("save-" + form).disabled = !(shown ?? now.measured);
  if (now.measured) showMeasured(now);
  else $("window").textContent = "no step measured yet: run something";
}

// ------------------------------------------------------------------------------- figures

/** The answer of about `SPAN_SECONDS` before the n-th one. */
function before(n) {
  return answers.findLast((one, place) => place < n && one.time <= answers[n].time - SPAN_SECONDS) ?? answers[0];
}

const whole = (value) => (value === null ? "–" : value.toFixed(value < 9.95 && value > 0 ? 1 : 0));

const total = (counts) => Object.values(counts).reduce((sum, some) => sum + some, 0);

/** Seconds within which a share of the latest events took place, from two counts of a histogram; null: no events. */
function quantile(name, share, n) {
  const [bounds, counts] = answers[n].latencies[name], [, old] = before(n).latencies[name];
  const fresh = counts.map((count, bucket) => count - (old[bucket] ?? 0));
  let left = share * total(fresh);
  if (!left) return null;
  const bucket = fresh.findIndex((count) => (left -= count) <= 0);
  if (bucket >= bounds.length) return bounds.at(-1);
  const low = bucket ? bounds[bucket - 1] : 0;
  return low + (bounds[bucket] - low) * (1 + left / fresh[bucket]);
}

/** What an answer's counter gained in a second. */
function rate(count, n) {
  const old = before(n), seconds = answers[n].time - old.time;
  return seconds > 0 ? Math.max(0, (count(answers[n]) - count(old)) / seconds) : null;
}

function showFigures(now) {
  const end = answers.length - 1, curve = (value) => answers.map((_, n) => value(n));
  const seconds = (value) => value === null ? "–" : duration(value);
  const tokens = (n) => rate((one) => one.generated_tokens, n);
  $("running").textContent = now.load.running;
  $("waiting").textContent = now.load.waiting;
  $("rate").textContent = whole(tokens(end));
  $("refused").textContent = total(now.refused);
  $("failed").textContent = now.ended.error ?? 0;
  $("refused").title = Object.entries(now.refused).map(([reason, count]) => `${reason}: ${count}`).join("\n") || "none since the start";
  for (const place of ["refused", "failed"]) $(place).classList.toggle("bad", $(place).textContent !== "0");
  spark($("rate-curve"), [curve(tokens)]);
  for (const name of ["first", "between"]) {
    const [half, most] = [0.5, 0.99].map((share) => curve((n) => quantile(name, share, n)));
    $(name).replaceChildren(seconds(half[end]), element("small", {}, " p50 · "), seconds(most[end]), element("small", {}, " p99"));
    spark($(name + "-curve"), [half, most]);
  }
}

/** Curves over the last answers, from 0 to their largest value; a gap where there is none. */
function spark(svg, curves) {
  const width = 100, height = 22, most = Math.max(...curves.flat().map((value) => value ?? 0)) || 1;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...curves.map((values, number) => {
    let path = "", pen = "M";
    values.forEach((value, n) => {
      if (value === null) return (pen = "M");
      path += `${pen}${(width - (values.length - 1 - n) * (width / (KEPT - 1))).toFixed(1)} ${(height - 1 - (height - 2) * (value / most)).toFixed(1)}`;
      pen = "L";
    });
    return shape("path", { class: number ? "curve upper" : "curve", d: path });
  }));
}

/** In words: what is wrong, what waits, and which side is the longer one. */
function showVerdict(now) {
  const { load, measured } = now, words = [...load.problems];
  const wrong = words.length > 0 || now.status !== "ready";
  if (load.waiting) words.push(`${load.waiting} requests wait: ${load.running >= load.slots && load.slots ? `all ${load.slots} slots are taken` : "for their turn"}`);
  if (!load.running && !load.waiting) words.push("Idle: no request runs");
  else if (measured && Object.keys(measured.busy).length) words.push(longerSide(measured.busy, measured.bubble));
  else words.push("No step is measured yet");
  $("verdict").textContent = words.join(". ") + ".";
  $("verdict").classList.toggle("wrong", wrong);
}

/** Which side decides how long a step takes, by the share of time in which each is busy. */
function longerSide(busy, bubble) {
  const { step, attend, ffn } = busy, waits = (name, share) => `${name} waits ${percent(1 - share)}`;
  if (step !== undefined) return step > 0.8 ? `Steps run ${percent(step)} of the time: the devices are the limit` : `The devices wait ${percent(1 - step)}: the host is the limit, or few requests run`;
  if (ffn === undefined || attend === undefined) return waits(attend === undefined ? "ffn" : "attention", attend ?? ffn) + ": the other side is not measured";
  const [longer, shorter] = attend >= ffn ? ["attention", "ffn"] : ["ffn", "attention"];
  const most = Math.max(attend, ffn), least = Math.min(attend, ffn);
  if (most < 0.6) return `${waits(longer, most)} and ${waits(shorter, least)}: messages or the host take longer than either side, or few requests run`;
  if (most - least < 0.1) return `${waits("attention", attend)} and ${waits("ffn", ffn)}: the sides are balanced`;
  return `${waits(shorter, least)}: ${longer} is the longer side`;
}

function ago(seconds) {
  if (seconds < 90) return Math.round(seconds) + " s";
  if (seconds < 5400) return Math.round(seconds / 60) + " min";
  return seconds < 129_600 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86_400) + " days";
}

/** What is measured stays until the next steps are, so it says how old it is. */
function showMeasured(now) {
  const measured = now.measured, idle = now.load.running === 0;
  const age = now.time - (idle ? Math.max(measured.at, active) : measured.at), old = idle ? age >= 3 : age >= 30;
  const when = !old ? "now" : idle ? "no steps for " + ago(age) : `measured ${ago(age)} ago`;
  $("measured").classList.toggle("stale", old);
  for (const name of ["bubble", "transfer"]) $(name).classList.toggle("stale", old);
  $("live-note").textContent = measured.missing ? "incomplete: " + measured.missing : "";
  $("bubble").textContent = measured.bubble === null ? "–" : percent(measured.bubble);
  let count = 0, seconds = 0;
  for (const [messages, time] of Object.values(measured.transfers)) {
    count += messages;
    seconds += time;
  }
  $("transfer").textContent = count ? duration(seconds / count) : "–";
  if ($("freeze").checked && shown) {
    $("window").textContent = `frozen, ${ago(now.time - shown.at)} old`;
    return;
  }
  $("window").textContent = `${measured.steps} step${measured.steps === 1 ? "" : "s"} in ${duration(measured.window_seconds)}, ${when}`;
  if (shown?.at === measured.at) return;
  if (shown?.window_seconds !== measured.window_seconds) range = null;
  shown = measured;
  drawTimeline();
}

// ---------------------------------------------------------------- requests, workers, pages

/** Fills a table: a cell has the name of its column, which a phone shows instead of the head. */
function fillTable(table, rows) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  table.tBodies[0].replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((cell, column) =>
    element("td", { "data-name": names[column] }, cell instanceof Node ? cell : String(cell))))));
}

function showRequests(requests) {
  $("requests-note").textContent = requests.length > MOST_REQUESTS ? `the oldest ${MOST_REQUESTS} of ${requests.length}` : requests.length ? "" : "none";
  $("requests").hidden = !requests.length;
  fillTable($("requests"), requests.slice(0, MOST_REQUESTS).map((one) =>
    [element("span", { title: one.id }, one.id.slice(0, ID_CHARACTERS)), one.state, ago(one.age), one.prompt_tokens, one.tokens, one.where || "here"]));
}

/** The workers of a fleet, role by role, and the ffn workers that its domains use. */
function showWorkers(now) {
  const { load, ffn_workers: ffn } = now, old = before(answers.length - 1);
  $("fleet-part").hidden = !load.workers.length && !ffn.length;
  $("fleet-note").textContent = load.workers.length ? `${load.prompts} prompts to compute, ${load.held} held, ${load.replays} requests begun again elsewhere` : "";
  const rows = [...load.workers].sort((a, b) => (a.role > b.role ? -1 : a.role < b.role ? 1 : 0)).map((worker) => {
    const state = element("span", worker.status === "ready" ? {} : { class: "bad" }, worker.status + (worker.why ? `: ${worker.why}` : ""));
    const role = worker.role === "domain" && ffn.length ? "attention" : worker.role;
    return [role, worker.name, state, worker.running, worker.waiting, worker.status === "absent" ? "–" : meter(pagesOf(worker)), workOf(worker)];
  });
  for (const worker of ffn) {
    const then = old.ffn_workers.find((one) => one.name === worker.name) ?? worker, passes = worker.passes - then.passes;
    const busy = now.measured?.busy.ffn, work = passes > 0
      ? `${whole((worker.rows - then.rows) / passes)} rows of ${((worker.messages - then.messages) / passes).toFixed(1)} of ${((worker.places - then.places) / passes).toFixed(1)} messages a pass, ${worker.left_behind - then.left_behind} left behind, arrivals ± ${(1000 * worker.misjudged).toFixed(1)} ms, ${whole(passes / (now.time - old.time))} passes/s${busy === undefined ? "" : `, ${percent(busy)} busy`}`
      : `${worker.passes} passes`;
    rows.push(["ffn", worker.name, "ready", "–", "–", "–", work]);
  }
  fillTable($("fleet"), rows);
}

/** The mean share of its pages that a worker's groups use. */
function pagesOf(worker) {
  return worker.kv_usage.reduce((sum, share) => sum + share, 0) / (worker.kv_usage.length || 1);
}

/** What a worker does beside running requests: prompts that it holds, and its end of the pages link. */
function workOf(worker) {
  const link = worker.hand_offs, parts = [];
  if (worker.role === "prefill") parts.push(`${worker.held} held, ${worker.pages_tokens} tokens handed over`);
  if (link) {
    const wait = worker.role === "domain" && link.transfers ? `, ${(1000 * link.wait_seconds / link.transfers).toFixed(0)} ms each` : "";
    parts.push(`${(link.bytes / 1e6).toFixed(1)} MB in ${link.transfers} transfers${wait}`);
    if (link.queued) parts.push(`${link.queued} queued`);
    if (link.failures) parts.push(`${link.failures} failed`);
  }
  return parts.join("; ");
}

/** KV pages by worker or domain, and DP group. */
function showPages(load) {
  const owners = load.workers.length
    ? load.workers.filter((worker) => worker.role === "domain" && worker.kv_usage.length).map((worker) => [worker.name, worker.kv_usage])
    : load.domains.length > 1 ? load.domains.map((domain, n) => ["domain " + n, domain.kv_usage]) : [["", load.kv_usage]];
  meters($("kv"), owners.flatMap(([name, groups]) => groups.map((share, group) =>
    [[name, groups.length > 1 || !name ? "group " + group : ""].filter(Boolean).join(", "), share])));
}

function meter(share) {
  const made = element("b", { class: "meter", title: percent(share) }, element("i"));
  made.firstChild.style.width = 100 * share + "%";
  return made;
}

/** Of the model's own drafts: what a step gives a sequence, and how often the draft in each place holds. */
function showDrafts(drafts) {
  $("drafts-part").hidden = !drafts?.runs;
  if (!drafts?.runs) return;
  const held = drafts.accepted.reduce((sum, some) => sum + some, 0);
  $("drafts-note").textContent = `${(1 + held / drafts.runs).toFixed(2)} tokens a step and sequence, since the start`;
  meters($("drafts"), drafts.accepted.map((some, place) => [`draft ${place + 1} held`, some / drafts.runs]));
}

/** Rows of a name, a meter and a percentage; made once and then only filled. */
function meters(place, rows) {
  if (place.children.length !== 3 * rows.length) {
    place.replaceChildren(...rows.flatMap(() => [
      element("span", { class: "small" }), element("b", { class: "meter" }, element("i")),
      element("span", { class: "small number" }),
    ]));
  }
  rows.forEach(([name, share], row) => {
    const [label, meter, number] = [0, 1, 2].map((column) => place.children[3 * row + column]);
    label.textContent = name;
    meter.firstChild.style.width = 100 * share + "%";
    number.textContent = percent(share);
  });
}

/** Heat of every layer and rank over the layer's mean: before the last rebalance, and now. */
function showRanks(experts) {
  const now = experts?.loads ?? {}, before = experts?.loads_before ?? {}, layers = Object.keys(now);
  const ranks = layers.length ? now[layers[0]].length : 0;
  $("ranks-part").hidden = ranks < 2;
  if (ranks < 2) return;
  $("ranks-note").textContent = [
    experts.balance === null ? "no tokens" : `mean ÷ max ${experts.balance.toFixed(2)}`,
    `${experts.moves} moves`, experts.moving ? `${experts.moving} rounds to come` : "",
  ].filter(Boolean).join(", ");
  const halves = Object.keys(before).length ? [["before", before], ["now", now]] : [["now", now]];
  const width = $("ranks").clientWidth, half = width / halves.length, left = 28, row = 10;
  const each = (half - left - 10) / ranks, parts = [];
  halves.forEach(([name, loads], column) => {
    const x = column * half;
    parts.push(shape("text", { x: x + left, y: 10 }, name));
    layers.forEach((layer, index) => {
      const tokens = loads[layer] ?? [], y = 16 + index * row;
      const mean = tokens.reduce((sum, some) => sum + some, 0) / Math.max(1, tokens.length);
      parts.push(shape("text", { x, y: y + row - 2 }, layer));
      tokens.forEach((some, rank) => {
        const heat = mean ? Math.min(1, some / mean / 2) : 0;
        const box = shape("rect", {
          class: "expert", x: x + left + rank * each, y, width: Math.max(0.6, each - 1),
          height: row - 1, "fill-opacity": (0.08 + 0.92 * heat).toFixed(2),
        });
        box.append(shape("title", {}, `layer ${layer}, rank ${rank}, ${name}: ${some} tokens`));
        parts.push(box);
      });
    });
  });
  const height = 18 + layers.length * row;
  $("ranks").setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("ranks").setAttribute("height", height);
  $("ranks").replaceChildren(...parts);
}

function showExperts(experts) {
  const byLayer = experts?.expert_tokens ?? {}, imbalance = experts?.imbalance ?? null;
  $("imbalance").textContent = imbalance === null ? "–" : "× " + imbalance.toFixed(2);
  const layers = Object.keys(byLayer);
  $("experts-part").hidden = layers.length === 0;
  if (!layers.length) return;
  if (layers.length !== $("layer").options.length) {
    $("layer").replaceChildren(...layers.map((layer) => element("option", { value: layer }, layer)));
    $("layer").value = layerShown = layers.includes(layerShown) ? layerShown : layers[0];
  }
  layerShown = $("layer").value;
  const tokens = byLayer[layerShown], most = Math.max(1, ...tokens);
  const total = tokens.reduce((sum, some) => sum + some, 0), mean = total / tokens.length;
  $("layer-note").textContent = total ? `busiest × ${(most / mean).toFixed(2)} of the mean (dashed), ${total} routed` : "no tokens";
  const width = $("experts").clientWidth, height = 88, each = width / tokens.length, floor = height - 14;
  const parts = tokens.map((some, expert) => {
    const tall = (floor - 2) * (some / most);
    const box = shape("rect", {
      class: "expert" + (some === most ? " busiest" : ""), x: expert * each, y: floor - tall,
      width: Math.max(0.6, each - (each > 4 ? 1.5 : 0)), height: Math.max(tall, 0.5),
    });
    box.append(shape("title", {}, `expert ${expert}: ${some} tokens`));
    return box;
  });
  const y = floor - (floor - 2) * (mean / most);
  parts.push(shape("line", { class: "mean", x1: 0, x2: width, y1: y, y2: y }));
  const every = Math.ceil(tokens.length / Math.max(1, Math.floor(width / 40)));
  for (let expert = 0; expert < tokens.length; expert += every) {
    parts.push(shape("text", { x: expert * each, y: height - 2 }, expert));
  }
  $("experts").setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("experts").setAttribute("height", height);
  $("experts").replaceChildren(...parts);
}
