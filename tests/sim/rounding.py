"""Comparing two implementations of the same arithmetic: the oracle's C kernels and the simulated device's references.

Their logits differ in the last bits. Once in about a thousand random scenarios that swaps two tokens which are a millionth
apart, in a ranking or in a draw. A difference is forgiven only when it is shown to be such a tie; all others stay errors.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

from headway.core.messages import AddRequest
from tests.engine.harness import Answer
from tests.engine.test_depths import close
from tests.engine.tiny_llama import VOCAB

TOLERANCE = 1e-4
"""Of log-probabilities."""
NUDGE = 2e-5
"""Added to or taken from each logit when the oracle is asked again: more than rounding, far less than any mistake."""
NUM_NUDGES = 40
Row = tuple[list[int], list[float], int]
Oracle = Callable[[AddRequest], Answer]


def settle(answer: Answer, truth: Answer, request: AddRequest, oracle: Oracle) -> None:
    """Raise AssertionError unless the answers agree, ties apart.

    Args:
        oracle: answers one request; asked again, with nudged logits, when the tokens differ.
    """
    try:
        close(answer, truth, TOLERANCE)
    except AssertionError:
        if not _is_a_tie(answer, truth, request, oracle):
            raise


def settle_prefix(answer: Answer, truth: Answer, request: AddRequest, oracle: Oracle) -> None:
    """The same for the tokens of a request that was aborted."""
    length = len(answer.token_ids)
    if answer.token_ids != truth.token_ids[:length]:
        assert length <= len(truth.token_ids) and _tokens_tie(answer, truth, request, oracle), request.request_id


def _is_a_tie(mine: Answer, theirs: Answer, request: AddRequest, oracle: Oracle) -> bool:
    if mine.error or theirs.error or len(mine.prompt_logprobs) != len(theirs.prompt_logprobs):
        return False
    rows = [*zip(mine.prompt_logprobs, theirs.prompt_logprobs, strict=True)]
    agreed = _agreed(mine.token_ids, theirs.token_ids)
    rows += zip(mine.logprobs[:agreed], theirs.logprobs[:agreed], strict=True)
    if not all(rows_tie(left, right) for left, right in rows):
        return False
    if mine.token_ids != theirs.token_ids:
        return _tokens_tie(mine, theirs, request, oracle)
    return (mine.finish_reason, mine.stop_token_id) == (theirs.finish_reason, theirs.stop_token_id)


def rows_tie(mine: Row, theirs: Row) -> bool:
    """Whether two rows of log-probabilities are equal but for the order of equal ones."""
    (ids, values, rank), (other_ids, other_values, other_rank) = mine, theirs
    if len(ids) != len(other_ids) or ids[:1] != other_ids[:1] or abs(rank - other_rank) > 1:
        return False
    if any(abs(left - right) > TOLERANCE for left, right in zip(values, other_values, strict=True)):
        return False
    known = dict(zip(other_ids, other_values, strict=True))
    last = other_values[-1]  # a token that the other list lacks must be as likely as the last one on it
    return all(abs(value - known.get(token, last)) <= TOLERANCE for token, value in zip(ids, values, strict=True))


def _agreed(mine: list[int], theirs: list[int]) -> int:
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(mine), len(theirs)))


def _tokens_tie(mine: Answer, theirs: Answer, request: AddRequest, oracle: Oracle) -> bool:
    """Whether the oracle draws ``mine``'s first differing token when its logits are nudged a little."""
    place = _agreed(mine.token_ids, theirs.token_ids)
    if place >= min(len(mine.token_ids), len(theirs.token_ids)):
        return False  # one goes on where the other ends: that is no matter of logits
    rng = random.Random(place)
    return any(
        oracle(_nudged(request, rng)).token_ids[: place + 1] == mine.token_ids[: place + 1] for _ in range(NUM_NUDGES)
    )


def _nudged(request: AddRequest, rng: random.Random) -> AddRequest:
    nudged = copy.deepcopy(request)
    bias = dict(request.params.logit_bias or {})
    nudged.params.logit_bias = {token: bias.get(token, 0.0) + rng.uniform(-NUDGE, NUDGE) for token in range(VOCAB)}
    return nudged
