"""Compiling a joint graph: split it, compile both halves, join them in an autograd function.

Takes a functional joint graph and a compiler of one graph; gives the callable that the entry runs. Used by every
backend that trains.
Always holds: the joint graph and its halves are announced (artifact "aot_graphs") before anything is made of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from typing import Any

from torch._ops import OpOverload

from fusewright import _native
from fusewright.autograd.buckets import CompiledPart, bucket_bytes, buckets, parts_of
from fusewright.autograd.function import differentiable
from fusewright.autograd.halves import Branch, Graphs, Group, Halves, Reach
from fusewright.autograd.joint import (
    JointGraph,
    Split,
    constant_gradients,
    copied,
    unfinished_branches,
    without_branches,
)
from fusewright.autograd.partition import copied_first, part_of, split
from fusewright.autograd.reach import nested, taken
from fusewright.autograd.recompute import elements
from fusewright.autograd.replay import changes, replay
from fusewright.backends.registry import GraphToCompile, by_operators
from fusewright.base.events import FellBack, StageDone
from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.capture.border.looked_up import as_read
from fusewright.capture.frame import Backward
from fusewright.graph.builder import env_of
from fusewright.graph.generators import drawing_devices
from fusewright.graph.passes.clean.dce import must_stay
from fusewright.graph.printer import print_graph
from fusewright.operators.overlap import view_chain
from fusewright.operators.schema import facts
from fusewright.runtime.training_graphs import Half
from fusewright.sizes.expressions import Expr


def compile_joint(
    graph: torch.fx.Graph,
    to_compile: GraphToCompile,
    compile_half: Callable[[torch.fx.Graph, str], Callable[..., Any]],
    partition: Callable[[JointGraph], Split] = split,
    record: Callable[..., Graphs | None] = lambda *halves: None,
) -> Callable[..., Any]:
    """`graph` is the functional form of `to_compile.graph`; `compile_half(graph, direction)` compiles one half
    ("forward", "backward"); `record(forward, backward, saved, outputs)` gives what replays the compiled halves, if
    anything does."""
    backward = to_compile.backward
    assert backward is not None
    joint = JointGraph(graph, backward.inputs, backward.outputs, backward.tangents, backward.gradients)
    started = time.perf_counter()
    halves = partition(joint)
    seconds = time.perf_counter() - started
    parts = (
        ("joint graph", graph, 0.0),
        ("forward graph", halves.forward, seconds),
        ("backward graph", halves.backward, 0.0),
    )
    for stage, part, spent in parts:
        to_compile.notify(
            StageDone(to_compile.function, stage, functools.partial(print_graph, part), spent, "aot_graphs")
        )
    # not `to_compile` itself, which holds the first call's inputs
    function, notify = (
        to_compile.function,
        to_compile.notify,
    )
    again = None
    before: tuple[tuple[int, int], ...] = ()
    if backward.user_code is not None and backward.tangents:
        again = replay(to_compile.graph, backward.inputs, backward.tangents, to_compile.constants, backward.user_code)
        if not backward.freed and not backward.updates:
            places = changes(graph, backward.tangents, again, bool(backward.user_code))
            before = _kept(joint, halves.forward, places)
    in_parts = () if backward.hooked else _parts(halves.backward, compile_half)
    recast = _recasts(halves.forward, backward.outputs)
    run_forward = compile_half(halves.forward, "forward")
    # What runs plans makes its outputs in memory of their own, but for views that PyTorch's operators make.
    if recast or not isinstance(run_forward, (_native.Plan, Half)):
        run_forward = _without_views(run_forward, backward.outputs)
    groups = _groups(joint, halves, backward, bool(in_parts))
    compiled_groups = []
    for index, (group, part) in enumerate(groups):
        run, whole = no_gradients, copied(part) if group.branches else None  # a compiler may change the graph
        if group.gradients and not in_parts:
            run = compile_half(part, "backward" if len(groups) == 1 else f"backward of outputs {index}")
        without = None if whole is None else _without(whole, len(group.tangents), to_compile)
        compiled_groups.append(replace(group, backward=run, without=without))
    kinds = [node.meta["type"] for node in to_compile.graph.nodes if node.op == "placeholder"][: backward.inputs]
    compiled = Halves(
        forward=run_forward,
        groups=tuple(compiled_groups),
        parts=in_parts,
        graphs=record(run_forward, compiled_groups[0].backward, halves.saved, backward.outputs)
        if len(groups) == 1
        else None,
        replay=again,
        random=drawing_devices(halves.forward),
        required=frozenset(place for place, kind in enumerate(kinds) if getattr(kind, "requires_grad", False)),
        updates=bool(backward.updates),
        before=before,
        outputs=backward.outputs,
        as_read=functools.partial(as_read, backward.user_reads) if backward.user_reads else None,
        fell_back=lambda reason: notify(FellBack(f"{function} backward", reason)),
    )
    return differentiable(compiled, backward, tuple(kind if isinstance(kind, Expr) else None for kind in kinds))


def _without(
    backward: torch.fx.Graph, tangents: int, to_compile: GraphToCompile
) -> Callable[[frozenset[int]], Callable[..., tuple[Any, ...]]]:
    """Gives the backward for each set of missing tangents. PyTorch's operators run it: it is seldom wanted."""
    to_compile = to_compile.without_examples()

    @functools.cache
    def make(missing: frozenset[int]) -> Callable[..., tuple[Any, ...]]:
        return by_operators(to_compile, without_branches(backward, tangents, missing))

    return make


