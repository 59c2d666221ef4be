"""``LLM.embed``, ``encode``, ``classify`` and ``score`` over an engine that tells what it was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway import LLM, InvalidRequestError, PoolingParams, RequestFailedError, UnknownParameterError
from headway.api.pooling import offline, texts
from headway.api.pooling.requests import PoolingProcessor
from headway.core.messages import PooledBatch
from headway.core.task import Task
from tests.api.pooling_core import CLS, MAX_LEN, SEP, WORDS, PoolingCore, install, vector, word_tokenizer


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def core(llm: LLM) -> PoolingCore:
    found = llm._client._core  # type: ignore[attr-defined]
    assert isinstance(found, PoolingCore)
    return found


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_embed_gives_vllms_outputs_and_no_lists_until_asked() -> None:
    with LLM("embed") as llm:
        outputs = llm.embed(["w1 w2", "w3"])
        assert [o.prompt_token_ids for o in outputs] == [[CLS, *ids("w1 w2"), SEP], [CLS, *ids("w3"), SEP]]
        assert [o.outputs.data.tolist() for o in outputs] == [vector(request) for request in core(llm).seen]
        assert outputs[0].outputs.embedding == vector(core(llm).seen[0]) and outputs[0].outputs.hidden_size == 8
        assert isinstance(outputs[0].outputs.data, np.ndarray) and outputs[0].outputs.data.dtype == np.float32
        assert [o.request_id for o in outputs] == ["0", "1"] and outputs[0].finished
        array = llm.embed(["w1 w2", "w3"], as_numpy=True)
        assert array.tolist() == [o.outputs.embedding for o in outputs]
        assert llm.embed([], as_numpy=True).shape == (0, 8) and llm.embed([]) == []


def test_every_form_of_prompt_and_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "PART_TEXTS", 3)
    prompts: list[Any] = [
        "w1",
        [2, 8, 3],
        np.array([2, 9, 3], np.int32),
        {"prompt": "w3"},
        {"prompt_token_ids": [2, 11, 3], "cache_salt": "s"},
        *(f"w{i}" for i in range(5, 40)),
    ]
    with LLM("embed") as llm:
        outputs = llm.embed(prompts)
        expected = [[CLS, 7 + i + 1, SEP] for i in range(5)] + [[CLS, 7 + i, SEP] for i in range(5, 40)]
        expected[3], expected[4], expected[1], expected[2] = [2, 10, 3], [2, 11, 3], [2, 8, 3], [2, 9, 3]
        assert [o.prompt_token_ids for o in outputs] == [[2, 8, 3], *expected[1:]]
        assert [o.outputs.data[1] for o in outputs] == [sum(o.prompt_token_ids) for o in outputs]
        assert [r.cache_salt for r in core(llm).seen[:5]] == [None, None, None, None, "s"]
        assert len(llm.embed(np.array([[2, 8, 3], [2, 9, 3]]))) == 2
        assert len(llm.embed([2, 8, 3])) == 1


def test_texts_are_cut_before_special_tokens_are_put_around_them() -> None:
    long = " ".join(f"w{i}" for i in range(80))
    with LLM("embed") as llm:
        with pytest.raises(InvalidRequestError, match=r"82 tokens, but at most 64 fit.*truncate_prompt_tokens") as told:
            llm.embed(long)
        assert told.value.parameter == "prompt" and not core(llm).has_work()
        for asked, kept in ((-1, 62), (10, 8)):
            [output] = llm.embed(long, pooling_params=PoolingParams(truncate_prompt_tokens=asked))
            assert output.prompt_token_ids == [CLS, *ids(long)[:kept], SEP]
        left = PoolingParams(truncate_prompt_tokens=10, truncation_side="left")
        assert llm.embed(long, pooling_params=left)[0].prompt_token_ids == [CLS, *ids(long)[-8:], SEP]
        given = llm.embed([[9] * 80], pooling_params=PoolingParams(truncate_prompt_tokens=-1))
        assert given[0].prompt_token_ids == [9] * MAX_LEN
        with pytest.raises(InvalidRequestError, match="leaves no room for text: the model adds 2 special tokens"):
            llm.embed("w1", pooling_params=PoolingParams(truncate_prompt_tokens=2))
        with pytest.raises(InvalidRequestError, match="at most max_model_len=64, got 65"):
            llm.embed("w1", pooling_params=PoolingParams(truncate_prompt_tokens=65))


def test_of_a_very_long_text_little_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = word_tokenizer()
    sizes: list[int] = []
    plain = type(tokenizer).encode_batch

    def measured(self: Any, texts: list[str], **options: bool) -> list[list[int]]:
        sizes.extend(map(len, texts))
        return plain(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "encode_batch", measured)
    words = [f"w{i % 90}" for i in range(300_000)]
    with LLM("embed") as llm:
        for side, expected in (("right", ids(" ".join(words[:62]))), ("left", ids(" ".join(words[-62:])))):
            params = PoolingParams(truncate_prompt_tokens=-1, truncation_side=side)
            [output] = llm.embed(" ".join(words), pooling_params=params)
            assert output.prompt_token_ids == [CLS, *expected, SEP]
        assert max(sizes) < 3000
        with pytest.raises(InvalidRequestError, match="mostly blank"):
            llm.embed(" " * 10**6 + "w1", pooling_params=PoolingParams(truncate_prompt_tokens=-1))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([[2, 100]], "token id 100 is outside of the vocabulary"),
        ([[2, -1]], "token id -1 is outside"),
        ([[2, 2**40]], "token id 1099511627776 is outside"),
        ([["i\0\0\0\0"]], "token ids must be integers, got 'i"),
        ([[2, True]], "token ids must be integers, got True"),
        ([[2, [3]]], "token ids must be integers, got .3"),
        ([[2, np.int64(3)]], "token ids must be integers, got"),
        ([[2, True]], "must be integers, got True"),
        ([[]], "has no tokens"),
        ([["w1"]], "must be integers"),
        (["w1", ""], "prompt 1 is empty"),
        ({"text": "w1"}, "no parameter 'text'"),
        ({}, "either"),
        (7, "must be a string"),
        (["w1", 7.5], "prompt 1 must be a string, token ids or a dictionary, got float"),
        ("\ud800", "Unicode"),
        (np.ones((2, 2)), "got ndarray"),
    ],
)
def test_wrong_prompts_are_refused_and_the_engine_goes_on(prompt: Any, message: str) -> None:
    with LLM("embed") as llm:
        with pytest.raises(InvalidRequestError, match=message):
            llm.embed(prompt)
        assert len(llm.embed("w1")) == 1


def test_a_wrong_prompt_far_behind_stops_the_call_and_frees_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "PART_TEXTS", 2)
    with LLM("embed") as llm:
        with pytest.raises(InvalidRequestError, match="prompt 41 is empty"):
            llm.embed(["hang", *["w1"] * 40, "", *["w2"] * 40])
        assert not core(llm).has_work() and "p0" in core(llm).aborted
        with pytest.raises(RequestFailedError, match="failure asked for"):
            llm.embed(["w1", "fail", "w2"])
        with pytest.raises(InvalidRequestError, match="wrong prompt"):
            llm.embed(["w1", "wrong", "w2"])
        assert len(llm.embed(["w1"] * 9)) == 9


def test_token_ids_are_checked_in_parts_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would take the interpreter from the engine's loop; a wrong one far behind ends the call all the same."""
    monkeypatch.setattr(offline, "PART_TOKENS", 8)
    monkeypatch.setattr(offline, "PART_TEXTS", 4)
    monkeypatch.setattr(offline, "_ahead", None)
    lengths = [2, 9, 3, 5, 2, *[1] * 9, 20]
    prompts: list[Any] = [[7 + place] * length for place, length in enumerate(lengths)]
    prompts[1], prompts[4] = np.array(prompts[1]), {"prompt_token_ids": prompts[4]}
    assert offline._ends(prompts) == [2, 4, 8, 12, 15] and not offline._ends([[1], "w1"])
    with LLM("embed") as llm:
        found = [output.prompt_token_ids for output in llm.embed(prompts)]
        assert found == [[7 + place] * length for place, length in enumerate(lengths)]
        with pytest.raises(InvalidRequestError, match="prompt 14 has no tokens"):
            llm.embed([*prompts[:14], []])
        assert not core(llm).has_work() and len(llm.embed([[8]])) == 1


