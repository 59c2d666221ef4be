"""``headway transcribe``: recordings to text or subtitles."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.cli.options import engine_kwargs, with_options
from headway.core.config import EngineArgs
from headway.core.errors import ConfigError, InvalidRequestError

FORMATS = ("text", "srt", "vtt", "json")


@with_options(sampling=False, default="openai/whisper-base", positional=False)
def transcribe(
    files: Annotated[list[str], typer.Argument(help="Recordings: WAV; with soundfile also FLAC, MP3 and OGG.")],
    output: Annotated[str | None, typer.Option("--output", "-o", help="A file to write; default: stdout.")] = None,
    form: Annotated[str, typer.Option("--format", "-f", help="text, srt, vtt or json.")] = "text",
    language: Annotated[str | None, typer.Option("--language", help="Its code; default: the model finds out.")] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Into English.")] = False,
    prompt: Annotated[str, typer.Option("--prompt", help="Text that might have come before.")] = "",
    temperature: Annotated[float, typer.Option("--temperature", help="Of the draws; 0 takes the likeliest.")] = 0.0,
    words: Annotated[
        bool, typer.Option("--word-timestamps", help="When each word is spoken; with --format json.")
    ] = False,
    condition: Annotated[
        bool, typer.Option("--condition-on-previous-text", help="Each window is given the text before it.")
    ] = False,
    *,
    engine: EngineArgs,
) -> None:
    """Transcribe recordings of any length."""
    from headway import LLM
    from headway.api.hearing.transcriber import TranscriptionOptions
    from headway.api.hearing.transcript import Transcript, as_srt, as_vtt

    if form not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {form!r}")
    if words and form != "json":
        raise ConfigError(f"--word-timestamps are written with --format json, not {form}")
    if form in ("srt", "vtt") and len(files) > 1:
        raise InvalidRequestError(f"--format {form} takes one recording; {len(files)} were given", "files")
    options = TranscriptionOptions(
        language=language,
        task="translate" if translate else "transcribe",
        prompt=prompt,
        temperature=temperature,
        word_timestamps=words,
        condition_on_previous_text=condition,
    )

    def written(file: str, found: Transcript) -> str:
        if form == "srt":
            return as_srt(found.segments)
        if form == "vtt":
            return as_vtt(found.segments)
        return json.dumps({"file": file, **asdict(found)}, ensure_ascii=False) if form == "json" else found.text

    with LLM(**engine_kwargs(engine)) as llm:
        found = llm.transcribe(list(files), options)
    text = "\n".join(written(file, each) for file, each in zip(files, found, strict=True)).rstrip("\n") + "\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        Path(output).write_text(text, encoding="utf-8")
