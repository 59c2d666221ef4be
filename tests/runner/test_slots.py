"""What a slot holds and what a step tells of it depend on the slot's present request alone: whoever owned it before, whatever
others are admitted beside it, however its prompt is cut, and whether it was preempted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from headway.core.automaton import MAX_TOKEN_BYTES, Vocabulary
from headway.core.chunks import CHUNK, CHUNKS_AT, LOADS_AT, SAVES_AT
from headway.core.hearing import Alignment
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.core.plan import Admission, Int32s, StepPlan
from headway.kernels.apply_edits import apply_edits
from headway.kernels.sample import MIN_P, PENALTIES, RANDOM, TOP, TWICE, WIDE, WIDE_K
from headway.kernels.suffix_draft import OFF, OWN, SHARED
from headway.runner.admission import MAX_STOP_IDS, AdmissionWriter
from headway.runner.config import RunnerConfig
from headway.runner.launch import Launch
from headway.runner.packer import Packer, _aligned_rows
from headway.sampling.sampler import Sampler, sampler_tables
from headway.state.media import MEDIA_ROWS, media_tables
from headway.state.packed_step import PackedRows, PackedStep
from headway.state.slots import DRAFT_SCOPE, SlotArena, core_tables
from tests.runner.test_admission import CASES, VOCAB

SLOTS, LENGTH, CPU = 4, 200, torch.device("cpu")
VALID: Mapping[str, Callable[[Callable[[str], Any]], int]] = {
    "history": lambda at: int(at("num_tokens")),
    "stop_ids": lambda at: int(at("stop_counts")[1]),
    "bias_ids": lambda at: int(at("bias_counts")), "bias_values": lambda at: int(at("bias_counts")),
    "allowed_bits": lambda at: 99 * int(at("allowed_on")),
    "bw_offsets": lambda at: int(at("bw_counts")) + 1 if at("bw_counts") else 0,
    "bw_tokens": lambda at: int(at("bw_offsets")[at("bw_counts")]),
    "lp_ids": lambda at: int(at("lp_counts")),
    **{name: lambda at: 99 * int(at("grammar_on")) for name in ("grammar_info", "grammar_table", "grammar_state")},
    "grammar_serial": lambda at: 0, "grammar_kept": lambda at: 0,  # their own business, see grammar_mask
    "media": lambda at: 2 + 6 * int(at("media")[0]), "media_rows": lambda at: 0,  # rows are told with each step
    "drafts": lambda at: 0, "block_table": lambda at: 0,
}  # fmt: skip
"""So many leading entries of a slot's row of a table mean something; of other tables all."""


class Slots:
    """The slot tables of an engine that drafts and sees."""

    def __init__(self) -> None:
        own = [*core_tables(LENGTH, 4, MAX_STOP_IDS, 2), *sampler_tables(VOCAB), *media_tables()]
        self.arena = SlotArena(own, SLOTS, CPU)
        self.names = [table.name for table in own]
        self.sampler = Sampler(self.arena, VOCAB)
        self.sampler.grammar.learn(Vocabulary.of(bytes([each]) for each in range(VOCAB)))
        self.writer = AdmissionWriter(self.arena, self.sampler)

    def admit(self, slot: int, request: AddRequest, tokens: Int32s) -> None:
        self.writer.prepare(request)
        one = np.array([slot], np.int32)
        plan = StepPlan(0, one, np.array([len(tokens)], np.int32), 0 * one, np.array([True]), 0)
        packed = PackedStep(np.zeros(400_000, np.int32), PackedRows(plan), 0)
        self.writer.write(packed, Admission(slot, request, tokens, 0))
        end = packed.finish()
        apply_edits(self.arena.ints, torch.from_numpy(packed._ints[:end]), packed.num_edits)

    def row(self, name: str, slot: int) -> torch.Tensor:
        return self.arena.view(name)[..., slot, :] if self.arena.view(name).dim() > 1 else self.arena.view(name)[slot]

    def meant(self, slot: int) -> dict[str, list[Any]]:
        """All that is true of a slot."""
        found = {}
        for name in self.names:
            row = self.row(name, slot).reshape(-1)
            most = VALID[name](lambda of: self.row(of, slot)) if name in VALID else len(row)
            found[name] = row[:most].tolist()
        return found