def test_dimensions_cut_and_make_of_length_1_again() -> None:
    with LLM("embed") as llm:
        whole = llm.embed("w1 w2", as_numpy=True)
        cut = llm.embed("w1 w2", as_numpy=True, pooling_params=PoolingParams(dimensions=3))
        assert cut.tolist() == whole[:, :3].tolist()
        cut = llm.embed("w1 w2", as_numpy=True, pooling_params=PoolingParams(dimensions=3, normalize=True))
        assert cut[0] == pytest.approx(whole[0, :3] / np.linalg.norm(whole[0, :3])) and cut.dtype == np.float32
        with pytest.raises(InvalidRequestError, match="at most 8, the length of this model's vectors") as told:
            llm.embed("w1", pooling_params=PoolingParams(dimensions=9))
        assert told.value.parameter == "dimensions"
    with LLM('embed {"normalize": true, "matryoshka_dimensions": [2, 4]}') as llm:
        cut = llm.embed("w1 w2", as_numpy=True, pooling_params=PoolingParams(dimensions=4))
        assert np.linalg.norm(cut) == pytest.approx(1)
        with pytest.raises(InvalidRequestError, match="one of 2, 4"):
            llm.embed("w1", pooling_params=PoolingParams(dimensions=3))
        llm.embed("w1", pooling_params=PoolingParams(normalize=False))
        assert [request.raw for request in core(llm).seen] == [False, True]


