"""The page in a real browser: wide and on a phone, light and dark, filtered and grouped by clicking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.syncs import Kind, Log, Site, Wait
from headway.syncs.report import Run, write_html
from tests.syncs.browser import Browser, browser

LIBRARY = "/venv/lib/python3.11/site-packages/transformers/generation/stopping_criteria_with_a_long_name.py"
EVIL = "</script><script>document.title='owned'</script>.py"


def example() -> Run:
    """Waits of all kinds, own and through libraries, long names, two threads, steps."""
    log = Log(["torch: a test"])

    def add(file: str, line: int, function: str, kind: Kind, call: str, **more: Any) -> None:
        for at in range(3):
            start = 1_100_000 + 40_000 * line + at * 9_000
            log.add(
                Wait(Site(file, line, function), kind, call, 12.0 * line, start, **{"thread": "MainThread", **more})
            )

    add(EVIL, 3, "step", Kind.READ, "Tensor.item", step=2)
    through = (f"{LIBRARY}:201 StoppingCriteriaList.__call__", "/home/me/project/train.py:4 evaluate")
    add("/home/me/project/train.py", 4, "evaluate", Kind.SIZE, "Tensor.__getitem__", stack=through, step=1)
    add(
        "/home/me/project/a_folder_with_a_long_name/and_another_one/loader.py",
        5,
        "Loader.__next__",
        Kind.UPLOAD,
        "Tensor.cuda",
    )
    add("/home/me/project/train.py", 6, "main.<locals>.closure", Kind.READ, "Tensor.__float__", thread="rank 1 worker")
    add(
        "/home/me/project/train.py",
        7,
        "main",
        Kind.DEVICE,
        "torch.cuda.synchronize",
        reason="once, before the clock is read",
    )
    streams = {"GPU 0, stream 7": [(1010.0, 80.0, "gemm"), (1085.0, 20.0, "add"), (1240.0, 100.0, "gemm")]}
    run = Run(["python", "train.py", "--data", "/a/long/path" * 9], "profiler", log, 500.0, streams, 1000.0)
    run.subprocesses, run.notes, run.started = ["subprocess.Popen " + "true " * 40], ["a note"], 4
    return run


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, Path]]:
    """A browser, and the page."""
    folder = tmp_path_factory.mktemp("page")
    with browser(folder) as made:
        write_html(example(), folder / "o.html")
        yield made, folder / "o.html"


def rows(page: Browser) -> list[str]:
    """The places of the findings that are shown, in order."""
    code = (
        'return [...document.querySelectorAll("#findings .place")].filter(e => e.offsetParent).map(e => e.textContent)'
    )
    return [text.rpartition("/")[2] for text in page.script(code)]


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 1000, 375])
def test_nothing_is_wider_than_the_window(window: tuple[Browser, Path], width: int, dark: bool) -> None:
    page, file = window
    page.open(file, width, dark=dark)
    assert page.script("return document.documentElement.dataset.ready") == "1"
    page.picture(file.with_suffix(f".{width}{'dark' if dark else ''}.png"))
    assert page.script("return innerWidth") == width, "a phone shows a page that is too wide at another scale"
    names = "rows.every(row => 8 + ctx.measureText(fitted(row.name, LEFT - 14)).width <= LEFT)"
    assert page.script(f"return {names} && LEFT <= innerWidth / 2"), "names lie beside the bars"
    assert page.script("return document.documentElement.scrollWidth") <= width
    outside = (
        'return [...document.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1)'
    )
    assert page.script(outside + ".map(e => e.outerHTML.slice(0, 80))") == []
    assert page.script("return document.title") == "headway syncs"
    colours = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    colours += ".map(c => c.match(/\\d+/g).map(Number))"
    ink, paper = (sum(colour[:3]) for colour in page.script(colours))
    assert (ink > 500 > 200 > paper) if dark else (ink < 200 < 500 < paper)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 375])
def test_filters_and_groups_by_clicking(window: tuple[Browser, Path], width: int) -> None:
    page, file = window
    page.open(file, width)
    everything = rows(page)
    assert (
        len(everything) == 5 and page.script('return document.getElementById("count").textContent') == "5 of 5 findings"
    )
    page.choose("#by-kind", "read")
    assert rows(page) == ["train.py:6", "script>.py:3"], "the most expensive first"
    page.choose("#by-kind", "*")
    page.choose("#by-package", "transformers")
    assert rows(page) == ["train.py:4"]
    page.choose("#by-package", "*")
    page.type("#by-word", "CLOSURE")
    assert rows(page) == ["train.py:6"]
    page.type("#by-word", "\ue003" * 7)
    page.click("#by-allowed")
    assert len(rows(page)) == 4 and "train.py:7" not in rows(page)
    page.choose("#by-group", "kind")
    heads = 'return [...document.querySelectorAll(".group button")].map(e => e.textContent)'
    assert page.script(heads) == [
        "read2 findings, 6×, 324.0 µs",
        "upload1 finding, 3×, 180.0 µs",
        "size1 finding, 3×, 144.0 µs",
    ]
    page.click(".group button")
    assert rows(page) == ["loader.py:5", "train.py:4"], "folded"
    page.click(".group button")
    assert len(rows(page)) == 4
    page.choose("#by-group", "*")
    assert len(rows(page)) == 4 and page.script(heads) == []
    page.click("#findings summary")
    stack = page.script('return document.querySelector("#findings details").innerText')
    assert "stopping_criteria" in stack and stack.index("stopping_criteria") < stack.index("train.py:4")
    assert page.script("return document.documentElement.scrollWidth") <= width
