"""Folders that sentence-transformers wrote: what follows the transformer, read as JSON alone.

``modules.json`` lists modules in order, each with a folder of its own. Honoured are Transformer, Pooling, Dense, Normalize,
SpladePooling, MLMTransformer and LogitScore; any other module changes what the model gives, and is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from headway.core.errors import ModelError, UnsupportedModelError

MODULES: Final = "modules.json"
_METHODS: Final = {
    "cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt", "weightedmean": "weighted_mean",
    "lasttoken": "last",
}  # fmt: skip
_FLAGS: Final = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt", "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}  # fmt: skip
"""Older files have a flag each, in the order in which vectors are joined."""
_ACTIVATIONS: Final = {
    "Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "Sigmoid": "sigmoid",
}  # fmt: skip
MOST_MODULES: Final = 32


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A linear layer with weights in a folder of its own: activation(W x + b), tensors "<folder>.linear.weight" and ".bias"."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceFiles:
    """What the files say.

    Attributes:
        methods: how tokens are pooled, () where they are not.
        include_prompt: tokens of a prompt take part in it.
        dense: layers behind the pooling, or behind each token where nothing is pooled.
        normalize: vectors get length 1 at the end.
        sparse: what a masked language model says of a text's tokens is pooled over the vocabulary.
        score_tokens: (token whose logit is the score, token whose logit is taken off or None): a reranker that answers.
        max_length: most tokens; None: not said.
        lower_case: texts are lower-cased.
        prompts, default_prompt_name, similarity: of config_sentence_transformers.json.
        transformer: folder of the transformer, "" for the model's own.
    """

    methods: tuple[str, ...] = ()
    include_prompt: bool = True
    dense: tuple[DenseFile, ...] = ()
    normalize: bool = False
    sparse: bool = False
    score_tokens: tuple[int, int | None] | None = None
    max_length: int | None = None
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    transformer: str = ""


def module_folders(folder: Path) -> list[str]:
    """Folders that modules.json in ``folder`` names, below it; [] without such a file.

    Raises:
        ModelError: it is broken, or names a place outside.
    """
    if not (folder / MODULES).is_file():
        return []
    paths = [_inside(folder, str(entry.get("path", ""))) for entry in _listed(folder)]
    return [path for path in paths if path]


def _listed(folder: Path) -> list[dict[str, Any]]:
    """The entries of modules.json."""
    listed = _read(folder / MODULES)
    if not isinstance(listed, list) or len(listed) > MOST_MODULES or not all(isinstance(each, dict) for each in listed):
        raise ModelError(f"{folder / MODULES} must be a list of up to {MOST_MODULES} modules")
    return listed


def read_sentence_files(folder: Path) -> SentenceFiles | None:
    """What sentence-transformers wrote about the model in ``folder``; None: nothing.

    Raises:
        ModelError: a file is broken.
        UnsupportedModelError: a module, or a value, that is not implemented; names it.
    """
    if not (folder / MODULES).is_file():
        return None
    listed = _listed(folder)
    found = SentenceFiles(**_sentence_config(folder))
    for entry in sorted(listed, key=lambda each: each["idx"] if isinstance(each.get("idx"), int) else 0):
        kind, path = str(entry.get("type", "")).rsplit(".", 1)[-1], _inside(folder, str(entry.get("path", "")))
        found = _with_module(found, folder, kind, path)
    return found


def _with_module(found: SentenceFiles, folder: Path, kind: str, path: str) -> SentenceFiles:
    """``found`` and one module more."""
    if kind in ("Transformer", "MLMTransformer"):
        return replace(found, transformer=path, **_transformer_config(folder / path))
    if kind == "Normalize":
        return replace(found, normalize=True)
    config = _object(folder / path / "config.json")
    if kind == "Pooling":
        methods, with_prompt = _methods(config), config.get("include_prompt", True) is not False
        return replace(found, methods=methods, include_prompt=with_prompt)
    if kind == "Dense":
        return replace(found, dense=(*found.dense, _dense(config, path)))
    if kind == "SpladePooling":
        strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
        if (strategy, activation) != ("max", "relu"):
            raise UnsupportedModelError(
                f"{path}: SpladePooling with {strategy!r:.40} of {activation!r:.40} is not implemented; max of relu is"
            )
        return replace(found, sparse=True)
    if kind == "LogitScore":
        wanted, other = config.get("true_token_id"), config.get("false_token_id")
        if not isinstance(wanted, int) or not (other is None or isinstance(other, int)):
            raise UnsupportedModelError(f"{path}: LogitScore needs token ids, got {wanted!r:.40} and {other!r:.40}")
        return replace(found, score_tokens=(wanted, other))
    raise UnsupportedModelError(
        f"{MODULES}: modules of type {kind!r:.80} are not implemented; Transformer, Pooling, Dense, Normalize, "
        "MLMTransformer, SpladePooling and LogitScore are"
    )


def _methods(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Of a Pooling module, of today's form or the older one."""
    modes = config.get("pooling_mode")
    if modes is None:
        return tuple(method for flag, method in _FLAGS.items() if config.get(flag)) or ("mean",)
    names = [modes] if isinstance(modes, str) else modes
    if not isinstance(names, list) or not names or not all(name in _METHODS for name in names):
        raise UnsupportedModelError(f"pooling_mode = {modes!r:.80} is not implemented; {', '.join(_METHODS)} are")
    return tuple(_METHODS[name] for name in names)


def _dense(config: Mapping[str, Any], path: str) -> DenseFile:
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if not all(isinstance(size, int) and size > 0 for size in (inputs, outputs)):
        raise UnsupportedModelError(f"{path}: a Dense module needs in_features and out_features")
    if config.get("use_residual"):
        raise UnsupportedModelError(f"{path}: use_residual of Dense modules is not implemented")
    named = str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
    if named not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{path}: the activation {named!r:.60} is not implemented; {', '.join(_ACTIVATIONS)} are"
        )
    assert isinstance(inputs, int) and isinstance(outputs, int)
    return DenseFile(path, inputs, outputs, config.get("bias", True) is not False, _ACTIVATIONS[named])


def _transformer_config(folder: Path) -> dict[str, Any]:
    """Fields of ``SentenceFiles`` in the transformer's own file, which has had other names for older models."""
    names = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    files = [folder / f"sentence_{name}_config.json" for name in names]
    config = next((_object(file) for file in files if file.is_file()), {})
    longest = config.get("max_seq_length")
    return {
        "max_length": longest if isinstance(longest, int) and longest > 0 else None,
        "lower_case": config.get("do_lower_case") is True,
    }


def _sentence_config(folder: Path) -> dict[str, Any]:
    """Fields of ``SentenceFiles`` in config_sentence_transformers.json."""
    file = folder / "config_sentence_transformers.json"
    config = _object(file) if file.is_file() else {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for pair in prompts.items() for each in pair):
        raise ModelError(f"{file}: prompts must map names to texts")
    default = config.get("default_prompt_name")
    return {
        "prompts": prompts,
        "default_prompt_name": default if isinstance(default, str) else None,
        "similarity": str(config.get("similarity_fn_name") or "cosine").lower(),
    }


def _inside(folder: Path, path: str) -> str:
    """``path`` itself, only if it lies below the folder: modules.json is untrusted input."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\\" in path or len(pure.parts) > 2:
        raise ModelError(f"{folder / MODULES} names {path!r:.80}, which lies outside the model's folder")
    return str(pure) if pure.parts else ""


def _object(file: Path) -> dict[str, Any]:
    value = _read(file)
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object")
    return value


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not readable JSON ({error}); download it again") from error
