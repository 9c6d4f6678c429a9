"""`fusewright.parallel.shard`: graphs that run on every device of a mesh, by `jax.shard_map`.

Takes a function whose arguments pass ENTER and whose results pass LEAVE (operators/spmd.py); gives callables over whole
tensors. Always holds: inside, a tensor has the shape of one device's part; what the forward saves for the backward
stands outside with the devices as its first dimension; an input that no ENTER reads goes to every device whole.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.fx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch.utils import _pytree as pytree

from fusewright.backends.registry import Backend, GraphToCompile
from fusewright.backends.xla.backend import Program, compile_by, writes
from fusewright.backends.xla.table import Array, NoRow, Values, row
from fusewright.base.errors import BackendError
from fusewright.base.records import dataclass
from fusewright.capture.frame import Backward
from fusewright.graph import passes
from fusewright.graph.builder import Builder, env_of
from fusewright.graph.nodes import leaves
from fusewright.operators.schema import facts
from fusewright.operators.spmd import ENTER, LEAVE
from fusewright.sizes.tensor_type import TensorType


@dataclass(frozen=True, slots=True)
class Shards:
    """compiled  to be compiled under `backend` and fullgraph: `f` between ENTER and LEAVE
    check     raises ValueError for arguments that cannot be cut"""

    compiled: Callable[..., Any]
    backend: Backend
    check: Callable[..., Any]


def shards(f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Shards:
    """See `fusewright.parallel.shard`."""
    on = _mesh(mesh)

    def part(*args: Any) -> Any:
        entered: dict[Any, Any] = {}
        inside = _mapped(functools.partial(_enter, on, entered), args, in_specs)
        return _mapped(functools.partial(_leave, on), f(*inside), out_specs)

    def check(*args: Any) -> None:
        _mapped(functools.partial(_divides, on), args, in_specs)

    how = functools.partial(_compile, on)
    return Shards(part, Backend("xla", "aten", how, follows_autograd=False, trains=True, dynamic=False), check)


def _mesh(mesh: Any) -> Mesh:
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names)  # whose axes are none of jax's explicit ones
    devices = jax.devices()
    if mesh is not None and not (type(mesh) is int and 0 < mesh <= len(devices)):
        raise ValueError(f"a mesh is a jax.sharding.Mesh or a number of jax's {len(devices)} devices, got {mesh!r}")
    return Mesh(devices[:mesh], ("devices",))


# --- what the compiled function does at its border ------------------------------------------------------------------


def _mapped(function: Callable[[Any, Any], Any], values: Any, specs: Any) -> Any:
    """function(tensor, spec) of every tensor in `values`. A spec that is no tuple is that of all values."""
    several = isinstance(specs, (tuple, list)) and not isinstance(specs, PartitionSpec)
    if several and not (isinstance(values, (tuple, list)) and len(values) == len(specs)):
        got = len(values) if isinstance(values, (tuple, list)) else "one value"
        raise ValueError(f"{len(specs)} specs for {got}")
    if not several:
        leaves, spec = pytree.tree_flatten(values)
        return pytree.tree_unflatten(
            [function(leaf, specs) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )
    made = [_mapped(function, value, spec) for value, spec in zip(values, specs)]
    return made if isinstance(values, list) else tuple(made)


def _cut(on: Mesh, x: torch.Tensor, spec: Any) -> tuple[list[str], list[int], list[str], int]:
    """Arguments of ENTER: the axis and the parts of each dimension, the other axes, how many devices these have."""
    axes = [""] * x.dim()
    names = list(spec) if isinstance(spec, PartitionSpec) else []
    if type(spec) is int and -x.dim() <= spec < x.dim():
        axes[spec] = on.axis_names[0]
    elif spec is not None and (type(spec) is int or not isinstance(spec, PartitionSpec) or len(names) > x.dim()):
        raise ValueError(f"the spec {spec!r} is no dimension and no PartitionSpec of a tensor of {x.dim()} dimensions")
    for dim, name in enumerate(names):
        if name is not None and (name not in on.axis_names or name in axes):
            raise ValueError(f"the spec {spec!r} does not name different axes of the mesh, {on.axis_names}")
        axes[dim] = name or ""
    others = [name for name in on.axis_names if name not in axes]
    parts = [on.shape[name] if name else 1 for name in axes]
    return axes, parts, others, math.prod([on.shape[name] for name in others])


def _divides(on: Mesh, x: torch.Tensor, spec: Any) -> None:
    for dim, (size, parts) in enumerate(zip(x.shape, _cut(on, x, spec)[1])):
        if size % parts:
            raise ValueError(f"dimension {dim} of an argument has {size} elements, which {parts} devices cannot share")


def _enter(on: Mesh, entered: dict[Any, Any], x: torch.Tensor, spec: Any) -> torch.Tensor:
    axes, parts, others, _ = _cut(on, x, spec)
    key = id(x), tuple(axes)
    if key not in entered:
        entered[key] = ENTER(x, axes, parts, others, 1)
    made: torch.Tensor = entered[key]
    return made


def _leave(on: Mesh, x: torch.Tensor, spec: Any) -> torch.Tensor:
    made: torch.Tensor = LEAVE(x, *_cut(on, x, spec), True)
    return made


# --- graphs ---------------------------------------------------------------------------------------------------------


def _compile(on: Mesh, to_compile: GraphToCompile) -> Callable[..., Any]:
    _refuse_writes(to_compile.graph)
    graph = passes.run(to_compile.graph)
    _complete(on, graph, to_compile.backward)
    return compile_by(graph, to_compile, functools.partial(Sharded, on))


def _refuse_writes(graph: torch.fx.Graph) -> None:
    """A write to an argument would be one to a device's part of it, and be lost."""
    entered: set[Any] = set()
    for node in graph.nodes:
        known = facts(node.target) if isinstance(node.target, torch._ops.OpOverload) else None
        given = [*node.args, *node.kwargs.values()]
        if known is not None:
            given = [*node.args, *map(node.kwargs.get, known.arguments[len(node.args) :])]
            if not entered.isdisjoint(leaves([given[place] for place in known.written])):
                raise BackendError(
                    "shard: the function writes to an argument, of which each device has a copy: return the new value"
                )
            views = {known.parts_of, *(one[1] for one in known.returned if one)}
            given = [given[place] for place in views if place is not None]
        if node.target is ENTER or (node.op == "call_function" and not entered.isdisjoint(leaves(given))):
            entered.add(node)


