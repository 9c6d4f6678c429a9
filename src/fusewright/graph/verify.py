"""The verifier of ATen graphs: what must hold between passes.

Takes a torch.fx.Graph; gives nothing, or raises GraphError with the node and what is wrong with it.
"""

from __future__ import annotations

import operator

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.graph.builder import argument_types
from fusewright.graph.nodes import written
from fusewright.operators.data_dependent import GIVES, OF_UNKNOWN_SHAPE
from fusewright.operators.derive import derive
from fusewright.operators.schema import facts
from fusewright.sizes.expressions import Expr
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType, same_strides, symbols_in


class GraphError(Exception):
    """A graph that breaks a rule: a defect of the stage that made it."""


def shared_results(graph: torch.fx.Graph) -> set[tuple[int, str]]:
    """(place of a result, what it is): results that are an input, or another result before them."""
    found: set[tuple[int, str]] = set()
    before: dict[torch.fx.Node, str] = {node: node.name for node in graph.find_nodes(op="placeholder")}
    returned = graph.output_node().args[0]
    for place, value in enumerate(returned if isinstance(returned, (tuple, list)) else ()):
        if isinstance(value, torch.fx.Node):
            if value in before:
                found.add((place, before[value]))
            before.setdefault(value, f"result {place}")
    return found


def verify_results(graph: torch.fx.Graph, shared: set[tuple[int, str]]) -> None:
    """Check that no result has become an input or another result, whose memory it would share, but for `shared`."""
    for place, other in shared_results(graph) - shared:
        raise GraphError(f"result {place} has become {other}: a program may write to one and read the other")


def verify(
    graph: torch.fx.Graph, functional: bool = False, rederive: bool = False, env: ShapeEnv | None = None
) -> None:
    """Check topology, types and symbols; with `functional` also that nothing writes to memory but the epilogue's
    copies; with `rederive` also that every type is what the operator's shape rule or meta kernel gives."""
    seen: set[torch.fx.Node] = set()
    symbols: set[Expr] = set()
    epilogue = False
    for node in graph.nodes:
        for argument in node.all_input_nodes:
            if argument not in seen:
                raise GraphError(f"{node.name} uses {argument.name} before it is made")
        seen.add(node)
        if node.op == "output":
            continue
        if "type" not in node.meta:
            raise GraphError(f"{node.name} has no type")
        type_ = node.meta["type"]
        if node.op == "placeholder":
            symbols |= symbols_in(type_)
            continue
        _check_type(node, type_)
        if GIVES in node.meta:
            symbols.add(node.meta[GIVES][0])
        if node.target in OF_UNKNOWN_SHAPE:
            symbols |= symbols_in(type_)  # sizes that the data decide
        unknown = symbols_in(type_) - symbols
        if unknown:
            raise GraphError(
                f"{node.name}: {node.meta['type']} depends on {', '.join(map(str, unknown))}, which is no input's size"
            )
        if node.op != "call_function":
            continue
        if epilogue and not node.meta.get("epilogue"):
            raise GraphError(f"{node.name} stands after the epilogue")
        epilogue = epilogue or bool(node.meta.get("epilogue"))
        if isinstance(node.target, OpOverload):
            if functional:
                _check_functional(node)
            if rederive:
                _check_derived(node, env)
        elif node.target is operator.getitem:
            _check_item(node)
        elif node.target is written:
            _check_written(node)
        else:
            raise GraphError(f"{node.name}: {node.target} is not an ATen operator")


def _check_type(node: torch.fx.Node, type_: object) -> None:
    if isinstance(type_, TensorType) and len(type_.shape) != len(type_.stride):
        raise GraphError(f"{node.name}: shape and strides of different lengths in {type_}")


def _check_item(node: torch.fx.Node) -> None:
    source, index = node.args
    if source.meta["type"][index] != node.meta["type"]:  # type: ignore[union-attr]
        raise GraphError(f"{node.name}: {node.meta['type']} is not what its tuple holds")


def _check_written(node: torch.fx.Node) -> None:
    copy, by = node.args
    if not isinstance(by, torch.fx.Node) or copy not in by.all_input_nodes or not by.meta.get("writes_private"):
        raise GraphError(f"{node.name}: {by} does not write to {copy}")


def _check_functional(node: torch.fx.Node) -> None:
    assert isinstance(node.target, OpOverload)
    for index in facts(node.target).written:
        target = node.args[index] if index < len(node.args) else node.kwargs.get(facts(node.target).arguments[index])
        if node.meta.get("epilogue"):
            if not isinstance(target, torch.fx.Node) or target.op not in ("placeholder", "get_attr"):
                raise GraphError(f"{node.name}: an epilogue copy into something that is no input")
            continue
        targets = target if isinstance(target, (list, tuple)) else [target]
        for one in targets:
            if isinstance(one, torch.fx.Node) and not one.meta.get("private"):
                raise GraphError(f"{node.name} writes to {one.name} in a functional graph")


def _check_derived(node: torch.fx.Node, env: ShapeEnv | None) -> None:
    assert isinstance(node.target, OpOverload)
    args = [argument_types(a) for a in node.args]
    kwargs = {k: argument_types(v) for k, v in node.kwargs.items()}
    found = derive(node.target, args, kwargs, env)
    recorded = node.meta["type"]
    pairs = zip(found, recorded, strict=True) if isinstance(found, tuple) else [(found, recorded)]
    for ours, theirs in pairs:
        if isinstance(ours, TensorType) != isinstance(theirs, TensorType):
            raise GraphError(f"{node.name}: recorded as {theirs}, derived as {ours}")
        if isinstance(ours, TensorType) and not _agree(ours, theirs):
            raise GraphError(f"{node.name}: recorded as {theirs} {theirs.stride}, derived as {ours} {ours.stride}")


def _agree(a: TensorType, b: TensorType) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and same_strides(a, b)