def test_tasks_that_the_model_does_not_serve_say_what_it_does() -> None:
    with LLM("embed") as llm:
        for call in (llm.classify, llm.reward, llm.generate):
            with pytest.raises(InvalidRequestError, match="serves embed, not") as told:
                call("w1")
            assert told.value.parameter == "task"
        with pytest.raises(InvalidRequestError, match="serves embed, not generate"):
            llm.chat([{"role": "user", "content": "w1"}])
        assert llm.encode("w1")[0].outputs.data.shape == (8,)
        with pytest.raises(InvalidRequestError, match="pooling_task must be one of embed, got 'sparse'"):
            llm.encode("w1", pooling_task="sparse")
        with pytest.raises(InvalidRequestError, match="use_activation applies to classifiers"):
            llm.embed("w1", pooling_params=PoolingParams(use_activation=True))
        with pytest.raises(InvalidRequestError, match="must be PoolingParams"):
            llm.embed("w1", pooling_params={"dimensions": 3})  # type: ignore[call-overload]
    with LLM("both") as llm:
        with pytest.raises(InvalidRequestError, match="pooling_task must be one of embed, token_embed"):
            llm.encode("w1")
        assert llm.encode("w1 w2", pooling_task="token_embed")[0].outputs.data.tolist() == [
            [float(token), float(place)] for place, token in enumerate([CLS, *ids("w1 w2"), SEP])
        ]
    with pytest.raises(UnknownParameterError, match="did you mean 'dimensions'"):
        PoolingParams(dimension=3)  # type: ignore[call-arg]


def test_classify_gives_numbers_of_labels() -> None:
    with LLM("labels") as llm:
        [output] = llm.classify("w1")
        assert output.outputs.num_classes == 3 and output.outputs.probs == output.outputs.data.tolist()
        with pytest.raises(InvalidRequestError, match="dimensions applies to embeddings"):
            llm.classify("w1", pooling_params=PoolingParams(dimensions=2))
        for wanted in (None, True, False):
            llm.classify("w1", pooling_params=PoolingParams(use_activation=wanted))
        assert [request.raw for request in core(llm).seen] == [False, False, False, True]


def test_a_cross_encoder_scores_pairs_framed_as_its_tokenizer_frames_them() -> None:
    backend = word_tokenizer().backend
    pairs = [("w1 w2", "w3"), ("w4", "w5 w6 w7")]
    with LLM("cross") as llm:
        outputs = llm.score([a for a, _ in pairs], [b for _, b in pairs])
        for (a, b), output, request in zip(pairs, outputs, core(llm).seen, strict=True):
            whole = backend.encode(a, b)
            assert output.prompt_token_ids == whole.ids == request.prompt_token_ids
            start, end = request.token_type_range
            assert [int(start <= i < end) for i in range(len(whole.ids))] == whole.type_ids
            assert output.outputs.score == start
        assert len(llm.score("w1", ["w2", "w3", "w4"])) == 3 and len(llm.score("w1", "w2")) == 1
        assert llm.score("w1", ["w2", "w3"], as_numpy=True).shape == (2,)
        with pytest.raises(InvalidRequestError, match="data_1 has 2 texts and data_2 3"):
            llm.score(["w1", "w2"], ["w1", "w2", "w3"])
        with pytest.raises(InvalidRequestError, match="text 1 of data_2 is empty"):
            llm.score("w1", ["w2", ""])
        with pytest.raises(InvalidRequestError, match="no place in this model's input"):
            llm.score("w1", "w2", instruction="judge")


