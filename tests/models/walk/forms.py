"""The outer forms that a checkpoint of the same model may have: files, types of numbers, names, tensors that nobody needs, and
older spellings of its configuration."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models.walk.draw import own_fields

Tensors = dict[str, torch.Tensor]
PREFIXES = (("model.", ""), ("", "language_model."), ("model.", "model.language_model."))
QUANTISED = (
    {"quant_method": "gptq", "bits": 4, "group_size": 128}, {"quant_method": "awq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "compressed-tensors", "config_groups": {}},
)  # fmt: skip


def read_tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def rounded(folder: Path, model: Any, rng: random.Random) -> str:
    """Some weights are stored in 16 bits; what they hold is the model from now on. Buffers follow from the configuration."""
    ways = {"f32": [torch.float32], "bf16": [torch.bfloat16], "f16": [torch.float16]}
    ways["mixed"] = [torch.float32, torch.bfloat16, torch.float16]
    name = rng.choice(sorted(ways))
    buffers = dict(model.named_buffers())
    stored = read_tensors(folder)
    tensors = {each: stored[each] if each in buffers else stored[each].to(rng.choice(ways[name])) for each in stored}
    write(folder, tensors, 1)
    return name


def write(folder: Path, tensors: Tensors, shards: int) -> None:
    """One file, or several with an index."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    places: dict[str, str] = {}
    for part in range(shards):
        file = f"model-{part + 1:05d}-of-{shards:05d}.safetensors"
        own = {name: tensor for i, (name, tensor) in enumerate(tensors.items()) if i % shards == part}
        save_file(own, folder / file, {"format": "pt"})
        places |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": sum(each.nbytes for each in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def reshaped(folder: Path, into: Path, model: Any, rng: random.Random) -> str:
    """The checkpoint in ``folder`` in another form; says which.

    Args:
        model: of transformers; experts may be stacked as it has them in memory.
    """
    into.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, into)
    tensors, told = read_tensors(folder), []
    stacked = model.state_dict()
    if any(name.endswith("gate_up_proj") and name not in tensors for name in stacked) and rng.random() < 0.5:
        tied = not any(name.endswith("lm_head.weight") for name in tensors)
        tensors = {name: each for name, each in stacked.items() if not (tied and name.endswith("lm_head.weight"))}
        told.append("stacked experts")
    if rng.random() < 0.4:
        old, new = rng.choice(PREFIXES)
        tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: each for name, each in tensors.items()
        }
        told.append(f"{old!r} is {new!r}")
    if rng.random() < 0.4:
        stems = sorted({name.split(".q_proj.")[0] for name in tensors if ".q_proj." in name})
        tensors |= {f"{stem}.rotary_emb.inv_freq": torch.ones(4) for stem in stems}
        told += ["rotary_emb.inv_freq"] if stems else []
    shards = rng.choice([1, 1, 2, 5])
    write(into, tensors, min(shards, len(tensors)))
    told += [f"{shards} files"] if shards > 1 else []
    if rng.random() < 0.5:
        told.append(respell(into / "config.json"))
    if rng.random() < 0.5:
        config_class: Any = type(model.config)
        told.append(spare(into / "config.json", own_fields(config_class), rng))
    return ", ".join(each for each in told if each)


def spare(file: Path, defaults: dict[str, Any], rng: random.Random) -> str:
    """Some of the fields that have the family's default are left out, as many exporters do; "" where there is none."""
    config = json.loads(file.read_text())
    gone = [name for name, value in defaults.items() if name in config and config[name] == value and rng.random() < 0.7]
    file.write_text(json.dumps({name: value for name, value in config.items() if name not in gone}))
    return f"without {' '.join(gone)}" if gone else ""


def respell(file: Path) -> str:
    """A config.json as transformers 4 wrote it; "" where it can be told in no other way."""
    config = json.loads(file.read_text())
    rope = config.get("rope_parameters")
    config["torch_dtype"] = config.pop("dtype", None)
    told = "torch_dtype"
    if isinstance(rope, dict) and rope and not any(isinstance(value, dict) for value in rope.values()):
        rope = dict(rope)
        del config["rope_parameters"]
        config["rope_theta"] = rope.pop("rope_theta", 10000.0)
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        kind = rope.pop("rope_type", "default")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        told = "rope_scaling"
    file.write_text(json.dumps(config))
    return told