MOST_KEPT = 1 << 20
"""Bytes of an input that is written to and that gradients of gradients may need as it was: a call copies no more."""


def _kept(joint: JointGraph, forward: torch.fx.Graph, places: Collection[int]) -> tuple[tuple[int, int], ...]:
    """Makes the forward give copies of what these inputs hold before it, if they are small: (input, result)."""
    inputs = [node for node in forward.nodes if node.op == "placeholder"]
    end, env = forward.output_node(), env_of(joint.graph)
    results = list(end.args[0])  # type: ignore[arg-type]
    kept = []
    for place in sorted(places):
        kind = inputs[place].meta["type"]
        if elements(kind) * kind.dtype.itemsize <= MOST_KEPT:
            kept.append((place, len(results)))
            results.append(copied_first(forward, inputs[place], env))
    end.args = (tuple(results),)
    return tuple(kept)


def _recasts(forward: torch.fx.Graph, outputs: int) -> bool:
    """Whether an output is a view of a temporary under another dtype (`view_as_real`)."""
    returned: Any = forward.output_node().args[0]
    nodes = [node for node in returned[:outputs] if isinstance(node, torch.fx.Node)]
    views = (view for node in nodes for view in view_chain(node)[1:])
    return any(isinstance(view.target, OpOverload) and facts(view.target).recasts for view in views)


def _without_views(forward: Callable[..., Any], outputs: int) -> Callable[..., Any]:
    """`forward`, whose outputs are no views of its temporaries: the program may write to them, which autograd refuses
    for views that a function of its own has made."""

    def run(*inputs: Any) -> tuple[Any, ...]:
        results = forward(*inputs)
        return (*map(_no_view, results[:outputs]), *results[outputs:])

    return run


def _no_view(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value._is_view() or value.is_conj() or value.is_neg():
        return value
    made = torch.empty(0, dtype=value.dtype, device=value.device)
    return made.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]


