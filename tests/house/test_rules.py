"""Every house rule catches what it forbids and leaves alone what it allows."""

from __future__ import annotations

import pytest

from tests.house import rules
from tests.house.source import snippet

KERNEL = "headway/kernels/example/triton.py"
HOPPER_KERNEL = "headway/kernels/example/hopper/triton.py"
REFERENCE = "headway/kernels/example/reference.py"
LONG = "def f() -> None:\n" + "    pass\n" * 80
WIDE = "def f(" + ", ".join(f"a{i}" for i in range(13)) + "): ..."
WORD = "FIX" + "ME"


@pytest.mark.parametrize(
    ("rule", "text", "path"),
    [
        (rules.file_size, "x = 1\n" * 451, "headway/runner/example.py"),
        (rules.file_size, "x = 1\n" * 451, "tests/runner/test_example.py"),
        (rules.function_size, LONG, "headway/runner/example.py"),
        (rules.function_size, LONG.replace("def", "async def"), KERNEL),
        (rules.parameter_count, WIDE, "headway/runner/example.py"),
        (rules.parameter_count, WIDE.replace("a7", "*, a7"), "headway/runner/example.py"),
        (rules.triton_only_in_kernels, "import triton", "headway/runner/example.py"),
        (rules.triton_only_in_kernels, "from triton import language as tl", "headway/runner/example.py"),
        (rules.triton_only_in_kernels, "def f():\n    import triton.language as tl", REFERENCE),
        (rules.triton_only_in_kernels, "import triton", "headway/kernels/example/__init__.py"),
        (rules.triton_only_in_kernels, "import triton", "headway/kernels/example/hopper/__init__.py"),
        (rules.triton_only_in_kernels, "import triton", "headway/kernels/example/other/example.py"),
        (rules.triton_only_in_kernels, "import triton", "headway/kernels/registry.py"),
        (rules.unsafe_loading, "import pickle", "headway/weights/example.py"),
        (rules.unsafe_loading, "from cloudpickle import loads", "headway/weights/example.py"),
        (rules.unsafe_loading, "def f():\n    import dill as d", "tests/weights/example.py"),
        (rules.unsafe_loading, "torch.load(path)", "headway/weights/example.py"),
        (rules.unsafe_loading, "from torch import load\nload(path)", "headway/weights/example.py"),
        (rules.unsafe_loading, "eval('1')", "headway/weights/example.py"),
        (rules.unsafe_loading, "socket.recv_pyobj()", "headway/engine/example.py"),
        (rules.unsafe_loading, "f(trust_remote_code=True)", "headway/weights/example.py"),
        (rules.unsafe_loading, "f(trust_remote_code=args.trust)", "headway/weights/example.py"),
        (rules.unsafe_loading, "np.load(path, allow_pickle=True)", "headway/weights/example.py"),
        (rules.unsafe_loading, "subprocess.run(text, shell=True)", "headway/cli/example.py"),
        (rules.module_state, "cache = {}", "headway/runner/example.py"),
        (rules.module_state, "seen: set[int] = set()", "headway/runner/example.py"),
        (rules.module_state, "queue = collections.deque()", "headway/runner/example.py"),
        (rules.module_state, "_live = [x for x in range(3)]", "headway/runner/example.py"),
        (rules.module_state, "_CACHE = {}\ndef f():\n    _CACHE[1] = 2", "headway/runner/example.py"),
        (rules.module_state, "_CACHE = {}\ndef f():\n    _CACHE.setdefault(1, 2)", "headway/runner/example.py"),
        (rules.module_state, "_one = None\ndef f():\n    global _one", "headway/runner/example.py"),
        (rules.docstrings, "X = 1", "headway/runner/example.py"),
        (rules.docstrings, '"""M."""\ndef f(): ...', "headway/runner/example.py"),
        (rules.docstrings, '"""M."""\nclass A: ...', "headway/runner/example.py"),
        (rules.docstrings, '"""M."""\ndef example(): ...', "headway/kernels/example/__init__.py"),
        (rules.docstrings, '"""M."""\ndef example(): ...', "headway/kernels/example/other/example.py"),
        (
            rules.docstrings,
            '"""M."""\nclass A:\n    """A."""\n    def f(self):\n' + "        x = 1\n" * 4,
            "headway/api/a.py",
        ),
        (rules.host_reads, "n = x.item()", "headway/runner/example.py"),
        (rules.host_reads, "n = (x + 1).sum().tolist()", "headway/state/example.py"),
        (rules.host_reads, "y = x.to('cpu')", "headway/state/example.py"),
        (rules.host_reads, "i = torch.nonzero(x)", "headway/sampling/example.py"),
        (rules.host_reads, "torch.cuda.synchronize()", "headway/engine/example.py"),
        (rules.host_reads, "n = x.item()  # host:", "headway/runner/example.py"),
        (rules.host_reads, "n = x.item()", KERNEL),
        (rules.core_imports, "import torch", "headway/core/example.py"),
        (rules.core_imports, "from headway.state.batch import StepBatch", "headway/core/example.py"),
        (rules.core_imports, "from headway.core.ints import cdiv", "headway/syncs/example.py"),
        (rules.core_imports, "import headway", "headway/syncs/example.py"),
        (rules.root_imports, "def f():\n    from headway import LLM", "headway/engine/example.py"),
        (rules.root_imports, "import headway", "headway/engine/example.py"),
        (rules.text_encoding, "path.read_text()", "headway/cli/example.py"),
        (rules.text_encoding, "path.open('w')", "headway/cli/example.py"),
        (rules.text_encoding, "path.write_text(text)", "headway/api/example.py"),
        (rules.text_encoding, "with open(path) as file: ...", "headway/weights/example.py"),
        (rules.unfinished, f"x = 1  # {WORD}: later", "headway/runner/example.py"),
        (rules.unfinished, f"- {WORD} write this", "docs/example.md"),
    ],
)
def test_rule_catches(rule: rules.Rule, text: str, path: str) -> None:
    found = list(rule(snippet(text, path)))
    assert found
    assert str(found[0]).startswith(f"{path}:")


