// Draws texts whole and piece by piece; "" when both are the same, of allowed elements only, and nothing of them ran.
texts => {
  const tags = "P H3 H4 H5 H6 HR BLOCKQUOTE UL OL LI TABLE TBODY TR TH TD DIV SPAN PRE CODE BUTTON STRONG EM S A BR".split(" ");
  const names = "class href title rel target type tabindex start".split(" ");
  for (const text of texts) {
    const whole = document.createElement("div"), pieces = document.createElement("div");
    drawMarkdown(whole, text);
    const step = Math.max(1, Math.ceil(text.length / 40));
    for (let end = 0; end <= text.length + step; end += step) drawMarkdown(pieces, text.slice(0, end));
    if (whole.innerHTML !== pieces.innerHTML) return "pieces differ: " + text.slice(0, 200);
    for (const each of whole.querySelectorAll("*")) {
      if (!tags.includes(each.tagName)) return each.tagName + " of " + text.slice(0, 200);
      for (const { name } of each.attributes) if (!names.includes(name)) return name + " of " + text.slice(0, 200);
      if (each.tagName === "A" && !/^(https?:[/][/]|mailto:)/i.test(each.getAttribute("href"))) return each.outerHTML;
    }
  }
  return window.hit ? "code ran" : "";
}
