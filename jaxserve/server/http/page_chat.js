// ------------------------------------------------------------------------------------ chat

// The conversation is kept in the browser's storage, so that it outlives the page, until it is
// cleared: the system prompt, the tools and all turns. The API key is not.

const STORED = "jaxserve.conversation";
let turns = []; // of the conversation: {role, content} and {reasoning}, {tool_calls} or {tool_call_id}

/** Parts of a turn on the page; an answer fills them as it comes. */
function addTurn(role) {
  const reasoning = element("details", { class: "aside" }, element("summary", {}, "Reasoning"), element("pre"));
  reasoning.hidden = true;
  const turn = {
    tokens: element("div", { class: "tokens" }), text: element("div", { class: "markdown" }),
    reasoning, calls: element("div"),
  };
  const copy = element("button", { type: "button", class: "copy" }, "Copy");
  copy.addEventListener("click", () => copyText(turn.content ?? turn.tokens.textContent, copy));
  turn.say = (content) => {
    turn.content = content;
    if (turn.tokens.textContent === "") turn.tokens.textContent = content;
    if (role === "assistant") turn.text.replaceChildren(...markdown(content));
    else turn.text.textContent = content;
  };
  turn.root = element(
    "div", { class: "turn " + role }, element("div", { class: "head" }, element("b", {}, role), copy),
    turn.reasoning, element("div", { class: "body" }, turn.tokens, turn.text), turn.calls,
  );
  $("output").append(turn.root);
  return turn;
}

function showReasoning(turn, reasoning) {
  turn.reasoning.hidden = reasoning === "";
  turn.reasoning.lastChild.textContent = reasoning;
}

function showCalls(turn, calls) {
  while (turn.calls.children.length < calls.length) {
    turn.calls.append(element("details", { class: "aside" }, element("summary"), element("pre")));
  }
  calls.forEach((call, n) => {
    const [name, text] = turn.calls.children[n].children;
    name.textContent = "Call of " + call.function.name;
    text.textContent = call.function.arguments;
  });
}

/** Adds what came of tool calls: whole ones, or pieces of those that a stream goes on with. */
function addCalls(calls, pieces) {
  pieces.forEach((piece, n) => {
    const call = (calls[piece.index ?? n] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id = piece.id ?? call.id;
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
  });
}

function showTurns() {
  $("output").replaceChildren();
  for (const turn of turns) {
    const made = addTurn(turn.role);
    made.say(turn.content);
    showReasoning(made, turn.reasoning ?? "");
    showCalls(made, turn.tool_calls ?? []);
  }
  labelMessage();
}

/** The calls of the last answer that have no result yet: the next message is one's. */
function pendingCalls() {
  const at = turns.findLastIndex((turn) => turn.role === "assistant");
  return (turns[at]?.tool_calls ?? []).slice(turns.length - at - 1);
}

function labelMessage() {
  const [call] = mode === "chat" ? pendingCalls() : [];
  $("prompt-label").textContent = mode !== "chat" ? "Prompt" : call ? "Result of " + call.function.name : "Message";
}

function nextMessage() {
  const [call] = pendingCalls(), content = $("prompt").value;
  return call ? { role: "tool", tool_call_id: call.id, content } : { role: "user", content };
}

/** What a request says of the conversation. Raises where the tools are no JSON. */
function conversation() {
  const system = $("system").value.trim(), tools = $("tools").value.trim();
  const messages = [...turns, nextMessage()].map(({ reasoning, ...message }) => message);
  if (system) messages.unshift({ role: "system", content: system });
  if (!tools) return { messages };
  try {
    return { messages, tools: JSON.parse(tools) };
  } catch (error) {
    throw Object.assign(new Error("tools: " + error.message), { param: "tools" });
  }
}

function keep() {
  try {
    localStorage.setItem(STORED, JSON.stringify({ system: $("system").value, tools: $("tools").value, turns }));
  } catch {
    // full or forbidden: then it lasts as long as the page
  }
}

function restore() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    $("system").value = kept.system ?? "";
    $("tools").value = kept.tools ?? "";
    turns = (kept.turns ?? []).filter((turn) => typeof turn.role === "string" && typeof turn.content === "string");
  } catch {
    turns = [];
  }
  $("instructions").open = $("system").value !== "" || $("tools").value !== "";
}

function forget() {
  stop();
  turns = [];
  $("system").value = $("tools").value = "";
  try {
    localStorage.removeItem(STORED);
  } catch {
    // forbidden: nothing was kept
  }
  showTurns();
  $("progress").textContent = "";
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = element("textarea", {}, text); // without TLS a page has no clipboard of its own
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
