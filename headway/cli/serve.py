"""``headway serve``: the HTTP server."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli.options import engine_kwargs, with_options
from headway.core.config import EngineArgs
from headway.server.settings import ServerSettings

KEYS_VARIABLE = "HEADWAY_API_KEY"


def read_config(context: typer.Context, file: str | None) -> str | None:
    """Make a YAML file's values the defaults of the flags: what is on the command line wins.

    Keys are flags without their dashes, with - or _ inside; ``model`` is the argument.

    Raises:
        typer.BadParameter: no such file, no mapping, or a key that is no flag.
    """
    if file is None:
        return None
    import yaml

    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{file}: {error}") from None
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{file}: it must hold keys and values, as in 'port: 8001'")
    known = {
        option.removeprefix("--").replace("-", "_"): parameter
        for parameter in context.command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        parameter = known.get(str(key).replace("-", "_"))
        if parameter is None or parameter.name in ("config", "help") or str(key).startswith(("no-", "no_")):
            raise typer.BadParameter(f"{file}: there is no flag --{str(key).replace('_', '-')}")
        many = getattr(parameter, "multiple", False)
        defaults[str(parameter.name)] = [value] if many and not isinstance(value, list) else value
    context.default_map = {**(context.default_map or {}), **defaults}
    return file


@with_options(sampling=False, settings=ServerSettings)
def serve(
    config: Annotated[  # noqa: ARG001 - handled by its callback
        str | None,
        typer.Option("--config", help="YAML file with flags as keys.", callback=read_config, is_eager=True),
    ] = None,
    *,
    engine: EngineArgs,
    settings: ServerSettings,
) -> None:
    """Serve a model over HTTP, as OpenAI's API. /live answers at once, /health when the model is loaded."""
    from headway.server import launch, logs

    keys = os.environ.get(KEYS_VARIABLE, "").split()
    settings = dataclasses.replace(settings, api_key=[*settings.api_key, *keys])
    logs.set_up(settings.log_format)
    # The engine process inherits this environment and has no use for the keys.
    os.environ.pop(KEYS_VARIABLE, None)
    if engine.node_rank:
        from headway.engine.node import run_node

        raise typer.Exit(run_node(engine))

    def load() -> Any:
        from headway.api.async_llm import AsyncLLM

        return AsyncLLM(**engine_kwargs(engine))

    raise typer.Exit(launch.serve(load, settings, engine.model))
