"""What drafters' own files say, field by field and each limit from both sides; and where their tensors go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.models.interface import Target
from headway.speculative.dflash_config import DFlashConfig, read_dflash
from headway.speculative.draft_vocabulary import DraftVocabulary
from headway.speculative.eagle_config import EagleConfig, read_eagle
from headway.speculative.eagle_load import DUMMY_STD, fill_head, fill_randomly, plain_name
from tests.engine.tiny_llama import CONFIG, HIDDEN, VOCAB
from tests.speculative.tiny_dflash import KINDS, config_of

LAYERS = 9
INNER = {name: value for name, value in CONFIG.items() if name != "eos_token_id"} | {"num_hidden_layers": 1}
CPU = torch.device("cpu")


def target(layers: int = LAYERS, **more: Any) -> Any:
    """What a model of the tiny Llama's sizes declares, of nine layers."""
    spec: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": layers, "auxiliary_layers": tuple(range(layers)),
        "architecture": "Tiny",
    }  # fmt: skip
    return SimpleNamespace(**spec | more)


def eagle(
    changes: dict[str, Any] | None = None, *, third: bool = True, layers: int = LAYERS, of: Any = None, **more: Any
) -> EagleConfig:
    return read_eagle(INNER | (changes or {}) | more, third=third, target=of or target(layers))


# -- EAGLE -------------------------------------------------------------------------------------------------------------

LISTED = "eagle_aux_hidden_state_layer_ids"


def test_layers_that_a_head_reads() -> None:
    """Files count the embedding as 0; without a list they are an early one, the middle one and a late one."""
    assert eagle().auxiliary == (1, 3, 5)
    assert eagle(layers=32).auxiliary == (1, 15, 28)
    for config in ({LISTED: [1, 4, LAYERS]}, {"eagle_config": {LISTED: [1, 4, LAYERS]}}):
        assert eagle(config).auxiliary == (0, 3, LAYERS - 1)
    assert eagle({LISTED: [2], "eagle_config": {LISTED: [1]}}).auxiliary == (1,), "the outer one counts"
    assert eagle({LISTED: [1, 4]}, third=False).auxiliary == (), "EAGLE-1 reads the last hidden states"


@pytest.mark.parametrize("listed", [[0, 1], [1, LAYERS + 1], [2, 1], [3, 3], ["1"], [1.0]])
def test_layers_that_cannot_be_read(listed: list[Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"must rise and lie in 1 to {LAYERS}"):
        eagle({LISTED: listed})


def test_models_that_hand_out_some_layers_alone() -> None:
    some = target(auxiliary_layers=(1, 3))
    assert eagle({LISTED: [2, 4]}, of=some).auxiliary == (1, 3)
    with pytest.raises(UnsupportedModelError, match="Tiny does not give the output of its layers"):
        eagle({LISTED: [2, 5]}, of=some)


def test_what_a_heads_file_leaves_out() -> None:
    found = eagle()
    assert (found.draft_vocab, found.target_hidden, found.norm_before_residual) == (VOCAB, HIDDEN, False)
    assert not found.decoder.blocks[0].attention.qkv_bias and not found.decoder.blocks[0].attention.out_bias
    said = eagle(draft_vocab_size=7, target_hidden_size=HIDDEN, norm_before_residual=True, attention_bias=True)
    assert (said.draft_vocab, said.target_hidden, said.norm_before_residual) == (7, HIDDEN, True)
    assert said.decoder.blocks[0].attention.qkv_bias and said.decoder.blocks[0].attention.out_bias


def test_a_head_of_the_third_kind_may_be_narrower_than_the_model_and_one_of_the_first_may_not() -> None:
    narrow = {"hidden_size": 16, "target_hidden_size": HIDDEN}
    found = eagle(narrow)
    assert (found.target_hidden, found.decoder.hidden_size) == (HIDDEN, 16)
    with pytest.raises(UnsupportedModelError, match=f"reads hidden states of 16, the model has {HIDDEN}"):
        eagle(narrow, third=False)
    with pytest.raises(UnsupportedModelError, match="trained for another model"):
        eagle(target_hidden_size=2 * HIDDEN)


@pytest.mark.parametrize(
    ("third", "changes", "says"),
    [
        (True, {"num_hidden_layers": 2}, "EAGLE-3 heads have one layer, not 2"),
        (True, {"vocab_size": VOCAB + 1}, f"vocab_size={VOCAB + 1} is not the model's {VOCAB}"),
        (True, {"speculators_model_type": "dflash"}, "'dflash' is not read for this method"),
        (False, {"speculators_model_type": "eagle3"}, "with method='eagle3'"),
    ],
)
def test_heads_of_another_kind(third: bool, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        eagle(changes, third=third)


def test_a_head_of_the_first_kind_has_as_many_layers_as_it_says() -> None:
    assert [len(eagle(third=False, num_hidden_layers=number).decoder.blocks) for number in (1, 3)] == [1, 3]


def test_the_librarys_format_says_what_the_head_is_in_an_object_of_its_own() -> None:
    whole = {"speculators_model_type": "eagle3", "transformer_layer_config": INNER, "draft_vocab_size": 5}
    found = read_eagle(whole, third=True, target=target())
    assert (found.draft_vocab, found.decoder, found.auxiliary) == (5, eagle().decoder, (1, 3, 5))


# -- DFlash and DSpark -------------------------------------------------------------------------------------------------


def dflash(kind: str, of: Any = None, **changes: Any) -> DFlashConfig:
    return read_dflash(config_of(KINDS[kind]) | changes, spark=KINDS[kind].spark, target=of or target())


def with_own(**changes: Any) -> dict[str, Any]:
    """``dflash_config`` with other fields."""
    return {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 1]} | changes}


