"""The GPU's figures: parts that break cost only themselves, verdicts name what misses its target, pages are made of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import proof, proof_pages, proof_syncs
from bench.proof import Part, calls_verdict, corpus_verdict, page_verdict

LINE: dict[str, Any] = {
    "steps": 40,
    "launch_waits": 0,
    "h2d_per_step": 1.0,
    "d2h_per_step": 1.0,
    "graph_launches_per_step": 1.0,
    "kernel_launches_per_step": 0.0,
    "rest_waits": 0,
    "collect_waits": 3,
    "back_pressure_waits": 3,
}
SEEN = {"add": [], "item": ["read"]}
SOAK: dict[str, Any] = {
    "device": "NVIDIA H200", "model": "a/qwen3", "dtype": "float32", "guard": "armed", "seconds": 60.0, "finished": 5000,
    "aborted": 9, "tokens": 70000, "steps": 800, "preemptions": 4, "checked": 20, "agreed": 19, "agreed_alone": 20,
    "wrong": [], "over": True,
}  # fmt: skip
CORPUS = {"snippets": 2, "precision": 1.0, "recall": 1.0, "missed": [], "false_alarms": [], "errors": {}, "seen": SEEN}


def write(out: str) -> list[str]:
    """A part that writes ``out`` as its result."""
    return ["-c", f"import sys; open(sys.argv[1], 'w').write({out!r}); print('said')", "OUT"]


def test_parts_that_break_cost_only_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [
        Part("good", write('{"a": 1, "timeline": 2}'), 60),
        Part("crash", ["-c", "import os; os._exit(7)", "OUT"], 60),
        Part("hang", ["-c", "import time; print('begun', flush=True); time.sleep(60)", "OUT"], 1),
        Part("partial", [*write('{"b": 2}')[:1], write('{"b": 2}')[1] + "; import os; os.abort()", "OUT"], 60),
        Part("verdict", write('{"c": 3}'), 60, lambda result: f"c is {result['c']}"),
        Part("no file", ["-c", "raise SystemExit(1)"], 60),
    ]
    monkeypatch.setattr(proof, "parts", lambda: made)
    monkeypatch.setattr(sys, "argv", ["proof", "--json", str(tmp_path / "o.json")])
    (tmp_path / "o.json").write_text('{"parts": {"earlier": {"wrong": "old", "result": {}}, "good": {}}}')
    assert proof.main() == 1
    found = json.loads((tmp_path / "o.json").read_text())["parts"]
    assert found.pop("earlier") == {"wrong": "old", "result": {}}, "a part that was not run again is kept"
    assert found["good"]["result"] == {"a": 1} and not found["good"]["wrong"] and "said" in found["good"]["printed"]
    assert found["crash"]["wrong"] == found["hang"]["wrong"] == "no result"
    assert "more than 1 s" in found["hang"]["printed"] and "begun" in found["hang"]["printed"]
    assert found["partial"]["result"] == {"b": 2} and found["partial"]["wrong"].startswith("exit status -")
    assert found["verdict"]["wrong"] == "c is 3" and found["no file"]["wrong"] == "exit status 1"


def test_reports_do_not_say_where_this_machine_keeps_things() -> None:
    text = f'{{"file": "/opt/t/.venv/lib/python3.12/site-packages/transformers/a.py", "b": "{proof.ROOT}/bench/b.py"}}'
    assert json.loads(proof.placeless(text)) == {"file": "transformers/a.py", "b": "bench/b.py"}
    assert proof.placeless("GET /v1/x and 1/2") == "GET /v1/x and 1/2"


def test_a_budget_and_a_page_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = ["-c", "import sys; open(sys.argv[1], 'w').write('x' * 1000001); open(sys.argv[2], 'w').write('{}')"]
    made = [
        Part("large", [*large, "PAGE", "OUT"], 60),
        Part("small", [large[0], large[1].replace("1000001", "9"), "PAGE"], 60),
    ]
    monkeypatch.setattr(proof, "parts", lambda: made)
    words = ["proof", "--json", str(tmp_path / "o.json"), "--html", str(tmp_path / "page.html")]
    monkeypatch.setattr(sys, "argv", [*words, "--part", "large"])
    proof.main()
    assert not (tmp_path / "page.html").exists() and (tmp_path / "page.large.html").exists()
    monkeypatch.setattr(sys, "argv", [*words, "--seconds", "1"])
    assert proof.main() == 1
    found = json.loads((tmp_path / "o.json").read_text())["parts"]
    assert [part["wrong"] for part in found.values()] == ["no time left"] * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"launch_waits": 2}, "2 waits in launches"),
        ({"rest_waits": 1}, "1 beside them"),
        ({"h2d_per_step": 2.0}, "2.0 copies up"),
        ({"error": "KeyError: x"}, "KeyError: x"),
    ],
)
def test_the_calls_verdict(change: dict[str, Any], says: str) -> None:
    found = calls_verdict({"features": {"greedy": LINE | change}})
    assert says in found if says else not found


def test_the_other_verdicts() -> None:
    assert not corpus_verdict({"results": {"live": CORPUS}, "wrong_labels": []})
    assert "missed ['x']" in corpus_verdict({"results": {"live": CORPUS | {"missed": ["x"]}}})
    assert not corpus_verdict({"results": {"torch": CORPUS | {"missed": ["x"]}}})
    assert "taken" in corpus_verdict({"results": {"cupti": {"failed": "taken"}}})
    assert "wrong labels" in corpus_verdict({"wrong_labels": ["x"]})
    assert "no detector ran" in corpus_verdict({}) and "no feature" in calls_verdict({"features": {}})
    assert "no wait" in page_verdict({"totals": {"unsanctioned": 0}})
    assert not page_verdict({"totals": {"unsanctioned": 4}, "gpu": {"busy_percent": 3}})


def test_the_command_names_what_is_there() -> None:
    names = [part.name for part in proof.parts()]
    assert len(set(names)) == len(names) and sum(part.seconds for part in proof.parts()) < 1400
    for part in proof.parts():
        for word in part.command:
            assert not word.endswith(".py") or (proof.ROOT / word).exists(), word


def reports(folder: Path, *, gpu: bool) -> list[str]:
    simulation = {
        "corpus": {"labels": {"add": "none", "item": "read"}, "results": {"simulation": CORPUS}},
        "matrix": {
            "depths": [1, 2], "features": 20, "engines": 4, "requests": 100, "steps": 1234, "device_operations": 99999,
            "zombie_rows": 7, "preemptions": 3, "readback_waits": 11, "cpu_seconds": 12.3,
        },
        "scenarios": {"number": 10, "cpu_seconds": 2.0},
    }  # fmt: skip
    planted = [
        {"fault": "staging-without-fence", "caught": True, "as_meant": True, "seconds": 60.0},
        {"fault": "ring-of-one", "caught": False, "as_meant": False, "seconds": 60.0},
    ]
    about = {"gpu": "NVIDIA H200", "torch": "2.11", "cupti_python": "13.0.1", "wrong_labels": []}
    found = {
        "file": "/a/b/c/utils.py", "line": 7, "call": "Tensor.item", "kind": "read", "count": 16, "micros": 50.0,
        "fix": {"name": "readback ring"},
    }  # fmt: skip
    generated = {
        "command": ["python", "generate.py"], "totals": {"unsanctioned": 87, "micros_lost": 1000.0}, "wall_micros": 40000.0,
    }  # fmt: skip
    card = {
        "parts": {
            "corpus-cupti": {"result": about | {"results": {"cupti": CORPUS}}},
            "corpus-live": {"result": about | {"results": {"live": {"failed": "taken"}}}},
            "calls-graphs": {
                "result": {
                    "gpu": "NVIDIA H200", "torch": "2.11", "model": "m", "rows": 8, "counted_by": "CUPTI callbacks",
                    "features": {"greedy": LINE, "top_k": {"error": "KeyError: 1"}},
                }
            },
            "generate-cupti": {"result": generated | {"findings": [found] * 14, "gpu": None}},
            "generate": {
                "page_bytes": 999,
                "result": {
                    "command": ["python", "generate.py"], "totals": {"unsanctioned": 33, "micros_lost": 2000.0},
                    "wall_micros": 50000.0, "gpu": {"busy_percent": 12.5}, "findings": [found],
                }
            },
        }
    }  # fmt: skip
    (folder / "s.json").write_text(json.dumps(simulation))
    (folder / "p.json").write_text(json.dumps(planted))
    if gpu:
        (folder / "g.json").write_text(json.dumps(card))
    failed = [{"seed": 6, "again": "python -m tests.sim.replay 6"}]
    soaked = {"first": 5, "number": 2000, "cpu_seconds": 800.4, "failed": failed, "mended": [{"seed": 7}]}
    (folder / "l.json").write_text(json.dumps(soaked))
    (folder / "k.json").write_text(json.dumps(SOAK))
    words = ["--simulation", "s.json", "--planted", "p.json", "--gpu", "g.json", "--simulation-soak", "l.json"]
    words += ["--soak", "none.json", "k.json", "--programs", str(folder)]
    return [str(folder / word) if word.endswith(".json") else word for word in words] + ["--out", str(folder)]


def test_pages_without_a_gpu_hold_what_was_measured(tmp_path: Path) -> None:
    proof_pages.main(reports(tmp_path, gpu=False))
    text = (tmp_path / "proof.md").read_text()
    told = " ".join(text.split())
    assert "**1,999 of 2,000 scenarios of the soak passed** (seeds 5-2004, 800 s of CPU), 1 of them only after" in told
    assert "those that fail: `python -m tests.sim.replay 6`." in told
    assert "1,234 steps" in text and "1 of 2 caught" in text and "## 4" not in text and "## 5" not in text
    accuracy = (tmp_path / "syncs-accuracy.md").read_text()
    assert "| item | read | read |" in accuracy and "Measured on" not in accuracy


def test_pages_with_a_gpu(tmp_path: Path) -> None:
    proof_pages.main(reports(tmp_path, gpu=True))
    text = (tmp_path / "proof.md").read_text()
    assert "| greedy | 40 | 0 | 3 | 1.0 | 1.0 | 1.0 | 0.0 |" in text and "| top_k | failed: KeyError: 1 |" in text
    assert "33 host waits, 2.0 ms of 50 ms lost in them; GPU busy 12.5 % (profiled)." in text
    assert "**14 findings by CUPTI's callbacks, as it happens:** 87 host waits, 1.0 ms of 40 ms lost in them.\n" in text
    assert "| 2 more | | | | | |" in text and "docs/syncs-generate.html` (open" in text
    assert (
        "| NVIDIA H200, qwen3, float32 | armed | 1.0 | 5,000 | 9 | 70,000 | 800 | 4 | 20 of 20 | 19 of 20 | nothing |"
        in text
    )
    assert "| b/c/utils.py:7 | Tensor.item | read | 16 | 50 | readback ring |" in text
    accuracy = (tmp_path / "syncs-accuracy.md").read_text()
    assert "Measured on an NVIDIA H200 (torch 2.11, cupti-python 13.0.1)" in " ".join(accuracy.split())
    assert "| snippet | label | cupti | simulation |" in accuracy


SERIES = {
    "what": "loops", "programs": 76, "lines": 83, "precision": 0.976, "recall": 1.0, "died": 2, "differed": 0, "torch": "2.13",
    "afterwards": "one mark was wrong.",
}  # fmt: skip
SWEPT = {
    "when": "today", "files": 2, "programs": 90, "no_cpu": 5, "same": 70, "same_error": 12, "expected": 1, "otherwise": 2,
    "torch": "2.13", "note": "two were timm's.",
}  # fmt: skip


def test_whole_programs_have_their_sections(tmp_path: Path) -> None:
    assert proof_syncs.sections(tmp_path) == []
    score: dict[str, object] = {"lines": 9, "precision": 0.9, "recall": 1.0, "missed": [], "false_alarms": ["a.py:3 f"]}
    ran = score | {"programs": 80, "torch": "2.13", "ended_otherwise": {}}
    line = {"findings": [{"line": 1}, {"line": 1}], "cpu_processor": 2.0, "simulated_processor": 6.0, "same": True}
    seconds = {"plain_seconds": 1.0, "guarded_seconds": 1.25, "cupti_seconds": 1.5, "guard_missed": []}
    written: dict[str, object] = {
        "lines_first": {"series": [SERIES], "cures": ["**Cures.**"]},
        "lines": ran,
        "sweep": {"runs": [SWEPT]},
        "programs": {"nanogpt": line, "resnet": {"error": "x", "missing": True}},
    }
    for name, report in written.items():
        (tmp_path / proof_syncs.NAMES[name]).write_text(json.dumps(report))
    text = "\n".join(proof_syncs.sections(tmp_path))
    assert "| loops | 76 | 83 | 0.976 | 1.0 | 2 | 0 | 2.13 |" in text and "*loops*: one mark was wrong." in text
    assert "80 programs, 9 marked lines, precision 0.9" in " ".join(text.split()) and "No card has judged" in text
    assert "| today | 2 | 90 | 5 | 70 | 12 | 1 | 2 | 2.13 |" in text and "two were timm's." in text
    assert "| nanogpt | 2.00 | 6.00 | 3.0 | 1 | yes |" in text and "| resnet | not run: a package is missing |" in text
    (tmp_path / "syncs-lines-card.json").write_text(json.dumps(ran | {"card": "H100", "alone": {"live": score}}))
    (tmp_path / "syncs-programs-card.json").write_text(
        json.dumps({"nanogpt": line | seconds | {"simulation_missed": [1]}})
    )
    text = "\n".join(proof_syncs.sections(tmp_path))
    assert "| live | 0.9 | 1.0 | none | a.py:3 f |" in text and "No card has judged" not in text
    assert "| nanogpt | 1.000 | 1.250 | 1.500 | 1 | 0 | 1, 0 |" in text
