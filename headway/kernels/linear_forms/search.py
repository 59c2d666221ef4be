"""Finds the fastest forms and tiles of a decoder's linear layers on the card that is there.

For each number of rows and each way to go from layer to layer (``winners``) the rule proposes tiles; one junction after the
other takes the one that makes whole layers fastest, then all once more with the best few. A tile whose results differ from
float32 products by more than roundings is left out. All kernels are compiled before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from headway.kernels.compiler_process import CompilerProcess
from headway.kernels.linear_forms import chain as chains
from headway.kernels.linear_forms.card import card_of
from headway.kernels.linear_forms.chain import PLAIN, Chain, Choice, Form, Stream, Timer
from headway.kernels.linear_forms.check import check, compare
from headway.kernels.linear_forms.many import Many
from headway.kernels.linear_forms.proposals import proposals
from headway.kernels.linear_forms.shapes import JUNCTIONS, OUT, DecoderShape, Product
from headway.kernels.linear_forms.winners import OPS
from headway.kernels.triton_precompile import compiling, hash_compiler, launches_noted

FEW_ROWS, MEET_ROWS = 8, 256
"""The most rows for which each way is tried."""
PARTS_ROWS = 64
"""The fewest for which parts are tried, too: where sums of squares were measured to lose, they may go on."""
ORDER = ("gate_up", "down", "o", "qkv")
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """A form that was timed: microseconds of a layer (of the output layer itself) with it, and the rule's for it alone."""

    rows: int
    way: str
    junction: str
    form: Form
    us: float
    predicted: float


@dataclass(slots=True)
class Found:
    """What a search found for a shape.

    Attributes:
        layers: (rows, way) -> microseconds of a layer, its choice. The way "plain" is ``F.linear``.
        heads: rows -> op -> microseconds of the output layer, its form. The op "plain" is ``F.linear``.
        many: (tokens, junction) -> microseconds by separate kernels, and by one of ``wide_linear``.
        timed: every tile that was timed.
        failed: forms that are wrong or do not run, and why.
        complete: the time was enough for all layers and heads; else what was not tried looks like what lost.
    """

    layers: dict[tuple[int, str], tuple[float, Choice]] = field(default_factory=dict)
    heads: dict[int, dict[str, tuple[float, Form]]] = field(default_factory=dict)
    many: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    timed: list[Timed] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    complete: bool = True


