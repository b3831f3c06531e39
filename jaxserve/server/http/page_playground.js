// ------------------------------------------------------------------------------- playground

let mode = "completion";
let running = null; // the AbortController of the request under way
let written = null; // where the answer's text is written
let turn = null; // of the conversation, which the answer fills
const drafts = { completion: null, chat: "" }; // what was typed where the visitor is not

function choose(next) {
  if (next !== mode) {
    drafts[mode] = $("prompt").value;
    $("prompt").value = drafts[next];
  }
  mode = next;
  for (const name of ["completion", "chat"]) {
    $("tab-" + name).setAttribute("aria-selected", String(name === next));
    $("tab-" + name).tabIndex = name === next ? 0 : -1;
  }
  $("playing").classList.toggle("chat", next === "chat");
  for (const name of ["clear", "markdown-part", "instructions"]) $(name).hidden = next !== "chat";
  $("copy").hidden = next === "chat";
  if (next === "chat" && matchMedia("(max-width: 520px)").matches) $("sampling").open = false;
  fail(null);
  startOver();
}

function startOver() {
  stop();
  hideTip();
  $("output").replaceChildren();
  $("progress").textContent = "";
  if (mode === "chat") showTurns();
  else labelMessage();
}

function fail(error, param) {
  for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  $("error").hidden = error === null;
  $("error").textContent = error ?? "";
  if (!param) return;
  const name = param.split(/[.[]/)[0];
  const field = $("form").elements.namedItem(name) ?? (/^(prompt|messages)$/.test(name) ? $("prompt") : null);
  field?.setAttribute("aria-invalid", "true");
}

/** What the form asks for. A value that is no number goes out as it is: the server says what it thinks. */
function wish() {
  const body = { stream: $("stream").checked };
  for (const field of $("form").querySelectorAll("input[name]")) {
    const text = field.value;
    if (text.trim() === "") continue;
    if (field.name === "stop") body.stop = text.replaceAll("\\n", "\n");
    else body[field.name] = Number.isFinite(Number(text)) ? Number(text) : text;
  }
  if (body.stream) body.stream_options = { include_usage: true };
  const probabilities = $("probabilities").checked;
  if (mode === "completion") {
    body.prompt = $("prompt").value;
    if (probabilities) body.logprobs = 5;
  } else {
    Object.assign(body, conversation());
    if (probabilities) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  }
  return body;
}

async function run() {
  if (running) return;
  const asked = mode, before = turns, message = nextMessage();
  if (asked === "chat" && pendingCalls().length > 1) { // results of further calls are still to come
    turns.push(message);
    $("prompt").value = "";
    keep();
    showTurns();
    return;
  }
  let body;
  try {
    body = wish();
  } catch (error) {
    fail(error.message, error.param);
    return;
  }
  running = new AbortController();
  const signal = running.signal;
  $("run").disabled = true;
  $("stop").disabled = false;
  fail(null);
  begin(asked);
  const answer = { content: "", reasoning: "", calls: [], painted: 0, tokens: 0, start: performance.now(), first: null, reason: null };
  $("progress").textContent = "waiting for the first token";
  try {
    const path = asked === "chat" ? "/v1/chat/completions" : "/v1/completions";
    const response = await fetch(path, {
      method: "POST", signal, body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", ...headers() },
    });
    if (!response.ok) throw await refusal(response);
    if (body.stream) {
      for await (const event of events(response)) take(event, answer);
    } else take(await response.json(), answer);
    finish(answer, answer.reason ?? "ended");
  } catch (error) {
    if (signal.aborted) finish(answer, "stopped");
    else {
      fail(error.message, error.param);
      finish(answer, "failed");
    }
  }
  if (asked === "chat") endTurn(before, message, answer);
  if (running?.signal === signal) running = null;
  $("run").disabled = running !== null;
  $("stop").disabled = running === null;
}

function stop() {
  running?.abort();
  running = null;
  $("run").disabled = false;
  $("stop").disabled = true;
}

function begin(asked) {
  hideTip();
  if (asked === "completion") {
    $("output").replaceChildren();
    turn = null;
    written = $("output");
    return;
  }
  const message = nextMessage(), asks = addTurn(message.role);
  asks.say(message.content);
  turn = addTurn("assistant");
  written = turn.tokens;
  $("output").scrollTop = $("output").scrollHeight;
}

/** An answer, or as much of it as came, joins the conversation; one of which nothing came leaves. */
function endTurn(conversation, message, answer) {
  const { content, reasoning, calls } = answer;
  if (content || reasoning || calls.length || answer.reason) {
    const said = { role: "assistant", content };
    if (reasoning) said.reasoning = reasoning;
    if (calls.length) said.tool_calls = calls;
    conversation.push(message, said);
    turn.say(content);
    if (conversation === turns) keep();
    if (mode === "chat") $("prompt").value = "";
  } else {
    turn.root.previousSibling?.remove();
    turn.root.remove();
  }
  if (mode === "chat") labelMessage();
}

/** An answer that is an error, as something to throw. */
async function refusal(response) {
  let found = {};
  try {
    found = (await response.json()).error ?? {};
  } catch {
    // not ours
  }
  const error = new Error(found.message ?? "the server answered " + response.status);
  error.param = found.param;
  if (response.status === 401) $("key").focus();
  return error;
}

/** The JSON objects of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw Object.assign(new Error(event.error.message), event.error);
      yield event;
    }
  }
}

/** Shows an answer, or what is new of one. */
function take(event, answer) {
  if (event.usage) answer.tokens = event.usage.completion_tokens;
  const choice = event.choices[0];
  if (!choice) return;
  const atEnd = $("output").scrollHeight - $("output").scrollTop - $("output").clientHeight < 40;
  const part = choice.delta ?? choice.message ?? { content: choice.text };
  const found = places(choice.logprobs);
  if (answer.first === null && (part.content || part.reasoning_content || found.length)) answer.first = performance.now();
  if (part.reasoning_content) showReasoning(turn, (answer.reasoning += part.reasoning_content));
  if (part.tool_calls) {
    addCalls(answer.calls, part.tool_calls);
    showCalls(turn, answer.calls);
  }
  if (found.length && !part.reasoning_content && !part.tool_calls) found.forEach(writeToken);
  else if (part.content && !found.length) written.append(part.content);
  answer.content += part.content ?? "";
  if (turn && performance.now() - answer.painted > 100) {
    turn.text.replaceChildren(...markdown(answer.content));
    answer.painted = performance.now();
  }
  if (!event.usage) answer.tokens += found.length || (part.content ? 1 : 0);
  answer.reason = choice.finish_reason ?? answer.reason;
  $("progress").textContent = speed(answer);
  if (atEnd) $("output").scrollTop = $("output").scrollHeight;
}

/** Log-probabilities in either form as [{text, logprob, top: [[text, logprob], …]}]. */
function places(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((one) => ({
      text: one.token, logprob: one.logprob, top: one.top_logprobs.map((rival) => [rival.token, rival.logprob]),
    }));
  }
  return logprobs.tokens.map((text, n) => ({
    text, logprob: logprobs.token_logprobs[n], top: Object.entries(logprobs.top_logprobs[n] ?? {}),
  }));
}

let bytes = []; // of a character that needs several tokens

function writeToken(place) {
  let text = place.text;
  if (text.startsWith("bytes:")) {
    bytes.push(...[...text.matchAll(/\\x(..)/g)].map((match) => parseInt(match[1], 16)));
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(bytes));
    } catch {
      if (bytes.length < 4) return;
      text = "\ufffd";
    }
  }
  bytes = [];
  const chance = Math.exp(place.logprob);
  const token = element("span", { class: "token" + (chance < 0.1 ? " p0" : chance < 0.5 ? " p1" : "") }, text);
  token.place = place;
  written.append(token);
}

function speed(answer) {
  const now = performance.now(), words = [answer.tokens + (answer.tokens === 1 ? " token" : " tokens")];
  if (answer.first !== null && $("stream").checked) {
    words.push("first after " + duration((answer.first - answer.start) / 1e3));
    const seconds = (now - answer.first) / 1e3;
    if (answer.tokens > 1 && seconds > 0) words.push(((answer.tokens - 1) / seconds).toFixed(1) + " tokens/s");
  }
  return words.join(" · ");
}

function finish(answer, reason) {
  $("progress").textContent = speed(answer) + " · " + reason;
}
