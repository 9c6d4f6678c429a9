"""Whether two operands of an in-place operator share memory in part: eager refuses that, or its answer depends on the
order of its loop.

Takes nodes of an ATen-level graph; gives yes or no. Always holds: "no" is proved, by the elements that both views of
one tensor touch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.operators.schema import argument, facts, list_of_views
from fusewright.sizes.expressions import Dim, Expr, known_le
from fusewright.sizes.tensor_type import TensorType, symbols_in

aten = torch.ops.aten

_LARGEST = 1 << 24  # elements of a tensor whose views are compared element by element


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a node's elements lie in the memory of the node that is no view."""

    root: torch.fx.Node
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def shares_in_part(
    written: torch.fx.Node, others: Iterable[torch.fx.Node], at_most: Callable[[Dim, Dim], bool | None] = known_le
) -> bool:
    """Whether some of `others` touches elements of `written` without being the same view of them. `at_most`: whether a
    size is at most another one."""
    others = [other for other in others if other is not written]
    if not others:
        return False
    root = view_chain(written)[0]
    path = _path(written)
    related = [other for other in others if view_chain(other)[0] is root and _path(other) != path]
    mine = _place(written) if related else None
    if related and mine is None:
        related = [other for other in related if not _side_by_side(path, _path(other), at_most)]
    if not related:
        return False
    return mine is None or any(_overlap(mine, _place(other)) for other in related)


def shares_memory(written: torch.fx.Node, others: Iterable[torch.fx.Node]) -> bool:
    """Whether some of `others` touches elements of `written`, as the same view or in part."""
    root = view_chain(written)[0]
    related = [other for other in others if view_chain(other)[0] is root]
    mine = _place(written) if related else None
    return bool(related) and (mine is None or mine in map(_place, related) or shares_in_part(written, related))


def view_chain(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The views that lead to `node`, from the node that is no view."""
    chain = [node]
    while node.op == "call_function":
        # one of the views that split and unbind give, or one of several fresh results
        if node.target is operator.getitem:
            producer: Any = node.args[0]
            if not isinstance(producer.target, OpOverload) or list_of_views(producer.target) is None:
                break
            node = producer
            chain.append(node)
            continue
        if not isinstance(node.target, OpOverload):  # `graph.nodes.written`: a private copy, which is no view
            break
        place = next(
            (alias[1] for alias in facts(node.target).returned if alias is not None), list_of_views(node.target)
        )
        base = None if place is None else argument(node.target, node.args, dict(node.kwargs), place)
        if not isinstance(base, torch.fx.Node):
            break
        chain.append(base)
        node = base
    return chain[::-1]


def is_view_of(node: torch.fx.Node, base: torch.fx.Node) -> bool:
    """Whether `node` is a view that was taken of `base` itself. (An in-place operator gives `base`, no view.)"""
    if view_chain(node)[-2:-1] != [base]:
        return False
    return node.target is operator.getitem or not facts(node.target).written  # type: ignore[arg-type]


def _path(node: torch.fx.Node) -> list[object]:
    """The view operators that lead to `node`, with their arguments: nodes of equal paths are the same view."""
    steps: list[object] = []
    for base, step in itertools.pairwise(view_chain(node)):
        if step.target is operator.getitem or not facts(step.target).written:  # type: ignore[arg-type]
            args = tuple(None if one is base else one for one in step.args)
            steps.append((step.target, args, tuple(sorted(step.kwargs.items()))))
    return steps


def _place(node: torch.fx.Node) -> _Place | None:
    """None where a size or an index is symbolic, or the path leads through more than views."""
    chain = view_chain(node)
    root = chain[0].meta["type"]
    if not isinstance(root, TensorType) or not all(isinstance(extent, int) for extent in (*root.shape, *root.stride)):
        return None
    # Where sizes are symbolic, Python versions of views would run here: their steps along sizes of 1 are others.
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        view: Any = torch.empty_strided(root.shape, root.stride, dtype=root.dtype, device="meta")  # type: ignore
        for base, step in itertools.pairwise(chain):
            if step.target is operator.getitem:
                view = view[step.args[1]]
                continue
            assert isinstance(step.target, OpOverload)
            if facts(step.target).written:  # an in-place operator gives its operand
                continue
            if any(one is not base for one in step.all_input_nodes) or symbols_in((step.args, step.kwargs)):
                return None
            view = _apply(step, view)
    return _Place(chain[0], view.storage_offset(), tuple(view.shape), view.stride())


def _side_by_side(one: list[Any], other: list[Any], at_most: Callable[[Dim, Dim], bool | None]) -> bool:
    """Whether two paths first differ in slices along one dimension, of which one ends before the other begins."""
    first = next((steps for steps in zip(one, other) if steps[0] != steps[1]), None)
    if first is None or any(target is not aten.slice.Tensor or kwargs for target, _, kwargs in first):
        return False
    windows = [(*args, *_WHOLE[len(args) :]) for _, args, _ in first]
    (_, dim, start, end, _), (_, axis, begin, stop, _) = windows
    given = all(isinstance(place, (int, Expr)) and at_most(0, place) for place in (start, end, begin, stop))
    return given and dim == axis and bool(at_most(end, begin) or at_most(stop, start))


_WHOLE = (None, 0, None, None, 1)  # the arguments of a slice


def _apply(step: torch.fx.Node, view: torch.Tensor) -> Any:
    args, kwargs = torch.fx.node.map_arg((step.args, step.kwargs), lambda _: view)  # type: ignore[arg-type]
    return step.target(*args, **kwargs)  # type: ignore[operator]


def _overlap(mine: _Place, theirs: _Place | None) -> bool:
    if theirs is None:
        return True
    if (mine.offset, mine.shape, mine.stride) == (theirs.offset, theirs.shape, theirs.stride):
        return False
    ends = [_end(place) for place in (mine, theirs)]
    if 0 in (*mine.shape, *theirs.shape) or mine.offset >= ends[1] or theirs.offset >= ends[0]:
        return False
    if max(ends) > _LARGEST:
        return True
    touched = np.zeros(max(ends), dtype=bool)
    _elements(touched, mine)[...] = True
    return bool(_elements(touched, theirs).any())


def _end(place: _Place) -> int:
    return place.offset + 1 + sum((size - 1) * step for size, step in zip(place.shape, place.stride))


def _elements(memory: np.ndarray, place: _Place) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(memory[place.offset :], place.shape, place.stride)
