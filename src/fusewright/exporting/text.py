"""The text of a program: one line a node, under the user's lines; and the graph of such a text.

Takes a graph of operators; gives text that `parse` reads back. Always holds: a text names registered operators and a
few of Python's own, nothing else; reading one runs nothing.

    input %x: float32[batch, 4]
    # model.py:12 in forward: return self.linear(x)
    %t: float32[4, 3 | 1, 4] = aten.t.default(%p_weight)
    %addmm: float32[batch, 3] = aten.addmm.default(%p_bias, %x, %t)
    return (%addmm,)
"""

from __future__ import annotations

import json
import keyword
import linecache
import math
import operator
import os.path
import re
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

from fusewright.base.errors import ExportError, ProgramFileError
from fusewright.base.location import users_line
from fusewright.base.pytorch import torch
from fusewright.graph.nodes import written
from fusewright.graph.printer import type_text
from fusewright.runtime.artifact import is_registered

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "operator.getitem": operator.getitem,
    "operator.add": operator.add,
    "operator.sub": operator.sub,
    "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv,
    "operator.truediv": operator.truediv,
    "operator.mod": operator.mod,
    "operator.neg": operator.neg,
    "operator.pow": operator.pow,
    "torch.sym_min": torch.sym_min,
    "torch.sym_max": torch.sym_max,
    "torch.sym_float": torch.sym_float,
    "torch.sym_int": torch.sym_int,
    "torch.sym_sqrt": torch.sym_sqrt,
    "fusewright.written": written,
}
_FUNCTION_NAMES: dict[Any, str] = {function: name for name, function in FUNCTIONS.items()}
_FUNCTION_NAMES[math.sqrt] = "torch.sym_sqrt"

REFUSED = frozenset({"from_file", "save", "load", "_save", "_load", "_print", "_test_warn_in_autograd"})
"""Operators that reach outside of their arguments: no file may name them."""
NAMESPACE_REFUSED = frozenset({"prim", "profiler", "c10d", "_c10d_functional", "inductor", "streams", "rpc"})

_KINDS: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_CONSTANTS = {str(value): value for value in vars(torch).values() if isinstance(value, tuple(_KINDS.values()))}
_DEEPEST = 32


def program_text(graph: torch.fx.Graph) -> str:
    """The text of a program's graph. Raises ExportError for what has no text."""
    lines: list[str] = []
    last = ""
    for node in graph.nodes:
        kind = node.meta.get("type_text") or type_text(node.meta.get("type"))
        if node.op == "placeholder":
            lines.append(f"input %{node.name}: {kind}")
        elif node.op == "output":
            lines.append(f"return {_value_text(node.args[0])}")
        else:
            where = location_text(node)
            if where and where != last:
                lines.append(f"# {where}")
            last = where or last
            try:
                arguments = [_value_text(value) for value in node.args]
                arguments += [f"{name}={_value_text(value)}" for name, value in node.kwargs.items()]
            except ExportError as error:
                called = f"{target_text(node.target)} at {where}" if where else target_text(node.target)
                raise ExportError(f"{error}: it is given to {called}") from None
            lines.append(f"%{node.name}: {kind} = {target_text(node.target)}({', '.join(arguments)})")
    return "\n".join(lines) + "\n"


def location_text(node: torch.fx.Node) -> str:
    """`model.py:12 in forward: return self.linear(x)`, or nothing."""
    known = node.meta.get("location_text")
    if known is not None:
        return known
    shown = users_line(node.meta.get("location") or ())
    if shown is None:
        return ""
    line = linecache.getline(shown.file, shown.line).strip()
    return f"{os.path.basename(shown.file)}:{shown.line} in {shown.function}" + (f": {line}" if line else "")


def call_text(node: torch.fx.Node) -> str:
    """What a node calls, as errors say it: `aten.sort.default`, or the function of Python's or NumPy's that one of this
    library's own operators stands for."""
    name = target_text(node.target)
    if name.startswith("fusewright.") and node.args and isinstance(node.args[0], str):
        function = node.args[0].partition("#")[0]
        return f"{function}()" if "." in function else f"time.{function}()"
    return name


def line_text(node: torch.fx.Node) -> str:
    """The user's line that a node came from, on a line of its own; or nothing."""
    where = users_line(node.meta.get("location") or ()) or node.meta.get("location_text")
    return f"\n  {where}" if where else ""


def target_text(target: Any) -> str:
    """`aten.add.Tensor`."""
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[1]}.{target._overloadname}"
    name = _FUNCTION_NAMES.get(target)
    if name is None:
        raise ExportError(f"a program cannot hold a call of {getattr(target, '__name__', target)}")
    return name


def _value_text(value: Any) -> str:
    if isinstance(value, torch.fx.Node):
        return f"%{value.name}"
    if value is None or type(value) in (bool, int):
        return str(value)
    if type(value) is float:
        return repr(value)
    if type(value) is complex:
        return f"complex({value.real!r}, {value.imag!r})"
    if type(value) is str:
        return json.dumps(value)
    if isinstance(value, torch.device):
        return f"device({json.dumps(str(value))})"
    if isinstance(value, tuple(_KINDS.values())):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_value_text, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_value_text, value))}]"
    if isinstance(value, torch.ScriptObject):
        kind: Any = value._type()
        raise ExportError(
            f"a program that is saved cannot hold a {kind.name()}, an object of a class of PyTorch's C++ "
            "library. Of packed quantised weights: quantise by torchao, whose weights are tensors"
        )
    raise ExportError(f"a program cannot hold an argument of type {type(value).__name__}")


