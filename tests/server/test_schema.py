"""Random requests made from our own OpenAPI description: no 5xx, and no answer the description does not know."""

from __future__ import annotations

from typing import Any

import jsonschema
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from headway import AsyncLLM
from headway.server.app import ROUTES, build_app
from headway.server.openapi import KINDS
from headway.server.settings import ServerSettings
from tests.examples import examples
from tests.server import parrot


@pytest.fixture(scope="module")
def description(parrot_llm: AsyncLLM) -> Any:
    app = build_app(parrot_llm, ServerSettings(allowed_hosts=["*"], access_log=False))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


OPERATIONS = [(path, "POST", mode) for path, *_ in ROUTES for mode in GenerationMode]
OPERATIONS += [(path, "GET", GenerationMode.POSITIVE) for path in ("/v1/models", "/v1/models/{name}", "/ready")]


@pytest.fixture(autouse=True)
def docile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis tries strings of our own code, "request_failed" among them: no prompt may ask the parrot to misbehave."""
    for name in ("SLOW", "ENDLESS", "DIE", "FAIL"):
        monkeypatch.setattr(parrot, name, "\0")  # the parrot drops zeros


@pytest.mark.hypothesis
@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS)
def test_no_request_breaks_the_server(description: Any, path: str, method: str, mode: GenerationMode) -> None:
    @given(case=description[path][method].as_strategy(generation_mode=mode))
    @examples(15, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        case.call_and_validate(checks=(not_a_server_error, status_code_conformance, content_type_conformance))

    ask()


def test_the_description_is_what_decodes(parrot_llm: AsyncLLM) -> None:
    """Every field of every struct is described, unknown ones are not allowed, required ones are marked."""
    document = build_app(parrot_llm, ServerSettings()).openapi()
    schemas = document["components"]["schemas"]
    for kind in KINDS:
        described = schemas[kind.__name__]
        assert set(described["properties"]) == set(kind.__struct_fields__)
        assert described["additionalProperties"] is False
        required = {f.name for f in msgspec.structs.fields(kind) if f.required}
        assert set(described["required"]) == required
    check = jsonschema.Draft202012Validator(
        {"$ref": "#/components/schemas/CompletionRequest", "components": document["components"]}
    ).is_valid
    assert check({"prompt": [[1, 2]], "temperature": 0.5, "stop": "x"})
    assert not check({"prompt": "x", "temperature": "hot"}) and not check({"prompt": "x", "guided_json": {}})
    path = document["paths"]["/v1/chat/completions"]["post"]
    assert path["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")


def test_the_description_names_the_key(parrot_llm: AsyncLLM) -> None:
    document = build_app(parrot_llm, ServerSettings(api_key=["a-long-key"])).openapi()
    assert document["security"] == [{"key": []}]
