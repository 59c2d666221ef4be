"""Which form of each product of a layer runs for how many tokens.

A layer has four junctions: into attention, out of it, into the MLP, out of it. At each a product meets what stands before or
behind it (a norm, an activation, the residual), and for some numbers of tokens one kernel does both. The tables of
``skinny_linear``, ``mid_linear`` and ``wide_linear`` say what each form is worth; here they are put together, so that what one
junction leaves is what the next begins with. Models and blocks know none of this.

    FEW     norms inside the products that follow them, residual additions inside those before
    MID     products that start early; where that was measured faster no norm is left between two of them
    WIDE    activation, rotation and residual addition in the epilogues of products of many tokens
    plain   ``F.linear`` and separate kernels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import torch

from headway.kernels.hopper import runs_gluon
from headway.kernels.linear_forms.bare import handover
from headway.kernels.mid_linear.tiles import Kind as MidKind
from headway.kernels.mid_linear.tiles import float16_rows, mid_rows
from headway.kernels.skinny_linear.tiles import Kind as FewKind
from headway.kernels.skinny_linear.tiles import fused_rows
from headway.kernels.wide_linear.tiles import Counts, wide_tokens
from headway.kernels.wide_linear.tiles import Kind as WideKind

FewRows = Callable[[FewKind, int, int], int]
"""(op, N, K) -> the largest number of rows it is used for, 0 for never."""
MidRows = Callable[[MidKind, int, int], range]
"""(op, N, K) -> the numbers of rows it is used for."""
Handover = Callable[[FewKind, MidKind, int, int], int]
"""(op for few rows, op that starts early, N, K) -> the most rows for which the first is the better one."""
WideTokens = Callable[[WideKind, int, int], Counts]
"""(op, N, K) -> the numbers of tokens it is used for."""


class In(Enum):
    """Form of a product that follows a norm.

    NORM: the norm inside it (``norm_linear``, ``norm_gate_up``). SKINNY, MID: of what is normalised already (``skinny_linear``,
    ``norm_gate_up``; ``mid_linear``, ``mid_gate_up``, which also take what ``Out.MEET`` leaves). WIDE: ``wide_gate_up`` and
    ``wide_qkv``.
    """

    PLAIN = 0
    NORM = 1
    SKINNY = 2
    MID = 3
    WIDE = 4


class Out(Enum):
    """Form of a product that is added to the residual.

    ADD: ``linear_add``. PARTS: ``linear_parts``, which the next norm adds. MEET: ``mid_add``. WIDE: ``wide_add``. SKINNY, MID:
    the product alone (``skinny_linear``, ``mid_linear``), where a norm or a sum over ranks stands between it and the residual.
    """

    PLAIN = 0
    ADD = 1
    PARTS = 2
    MEET = 3
    WIDE = 4
    SKINNY = 5
    MID = 6


@dataclass(frozen=True, slots=True)
class InProduct:
    """A product that follows a norm.

    Attributes:
        outputs, inputs: N, K.
        bias: whether it has one.
        gate: what follows is this activation of a gate, times what else there is (``activation.Gate``); "": no gate.
        fused_norm: an RMS norm stands before it.
        whole_heads: ``wide_qkv`` can do it, with all that follows.
    """

    outputs: int
    inputs: int
    bias: bool
    gate: str
    fused_norm: bool
    whole_heads: bool = False

    @property
    def normed(self) -> FewKind:
        """The op for few rows that computes the norm itself."""
        return "norm_gate_up" if self.gate else "norm_linear"

    @property
    def early(self) -> MidKind:
        """The op that starts early and takes squares."""
        return "mid_gate_up" if self.gate else "mid_linear"

    @property
    def bare(self) -> tuple[FewKind, MidKind]:
        """The ops, for few rows and early, of what is normalised already."""
        return ("gate_up", "bare_gate_up") if self.gate else ("skinny_linear", "bare_linear")


@dataclass(frozen=True, slots=True)
class OutProduct:
    """A product that is added to the residual.

    Attributes:
        outputs, inputs: N, K.
        bias: whether it has one.
        added: nothing stands between it and the residual.
        fused_norm: an RMS norm whose weight has the model's dtype follows the residual.
        behind: ``norm_add`` adds it.
    """

    outputs: int
    inputs: int
    bias: bool
    added: bool
    fused_norm: bool
    behind: bool = False

    @property
    def in_parts(self) -> bool:
        """Whether what follows takes parts, which products of many inputs for few outputs are faster in."""
        return self.added or (self.behind and self.inputs > self.outputs)

    @property
    def bare(self) -> tuple[FewKind, MidKind]:
        """The ops, for few rows and early, of a product that is not added at once."""
        return "skinny_linear", "linear_parts" if self.in_parts else "bare_linear"


class LayerProducts(NamedTuple):
    """The products of a layer; None: one that has no forms (it is quantised, or no single product), or that the layer does not
    have. ``mixture``: tokens up to which a mixture in their place can norm what it reads and add what it gives. ``into_side``,
    ``out_of_side``: of what is added behind both, where norms stand behind products (``layers.per_layer``)."""

    into_mixer: InProduct | None
    out_of_mixer: OutProduct | None
    into_ffn: InProduct | None
    out_of_ffn: OutProduct | None
    has_mixer: bool = True
    has_ffn: bool = True
    mixture: int = 0
    into_side: InProduct | None = None
    out_of_side: OutProduct | None = None

    @property
    def outs(self) -> list[OutProduct]:
        """The products that are added to the residual."""
        return [out for out in (self.out_of_mixer, self.out_of_ffn) if out is not None]

    @property
    def at_junctions(self) -> tuple[InProduct | OutProduct | None, ...]:
        """What is at each junction, in order."""
        return (self.into_mixer, self.out_of_mixer, self.into_ffn, self.out_of_ffn, self.into_side, self.out_of_side)

    @property
    def products(self) -> list[InProduct | OutProduct]:
        """All that there are."""
        return [each for each in self.at_junctions if each is not None]

    @property
    def last(self) -> OutProduct | None:
        """The one whose sum the next layer begins with."""
        return self.out_of_side or (self.out_of_ffn if self.has_ffn else self.out_of_mixer)

    def adds_mixture(self, tokens: int) -> bool:
        """Whether the mixture does so among forms for few: what comes before it must leave the norm to it."""
        out = self.out_of_mixer
        return tokens <= self.mixture and self.has_mixer and out is not None and out.added

    def leaves_norm(self, tokens: int) -> bool:
        """Whether the last sum is the residual alone, in forms for few."""
        return self.adds_mixture(tokens) or (self.last is not None and self.last.added)


class LayerForms(NamedTuple):
    """What runs at a layer's junctions."""

    into_mixer: In = In.PLAIN
    out_of_mixer: Out = Out.PLAIN
    into_ffn: In = In.PLAIN
    out_of_ffn: Out = Out.PLAIN
    into_side: In = In.PLAIN
    out_of_side: Out = Out.PLAIN