# --- reading ---------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""\s*(?: (?P<node>%[A-Za-z_]\w*) | (?P<string>"(?:[^"\\]|\\.)*")
          | (?P<number>-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)(?!\w))
          | (?P<name>[A-Za-z_][\w.]*) | (?P<sign>[][(),=]) )""",
    re.VERBOSE,
)
_LINE = re.compile(r"%(?P<name>[A-Za-z_]\w*): (?P<type>.*?) = (?P<target>[\w.]+)\((?P<arguments>.*)\)\Z")
_INPUT = re.compile(r"input %(?P<name>[A-Za-z_]\w*): (?P<type>.*)\Z")


class _Values:
    """Reads the values of one line."""

    def __init__(self, text: str, nodes: dict[str, torch.fx.Node]) -> None:
        self.text, self.nodes, self.at = text, nodes, 0
        self.kind, self.token = "", ""
        self.step()

    def step(self) -> None:
        if not self.text[self.at :].strip():
            self.kind, self.token, self.at = "end", "", len(self.text)
            return
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            raise ValueError(f"cannot read {self.text[self.at : self.at + 40]!r}")
        self.kind, self.at = str(found.lastgroup), found.end()
        self.token = found.group(self.kind)

    def take(self, sign: str) -> None:
        if self.token != sign:
            raise ValueError(f"expected {sign!r}, found {self.token[:40]!r}")
        self.step()

    def value(self, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ValueError("values are nested too deeply")
        kind, token = self.kind, self.token
        self.step()
        if kind == "node":
            if token[1:] not in self.nodes:
                raise ValueError(f"{token} is not defined before")
            return self.nodes[token[1:]]
        if kind == "string":
            return json.loads(token)
        if kind == "number":
            return int(token) if token.lstrip("-").isdigit() else float(token)
        if token in ("[", "("):
            return self._items(token, depth)
        if token in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[token]
        if token in ("device", "complex") and self.token == "(":
            self.step()
            items = self._items("(", depth)
            return torch.device(*items) if token == "device" else complex(*items)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        raise ValueError(f"unknown value {token[:40]!r}")

    def _items(self, opened: str, depth: int) -> Any:
        closing, items = {"[": "]", "(": ")"}[opened], []
        while self.token != closing:
            items.append(self.value(depth + 1))
            if self.token != closing:
                self.take(",")
        self.step()
        return items if opened == "[" else tuple(items)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while self.kind != "end":
            name = self.token if self.kind == "name" and self.text[self.at : self.at + 1] == "=" else ""
            if name:
                if not name.isidentifier() or name in kwargs:
                    raise ValueError(f"bad argument {name[:40]!r}")
                self.step()
                self.take("=")
                kwargs[name] = self.value()
            else:
                args.append(self.value())
            if self.kind != "end":
                self.take(",")
        return tuple(args), kwargs


def find_target(name: str) -> Any:
    """The operator of this name. Raises ValueError when there is none, or a program may not name it."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    parts = name.split(".")
    if len(parts) != 3 or any(part.startswith("__") and not part.endswith("__") for part in parts):
        raise ValueError(f"{name[:80]!r} names no operator")
    namespace, operation, overload = parts
    if operation in REFUSED or namespace in NAMESPACE_REFUSED:
        raise ValueError(f"a program may not call {name!r}")
    if not is_registered(f"{namespace}::{operation}", overload):
        raise ValueError(f"there is no operator {name[:80]!r} here: import the module that registers it before loading")
    found = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    if not isinstance(found, OpOverload):
        raise ValueError(f"{name[:80]!r} names no operator")
    return found


def parse(text: str) -> torch.fx.Graph:
    """The graph of a program's text. Raises ProgramFileError, which names the line."""
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    where, done = "", False
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if not line.strip():
                continue
            if done:
                raise ValueError("nothing may follow the return")
            if line.startswith("#"):
                where = line[1:].strip()
            elif line.startswith("return "):
                graph.output(_whole(line.removeprefix("return "), nodes))
                done = True
            else:
                _read_node(graph, line, nodes, where)
        except (ValueError, TypeError, RuntimeError, AttributeError, OverflowError) as error:
            raise ProgramFileError(f"graph.txt, line {number}: {error}") from error
    if not done:
        raise ProgramFileError("graph.txt: the graph has no return")
    return graph


def _whole(text: str, nodes: dict[str, torch.fx.Node]) -> Any:
    reader = _Values(text, nodes)
    value = reader.value()
    if reader.kind != "end" or not isinstance(value, tuple):
        raise ValueError("a graph returns a tuple")
    return value


def _read_node(graph: torch.fx.Graph, line: str, nodes: dict[str, torch.fx.Node], where: str) -> None:
    found = _INPUT.match(line) or _LINE.match(line)
    if found is None:
        raise ValueError(f"cannot read {line[:80]!r}")
    name = found["name"]
    if name in nodes or keyword.iskeyword(name):
        raise ValueError(f"%{name[:40]} is defined twice, or is no name")
    if line.startswith("input "):
        node = graph.placeholder(name)
    else:
        target = find_target(found["target"])
        args, kwargs = _Values(found["arguments"], nodes).arguments()
        node = graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["location_text"] = where
    node.meta["type_text"] = found["type"]
    nodes[name] = node
