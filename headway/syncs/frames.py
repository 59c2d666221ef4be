"""Whose line was it? The innermost frame of the user's own code; a library's line means its caller.

Own is what lies neither in torch, the standard library or this package (never shown), nor among installed packages (shown as
what the line went through).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import sysconfig
from types import FrameType
from typing import Final

from headway.syncs.places import Site

MAX_STACK = 12
_HERE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


@functools.cache
def _skipped_packages() -> tuple[str, ...]:
    folders = [os.path.dirname(os.path.abspath(__file__))]
    for package in ("torch", "cupti", "triton"):
        try:
            spec = importlib.util.find_spec(package)
        except ValueError:  # a stand-in module without a spec
            continue
        if spec is not None and spec.origin:
            folders.append(os.path.dirname(spec.origin))
    return tuple(folder + os.sep for folder in folders)


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a frame of ``file`` is the user's. Installed packages count, except torch, Triton and this one."""
    if file.startswith("<"):
        return file in ("<stdin>", "<string>") or file.startswith("<ipython")
    path = os.path.abspath(file)
    if path.startswith(_skipped_packages()):
        return False
    return "site-packages" in path or not path.startswith(sysconfig.get_paths()["stdlib"] + os.sep)


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether ``file`` belongs to an installed package."""
    path = os.path.abspath(file)
    return f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path


_PARTS: Final = re.compile(
    r"/torch/((?:distributions|optim|amp|masked|nn/(?:utils|modules|parallel|attention))/.*|serialization)\.py$"
)
"""Python parts of torch that wait on behalf of the line that calls them."""
_CALLED: Final = frozenset({"Module._wrapped_call_impl", "Module._call_impl"})
"""What every module's call goes through, which says nothing."""


def within(frame: FrameType | None = None) -> str:
    """The part of torch that the user's line called and that came to this frame: "distributions.normal.Normal.__init__"."""
    frame = frame or inspect.currentframe()
    found = ""
    while frame is not None and not is_users(frame.f_code.co_filename):
        part = _PARTS.search(frame.f_code.co_filename.replace(os.sep, "/"))
        if part is not None and frame.f_code.co_qualname not in _CALLED:
            found = f"{part[1].replace('/', '.')}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return found


def in_own_code(call: str) -> bool:
    """Whether the torch call under way, which the function of qualified name ``call`` runs, has come back to code of the
    user's: an operation that the user registered, or a hook. What a tensor subclass does for a call is the call's own."""
    frame, outermost = inspect.currentframe(), ""
    while frame is not None and frame.f_code.co_qualname != call:
        if is_users(frame.f_code.co_filename) and not is_installed(frame.f_code.co_filename):
            outermost = frame.f_code.co_name
        frame = frame.f_back
    return frame is not None and outermost not in ("", "__torch_function__", "__torch_dispatch__")


def locate(frame: FrameType | None = None) -> tuple[Site, tuple[str, ...]]:
    """The user's site and the stack around it, innermost first, starting at ``frame`` or at the caller.

    Where installed packages alone are on the stack, as in ``python -m package``, the innermost of their frames is the site.
    """
    frame = frame or inspect.currentframe()
    own: Site | None = None
    library: Site | None = None
    fallback: Site | None = None
    stack: list[str] = []
    while frame is not None and (len(stack) < MAX_STACK or own is None):
        code = frame.f_code
        here = Site(code.co_filename, frame.f_lineno or code.co_firstlineno, code.co_qualname)
        if is_users(code.co_filename):
            if is_installed(code.co_filename):
                library = library or here
            else:
                own = own or here
            if len(stack) < MAX_STACK:
                stack.append(f"{here} {here.function}")
        if not code.co_filename.startswith(_HERE):  # a driver's callback on a thread of its own has no other frames
            fallback = here
        frame = frame.f_back
    return own or library or fallback or Site("<native thread>", 0, ""), tuple(stack)
