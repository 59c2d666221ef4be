"""A device that executes plans to the letter and notices every misuse of a slot or a block.

The KV of position p stands for everything it depends on: it is a hash chain over tokens 0..p. A row writes its
positions, then every position up to its last is read back through the slot's block table and must be the one that the
slot's own tokens give. A stale, recycled, unwritten or foreign block therefore cannot go unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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
    table: dict[int, int] = field(default_factory=dict)

    def states(self) -> list[int]:
        out, state = [], 0
        for token in self.tokens:
            state = chain(state, token)
            out.append(state)
        return out


class FakeDevice:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.slots: dict[int, Slot] = {}
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}
        self.log: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self._check_shape(plan)
        self.log.append(plan)
        for admission in plan.admissions:
            self.slots[admission.slot] = Slot(admission.request, admission.token_ids.tolist(), admission.num_computed)
        for slot, index, block in zip(
            plan.block_edit_slots.tolist(),
            plan.block_edit_indices.tolist(),
            plan.block_edit_ids.tolist(),
            strict=True,
        ):
            assert 0 < block < self.config.num_blocks
            assert 0 <= index < self.config.max_blocks_per_seq
            self.slots[slot].table[index] = block
        self._write(plan)
        return self._sample(plan)

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
        assert (plan.query_lens[decode] == 1).all() and plan.samples[decode].all()
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
                assert bound == start and start + count <= len(slot.tokens)
                assert bool(plan.samples[row]) == (start + count == len(slot.tokens))
                out.append((row, slot, start, count))
            else:
                assert not slot.ended_by_length, "the host knows max_tokens: such a row is waste"
        return out

    def _write(self, plan: StepPlan) -> None:
        spans, bs = self._spans(plan), self.config.block_size
        written: set[tuple[int, int]] = set()
        for _, slot, start, count in spans:
            states = slot.states()
            for p in range(start, start + count):
                at = (slot.table[p // bs], p % bs)
                assert at not in written, "two rows write one place"
                written.add(at)
                self.kv[at] = (p, states[p])
        for row, slot, start, count in spans:
            states = slot.states()
            for p in range(start + count):
                at = (slot.table[p // bs], p % bs)
                assert self.kv.get(at) == (p, states[p]), "foreign KV"
                early = row < plan.num_decode_rows and p < start
                assert not (early and at in written), (
                    "decode attention reads stored KV before the step's writes have landed"
                )

    def _sample(self, plan: StepPlan) -> StepResult:
        n = plan.num_rows
        sampled, token_ids, finish = np.zeros(n, np.bool_), np.zeros(n, np.int32), np.zeros(n, np.int32)
        prompt_logprobs: dict[int, LogprobsResult] = {}
        counts = np.zeros(n, np.int32)
        for row, slot, start, count in self._spans(plan):
            message, prompt = slot.message, slot.message.prompt_token_ids
            slot.num_computed = start + count
            if message.params.prompt_logprobs is not None and start + 1 < len(prompt):
                prompt_logprobs[row] = fake_logprobs(prompt[start + 1 : min(start + 1 + count, len(prompt))])
            if not plan.samples[row]:
                continue
            before = len(slot.tokens) - len(prompt)
            token = next_token(message, slot.states()[-1], before)
            slot.tokens.append(token)
            code = finish_code(message, token, before + 1)
            sampled[row], token_ids[row], finish[row] = True, token, code
            slot.alive, slot.ended_by_length = not code, code is Finish.LENGTH
            counts[row] = 1 if message.params.logprobs is not None else 0
        logprobs = None
        if counts.any():
            logprobs = fake_logprobs(token_ids.tolist())
            logprobs.counts = counts
        return StepResult(sampled, token_ids, finish, logprobs, prompt_logprobs)


def fake_logprobs(tokens: list[int]) -> LogprobsResult:
    n = len(tokens)
    ids = np.array(tokens, np.int32).reshape(n, 1)
    return LogprobsResult(ids, -ids.astype(np.float32), np.ones(n, np.int32), np.ones(n, np.int32))
