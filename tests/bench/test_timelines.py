"""Timelines: which kernels make a layer, what each adds to a step, and plots of a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.kernel_kinds import kind_of, short
from bench.ops.limits import BYTES_PER_US, FLOPS_PER_US
from bench.timeline_plots import by_kind, draw, least_us
from bench.timelines import advances, kernels_of, middle_layer, shown
from headway.cli.bench.anchors.profiled import Event
from headway.core.messages import StepTrace

STEP = {"begun": 0, "schedule": 10, "launch": 20, "wait_begun": 40, "wait": 900, "apply": 5, "device": 815, "busy": 990}


def kernel(name: str, start: float, us: float) -> Event:
    return Event("kernel", name, start, us)


def layers(count: int) -> list[Event]:
    """Each 100 us: attention, a product that starts early, a norm."""
    found = []
    for i in range(count):
        found += [
            kernel("early_decode_kernel", 100.0 * i, 60.0),
            kernel("mid_add_kernel", 100.0 * i + 50, 30.0),
            kernel("rms_norm_kernel", 100.0 * i + 80, 15.0),
        ]
    return found


def test_a_kernels_name_loses_its_types() -> None:
    assert short("void at::native::index_kernel<float, int>(float*, int)") == "index_kernel"
    assert short("nvjet_sm90_tst_96x128") == "nvjet_sm90_tst_96x128"


def test_only_kernels_count_and_by_when_they_began() -> None:
    events = [
        kernel("b", 5, 1),
        Event("copy", "Memcpy HtoD", 0, 1),
        Event("host", "cudaLaunch", 0, 1),
        kernel("a", 2, 1),
    ]
    assert [event.name for event in kernels_of(events)] == ["a", "b"]


def test_a_layer_lies_between_two_attentions_and_not_over_the_end_of_a_step() -> None:
    first, second = layers(4), [kernel(e.name, e.start + 1000, e.us) for e in layers(4)]
    step_end = [kernel("sampler", 500, 20), kernel("step_unpack_decode_kernel", 520, 60)]  # no attention
    found = middle_layer([*first, *step_end, *second])
    assert found == [
        ["early_decode_kernel", 0.0, 60.0],
        ["mid_add_kernel", 50.0, 30.0],
        ["rms_norm_kernel", 80.0, 15.0],
        ["early_decode_kernel", 100.0, 60.0],
    ]


def test_an_early_kernel_counts_from_the_end_of_the_one_before() -> None:
    found = advances(layers(2))
    assert found == {"early_decode_kernel": 120.0, "mid_add_kernel": 40.0, "rms_norm_kernel": 30.0}
    assert advances([kernel("a", 0, 10), kernel("inside", 2, 3), kernel("c", 20, 5)]) == {
        "a": 10.0,
        "c": 5.0,
        "inside": 0.0,
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("early_decode_kernel", "attention"), ("overlapped_prefill_kernel", "attention"), ("step_unpack_decode_kernel", "rest"),
        ("mid_linear_kernel", "products"), ("nvjet_sm90_tst_128x64", "products"), ("add_kernel", "products"),
        ("race_kernel", "sampler"), ("rms_norm_kernel", "rest"),
    ],
)  # fmt: skip
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert by_kind({name: 2.0, "embed_kernel": 1.0})[kind] == (3.0 if kind == "rest" else 2.0)


def test_what_steps_need_at_least_is_their_bytes_or_their_products() -> None:
    model = {"layers": 2, "layer_weight_bytes": 3e9, "weight_bytes": 8e9}  # 2e9 of the output layer
    point = {"steps": 4, "rows": 5.0, "tokens": 20, "weight_bytes": 4 * 8e9, "kv_bytes": 1e9}
    assert least_us(point, model) == 33e9 / BYTES_PER_US
    assert least_us({**point, "tokens": 1e6}, model) == (1e6 * 6e9 + 20 * 2e9) / FLOPS_PER_US


def test_steps_are_placed_from_the_first_ones_beginning() -> None:
    traces = [
        StepTrace(step=i, rows=4, tokens=4, replayed=True, begun=7.0 + i * 1e-3, schedule_us=10, launch_us=20, submitted_us=15,
                  wait_begun_us=40, wait_us=900, apply_us=5, headway_us=800, busy_us=990)
        for i in range(2)
    ]  # fmt: skip
    first, second = shown(traces)
    assert first == STEP
    assert (second["begun"], second["wait_begun"], second["device"]) == (1000, 1040, 1815)


def test_each_workload_of_a_record_is_drawn_the_same_twice(tmp_path: Path) -> None:
    layer, watch = middle_layer(layers(6)), {"course": ["1980/120", "1980/640", "1700/700", "1500/690"]}
    point = {"at": 0.0, "steps": 8, "rows": 4.0, "tokens": 32, "busy_us": 8000.0, "idle_us": 1.0, "weight_bytes": 9e8,
             "kv_bytes": 1e8}  # fmt: skip
    record: dict[str, Any] = {
        "model": "qwen3_06b", "card": "a card, 700.00 W", "commit": "1234567",
        "decode": {"rows": 4, "steps": [STEP], "layer": layer, "step_us": advances(layers(6)), "watch": watch, "layers": 6,
                   "layer_weight_bytes": 1e8, "weight_bytes": 7e8, "kv_bytes": 9e8},
        "prefill": {"tokens": 65536, "layer": layer, "call_us": advances(layers(6)), "watch": {}, "calls_ms": [1.0],
                    "flop": 1e12},
        "nano": {"seconds": 1.0, "tokens": 32, "points": [point, {**point, "at": 8.0}]},
    }  # fmt: skip
    (tmp_path / "one.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "images").mkdir()
    drawn = draw(tmp_path, tmp_path / "images")
    assert drawn == [f"timeline-qwen3-06b-{view}.png" for view in ("decode", "prefill", "nano")]
    images = [(tmp_path / "images" / name).read_bytes() for name in drawn]
    assert draw(tmp_path, tmp_path / "images") == drawn
    assert [(tmp_path / "images" / name).read_bytes() for name in drawn] == images
