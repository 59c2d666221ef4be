"""The house rules a linter does not know. Each rule takes one file and gives its violations."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator

from tests.house.source import Function, Source, Violation, called_name, imported_modules, protocol_methods

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 100
"""Of @triton.jit functions: a loop cut in two has its registers passed around."""
MAX_PARAMETERS = 12
MAX_UNDOCUMENTED_LINES = 3

PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
BANNED_CALLS = {
    "torch.load": "torch.load runs code from a file; read safetensors or GGUF",
    "load": "",  # only as `from torch import load`, see unsafe_loading
    "eval": "eval() runs text as code",
    "exec": "exec() runs text as code",
    "os.system": "os.system() goes through a shell; use subprocess with a list",
}
PICKLING_METHODS = {"recv_pyobj", "send_pyobj"}
HOST_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "synchronize"}
TORCHLESS_FLOORS = {"core", "scheduler", "api", "cli", "server"}
MUTABLE_TYPES = {"list", "dict", "set", "defaultdict", "OrderedDict", "deque", "Counter", "bytearray", "local"}
MUTABLE_TYPES |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
MUTATING_METHODS = {"append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault", "add"}
MUTATING_METHODS |= {"discard", "appendleft", "popleft", "sort", "reverse"}
TEXT_MODES = {f"{way}{plus}" for way in "rwax" for plus in ("", "+")}
BINARY = {f"{mode[0]}b{mode[1:]}" for mode in TEXT_MODES}
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")

ARCHITECTURES = {"hopper"}  # headway/kernels/<op>/<architecture>: kernels that only such cards run
USERS_PROGRAMS = ("bench/programs/", "tests/syncs/documented/")  # as their users write them, for the detector to watch
KERNEL_TESTING = "headway/kernels/testing.py"  # helpers of kernel tests and benchmarks; the engine does not import them

Rule = Callable[[Source], Iterator[Violation]]


def file_size(source: Source) -> Iterator[Violation]:
    """A file is read in one sitting."""
    count = len(source.lines)
    if count > MAX_FILE_LINES:
        yield Violation(source.path, count, f"{count} lines; at most {MAX_FILE_LINES}")


def function_size(source: Source) -> Iterator[Violation]:
    """A function fits on a screen or two, its docstring included; a kernel's body may take a little more, arguments apart."""
    for function in source.functions():
        count = (function.end_lineno or function.lineno) - function.lineno + 1
        most = MAX_KERNEL_LINES if any("jit" in ast.unparse(d) for d in function.decorator_list) else MAX_FUNCTION_LINES
        if count > most:
            message = f"{function.name}: {count} lines; at most {most}"
            yield Violation(source.path, function.lineno, message)


def parameter_count(source: Source) -> Iterator[Violation]:
    """Few parameters; kernels are exempt, whose tables are all arguments."""
    if source.floor == "kernels" or source.parts[:2] == ("tests", "kernels"):
        return
    for function in source.functions():
        arguments = function.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS:
            message = f"{function.name}: {count} parameters; at most {MAX_PARAMETERS}"
            yield Violation(source.path, function.lineno, message)


def _in_an_operation(source: Source) -> bool:
    """In headway/kernels/<op>, or in the folder there for one architecture of cards."""
    architecture = len(source.parts) == 5 and source.parts[3] in ARCHITECTURES
    return source.floor == "kernels" and (len(source.parts) == 4 or architecture)


def triton_only_in_kernels(source: Source) -> Iterator[Violation]:
    """Kernels live in headway/kernels/<op> (their tests in tests/kernels); everything else runs without Triton."""
    definition = source.parts[-1] in ("__init__.py", "reference.py")
    shared = source.parts[-1].startswith("triton_")
    inside = (_in_an_operation(source) or (source.floor == "kernels" and shared)) and not definition
    if inside or source.path == KERNEL_TESTING or source.parts[:2] == ("tests", "kernels"):
        return
    for module, line in imported_modules(source.tree):
        if module == "triton" or (module.startswith("triton.") and module.count(".") == 1):
            yield Violation(source.path, line, "imports triton; only the kernels in headway/kernels/<op> may")


