// ------------------------------------------------------------------------------- live view

let last = null; // the answer before, for the rate
let active = 0; // when something last ran, as far as this page has seen; seconds of the epoch
let layerShown = null;

async function look() {
  const response = await fetch("/pipeline", { headers: headers() });
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
      note(error instanceof TypeError ? "the server does not answer" : error.message, "gone");
      last = null;
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
  $("running").textContent = now.load.running;
  $("waiting").textContent = now.load.waiting;
  if (last && now.time > last.time) {
    const rate = (now.generated_tokens - last.generated_tokens) / (now.time - last.time);
    $("rate").textContent = rate.toFixed(rate < 9.95 ? 1 : 0);
  }
  if (now.load.running || (last && now.generated_tokens > last.generated_tokens)) active = now.time;
  last = now;
  showFleet(now.load);
  showDrafts(now.load.drafts);
  const groups = now.load.kv_usage.length / domains;
  meters($("kv"), now.load.kv_usage.map((share, group) =>
    [(domains > 1 ? `domain ${Math.floor(group / groups)}, ` : "") + "group " + group % groups, share]));
  $("domains-part").hidden = domains < 2;
  if (domains > 1) meters($("domains"), now.load.domains.map((load, domain) => {
    const measured = now.measured ? now.measured.domains[domain] : null;
    return [`${domain}: ${load.running} running, ${load.waiting} waiting`, measured ? Math.min(1, measured[2].attend || 0) : 0];
  }));
  showExperts(now.experts);
  showRanks(now.experts);
  for (const form of ["json", "svg"]) $("save-" + form).disabled = !now.measured;
  if (now.measured) showMeasured(now);
  else {
    $("window").textContent = "no step measured yet: run something";
    $("live-note").textContent = "";
  }
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
  $("window").textContent = `${measured.steps} step${measured.steps === 1 ? "" : "s"} in ${duration(measured.window_seconds)}, ${when}`;
  $("sampled").textContent = when === "now" ? "" : when;
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
  const stages = Object.keys(STAGES).filter((stage) => stage in measured.busy);
  meters($("busy"), stages.map((stage) => [STAGES[stage], measured.busy[stage]]));
  const width = $("timeline").clientWidth;
  if (drawn !== measured.at + "/" + width) {
    drawn = measured.at + "/" + width;
    drawTimeline(measured, width);
  }
}

/** Of the model's own drafts: what a step gives a sequence, and how often the draft in each place holds. */
function showDrafts(drafts) {
  $("drafts-part").hidden = !drafts?.runs;
  if (!drafts?.runs) return;
  const held = drafts.accepted.reduce((sum, some) => sum + some, 0);
  $("drafts-note").textContent = `${(1 + held / drafts.runs).toFixed(2)} tokens a step and sequence, since the start`;
  meters($("drafts"), drafts.accepted.map((some, place) => [`draft ${place + 1} held`, some / drafts.runs]));
}

/** The workers of a fleet, role by role: first all of a role together, then each. */
function showFleet(load) {
  $("fleet-part").hidden = !load.workers.length;
  $("fleet-note").textContent = `${load.prompts} prompts to compute, ${load.held} held, ${load.replays} requests begun again elsewhere`;
  const roles = [...new Set(load.workers.map((worker) => worker.role))].sort();
  meters($("fleet"), roles.flatMap((role) => {
    const workers = load.workers.filter((worker) => worker.role === role);
    const all = (count) => workers.reduce((sum, worker) => sum + count(worker), 0);
    const ready = all((worker) => worker.status === "ready");
    const together = `${role}: ${ready} of ${workers.length} ready, ${all((w) => w.running)} running, ${all((w) => w.waiting)} waiting`;
    return [[together, all(pagesOf) / workers.length], ...workers.map((worker) => [`– ${describeWorker(worker)}`, pagesOf(worker)])];
  }));
}

/** The mean share of its pages that a worker's groups use. */
function pagesOf(worker) {
  return worker.kv_usage.reduce((sum, share) => sum + share, 0) / (worker.kv_usage.length || 1);
}

function describeWorker(worker) {
  const pages = worker.role === "prefill" ? `, ${worker.held} held, ${worker.pages_tokens} tokens handed over` : "";
  const why = worker.why ? ` (${worker.why})` : "";
  return `${worker.name}, ${worker.status}${why}: ${worker.running} running, ${worker.waiting} waiting${pages}${linkOf(worker)}`;
}

/** What a worker's end of the pages link has done; a domain's says how long a hand-off took. */
function linkOf(worker) {
  const link = worker.hand_offs;
  if (!link) return "";
  const wait = worker.role === "domain" && link.transfers ? `, ${(1000 * link.wait_seconds / link.transfers).toFixed(0)} ms each` : "";
  return `; pages: ${(link.bytes / 1e6).toFixed(1)} MB in ${link.transfers} transfers${wait}, ${link.queued} queued, ${link.failures} failed`;
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