PLAIN = LayerForms()


@dataclass(frozen=True, slots=True)
class Rules:
    """Where forms win on a device; None: nowhere. Without ``handover`` what is for few rows goes first as far as it goes."""

    few: FewRows | None = None
    mid: MidRows | None = None
    wide: WideTokens | None = None
    handover: Handover | None = None


def rules_for(device: torch.device, dtype: torch.dtype) -> Rules:
    """The rules for a model in ``dtype`` on ``device``. Where there are some, weights lie as [N, K] matrices."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not half:
        return Rules()
    if not runs_gluon(device):
        return Rules(few=fused_rows)
    return Rules(fused_rows, mid_rows if dtype is torch.bfloat16 else float16_rows, wide_tokens, handover)


class FormTable:
    """The forms of a model's layers by number of tokens.

    Args:
        layers: per layer its products.
        head: the output layer; None: it has no forms.
        rules: where forms win.

    Attributes:
        apart: no product is added to the residual at once, so each is a choice of its own.
    """

    def __init__(self, layers: Sequence[LayerProducts], head: InProduct | None, rules: Rules) -> None:
        # With what comes before; the embeddings have no norm, either.
        self._layers = tuple(zip(layers, (None, *layers), strict=False))
        self.layers, self.head, self._rules = tuple(layers), head, rules
        distinct = dict.fromkeys(layers)
        added = [each for each in distinct if each.out_of_mixer or each.out_of_ffn]  # others follow
        self._few_limit = min((_few_limit(each, rules.few) for each in added), default=0)
        self._meeting = _common([_meeting_rows(each, rules.mid) for each in distinct])
        self._mid = _common([_mid_tokens(each, rules.mid, self._meeting) for each in added])
        # Where no product is added at once, none has a norm to compute anew, and each is a choice of its own.
        self.apart = bool(added) and not any(out.added for each in added for out in each.outs)
        if self.apart:
            self._few_limit, self._mid = max((self._bare_limit(each) for each in distinct), default=0), range(0)
        self._known: dict[tuple[int, bool], tuple[LayerForms, ...]] = {}
        self._known_head: dict[int, In] = {}

    def of(self, tokens: int, decodes: bool) -> tuple[LayerForms, ...]:
        """Per layer, in a step of ``tokens``; ``decodes``: each is a row of its own."""
        known = self._known.get((tokens, decodes))
        if known is None:
            found = {each: self._choose(*each, tokens, decodes) for each in dict.fromkeys(self._layers)}
            known = self._known[tokens, decodes] = tuple(found[each] for each in self._layers)
        return known

    @property
    def plain(self) -> tuple[LayerForms, ...]:
        """Per layer, separate kernels."""
        return (PLAIN,) * len(self._layers)

    def narrows(self, tokens: int) -> bool:
        """Whether layers that are needed for the rows' last tokens alone shall run for these alone. In forms for few tokens
        they run for all, which costs no more."""
        return tokens not in self._mid and tokens > self._few_limit

    def of_head(self, rows: int) -> In:
        """The output layer's, for ``rows`` hidden states."""
        known = self._known_head.get(rows)
        if known is None:
            known = self._known_head[rows] = self._choose_head(rows)
        return known

    def _choose_head(self, rows: int) -> In:
        head, rules = self.head, self._rules
        if head is None:
            return In.PLAIN
        if rules.mid is not None and rows in rules.mid("mid_linear", head.outputs, head.inputs):
            return In.MID
        few = rules.few is not None and rows <= rules.few("skinny_linear", head.outputs, head.inputs)
        return In.SKINNY if few else In.PLAIN

    def _choose(self, layer: LayerProducts, before: LayerProducts | None, tokens: int, decodes: bool) -> LayerForms:
        rules = self._rules
        if self.apart and tokens <= self._few_limit:
            return self._bare_forms(layer, before is None, tokens)
        if rules.mid is not None and tokens in self._mid:
            return _mid_forms(layer, tokens, rules.mid, tokens in self._meeting)
        if rules.few is not None and tokens <= self._few_limit:
            return _few_forms(layer, before is None or before.leaves_norm(tokens), tokens, rules.few)
        if rules.wide is not None and not decodes:  # attention of decode rows takes the projections as they are
            return _wide_forms(layer, tokens, rules.wide)
        return PLAIN

    def _bare_limit(self, layer: LayerProducts) -> int:
        """The most tokens for which one of the products has another form than ``F.linear``."""
        few, mid, found = self._rules.few, self._rules.mid, [0]
        for product in layer.products:
            size, ops = (product.outputs, product.inputs), product.bare
            found += [0 if few is None else few(ops[0], *size), 0 if mid is None else mid(ops[1], *size).stop - 1]
        return max(found)

    def _bare_way(self, product: InProduct | OutProduct, tokens: int) -> Literal["few", "meet", "plain"]:
        rules, size, ops = self._rules, (product.outputs, product.inputs), product.bare
        if rules.few is not None:
            limit = rules.few(ops[0], *size)
            if rules.mid is not None and rules.handover is not None:
                limit = min(limit, rules.handover(*ops, *size))
            if tokens <= limit:
                return "few"
        # what more tokens have costs fewer no more
        early = rules.mid is not None and tokens < rules.mid(ops[1], *size).stop
        return "meet" if early else "plain"

    def _bare_forms(self, layer: LayerProducts, entering: bool, tokens: int) -> LayerForms:
        """``entering``: what comes before the layer are the embeddings, which have no norm."""
        few = self._rules.few or (lambda *_: 0)

        def into(product: InProduct | None, entering: bool) -> In:
            if product is None:
                return In.PLAIN
            way = self._bare_way(product, tokens)
            if entering and way == "few" and product.fused_norm:
                return In.NORM if tokens <= few(product.normed, product.outputs, product.inputs) else In.SKINNY
            return {"few": In.SKINNY, "meet": In.MID, "plain": In.PLAIN}[way]

        def out(product: OutProduct | None) -> Out:
            if product is None:
                return Out.PLAIN
            early = Out.PARTS if product.in_parts else Out.MID
            return {"few": Out.SKINNY, "meet": early, "plain": Out.PLAIN}[self._bare_way(product, tokens)]

        mixer = into(layer.into_mixer, entering), out(layer.out_of_mixer)
        ffn = into(layer.into_ffn, entering and not layer.has_mixer), out(layer.out_of_ffn)
        return LayerForms(*mixer, *ffn, into(layer.into_side, False), out(layer.out_of_side))


