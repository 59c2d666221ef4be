"""What clients may write: addresses of pictures, forms with recordings, texts for models that pool; limits from both sides."""

from __future__ import annotations

from typing import Any

import pytest

from headway.server.errors import ApiError
from headway.server.hearing import multipart
from headway.server.hearing.multipart import Form, read_form
from headway.server.hearing.routes import _flag, _number, _whole
from headway.server.media_fetch import MAX_URL_CHARS, check_url
from headway.server.pooling.call import inputs_of, tei_params
from headway.server.pooling.openai import label_name
from headway.server.pooling.protocol import TeiCut
from headway.server.pooling.score import in_order
from headway.server.pooling.tei import _predictions, _sequences

# -- addresses of pictures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "port", "path"),
    [("http://a.test", 80, "/"), ("https://a.test/x/y?z=1&w#f", 443, "/x/y?z=1&w"), ("http://a.test:81/?q", 81, "/?q"),
     ("HTTP://A.TEST./p", 80, "/p")],
)  # fmt: skip
def test_parts_of_an_address(url: str, port: int, path: str) -> None:
    found = check_url(url, ["a.test"], "x")
    assert (found.host, found.port, found.path, found.scheme) == ("a.test", port, path, url[: url.index(":")].lower())


def test_addresses_up_to_their_limit() -> None:
    url = "http://a.test/" + "x" * (MAX_URL_CHARS - 14)
    assert check_url(url, ["a.test"], "x").path == url[13:]
    with pytest.raises(ApiError, match=f"up to {MAX_URL_CHARS} characters"):
        check_url(url + "x", ["a.test"], "x")
    with pytest.raises(ApiError, match="this server fetches no images"):
        check_url("http://a.test/x", [], "x")
    for domains, hint in (([], False), (["a.test"], True)):
        with pytest.raises(ApiError, match="images come as data URLs") as refused:
            check_url("ftp://a.test/x", domains, "x")
        assert ("or by http" in str(refused.value)) == hint


# -- forms -------------------------------------------------------------------------------------------------------------


def part(name: str, value: bytes, more: str = "", line: str = "Content-Disposition: form-data") -> bytes:
    return f'--b\r\n{line}; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes, kind: str = "multipart/form-data; boundary=b") -> Form:
    return read_form(kind, b"".join(parts) + b"--b--\r\n")


def test_parts_of_a_form() -> None:
    found = form(
        part("a", b"1"), part("b", "ü".encode()), part("a", b"2"), part("f", b"\xff\r\n--x\r\n", '; filename="x.wav"')
    )
    assert found.fields == {"a": ["1", "2"], "b": ["ü"]} and found.files == {"f": b"\xff\r\n--x\r\n"}
    assert found.one("b") == "ü" and found.one("c") is None
    with pytest.raises(ApiError, match="a came 2 times; send it once"):
        found.one("a")


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data; boundary=b",
        'multipart/form-data; boundary="b"',
        "Multipart/Form-Data;charset=x;BOUNDARY=b ; y=z",
    ],
)
def test_boundaries_in_their_forms(kind: str) -> None:
    assert form(part("a", b"1"), kind=kind).one("a") == "1"


@pytest.mark.parametrize(
    ("line", "more"),
    [("content-disposition: form-data", ""), ("Content-Type: text/plain\r\nContent-Disposition: form-data", ""),
     ("CONTENT-DISPOSITION: form-data;x=y", "; z=w")],
)  # fmt: skip
def test_heads_of_parts_in_their_forms(line: str, more: str) -> None:
    assert form(part("a", b"1", more, line)).one("a") == "1"
    assert form(part("a", b"1", more + "; filename*=utf-8''x", line)).files == {"a": b"1"}


