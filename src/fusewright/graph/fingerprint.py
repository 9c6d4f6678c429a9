"""A graph's identity: a text that two graphs share only when every later stage does the same with both.

Takes a recorded graph, the tensors of its get_attr nodes, and what is known of its sizes; gives a SHA-256 digest, or
None for a graph that holds something without a faithful text. Always holds: everything that a node carries is part of
the text (an unknown kind of value gives None), except what only describes: names, source lines, example values. GPUs
are counted as the graph names them, so that processes with a GPU each share a text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch._ops import HigherOrderOperator, OpOverload

from fusewright.base.pytorch import bytes_of
from fusewright.base.records import dataclass
from fusewright.graph.builder import env_of
from fusewright.graph.nodes import written
from fusewright.sizes.expressions import Expr, bounds, free_symbols, to_tuples
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType

DESCRIPTIVE = frozenset(
    {"location", "example_value", "leaf", "saved", "history", "no_grad", "recompute", "env", "tangent"}
)
LARGEST_CONSTANT = 64 << 20
"""Bytes of the largest constant that is read to be compared; a graph with a larger one has no fingerprint."""


class NoFingerprint(Exception):
    """The graph holds a value that has no faithful text."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """digest: in hexadecimal; gpus: the numbers of the GPUs that the graph names, in the order in which it does."""

    digest: str
    gpus: tuple[int, ...]


def fingerprint(graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]) -> Fingerprint | None:
    """None for a graph that holds a value of an unknown kind, or a constant that is too large."""
    try:
        text = _Text(constants)
        for position, node in enumerate(graph.nodes):
            text.node(position, node)
        text.sizes(env_of(graph))
    except NoFingerprint:
        return None
    return Fingerprint(hashlib.sha256("\n".join(text.lines).encode()).hexdigest(), tuple(text.gpus))


class _Text:
    def __init__(self, constants: Mapping[str, torch.Tensor]) -> None:
        self.constants = constants
        self.lines: list[str] = []
        self.positions: dict[torch.fx.Node, int] = {}
        self.symbols: set[Expr] = set()
        self.gpus: dict[int, int] = {}  # how many were named before
        self.known: dict[TensorType | OpOverload, str] = {}  # texts of what a graph holds many times

    def node(self, position: int, node: torch.fx.Node) -> None:
        self.positions[node] = position
        target = self.target(node)
        meta = [f"{key}={self.value(node.meta[key])}" for key in sorted(node.meta.keys() - DESCRIPTIVE)]
        self.lines.append(f"{node.op} {target} {self.value(node.args)} {self.value(node.kwargs)} {' '.join(meta)}")

    def target(self, node: torch.fx.Node) -> str:
        if node.op == "get_attr":
            return self.value(self.constants[str(node.target)])
        if node.op in ("placeholder", "output"):
            return ""
        return self.value(node.target)

    def value(self, value: Any) -> str:
        row = _ROWS.get(type(value))
        if row is not None:
            return row(self, value)
        if isinstance(value, torch.fx.Node):
            return f"%{self.positions[value]}"
        if isinstance(value, Expr):
            self.symbols.update(free_symbols(value))
            return f"<{to_tuples(value)}>"
        if isinstance(value, tuple | list):  # fx's immutable lists, and torch.Size
            return f"({','.join(map(self.value, value))})"
        if isinstance(value, dict):
            return f"{{{','.join(f'{self.value(key)}:{self.value(item)}' for key, item in value.items())}}}"
        if isinstance(value, torch.Tensor):
            return tensor_text(value)
        if value is written:
            return "written"
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if callable(value) and module in ("_operator", "math", "builtins"):
            return f"{module}.{name}"
        raise NoFingerprint(type(value).__name__)

    def type(self, type_: TensorType) -> str:
        found = self.known.get(type_)
        if found is None:
            shape, stride, offset = self.value(type_.shape), self.value(type_.stride), self.value(type_.offset)
            device = self.device(type_.device)
            found = self.known[type_] = f"{type_.dtype}{shape}{stride}{offset}{device}{type_.requires_grad}"
        return found

    def device(self, device: torch.device) -> str:
        if device.type != "cuda" or device.index is None:  # without a number: the current one, at each call
            return str(device)
        return f"cuda:{self.gpus.setdefault(device.index, len(self.gpus))}"

    def operator(self, op: OpOverload) -> str:
        if op not in self.known:
            self.known[op] = str(op._schema)
        return self.known[op]

    def sizes(self, env: ShapeEnv | None) -> None:
        self.lines.extend(sorted(f"{symbol} in {bounds(symbol)}" for symbol in self.symbols))
        if env is None:
            return
        self.lines.extend(f"{symbol.name} in {bounds(symbol)}" for symbol in env.symbols)
        self.lines.extend(f"{self.value(fact.left)} {fact.op} {self.value(fact.right)}" for fact in env.guards)


def tensor_text(tensor: torch.Tensor) -> str:
    """A constant tensor as text, its content by digest. Raises NoFingerprint for one that is too large or not plain."""
    plain = (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
    )
    if not plain or tensor.nbytes > LARGEST_CONSTANT or tensor.is_conj() or tensor.is_neg():
        raise NoFingerprint("a constant tensor")
    digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
    return f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}{tensor.requires_grad}{digest}"


def _exact(text: _Text, value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


_ROWS: dict[type, Callable[[_Text, Any], str]] = {
    type(None): _exact,
    bool: _exact,
    int: lambda text, value: str(value),
    float: lambda text, value: f"float {value.hex()}",
    complex: lambda text, value: f"complex {value.real.hex()} {value.imag.hex()}",
    str: _exact,
    bytes: _exact,
    slice: lambda text, value: f"slice {text.value((value.start, value.stop, value.step))}",
    torch.dtype: lambda text, value: str(value),
    torch.layout: lambda text, value: str(value),
    torch.memory_format: lambda text, value: str(value),
    torch.device: lambda text, value: f"device {text.device(value)}",
    TensorType: _Text.type,
    OpOverload: _Text.operator,
    HigherOrderOperator: lambda text, value: f"higher order {value.name()}",
}
