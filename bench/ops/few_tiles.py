"""Times products without a norm before them in every form: the rule's choice beside the best of all that were tried.

    python -m bench.ops.few_tiles [--models gemma3-1b ...] [--rows 1 2 4 8 16] [--most 6] [--seconds 140] [--json FILE]

Models with norms behind their products run these in decode steps. The products are those of a model's own plan
(``models.layers.form_walk``), timed as ``headway tune`` times them: alone, in a graph, started early, weights together larger
than the L2 cache, and with the norm behind them where one follows. For each: microseconds of what a start without
measurements takes, and the best of each op. ``x`` is over the time of the bytes. The rule for the choice between ops was
fitted to ``FITTED`` at 1 and 8 rows on an H100; ``HELD`` never tuned it, nor any tile.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.ops.timing import read_bytes_per_us
from headway.kernels.compiler_process import CompilerProcess
from headway.kernels.linear_forms.alone import Alone, FoundAlone, TimedAlone
from headway.kernels.linear_forms.bare import handover
from headway.kernels.linear_forms.card import card_of
from headway.kernels.linear_forms.on_card import OnCard
from headway.kernels.linear_forms.shapes import Group, Product
from headway.kernels.mid_linear.tiles import mid_rows
from headway.kernels.skinny_linear.tiles import fused_rows
from headway.models.decoder import DecoderModel
from headway.models.layers.form_walk import decided, groups
from headway.models.layers.forms import FormTable, Rules
from headway.models.registry import model_class, read_config

Sizes = tuple[str, int, int, int, int, int]
"""Architecture, hidden, inner, query heads, KV heads, size of a head."""
FITTED: Mapping[str, Sizes] = {
    "gemma3-1b": ("Gemma3ForCausalLM", 1152, 6912, 4, 1, 256), "gemma2-2b": ("Gemma2ForCausalLM", 2304, 9216, 8, 4, 256),
    "glm4-9b": ("Glm4ForCausalLM", 4096, 13696, 32, 2, 128), "olmo2-1b": ("Olmo2ForCausalLM", 2048, 8192, 16, 16, 128),
}  # fmt: skip
HELD: Mapping[str, Sizes] = {
    "exaone4-1.2b": ("Exaone4ForCausalLM", 2048, 4096, 32, 8, 64), "olmo2-7b": ("Olmo2ForCausalLM", 4096, 11008, 32, 32, 128),
    "gemma3-12b": ("Gemma3ForCausalLM", 3840, 15360, 16, 8, 256), "gemma3-270m": ("Gemma3ForCausalLM", 640, 2048, 4, 1, 256),
}  # fmt: skip
MODELS = {**FITTED, **HELD}


def table_of(sizes: Sizes) -> FormTable:
    """The forms that a start of such a model takes on this card, of two layers without an output layer."""
    architecture, hidden, inner, heads, kv_heads, size = sizes
    config = read_config({
        "architectures": [architecture], "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "num_hidden_layers": 2, "vocab_size": 1024,
        "max_position_embeddings": 4096, "sliding_window": 512,
        "layer_types": ["full_attention"] * 2, **({"attention_bias": True} if architecture.startswith("Glm") else {}),
    })  # fmt: skip
    model = model_class(config.architecture)(
        config, dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=64
    )
    assert isinstance(model, DecoderModel)
    model.finalize()
    return FormTable(model.forms.layers, None, Rules(fused_rows, mid_rows, None, handover))


def wanted(table: FormTable) -> list[Group]:
    """What is timed: all but the product behind the embeddings, which a step has once."""
    return [group for group in groups(table) if group[0].place != "entering"]


@dataclass(frozen=True, slots=True)
class Line:
    """A product at a number of rows.

    Attributes:
        op, us: what a start takes, and its microseconds; nan: its tile is wrong.
        best: op -> microseconds, tile's numbers: the best of each.
    """

    model: str
    product: Product
    rows: int
    op: str
    us: float
    best: Mapping[str, tuple[float, tuple[int, ...]]]

    @property
    def loss(self) -> float:
        """What is taken over the best."""
        return self.us / min(us for us, _ in self.best.values())

    @property
    def op_loss(self) -> float:
        """The best tile of the op that is taken over the best of all: what the choice of the op costs, whatever its tile."""
        taken = self.best.get(self.op)
        return math.nan if taken is None else taken[0] / min(us for us, _ in self.best.values())


def lines(model: str, table: FormTable, found: FoundAlone) -> Iterator[Line]:
    """What was timed of a model, in order; a start's own tile is the first that was timed of its op."""
    timed: dict[tuple[Product, int], list[TimedAlone]] = {}
    for each in found.timed:
        timed.setdefault((each.product, each.rows), []).append(each)
    for (product, rows), of_product in timed.items():
        op = decided(table, rows).get(product, "plain")
        own = [each.us for each in of_product if each.form[0] == op]
        best: dict[str, tuple[float, tuple[int, ...]]] = {}
        for each in of_product:
            tile = tuple(int(number) for number in astuple(each.form[1])) if each.form[1] is not None else ()
            best[each.form[0]] = min(best.get(each.form[0], (math.inf, ())), (each.us, tile))
        yield Line(model, product, rows, op, own[0] if own else math.nan, best)