def _complete(on: Mesh, graph: torch.fx.Graph, backward: Backward | None) -> None:
    """Marks what is inside. What is written must be alike on all devices; the gradient of an input that no ENTER reads
    is the sum over them."""
    for node in graph.nodes:
        node.meta["inside"] = node.op == "call_function" and node.target is not LEAVE and not writes(node)
    for node in graph.nodes:
        entering = {user.target is ENTER and tuple(user.args[1]) for user in node.users if not writes(user)}
        if node.op in ("placeholder", "get_attr") and len(entering) > 1:
            raise BackendError("shard: one tensor is two arguments with different specs, or is read besides them")
    build, axes = Builder(graph, env_of(graph)), list(on.axis_names)

    def border(target: Any, value: torch.fx.Node, *rest: Any) -> torch.fx.Node:
        ndim = value.meta["type"].ndim
        made = build.call(target, value, [""] * ndim, [1] * ndim, axes, *rest)
        made.meta["inside"] = target is ENTER
        return made

    for node in [node for node in graph.nodes if writes(node) and node.args[1].meta["inside"]]:
        with graph.inserting_before(node):
            node.args = (node.args[0], border(LEAVE, node.args[1], 1, True), *node.args[2:])
    output, forward = graph.output_node(), len(graph.output_node().args[0])  # type: ignore[arg-type]
    if backward is not None:
        forward = backward.outputs
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node in placeholders[backward.inputs :]:
            if all(user.target is not ENTER for user in node.users):  # the new value of what is written outside
                with graph.inserting_after(placeholders[-1]):
                    entered = border(ENTER, node, on.size)
                node.replace_all_uses_with(entered, functools.partial(operator.is_not, entered))
    with graph.inserting_before(output):
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        for place, made in enumerate(results):
            if isinstance(made, torch.fx.Node) and made.meta["inside"]:
                results[place] = border(LEAVE, made, 1, place < forward)
    output.args = (tuple(results),)


