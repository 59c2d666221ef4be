"""Checks and times the step and sampling operations, and compares with what the memory allows.

    python bench/ops/sampling.py [--only sample] [--rows 1,64] [--vocab 151936] [--sweep] [--json F]

Every case is first compared with its reference; one that differs is reported, and the exit status is 1. Each figure is the
mean over a CUDA graph of many calls, the best of several replays. The floor is the bytes that the operation must move
over 4.44 TB/s, one H200's limit. Calls walk over several copies of the logits, so that they come from memory; in an
engine the L2 cache may still hold those of a few rows. ``--sweep`` also times other tiles of ``sample``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from limits import BYTES_PER_US
from sampling_cases import Case, Size, cases, check, sweep
from timing import time_calls


def measure(case: Case, size: Size) -> dict[str, object]:
    """One record of the report."""
    record: dict[str, object] = {"case": case.name, "rows": size.rows, "vocab": size.vocab}
    try:
        wrong = check(case)
        if wrong:
            record["wrong"] = wrong
        record["us"] = round(time_calls(case.runs), 2)
        record["floor_us"] = round(case.moved / BYTES_PER_US, 2)
    except Exception as error:  # one case that fails must not hide the others' figures
        record["wrong"] = f"{type(error).__name__}: {error}"
    return record


def sizes(options: argparse.Namespace) -> Iterator[Size]:
    for vocab in options.vocab.split(","):
        for rows in options.rows.split(","):
            yield Size(int(rows), int(vocab))


def table(records: list[dict[str, object]]) -> str:
    """Records of one vocabulary as text: a line per case, a column per number of rows."""
    rows = sorted({int(str(record["rows"])) for record in records})
    lines = [f"{'':34s}" + "".join(f"{f'N={count}':>18s}" for count in rows)]
    for name in dict.fromkeys(str(record["case"]) for record in records):
        cells = {int(str(record["rows"])): record for record in records if record["case"] == name}
        line = f"{name:34s}"
        for count in rows:
            cell = cells.get(count, {})
            mark = " !" if "wrong" in cell else ""
            line += f"{cell.get('us', '-')} {cell.get('floor_us', '-')}{mark}".rjust(18)
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--rows", default="1,8,64,256", help="row counts, separated by commas")
    parser.add_argument("--vocab", default="151936,49152", help="vocabulary sizes, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="also other tiles of sample, on the first vocabulary")
    parser.add_argument("--json", type=Path, help="where the report goes")
    options = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    records: list[dict[str, object]] = []
    for size in sizes(options):
        found = [case for case in cases(size) if options.only in case.name]
        if options.sweep and size.vocab == int(options.vocab.split(",")[0]):
            found += sweep(size)
        records += [measure(case, size) for case in found]
        torch.cuda.empty_cache()
    for vocab in dict.fromkeys(size.vocab for size in sizes(options)):
        print(f"V={vocab}: microseconds, then the floor of the bytes moved; ! differs from the reference")
        print(table([record for record in records if record["vocab"] == vocab]))
    wrong = [record for record in records if "wrong" in record]
    for record in wrong:
        print("WRONG", record["case"], record["rows"], record["vocab"], record["wrong"])
    print(f"{len(records)} cases, {len(wrong)} wrong, {time.monotonic() - began:.0f} s")
    if options.json:
        report = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "records": records}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