# -- few tokens --------------------------------------------------------------------------------------------------------


def _few_limit(layer: LayerProducts, rows: FewRows | None) -> int:
    """Most tokens for which a layer's forms are those for few."""
    if rows is None:
        return 0
    kinds: dict[bool, FewKind] = {True: "linear_add", False: "skinny_linear"}
    return min((rows(kinds[out.added], out.outputs, out.inputs) for out in layer.outs), default=0)


def _few_forms(layer: LayerProducts, bare: bool, tokens: int, rows: FewRows) -> LayerForms:
    """``bare``: what comes before the layer leaves no norm."""

    def into(product: InProduct | None, bare: bool) -> In:
        if product is None:
            return In.PLAIN
        size = product.outputs, product.inputs
        if product.fused_norm and bare:
            return In.NORM if tokens <= rows(product.normed, *size) else In.PLAIN
        return In.SKINNY if tokens <= rows(product.bare[0], *size) else In.PLAIN

    def out(product: OutProduct | None) -> Out:
        if product is None:
            return Out.PLAIN
        return Out.ADD if product.added else Out.SKINNY

    mixed = layer.out_of_mixer
    if layer.adds_mixture(tokens):
        return LayerForms(into(layer.into_mixer, bare), out(mixed), In.NORM, Out.ADD)
    return LayerForms(
        into(layer.into_mixer, bare),
        out(layer.out_of_mixer),
        into(layer.into_ffn, mixed is not None and mixed.added if layer.has_mixer else bare),
        out(layer.out_of_ffn),
    )