@pytest.mark.parametrize("lengths", [(3, 90), (90, 3), (50, 50), (30, 40), (2, 3)])
def test_pairs_are_cut_as_hugging_face_cuts_them(lengths: tuple[int, int]) -> None:
    backend = word_tokenizer().backend
    backend.enable_truncation(20, strategy="longest_first")
    a, b = (" ".join(f"w{i}" for i in range(length)) for length in lengths)
    with LLM("cross") as llm:
        [output] = llm.score(a, b, truncate_prompt_tokens=20)
    assert output.prompt_token_ids == backend.encode(a, b).ids


def test_an_embedding_model_scores_by_cosine_and_a_colbert_by_its_tokens() -> None:
    with LLM("embed") as llm:
        vectors = llm.embed(["w1", "w2 w3", "w4"], as_numpy=True)
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        assert llm.score("w1", ["w2 w3", "w4"], as_numpy=True) == pytest.approx(unit[1:] @ unit[0])
        assert llm.score(["w1", "w4"], ["w2 w3", "w1"], as_numpy=True) == pytest.approx(
            [unit[0] @ unit[1], unit[2] @ unit[0]]
        )
        outputs = llm.score("w1", ["w2 w3"])
        assert outputs[0].prompt_token_ids == [CLS, *ids("w1"), SEP, CLS, *ids("w2 w3"), SEP]
    with LLM("tokens") as llm:
        found = llm.score("w1", ["w2 w3", "w4"], as_numpy=True)
        one, *others = (o.outputs.data for o in llm.encode(["w1", "w2 w3", "w4"]))
        assert found == pytest.approx([(one @ other.T).max(axis=1).sum() for other in others])
        assert llm.score(["w1", "w1"], ["w2 w3", "w4"], as_numpy=True) == pytest.approx(found)


def test_instructions_stand_before_texts_and_are_left_out_of_the_mean() -> None:
    prompts = '"prompts": {"query": "w50 w51 ", "document": "w52 "}'
    with LLM(f'embed {{{prompts}, "include_prompt": false}}') as llm:
        llm.embed("w1")
        llm.embed("w1", pooling_params=PoolingParams(prompt_name="query"))
        llm.score("w1", "w2")
        told = [(r.prompt_token_ids, r.pool_start) for r in core(llm).seen]
        query = ([CLS, *ids("w50 w51 w1"), SEP], 3)
        assert told == [([CLS, *ids("w1"), SEP], 0), query, query, ([CLS, *ids("w52 w2"), SEP], 2)]
        with pytest.raises(InvalidRequestError, match="one of 'query', 'document'; got 'passage'"):
            llm.embed("w1", pooling_params=PoolingParams(prompt_name="passage"))
    with LLM(f'embed {{{prompts}, "default_prompt_name": "query"}}') as llm:
        assert llm.embed("w1")[0].prompt_token_ids == [CLS, *ids("w50 w51 w1"), SEP]


def test_a_rerankers_template_and_what_texts_spell_of_it() -> None:
    form = '{"score_template": "w60 {instruction} w61 {query} w62 {document} w63", "score_instruction": "w64"}'
    with LLM(f"cross {form}") as llm:
        llm.score("w1", ["w2", "[SEP]"])
        llm.score("w1", "w2", instruction="w3")
        seen = [request.prompt_token_ids for request in core(llm).seen]
        assert seen[0] == [CLS, *ids("w60 w64 w61 w1 w62 w2 w63")] and SEP not in seen[1]
        assert seen[2] == [CLS, *ids("w60 w3 w61 w1 w62 w2 w63")]
        [output] = llm.score("w1", " ".join(["w2"] * 90), truncate_prompt_tokens=12)
        assert output.prompt_token_ids == [CLS, *ids("w60 w64 w61 w1 w62 w2 w2 w2 w2 w2 w63")]


