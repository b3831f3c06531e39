// ----------------------------------------------------------------- probabilities of a token

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

function showTip(token) {
  const { text, logprob, top } = token.place;
  const rivals = [...top].sort((a, b) => b[1] - a[1]);
  if (!rivals.some(([rival]) => rival === text)) rivals.push([text, logprob]);
  const rows = rivals.map(([rival, value]) => {
    const fill = element("i");
    fill.style.width = 100 * Math.exp(value) + "%";
    return element(
      "div", { class: rival === text ? "own" : "" }, element("code", {}, visible(rival)),
      element("b", { class: "meter" }, fill), element("span", {}, (100 * Math.exp(value)).toFixed(1) + " %"),
    );
  });
  $("tip").replaceChildren(...rows);
  $("tip").hidden = false;
  const box = token.getBoundingClientRect(), tip = $("tip").getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - tip.width - 8));
  const below = box.bottom + tip.height + 10 < innerHeight;
  $("tip").style.left = scrollX + left + "px";
  $("tip").style.top = scrollY + (below ? box.bottom + 6 : box.top - tip.height - 6) + "px";
}

function hideTip() {
  $("tip").hidden = true;
  $("output").querySelector(".chosen")?.classList.remove("chosen");
}

function step(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
  const tokens = [...$("output").querySelectorAll(".token")].filter((token) => token.offsetParent);
  if (by === undefined || !tokens.length) return;
  event.preventDefault();
  const at = tokens.findIndex((token) => token.classList.contains("chosen"));
  hideTip();
  const next = tokens[Math.max(0, Math.min(tokens.length - 1, at + by))];
  next.classList.add("chosen");
  next.scrollIntoView({ block: "nearest" });
  showTip(next);
}