class Search:
    """A search on one device.

    Args:
        compiler: a process that compiles kernels; it is the caller's to close.
        most: tiles of an op that are tried for a number of rows.
        until: ``time.monotonic()`` at which it ends with what it has.
    """

    def __init__(
        self, device: torch.device, compiler: CompilerProcess | None, *, most: int, until: float, say: Say
    ) -> None:
        self.device, self.card, self.compiler = device, card_of(device), compiler
        self.most, self.until, self.say = most, until, say
        self._timer = Timer(device)

    def run(self, shape: DecoderShape, all_rows: list[int], all_tokens: Sequence[int] = ()) -> Found:
        """Find forms for ``shape``: for numbers of decoding rows, and for numbers of tokens with prompts."""
        found = Found()
        chain = Chain(shape, max(all_rows), self.device)
        begin = time.monotonic()
        count = self._compile(chain, all_rows, all_tokens)
        self.say(f"  compiled or found {count} kernels in {time.monotonic() - begin:.0f} s")
        for rows in all_rows:
            chain.set_rows(rows)
            plain: Choice = dict.fromkeys(JUNCTIONS, PLAIN)
            found.layers[rows, "plain"] = self._spent(chain, plain), plain
            for way in self._ways(rows):
                if time.monotonic() < self.until:
                    self._descend(chain, rows, way, found)
        weight = torch.randn(shape.weight("head"), dtype=torch.bfloat16, device=self.device) * 0.02
        for rows in all_rows:
            if time.monotonic() < self.until:
                self._head(weight, rows, found)
        found.complete = time.monotonic() < self.until
        del chain, weight
        for tokens in all_tokens:
            if time.monotonic() < self.until:
                self._many(shape, tokens, found)
        return found

    def _ways(self, rows: int) -> Iterator[str]:
        if rows <= FEW_ROWS:
            yield "few"
        if 1 < rows <= MEET_ROWS:
            yield "meet"
        if PARTS_ROWS <= rows <= MEET_ROWS:
            yield "parts"

    def _forms(self, shape: DecoderShape, rows: int, way: str) -> dict[str, list[tuple[float, Form]]]:
        """Of one way, junction -> forms to try."""
        found = {}
        for junction in JUNCTIONS:
            op, (outputs, inputs) = OPS[way][junction], shape.weight(junction)
            found[junction] = proposals(op, rows, outputs, inputs, self.card, self.most)
        return found

    def _head_forms(self, shape: tuple[int, int], rows: int) -> list[tuple[float, Form]]:
        found = proposals("skinny_linear", rows, *shape, self.card, self.most) if rows <= 16 else []
        return found + (proposals("mid_linear", rows, *shape, self.card, self.most) if 1 < rows <= MEET_ROWS else [])

    def _compile(self, chain: Chain, all_rows: list[int], all_tokens: Sequence[int]) -> int:
        """Have all kernels compiled that the search will launch."""
        failures: list[BaseException] = []
        hash_compiler()
        with compiling(self.compiler) as compilation:
            with launches_noted(compilation.add):
                for rows in all_rows:
                    self._launch_all(chain, rows)
                for tokens in all_tokens:
                    for pair in Many(chain.shape, tokens, self.device).pairs().values():
                        for call in pair:
                            _ignoring(call)
            compilation.finish(on_failed=failures.append)
        for error in failures[:5]:  # the forms themselves are reported where they are checked
            self.say(
                f"  not compiled: {type(error).__name__} {' '.join(str(error).split())[:160]} {getattr(error, '__notes__', '')}"
            )
        return compilation.num_kernels

    def _launch_all(self, chain: Chain, rows: int) -> None:
        """Launch every kernel that the search may launch for ``rows``; nothing comes of it."""
        chain.set_rows(rows)
        chain.run(dict.fromkeys(JUNCTIONS, PLAIN))
        for way in self._ways(rows):
            forms = self._forms(chain.shape, rows, way)
            first = {junction: options[0][1] for junction, options in forms.items() if options}
            if len(first) == len(JUNCTIONS):
                chain.run(first)
                for junction, options in forms.items():
                    for _, form in options:
                        self._note(chain, {**first, junction: form})
        x = torch.empty(rows, chain.shape.hidden, dtype=torch.bfloat16, device=self.device)
        weight = torch.empty(chain.shape.weight("head"), dtype=torch.bfloat16, device=self.device)
        for _, form in self._head_forms(chain.shape.weight("head"), rows):
            _ignoring(partial(chains.head, form, x, weight))

    def _note(self, chain: Chain, choice: Choice) -> None:
        few, weights = choice["o"][0] == "linear_add", chain.weights[0]
        for out, into, gate in (("o", "gate_up", "silu"), ("down", "qkv", "")):
            x = torch.empty(chain.rows, weights[out].shape[1], dtype=torch.bfloat16, device=self.device)

            def both(out: str = out, into: str = into, gate: str = gate, x: torch.Tensor = x) -> None:
                stream = chains.project_out(choice[out], x, chain, weights[out])
                bias = None if gate else chain.bias
                chains.project_in(choice[into], Stream() if few else stream, chain, weights[into], bias, gate)

            _ignoring(both)

    def _many(self, shape: DecoderShape, tokens: int, found: Found) -> None:
        try:
            times = Many(shape, tokens, self.device).times(self._timer)
        except Exception as error:
            found.failed.append(f"{tokens} tokens: {type(error).__name__} {' '.join(str(error).split())[:160]}")
            return
        found.many |= {(tokens, junction): pair for junction, pair in times.items()}
        self.say(f"  {tokens} tokens: " + ", ".join(f"{name} {a:.1f} -> {b:.1f}" for name, (a, b) in times.items()))

    def _spent(self, chain: Chain, choice: Choice) -> float:
        return self._timer.spent(partial(chain.run, choice)) / len(chain.weights)

    def _descend(self, chain: Chain, rows: int, way: str, found: Found) -> None:
        forms = self._forms(chain.shape, rows, way)
        choice: Choice = {}
        for junction, options in forms.items():
            right = [(us, form) for us, form in options if self._is_right(chain, junction, form, found)]
            forms[junction] = right
            if not right:
                return
            choice[junction] = right[0][1]
        best = self._spent(chain, choice)
        by_rule = best
        for again in (False, True):
            for junction in ORDER:
                timed = []
                for predicted, form in forms[junction]:
                    if time.monotonic() > self.until:
                        break
                    us = self._spent(chain, {**choice, junction: form})
                    timed.append((us, form))
                    if not again:
                        found.timed.append(Timed(rows, way, junction, form, us, predicted))
                timed.sort(key=lambda pair: pair[0])
                if timed and timed[0][0] < best - 0.02:
                    best, choice[junction] = timed[0]
                kept = [form for _, form in timed[:3]]
                forms[junction] = [pair for pair in forms[junction] if pair[1] in kept]
        found.layers[rows, way] = best, choice
        plain = found.layers[rows, "plain"][0]
        self.say(
            f"  {rows:4d} rows, {way}: {best:.2f} us a layer, as a start would take {by_rule:.2f}, plain {plain:.2f}"
        )

    def _is_right(self, chain: Chain, junction: str, form: Form, found: Found) -> bool:
        """Whether the form gives what float32 products give, twice the same; else it is noted as failed."""
        try:
            check(_product(chain, junction), form, chain, chain.weights[0][junction], _bias(chain, junction))
        except Exception as error:
            found.failed.append(
                f"{chain.rows} rows {junction} {form}: {type(error).__name__} {' '.join(str(error).split())[:160]}"
            )
            return False
        return True

    def _head(self, weight: torch.Tensor, rows: int, found: Found) -> None:
        x = torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device=self.device)
        expected = F.linear(x, weight)
        plain = self._timer.spent(partial(F.linear, x, weight), 4)
        best: dict[str, tuple[float, Form]] = {"plain": (plain, PLAIN)}
        for predicted, form in self._head_forms(tuple(weight.shape), rows):  # type: ignore[arg-type]
            try:
                compare(chains.head(form, x, weight), expected)
                us = self._timer.spent(partial(chains.head, form, x, weight), 4)
            except Exception as error:
                found.failed.append(
                    f"{rows} rows head {form}: {type(error).__name__} {' '.join(str(error).split())[:160]}"
                )
                continue
            found.timed.append(Timed(rows, "head", "head", form, us, predicted))
            best[form[0]] = min(best.get(form[0], (us, form)), (us, form), key=lambda pair: pair[0])
        found.heads[rows] = best
        self.say(f"  {rows:4d} rows, output layer: " + ", ".join(f"{op} {us:.1f}" for op, (us, _) in best.items()))


def _ignoring(call: Callable[[], object]) -> None:
    """What cannot be launched is found again, and reported, where it is checked."""
    try:
        call()
    except Exception:
        return


def _product(chain: Chain, junction: str) -> Product:
    gate, place = "silu" if junction == "gate_up" else "", "added" if junction in OUT else ""
    return Product(
        junction, *chain.shape.weight(junction), (), chain.bias is not None and junction == "qkv", gate, place
    )


def _bias(chain: Chain, junction: str) -> torch.Tensor | None:
    return chain.bias if junction == "qkv" else None