@pytest.mark.parametrize(
    ("mask", "fits"), [(0, True), (VOCAB - 1, True), (VOCAB, False), (-1, False), (True, False), (None, False)]
)
def test_masks_are_tokens(mask: Any, fits: bool) -> None:
    if fits:
        assert dflash("dflash", **with_own(mask_token_id=mask)).mask == mask
        return
    with pytest.raises(UnsupportedModelError, match="mask_token_id"):
        dflash("dflash", **with_own(mask_token_id=mask))


@pytest.mark.parametrize(
    ("listed", "fits"),
    [
        ([0], True),
        ([0, 4, LAYERS - 1], True),
        ([LAYERS], False),
        ([-1, 2], False),
        ([2, 1], False),
        ([1, 1], False),
        ([], False),
    ],
)
def test_layers_behind_which_blocks_are_guessed(listed: list[int], fits: bool) -> None:
    """The authors count layers from 0; the library counts the embedding, too."""
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("dflash", with_own(target_layer_ids=listed)),
        ("dspark", {"target_layer_ids": listed}),
        ("dflash_speculators", {"aux_hidden_state_layer_ids": [layer + 1 for layer in listed]}),
    )
    for kind, changes in cases:
        if fits:
            assert dflash(kind, **changes).auxiliary == tuple(listed)
            continue
        with pytest.raises(UnsupportedModelError, match="must rise and lie in"):
            dflash(kind, **changes)
    if fits:
        few = target(auxiliary_layers=tuple(listed[1:]))
        with pytest.raises(UnsupportedModelError, match="does not give the output of its layers to drafters"):
            dflash("dflash", of=few, **with_own(target_layer_ids=listed))


def test_tokens_of_a_block() -> None:
    """The known token is one of them, unless what follows it is guessed at its own place, as DSpark usually does."""
    for kind, most in (("dflash", 4), ("dflash_speculators", 4), ("dspark", 5), ("dspark_speculators", 4)):
        assert (found := dflash(kind)).block_size == 5 and found.most == most, kind
    for kind in ("dflash", "dspark"):
        for anchor in (True, False):
            found = dflash(kind, sample_from_anchor=anchor)
            assert (found.from_anchor, found.most) == (anchor, 5 if anchor else 4)
    assert dflash("dflash", **with_own(block_size=9)).most == 8
    for size in (0, "5", None):
        with pytest.raises(UnsupportedModelError, match="block_size"):
            dflash("dspark", block_size=size)


def test_what_a_drafters_file_says_of_itself() -> None:
    assert [dflash(kind).draft_vocab for kind in ("dflash", "dflash_speculators")] == [VOCAB, 61]
    gated, plain, none = dflash("dspark"), dflash("dspark_speculators"), dflash("dflash")
    assert [(each.markov_rank, each.markov_gated) for each in (gated, plain, none)] == [
        (6, True),
        (6, False),
        (0, False),
    ]
    library = config_of(KINDS["dspark_speculators"])
    del library["markov_rank"], library["markov_head_type"]
    usual = read_dflash(library, spark=True, target=target())
    assert (usual.markov_rank, usual.markov_gated) == (256, False)
    for block in dflash("dflash").decoder.blocks:
        assert block.attention.qkv_bias and block.attention.out_bias
    assert not dflash("dspark").decoder.blocks[0].attention.qkv_bias
    assert dflash("dflash_speculators", target_hidden_size=None).target_hidden == HIDDEN


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("dflash", {"dflash_config": [1]}, "dflash_config must be an object"),
        ("dflash_speculators", {"transformer_layer_config": "x"}, "transformer_layer_config must be an object"),
        ("dflash", {"vocab_size": VOCAB - 1}, f"vocab_size={VOCAB - 1} is not the model's {VOCAB}"),
        ("dflash", {"markov_rank": 4}, "it belongs to method='dspark'"),
        ("dflash_speculators", {"target_hidden_size": 64}, f"hidden states of 64, the model has {HIDDEN}"),
        ("dspark", {"markov_rank": -1}, "markov_rank"),
    ],
)
def test_drafters_of_another_kind(kind: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        dflash(kind, **changes)


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "known"),
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("fc.weight", "fc.weight"),
        ("verifier.midlayer.weight", "verifier.midlayer.weight"),
    ],
)
def test_names_of_exporters(stored: str, known: str) -> None:
    assert plain_name(stored) == known


