"""Complex numbers are computed as pairs of reals, which loops can fuse.

Takes and gives a functional graph. An operator of `ROWS` computes the parts of its result from the parts of its
operands; a tensor from elsewhere is read through `view_as_real`. What needs the numbers themselves (a result, a
transform) gets them from aten.complex. Views stay, and are made of the parts where those are asked for.
Always holds: the formulas are those of PyTorch's own kernels, infinities included: a real operand is a number whose
imaginary part is 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fusewright.graph.builder import Builder, building_for
from fusewright.graph.passes.context import PassContext
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import known_eq
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node
Part = Node | float
"""A tensor, or a number that stands for all elements."""
Pair = tuple[Part, Part]

DEVICES = ("cuda",)
"""A CPU's loops would gather what lies two apart; PyTorch's own kernels there are vectorised."""
_DTYPES = (torch.complex64, torch.complex128)


def complex_parts(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    walk = _Walk()
    for node in list(graph.nodes):
        row = ROWS.get(node.target) if node.op == "call_function" else None
        if row is None or not _is_possible(node) or not context.allow(f"in parts: {node.name}"):
            continue
        with graph.inserting_before(node):
            made = row(_Step(walk, node))
        if isinstance(made, tuple):
            walk.pairs[node] = made
        elif made is not None:
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        pair = walk.pairs.get(node)
        if pair is not None and node.users:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_together(building_for(graph, node), pair, node.meta["type"]))
        if not node.users and (pair is not None or walk.is_in_parts(node)):
            graph.erase_node(node)
    return graph


def _is_possible(node: Node) -> bool:
    """Whether the operator takes or gives complex numbers, all of them of a type that has parts."""
    if node.meta.get("private") or node.meta.get("writes_private"):
        return False
    kinds: list[Any] = [value.meta.get("type") for value in (node, *node.all_input_nodes)]
    if not all(isinstance(kind, TensorType) for kind in kinds):
        return False
    found = [kind.dtype for kind in kinds if kind.dtype.is_complex]
    devices = {kind.device for kind in kinds}
    return bool(found) and len(devices) == 1 and devices.pop().type in DEVICES and all(one in _DTYPES for one in found)


class _Walk:
    """pairs: the parts of what rows have computed. views: other complex tensors whose parts were asked for."""

    def __init__(self) -> None:
        self.pairs: dict[Node, Pair] = {}
        self.views: dict[Node, Pair] = {}

    def is_in_parts(self, node: Node) -> bool:
        """Whether the parts are there, or are there but for views."""
        if node in self.pairs or node.target in _MADE_OF_PARTS:
            return True
        source = _viewed(node)
        return source is not None and self.is_in_parts(source)

    def parts(self, build: Builder, node: Node) -> Pair:
        found = self.pairs.get(node) or self.views.get(node)
        if found is None:
            found = self.views[node] = self._parts(build, node)
        return found

    def _parts(self, build: Builder, node: Node) -> Pair:
        arguments: Any = node.args
        if node.target is aten.complex.default:
            return arguments[0], arguments[1]
        if node.target is aten.view_as_complex.default:
            return _halves(build, arguments[0])
        source = _viewed(node)
        if source is not None and self.is_in_parts(source):
            op: Any = node.target
            kind: TensorType = source.meta["type"]
            real, imag = (_full(build, part, kind) for part in self.parts(build, source))
            shown = [build.call(op, part, *arguments[1:], **node.kwargs) for part in (real, imag)]
            return shown[0], shown[1]
        return _halves(build, build.call(aten.view_as_real.default, node))


_MADE_OF_PARTS = (aten.complex.default, aten.view_as_complex.default)


def _viewed(node: Node) -> Node | None:
    """What a view of complex numbers shows, if it is one that shows parts alike."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not facts(target).is_view or target is aten.view.dtype:
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and _is_complex(source) and _is_complex(node) else None


def _is_complex(node: Node) -> bool:
    kind = node.meta.get("type")
    return isinstance(kind, TensorType) and kind.dtype in _DTYPES


