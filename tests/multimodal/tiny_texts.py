"""Tokenizers, chat templates and settings of image processors for the tiny decoders with sight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MARKERS = {
    "llava": ("<image>", "<image>"), "gemma3": ("<image_soft_token>", "<start_of_image>"), "paligemma": ("<image>",) * 2,
    **dict.fromkeys(("gemma4", "gemma3n", "gemma3n sees"), ("<|image|>",) * 2), "smolvlm": ("<image>",) * 2,
    "mistral3": ("[IMG]",) * 2, "internvl": ("<IMG_CONTEXT>",) * 2,
}  # fmt: skip
"""Text of the token that stands for a row, and of the one that a prompt has for a picture."""
PARTS = (
    "{% for m in messages %}<turn>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}MARKER"
    "{% elif part.type == 'video' %}VIDEO{% elif part.type == 'audio' %}<|audio|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}\n{% endfor %}<turn>"
)
PLAIN = "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}\n{% endfor %}<turn>"


_AROUND = {
    "mistral3": ("[IMG_BREAK]", "[IMG_END]"), "internvl": ("<img>", "</img>"),
    "smolvlm": ("<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))),
}  # fmt: skip
"""Texts of the tokens that stand around rows and tiles."""


def marker_of(name: str) -> tuple[str, str]:
    """See ``MARKERS``."""
    return MARKERS.get(name, ("<|image_pad|>",) * 2)


def save_texts(name: str, folder: Path, token: int, video: int) -> None:
    """A tokenizer of one token for each character, a chat template, and the image processor's settings.

    Args:
        token, video: what stands for a row of a picture, and of a video.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    row, marker = marker_of(name)
    specials = {"<pad>": 0, "<s>": 1, "</s>": 2, "<turn>": 99, row: token, "<eoi>": 102, "<other>": 105}
    if name.startswith("qwen"):
        specials["<|video_pad|>"] = video
        own = {"size": {"shortest_edge": 256, "longest_edge": 2048}, "fps": 2}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(own))
    specials |= {text: 106 + i for i, text in enumerate(_AROUND.get(name, ()))}
    if name.startswith(("gemma4", "gemma3n")):
        specials |= {"<|audio|>": 104, "<boa>": 106, "<eoa>": 107}
    if name == "gemma4":
        specials["<|video|>"] = video
    specials.setdefault("<boi>" if marker == row else marker, 101)
    chars = {chr(32 + i): 3 + i for i in range(95)} | {"\n": 98}
    backend = tokenizers.Tokenizer(models.WordLevel({**chars, **specials}, unk_token="<other>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(specials))
    backend.save(str(folder / "tokenizer.json"))
    shown = "<|video|>" if name == "gemma4" else "<boi><|video_pad|><eoi>"
    template = PARTS.replace("MARKER", marker).replace("VIDEO", shown)
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes: dict[str, Any] = {
        "gemma3": {"size": {"height": 56, "width": 56}}, "paligemma": {"size": {"height": 28, "width": 28}},
        "llava": {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}},
        "smolvlm": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True},
        "internvl": {"size": {"height": 28, "width": 28}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6},
        "mistral3": {"size": {"longest_edge": 40}},
        "gemma4": {"patch_size": 4, "max_soft_tokens": 9},
        "gemma3n sees": {"feature_size": 18, "size": {"height": 256, "width": 256}, "resample": 2, "do_normalize": False},
        "gemma3n": {"feature_size": 18, "frame_length": 512, "fft_length": 1024, "mel_floor": 1e-5, "dither": 0.0},
    }  # fmt: skip
    own = sizes.get(name, {"min_pixels": 256, "max_pixels": 2048, "patch_size": 4})
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    if name.startswith("gemma3n"):
        (folder / "processor_config.json").write_text(json.dumps({"audio_seq_length": 12, "image_seq_length": 9}))
    if name == "gemma4":
        ears = {"feature_size": 16, "sampling_rate": 16000, "frame_length": 320, "mel_floor": 0.001}
        frames = {"patch_size": 4, "max_soft_tokens": 4, "num_frames": 4}
        both = {"feature_extractor": ears, "video_processor": frames, "audio_seq_length": 100}
        (folder / "processor_config.json").write_text(json.dumps(both))