def _inside(node: torch.fx.Node) -> bool:
    """Whether the value is a device's own. What was added to a half stands where its argument stands."""
    known: bool | None = node.meta.get("inside")
    return _inside(node.args[0]) if known is None else known  # type: ignore[arg-type]


class Sharded(Program):
    """A graph on every device of a mesh."""

    def __init__(self, on: Mesh, graph: torch.fx.Graph, constants: dict[str, Any]) -> None:
        self.on, self.axes = on, on.axis_names
        super().__init__(graph, constants)

    def by_torch(self, node: torch.fx.Node) -> bool:
        return False

    def shape_of(self, node: torch.fx.Node) -> Sequence[Any]:
        shape = super().shape_of(node)
        return (self.on.size, *shape) if _inside(node) else shape

    def spec(self, node: torch.fx.Node) -> PartitionSpec:
        """Of an input or a result, outside."""
        if _inside(node):
            return PartitionSpec(self.axes)
        border = node if node.target is LEAVE else next((user for user in node.users if user.target is ENTER), None)
        if border is None:
            return PartitionSpec()
        axes: Any = border.args[1]
        return PartitionSpec(*(name or None for name in axes))

    def function(self, numbers: tuple[Any, ...]) -> Callable[..., Any]:
        tensors = [node for node in self.inputs if isinstance(node.meta["type"], TensorType)]

        def on_device(*arrays: Array) -> Any:
            inside = [array[0] if _inside(node) else array for node, array in zip(tensors, arrays)]
            made, bad = self.trace(numbers, *inside)
            made = [one[None] if _inside(node) else one for node, one in zip(self.wanted, made)]
            return made, None if bad is None else lax.psum(bad.astype(jnp.int32), self.axes) > 0

        specs = [self.spec(node) for node in self.wanted]
        mapped = jax.shard_map(
            on_device, mesh=self.on, in_specs=tuple(map(self.spec, tensors)), out_specs=(specs, PartitionSpec())
        )
        return mapped

    def _check_rows(self) -> None:
        try:
            super()._check_rows()
        except ValueError as error:  # jax's own, of a result that differs between devices
            raise NoRow("a result, or what is written, is not the same on all devices: `psum` makes it so") from error

    def placed(self, node: torch.fx.Node, array: Any) -> Any:
        return jax.device_put(array, NamedSharding(self.on, self.spec(node)))

    def gathered(self, array: Any) -> Any:
        return jax.device_put(array, self.on.devices.flat[0])


@row("fusewright.shard_enter.default", widens=False)
def _entered(values: Values, x: Array, axes: Any, parts: Any, others: Any, copies: int) -> Array:
    return x if copies == 1 else x / copies


@row("fusewright.shard_leave.default", widens=False)
def _left(values: Values, x: Array, axes: Any, parts: Any, others: Any, copies: int, alike: bool) -> Array:
    return x if alike or not others else lax.psum(x, tuple(others)) / copies


@row("fusewright.psum.default", widens=False)
def _psum(values: Values, x: Array, axes: Any) -> Array:
    unknown = [name for name in axes if name not in values.axes]
    if unknown or not values.axes:
        raise NoRow("psum outside of shard" if not values.axes else f"psum over {unknown[0]!r}: no axis of the mesh")
    return lax.psum(x, tuple(axes) or values.axes)
