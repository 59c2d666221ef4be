// Markdown as models write it, to elements. Nothing of the source becomes markup: every element is made here, every text is
// set as text, addresses are taken from a short list of kinds, and pictures are shown as links. What is not Markdown is text.
const DEEPEST = 6;
const SAFE_ADDRESS = /^(?:https?:\/\/|mailto:)[^\s\u0000-\u0020"<>\\^`{|}]{1,2000}$/i;

// Draws `source` into `parent`. Blocks that did not change since the last call keep their elements: a stream costs what it adds.
function drawMarkdown(parent, source) {
  const kept = parent.blocks || [], blocks = blocksOf(source.split("\n"));
  let same = 0;
  while (same < kept.length && same < blocks.length && kept[same] === blocks[same].join("\n")) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const lines of blocks.slice(same)) parent.append(blockElement(lines, 0));
  parent.blocks = blocks.map(lines => lines.join("\n"));
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/, RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s{0,12})(?:[-*+]|(\d{1,9})[.)])\s+(\S.*)?$/, QUOTE = /^ {0,3}> ?/, ROW = /^\s*\|.*\|\s*$/, TURN = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

// Lines in groups: a fence with its content, a list of one kind, a quote, a table, a heading, a rule, a paragraph.
function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  const take = (from, until) => { blocks.push(lines.slice(from, until)); at = until; };
  const run = (from, goesOn) => { let end = from + 1; while (end < lines.length && goesOn(lines[end], end)) end += 1; return end; };
  while (at < lines.length) {
    const line = lines[at], fence = FENCE.exec(line);
    if (line.trim() === "") at += 1;
    else if (fence) {
      const end = run(at, each => !(each.trim().startsWith(fence[1]) && each.trim().replaceAll(fence[1][0], "") === ""));
      take(at, Math.min(end + 1, lines.length));
    } else if (HEADING.test(line) || RULE.test(line)) take(at, at + 1);
    else if (QUOTE.test(line)) take(at, run(at, each => QUOTE.test(each)));
    else if (ITEM.test(line)) {
      const head = ITEM.exec(line);
      const belongs = each => { // an item of the other kind, as far out as the first, begins another list
        const item = ITEM.exec(each);
        return item ? item[1].length >= head[1].length + 2 || (item[2] === undefined) === (head[2] === undefined) : /^\s{2,}\S/.test(each);
      };
      take(at, run(at, (each, i) => belongs(each) || (each.trim() === "" && i + 1 < lines.length && belongs(lines[i + 1]))));
    } else if (ROW.test(line) && at + 1 < lines.length && TURN.test(lines[at + 1]) && lines[at + 1].includes("-")) take(at, run(at, each => ROW.test(each) || TURN.test(each)));
    else take(at, run(at, each => each.trim() !== "" && !FENCE.test(each) && !HEADING.test(each) && !RULE.test(each) && !QUOTE.test(each) && !ITEM.test(each)));
  }
  return blocks;
}

function blockElement(lines, depth) {
  const first = lines[0], fence = FENCE.exec(first), heading = HEADING.exec(first);
  if (fence) return codeElement(lines, fence);
  if (heading) return withInline(document.createElement("h" + Math.min(6, heading[1].length + 2)), heading[2]);
  if (RULE.test(first)) return document.createElement("hr");
  if (depth < DEEPEST && QUOTE.test(first)) {
    const quote = document.createElement("blockquote");
    for (const block of blocksOf(lines.map(line => line.replace(QUOTE, "")))) quote.append(blockElement(block, depth + 1));
    return quote;
  }
  if (depth < DEEPEST && ITEM.test(first)) return listElement(lines, depth);
  if (ROW.test(first) && lines.length > 1 && TURN.test(lines[1])) return tableElement(lines);
  return withInline(document.createElement("p"), lines.map(line => line.trim() + (/ {2}$/.test(line) ? "\u2028" : "")).join("\n"));
}

function codeElement(lines, fence) {
  const closed = lines.length > 1 && lines[lines.length - 1].trim().startsWith(fence[1]);
  const box = document.createElement("div"), bar = el(box, "div", "bar"), text = lines.slice(1, closed ? -1 : undefined).join("\n");
  box.className = "code";
  el(bar, "span", "", fence[2]);
  const copy = el(bar, "button", "", "Copy");
  copy.type = "button";
  copy.onclick = async () => { await navigator.clipboard.writeText(text); copy.textContent = "Copied"; };
  const pre = el(box, "pre", "");
  pre.tabIndex = 0;
  el(pre, "code", "", text);
  return box;
}