def test_a_process_reward_model_tells_of_its_steps() -> None:
    """Chosen columns are activated among themselves, and only tokens with the tag are told of."""
    with LLM('steps {"step_tag_id": 9}') as llm:
        [output] = llm.reward("w1 w2 w3 w2")
        assert output.outputs.data.tolist() == [[9.0, 2.0], [9.0, 4.0]] and not core(llm).seen[0].raw
    with LLM('steps {"step_tag_id": 9, "returned_token_ids": [1, 0]}') as llm:
        [output] = llm.reward("w1 w2 w3 w2")
        one, two = np.exp([2.0 - 9.0, 0.0]), np.exp([4.0 - 9.0, 0.0])
        assert (
            output.outputs.data == pytest.approx(np.array([one / one.sum(), two / two.sum()])) and core(llm).seen[0].raw
        )
        raw = llm.reward("w1 w2", pooling_params=PoolingParams(use_activation=False))
        assert raw[0].outputs.data.tolist() == [[2.0, 9.0]]


def test_sparse_vectors_hold_each_token_once() -> None:
    with LLM('embed {"width": 100, "sparse": true}') as llm:
        one, two = llm.embed_sparse(["w1 w1", "w1 w2"])
        assert one.indices.tolist() == [CLS, SEP, 8] and one.values.tolist() == [0.5, 0.5, 1.0]
        assert one.dot(two) == 0.25 + 0.25 + 0.5
        with pytest.raises(InvalidRequestError, match="sparse vectors are not cut"):
            llm.embed("w1", pooling_params=PoolingParams(dimensions=5))
    with LLM('steps {"token_width": 1, "token_weights": true}') as llm, pytest.MonkeyPatch.context() as patch:
        weights = {CLS: 9.0, 8: 0.5, 9: -1.0, SEP: 9.0}
        patch.setattr(
            PoolingCore, "_vector", lambda _, r: [[weights[t] + i / 8] for i, t in enumerate(r.prompt_token_ids)]
        )
        [found] = llm.embed_sparse(["w1 w2 w1"])
        assert found.indices.tolist() == [8] and found.values.tolist() == [0.5 + 3 / 8], (
            "the largest; no special tokens"
        )
    with LLM("embed") as llm, pytest.raises(InvalidRequestError, match="makes no sparse vectors"):
        llm.embed_sparse("w1")


def test_token_ids_alone() -> None:
    with LLM("embed", skip_tokenizer_init=True) as llm:
        assert llm.embed([[2, 8, 3]])[0].outputs.data[0] == 3
        with pytest.raises(InvalidRequestError, match="must be token ids"):
            llm.embed("w1")


def test_pairs_are_classified_at_once() -> None:
    with LLM('labels {"num_token_types": 2}') as llm:
        outputs = llm.classify(["w1", "w2 w3"], text_pair=["w4", "w5"])
        assert [o.prompt_token_ids for o in outputs] == [[CLS, *ids("w1"), SEP, *ids("w4"), SEP],
                                                         [CLS, *ids("w2 w3"), SEP, *ids("w5"), SEP]]  # fmt: skip
        assert [r.token_type_range for r in core(llm).seen] == [(3, 5), (4, 6)]
        assert outputs[0].outputs.probs == [5.0, 0.0, 1.0]
        assert llm.classify("w1", text_pair=["w2", "w3", "w4 w5"], as_numpy=True)[:, 0].tolist() == [5, 5, 6]
        cut = PoolingParams(truncate_prompt_tokens=6)
        assert len(llm.classify("w1 w2 w3 w4", text_pair="w5", pooling_params=cut)[0].prompt_token_ids) == 6
        for wrong, says in (
            ({"text_pair": ["a", "b", "c"]}, "prompt has 2 texts and text_pair 3"),
            ({"text_pair": ""}, "text_pair is empty"),
            ({"text_pair": []}, "text_pair is empty"),
            ({"text_pair": [[8]]}, "text_pair must be a text or a list of texts"),
            ({"text_pair": "w1", "pooling_params": PoolingParams(prompt_name="query")}, "prompt_name"),
        ):
            with pytest.raises(InvalidRequestError, match=says):
                llm.classify(["w1", "w2"], **wrong)
        with pytest.raises(InvalidRequestError, match="prompt must be a text or a list of texts"):
            llm.classify([[2, 8, 3]], text_pair="w1")
    with LLM("embed") as llm, pytest.raises(InvalidRequestError, match="serves embed, not classify"):
        llm.classify("w1", text_pair="w2")


