"""Settings of the server: each limit from both sides, and what follows from them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.server.metrics_source import served_name, shown_name
from headway.server.settings import MIN_KEY_CHARS, ServerSettings

LIMITS = [
    ("port", 0, 65535), ("max_queue", 0, 2**31), ("max_sequences", 1, 2**20), ("max_inputs", 1, 2**20),
    ("max_body_bytes", 1024, 2**31), ("max_audio_bytes", 1024, 2**31), ("max_bodies_bytes", 0, 2**40),
    ("max_json_depth", 8, 64), ("max_connections", 1, 2**20), ("restart", 0, 10**6),
]  # fmt: skip
SECONDS = [
    ("request_timeout", 0), ("shutdown_timeout", 0), ("template_timeout", 1e-9), ("log_stats_interval", 1),
    ("max_audio_seconds", 0),
]  # fmt: skip


def made(name: str, value: Any) -> ServerSettings:
    """Settings of which one is said."""
    said: dict[str, Any] = {name: value}
    return ServerSettings(**said)


@pytest.mark.parametrize(("name", "low", "high"), LIMITS)
def test_whole_numbers_and_their_limits(name: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(made(name, value), name) == value
    for wrong in (low - 1, high + 1, float(low), True, "1", None):
        with pytest.raises(ConfigError, match=f"{name} must be an integer from {low} to {high}"):
            made(name, wrong)


@pytest.mark.parametrize(("name", "low"), SECONDS)
def test_seconds_and_their_limits(name: str, low: float) -> None:
    for value in (low, 86400, 5.5):
        made(name, value)
    for wrong in (-0.001, 86400.1, math.nan, True, "1", low - 1e-9):
        with pytest.raises(ConfigError, match=name):
            made(name, wrong)


@pytest.mark.parametrize(
    "name", ["served_model_name", "api_key", "allowed_origins", "allowed_hosts", "allowed_media_domains"]
)
def test_lists_hold_words(name: str) -> None:
    assert getattr(made(name, ["long enough"]), name) == ["long enough"]
    for wrong in ("long enough", [""], ["long enough", 1], None, ("long enough",)):
        with pytest.raises(ConfigError, match=f"{name} must be a list of non-empty strings"):
            made(name, wrong)


def test_keys_are_long_and_plain() -> None:
    ServerSettings(api_key=["x" * MIN_KEY_CHARS])
    for wrong in ("x" * (MIN_KEY_CHARS - 1), "ü" * MIN_KEY_CHARS):
        with pytest.raises(ConfigError, match="ASCII characters"):
            ServerSettings(api_key=["long enough", wrong])


def test_files_that_settings_name_are_there() -> None:
    ServerSettings(ssl_keyfile=__file__, ssl_certfile=__file__, chat_template=__file__)
    for missing in ("ssl_keyfile", "ssl_certfile", "chat_template"):
        files: dict[str, Any] = dict.fromkeys(("ssl_keyfile", "ssl_certfile", "chat_template"), __file__)
        with pytest.raises(ConfigError, match=f"{missing}: there is no file"):
            ServerSettings(**files | {missing: "/no/such"})
    for alone in ("ssl_keyfile", "ssl_certfile"):
        with pytest.raises(ConfigError, match="needs both"):
            made(alone, __file__)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False),
     ("10.127.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_names_of_this_machine_are_asked_for_where_nothing_else_guards_it(host: str, loopback: bool) -> None:
    """A key, a list of hosts or a public address say that others may call; "*" says that all may."""
    usual = ServerSettings(host=host)
    assert usual.is_loopback == loopback
    assert usual.hosts() == (["localhost", "127.0.0.1", "[::1]"] if loopback else [])
    assert ServerSettings(host=host, api_key=["long enough"]).hosts() == []
    assert ServerSettings(host=host, allowed_hosts=["a", "b"]).hosts() == ["a", "b"]
    assert ServerSettings(host=host, allowed_hosts=["a", "*"]).hosts() == []


@pytest.mark.parametrize(
    ("model", "shown"), [("owner/name", "owner/name"), ("/srv/models/llama", "llama"), ("./x", "x"), ("~/y", "y")]
)
def test_of_a_folder_its_last_part_is_shown(model: str, shown: str) -> None:
    assert shown_name(model) == shown
    llm: Any = SimpleNamespace(model_info=SimpleNamespace(model=model))
    assert served_name(llm, ServerSettings()) == shown
    assert served_name(llm, ServerSettings(served_model_name=["first", "second"])) == "first"
    assert served_name(llm, object()) == shown