def asked(number: int, name: str, prompt: int = 90, **more: Any) -> AddRequest:
    params, fields = CASES[name]
    tokens = [ord("a") + (number + i) % 4 for i in range(prompt)]
    rest: dict[str, Any] = {"eos_token_ids": []} | fields | more
    return AddRequest(
        request_id=f"r{number}",
        prompt_token_ids=tokens,
        params=SamplingParams(max_tokens=9, **params),
        seed=number,
        **rest,
    )


SMALL = [name for name in CASES if name != "as many as there can be"]


@pytest.mark.parametrize("name", SMALL)
def test_a_slot_tells_nothing_of_its_former_owners(name: str) -> None:
    """Each request behind each other one, and behind all of them."""
    fresh, used = Slots(), Slots()
    mine = asked(1, name)
    tokens = np.array(mine.prompt_token_ids, np.int32)
    fresh.admit(2, mine, tokens)
    for number, before in enumerate(SMALL):
        other = asked(10 + number, before, prompt=120)
        used.admit(2, other, np.array(other.prompt_token_ids, np.int32))
        neighbour = used.meant(2)
        used.admit(3, mine, tokens)
        assert used.meant(2) == neighbour, "a neighbour's tables changed"
        used.admit(2, mine, tokens)
        for table, wanted in fresh.meant(2).items():
            if table != "allowed_bits" or mine.host_grammar is None:  # else they come with each step that draws
                assert used.meant(2)[table] == wanted, (before, table)
        slots = np.array([2], np.int32)
        assert used.sampler.variant(slots) == fresh.sampler.variant(slots), before
        used.writer.forget(mine.request_id)


@pytest.mark.parametrize(("off", "grammar", "salt"), [*itertools.product((False, True), (None, "g"), (None, "s"))])
def test_where_guesses_may_come_from(off: bool, grammar: str | None, salt: str | None) -> None:
    request = asked(0, "plain", host_grammar=grammar, cache_salt=salt)
    request.params.disable_spec_decode = off
    slots = Slots()
    slots.admit(1, request, np.array(request.prompt_token_ids, np.int32))
    wanted = OFF if off or grammar is not None else SHARED if salt is None else OWN
    assert int(slots.row(DRAFT_SCOPE, 1)) == wanted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("penalty", [0.0, -0.5])
def test_a_request_asks_for_the_paths_that_its_parameters_need(temperature: float, penalty: float) -> None:
    """By what the flags are said to mean, for every mixture of filters on both sides of where one path ends."""
    sampler = Slots().sampler
    for top_k, top_p, min_p in itertools.product((0, 1, WIDE_K, WIDE_K + 1), (1.0, 0.5), (0.0, 0.1)):
        params: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "presence_penalty": penalty,
        }
        request = asked(0, "plain")
        request.params = SamplingParams(max_tokens=9, **params)
        wanted = PENALTIES if penalty else 0
        if temperature:
            wanted |= RANDOM | (TOP if top_k or top_p < 1 else 0) | (MIN_P if min_p else 0)
            wide = not 0 < top_k <= WIDE_K and (top_k > WIDE_K or top_p < 1 or min_p > 0)
            wanted |= (WIDE if wide else 0) | (TWICE if top_k > WIDE_K and top_p < 1 else 0)
        assert sampler.draw.flags(request) == wanted, params


def test_tokens_that_grammars_know_are_those_that_fit() -> None:
    """Of no bytes, of one, of the most, and of one more; ids beyond the model's are dropped."""
    sampler = Slots().sampler
    lengths = [0, 1, MAX_TOKEN_BYTES - 1, MAX_TOKEN_BYTES, MAX_TOKEN_BYTES + 1]
    texts = [bytes(range(65, 65 + length)) for length in lengths] + [b"x"] * VOCAB
    learned = sampler.grammar.learn(Vocabulary.of(texts)).reshape(-1, VOCAB)
    assert learned[-1, : len(lengths)].tolist() == [0, 1, MAX_TOKEN_BYTES - 1, MAX_TOKEN_BYTES, 0]
    for token, length in enumerate(learned[-1].tolist()):
        words = np.ascontiguousarray(learned[:-1, token]).tobytes()
        assert words[:length] == (texts[token] if length else b"") and not any(words[length:])


