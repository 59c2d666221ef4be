"""``headway embed``: a file of texts to a file of vectors."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.options import engine_kwargs, with_options
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, InvalidRequestError
from headway.core.params import PoolingParams

if TYPE_CHECKING:
    import numpy as np

PART = 8192
"""Texts that are read, embedded and written together: memory does not grow with the file."""
FIELDS = ("text", "input", "content", "prompt")
"""Of a JSON object, the first of these that it has is the text, unless --field names another."""


@with_options(sampling=False, default="minilm", positional=False)
def embed(
    file: Annotated[str, typer.Argument(help="Texts: JSON lines, or plain lines; - is stdin.")] = "-",
    output: Annotated[
        str, typer.Option("--output", "-o", help="A .npy file, or else JSON lines; - is stdout (JSON lines).")
    ] = "-",
    field: Annotated[str | None, typer.Option("--field", help="Member of JSON objects that holds the text.")] = None,
    prompt_name: Annotated[str | None, typer.Option("--prompt-name", help="The model's prompt to put before.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="The task whose adapter texts run with (Jina v3).")] = None,
    dimensions: Annotated[int | None, typer.Option("--dimensions", help="Only so many leading numbers.")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate/--no-truncate", help="Cut texts that are too long; else they are an error.")
    ] = True,
    *,
    engine: EngineArgs,
) -> None:
    """Embed the texts of a file. JSON lines keep the members of their objects and gain "embedding"."""
    from headway import LLM

    params = PoolingParams(
        prompt_name=prompt_name, task=task, dimensions=dimensions, truncate_prompt_tokens=-1 if truncate else None
    )
    if file != "-" and not Path(file).is_file():
        raise ConfigError(f"there is no file {file!r}")
    with LLM(**engine_kwargs(engine)) as llm, _open(file) as source, _sink(output) as sink:
        total = _count(file)
        with _bar(total) as advance:
            for part in _parts(_texts(source, file, field)):
                vectors = llm.embed([text for text, _ in part], pooling_params=params, use_tqdm=False, as_numpy=True)
                sink.write([rest for _, rest in part], vectors)
                advance(len(part))
        if not sink.count:
            raise InvalidRequestError(f"{file}: there is no text", "input")
        typer.echo(f"{sink.count} texts, {sink.width} numbers each", err=True)


def _open(file: str) -> IO[str]:
    if file == "-":
        return os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8") if _has_fd(sys.stdin) else sys.stdin
    return Path(file).open(encoding="utf-8")


def _has_fd(stream: IO[str]) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError):
        return False
    return True


def _count(file: str) -> int | None:
    """Lines that hold something; None for what can be read but once."""
    if file == "-":
        return None
    with Path(file).open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _texts(lines: IO[str], name: str, field: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each text, and what came with it. Empty lines are left out."""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        value: Any = text
        if text[0] in '{"':
            try:
                value = json.loads(text)
            except ValueError:
                if field is not None:
                    raise InvalidRequestError(f"{name}, line {number}: no valid JSON", "input") from None
        if isinstance(value, dict):
            chosen = field or next((each for each in FIELDS if each in value), None)
            found = value.get(chosen) if chosen is not None else None
            if not isinstance(found, str) or not found:
                known = repr(field) if field else ", ".join(map(repr, FIELDS))
                raise InvalidRequestError(f"{name}, line {number}: no text under {known}; --field names it", "input")
            yield found, value
        elif isinstance(value, str) and value:
            yield value, {}
        else:
            raise InvalidRequestError(f"{name}, line {number}: an empty text", "input")


def _parts(texts: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    while part := list(islice(texts, PART)):
        yield part


class JsonSink:
    """Writes JSON lines.

    Attributes:
        count, width: texts so far, numbers of each.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.count = self.width = 0

    def write(self, rest: list[dict[str, Any]], vectors: np.ndarray[Any, Any]) -> None:
        """Append some vectors, float32 [texts, width], each with what came with its text."""
        for more, vector in zip(rest, vectors, strict=True):
            entry = {**(more or {"index": self.count}), "embedding": vector.tolist()}
            self._file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self.count += 1
        self.width = vectors.shape[1]

    def __enter__(self) -> JsonSink:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not sys.stdout:
            self._file.close()


class NpySink:
    """Writes one float32 array [texts, width] as .npy, row by row: its head is written again when the rows are known."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb+")
        self.count = self.width = 0
        self._head(0, 0)

    def write(self, rest: list[dict[str, Any]], vectors: np.ndarray[Any, Any]) -> None:
        """As ``JsonSink.write``; what came with the texts is not kept."""
        self._file.write(vectors.astype("<f4", copy=False).tobytes())
        self.count += len(vectors)
        self.width = vectors.shape[1]

    def _head(self, rows: int, columns: int) -> None:
        """Format version 1.0 of numpy.lib.format, with room for any number of rows."""
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
        self._file.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n")

    def __enter__(self) -> NpySink:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._head(self.count, self.width)
        self._file.close()


def _sink(output: str) -> JsonSink | NpySink:
    if output == "-":
        return JsonSink(sys.stdout)
    path = Path(output)
    if not path.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {str(path.parent)!r}")
    return NpySink(path) if path.suffix == ".npy" else JsonSink(path.open("w", encoding="utf-8"))


class _bar:  # noqa: N801 - a context manager
    """A progress bar on stderr, if that is a terminal."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._bar: Any = None

    def __enter__(self) -> Any:
        if not sys.stderr.isatty():
            return lambda number: None
        from tqdm import tqdm

        self._bar = tqdm(total=self._total, unit="texts", dynamic_ncols=True)
        return self._bar.update

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
