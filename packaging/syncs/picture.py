"""Draw a report as README.md's picture.

python -m headway.syncs --simulate -- example.py 2> report.txt; python picture.py report.txt
"""

from __future__ import annotations

import html
import sys
from pathlib import Path

WIDTH, STEP, MOST = 940, 19, 112


def main(report: Path) -> None:
    """Write finding.svg beside this file."""
    lines = [
        line for line in report.read_text(encoding="utf-8").splitlines() if line.strip() and "watched by" not in line
    ]
    cut = [line if len(line) <= MOST else line[: MOST - 1] + "…" for line in lines]
    rows = []
    for number, line in enumerate(cut):
        colour = "#f07070" if "(not timed)" in line or " us " in line else "#4fb286" if "cure:" in line else "#c9d1d9"
        place = f'x="16" y="{30 + number * STEP}" fill="{colour}"'
        rows.append(f'<text {place} xml:space="preserve">{html.escape(line)}</text>')
    height = 24 + len(cut) * STEP
    text = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="monospace" font-size="13">'
    text += f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#12161d"/>\n' + "\n".join(rows) + "\n</svg>\n"
    (Path(__file__).parent / "finding.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
