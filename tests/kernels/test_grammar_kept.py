"""What a request's grammar leaves in its slot, and that the next one's mask is not the last one's."""

from __future__ import annotations

import torch

from headway.api.structured.compile import Task, compile_task
from headway.core.automaton import Automaton, Vocabulary
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.core.plan import NO_INTS
from headway.kernels.grammar_mask import grammar_mask
from headway.runner.admission import MAX_STOP_IDS
from headway.sampling.grammar import Grammar
from headway.sampling.sampler import Sampler, sampler_tables
from headway.state.slots import SlotArena, core_tables
from tests.kernels.guarded import DEVICE, run

TOKENS = [b"", *(bytes([byte]) for byte in range(97, 123)), b"ab", b"bc", b"cab"]


def compiled(pattern: str) -> Automaton:
    automaton = compile_task(Task("regex", pattern, bytes(range(256)))).automaton
    assert automaton is not None
    return automaton


def admit(arena: SlotArena, grammar: Grammar, slot: int, automaton: Automaton | None) -> None:
    request = AddRequest(
        request_id="", prompt_token_ids=[1], params=SamplingParams(), seed=0, eos_token_ids=[], automaton=automaton
    )
    for edit in [*grammar.stage(request), *grammar.restart(request, NO_INTS)]:
        at = arena.position(edit.table, slot)
        arena.ints[at : at + len(edit.values)] = torch.from_numpy(edit.values)


def test_a_slot_is_masked_by_the_grammar_it_has_now() -> None:
    """The kernel keeps masks, the reference none. All these automata are in state ``start`` of as many states."""
    arena = SlotArena([*core_tables(8, 4, MAX_STOP_IDS), *sampler_tables(len(TOKENS))], 2, torch.device("cpu"))
    grammar = Sampler(arena, len(TOKENS)).grammar
    grammar.vocabulary.view(-1).copy_(torch.from_numpy(grammar.learn(Vocabulary.of(TOKENS))))
    kernel = grammar_mask.implementation("cuda")
    for pattern in ("[ab]*", "[bc]*", None, "[ab]*", "[abc]*", "[ac]*"):
        for slot in (0, 1):
            admit(arena, grammar, slot, None if pattern is None else compiled(pattern))
            args: list[torch.Tensor] = [torch.zeros(2, len(TOKENS)), torch.tensor([0, 1], dtype=torch.int32)]
            view = arena.view
            names = ("grammar_on", "grammar_info", "grammar_state", "grammar_table")
            args += [*(view(name) for name in names), grammar.vocabulary]
            args += [view(name) for name in ("stop_counts", "stop_ids", "grammar_serial", "grammar_kept")]
            for _ in range(2):  # the second time by what was kept
                after, _ = run(grammar_mask, kernel, args, DEVICE)
                view("grammar_kept").copy_(after[10].view_as(view("grammar_kept")))
                expected = args[0].clone()
                grammar_mask.reference(expected, *args[1:])
                assert torch.equal(after[0], expected)