# -- steps ------------------------------------------------------------------------------------------------------------


def packer() -> Packer:
    arena = SlotArena([*core_tables(LENGTH, 4, MAX_STOP_IDS), *sampler_tables(VOCAB)], SLOTS, CPU)
    sizes: dict[str, Any] = {"max_num_seqs": SLOTS, "max_num_batched_tokens": 99, "max_model_len": LENGTH}
    config = RunnerConfig(
        **sizes, block_size=16, vocab_size=VOCAB, max_logprobs=9, max_upload_ints=40_000, max_in_flight=3
    )
    return Packer(arena, Sampler(arena, VOCAB), config)


def listed(launch: Launch, at: int, number: int) -> list[int]:
    return launch.ints[at : at + number].tolist()


def wanted_of(plan: StepPlan, requests: list[AddRequest]) -> list[tuple[int, int, int, int]]:
    """Row, its slot, a token of the step, and the prompt's token behind it, of each position that is asked for."""
    found, first = [], 0
    for row, request in enumerate(requests):
        start, count = int(plan.starts_bound[row]), int(plan.query_lens[row])
        for place in range(start, start + count):
            if request.params.prompt_logprobs is not None and place + 1 < len(request.prompt_token_ids):
                target = request.prompt_token_ids[place + 1]
                found.append((row, int(plan.slots[row]), first + place - start, target))
        first += count
    return found


