svg => {
  const [dots, marks] = ["4", "9"].map(r => [...svg.querySelectorAll(`circle[r="${r}"]`)].map(
    circle => [circle.cx.baseVal.value, circle.cy.baseVal.value]));
  const frame = svg.getBoundingClientRect();
  const words = [...svg.querySelectorAll("text")].map(text => {
    const box = text.getBoundingClientRect();
    return {text: text.textContent, inside: Math.min(box.left - frame.left, frame.right - box.right,
      box.top - frame.top, frame.bottom - box.bottom)};
  });
  return {dots, marks, words};
}
