"""The pass over source text: what it says, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.syncs import lint
from headway.syncs.cli import FAILED, main


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("x.item()", "Tensor.item"),
        ("x.sum().tolist()", "Tensor.tolist"),
        ("x[x > 0]", "Tensor.__getitem__"),
        ("torch.nonzero(x)", "torch.nonzero"),
        ("x.nonzero()", "torch.nonzero"),
        ("F.one_hot(x)", "torch.one_hot"),
        ("torch.repeat_interleave(a, b)", "torch.repeat_interleave"),
        ("torch.tensor([1, 2], device=d)", "torch.tensor"),
        ("x.to('cuda')", "Tensor.to"),
        ("x.cuda()", "Tensor.cuda"),
        ("torch.cuda.synchronize()", "torch.cuda.synchronize"),
        ("torch.where(x)", "torch.where"),
        ("Normal(a, b)", "Normal"),
    ],
)
def test_idioms_that_may_wait(line: str, call: str) -> None:
    (hint,) = lint.check(f"import torch\n{line}\n", "a.py")
    assert (hint.line, hint.call, hint.looped) == (2, call, False) and "a.py:2" in str(hint)


@pytest.mark.parametrize(
    "line",
    [
        "x.items()",
        "array.item(3)",
        "F.one_hot(x, 4)",
        "F.one_hot(x, num_classes=4)",
        "torch.repeat_interleave(a, b, output_size=n)",
        "torch.tensor([1, 2])",
        "torch.tensor([1], device='cpu')",
        "x.to('cuda', non_blocking=True)",
        "x.to(torch.float16)",
        "torch.where(m, x, y)",
        "np.unique(x)",
        "Normal(a, b, validate_args=False)",
        "x[2:5]",
        "x[mask] = 0.0",
    ],
)
def test_idioms_that_do_not(line: str) -> None:
    assert lint.check(f"import torch\n{line}\n") == []


def test_files_without_torch_are_left_alone() -> None:
    assert lint.check("x.item()") == []


def test_the_command_says_loops_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text("from torch import nn\na.item()\nfor x in y:\n    x.item()\n")
    assert main(["--lint", "--fail-on", "2", "--", str(tmp_path)]) == FAILED
    text = capsys.readouterr().out
    assert text.index("train.py:4") < text.index("train.py:2") and "in a loop" in text and "2 lines may wait" in text
    assert main(["--lint", "--", str(file)]) == 0
    file.write_text("import torch\nx = (")
    assert main(["--lint", "--", str(file), str(tmp_path / "absent.py")]) == 2
    assert "absent.py" in capsys.readouterr().err