def test_tasks_of_adapters_have_names() -> None:
    given = (
        '{"adapters": ["retrieval.query", "retrieval.passage", "separation"], "prompts": {"retrieval.query": "w9 "}}'
    )
    with LLM("embed " + given) as llm:
        for task, adapter, tokens in (("retrieval.query", 1, "w9 w1"), ("separation", 3, "w1"), (None, 0, "w1")):
            [output] = llm.embed("w1", pooling_params=PoolingParams(task=task))
            assert core(llm).seen[-1].adapter == adapter and output.prompt_token_ids == [CLS, *ids(tokens), SEP]
        [output] = llm.embed("w1", pooling_params=PoolingParams(task="separation", prompt_name="retrieval.query"))
        assert core(llm).seen[-1].adapter == 3 and len(output.prompt_token_ids) == 4
        llm.score("w1", ["w2"])
        assert [r.adapter for r in core(llm).seen[-2:]] == [1, 0], (
            "a document's prompt is not told here, nor its adapter"
        )
        llm.score("w1", ["w2"], pooling_params=PoolingParams(task="separation"))
        assert [r.adapter for r in core(llm).seen[-2:]] == [3, 3]
        with pytest.raises(
            InvalidRequestError, match=r"task must be one of 'retrieval.query', 'retrieval.passage'"
        ) as told:
            llm.embed("w1", pooling_params=PoolingParams(task="query"))
        assert told.value.parameter == "task"
        with pytest.raises(InvalidRequestError, match="name of a task"):
            PoolingParams(task=3)  # type: ignore[arg-type]


def test_heads_that_are_missing_are_explained() -> None:
    with LLM('embed {"missing": "convert it so"}') as llm:
        with pytest.raises(InvalidRequestError, match="makes no sparse vectors: convert it so"):
            llm.embed_sparse("w1")
        with pytest.raises(InvalidRequestError, match="not token_classify; convert it so"):
            llm.encode("w1", pooling_task="token_classify")
    heads = '{"token_widths": {"token_embed": 1, "token_classify": 2}, "token_embed_start": 1}'
    with LLM("both " + heads) as llm:
        [output] = llm.encode("w1 w2", pooling_task="token_embed")
        assert output.outputs.data.shape == (8, 1) and core(llm).seen[-1].pool_start == 1


def test_a_step_of_vectors_finds_its_places() -> None:
    """Rows come in the order of the step, some of requests that nobody follows any more."""
    with LLM("embed", skip_tokenizer_init=True) as llm:
        door = llm._pooling.door
        wanted = door.wanted(None, Task.EMBED)
        processor, messages = PoolingProcessor(), door.messages([[8], [9], [10]], wanted)
    group = processor.open(messages, wanted, "call")
    names = [message.request_id for message in messages]
    first = np.arange(6, dtype=np.float32)
    assert processor.apply([PooledBatch([names[2], "gone", names[0]], first.tobytes(), 2, [0.5, 9.0, None])])[0] == [
        group
    ]
    assert not group.finished and group.queue_seconds == 0.5
    processor.apply([PooledBatch([names[1]], first[:2].tobytes(), 2)])
    assert group.finished and [vector.tolist() for vector in group.vectors] == [[4, 5], [0, 1], [0, 1]]
    assert not processor.requests()


def test_how_much_of_a_text_that_repeats_itself_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens after 400 blanks: read where a token may have so many characters, refused where not."""
    monkeypatch.setattr(texts, "PROCESS_CHARS", 64)
    monkeypatch.setattr(texts, "SLACK_TOKENS", 1)
    long = " " * 400 + "w1 w2 w3 w4"
    assert texts.Texts(word_tokenizer(), 64, longest_token=300)._part(long, 2, "right")[:2] == ids("w1 w2")
    with pytest.raises(InvalidRequestError, match="mostly blank"):
        texts.Texts(word_tokenizer(), 64, longest_token=8)._part(long, 2, "right")
