"""Small encoder-decoders with random weights, what transformers makes of them, and requests for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.core.config import EngineArgs
from headway.core.encode import EncoderItem
from headway.core.messages import AddRequest
from headway.core.params import SamplingParams

VOCAB, MELS, OUTPUTS = 96, 8, 30
START, EOS = 3, 2


def whisper(**changes: Any) -> Any:
    """A Whisper that hears .6 s."""
    import transformers

    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        **{
            "vocab_size": VOCAB, "num_mel_bins": MELS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3,
            "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
            "max_source_positions": OUTPUTS, "max_target_positions": 48, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": EOS, "decoder_start_token_id": START, "suppress_tokens": None,
            "begin_suppress_tokens": None, **changes,
        }
    )  # fmt: skip
    return randomised(transformers.WhisperForConditionalGeneration(config))


def reader(kind: str, **changes: Any) -> Any:
    """A BART, mBART, T5, Flan-T5 or mT5 of random weights."""
    import transformers

    torch.manual_seed(0)
    tokens = {"vocab_size": VOCAB, "pad_token_id": 0, "eos_token_id": EOS, "decoder_start_token_id": START, **changes}
    if kind in ("bart", "mbart"):
        name = "Bart" if kind == "bart" else "MBart"
        config = getattr(transformers, f"{name}Config")(
            d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=2,
            encoder_ffn_dim=40, decoder_ffn_dim=48, max_position_embeddings=64, forced_bos_token_id=None,
            forced_eos_token_id=None, bos_token_id=1, scale_embedding=kind == "mbart", **tokens,
        )  # fmt: skip
    else:
        name = "MT5" if kind == "mt5" else "T5"
        config = getattr(transformers, f"{name}Config")(
            d_model=32, d_kv=12, d_ff=40, num_layers=2, num_decoder_layers=3, num_heads=4,
            relative_attention_num_buckets=8, relative_attention_max_distance=20, n_positions=64,
            feed_forward_proj="relu" if kind == "t5" else "gated-gelu", tie_word_embeddings=kind == "t5", **tokens,
        )  # fmt: skip
    model = randomised(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    if kind == "bart":
        model.final_logits_bias.copy_(torch.randn(1, VOCAB) * 0.3)
    return model


def randomised(model: Any) -> Any:
    """Weights large enough that tokens depend on all that is read."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.eval()


def save(model: Any, folder: Path) -> str:
    """A checkpoint; gives its folder."""
    model.save_pretrained(folder)
    return str(folder)


def features(seed: int) -> np.ndarray[Any, Any]:
    """A spectrogram, float32 [MELS, 2 * OUTPUTS]."""
    return np.random.default_rng(seed).standard_normal((MELS, 2 * OUTPUTS)).astype(np.float32)


def recording(seed: int) -> EncoderItem:
    """What the encoder gets of it."""
    data = features(seed)
    return EncoderItem(kind="audio", key=b"%16d" % seed, rows=OUTPUTS, sizes=data.shape, data=data.tobytes())


def text(tokens: list[int]) -> EncoderItem:
    """A text for the encoder."""
    data = np.array(tokens, np.int32)
    return EncoderItem(kind="text", key=data.tobytes(), rows=len(tokens), data=data.tobytes())


def request(request_id: str, item: EncoderItem, prompt: list[int], **params: Any) -> AddRequest:
    """A request as the door would make it."""
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(detokenize=False, **params),
        seed=5,
        eos_token_ids=[],
        media=[item],
    )


def arguments(model: str, **more: Any) -> EngineArgs:
    """Of a small engine."""
    return EngineArgs(
        model=model,
        **{
            "dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 2**22, "max_num_seqs": 6,
            "max_num_batched_tokens": 64, "block_size": 8, "skip_tokenizer_init": True, **more,
        },
    )  # fmt: skip


@torch.no_grad()
def greedy(model: Any, inputs: dict[str, torch.Tensor], prompt: list[int], count: int) -> list[int]:
    """What transformers' model goes on with, token by token, with its logits alone."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(**inputs, decoder_input_ids=torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def logprobs(model: Any, inputs: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V], transformers'."""
    logits = model(**inputs, decoder_input_ids=torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits, -1)


@torch.no_grad()
def frames_of(model: Any, mel: torch.Tensor, tokens: list[int], heads: Any, first: int, frames: int) -> list[int]:
    """The frame with which each token behind ``first`` begins: transformers' weights, of the frames that are of the recording,
    its median and its way, put together as Whisper's authors do (openai/whisper, timing.py). The model's attention must be
    "eager".
    """
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

    said = model(mel[None], decoder_input_ids=torch.tensor([tokens]), output_attentions=True)
    weights = torch.stack([said.cross_attentions[layer][0, head] for layer, head in heads])[..., :frames]
    weights = weights / weights.sum(-1, keepdim=True)
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    matrix = _median_filter(((weights - mean) / std)[None], 7)[0].mean(0)[first:-1]
    found: Any = _dynamic_time_warping(-matrix.double().numpy())
    return [int(found[1][found[0] == token].min()) for token in range(len(matrix))]