def steps(rng: random.Random) -> Iterator[tuple[StepPlan, list[AddRequest]]]:
    """Steps in which requests begin, go on in chunks, end, and begin again behind what they had generated."""
    rows: dict[int, tuple[AddRequest, int, int]] = {}  # slot -> request, tokens done, tokens known
    for step in range(40):
        for slot in [slot for slot in rows if rng.random() < 0.25]:
            del rows[slot]
        fresh = []
        for slot in rng.sample(
            [slot for slot in range(SLOTS) if slot not in rows], k=rng.randrange(SLOTS - len(rows) + 1)
        ):
            params: dict[str, Any] = {"prompt_logprobs": rng.choice([None, None, 0, 2, 5])}
            params |= rng.choice(
                [{}, {"presence_penalty": 0.5}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.2}]
            )
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            more = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 3]))]
            request = AddRequest(
                request_id=f"{step}-{slot}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=9, **params),
                seed=0, eos_token_ids=[],
            )  # fmt: skip
            done = rng.choice([0, 0, len(prompt) // 2]) if params["prompt_logprobs"] is None else 0
            fresh.append(Admission(slot, request, np.array([*prompt, *more], np.int32), done))
            rows[slot] = request, done, len(prompt) + len(more)
        order = sorted(rows, key=lambda slot: rows[slot][1] < rows[slot][2])  # rows that decode come first
        lens = [max(1, rng.randint(1, max(1, rows[slot][2] - rows[slot][1]))) for slot in order]
        starts, decodes = [rows[slot][1] for slot in order], sum(rows[slot][1] >= rows[slot][2] for slot in order)
        for slot, count in zip(order, lens, strict=True):
            request, done, known = rows[slot]
            rows[slot] = request, done + count, known
        if order:
            plan = StepPlan(
                step, np.array(order, np.int32), np.array(lens, np.int32), np.array(starts, np.int32),
                np.array([rows[slot][1] >= rows[slot][2] for slot in order]), decodes,
            )  # fmt: skip
            plan.admissions = fresh
            yield plan, [rows[slot][0] for slot in order]


@pytest.mark.parametrize("seed", range(6))
def test_what_a_step_says_of_prompts_and_counts(seed: int) -> None:
    subject, seen = packer(), [0, 0, 0]
    for plan, requests in steps(random.Random(seed)):
        for each in plan.admissions:
            subject.admissions.prepare(each.request)
        launch = subject.pack(plan, np.full(60_000, -3, np.int32))
        subject.launched(plan)
        penalised = [
            each.slot
            for each in plan.admissions
            if (each.request.params.presence_penalty, each.request.params.frequency_penalty) != (0.0, 0.0)
            or each.request.params.repetition_penalty != 1.0
        ]
        assert listed(launch, launch.counted_at, launch.num_counted) == penalised
        assert launch.edits_first >= bool(penalised), "counts are made of what the edits write"
        wanted = wanted_of(plan, requests)
        assert (launch.prompt is not None) == bool(wanted)
        if launch.prompt is not None:
            prompt = launch.prompt
            places = [
                listed(launch, at, prompt.total) for at in (prompt.indices_at, prompt.targets_at, prompt.slots_at)
            ]
            rows = [row for row, count in prompt.rows for _ in range(count)]
            told = list(zip(rows, places[2], places[0], places[1], strict=True))
            assert told == wanted
            most = max(requests[row].params.prompt_logprobs or 0 for row, _, _, _ in wanted)
            assert prompt.entries == most
            seen[0] += 1
            seen[1] += len({requests[row].params.prompt_logprobs for row in rows}) > 1
        seen[2] += len(penalised) > 1
        longest = int((plan.starts_bound + plan.query_lens).max())
        assert launch.max_seq_len_bound >= longest
    assert min(seen[0], seen[2]) > 0, "the steps were meant to have all of it"


def with_changes(plan: StepPlan, rng: random.Random) -> StepPlan:
    """The plan with blocks, masks, pictures and copies of states; no place is named twice."""
    slots = sorted(plan.slots.tolist())
    entries = rng.sample([(slot, index) for slot in slots for index in range(4)], k=rng.randrange(3 * len(slots)))
    if entries:
        rows, indices = zip(*entries, strict=True)
        plan.block_edit_rows, plan.block_edit_indices = np.array(rows, np.int32), np.array(indices, np.int32)
        plan.block_edit_ids = np.array([rng.randrange(1, 99) for _ in entries], np.int32)
    words = -(-VOCAB // 32)
    plan.masks = [
        (slot, np.array([rng.randrange(2**31) for _ in range(words)], np.int32)) for slot in slots[: rng.randrange(3)]
    ]
    plan.media_rows = [(slot, rng.randrange(9), rng.randrange(500)) for slot in slots[rng.randrange(2) :]]
    plan.state_loads = [(SLOTS + n, slot) for n, slot in enumerate(rng.sample(slots, k=rng.randrange(len(slots) + 1)))]
    plan.state_saves = [(slot, SLOTS + 9 + n) for n, slot in enumerate(slots[: rng.randrange(3)])]
    return plan


@pytest.mark.parametrize("seed", range(4))
def test_all_that_a_plan_changes_is_sent_and_nothing_else(seed: int) -> None:
    """The tables on a device that applies each step's edits, beside tables that are kept by hand."""
    own = [*core_tables(LENGTH, 4, MAX_STOP_IDS), *sampler_tables(VOCAB), *media_tables()]
    arena, rng = SlotArena(own, SLOTS, CPU), random.Random(seed)
    config = RunnerConfig(
        max_num_seqs=SLOTS, max_num_batched_tokens=99, max_model_len=LENGTH, block_size=16, vocab_size=VOCAB,
        max_logprobs=9, max_upload_ints=40_000, max_in_flight=3, has_states=True,
    )  # fmt: skip
    subject = Packer(arena, Sampler(arena, VOCAB), config)
    kept = {name: arena.view(name).clone() for name in ("block_table", "allowed_bits", MEDIA_ROWS)}
    copied = 0
    for step, (plan, _) in enumerate(steps(rng)):
        plan = with_changes(plan, rng)
        for each in plan.admissions:
            subject.admissions.prepare(each.request)
        launch = subject.pack(plan, np.full(60_000, -3, np.int32))
        subject.launched(plan)
        assert launch.index == (step + 1) % 3 == launch.ints[5] and len(launch.ints) <= 60_000
        for slot, index, block in zip(plan.block_edit_rows, plan.block_edit_indices, plan.block_edit_ids, strict=True):
            kept["block_table"][slot, index] = int(block)
        for slot, words in plan.masks:
            kept["allowed_bits"][slot, : len(words)] = torch.from_numpy(words)
        for slot, run, row in plan.media_rows:
            kept[MEDIA_ROWS][slot, run] = row
        apply_edits(arena.ints, torch.from_numpy(launch.ints.copy()), launch.num_edits)
        assert launch.edits_first >= bool(plan.masks)
        for name, wanted in kept.items():
            assert torch.equal(arena.view(name), wanted), name
        if launch.shape.only_decode:
            assert not launch.ints[[CHUNKS_AT + 1, LOADS_AT + 1, SAVES_AT + 1]].any(), "nothing begins or ends there"
            continue
        for at, pairs in ((LOADS_AT, plan.state_loads), (SAVES_AT, plan.state_saves)):
            place, number = launch.ints[at : at + 2].tolist()
            assert number == len(pairs) and listed(launch, place, 2 * number) == [
                each for pair in pairs for each in pair
            ]
            copied += number
        place, number = launch.ints[CHUNKS_AT : CHUNKS_AT + 2].tolist()
        lengths = enumerate(plan.query_lens.tolist())
        chunks = [(row, n) for row, length in lengths if length > 1 for n in range(-(-length // CHUNK))]
        assert listed(launch, place, 2 * number) == [each for chunk in chunks for each in chunk]
    assert copied > 5


def test_where_prompts_lie_that_are_placed_in_a_recording() -> None:
    """Between rows that decode and prompts that nobody asks about."""
    rng = random.Random(5)
    for _ in range(40):
        lens = [rng.randrange(1, 6) for _ in range(SLOTS)]
        slots = np.array(rng.sample(range(SLOTS), SLOTS), np.int32)
        plan = StepPlan(0, slots, np.array(lens, np.int32), np.zeros(SLOTS, np.int32), np.ones(SLOTS, np.bool_), 0)
        wanted = []
        for row, (slot, length) in enumerate(zip(slots.tolist(), lens, strict=True)):
            if rng.random() < 0.7:
                request = asked(row, "plain", prompt=length)
                request.align = (
                    Alignment(first=rng.randrange(9), frames=rng.randrange(1, 99)) if rng.random() < 0.7 else None
                )
                plan.admissions.append(Admission(slot, request, np.array(request.prompt_token_ids, np.int32), 0))
                if request.align is not None:
                    begin, align = sum(lens[:row]), request.align
                    wanted.append((row, (slot, begin, begin + length, align.first, align.frames)))
        found = packer().pack(plan, np.full(60_000, -3, np.int32)) if not plan.admissions else None
        rows = _aligned_rows(plan)
        assert [(row, tuple(each)) for row, each in rows] == wanted
        assert found is None or not found.aligned


def drawn_params(rng: random.Random) -> dict[str, Any]:
    """Any parameters, with values at which something begins or ends among them."""
    found: dict[str, Any] = {
        "temperature": rng.choice([0.0, 1e-6, 1e-5, 0.7, 100.0]), "top_k": rng.choice([0, -1, 1, 50, 2**31 - 1]),
        "top_p": rng.choice([1.0, 0.5, 1e-6]), "min_p": rng.choice([0.0, 0.1, 1.0]),
        "presence_penalty": rng.choice([0.0, -2.0, 0.5]), "frequency_penalty": rng.choice([0.0, 2.0, -0.5]),
        "repetition_penalty": rng.choice([1.0, 0.5, 100.0]), "min_tokens": rng.choice([0, 1, 9]),
        "max_tokens": rng.choice([9, 20]),
        "logprobs": rng.choice([None, 0, 5]), "prompt_logprobs": rng.choice([None, 0, 3]),
        "logit_bias": rng.choice([None, {}, {3: -100.0}, {VOCAB - 1: 0.25, 0: 100.0}]),
        "allowed_token_ids": rng.choice([None, [0], [VOCAB - 1, 31, 32], list(range(VOCAB))]),
        "stop_token_ids": rng.choice([[], [5], [6, 7, VOCAB - 1]]),
        "logprob_token_ids": rng.choice([None, None, [8], [9, 0, 9]]),
    }  # fmt: skip
    return found


@pytest.mark.parametrize("seed", range(4))
def test_every_parameter_is_in_the_slot_as_it_was_asked_for(seed: int) -> None:
    rng, subject, slot = random.Random(seed), Slots(), 1
    for number in range(60):
        params = SamplingParams(**drawn_params(rng))
        eos, words = rng.choice([[], [1], [1, 2]]), rng.choice([[], [[4]], [[4, 5], [6, 7, 8], [9]]])
        prompt, more = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))], [1] * rng.choice([0, 0, 3])
        seed_of = rng.choice([0, 1, 2**32 - 1, 2**63, 2**64 - 1])
        request = AddRequest(
            request_id=str(number), prompt_token_ids=prompt, params=params, seed=seed_of, eos_token_ids=eos,
            bad_words_token_ids=words,
        )  # fmt: skip
        subject.admit(slot, request, np.array(prompt + more, np.int32))
        held, stops, bias = subject.meant(slot), [*eos, *(params.stop_token_ids or [])], params.logit_bias or {}
        chosen = params.logprob_token_ids or []
        penalised = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
        ends = np.cumsum([0, *map(len, words)]).tolist()
        wanted: dict[str, Any] = {
            "history": prompt + more, "num_tokens": [len(prompt) + len(more)], "num_computed": [0], "prompt_len": [len(prompt)],
            "alive": [1], "min_total": [len(prompt) + params.min_tokens], "max_total": [len(prompt) + (params.max_tokens or 0)],
            "stop_counts": [len(eos), len(stops)], "stop_ids": stops, "top_k": [params.top_k], "count_on": [int(penalised)],
            "num_logprobs": [(0 if chosen else -1) if params.logprobs is None else params.logprobs],
            "num_prompt_logprobs": [-1 if params.prompt_logprobs is None else params.prompt_logprobs],
            "lp_counts": [len(chosen)], "lp_ids": chosen, "bias_counts": [len(bias)], "bias_ids": [*bias],
            "bias_values": [*bias.values()], "allowed_on": [int(params.allowed_token_ids is not None)],
            "bw_counts": [len(words)], "bw_offsets": ends if words else [], "bw_tokens": [t for each in words for t in each],
            "grammar_on": [0],
        }  # fmt: skip
        for name in ("temperature", "top_p", "min_p"):
            wanted[name] = [float(np.float32(getattr(params, name)))]
        for name in ("repetition", "frequency", "presence"):
            wanted[name] = [float(np.float32(getattr(params, f"{name}_penalty")))]
        for name, value in wanted.items():
            assert held[name] == value, name
        assert [word % 2**32 for word in held["seeds"]] == [seed_of % 2**32, seed_of >> 32]
        bits = np.array(held["allowed_bits"], np.int32).view(np.uint32)
        allowed = [token for token in range(32 * len(bits)) if int(bits[token // 32]) >> token % 32 & 1]
        assert allowed == sorted({*(params.allowed_token_ids or [])})
        variant = subject.sampler.variant(np.array([slot], np.int32))
        uses = (
            bool(bias),
            params.allowed_token_ids is not None,
            params.min_tokens > 0 and bool(stops),
            bool(words),
            False,
        )
        assert variant.edits == sum(used << bit for bit, used in enumerate(uses))
        assert variant.max_logprobs == (len(chosen) if chosen else -1 if params.logprobs is None else params.logprobs)
        assert (
            subject.sampler.logprobs.prompt_entries(np.array([slot], np.int32)).tolist()
            == wanted["num_prompt_logprobs"]
        )
        subject.writer.forget(request.request_id)
    assert subject.writer.num_prepared == 0