def test_forms_up_to_their_limits() -> None:
    most = multipart.MOST_PARTS
    assert len(form(*[part(f"n{i}", b"") for i in range(most)]).fields) == most
    with pytest.raises(ApiError, match=f"more than {most} parts"):
        form(*[part(f"n{i}", b"") for i in range(most + 1)])
    assert form(part("a", bytes(multipart.MOST_FIELD_BYTES))).fields
    with pytest.raises(ApiError, match=f"has {multipart.MOST_FIELD_BYTES + 1} bytes"):
        form(part("a", bytes(multipart.MOST_FIELD_BYTES + 1)))
    assert form(part("f", bytes(2 * multipart.MOST_FIELD_BYTES), '; filename="x"')).files
    spare = multipart.MOST_HEADER_BYTES - len('\r\nContent-Disposition: form-data; name="a"; x=')
    assert form(part("a", b"1", "; x=" + "y" * spare)).one("a") == "1"
    with pytest.raises(ApiError, match="too long ones"):
        form(part("a", b"1", "; x=" + "y" * (spare + 1)))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("", 0.0), ("0", 0.0), ("1", 1.0), ("0.5", 0.5), ("1.001", None), ("-0.1", None), ("nan", None), ("x", None)],
)
def test_numbers_of_forms(given: str, wanted: float | None) -> None:
    one = Form({"t": [given]})
    if wanted is None:
        with pytest.raises(ApiError, match="t must be a number from 0 to 1"):
            _number(one, "t", 0.0, 1.0)
    else:
        assert _number(one, "t", 0.0, 1.0) == wanted == _number(Form(), "t", 0.0, 1.0) + wanted


def test_flags_and_whole_numbers_of_forms() -> None:
    for given, wanted in (("true", True), ("1", True), ("TRUE", True), ("false", False), ("0", False), ("", False)):
        assert _flag(Form({"x": [given]}), "x") is wanted
    for given in ("yes", "2", "none"):
        with pytest.raises(ApiError, match="x must be true or false"):
            _flag(Form({"x": [given]}), "x")
    assert [_whole(Form({"x": [given]}), "x") for given in ("", "0", "-3", "12")] == [None, 0, -3, 12]
    assert _whole(Form(), "x") is None
    for given in ("1.0", "x", "1e3"):
        with pytest.raises(ApiError, match="x must be a whole number"):
            _whole(Form({"x": [given]}), "x")


# -- models that pool --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "lists", "single"),
    [
        ("a", [["a"]], True), (["a"], [["a"]], True), (["a", "b"], [["a", "b"]], True), ([["a"]], [["a"]], False),
        ([["a", "b"]], [["a", "b"]], False), ([["a"], ["b", "c"]], [["a"], ["b", "c"]], False), (["a", "b", "c"], None, None),
        ([], None, None), ([[]], None, None), ([["a", "b", "c"]], None, None), (["a", ["b"]], None, None),
        ([["a"], "b"], None, None),
    ],
)  # fmt: skip
def test_teis_forms_of_texts_and_pairs(given: Any, lists: Any, single: bool | None) -> None:
    if lists is None:
        with pytest.raises(ApiError, match="inputs must be a text, a pair"):
            _sequences(given)
    else:
        assert _sequences(given) == (lists, single)


def test_labels_by_their_scores() -> None:
    found = _predictions([0.25, 0.5, 0.25, 0.75], ("a", "b"))
    assert [(each["label"], each["score"]) for each in found] == [
        ("LABEL_3", 0.75),
        ("b", 0.5),
        ("a", 0.25),
        ("LABEL_2", 0.25),
    ]
    assert [label_name(("a", "b"), number) for number in range(3)] == ["a", "b", "LABEL_2"]
    assert in_order([0.5, 1.0, 0.5, -1.0, 2.0]) == [4, 1, 0, 2, 3]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), (["a", [1]], ["a", [1]]),
     ([], None), ([1, "a"], None), ([[1], 2], None)],
)  # fmt: skip
def test_forms_of_inputs(given: Any, prompts: Any) -> None:
    if prompts is None:
        with pytest.raises(ApiError) as refused:
            inputs_of(given, "input")
        assert refused.value.param == "input"
    else:
        assert inputs_of(given, "input") == prompts


@pytest.mark.parametrize(
    ("truncate", "direction", "most", "side"),
    [(True, "Left", -1, "left"), (True, "right", -1, "right"), (True, None, -1, None), (None, None, None, None)],
)
def test_teis_words_for_cutting(truncate: bool | None, direction: Any, most: int | None, side: str | None) -> None:
    found = tei_params(TeiCut(truncate=truncate, truncation_direction=direction))
    assert (found.truncate_prompt_tokens, found.truncation_side) == (most, side)
