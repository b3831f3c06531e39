// ----------------------------------------------------------------------------------- events

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", forget);
$("copy").addEventListener("click", () => copyText($("output").textContent, $("copy")));
$("markdown").addEventListener("change", () => $("output").classList.toggle("plain", !$("markdown").checked));
for (const name of ["system", "tools"]) $(name).addEventListener("input", keep);
$("tab-completion").addEventListener("click", () => choose("completion"));
$("tab-chat").addEventListener("click", () => choose("chat"));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
  const other = $(mode === "chat" ? "tab-completion" : "tab-chat");
  if (other.disabled) return;
  other.click();
  other.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  if (event.key === "Escape") {
    stop();
    hideTip();
  }
});
$("output").addEventListener("mouseover", (event) => {
  if (event.target.place) showTip(event.target);
});
$("output").addEventListener("mouseout", hideTip);
$("output").addEventListener("keydown", step);
$("output").addEventListener("blur", hideTip);
$("layer").addEventListener("change", () => last && showExperts(last.experts));
$("save-json").addEventListener("click", () => save("json"));
$("save-svg").addEventListener("click", () => save("svg"));
listenToTimeline();
restore();
watch();
