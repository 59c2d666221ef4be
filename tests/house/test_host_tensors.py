"""Where tensors are made without a device, and so on the host: counted file by file.

On a CPU it makes no difference, so no other test sees a device that was left out; on a card the operation behind it fails, or
waits for a copy.
"""

from __future__ import annotations

import ast

import pytest

from tests.house.source import ROOT

MAKERS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
}  # fmt: skip
APART = ("device", "syncs", "cli")
HOSTS = ("cpu.py", "host.py", "state_parts.py", "testing.py")
"""Files of code that runs on a CPU alone."""
MADE: dict[str, int] = {
    "attention/disentangled.py": 2,
    "kernels/peer_exchange/reference.py": 1,
    "kernels/peer_reduce/reference.py": 1,
    "kernels/quant_linear/__init__.py": 1,
    "models/audio/conformer.py": 2,
    "models/decoder.py": 1,
    "models/heads.py": 1,
    "models/layers/attention.py": 9,
    "models/layers/delta_net.py": 2,
    "models/layers/distance.py": 1,
    "models/layers/lightning.py": 3,
    "models/layers/mla.py": 8,
    "models/layers/mlp.py": 1,
    "models/layers/per_layer.py": 2,
    "models/position_bias.py": 3,
    "models/rope.py": 7,
    "models/vision/sandwich.py": 3,
    "models/vision/tower.py": 2,
    "models/vision_language.py": 2,
    "parallel/peers.py": 1,
    "parallel/shard.py": 7,
    "speculative/draft_vocabulary.py": 1,
    "weights/gguf.py": 1,
}
"""Of other files. Orders of weights and rotary tables are made once, on the host, and then copied; single numbers are rounded
to a dtype there."""


def without_device(text: str) -> int:
    """Calls of torch's makers of tensors that name no device."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return sum(
        isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in MAKERS
        and all(keyword.arg != "device" for keyword in call.keywords)
        for call in calls
    )


def test_tensors_without_a_device_are_these() -> None:
    found = {}
    for path in sorted((ROOT / "headway").rglob("*.py")):
        place = path.relative_to(ROOT / "headway")
        if place.parts[0] not in APART and place.parts[:2] != ("kernels", "cpu") and path.name not in HOSTS:
            if count := without_device(path.read_text(encoding="utf-8")):
                found[str(place)] = count
    assert found == MADE, "name the device; or, of what belongs on the host, count it here"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("torch.arange(3, device=x.device)", 0),
        ("torch.arange(3)", 1),
        ("torch.zeros(torch.tensor(3))", 2),
        ("torch.zeros_like(x) + x.new_zeros(3)", 0),
    ],
)
def test_what_is_counted(text: str, count: int) -> None:
    assert without_device(text) == count
