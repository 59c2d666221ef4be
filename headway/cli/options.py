"""Command-line options from the fields of EngineArgs and SamplingParams: one flag per field, in vLLM's spelling."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from headway.core.config import EngineArgs
from headway.core.errors import ConfigError
from headway.core.params import SamplingParams

_SUFFIXES: Final = {"k": 1000, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_SAMPLING_FIELDS: Final = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "min_tokens",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
"""Those that make sense for text on a terminal."""


def human_int(text: object) -> int:
    """An integer, also as 25.6k (decimal) or 32K (binary), as vLLM reads them.

    Typer passes defaults as they are, and a file's values are such: they may be anything.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    found = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmgKMG]?)", str(text).strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not an integer (32768, 25.6k and 32K are)")
    value = float(found[1]) * _SUFFIXES.get(found[2], 1)
    if value != int(value):
        raise typer.BadParameter(f"{text!r} is not a whole number")
    return int(found[1]) if not found[2] and "." not in found[1] else int(value)


def run_ahead(text: object) -> int | str:
    """An integer or "auto"."""
    return "auto" if text == "auto" else human_int(text)


def _as_given(value: object) -> object:
    """Text of the command line, or what a file of settings holds."""
    return value


def field_help(cls: type) -> dict[str, str]:
    """Field -> its description in the Attributes section of the class docstring."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")[2].splitlines():
        found = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if found:
            names = found[1].split(", ")
            texts.update(dict.fromkeys(names, found[2]))
        elif line.startswith(" " * 8):
            texts.update({name: f"{texts[name]} {line.strip()}" for name in names})
    return texts


def _option(name: str, kind: str, flag: str, text: str | None, default: object) -> inspect.Parameter:
    """One keyword parameter as typer wants it; ``kind`` is the field's annotation."""
    settings: dict[str, Any] = {"help": text, "show_default": default is not None and default != []}
    declared: Any
    if kind.startswith("bool"):
        declared, flag = (bool if kind == "bool" else bool | None), f"{flag}/--no-{flag.removeprefix('--')}"
    elif kind == "RunAhead":
        declared = str
        settings |= {"parser": run_ahead, "metavar": "INTEGER|auto"}
    elif kind.startswith("SpeculativeConfig"):
        declared = str | None
        settings |= {"parser": _as_given, "metavar": "JSON"}  # EngineArgs reads it
    elif kind.startswith("list[int]"):
        declared = list[int] | None
    elif kind.startswith("list[str]"):
        declared = list[str] | None
    elif kind.startswith("int"):
        declared = int | None if "None" in kind else int
        settings |= {"parser": human_int, "metavar": "INTEGER"}
    elif kind.startswith("float"):
        declared = float | None if "None" in kind else float
    else:
        declared = str | None if "None" in kind else str
    annotation = Annotated[declared, typer.Option(flag, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def engine_parameters() -> list[inspect.Parameter]:
    """An option for every field of EngineArgs, ``model`` included."""
    texts = field_help(EngineArgs)
    parameters = []
    for field in dataclasses.fields(EngineArgs):
        default = None if field.name == "model" else field.default
        kind = "str | None" if field.name == "model" else str(field.type)
        flag = f"--{field.name.replace('_', '-')}"
        parameters.append(_option(f"engine_{field.name}", kind, flag, texts.get(field.name), default))
    return parameters


def sampling_parameters() -> list[inspect.Parameter]:
    """Options for SamplingParams; all unset at first, so that the model's own defaults show through."""
    texts = field_help(SamplingParams)
    kinds = {field.name: str(field.type) for field in dataclasses.fields(SamplingParams)}
    parameters = []
    for name in _SAMPLING_FIELDS:
        kind = kinds[name] if "None" in kinds[name] else f"{kinds[name]} | None"
        # --seed is the engine's, as in vLLM.
        flag = "--sampling-seed" if name == "seed" else f"--{name.replace('_', '-')}"
        parameters.append(_option(f"sampling_{name}", kind, flag, texts.get(name), None))
    return parameters


def _collect(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Take the options that begin with ``prefix`` out of ``values``."""
    names = [name for name in values if name.startswith(prefix)]
    return {name.removeprefix(prefix): values.pop(name) for name in names}


def settings_parameters(cls: type) -> list[inspect.Parameter]:
    """An option for every field of another dataclass of settings; lists are options that may be repeated."""
    texts = field_help(cls)
    parameters = []
    for field in dataclasses.fields(cls):
        default = None if field.default is dataclasses.MISSING else field.default
        flag = f"--{field.name.replace('_', '-')}"
        parameters.append(_option(f"settings_{field.name}", str(field.type), flag, texts.get(field.name), default))
    return parameters


def with_options(
    *, sampling: bool, settings: type | None = None, default: str = "smollm2", positional: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a command that takes ``engine`` (EngineArgs) gets the MODEL argument and the engine's flags instead.

    Args:
        sampling: it also takes ``sampling``, a dictionary of the SamplingParams fields that were given.
        settings: it also takes ``settings``, a dataclass of this type made from flags of its own.
        default: the model where none is named.
        positional: there is a MODEL argument beside --model.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters if p.name not in _MADE]
        named_model = Annotated[
            str | None, typer.Argument(help=f"Folder, GGUF file, hub name, or the built-in {default}.")
        ]
        model_argument = inspect.Parameter(
            "model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=named_model
        )
        firsts = [model_argument] if positional else []
        made = [*(sampling_parameters() if sampling else []), *engine_parameters()]
        made = [*(settings_parameters(settings) if settings is not None else []), *made]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            fields = _collect(values, "engine_")
            first, named = values.pop("model", None), fields.pop("model")
            if first and named and first != named:
                raise ConfigError(f"the model is given twice: {first!r} and --model {named!r}")
            values["engine"] = EngineArgs(model=first or named or default, **fields)
            if sampling:
                given = _collect(values, "sampling_")
                values["sampling"] = {name: value for name, value in given.items() if value not in (None, [])}
            if settings is not None:
                given = _collect(values, "settings_")
                values["settings"] = settings(**{name: value for name, value in given.items() if value is not None})
            command(**values)

        run.__signature__ = inspect.Signature([*firsts, *own, *made])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        del run.__wrapped__  # typer must read the signature above
        return run

    return decorate


_MADE: Final = ("engine", "sampling", "settings")


def engine_kwargs(engine: EngineArgs) -> dict[str, Any]:
    """EngineArgs as the keywords of LLM and AsyncLLM."""
    return {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