def shown(line: Line, rate: float) -> str:
    """A line of the report; ``rate``: bytes a microsecond that the card reads."""
    floor = 2 * line.product.outputs * line.product.inputs / rate
    tried = "  ".join(f"{op} {us:.2f}" for op, (us, _) in line.best.items())
    what = f"{line.model:13s} {line.product.junction:8s}{line.product.place:9s}{line.rows:3d} rows {list(line.product.size)}"
    return f"{what}: {line.op} {line.us:.2f} ({line.us / floor:.2f} x), over the best {line.loss:.3f}; {tried}"


def mean(values: Sequence[float]) -> float:
    """Geometric; nan for none."""
    known = [math.log(value) for value in values if not math.isnan(value)]
    return math.exp(sum(known) / len(known)) if known else math.nan


def summary(all_lines: Sequence[Line]) -> Iterator[str]:
    """Per model, and per number of rows of those that tuned the rule and those that did not."""
    for name in dict.fromkeys(line.model for line in all_lines):
        yield _summed(name, [line for line in all_lines if line.model == name])
    for name, models in (("fitted", FITTED), ("held out", HELD)):
        for rows in sorted({line.rows for line in all_lines}):
            found = [line for line in all_lines if line.model in models and line.rows == rows]
            if found:
                yield _summed(f"{name}, {rows} rows", found)


def _summed(name: str, found: Sequence[Line]) -> str:
    losses = [line.loss for line in found]
    return (
        f"{name:18s} choice over best {mean(losses):.3f} (worst {max(losses):.3f}), its op alone "
        f"{mean([line.op_loss for line in found]):.3f}, F.linear {mean([_plain_loss(line) for line in found]):.3f}"
    )


def _plain_loss(line: Line) -> float:
    plain = line.best.get("plain")
    return math.nan if plain is None else plain[0] / min(us for us, _ in line.best.values())


def as_json(line: Line) -> dict[str, Any]:
    """A line in numbers and lists."""
    product = line.product
    best = {op: [round(us, 3), list(tile)] for op, (us, tile) in line.best.items()}
    return {"model": line.model, "product": product.junction, "place": product.place, "size": list(product.size),
            "rows": line.rows, "op": line.op, "us": round(line.us, 3), "best": best}  # fmt: skip


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print a line for each product and number of rows, then what the rule costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--most", type=int, default=6, help="tiles of an op that are tried for a number of rows")
    parser.add_argument("--seconds", type=float, default=140.0, help="for all; models that are left are named")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    begin, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    compiler, card, rate = CompilerProcess(), card_of(device), read_bytes_per_us()
    say(f"{card}, torch {torch.__version__}, a plain reduction reads {rate:.3g} bytes a microsecond")
    kept: list[Line] = []
    try:
        for model in chosen.models:
            table = table_of(MODELS[model])
            search = Alone(
                OnCard(device, compiler), card, most=chosen.most, until=begin + chosen.seconds, say=lambda _: None
            )
            with torch.inference_mode():
                found = search.run(wanted(table), chosen.rows)
            kept += lines(model, table, found)
            for line in (line for line in kept if line.model == model):
                say(shown(line, rate))
            for failed in found.failed:
                say(f"  FAILED {failed}")
            if found.left:
                say(f"no time left for {model}: {', '.join(each.junction for each in found.left)}")
            if chosen.json:
                told = {
                    "card": card.name,
                    "torch": torch.__version__,
                    "rows": chosen.rows,
                    "products": list(map(as_json, kept)),
                }
                chosen.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
            torch.cuda.empty_cache()
    finally:
        compiler.close()
    say("")
    for told_line in summary(kept):
        say(told_line)
    say(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