def unsafe_loading(source: Source) -> Iterator[Violation]:
    """No pickle in any disguise, no code from files or from model repositories."""
    if source.path.startswith(USERS_PROGRAMS):
        return
    names_from_torch = {
        alias.asname or alias.name
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
    }
    for module, line in imported_modules(source.tree):
        if module.split(".")[0] in PICKLES and module.count(".") == 0:
            yield Violation(source.path, line, f"imports {module}: unpickling runs code")
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = called_name(node)
        banned = name in BANNED_CALLS and (name != "load" or "load" in names_from_torch)
        if banned:
            yield Violation(source.path, node.lineno, BANNED_CALLS[name] or BANNED_CALLS["torch.load"])
        if name.rpartition(".")[2] in PICKLING_METHODS:
            yield Violation(source.path, node.lineno, f"{name} pickles; use msgspec")
        for keyword in node.keywords:
            safe = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not safe:
                yield Violation(source.path, node.lineno, f"{keyword.arg} may only be False")


def module_state(source: Source) -> Iterator[Violation]:
    """No module-level mutable state: tables are UPPER_CASE and nobody changes them."""
    if source.parts[0] != "headway" or source.path == "headway/kernels/registry.py":
        return
    tables: set[str] = set()
    for name, value, line in _module_assignments(source.tree):
        if not _is_mutable(value) or name == "__all__":
            continue
        tables.add(name)
        if name != name.upper():
            message = f"{name}: mutable state at module level (a constant table is UPPER_CASE)"
            yield Violation(source.path, line, message)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield Violation(source.path, node.lineno, f"global {', '.join(node.names)}: mutable state at module level")
        changed = _changed_name(node)
        if changed in tables:
            yield Violation(source.path, getattr(node, "lineno", 0), f"{changed}: a module-level table is changed here")


