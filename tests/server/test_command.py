"""``headway serve``: flags, environment and --config to settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.server import launch, logs
from headway.server.settings import ServerSettings

Serve = Callable[..., tuple[dict[str, Any], ServerSettings]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run the command up to the point where it would serve; (arguments of the engine, settings)."""
    seen: list[Any] = []

    def caught(load: Callable[[], object], settings: ServerSettings, model: str) -> int:
        monkeypatch.setattr("headway.api.async_llm.AsyncLLM", lambda **engine: seen.append(engine))
        load()
        assert seen[0]["model"] == model, "what it says that it loads"
        seen.append(settings)
        return 3

    monkeypatch.setattr(launch, "serve", caught)
    monkeypatch.setattr(logs, "set_up", lambda log_format: None)
    monkeypatch.delenv("HEADWAY_API_KEY", raising=False)

    def run(*arguments: str) -> tuple[dict[str, Any], ServerSettings]:
        seen.clear()
        done = CliRunner().invoke(app, ["serve", *arguments])
        assert done.exit_code == 3, done.output
        engine, settings = seen
        return engine, settings

    return run


def test_defaults(serve: Serve) -> None:
    engine, settings = serve()
    assert settings == ServerSettings() and engine["model"] == "smollm2"
    assert settings.is_loopback and settings.hosts()


def test_flags(serve: Serve) -> None:
    engine, settings = serve(
        "some/model", "--port", "9000", "--host", "0.0.0.0", "--served-model-name", "a", "--served-model-name", "b",
        "--max-body-bytes", "1M", "--no-access-log", "--max-model-len", "4k", "--no-enable-prefix-caching",
    )  # fmt: skip
    assert (engine["model"], engine["max_model_len"], engine["enable_prefix_caching"]) == ("some/model", 4000, False)
    assert (settings.port, settings.served_model_name, settings.max_body_bytes) == (9000, ["a", "b"], 2**20)
    assert not settings.access_log and not settings.is_loopback and settings.hosts() == []


def test_keys_of_the_environment_join_those_of_flags(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", "key-number-two key-number-three")
    _, settings = serve("--api-key", "key-number-one")
    assert settings.api_key == ["key-number-one", "key-number-two", "key-number-three"]
    assert "HEADWAY_API_KEY" not in os.environ, "child processes have no use for it"


def test_a_config_file_and_the_command_line_over_it(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: some/model\nport: 9000\nmax-model-len: 32k\nmax_num_seqs: 7\naccess-log: false\n"
        "served-model-name: [a, b]\nallowed_hosts: one\nenforce-eager: true\n"
    )
    engine, settings = serve("--config", str(file), "--port", "9001", "--max-num-seqs", "8")
    assert (engine["model"], engine["max_model_len"], engine["max_num_seqs"]) == ("some/model", 32000, 8)
    assert engine["enforce_eager"] is True
    assert (settings.port, settings.access_log, settings.served_model_name) == (9001, False, ["a", "b"])
    assert settings.allowed_hosts == ["one"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 9000", "--prot"),
        ("no-access-log: true", "--no-access-log"),
        ("config: other.yaml", "--config"),
        ("just text", "keys and values"),
        ("a: [", "config"),
        ("!!python/object/apply:os.system ['true']", "config"),
        ("port: many", "many"),
        ("port: [1, 2]", "[1, 2]"),
        ("port: 1.5", "whole number"),
        ("port: true", "True"),
        ("port: 99999", "port"),
    ],
)
def test_wrong_config_files(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    done = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert done.exit_code == 2 and words in done.output


def test_a_missing_config_file() -> None:
    done = CliRunner().invoke(app, ["serve", "--config", "/no/such.yaml"])
    assert done.exit_code == 2 and "/no/such.yaml" in done.output
