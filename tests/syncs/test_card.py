"""The simulation against the record made on a card by bench/syncs_ops.py: operations that wait there, and lines of code."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import syncs_rules
from bench.syncs_forms import FORMS, Things
from headway import syncs
from headway.syncs import trees
from headway.syncs.kinds import kinds_of
from headway.syncs.sim import table
from headway.syncs.sim.rules import BY_HAND, COPIES, copy_wait, wait_of
from headway.syncs.simulate import SimTensor, SimulationProbe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulation refuses a machine with CUDA")
CARD = json.loads((Path(__file__).parent / "card.json").read_text(encoding="utf-8"))
RAISE: dict[str, str] = {
    "pack_padded_sequence device lengths": "CPU int64",
    **{f"x[mask of bytes] = {kind}": "boolean masks" for kind in ("float", "int", "host scalar")},
}
"""They fail on the card too, so that it saw no wait."""
SAID_ANYWAY = {"empty_cache"}
"""The card's cache held nothing to free when this was recorded; with something in it cudaFree waits."""
SIZES_DECIDE = {"aten.isin.Tensor_Tensor", "aten.equal.default"}
"""The record's kinds don't say how many elements there are: tests/syncs/test_simulate.py has these."""
HAND = [name for name in CARD["ops"] if name.split(".")[1] in BY_HAND and name not in SIZES_DECIDE]


def test_the_tables_repeat_the_record() -> None:
    waits, never = table.load()
    wrong = [
        f"{name}({kinds})"
        for name, by_kind in CARD["ops"].items()
        if name.split(".")[1] not in BY_HAND
        for kinds, waited in by_kind.items()
        if (name not in never and trees.decide(waits[name], trees.parse(kinds))) != waited
    ]
    assert not wrong and len(waits) > 40 and len(never) > 500


def test_each_line_of_code_waits_as_it_did_on_the_card() -> None:
    wrong: list[str] = []
    probes = (SimulationProbe(),)
    with syncs.record(probes=probes), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, form in FORMS.items():
            things = Things()
            with syncs.record(probes=probes) as log:
                if name in RAISE:
                    with pytest.raises(RuntimeError, match=RAISE[name]):
                        form(things)
                    continue
                form(things)
            blocking = {str(finding.kind) for finding in log.findings} - {"pageable"}  # the driver may or may not block
            waited = any(call.startswith("cuda") for call in CARD["forms"][name])
            if waited != bool(blocking) and name not in SAID_ANYWAY:
                wrong.append(f"{name}: {CARD['forms'][name]} on the card, {sorted(blocking)} here")
    assert not wrong, "\n".join(wrong)


def make(kind: str) -> Any:
    """An argument of a kind that the record names."""
    if kind.startswith("["):
        return [make(part) for part in re.split(r",(?![^\[]*\])", kind[1:-1])] if kind != "[]" else []
    place, *rest = kind.split(":")
    if place in ("cuda", "cpu", "pinned") and len(rest) > 1:
        dims = int(rest[1][:-1])
        sizes = [0 if "empty" in rest else 4] * min(dims, 1) + [4] * (dims - 1)
        dtype = getattr(torch, rest[0])
        strided = "strided" in rest and dims
        made = torch.zeros([*sizes[:-1], 8], dtype=dtype)[..., ::2] if strided else torch.zeros(sizes, dtype=dtype)
        return SimTensor(made) if place == "cuda" else made
    literal = {"True": True, "False": False, "None": None, "int": 1, "float": 1.0}
    return literal.get(kind, kind)


@pytest.mark.parametrize("name", HAND)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_rules_by_hand_repeat_the_record(name: str) -> None:
    _, packet, overload = name.split(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload)
    wrong: list[str] = []
    with syncs.record(probes=(SimulationProbe(),)):
        for kinds, waited in CARD["ops"][name].items():
            found = trees.parse(kinds)
            args = tuple(make(kind) for key, kind in found.items() if key.isdigit())
            kwargs = {key: make(kind) for key, kind in found.items() if not key.isdigit()}
            if packet in COPIES:
                seen = copied(packet, args, kwargs, "pinned" in kinds)
            else:
                seen = wait_of(operation, args, kwargs) is not None
            if seen != waited and "3d; [cpu:bool:1d]" not in kinds:  # those masks had more dimensions than are kept
                wrong.append(f"{kinds}: {waited} on the card")
    assert not wrong, "\n".join(wrong)


def copied(packet: str, args: tuple[Any, ...], kwargs: dict[str, Any], pinned: bool) -> bool:
    """Whether a copy blocks; pageable ones are another matter."""
    if packet == "copy_":
        target, source, non_blocking = args[0], args[1], len(args) > 2 and bool(args[2])
    else:
        source, non_blocking = args[0], bool(kwargs.get("non_blocking"))
        up = str(kwargs.get("device", "cuda" if isinstance(source, SimTensor) else "cpu")).startswith("cuda")
        target = SimTensor(torch.zeros(source.shape)) if up else torch.zeros(source.shape)
    return copy_wait(source, target, pinned, non_blocking) not in (None, syncs.Kind.PAGEABLE)


def test_kinds_are_told_alike_here_and_on_the_card() -> None:
    with syncs.record(probes=(SimulationProbe(),)):
        x = torch.zeros(2, 3, device="cuda")
        host = torch.zeros(4).pin_memory()
        told = kinds_of((x, x[:, ::2], host, torch.zeros(0), [1, 2], None, True), {"dim": 1})
    assert (
        told
        == "cuda:float32:2d; cuda:float32:2d:strided; pinned:float32:1d; cpu:float32:1d:empty; [int,int]; None; True; dim=int"
    )


def test_trees_come_out_of_a_record() -> None:
    examples = {
        "cuda:float32:2d; int": {"cudaStreamSynchronize": 3},
        "cuda:float32:2d; int; int": {"none": 2},
        "cuda:int64:1d:empty; int": {"none": 1},
        "cuda:int64:1d; int": {"cudaStreamSynchronize": 1, "none": 1},
    }
    made = syncs_rules.table(
        {"torch": "x", "card": "y", "ops": {"aten.histc.default": examples, "aten.add.Tensor": {}}}
    )
    tree = made["waits"]["aten.histc.default"]
    for kinds, counts in examples.items():
        assert trees.decide(tree, trees.parse(kinds)) == syncs_rules.waited(counts)
    assert made["never"] == {"aten": ["aten.add.Tensor"]}