def _module_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value, node.lineno


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return called_name(value).rpartition(".")[2] in MUTABLE_TYPES
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def _changed_name(node: ast.AST) -> str | None:
    """The plain name whose contents ``node`` changes: x[...] = ..., del x[...], x.append(...)."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return node.value.id if isinstance(node.value, ast.Name) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING_METHODS:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return None


def docstrings(source: Source) -> Iterator[Violation]:
    """Modules, public classes and public functions say what they are; so do public methods of more than a few lines.

    Exempt, because their meaning is written once elsewhere: methods that a protocol of the package documents, and the
    implementations of an operation, whose shape doc is its package's docstring.
    """
    if source.parts[0] != "headway":
        return
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield Violation(source.path, 1, "no module docstring")
    if _in_an_operation(source) and source.parts[-1] != "__init__.py":
        return
    for node in source.tree.body:
        if isinstance(node, Function | ast.ClassDef) and _needs_docstring(node):
            yield Violation(source.path, node.lineno, f"{node.name}: no docstring")
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for method in node.body:
            if not isinstance(method, Function) or method.name in protocol_methods():
                continue
            if _body_lines(method) > MAX_UNDOCUMENTED_LINES and _needs_docstring(method):
                yield Violation(source.path, method.lineno, f"{node.name}.{method.name}: no docstring")


def _needs_docstring(node: Function | ast.ClassDef) -> bool:
    decorators = {ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list}
    exempt = any(d.endswith(("overload", "override", "triton.jit", ".setter", "autotune")) for d in decorators)
    return not node.name.startswith("_") and not exempt and not ast.get_docstring(node)


def _body_lines(function: Function) -> int:
    return (function.end_lineno or 0) - function.body[0].lineno + 1


def host_reads(source: Source) -> Iterator[Violation]:
    """The host reads device memory in headway/device only; elsewhere a `# host: reason` on the line tells why it may.

    Exempt: floors without torch (numpy arrays have the same method names), the operations' references and C wrappers,
    which are themselves what the device runs, and the helpers of kernel tests.
    """
    exempt = {"device", "syncs"} | TORCHLESS_FLOORS
    runs_on_device = source.floor == "kernels" and (source.parts[-1] == "reference.py" or "cpu" in source.parts)
    if source.floor is None or source.floor in exempt or runs_on_device or source.path == KERNEL_TESTING:
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        method = called_name(node).rpartition(".")[2]
        to_cpu = method == "to" and any(isinstance(a, ast.Constant) and a.value == "cpu" for a in node.args)
        if (method not in HOST_READS or not isinstance(node.func, ast.Attribute)) and not to_cpu:
            continue
        if not _has_reason(source.lines, node.lineno, node.end_lineno or node.lineno):
            message = f".{method}() reads the device on the host; say why with `# host: ...`"
            yield Violation(source.path, node.lineno, message)


def _has_reason(lines: list[str], first: int, last: int) -> bool:
    return any(re.search(r"# host: \S", line) for line in lines[max(first - 2, 0) : last])


def core_imports(source: Source) -> Iterator[Violation]:
    """core imports the standard library, numpy, msgspec and itself; syncs imports nothing of the engine."""
    for module, line in imported_modules(source.tree):
        top = module.split(".")[0]
        known = top in sys.stdlib_module_names or top in ("numpy", "msgspec")
        if source.floor == "core" and not known and not module.startswith("headway.core"):
            yield Violation(source.path, line, f"core imports {module}")
        if source.floor == "syncs" and top == "headway" and not module.startswith("headway.syncs"):
            yield Violation(source.path, line, f"syncs imports {module}: it must work on any PyTorch program")


def root_imports(source: Source) -> Iterator[Violation]:
    """Floors take names from where they live; headway/__init__.py re-exports them for users, cli and server too."""
    if source.floor in (None, "cli", "server"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "headway":
            names = [alias.name for alias in node.names if alias.name != "__version__"]
            if names:
                message = f"imports {', '.join(names)} from headway, not from its own module"
                yield Violation(source.path, node.lineno, message)
        if isinstance(node, ast.Import) and "headway" in {alias.name for alias in node.names}:
            yield Violation(source.path, node.lineno, "imports headway as a whole")


def text_encoding(source: Source) -> Iterator[Violation]:
    """Text files are read and written in an encoding of our own, not the locale's."""
    for node in ast.walk(source.tree) if source.floor is not None else ():
        if isinstance(node, ast.Call) and _is_of_text(node) and all(each.arg != "encoding" for each in node.keywords):
            yield Violation(source.path, node.lineno, f"{called_name(node)}() without encoding= takes the locale's")


def _is_of_text(call: ast.Call) -> bool:
    """Whether a call reads or writes text; of ``open`` methods, which others have, those that name a mode or are a path's."""
    name, method = called_name(call), called_name(call).rpartition(".")[2]
    modes = [each.value for each in (*call.args, *(k.value for k in call.keywords)) if isinstance(each, ast.Constant)]
    if method in ("read_text", "write_text"):
        return isinstance(call.func, ast.Attribute) and "utf-8" not in modes
    is_known = name == "open" or method == "fdopen" or "Path(" in ast.unparse(call.func)
    if method not in ("open", "fdopen") or any(mode in BINARY for mode in modes):
        return False
    return is_known or any(mode in TEXT_MODES for mode in modes)


def unfinished(source: Source) -> Iterator[Violation]:
    """Nothing is left for later in the code; what is left for later goes into docs/log.md."""
    for number, line in enumerate(source.lines, start=1):
        if match := UNFINISHED.search(line):
            yield Violation(source.path, number, f"{match.group()} left behind")


PYTHON_RULES: tuple[Rule, ...] = (
    file_size,
    function_size,
    parameter_count,
    triton_only_in_kernels,
    unsafe_loading,
    module_state,
    docstrings,
    host_reads,
    core_imports,
    root_imports,
    text_encoding,
)
TEXT_RULES: tuple[Rule, ...] = (unfinished,)
