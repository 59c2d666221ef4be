"""The files under deploy/ say nothing that is not so: commands, flags, routes and metrics they name exist."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from headway import __version__
from headway.api.request_metrics import RequestMetrics
from headway.core.messages import EngineStats
from headway.server.metrics import Figures
from tests.engine.fake_core import model_info
from tests.house.source import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(path for path in DEPLOY.glob("Dockerfile.*") if path.suffix != ".dockerignore")
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "headway.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))


def serve_flags() -> set[str]:
    """Every flag of ``headway serve``, as the frozen command line has it."""
    lines = (ROOT / "tests" / "cli" / "cli_options.txt").read_text(encoding="utf-8").splitlines()
    words = {word for line in lines if line.startswith("headway serve ") for word in line.split()[2:]}
    return {word for word in words if word.startswith("--")}


def check_flags(words: list[str]) -> None:
    flags = serve_flags()
    if not flags:
        pytest.skip("this tree has no headway serve")
    assert {word for word in words if word.startswith("--")} <= flags


# -- the dashboard and the scrape ------------------------------------------------------------------------------------


def published() -> set[str]:
    """Names of all samples that a server can publish."""
    stats = EngineStats(has_device_clock=True, waits={"a": 1}, wait_seconds={"a": 1.0})
    registry = CollectorRegistry()
    registry.register(Figures("m", model_info(), RequestMetrics(10), stats))
    return {sample.name for family in registry.collect() for sample in family.samples}


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    names = published()
    asked = {name for text in expressions() for name in re.findall(r"headway:\w+", text)}
    assert asked <= names and len(asked) > 20
    [model] = [each for each in DASHBOARD["templating"]["list"] if each["name"] == "model"]
    assert set(re.findall(r"headway:\w+", model["query"]["query"])) <= names


@pytest.mark.parametrize("text", expressions())
def test_a_query_is_well_formed(text: str) -> None:
    depth = 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    assert text.count("headway:") == text.count('{model_name=~"$model"')
    for name, following in re.findall(r"(headway:\w+)\{[^}]*\}(\[\$__rate_interval\])?", text):
        is_counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
        assert bool(following) == is_counter, f"rate() of {name}?"
    assert ("histogram_quantile" in text) == ("by (le)" in text) == ("_bucket" in text)


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24 and taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_the_scrape_example() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["authorization"]["type"] == "Bearer"
    assert job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]


# -- images ----------------------------------------------------------------------------------------------------------


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined."""
    text = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_starts_a_command_that_exists_as_nobody_special(path: Path) -> None:
    lines = instructions(path)
    names = [name for name, _ in lines]
    assert set(names) <= {
        *("FROM", "WORKDIR", "COPY", "RUN", "ARG", "ENV", "USER"),
        *("VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
    }
    last = dict(lines)
    command = json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"])
    assert command[:2] == ["headway", "serve"] and last["EXPOSE"] == "8000"
    assert names.index("USER") > max(i for i, n in enumerate(names) if n == "RUN")
    # A number, since Kubernetes cannot tell who a name is; and a user that the image has made.
    assert last["USER"].isdigit() and int(last["USER"]) == pod()["securityContext"]["runAsUser"] > 0
    assert any(f"useradd --uid {last['USER']} " in rest for name, rest in lines if name == "RUN")
    assert 'headway = "headway.cli.main:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    check_flags(command)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_copies_what_is_there_and_what_the_wheel_needs(path: Path) -> None:
    sources = [
        word
        for name, rest in instructions(path)
        if name == "COPY" and "--from" not in rest
        for word in rest.split()[:-1]
    ]
    assert {"pyproject.toml", "README.md", "LICENSE", "headway"} <= {word.removeprefix("./") for word in sources}
    ignore = path.with_name(path.name + ".dockerignore").read_text(encoding="utf-8").split()
    for word in sources:
        assert (ROOT / word).exists()
        assert any(fnmatch.fnmatch(word.removeprefix("./"), rule[1:]) for rule in ignore if rule.startswith("!"))


def pinned(image: str) -> bool:
    """Whether a reference names a version: what is built or deployed tomorrow is what was tried today."""
    name, _, tag = image.rpartition(":")
    return "@sha256:" in image or (bool(name) and "/" not in tag and tag not in ("", "latest"))


def test_what_counts_as_pinned() -> None:
    assert [pinned(each) for each in ("a:1.2", "r:5000/a:1", "a@sha256:0")] == [True] * 3
    assert [pinned(each) for each in ("a", "a:latest", "r:5000/a")] == [False] * 3


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_built_from_pinned_layers_and_keeps_no_caches(path: Path) -> None:
    lines = instructions(path)
    stages = [rest.split() for name, rest in lines if name == "FROM"]
    assert all(pinned(words[0]) for words in stages)
    named = {words[2] for words in stages if len(words) == 3}
    copied = {word.partition("=")[2] for name, rest in lines for word in rest.split() if word.startswith("--from=")}
    assert copied == named, "every stage is used, and every one used exists"
    for name, rest in lines:
        if name == "RUN" and "pip " in rest:
            assert "--no-cache-dir" in rest
        if name == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest
        assert name != "ADD" and "curl" not in rest and "sudo" not in rest
        assert not (name in ("ARG", "ENV") and re.search("KEY|TOKEN|SECRET|PASSWORD", rest)), (
            "it would stay in the image"
        )


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_names_its_torch(path: Path) -> None:
    """Another release brings another Triton, and kernels that nobody tried."""
    lines = instructions(path)
    [version] = [rest.partition("=")[2] for name, rest in lines if name == "ARG" and rest.startswith("TORCH_VERSION=")]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    [install] = [i for i, (name, rest) in enumerate(lines) if name == "RUN" and '"torch==$TORCH_VERSION"' in rest]
    [ours] = [i for i, (name, rest) in enumerate(lines) if name == "RUN" and "/wheels/*.whl" in rest]
    assert install < ours, "or the wheel's range would choose"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_writes_goes_into_its_volume(path: Path) -> None:
    """The root file system may be read-only, as in the Kubernetes example."""
    last = dict(instructions(path))
    places = dict(word.split("=") for word in last["ENV"].split())
    assert {"XDG_CACHE_HOME", "HF_HOME"} <= set(places)
    assert all(place.startswith(last["VOLUME"]) for place in places.values() if "/" in place)
    mounts = [mount["mountPath"] for mount in pod()["containers"][0]["volumeMounts"]]
    assert last["VOLUME"] in mounts and pod()["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


def test_the_examples_name_this_version() -> None:
    [image] = [container["image"] for container in pod()["containers"]]
    assert pinned(image) and image == f"headway:{__version__}"
    for path in DOCKERFILES:
        tags = re.findall(r"-t (\S+)", path.read_text(encoding="utf-8"))
        assert tags and all(tag.endswith(f":{__version__}") for tag in tags)


# -- services --------------------------------------------------------------------------------------------------------

UNIT_KEYS = {
    "Unit": {"Description", "After", "Wants"},
    "Service": {
        *("Type", "Environment", "EnvironmentFile", "ExecStart", "KillMode", "TimeoutStopSec", "Restart", "RestartSec"),
        *("LimitNOFILE", "LimitMEMLOCK", "DynamicUser", "CacheDirectory", "PrivateTmp", "ProtectSystem", "ProtectHome"),
        *("ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups", "ProtectClock", "NoNewPrivileges"),
        *("RestrictSUIDSGID", "RestrictRealtime", "RestrictAddressFamilies", "LockPersonality"),
        *("CapabilityBoundingSet", "SystemCallArchitectures"),
    },
    "Install": {"WantedBy"},
}


def unit() -> dict[str, dict[str, str]]:
    """Section -> key -> value (the last one)."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in (DEPLOY / "headway.service").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(section, {})[key] = value
    return found


def flag(words: list[str], name: str) -> float:
    return float(words[words.index(name) + 1])


def test_the_unit_drains_before_it_kills() -> None:
    found = unit()
    assert {section: set(keys) - UNIT_KEYS[section] for section, keys in found.items()} == {s: set() for s in UNIT_KEYS}
    command = shlex.split(found["Service"]["ExecStart"])
    assert command[1] == "serve" and float(found["Service"]["TimeoutStopSec"]) > flag(command, "--shutdown-timeout")
    check_flags(command)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("no systemd-analyze on this machine")
    copy = tmp_path / "headway.service"
    text = (DEPLOY / "headway.service").read_text(encoding="utf-8")
    copy.write_text(text.replace("/opt/headway/bin/headway", sys.executable), encoding="utf-8")
    done = subprocess.run([systemd, "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert "headway.service" not in done.stderr, done.stderr


def pod() -> dict[str, Any]:
    [deployment] = [each for each in OBJECTS if each["kind"] == "Deployment"]
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def test_the_kubernetes_objects_refer_to_each_other() -> None:
    by_kind = {each["kind"]: each for each in OBJECTS}
    assert set(by_kind) == {"Secret", "PersistentVolumeClaim", "Deployment", "Service"}
    [container] = pod()["containers"]
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"] == labels == by_kind["Service"]["spec"]["selector"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod()["volumes"]}
    key = container["env"][0]["valueFrom"]["secretKeyRef"]
    assert key["name"] == by_kind["Secret"]["metadata"]["name"] and key["key"] in by_kind["Secret"]["stringData"]
    claim = pod()["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == by_kind["PersistentVolumeClaim"]["metadata"]["name"]
    assert by_kind["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]


def test_the_pod_has_time_to_drain() -> None:
    [container] = pod()["containers"]
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > pause + flag(container["args"], "--shutdown-timeout")
    check_flags(container["args"])


# -- probes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """A server that says 200 to /health and /ready; its port, and (path, authorization) of what was asked."""
    asked: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(200 if self.path in ("/health", "/ready") else 503)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, asked
    server.shutdown()
    thread.join()
    server.server_close()


def run_probe(code: str, port: int) -> int:
    assert "127.0.0.1:8000" in code
    command = [sys.executable, "-c", code.replace("127.0.0.1:8000", f"127.0.0.1:{port}")]
    return subprocess.run(command, env={"HEADWAY_API_KEY": "one two"}, capture_output=True, timeout=60).returncode


def test_probes_ask_and_believe_the_answer(listener: tuple[int, list[tuple[str, str | None]]]) -> None:
    port, asked = listener
    for path in DOCKERFILES:
        check = dict(instructions(path))["HEALTHCHECK"]
        code = json.loads(check[check.index("[") :])[2]
        assert run_probe(code, port) == 0
        assert asked.pop() == ("/health", None)
        assert run_probe(code.replace("/health", "/elsewhere"), port) != 0
        asked.clear()
    [container] = pod()["containers"]
    assert run_probe(container["readinessProbe"]["exec"]["command"][2], port) == 0
    assert asked == [("/ready", "Bearer one")]
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