def _halves(build: Builder, real: Node) -> Pair:
    last = real.meta["type"].ndim - 1
    return build.call(aten.select.int, real, last, 0), build.call(aten.select.int, real, last, 1)


def _full(build: Builder, part: Part, kind: TensorType) -> Node:
    """The part as a tensor of the shape of the whole."""
    if not isinstance(part, Node):
        return build.call(aten.full.default, list(kind.shape), part, dtype=kind.dtype.to_real(), device=kind.device)
    own: TensorType = part.meta["type"]
    alike = own.ndim == kind.ndim and all(known_eq(a, b) is True for a, b in zip(own.shape, kind.shape))
    return part if alike else build.call(aten.expand.default, part, list(kind.shape))


def _together(build: Builder, pair: Pair, kind: TensorType) -> Node:
    real, imag = (build.restride(_full(build, part, kind), kind) for part in pair)
    return build.restride(build.call(aten.complex.default, real, imag), kind)


class _Step:
    """One operator: its arguments' parts, and arithmetic on parts."""

    def __init__(self, walk: _Walk, node: Node) -> None:
        self.walk = walk
        self.node = node
        self.build = building_for(node.graph, node)
        self.kind: TensorType = node.meta["type"]
        self.args: Any = node.args

    def parts(self, value: Any) -> Pair:
        """Of an operand: parts in the precision of the result."""
        if not isinstance(value, Node):
            return complex(value).real, complex(value).imag
        pair = self.walk.parts(self.build, value) if _is_complex(value) else (value, 0.0)
        dtype = self.kind.dtype.to_real() if self.kind.dtype.is_complex else None
        if dtype is None:
            return pair
        return self._as(pair[0], dtype), self._as(pair[1], dtype)

    def _as(self, part: Part, dtype: torch.dtype) -> Part:
        if not isinstance(part, Node) or part.meta["type"].dtype is dtype:
            return part
        return self.build.call(aten._to_copy.default, part, dtype=dtype)

    def times(self, a: Part, b: Part) -> Part:
        if isinstance(a, Node):
            return self.build.call(aten.mul.Tensor, a, b)
        return self.build.call(aten.mul.Tensor, b, a) if isinstance(b, Node) else a * b

    def plus(self, a: Part, b: Part) -> Part:
        if isinstance(a, Node):
            return self.build.call(aten.add.Tensor, a, b)
        return self.build.call(aten.add.Tensor, b, a) if isinstance(b, Node) else a + b

    def minus(self, a: Part, b: Part) -> Part:
        if isinstance(a, Node):
            return self.build.call(aten.sub.Tensor, a, b)
        return self.build.call(aten.rsub.Scalar, b, a) if isinstance(b, Node) else a - b

    def product(self, a: Pair, b: Pair) -> Pair:
        real = self.minus(self.times(a[0], b[0]), self.times(a[1], b[1]))
        return real, self.plus(self.times(a[0], b[1]), self.times(a[1], b[0]))


Row = Callable[[_Step], "Pair | Node | None"]


def _multiply(step: _Step) -> Pair:
    return step.product(step.parts(step.args[0]), step.parts(step.args[1]))


def _add(step: _Step, sign: int = 1) -> Pair:
    """The second operand times alpha, as PyTorch's kernel does also where alpha is 1."""
    a, b = step.parts(step.args[0]), step.parts(step.args[1])
    alpha = complex(sign * step.node.kwargs.get("alpha", 1))  # type: ignore[operator]
    b = step.product(b, (alpha.real, alpha.imag))
    return step.plus(a[0], b[0]), step.plus(a[1], b[1])


def _conjugate(step: _Step) -> Pair:
    real, imag = step.parts(step.args[0])
    return real, step.build.call(aten.neg.default, imag) if isinstance(imag, Node) else -imag


def _polar(step: _Step) -> Pair:
    length, angle = step.args
    call = step.build.call
    return step.times(length, call(aten.cos.default, angle)), step.times(length, call(aten.sin.default, angle))