function listElement(lines, depth) {
  const head = ITEM.exec(lines[0]), list = document.createElement(head[2] === undefined ? "ul" : "ol"), edge = head[1].length + 2;
  if (head[2] !== undefined && Number(head[2]) !== 1) list.start = Number(head[2]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < edge) items.push([item[3] || ""]);
    else items[items.length - 1].push(line.replace(new RegExp(`^\\s{0,${edge}}`), ""));
  }
  for (const own of items) {
    const entry = el(list, "li", ""), blocks = blocksOf(own);
    for (const [number, block] of blocks.entries()) {
      const made = blockElement(block, depth + 1);
      if (made.tagName === "P" && number === 0) entry.append(...made.childNodes);
      else entry.append(made);
    }
  }
  return list;
}

function tableElement(lines) {
  const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").slice(0, 40).map(cell => cell.trim());
  const box = document.createElement("div"), table = el(box, "table", ""), sides = cells(lines[1]).map(cell => cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : "");
  box.className = "table";
  for (const [number, line] of lines.entries()) {
    if (number === 1) continue;
    const row = el(table, "tr", "");
    cells(line).forEach((cell, i) => withInline(el(row, number === 0 ? "th" : "td", sides[i] || ""), cell));
  }
  return box;
}

function withInline(parent, text) { inline(parent, text, 0); return parent; }

const LINK = /(!?)\[((?:[^[\]\\]|\\.){0,500})\]\(\s*<?((?:[^\s()<>]|\([^\s()<>]{0,200}\)){1,2000})>?(?:\s+"[^"]{0,300}")?\s*\)/y;
const BARE = /https?:\/\/[^\s<>"'`|\\^{}]{1,2000}/y, MAILED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;

// Marks within a line. A mark that is never closed is text; that it is not closed is found out once for each kind of mark.
function inline(parent, text, depth) {
  let plain = "", at = 0;
  const unclosed = new Set();
  const flush = () => { if (plain) parent.append(plain); plain = ""; };
  const match = pattern => { pattern.lastIndex = at; return pattern.exec(text); };
  const link = (label, address, length) => {
    flush();
    if (SAFE_ADDRESS.test(address)) {
      const made = el(parent, "a", "");
      made.href = made.title = address;
      made.rel = "noopener noreferrer nofollow";
      made.target = "_blank";
      if (depth < DEEPEST) inline(made, label, DEEPEST); else made.append(label);
    } else parent.append(text.slice(at, at + length));
    at += length;
  };
  const span = (tag, mark) => {
    if (unclosed.has(mark) || /\s/.test(text[at + mark.length] || " ")) return false;
    let end = text.indexOf(mark, at + mark.length + 1);
    while (end > 0 && (/\s/.test(text[end - 1]) || (mark.length === 1 && text[end + 1] === mark && text[end - 1] !== mark))) end = text.indexOf(mark, end + (text[end + 1] === mark ? 2 : 1));
    if (end < 0) { unclosed.add(mark); return false; }
    if (mark[0] === "_" && (/[\p{L}\p{N}]/u.test(text[at - 1] || " ") || /[\p{L}\p{N}]/u.test(text[end + mark.length] || " "))) return false;
    flush();
    inline(el(parent, tag, ""), text.slice(at + mark.length, end), depth + 1);
    at = end + mark.length;
    return true;
  };
  while (at < text.length) {
    const char = text[at], next = text[at + 1] || "";
    let found = null;
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(next)) { plain += next; at += 2; continue; }
    if (char === "\u2028") { flush(); el(parent, "br", ""); at += 1; continue; }
    if (char === "`") {
      const ticks = /`+/y;
      ticks.lastIndex = at;
      const mark = ticks.exec(text)[0], end = unclosed.has(mark) ? -1 : text.indexOf(mark, at + mark.length);
      if (end < 0) { unclosed.add(mark); plain += mark; at += mark.length; continue; }
      flush();
      el(parent, "code", "", text.slice(at + mark.length, end).trim());
      at = end + mark.length;
      continue;
    }
    if (depth < DEEPEST) {
      if ((char === "*" || char === "_") && next === char && span("strong", char + char)) continue;
      if ((char === "*" || char === "_") && next !== char && span("em", char)) continue;
      if (char === "~" && next === "~" && span("s", "~~")) continue;
      if ((char === "[" || (char === "!" && next === "[")) && (found = match(LINK))) { link(found[2] || found[3], found[3], found[0].length); continue; }
      if (char === "<" && (found = match(MAILED))) { link(found[1], found[1], found[0].length); continue; }
      if (char === "h" && (next === "t") && !/\w/.test(text[at - 1] || " ") && (found = match(BARE))) {
        const address = found[0].replace(/[.,;:!?)\]*_~]+$/, "");
        link(address, address, address.length);
        continue;
      }
    }
    plain += char;
    at += 1;
  }
  flush();
}
