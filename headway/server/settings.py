"""What an operator may say about the server; the engine has its own arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.params import refuse_unknown

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
MIN_KEY_CHARS = 8


@refuse_unknown
@dataclass(kw_only=True, slots=True)
class ServerSettings:
    """Settings of one HTTP server. Values are checked on construction; ConfigError names the flag and the fix.

    Attributes:
        host: address to listen on; only this machine can reach the default.
        port: 0 takes any free port.
        served_model_name: names clients may use, the first one is shown; default: the model as given to the engine, of a
            folder or file its last part.
        api_key: accepted keys; every route but /health and /live asks for one. Better: HEADWAY_API_KEY, as flags show in ps.
        allowed_origins: origins of web pages that may call this server (CORS), or "*"; none by default.
        allowed_hosts: Host headers accepted, or "*"; default: the loopback names where neither --host nor a key is set.
        chat_template: Jinja file used instead of the model's own template.
        tool_call_parser: how the model writes tool calls: "auto" (by its template), "hermes", "llama3_json", "none".
        max_queue: sequences that may wait beyond those that run; one more is answered 429.
        max_sequences: most prompts times n in one request.
        max_inputs: most texts in one request to a model that pools.
        max_body_bytes: longest request body.
        max_audio_bytes: longest form with a recording.
        max_audio_seconds: longest recording.
        max_bodies_bytes: bytes of all request bodies being received at once; more is answered 503. Short bodies do not count.
        max_json_depth: deepest nesting of a request body.
        max_connections: connections open at once, fewer where the system allows too few open files; one more is answered 503.
        request_timeout: seconds one request may take; 0: no limit.
        template_timeout: seconds of processor time a chat template may take for one request.
        allowed_media_domains: hosts from which images are fetched that clients name by http address, ".example.org" for all
            below it; none by default. Private addresses are never asked.
        shutdown_timeout: seconds that running requests get to finish after SIGTERM or SIGINT; a second signal cuts it short.
        restart: how often a dead engine is started again before the server gives up.
        log_format: "text" or "json", one object a line.
        access_log: one line for each request; no text of prompts or answers in it.
        disable_log_stats: no line with throughput, queue and headway every few seconds while there is work.
        log_stats_interval: seconds between those lines.
        otlp_traces_endpoint: address of an OpenTelemetry collector that gets a span for each request; needs headway[otel].
        ssl_keyfile: private key, to serve https.
        ssl_certfile: certificate chain, to serve https.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] = field(default_factory=list)
    api_key: list[str] = field(default_factory=list)
    allowed_origins: list[str] = field(default_factory=list)
    allowed_hosts: list[str] = field(default_factory=list)
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    max_queue: int = 2048
    max_sequences: int = 256
    max_inputs: int = 2048
    max_body_bytes: int = 16 * 2**20
    max_audio_bytes: int = 25 * 2**20
    max_audio_seconds: float = 1800.0
    max_bodies_bytes: int = 256 * 2**20
    max_json_depth: int = 32
    max_connections: int = 4096
    request_timeout: float = 0.0
    template_timeout: float = 5.0
    allowed_media_domains: list[str] = field(default_factory=list)
    shutdown_timeout: float = 20.0
    restart: int = 0
    log_format: str = "text"
    access_log: bool = True
    disable_log_stats: bool = False
    log_stats_interval: float = 10.0
    otlp_traces_endpoint: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queue", 0, 2**31),
            ("max_sequences", 1, 2**20),
            ("max_inputs", 1, 2**20),
            ("max_body_bytes", 1024, 2**31),
            ("max_audio_bytes", 1024, 2**31),
            ("max_bodies_bytes", 0, 2**40),
            ("max_json_depth", 8, 64),
            ("max_connections", 1, 2**20),
            ("restart", 0, 10**6),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}; got {value!r}")
        for name in (
            "request_timeout",
            "shutdown_timeout",
            "template_timeout",
            "log_stats_interval",
            "max_audio_seconds",
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 86400:
                raise ConfigError(f"{name} must be seconds from 0 to 86400; got {value!r}")
        if self.template_timeout == 0:
            raise ConfigError("template_timeout must be above 0: a template that never ends must be stopped")
        if self.log_stats_interval < 1:
            raise ConfigError("log_stats_interval must be at least 1 second; disable_log_stats turns the lines off")
        for name, choices in (
            ("log_format", ("text", "json")),
            ("tool_call_parser", ("auto", "hermes", "llama3_json", "none")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        self._check_lists()
        self._check_files()

    def _check_lists(self) -> None:
        for item in fields(self):
            if not str(item.type).startswith("list"):
                continue
            value = getattr(self, item.name)
            if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
                raise ConfigError(f"{item.name} must be a list of non-empty strings")
        if any(len(key) < MIN_KEY_CHARS or not key.isascii() for key in self.api_key):
            raise ConfigError(f"an api_key needs at least {MIN_KEY_CHARS} ASCII characters")

    def _check_files(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("https needs both ssl_keyfile and ssl_certfile")
        for name in ("ssl_keyfile", "ssl_certfile", "chat_template"):
            value = getattr(self, name)
            if value is not None and not Path(value).is_file():
                raise ConfigError(f"{name}: there is no file {value!r}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def hosts(self) -> list[str]:
        """Host headers to accept; [] accepts any.

        A web page can point its own name at this machine (DNS rebinding) and would then be same-origin with a server
        that has no key; its Host header gives it away.
        """
        if "*" in self.allowed_hosts:
            return []
        if self.allowed_hosts or self.api_key or not self.is_loopback:
            return self.allowed_hosts
        return list(LOOPBACK_NAMES)
