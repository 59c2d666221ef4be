"""What a table of forms asks for: the products that ``headway tune`` measures, and what each of them runs for how many rows.

Both come from ``FormTable`` itself, asked what it would do if forms of one kind alone were there. So a new form, or a new place
for an old one, is measured and told of as soon as models take it.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.kernels.linear_forms.shapes import JUNCTIONS, Group, Product
from headway.kernels.mid_linear.tiles import MAX_ROWS as MOST_EARLY
from headway.kernels.skinny_linear.tiles import MAX_ROWS as MOST_FEW
from headway.models.layers.forms import FormTable, In, InProduct, LayerForms, LayerProducts, Out, OutProduct, Rules

PLAIN = "plain"
"""``F.linear``, in place of an op's name."""
HEAD_OPS = (("few", "skinny_linear"), ("meet", "mid_linear"))


def groups(table: FormTable) -> list[Group]:
    """What has to be measured, each once: products of a layer that take their forms together, and the output layer last."""
    found: dict[Group, None] = {}
    for tokens in (1, MOST_FEW):  # mixtures of few tokens leave another norm than those of more
        for whole in _layer_groups(table, tokens):
            group = tuple(each for each in whole if each.ops)
            found |= dict.fromkeys([(each,) for each in group] if table.apart else [group] if group else [])
    head = _head(table)
    return [*found, *([(head,)] if head is not None else [])]


def decided(table: FormTable, rows: int) -> dict[Product, str]:
    """Product -> the op that it runs in a step of ``rows`` rows of one token each; "plain": ``F.linear``."""
    found: dict[Product, str] = {}
    for group, layer, forms in zip(
        _layer_groups(table, min(rows, MOST_FEW)), table.layers, table.of(rows, True), strict=True
    ):
        ran = [_op(each, form, table.apart) for each, form in _pairs(layer, forms)]
        found |= dict(zip(group, ran, strict=True))
    head = _head(table)
    if head is not None:
        found[head] = {In.SKINNY: "skinny_linear", In.MID: "mid_linear"}.get(table.of_head(rows), PLAIN)
    return found


def _head(table: FormTable) -> Product | None:
    head = table.head
    return None if head is None else Product("head", head.outputs, head.inputs, HEAD_OPS, head.bias)


def _layer_groups(table: FormTable, tokens: int) -> Iterator[Group]:
    """Of each layer its products, with the ops that each way has for so many tokens."""
    everywhere = range(1, MOST_EARLY + 1)
    ways = {
        "few": Rules(few=lambda *_: MOST_FEW),
        "meet": Rules(mid=lambda *_: everywhere),
        "parts": Rules(mid=lambda kind, *_: range(0) if kind == "mid_add" else everywhere),
    }
    forms = {way: FormTable(table.layers, None, rules).of(tokens, True) for way, rules in ways.items()}
    for i, layer in enumerate(table.layers):
        of_ways = {way: [_op(*pair, table.apart) for pair in _pairs(layer, found[i])] for way, found in forms.items()}
        if of_ways["parts"] == of_ways["meet"]:
            del of_ways["parts"]
        if "mid_add" not in of_ways["meet"] and not table.apart:
            of_ways = {"parts" if way == "meet" else way: ops for way, ops in of_ways.items()}
        named = [(name, each) for name, each in zip(JUNCTIONS, layer.at_junctions, strict=True) if each is not None]
        found = []
        for k, (name, each) in enumerate(named):
            ops = tuple((way, ops[k]) for way, ops in of_ways.items() if ops[k] != PLAIN)
            found.append(_product(name, each, ops, apart=table.apart))
        yield tuple(found)


def _pairs(layer: LayerProducts, forms: LayerForms) -> list[tuple[InProduct | OutProduct, In | Out]]:
    of_junctions: tuple[In | Out, ...] = forms
    return [(each, form) for each, form in zip(layer.at_junctions, of_junctions, strict=True) if each is not None]


def _product(name: str, product: InProduct | OutProduct, ops: tuple[tuple[str, str], ...], *, apart: bool) -> Product:
    size = product.outputs, product.inputs
    if isinstance(product, OutProduct):
        place = "added" if product.added else "behind" if product.behind else ""
        return Product(name, *size, ops, product.bias, place=place)
    inside = ("few", product.normed) in ops
    if apart and inside:  # behind the embeddings: other layers' entries say where it ends
        return Product(name, *size, (("few", product.normed),), product.bias, product.gate, "entering")
    return Product(name, *size, ops, product.bias, product.gate, "" if apart or product.fused_norm else "normed")


def _op(product: InProduct | OutProduct, form: In | Out, apart: bool) -> str:
    """The op that a form runs, by the name that tables have for it."""
    if isinstance(product, InProduct):
        early = product.bare[1] if apart else product.early
        ins: dict[In | Out, str] = {In.NORM: product.normed, In.SKINNY: product.bare[0], In.MID: early}
        return ins.get(form, PLAIN)
    outs: dict[In | Out, str] = {
        Out.ADD: "linear_add", Out.SKINNY: "skinny_linear", Out.MEET: "mid_add", Out.PARTS: "linear_parts",
        Out.MID: "bare_linear" if apart else "mid_linear",
    }  # fmt: skip
    return outs.get(form, PLAIN)
