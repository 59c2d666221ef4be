"""A device that executes plans to the letter and notices every misuse of a slot or a block.

The KV of position p stands for everything it depends on: it is a hash chain over tokens 0..p. A row writes its
positions, then every position up to its last is read back through the slot's block table and must be the one that the
slot's own tokens give. A stale, recycled, unwritten or foreign block therefore cannot go unnoticed.

Where it has states, a slot's is that of the tokens computed so far, and only there can a row begin: what it was copied from
must have been the state behind the same tokens.

Where the configuration has rows of drafts, the device guesses them, rightly or wrongly by a seed, writes the KV of all and
keeps the tokens up to the first wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from random import Random

import numpy as np

from headway.core.cache import CacheKind
from headway.core.config import SchedulerConfig
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams
from headway.core.plan import Finish, LogprobsResult, StepPlan, StepResult

VOCAB = 11
EOS = 3
MASK = (1 << 61) - 1


def chain(parent: int, token: int) -> int:
    return (parent * 1_000_003 + token + 17) * 2_654_435_761 & MASK


def next_token(message: AddRequest, state: int, num_generated: int) -> int:
    token = (chain(state, message.seed) >> 13) % VOCAB
    blocked = num_generated < message.params.min_tokens
    return (token + 1) % VOCAB if blocked and token == EOS else token


def make_request(name: str, prompt: list[int], max_tokens: int, **params: object) -> AddRequest:
    ignore_eos = bool(params.get("ignore_eos", False))
    salt, seed = params.pop("cache_salt", None), params.pop("seed", 0)
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return AddRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=sampling,
        seed=seed,  # type: ignore[arg-type]
        eos_token_ids=[] if ignore_eos else [EOS],
        cache_salt=salt,  # type: ignore[arg-type]
    )


def finish_code(message: AddRequest, token: int, num_generated: int) -> Finish:
    stop_ids = message.params.stop_token_ids or []
    if num_generated > message.params.min_tokens:
        if token in message.eos_token_ids:
            return Finish.EOS
        if token in stop_ids:
            return Finish.STOP_TOKEN
    assert message.params.max_tokens is not None
    return Finish.LENGTH if num_generated >= message.params.max_tokens else Finish.NONE


def predict(message: AddRequest) -> tuple[list[int], Finish]:
    """The tokens a request gets, whatever shares its batch."""
    state = 0
    for token in message.prompt_token_ids:
        state = chain(state, token)
    out: list[int] = []
    while True:
        out.append(next_token(message, state, len(out)))
        state = chain(state, out[-1])
        code = finish_code(message, out[-1], len(out))
        if code:
            return out, code


@dataclass
class Slot:
    message: AddRequest
    tokens: list[int]
    num_computed: int
    alive: bool = True
    ended_by_length: bool = False
    tables: dict[tuple[int, int], int] = field(default_factory=dict)
    """(group, index) -> block"""

    def states(self, drafts: Sequence[int] = ()) -> list[int]:
        out, state = [], 0
        for token in (*self.tokens, *drafts):
            state = chain(state, token)
            out.append(state)
        return out


class FakeDevice:
    def __init__(self, config: SchedulerConfig, acceptance: float = 0.5) -> None:
        self.config = config
        self.rng, self.acceptance = Random(7), acceptance
        self.slots: dict[int, Slot] = {}
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}
        self.log: list[StepPlan] = []
        self.width = config.width
        """Tokens that the next step's decode rows shall have, those of requests with drafts."""
        self.states: dict[int, int] = {}
        """By slot of the pool of states: requests' first, then checkpoints."""

    def run(self, plan: StepPlan) -> StepResult:
        self._check_shape(plan)
        self.log.append(plan)
        for admission in plan.admissions:
            self.slots[admission.slot] = Slot(admission.request, admission.token_ids.tolist(), admission.num_computed)
        for row, index, block in zip(
            plan.block_edit_rows.tolist(),
            plan.block_edit_indices.tolist(),
            plan.block_edit_ids.tolist(),
            strict=True,
        ):
            group, slot = divmod(row, self.config.max_num_seqs)
            lowest = 0 if self.config.groups[group].window else 1  # blocks behind a window are given back
            assert lowest <= block < self.config.num_blocks
            assert 0 <= index < self.config.max_blocks_per_seq
            self.slots[slot].tables[group, index] = block
        decoding = [(row, self.slots[int(plan.slots[row])]) for row in range(plan.num_decode_rows)]
        drafts = {row: self._draft(slot, int(plan.query_lens[row]) - 1) for row, slot in decoding if slot.alive}
        self._write(plan, drafts)
        if not self.config.has_states:
            assert not plan.state_loads and not plan.state_saves
            return self._sample(plan, drafts)
        self._load_states(plan)
        rows = self._spans(plan)
        result = self._sample(plan, drafts)
        for row, slot, _, _ in rows:
            self.states[int(plan.slots[row])] = slot.states()[slot.num_computed - 1]
        for source, checkpoint in plan.state_saves:
            assert source in plan.slots and self._is_checkpoint(checkpoint)
            self.states[checkpoint] = self.states[source]
        return result

    def _load_states(self, plan: StepPlan) -> None:
        """What checkpoints held before this step; then each row begins where its slot's state ends."""
        for checkpoint, slot in plan.state_loads:
            assert self._is_checkpoint(checkpoint) and slot in {each.slot for each in plan.admissions}
            self.states[slot] = self.states[checkpoint]
        for row, found, start, _ in self._spans(plan):
            assert not start or self.states[int(plan.slots[row])] == found.states()[start - 1], "foreign state"

    def _is_checkpoint(self, slot: int) -> bool:
        return self.config.max_num_seqs <= slot < self.config.max_num_seqs + self.config.num_checkpoints

    def _check_shape(self, plan: StepPlan) -> None:
        n = plan.num_rows
        assert n == len(plan.query_lens) == len(plan.starts_bound) == len(plan.samples) == len(plan.owners) > 0
        assert n <= self.config.max_num_seqs and plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(set(plan.slots.tolist())) == n and plan.query_lens.min() >= 1
        assert plan.step == len(self.log)
        for array in (plan.slots, plan.query_lens, plan.starts_bound, plan.block_edit_ids):
            assert array.dtype == np.int32
        assert {a.slot for a in plan.admissions} <= set(plan.slots.tolist())
        assert sum(len(a.token_ids) for a in plan.admissions) <= self.config.max_upload_ints
        decode = slice(0, plan.num_decode_rows)
        for slot, count in zip(plan.slots[decode].tolist(), plan.query_lens[decode].tolist(), strict=True):
            message = self.slots[slot].message
            alone = message.params.disable_spec_decode or message.host_grammar is not None
            assert count == (1 if alone else self.width) <= plan.width
        assert plan.samples[decode].all()
        admitted = {a.slot: a for a in plan.admissions}
        for slot in plan.slots[decode].tolist():
            assert slot not in admitted
        before = self.log[-1] if self.log else None
        if before is not None and plan.slots is before.slots:
            assert n == plan.num_decode_rows == before.num_decode_rows and list(plan.owners) == list(before.owners)

    def _spans(self, plan: StepPlan) -> list[tuple[int, Slot, int, int]]:
        out: list[tuple[int, Slot, int, int]] = []
        for row, number in enumerate(plan.slots.tolist()):
            slot = self.slots[number]
            start, count, bound = slot.num_computed, int(plan.query_lens[row]), int(plan.starts_bound[row])
            assert bound >= start, "a bound below the truth"
            if slot.alive:
                if row < plan.num_decode_rows:
                    assert start + 1 == len(slot.tokens) and plan.samples[row]
                    assert bound - start <= (self.config.width - 1) * len(self.log)
                else:
                    assert bound == start and start + count <= len(slot.tokens)
                    assert bool(plan.samples[row]) == (start + count == len(slot.tokens))
                out.append((row, slot, start, count))
            else:
                assert self.config.width > 1 or not slot.ended_by_length, (
                    "the host knows max_tokens: such a row is waste"
                )
        return out

    def _draft(self, slot: Slot, number: int) -> list[int]:
        """Tokens that may follow the slot's, each right with the device's probability."""
        drafts: list[int] = []
        for _ in range(number):
            before = len(slot.tokens) + len(drafts) - len(slot.message.prompt_token_ids)
            token = next_token(slot.message, slot.states(drafts)[-1], before)
            drafts.append(token if self.rng.random() < self.acceptance else (token + 1) % VOCAB)
        return drafts

    def _write(self, plan: StepPlan, drafts: dict[int, list[int]]) -> None:
        spans, bs = self._spans(plan), self.config.block_size
        written: set[tuple[int, int]] = set()
        for row, slot, start, count in spans:
            states = slot.states(drafts.get(row, ()))
            for p, group in product(range(start, start + count), range(len(self.config.groups))):
                at = (slot.tables[group, p // bs], p % bs)
                assert at[0] and at not in written, "two rows write one place"
                written.add(at)
                self.kv[at] = (p, states[p])
        for row, slot, start, count in spans:
            states = slot.states(drafts.get(row, ()))
            for group, p in self._read(start, count):
                at = (slot.tables[group, p // bs], p % bs)
                assert at[0] and self.kv.get(at) == (p, states[p]), "foreign KV"
                early = row < plan.num_decode_rows and p < start
                assert not (early and at in written), (
                    "decode attention reads stored KV before the step's writes have landed"
                )

    def _read(self, start: int, count: int) -> Iterator[tuple[int, int]]:
        """(group, position) that a row reads."""
        for number, group in enumerate(self.config.groups):
            first = max(start - group.window + 1, 0) if group.window else 0
            first = start // group.window * group.window if group.kind is CacheKind.CHUNK else first
            for p in range(first, start + count):
                yield number, p

    def _sample(self, plan: StepPlan, drafts: dict[int, list[int]]) -> StepResult:
        n, width = plan.num_rows, plan.width
        counts, token_ids, finish = np.zeros(n, np.int32), np.zeros((n, width), np.int32), np.zeros(n, np.int32)
        prompt_logprobs: dict[int, LogprobsResult] = {}
        told = np.zeros((n, width), np.int32)
        for row, slot, start, count in self._spans(plan):
            message, prompt = slot.message, slot.message.prompt_token_ids
            slot.num_computed = start + (1 if row < plan.num_decode_rows else count)
            if message.params.prompt_logprobs is not None and start + 1 < len(prompt):
                prompt_logprobs[row] = fake_logprobs(prompt[start + 1 : min(start + 1 + count, len(prompt))])
            if not plan.samples[row]:
                continue
            guesses = [*drafts.get(row, ()), -1]  # behind the last draft there is none
            for place, guess in enumerate(guesses):
                before = len(slot.tokens) - len(prompt)
                token = next_token(message, slot.states()[-1], before)
                slot.tokens.append(token)
                code = finish_code(message, token, before + 1)
                counts[row], token_ids[row, place], finish[row] = place + 1, token, code
                told[row, place] = 1 if message.params.logprobs is not None else 0
                slot.alive, slot.ended_by_length = not code, code is Finish.LENGTH
                if code or token != guess:
                    break
                slot.num_computed += 1
        logprobs = None
        if told.any():
            logprobs = fake_logprobs(token_ids.reshape(-1).tolist())
            logprobs.counts = told.reshape(-1)
        return StepResult(counts, token_ids, finish, logprobs, prompt_logprobs)


def fake_logprobs(tokens: list[int]) -> LogprobsResult:
    n = len(tokens)
    ids = np.array(tokens, np.int32).reshape(n, 1)
    return LogprobsResult(ids, -ids.astype(np.float32), np.ones(n, np.int32), np.ones(n, np.int32))
