tables => tables.map(table => ({
  cut: table.parentElement.scrollWidth - table.parentElement.clientWidth,
  rows: [...table.rows].map(row => [...row.cells].map(cell => {
    const box = cell.getBoundingClientRect(), text = document.createRange();
    text.selectNodeContents(cell);
    const inner = text.getBoundingClientRect();
    const outside = cell.textContent && Math.max(box.left - inner.left, inner.right - box.right,
      box.top - inner.top, inner.bottom - box.bottom);
    return {text: cell.textContent, left: box.left, right: box.right, outside: outside || 0};
  }))
}))