def _as_real(step: _Step) -> Node | None:
    """None for what lies in memory: it is a view of that."""
    source = step.args[0]
    if not step.walk.is_in_parts(source):
        return None
    kind: TensorType = source.meta["type"]
    parts = [_full(step.build, part, kind) for part in step.parts(source)]
    return step.build.call(aten.stack.default, parts, kind.ndim)


def _of_both(op: Any, step: _Step) -> Node:
    """A real result of both parts."""
    source: TensorType = step.args[0].meta["type"]
    real, imag = (_full(step.build, part, source) for part in step.parts(step.args[0]))
    return step.build.call(op, real, imag)


def _each(step: _Step) -> Pair:
    """The operator of each part by itself. Other arguments are the same for both."""
    pairs = {value: step.parts(value) for value in step.node.all_input_nodes if _is_complex(value)}
    return _of_part(step, pairs, 0), _of_part(step, pairs, 1)


def _of_part(step: _Step, pairs: dict[Node, Pair], place: int) -> Node:
    op: Any = step.node.target

    def part(value: Node) -> Any:
        found = pairs.get(value)
        return value if found is None else _full(step.build, found[place], value.meta["type"])

    args, kwargs = torch.fx.map_arg((step.args, dict(step.node.kwargs)), part)  # type: ignore[attr-defined]
    return step.build.call(op, *args, **kwargs)


def _each_by_index(step: _Step) -> Pair | None:
    """Left to PyTorch where the data decide how many elements there are."""
    masks = (torch.bool, torch.uint8)
    return None if any(one.meta["type"].dtype in masks for one in step.node.all_input_nodes) else _each(step)


def _each_without_options(step: _Step) -> Pair | None:
    """A sum in another type is left to PyTorch."""
    return None if step.node.kwargs.get("dtype") is not None else _each(step)


def _each_of_complex(step: _Step) -> Pair | None:
    """Left to PyTorch where only some operands are complex."""
    values = [*step.args[0]] if isinstance(step.args[0], (list, tuple)) else [*step.args[1:3]]
    alike = all(isinstance(one, Node) and one.meta["type"].dtype is step.kind.dtype for one in values)
    return _each(step) if alike else None


def _copy(step: _Step) -> Pair | None:
    """A conversion, but for one to reals, and to another device."""
    source: TensorType = step.args[0].meta["type"]
    if not step.kind.dtype.is_complex or source.device != step.kind.device:
        return None
    kwargs = {name: value for name, value in step.node.kwargs.items() if name == "memory_format"}
    real, imag = (_full(step.build, part, step.kind) for part in step.parts(step.args[0]))
    made = [step.build.call(aten.clone.default, part, **kwargs) for part in (real, imag)]
    return made[0], made[1]


ROWS: dict[Any, Row] = {
    aten.mul.Tensor: _multiply,
    aten.mul.Scalar: _multiply,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: functools.partial(_add, sign=-1),
    aten._conj_physical.default: _conjugate,
    aten.conj_physical.default: _conjugate,
    aten.polar.default: _polar,
    aten.view_as_real.default: _as_real,
    aten.abs.default: functools.partial(_of_both, aten.hypot.default),
    aten._to_copy.default: _copy,
    aten.sum.default: _each_without_options,
    aten.sum.dim_IntList: _each_without_options,
    aten.mean.default: _each_without_options,
    aten.mean.dim: _each_without_options,
    aten.index.Tensor: _each_by_index,
    aten.cat.default: _each_of_complex,
    aten.stack.default: _each_of_complex,
    aten.where.self: _each_of_complex,
    **dict.fromkeys(
        (
            aten.neg.default, aten.clone.default, aten.flip.default, aten.roll.default, aten.repeat.default,
            aten.index_select.default, aten.gather.default, aten.select_backward.default, aten.slice_backward.default,
        ),
        _each,
    ),
}  # fmt: skip
"""Operator → the parts of its result, a real result, or None where it is left to PyTorch."""
