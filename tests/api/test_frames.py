"""Special tokens around texts and pairs, and where pairs are cut: as the tokenizers library does it, over random templates."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from headway.api.pooling.frame import Frame, cut_pair, pair_frame, single_frame

SPECIAL = {"[A]": 90, "[B]": 91, "[C]": 92}


def words() -> Tokenizer:
    known = {word: n for n, word in enumerate(["[UNK]", "a", "b", "the", "and", "1", "2", "x", "y", "z"])}
    made = Tokenizer(WordLevel(known | SPECIAL, unk_token="[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


def some(rng: random.Random, most: int = 2) -> list[str]:
    return [f"{rng.choice([*SPECIAL])}:{rng.choice([0, 1])}" for _ in range(rng.randrange(most + 1))]


@pytest.mark.parametrize("seed", range(25))
def test_frames_are_the_tokenizers(seed: int) -> None:
    rng, backend = random.Random(seed), words()
    types = rng.choice([(0, 1), (0, 0), (1, 0), (1, 1)])
    head, tail = some(rng), some(rng)
    pair = [*some(rng), f"$A:{types[0]}", *some(rng), f"$B:{types[1]}", *some(rng)]
    backend.post_processor = TemplateProcessing(
        single=[*head, "$A:0", *tail], pair=pair, special_tokens=[*SPECIAL.items()]
    )  # fmt: skip
    one, two = single_frame(backend), pair_frame(backend)
    assert one is not None and two is not None
    assert one.size == len(head) + len(tail) and not one.between and two.size == len(pair) - 2
    for first, second in (("x", "y z"), ("z y x x", "a"), ("b", "b")):
        bare = [backend.encode(text, add_special_tokens=False).ids for text in (first, second)]
        assert one.single(bare[0]) == backend.encode(first).ids
        whole = backend.encode(first, second)
        assert two.pair(*bare) == whole.ids
        marked = [place for place, kind in enumerate(whole.type_ids) if kind]
        if marked and marked != [*range(marked[0], marked[-1] + 1)]:
            with pytest.raises(ValueError, match="not next to each other"):
                two.type_range(len(bare[0]), len(bare[1]))
        else:
            span = (marked[0], marked[-1] + 1) if marked else None
            assert two.type_range(len(bare[0]), len(bare[1])) == span


def test_what_is_no_fixed_frame() -> None:
    """A text that is written twice has none, and nor has a tokenizer that makes nothing of any probe."""
    backend = words()
    backend.post_processor = TemplateProcessing(
        single=["$A", "[A]", "$A"], pair=["$A", "$B", "$A"], special_tokens=[("[A]", 90)]
    )
    assert single_frame(backend) is None and pair_frame(backend) is None
    some_text = Tokenizer(BPE({"1": 0, "2": 1, "[A]": 2}, []))  # of the last probe only
    some_text.post_processor = TemplateProcessing(single="[A] $A", pair="$A [A] $B", special_tokens=[("[A]", 2)])
    assert single_frame(some_text) == Frame(before=(2,))
    assert pair_frame(some_text) == Frame(between=(2,), types=((), 0, (0,), 0, ()))
    empty = Tokenizer(BPE())
    assert single_frame(empty) is None and pair_frame(empty) is None


def test_a_frame_of_nothing_leaves_a_text_as_it_is() -> None:
    ids = [1, 2]
    assert Frame().single(ids) is ids and Frame(before=(5,)).single(ids) == [5, 1, 2] and Frame(after=(5,)).size == 1


def test_the_longer_of_a_pair_is_cut_first() -> None:
    backend = words()
    for first in range(9):
        for second in range(9):
            for room in range(1, 19):
                backend.enable_truncation(room, strategy="longest_first")
                sequence = backend.encode(" ".join("x" * first), " ".join("y" * second)).sequence_ids
                assert cut_pair(first, second, room) == (sequence.count(0), sequence.count(1)), (first, second, room)