def _groups(joint: JointGraph, halves: Split, backward: Backward, whole: bool) -> list[tuple[Group, torch.fx.Graph]]:
    """The groups of outputs, and the backward graph of each. `whole`: all outputs are one group."""
    constant = constant_gradients(joint)
    branches = unfinished_branches(joint, backward.user_code != ())
    own = backward.groups
    if whole or not own:
        own = ((tuple(exit for exits, _ in own for exit in exits), tuple(part for _, frees in own for part in frees)),)
    made = []
    for index, (exits, frees) in enumerate(own, 1):
        places = tuple(sorted(place for part in frees for place in part))
        gradients = [place for place, depends in enumerate(backward.depends) if depends[0] in places]
        saved, graph = halves.saved, halves.backward
        if len(own) > 1:
            kept, graph = part_of(halves.backward, gradients, [len(saved) + place for place in places], index)
            saved = tuple(saved[place] for place in kept)
        positions = tuple(backward.gradients[gradient] for gradient in gradients)
        reached: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # (input, place of its gradient)
        for place, gradient in enumerate(gradients):
            reached.setdefault(backward.depends[gradient], []).append((positions[place], place))
        for position, depends in backward.undefined:
            if depends[0] in places:
                reached.setdefault(depends, []).append((position, -1))
        # The engine begins with what was made last: inputs that it comes to first stand last, where that is left open.
        sets = sorted(reached, key=len)[::-1]
        beyond = nested(list(map(frozenset, sets)))
        reaches = tuple(
            replace(_reach(reached[one], tuple(map(places.index, one)), backward), beyond=around)
            for one, around in zip(sets, beyond)
        )
        leads = [tuple(at for at, one in enumerate(sets) if exit[0] in one) for exit in exits]
        leads = [tuple(at for at in ats if not any(at in beyond[other] for other in ats)) for ats in leads]
        group = Group(
            backward=no_gradients,
            saved=saved,
            tangents=tuple(backward.tangents[place] for place in places),
            row_major=tuple(backward.row_major[place] for place in places),
            gradients=positions,
            constant=tuple(constant[gradient] for gradient in gradients),
            reads=tuple(tuple(map(places.index, backward.reads[gradient])) for gradient in gradients),
            foreign=frozenset(),
            reaches=reaches,
            frees=tuple(tuple(map(places.index, part)) for part in frees),
            unseen=not backward.hooked
            and backward.histories.isdisjoint(position for reach in reaches for position in reach.inputs),
            exits=tuple((tuple(map(places.index, exit)), ats) for exit, ats in zip(exits, leads)),
            branches=tuple(
                Branch(
                    frozenset(map(places.index, one.tangents)), tuple(map(gradients.index, one.shown)), one.from_zeros
                )
                for one in branches
                if one.tangents.issubset(places)
            ),
        )
        elsewhere = set(backward.tangents).difference(group.tangents if group.single else ())
        made.append((replace(group, foreign=frozenset(elsewhere.intersection(~place for place in saved))), graph))
    return made


def _reach(inputs: list[tuple[int, int]], depends: tuple[int, ...], backward: Backward) -> Reach:
    """`inputs` in such an order that the engine takes leaves as they stand here."""
    inputs = sorted(inputs, key=lambda one: one[0] in backward.histories)
    ordered = list(inputs)
    for one, place in zip(inputs, taken([position not in backward.histories for position, _ in inputs])):
        ordered[place] = one
    return Reach(tuple(position for position, _ in ordered), tuple(place for _, place in ordered), depends)


def _parts(
    graph: torch.fx.Graph, compile_half: Callable[[torch.fx.Graph, str], Callable[..., Any]]
) -> tuple[CompiledPart, ...]:
    """The backward cut at the borders of DistributedDataParallel's buckets, compiled; nothing outside of such a
    module."""
    capacities = bucket_bytes()
    if capacities is None or any(node.op == "call_function" and must_stay(node) for node in graph.nodes):
        return ()  # what has effects runs in one piece: their order is the program's
    groups = buckets(graph, *reversed(capacities))
    if len(groups) < 2:
        return ()
    parts = parts_of(graph, groups)
    return tuple(
        CompiledPart(compile_half(part.graph, f"backward part {index}"), part.reads, part.gradients)
        for index, part in enumerate(parts)
    )


def no_gradients(*values: Any) -> tuple[Any, ...]:
    """The backward of a graph whose inputs get none."""
    return ()