@pytest.mark.parametrize(
    ("rule", "text", "path"),
    [
        (rules.file_size, "x = 1\n" * 450, "headway/runner/example.py"),
        (rules.function_size, LONG.removesuffix("    pass\n"), "headway/runner/example.py"),
        (rules.parameter_count, WIDE.replace("a7, ", ""), "headway/runner/example.py"),
        (rules.parameter_count, "class A:\n    " + WIDE.replace("a7", "self"), "headway/runner/example.py"),
        (rules.parameter_count, WIDE, KERNEL),
        (rules.triton_only_in_kernels, "import triton", KERNEL),
        (rules.triton_only_in_kernels, "import triton", HOPPER_KERNEL),
        (rules.triton_only_in_kernels, "import triton", "headway/kernels/triton_math.py"),
        (rules.triton_only_in_kernels, "import tritonclient", "headway/runner/example.py"),
        (rules.unsafe_loading, "model.eval()\nsafetensors.torch.load(b)", "headway/weights/example.py"),
        (rules.unsafe_loading, "import json\njson.load(file)\nload(file)", "headway/weights/example.py"),
        (rules.unsafe_loading, "f(trust_remote_code=False)", "headway/weights/example.py"),
        (rules.module_state, "TABLE = {1: 2}\n__all__ = ['a']\npair = (1, 2)", "headway/runner/example.py"),
        (rules.module_state, "def f():\n    cache = {}\n    cache[1] = 2", "headway/runner/example.py"),
        (rules.module_state, "OPS = {}\ndef f():\n    OPS[1] = 2", "headway/kernels/registry.py"),
        (rules.docstrings, '"""M."""\ndef _f(): ...', "headway/runner/example.py"),
        (rules.docstrings, '"""M."""\nclass A:\n    """A."""\n    def f(self): ...', "headway/runner/example.py"),
        (rules.docstrings, "X = 1", "tests/runner/test_example.py"),
        (rules.docstrings, '"""M."""\ndef example(): ...', REFERENCE),
        (rules.docstrings, '"""M."""\ndef example(): ...', KERNEL),
        (rules.docstrings, '"""M."""\ndef example(): ...', HOPPER_KERNEL),
        (rules.host_reads, "n = x.item()  # host: a CPU tensor, made two lines above", "headway/runner/example.py"),
        (rules.host_reads, "# host: weights load on the host\nn = x.item()", "headway/weights/example.py"),
        (rules.host_reads, "n = x.item()", "headway/device/example.py"),
        (rules.host_reads, "n = x.tolist()", "headway/scheduler/example.py"),
        (rules.host_reads, "n = x.item()", REFERENCE),
        (rules.host_reads, "y = x.to(device)\nz = x.items()", "headway/runner/example.py"),
        (rules.core_imports, "import enum\nimport numpy\nfrom headway.core.ints import cdiv", "headway/core/a.py"),
        (rules.core_imports, "import torch\nfrom headway.syncs import report", "headway/syncs/example.py"),
        (rules.root_imports, "from headway import __version__", "headway/engine/example.py"),
        (rules.root_imports, "import headway.api.llm\nfrom headway.api.llm import LLM", "headway/api/b.py"),
        (rules.root_imports, "from headway import LLM", "headway/cli/example.py"),
        (rules.root_imports, "from headway import LLM", "tests/api/test_example.py"),
        (rules.text_encoding, "path.read_text(encoding='utf-8')\nos.fdopen(1, 'wb')", "headway/cli/example.py"),
        (
            rules.text_encoding,
            "path.open('wb+')\npath.read_bytes()\nopen(path, mode='rb')",
            "headway/weights/example.py",
        ),
        (rules.text_encoding, "path.read_text()", "tests/cli/example.py"),
        (rules.unfinished, "mastodon = 1", "headway/runner/example.py"),
    ],
)
def test_rule_allows(rule: rules.Rule, text: str, path: str) -> None:
    assert [str(violation) for violation in rule(snippet(text, path))] == []


def test_every_rule_is_run_on_the_tree() -> None:
    """A rule written but not listed would check nothing."""
    public = {name for name, value in vars(rules).items() if getattr(value, "__module__", "") == rules.__name__}
    functions = {name for name in public if not name.startswith("_") and name.islower()}
    assert functions == {rule.__name__ for rule in (*rules.PYTHON_RULES, *rules.TEXT_RULES)}
