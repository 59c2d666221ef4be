"""A line of code, and how a report names it: relative to the project, or to the packages that are installed."""

from __future__ import annotations

import dataclasses
import linecache
import os


@dataclasses.dataclass(frozen=True)
class Site:
    """A line of code. ``line`` is 0 where only the thread is known."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


def short(file: str) -> str:
    """``file`` relative to the working directory or to site-packages, with forward slashes; unchanged if in neither."""
    path = os.path.abspath(file) if not file.startswith("<") else file
    for marker in ("site-packages", "dist-packages"):
        before, found, after = path.rpartition(f"{os.sep}{marker}{os.sep}")
        if before and found:
            return after.replace(os.sep, "/")
    here = os.getcwd() + os.sep
    return path.removeprefix(here).replace(os.sep, "/") if path.startswith(here) else file


def package_of(file: str) -> str:
    """The installed package that ``file`` belongs to; empty for the user's own."""
    relative = short(file)
    installed = relative != file and not os.path.exists(relative)
    return relative.partition("/")[0].removesuffix(".py") if installed else ""


def source_line(site: Site) -> str:
    """The text of the line; empty where there is no file."""
    if not site.line:
        return ""
    linecache.checkcache(site.file)
    return linecache.getline(site.file, site.line).strip()[:200]
