"""docs/add-a-model.md shows a file that exists and counts lines that are there."""

from __future__ import annotations

import re

from tests.house.source import ROOT


def test_the_worked_example_is_the_file() -> None:
    page = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
    file = (ROOT / "headway" / "models" / "smollm3.py").read_text(encoding="utf-8")
    shown = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown is not None and file.endswith(shown[1])
    counted = re.search(
        r"took (\d+) lines: (\d+) of `models/smollm3.py`, one of .*?, and (\d+) of two rows", page, re.DOTALL
    )
    assert counted is not None
    whole, of_file, of_rows = map(int, counted.groups())
    rows = re.search(
        r'^    "smollm3": .*?(?=^    "cohere")', (ROOT / "tests/models/tiny.py").read_text(), re.DOTALL | re.MULTILINE
    )
    assert rows is not None and (of_file, of_rows) == (len(file.splitlines()), len(rows[0].splitlines()))
    assert whole == of_file + of_rows + 2
    for path in ("headway/models/registry.py", "headway/weights/gguf_kinds.py"):
        assert (ROOT / path).read_text().count("SmolLM3ForCausalLM") <= 2
