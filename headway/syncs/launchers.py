"""``torchrun`` and ``accelerate launch`` as targets: the launcher starts every rank under this command, each watched by itself.

The launcher's own parser says where its options end and the program begins; the program is then replaced by
``python -m headway.syncs -- program``. Each rank leaves a file in a folder that the environment names (``ranks.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any, Final

from headway.syncs.target import UsageError

TORCH: Final = "torch.distributed.run"
ACCELERATE: Final = "accelerate.commands.launch"
_MODULES: Final = {
    (TORCH,): TORCH,
    ("torch.distributed.launch",): TORCH,
    (ACCELERATE,): ACCELERATE,
    ("accelerate.commands.accelerate_cli", "launch"): ACCELERATE,
    ("accelerate", "launch"): ACCELERATE,
}
_COMMANDS: Final = {
    ("torchrun",): TORCH,
    ("accelerate-launch",): ACCELERATE,
    ("accelerate", "launch"): ACCELERATE,
}
_NOT_ALONE: Final = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
"""Options of accelerate that say by themselves what the ranks run on."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """A launcher's command, taken apart.

    Attributes:
        module: of the launcher.
        options: the launcher's own, less those that say how the program is started.
        program: what each rank runs, as ``headway syncs`` takes it.
    """

    module: str
    options: tuple[str, ...]
    program: tuple[str, ...]

    def command(self, own: list[str]) -> list[str]:
        """The launcher, with each rank under ``headway syncs`` with the options ``own``."""
        plain = "--no-python" if self.module == TORCH else "--no_python"
        ranks = [sys.executable, "-m", "headway.syncs", *own, "--", *self.program]
        return [sys.executable, "-m", self.module, *self.options, plain, *ranks]


def find(words: list[str], simulate: bool) -> Launch | None:
    """The launcher that ``words`` call; None if they call none.

    Args:
        simulate: the ranks are to have pretended cards, of which the launcher, outside of the pretence, sees none.

    Raises:
        UsageError: the launcher is not installed, its options are wrong, or what it starts is not Python.
    """
    module, rest = _named(words)
    if module is None:
        return None
    parser = _parser(module)
    try:
        given, unknown = parser.parse_known_args(rest)
    except SystemExit as refused:
        raise UsageError(f"{module} does not take these options: {' '.join(rest)}") from refused
    after = list(given.training_script_args)
    begin = len(rest) - len(after) - 1
    if begin < 0 or rest[begin] != given.training_script or unknown:
        raise UsageError(f"{module}: cannot tell its options from the program's: {' '.join(rest)}")
    if given.no_python:
        raise UsageError(f"{given.training_script}: only Python programs can be watched (--no-python)")
    options = [word for word in rest[:begin] if word not in ("-m", "--module")]
    if simulate and module == ACCELERATE and not _configured(given):
        options += ["--multi_gpu"] if (given.num_processes or 1) > 1 else ["--num_processes", "1"]
    program = ["-m", given.training_script] if given.module else [given.training_script]
    return Launch(module, tuple(options), (*program, *after))


def _configured(given: argparse.Namespace) -> bool:
    """Whether the ranks' devices are settled without the launcher looking for cards."""
    launcher: Any = importlib.import_module(ACCELERATE)
    by_file = given.config_file is not None or Path(launcher.default_config_file).is_file()
    return by_file or any(getattr(given, name, False) for name in _NOT_ALONE)


def _named(words: list[str]) -> tuple[str | None, list[str]]:
    """The launcher's module, and its arguments."""
    rest = list(words)
    if rest and Path(rest[0]).name.startswith("python") and not rest[0].endswith(".py"):
        rest = rest[1:]
    as_module = rest[:1] == ["-m"]
    rest = rest[1:] if as_module else rest
    first = rest[:1] if as_module else [Path(word).name for word in rest[:1]]
    for names, module in (_MODULES if as_module else _COMMANDS).items():
        if (*first, *rest[1 : len(names)]) == names:
            return module, rest[len(names) :]
    return None, []


def _parser(module: str) -> argparse.ArgumentParser:
    try:
        launcher: Any = importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{module} is not installed here: {error}") from error
    made: Any = launcher.get_args_parser() if module == TORCH else launcher.launch_command_parser()
    return made