# -- products that start early -----------------------------------------------------------------------------------------


def _into_rows(product: InProduct | None, rows: MidRows) -> range:
    if product is None:
        return range(0)
    return rows(product.early, product.outputs, product.inputs)


def _out_rows(product: OutProduct | None, kind: Literal["linear_parts", "mid_add"], rows: MidRows) -> range:
    if product is not None and not product.added and kind == "linear_parts":
        return rows(kind if product.in_parts else "mid_linear", product.outputs, product.inputs)
    if product is None or not product.added or not product.fused_norm:
        return range(0)
    return rows(kind, product.outputs, product.inputs)


def _meeting_rows(layer: LayerProducts, rows: MidRows | None) -> range:
    """Tokens for which no norm is left between the products: each leaves what the next can begin with."""
    if rows is None:
        return range(0)
    found = []
    if layer.has_mixer:
        found += [_into_rows(layer.into_mixer, rows), _out_rows(layer.out_of_mixer, "mid_add", rows)]
    if layer.has_ffn:
        found += [_into_rows(layer.into_ffn, rows), _out_rows(layer.out_of_ffn, "mid_add", rows)]
    return _common(found)


def _mid_tokens(layer: LayerProducts, rows: MidRows | None, meeting: range) -> range:
    """Tokens from the least to the largest for which one of the products out is added by an op that starts early."""
    if rows is None:
        return range(0)
    parts = [_out_rows(out, "linear_parts", rows) for out in (layer.out_of_mixer, layer.out_of_ffn)]
    used = [found for found in (meeting, *parts) if found]
    return range(min(found.start for found in used), max(found.stop for found in used)) if used else range(0)


def _mid_forms(layer: LayerProducts, tokens: int, rows: MidRows, meeting: bool) -> LayerForms:
    def into(product: InProduct | None) -> In:
        return In.MID if tokens in _into_rows(product, rows) else In.PLAIN

    def out(product: OutProduct | None) -> Out:
        if meeting:
            return Out.MEET
        if product is None or tokens not in _out_rows(product, "linear_parts", rows):
            return Out.PLAIN
        return Out.PARTS if product.in_parts else Out.MID

    return LayerForms(into(layer.into_mixer), out(layer.out_of_mixer), into(layer.into_ffn), out(layer.out_of_ffn))


# -- many tokens -------------------------------------------------------------------------------------------------------


def _wide_forms(layer: LayerProducts, tokens: int, used: WideTokens) -> LayerForms:
    def runs(kind: WideKind, product: InProduct | OutProduct | None) -> bool:
        if product is None or product.bias:
            return False
        return any(tokens in each for each in used(kind, product.outputs, product.inputs))

    def out(product: OutProduct | None) -> Out:
        return Out.WIDE if product is not None and product.added and runs("wide_add", product) else Out.PLAIN

    qkv, gate_up = layer.into_mixer, layer.into_ffn
    return LayerForms(
        In.WIDE if qkv is not None and qkv.whole_heads and runs("wide_qkv", qkv) else In.PLAIN,
        out(layer.out_of_mixer),
        In.WIDE if gate_up is not None and gate_up.gate and runs("wide_gate_up", gate_up) else In.PLAIN,
        out(layer.out_of_ffn),
    )


def _common(ranges: Sequence[range]) -> range:
    """What lies in all of them."""
    if not ranges:
        return range(0)
    return range(max(found.start for found in ranges), min(found.stop for found in ranges))
