"""Both sides of sizes that a tiny engine reaches only when they are set small: ``Thresholds``, and numbers that wrap."""

from __future__ import annotations

from headway.core.config import Thresholds
from headway.sampling.grammar import MAX_SERIAL
from tests.engine.harness import MakeEngine, request, run
from tests.engine.test_depths import FEATURES, close, requests_for
from tests.engine.tiny_grammars import PATTERN, automaton


def test_what_a_step_may_upload(make_engine: MakeEngine) -> None:
    """Enough for two newcomers a step; one that needs more than a step carries is refused, alone."""
    batch = requests_for(
        [FEATURES[name] for name in ("greedy", "top_k", "bad_words", "stop_token_ids", "logprobs")], seed=8
    )
    usual, small = make_engine(run_ahead=1), make_engine(run_ahead=1, thresholds=Thresholds(upload_ints=400))
    oracle, answers = run(usual, batch), run(small, batch)
    for request_id, answer in answers.items():
        close(answer, oracle[request_id])
    assert small.stats().num_steps > usual.stats().num_steps, "newcomers had to wait for each other"
    large = request("large", [1, 2], automaton=automaton("regex", PATTERN))
    assert run(usual, [large])["large"].error is None
    answers = run(small, [large, request("ordinary", [1, 2])])
    assert "carries 400" in str(answers["large"].error) and answers["ordinary"].error is None


def test_chunks_of_prompt_logits(make_engine: MakeEngine) -> None:
    """Prompts of one chunk less a position, of exactly one, of one more, and of several, alone and together in a step."""
    batch = [
        request(str(n), [(5 * n + i) % 97 for i in range(n)], prompt_logprobs=2, max_tokens=2)
        for n in (1, 5, 6, 7, 13, 30)
    ]
    oracle = run(make_engine(), batch)
    for most in (1, 5, 29):
        core = make_engine(thresholds=Thresholds(prompt_logits_chunk=most), max_num_batched_tokens=16)
        for request_id, answer in run(core, batch).items():
            close(answer, oracle[request_id])
            assert len(answer.prompt_logprobs) == int(request_id) - 1


def test_traces_are_a_ring(make_engine: MakeEngine) -> None:
    core = make_engine(thresholds=Thresholds(traced_steps=4))
    for most, kept in ((3, 3), (1, 4), (6, 4)):
        run(core, [request("a", [1, 2], max_tokens=most, ignore_eos=True)])
        numbers = [trace.step for trace in core.stats().recent_steps]
        assert len(numbers) == kept
        last = core.stats().num_steps - 1
        assert numbers == list(range(last - kept + 1, last + 1))


def test_serial_numbers_of_grammars_begin_again(make_engine: MakeEngine) -> None:
    core = make_engine(max_num_seqs=2)
    batch = [request(str(i), [i, 4], seed=i, automaton=automaton("regex", PATTERN), temperature=1.2) for i in range(6)]
    oracle = run(core, batch)
    grammar = core._runner.packer._sampler.grammar
    grammar._num_staged = MAX_SERIAL - 2
    for request_id, answer in run(core, batch).items():
        close(answer, oracle[request_id])
    assert 0 < grammar._num_staged < 10
