"""Measures forms and tiles of linear layers for public shapes on one card, and says what the rule alone would have cost.

    python -m bench.ops.linear_forms [--shapes llama-3.2-1b qwen2.5-1.5b ...] [--rows 1 2 4 8 16 64 128 256] \
        [--tokens 128 256 512] [--seconds 400] [--most 14] [--json FILE]

For each shape: compiles what will be tried, checks each tile against float32 products, times whole layers (attention included,
kernels started early, weights several times the L2 cache) with each, and the output layer alone. Printed are the best layers,
those of the rule without any measurement, and those of ``F.linear``. The file has every timing with its prediction, the winners
and what failed; it is written after each shape, so a run that is stopped has the shapes before. See
``headway.kernels.linear_forms.search``, which ``headway tune`` uses, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headway.kernels.compiler_process import CompilerProcess
from headway.kernels.linear_forms.card import card_of
from headway.kernels.linear_forms.search import Found, Search
from headway.kernels.linear_forms.shapes import DecoderShape

SHAPES = {
    "llama-3.2-1b": DecoderShape(2048, 8192, 32, 8, 64, 128256),
    "qwen2.5-1.5b": DecoderShape(1536, 8960, 12, 2, 128, 151936, qkv_bias=True),
    "qwen3-4b": DecoderShape(2560, 9728, 32, 8, 128, 151936, qk_norm=True),
    "qwen3-0.6b": DecoderShape(1024, 3072, 16, 8, 128, 151936, qk_norm=True),
    "llama-3.1-8b": DecoderShape(4096, 14336, 32, 8, 128, 128256),
    "gemma3-1b": DecoderShape(1152, 6912, 4, 1, 256, 262144, qk_norm=True),
    "qwen3-1.7b": DecoderShape(2048, 6144, 16, 8, 128, 151936, qk_norm=True),
    "llama-3.2-3b": DecoderShape(3072, 8192, 24, 8, 128, 128256),
    "qwen2.5-3b": DecoderShape(2048, 11008, 16, 2, 128, 151936, qkv_bias=True),
    "qwen2.5-7b": DecoderShape(3584, 18944, 28, 4, 128, 152064, qkv_bias=True),
    "qwen2.5-0.5b": DecoderShape(896, 4864, 14, 2, 64, 151936, qkv_bias=True),
    "phi-4-mini": DecoderShape(3072, 8192, 24, 8, 128, 200064),
    "gemma2-2b": DecoderShape(2304, 9216, 8, 4, 256, 256000),
    "smollm3-3b": DecoderShape(2048, 11008, 16, 4, 128, 128256),
    "qwen3-8b": DecoderShape(4096, 12288, 32, 8, 128, 151936, qk_norm=True),
    "granite-3.3-2b": DecoderShape(2048, 8192, 32, 8, 64, 49159),
    "qwen3-14b": DecoderShape(5120, 17408, 40, 8, 128, 151936, qk_norm=True),
    "qwen3-32b": DecoderShape(5120, 25600, 64, 8, 128, 151936, qk_norm=True),
}
"""Of public configurations. Those behind the fifth never tuned the rule."""
DEFAULT = list(SHAPES)[:8]
ROWS = [1, 2, 4, 8, 16, 64, 128, 256]
TOKENS = [128, 256, 512]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def as_json(found: Found) -> dict[str, Any]:
    """What a search found, in numbers and lists."""
    layers = [
        {"rows": rows, "way": way, "us": us, "choice": {name: shown(form) for name, form in choice.items()}}
        for (rows, way), (us, choice) in found.layers.items()
    ]
    heads = [
        {"rows": rows, "us": us, "form": shown(form)}
        for rows, forms in found.heads.items()
        for us, form in forms.values()
    ]
    timed = [
        {"rows": t.rows, "way": t.way, "junction": t.junction, "form": shown(t.form), "us": round(t.us, 3),
         "predicted": round(t.predicted, 3)}
        for t in found.timed
    ]  # fmt: skip
    many = [[tokens, junction, *pair] for (tokens, junction), pair in found.many.items()]
    return {"layers": layers, "heads": heads, "many": many, "timed": timed, "failed": found.failed}


def shown(form: Any) -> list[Any]:
    """(op, its tile's numbers)."""
    op, tile = form
    return [op, list(asdict(tile).values()) if tile is not None else None]


def summary(name: str, shape: DecoderShape, found: Found, bandwidth: float) -> None:
    """A table: microseconds of a layer."""
    floor = shape.layer_bytes() / bandwidth
    outputs, inputs = shape.weight("head")
    head_floor = 2 * outputs * inputs / bandwidth
    say(f"\n{name}: floor of a layer's weights {floor:.1f} us, of the output layer's {head_floor:.1f}")
    for rows in sorted({rows for rows, _ in found.layers}):
        ways = {way: us for (count, way), (us, _) in found.layers.items() if count == rows}
        best = min(ways, key=lambda way: ways[way])
        figures = "  ".join(f"{way} {us:.1f}" for way, us in ways.items())
        head = found.heads.get(rows)
        more = "; output layer " + ", ".join(f"{op} {us:.1f}" for op, (us, _) in head.items()) if head else ""
        say(f"  {rows:4d} rows: {figures} -> {best} {ways[best] / floor:.2f} x floor{more}")
    for line in found.failed[:8]:
        say(f"  FAILED {line}")
    if len(found.failed) > 8:
        say(f"  and {len(found.failed) - 8} more")


def go_on(shapes: list[str], seconds: float, compiler: CompilerProcess) -> None:
    """Start anew with the shapes that are left if a kernel has broken the card's context; else return."""
    try:
        torch.cuda.synchronize()
    except Exception:
        compiler.close()
        if not shapes or seconds < 30:
            sys.exit(1)
        taken = {"--shapes", "--seconds"}
        others, skip = [], False
        for word in sys.argv[1:]:
            skip = word in taken or (skip and not word.startswith("--"))
            if not skip:
                others.append(word)
        others += [] if "--more" in others else ["--more"]
        more = ["--shapes", *shapes, "--seconds", str(seconds), *others]
        os.execv(sys.executable, [sys.executable, "-m", "bench.ops.linear_forms", *more])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=DEFAULT)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--seconds", type=float, default=400.0, help="for all")
    parser.add_argument("--most", type=int, default=14, help="tiles of an op that are tried for a number of rows")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--more", action="store_true", help="keep what the file has")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    begin = time.monotonic()
    compiler = CompilerProcess()
    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    say(f"{card}, torch {torch.__version__}")
    report: dict[str, Any] = {"card": asdict(card), "torch": torch.__version__, "shapes": {}}
    if options.json and options.more:
        report["shapes"] = json.loads(options.json.read_text())["shapes"] if options.json.exists() else {}
    gc.collect()
    gc.freeze()
    for name in options.shapes:
        if time.monotonic() - begin > options.seconds - 20:
            say(f"no time left for {name}")
            continue
        say(f"\n{name} after {time.monotonic() - begin:.0f} s")
        search = Search(device, compiler, most=options.most, until=begin + options.seconds, say=say)
        try:
            with torch.inference_mode():
                found = search.run(SHAPES[name], options.rows, options.tokens)
        except Exception as error:
            say(f"{name} FAILED {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            go_on(
                options.shapes[options.shapes.index(name) + 1 :], options.seconds - (time.monotonic() - begin), compiler
            )
            continue
        summary(name, SHAPES[name], found, card.bandwidth)
        report["shapes"][name] = {"shape": asdict(SHAPES[name]), **as_json(found)}
        if options.json:
            options.json.write_text(json.dumps(report))
        torch.cuda.empty_cache()
    compiler.close()
    say(f"\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