class Head:
    """A head with a matrix, a norm and few tokens."""

    device = CPU

    def __init__(self, size: int = 3) -> None:
        self.fc, self.norm = torch.zeros(2, 4), torch.zeros(4)
        self.vocabulary = DraftVocabulary(4, size, 8, lambda x: x, own=False, dtype=torch.float32, device=CPU)

    def destinations(self) -> dict[str, Target]:
        return {"fc.weight": Target(self.fc), "norm.weight": Target(self.norm)}


def stored(**tensors: torch.Tensor) -> Any:
    names = {"fc_weight": "fc.weight", "norm_weight": "model.norm.weight", "rotary": "x.rotary_emb.inv_freq"}
    return SimpleNamespace(tensors=lambda: [(names.get(name, name), tensor) for name, tensor in tensors.items()])


WEIGHTS = {"fc_weight": torch.ones(2, 4), "norm_weight": torch.full((4,), 2.0)}


def test_a_head_takes_its_tensors_and_leaves_what_is_computed() -> None:
    head = Head()
    fill_head(head, stored(**WEIGHTS, t2d=torch.ones(8), rotary=torch.ones(2), d2t=torch.tensor([0, 2, 5])))
    assert (head.fc == 1).all() and (head.norm == 2).all()
    assert head.vocabulary.target_ids is not None and head.vocabulary.target_ids.tolist() == [0, 3, 7]
    whole = Head(8)
    fill_head(whole, stored(**WEIGHTS, d2t=torch.zeros(8, dtype=torch.int64)))
    assert whole.vocabulary.target_ids is None, "it guesses all tokens"
    fill_head(Head(), stored(**WEIGHTS, confidence_w=torch.ones(1)), unused=("confidence_",))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"fc_weight": torch.ones(2, 4)}, r"\['norm.weight'\] missing, \[\] not expected"),
        (WEIGHTS | {"bias": torch.ones(1)}, r"\[\] missing, \['bias'\] not expected"),
        (
            WEIGHTS | {"fc_weight": torch.ones(2, 5)},
            r"is torch.float32 \[2, 5\]; config.json implies floating point \[2, 4\]",
        ),
        (WEIGHTS | {"norm_weight": torch.ones(4, dtype=torch.int64)}, r"model\.norm\.weight is torch\.int64 \[4\]"),
    ],
)
def test_tensors_that_do_not_fit(tensors: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(WeightsError, match=says):
        fill_head(Head(), stored(**tensors))


@pytest.mark.parametrize(
    ("offsets", "ids"),
    [
        ([0, 0, 0], [0, 1, 2]),
        ([0, 0, 5], [0, 1, 7]),
        ([0, 0, 6], None),
        ([-1, 0, 0], None),
        ([1, 0, 0], None),
        ([0, 0], None),
    ],
)
def test_few_tokens_are_mapped_into_the_vocabulary_once_each(offsets: list[int], ids: list[int] | None) -> None:
    vocabulary = Head().vocabulary
    if ids is None:
        with pytest.raises(WeightsError, match="d2t does not map 3 tokens"):
            vocabulary.map(torch.tensor(offsets))
        return
    vocabulary.map(torch.tensor(offsets, dtype=torch.int32))
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    whole = vocabulary.spread(logits)
    assert whole.shape == (2, 8) and torch.equal(whole[:, ids], logits)
    assert whole.isinf().sum() == 2 * 5 and (whole[whole.isinf()] < 0).all()


def test_weights_of_a_dummy() -> None:
    """Small and seeded; norms multiply by one."""
    heads = [Head() for _ in range(3)]
    for head, seed in zip(heads, (1, 1, 2), strict=True):
        head.fc = torch.zeros(64, 64)
        fill_randomly(head, seed)
        assert (head.norm == 1).all() and 0.9 * DUMMY_STD < head.fc.std() < 1.1 * DUMMY_STD
    assert torch.equal(heads[0].fc, heads[1].fc) and not torch.equal(heads[0].fc, heads[2].fc)
