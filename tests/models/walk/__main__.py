"""Runs a walk and prints what it came to: ``python -m tests.models.walk GROUP... --draws N [--first SEED] [--only NAME]``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import warnings
from collections import Counter

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--draws", type=int, default=8, help="of each architecture")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--only", default="", help="part of an architecture's name")
    parser.add_argument("--shrink", action="store_true", help="leave out of faulty draws what does not matter")
    parser.add_argument("--out", default="", help="a file of JSON lines, one a draw")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    from tests.models.walk.groups import members, shrunk, walk

    out = open(args.out, "a", encoding="utf-8") if args.out else None  # noqa: SIM115
    for group in args.groups:
        total: Counter[str] = Counter()
        for architecture in members(group):
            if args.only not in architecture:
                continue
            counts: Counter[str] = Counter()
            for seed in range(args.first, args.first + args.draws):
                verdict = walk(group, architecture, seed)
                counts[verdict.outcome] += 1
                if verdict.outcome.is_fault and args.shrink:
                    verdict = shrunk(group, verdict)
                    told = {k: v for k, v in verdict.fields.items() if not isinstance(v, int) or isinstance(v, bool)}
                    print(f"  {told}")
                if verdict.outcome.is_fault:
                    print(f"  {architecture} {seed} {verdict.outcome}: {verdict.detail[:300]}", flush=True)
                if out is not None:
                    line = {"group": group, "architecture": architecture, "seed": seed, "outcome": verdict.outcome}
                    fields = {name: repr(value) for name, value in verdict.fields.items()}
                    out.write(json.dumps(line | {"detail": verdict.detail, "fields": fields}) + "\n")
                    out.flush()
            print(f"{architecture}: {dict(counts)}", flush=True)
            total += counts
        print(f"== {group}: {dict(total)}", flush=True)


if __name__ == "__main__":
    main()
