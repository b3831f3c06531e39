// -------------------------------------------------------------------------------- markdown

// A model's text as elements. Its characters become text nodes and nothing else, so no markup in it
// comes to life; links and images stay the text they are. Every loop goes forward, so that no text
// takes longer than its length warrants.

const DEEPEST = 6; // of lists and quotations in each other; what is deeper is text
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const FENCE = /^ {0,3}(```+|~~~+)/;
const QUOTE = /^ {0,3}> ?/;
const HEADING = /^#{1,6} +/;
const MARKS = [["``", "code"], ["`", "code"], ["**", "strong"], ["~~", "del"], ["*", "em"]];

const indentOf = (line) => line.length - line.trimStart().length;

function markdown(text, depth = 0) {
  const lines = text.split("\n"), parts = [];
  let at = 0;
  const takeWhile = (fits) => {
    const from = at;
    while (at < lines.length && fits(lines[at])) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line), item = ITEM.exec(line);
    if (line.trim() === "") at += 1;
    else if (fence) {
      at += 1;
      const code = takeWhile((next) => !next.trimStart().startsWith(fence[1]));
      at += 1;
      parts.push(element("pre", {}, element("code", {}, code.join("\n"))));
    } else if (HEADING.test(line)) {
      at += 1;
      parts.push(element("h4", {}, ...inline(line.replace(HEADING, ""))));
    } else if (isRule(line)) {
      at += 1;
      parts.push(element("hr"));
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      const quoted = takeWhile((next) => QUOTE.test(next)).map((next) => next.replace(QUOTE, ""));
      parts.push(element("blockquote", {}, ...markdown(quoted.join("\n"), depth + 1)));
    } else if (item && depth < DEEPEST) {
      const base = item[1].length, ordered = /\d/.test(item[2][0]);
      const belongs = (next) => {
        const other = ITEM.exec(next);
        if (next.trim() === "") return true;
        return other ? other[1].length > base || /\d/.test(other[2][0]) === ordered : indentOf(next) > base;
      };
      parts.push(list(takeWhile(belongs), base, ordered ? parseInt(item[2], 10) : null, depth));
    } else if (line.includes("|") && isTableRule(lines[at + 1] ?? "")) {
      const [head, , ...rows] = takeWhile((next) => next.includes("|"));
      const row = (cell, next) => element("tr", {}, ...cells(next).map((text) => element(cell, {}, ...inline(text))));
      parts.push(element("table", {}, row("th", head), ...rows.map((next) => row("td", next))));
    } else {
      at += 1; // whatever it looks like, so that every turn takes a line
      const more = takeWhile((next) => next.trim() !== "" && ![FENCE, HEADING, QUOTE, ITEM].some((start) => start.test(next)));
      parts.push(element("p", {}, ...inline([line, ...more].join("\n"))));
    }
  }
  return parts;
}

const isRule = (line) => /^(-{3,}|\*{3,}|_{3,})$/.test(line.replaceAll(" ", ""));
const isTableRule = (line) => line.includes("-") && line.includes("|") && /^[\s:|-]+$/.test(line);

function cells(line) {
  const inner = line.trim();
  return inner.slice(inner.startsWith("|") ? 1 : 0, inner.endsWith("|") ? -1 : undefined).split("|").map((cell) => cell.trim());
}

/** A list of lines that belong together: a line that is an item at the base begins one, others go on. */
function list(lines, base, first, depth) {
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= base) items.push([item[3]]);
    else items.at(-1).push(line.slice(Math.min(indentOf(line), base + 2)));
  }
  const made = items.map((item) => element("li", {}, ...markdown(item.join("\n"), depth + 1)));
  return first === null ? element("ul", {}, ...made) : element("ol", { start: first }, ...made);
}

/** Code, bold, struck out and emphasised words in a line. */
function inline(text, depth = 0) {
  const parts = [], missing = new Set(); // marks of which no further one comes
  let plain = "", at = 0;
  while (at < text.length) {
    if (text[at] === "\\" && "\\`*_~#|[]()<>".includes(text[at + 1] ?? " ")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    const found = marked(text, at, missing);
    if (found === null) plain += text[at++];
    else {
      const [name, inner, end] = found;
      parts.push(plain, element(name, {}, ...(name === "code" || depth >= DEEPEST ? [inner] : inline(inner, depth + 1))));
      plain = "";
      at = end;
    }
  }
  return [...parts, plain].filter((part) => part !== "");
}

function marked(text, at, missing) {
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, at) || missing.has(mark)) continue;
    const from = at + mark.length, end = text.indexOf(mark, from);
    if (end < 0) {
      missing.add(mark);
      continue;
    }
    const inner = text.slice(from, end);
    if (inner === "" || (name !== "code" && inner.trim() !== inner)) continue;
    return [name, name === "code" ? inner.trim() : inner, end + mark.length];
  }
  return null;
}
