"""The page's Markdown: what models write is drawn, and nothing of an answer becomes markup."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.server import page
from tests.server import chromium

HELPER = """window.el = (parent, tag, cls, text) => {
  const made = document.createElement(tag);
  if (cls) made.className = cls;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
};"""
HOSTILE = [
    "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'><svg/onload=window.hit=1>",
    "![p](http://evil.test/p.png) ![p](x) [a](javascript:window.hit=1) [a](JaVaScRiPt&colon;x) [a](data:text/html,x)",
    '[a](vbscript:x) [a](/live) [a](\\\\evil.test) [a](java\tscript:x) <javascript:alert(1)> [a](http://e.test/"onclick=x)',
    "[![x](javascript:x)](javascript:x) [a]( javascript:x) [<img src=x>](http://e.test) `<b>` **<i>x</i>**",
    "|<img src=x>|[a](javascript:x)|\n|--|--|\n|<b>|x|",
    "> <iframe src=x>\n- <object data=x>\n1. <style>*{display:none}</style>",
    "```<img src=x>\n</code></pre><script>window.hit=1</script>",
    "\u202ehttp://e.test \u0000 &lt;script&gt; &#x3c;b&#x3e;",
    *("*" * 20000, "[" * 20000, "`" * 9999 + "x", "> " * 5000, "- " * 3000, "**_~~" * 4000, "a_b*c" * 5000, "|" * 9000),
    *(
        "[a](" * 5000,
        "http://" * 4000,
        "~~~\n" * 3000,
        "*a " * 9000,
        "__a" * 9000,
        "| a | b |\n" * 2000,
        "1. \n" * 3000,
    ),
]
PARTS = [
    "**",
    "*",
    "_",
    "~~",
    "`",
    "```",
    "\n",
    "\n\n",
    "- ",
    "1. ",
    "> ",
    "# ",
    "|",
    "|--|",
    "[a](",
    ")",
    "x ",
    "y",
    "<b>",
]
PARTS += ["  ", "http://a.test/x", "javascript:", "![", "](", "\\", "---", "    "]
DRAWN = [
    ("a **b** *c* `d` ~~e~~", "<p>a <strong>b</strong> <em>c</em> <code>d</code> <s>e</s></p>"),
    ("_f_ snake_case_name 2 * 3 * 4", "<p><em>f</em> snake_case_name 2 * 3 * 4</p>"),
    ("# T\n- a\n  - b\n- c", "<h3>T</h3><ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
    ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
    ("- a\n- b\n\n1. c\n2. d\n* e", "<ul><li>a</li><li>b</li></ul><ol><li>c</li><li>d</li></ol><ul><li>e</li></ul>"),
    ("1. a\n   - b\n\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("1 < 2 & <b>", "<p>1 &lt; 2 &amp; &lt;b&gt;</p>"),
    ("**bold *and* more**", "<p><strong>bold <em>and</em> more</strong></p>"),
    ("a **not closed", "<p>a **not closed</p>"),
    ("> q\n> r", "<blockquote><p>q\nr</p></blockquote>"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    path = chromium.find()
    if path is None:
        pytest.skip("no chromium on this machine")
    source = (Path(page.__file__).parent / "markdown.js").read_text(encoding="utf-8")
    with chromium.Browser(path, tmp_path_factory.mktemp("profile"), (800, 600)) as opened:
        opened.evaluate(f"(() => {{ {HELPER} {source}; window.drawMarkdown = drawMarkdown; }})()")
        yield opened


@pytest.mark.slow
def test_hostile_and_random_texts(browser: chromium.Browser) -> None:
    """Elements of a short list, addresses of two kinds, the same piece by piece as at once."""
    rng = random.Random(5)
    texts = [*HOSTILE, *("".join(rng.choices(PARTS, k=rng.randint(1, 60))) for _ in range(400))]
    check = Path(__file__).with_name("markdown_check.js").read_text(encoding="utf-8").partition("\n")[2].rstrip()
    assert browser.evaluate(f"({check})({json.dumps(texts)})") == ""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "wanted"), DRAWN)
def test_what_models_write_is_drawn(browser: chromium.Browser, text: str, wanted: str) -> None:
    draw = f"(box => {{ drawMarkdown(box, {json.dumps(text)}); return box.innerHTML; }})(document.createElement('div'))"
    assert browser.evaluate(draw) == wanted
