"""The collectives of a graph: which nodes they are, and what each of them says, in order.

Takes a graph at either level; gives `Collective`s. Always holds: waiting for one is none of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch.fx
from torch._ops import OpOverload, OpOverloadPacket

from fusewright.base.records import dataclass
from fusewright.graph.nodes import leaves
from fusewright.operators import messages
from fusewright.operators.rules.collectives import NAMESPACE
from fusewright.sizes.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Collective:
    """operator: without its namespace; shapes: of the tensors it takes (a symbolic size as text); group: its name;
    bytes: of the tensors, None where a size is symbolic; constants: what else it is given (reduction, source...)."""

    operator: str
    shapes: tuple[tuple[int | str, ...], ...]
    dtype: str
    group: str
    bytes: int | None
    constants: tuple[str, ...]

    def __str__(self) -> str:
        size = "" if self.bytes is None else f", {self.bytes} bytes"
        text = described(self.operator, self.dtype, self.shapes, self.constants)
        return f"{text} in group {self.group}{size}"


def described(operator: str, dtype: str, shapes: Iterable[Iterable[object]], constants: Iterable[str]) -> str:
    """A collective as a user reads it."""
    sizes = ", ".join("x".join(map(str, shape)) or "()" for shape in shapes)
    return " ".join(part for part in (operator, *constants, "of", dtype, sizes) if part)


_SPACES = (f"{NAMESPACE}.", f"{messages.NAMESPACE}.")


def is_collective(node: torch.fx.Node) -> bool:
    """Whether other processes take part in the node."""
    return _is_of_namespace(node) and not is_wait(node)


def is_wait(node: torch.fx.Node) -> bool:
    """Whether the node waits for a collective."""
    return _is_of_namespace(node) and str(node.target).startswith(f"{NAMESPACE}.wait_tensor")


def _is_of_namespace(node: torch.fx.Node) -> bool:
    return isinstance(node.target, (OpOverload, OpOverloadPacket)) and str(node.target).startswith(_SPACES)


def collectives_of(graph: torch.fx.Graph) -> Iterator[Collective]:
    """The collectives of a graph, in the order in which they begin."""
    for node in graph.nodes:
        if not is_collective(node):
            continue
        kinds = [found for item in leaves(node.args) if (found := _type(item)) is not None]
        others = [item for item in leaves(node.args) if not isinstance(item, torch.fx.Node)]
        shapes = tuple(tuple(size if isinstance(size, int) else str(size) for size in kind.shape) for kind in kinds)
        sizes = [_bytes(kind) for kind in kinds]
        amount = None if None in sizes else sum(size or 0 for size in sizes)
        dtype = str(kinds[0].dtype).removeprefix("torch.") if kinds else ""
        group = others.pop() if others else ""
        name = str(getattr(group, "group_name", group))
        operator = str(node.target).partition(".")[2].removesuffix(".default")
        yield Collective(operator, shapes, dtype, name, amount, tuple(map(str, others)))


def _bytes(kind: TensorType) -> int | None:
    numbers = [size for size in kind.shape if isinstance(size, int)]
    return math.prod(numbers) * kind.dtype.itemsize if len(numbers) == len(kind.shape) else None


def _type(item: object) -> TensorType | None:
    kind = item.meta.get("type") if isinstance(item, torch.fx.Node) else None
    return kind if isinstance(kind, TensorType) else None
