"""A place in the user's program: what errors, events and the nodes of graphs name."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Sequence
from types import FrameType

import torch

from fusewright.base.records import KeepsHash, dataclass, field, replace

_OURS, _TORCH = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))


@dataclass(frozen=True, slots=True)
class Location(KeepsHash):
    """One level of the user's stack: where an operator, a break or a kernel came from. module: the path of the
    nn.Module whose method this is, as `named_modules` has it. outermost: the program's first line that led here, where
    that is another one (`attributed` fills it in)."""

    file: str
    line: int
    function: str
    module: str = ""
    outermost: str = ""

    def __str__(self) -> str:
        more = [f"module {self.module}"] * bool(self.module) + [f"from {self.outermost}"] * bool(self.outermost)
        return f"{self.file}:{self.line} in {self.function}" + (f" ({', '.join(more)})" if more else "")

    @property
    def short(self) -> str:
        """`layers.0.norm model.py:12`."""
        return f"{self.module} {os.path.basename(self.file)}:{self.line}".lstrip()


def users_line(stack: Sequence[Location]) -> Location | None:
    """The innermost line that is the user's, else PyTorch's."""
    outside = _outside(stack)
    users = [level for level in outside if not level.file.startswith(_TORCH)]
    return users[-1] if users else outside[-1] if outside else None


def attributed(stack: Sequence[Location]) -> Location | None:
    """To what an operator is put down: the user's innermost line, with the path of the innermost module that ran and
    the user's outermost line."""
    line = users_line(stack)
    if line is None:
        return None
    module = next((level.module for level in reversed(stack) if level.module), "")
    first = next((level for level in stack if not level.file.startswith((_OURS, _TORCH))), line)
    elsewhere = (first.file, first.line) != (line.file, line.line)
    outermost = f"{os.path.basename(first.file)}:{first.line}" if elsewhere else ""
    return replace(line, module=module, outermost=outermost) if module != line.module or outermost else line


def callers_line() -> str:
    """`file:line` of the user's line that is running: the innermost one outside of this package and PyTorch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCH, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def users_level() -> int:
    """The `stacklevel` by which a warning of the calling function names the user's line that is running."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith((_OURS, _TORCH)):
        frame, level = frame.f_back, level + 1
    return level


def as_traceback(stack: Sequence[Location]) -> str:
    """The stack as Python's tracebacks show it."""
    lines = [
        (f'  File "{at.file}", line {at.line}, in {at.function}', linecache.getline(at.file, at.line)) for at in stack
    ]
    return "".join(f"{place}\n    {text.strip()}\n" if text.strip() else f"{place}\n" for place, text in lines)


@dataclass(slots=True)
class Moved:
    """A stack below a module's call, as that of an equal module's call: `paths` are theirs, `prefix` is the stack of
    the latter, and the former's had `depth` levels."""

    prefix: tuple[Location, ...]
    depth: int
    paths: tuple[str, str]
    known: dict[int, Location] = field(default_factory=dict)

    def stack(self, stack: tuple[Location, ...]) -> tuple[Location, ...]:
        known = self.known
        return (*self.prefix, *[known.get(id(level)) or self._level(level) for level in stack[self.depth :]])

    def _level(self, level: Location) -> Location:
        old, new = self.paths
        moved = level
        if level.module.startswith(old):
            moved = Location(level.file, level.line, level.function, new + level.module[len(old) :], level.outermost)
        self.known[id(level)] = moved
        return moved


def _outside(stack: Sequence[Location]) -> list[Location]:
    return [level for level in stack if not level.file.startswith(_OURS)]


def looping(stack: Sequence[Location]) -> Location | None:
    """The innermost level that stands in a loop: what made the levels below it run again and again. None where none
    does, or where there is no source to tell."""
    return next((level for level in reversed(_outside(stack)) if level.line in _lines_in_loops(level.file)), None)


@functools.lru_cache(maxsize=64)
def _lines_in_loops(file: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # no text of Python's
        return frozenset()
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)):
            found.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            found.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return frozenset(found)
