"""A graph for any size of a dimension rewritten for one size that the others are padded to.

Takes a functional graph, the symbol of a size and a bucket: an upper bound of that size; gives the graph in which
inputs are padded with zeros to the bucket and results are cut to the size, so that everything between has the bucket's
size, a number. Always holds: every element that is kept is computed from kept elements alone. Operators that treat
positions apart carry the padding along, those that combine positions get a neutral element in its place, and for every
other one `NotExact` says why the graph stays as it is.

What is followed is the layout of each value: for each of its dimensions the factors of its size, outermost first (a
flattened batch of sequences has two), so that padding stands at the end of the bucketed factor wherever a view has
moved it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fusewright.graph.passes.layout.bucketing import ATTENTION, Bucketing, Handler, Layout, NotExact, Rules, name_of
from fusewright.sizes.expressions import Dim, Symbol, floor_div, product
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten


# --- operators that keep positions apart ------------------------------------------------------------------------------


def _apart(work: Bucketing, node: Any) -> None:
    """Nothing in it has the size."""
    types = node.meta["type"]
    several = types if isinstance(types, tuple) else (types,)
    layouts = tuple(work.plain(t) if isinstance(t, TensorType) else () for t in several)
    work.again(node, layouts if isinstance(types, tuple) else layouts[0])


_RAISES = {
    aten.floor_divide,
    aten.remainder,
    aten.fmod,
    aten.div,
    aten.bitwise_left_shift,
    aten.bitwise_right_shift,
    aten.pow,
}
"""On integers, padding may be a divisor or an exponent that raises."""


def _pointwise(work: Bucketing, node: Any) -> None:
    tensors = [value for value in node.all_input_nodes if isinstance(value.meta["type"], TensorType)]
    if node.target.overloadpacket in _RAISES and not node.meta["type"].dtype.is_floating_point:
        raise NotExact(f"{name_of(node)} of integers")
    work.again(node, work.broadcast(node, *map(work.of, tensors)))


def _copy(work: Bucketing, node: Any) -> None:
    work.again(node, work.of(node.args[0]))


def _factory(work: Bucketing, node: Any) -> None:
    """full, zeros, new_ones…: the shape is the only argument that is the bucket's."""
    place = 1 if node.args and isinstance(node.args[0], Node) else 0
    args = [work.mapped(value, index == place) for index, value in enumerate(node.args)]
    work.again(node, work.plain(node.meta["type"]), args)


def _arange(work: Bucketing, node: Any) -> None:
    *start, end = node.args
    if node.meta["type"].shape[0] == work.size and (end != work.size or start not in ([], [0])):
        raise NotExact("arange does not count from 0")
    work.again(node, work.plain(node.meta["type"]), shapes=True)


def _embedding(work: Bucketing, node: Any) -> None:
    weight, indices = node.args[:2]
    work.apart(node, work.of(weight), range(2))
    work.again(node, (*work.of(indices), work.of(weight)[1]))


def _layer_norm(work: Bucketing, node: Any) -> None:
    layout = work.of(node.args[0])
    count = len(node.args[1])
    work.apart(node, layout, range(len(layout) - count, len(layout)))
    statistics = (*layout[: len(layout) - count], *[()] * count)
    work.again(node, (layout, statistics, statistics))


def _batch_norm(work: Bucketing, node: Any) -> None:
    layout = work.of(node.args[0])
    work.apart(node, layout, [1])
    if node.args[5]:
        raise NotExact("batch statistics combine positions")
    work.again(node, (layout, ((0,),), ((0,),)))


def _cumulate(work: Bucketing, node: Any) -> None:
    """A running sum depends on what stands in front."""
    layout = work.of(node.args[0])
    axis = node.args[1] % max(len(layout), 1)
    if work.size in layout[axis] and layout[axis] != (work.size,):
        raise NotExact(f"{name_of(node)} runs along a flattened dimension")
    work.again(node, layout)


# --- views ------------------------------------------------------------------------------------------------------------


def _view(work: Bucketing, node: Any) -> None:
    source = [factor for factors in work.of(node.args[0]) for factor in factors]
    layout = _regrouped(source, node.meta["type"].shape, work.size)
    if layout is None:
        raise NotExact(f"{name_of(node)} puts positions into another order")
    work.again(node, layout, [work.new[node.args[0]], [work.becomes(d) for d in node.meta["type"].shape]])


def _regrouped(factors: list[Dim], shape: Sequence[Dim], size: Symbol) -> Layout | None:
    """The factors of a value in the dimensions of a view of it, sizes without `size` joined or split as the view
    does."""
    rest = [factor for factor in factors if factor != 1]
    result: list[tuple[Dim, ...]] = []
    for d in shape:
        dim: list[Dim] = []
        while d != 1:
            if not rest:
                return None
            first = rest.pop(0)
            shared = _quotient(d, first)
            if shared is not None:  # all of this factor belongs to the dimension
                dim.append(first)
                d = shared
                continue
            left = None if first == size else _quotient(first, d)
            if left is None:
                return None
            dim.append(d)
            rest.insert(0, left)
            d = 1
        result.append(tuple(dim))
    return tuple(result) if not rest else None


def _quotient(d: Dim, by: Dim) -> Dim | None:
    """d / by where it is exact."""
    if isinstance(by, int) and by == 0:
        return None
    found = floor_div(d, by)
    return found if found * by == d else None


def _permuted(work: Bucketing, node: Any) -> None:
    layout = work.of(node.args[0])
    order = list(range(len(layout)))
    if node.target is aten.permute.default:
        order = [axis % len(layout) for axis in node.args[1]]
    elif len(layout) > 1:
        a, b = (0, 1) if node.target is aten.t.default else (axis % len(layout) for axis in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    work.again(node, tuple(layout[axis] for axis in order))


def _unsqueeze(work: Bucketing, node: Any) -> None:
    layout = list(work.of(node.args[0]))
    layout.insert(node.args[1] % (len(layout) + 1), ())
    work.again(node, tuple(layout))


def _squeeze(work: Bucketing, node: Any) -> None:
    layout = list(work.of(node.args[0]))
    axes = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    gone = {axis % len(layout) for axis in axes if layout[axis] == ()}
    if len(layout) - len(gone) != node.meta["type"].ndim:
        raise NotExact("squeeze of a size that is not known")
    work.again(node, tuple(factors for axis, factors in enumerate(layout) if axis not in gone))


def _expand(work: Bucketing, node: Any) -> None:
    own = work.of(node.args[0])
    shape = node.meta["type"].shape
    layout = [
        work.whole(d) if factors == () else factors
        for d, factors in zip(shape, ((),) * (len(shape) - len(own)) + own, strict=True)
    ]
    work.again(node, tuple(layout), [work.new[node.args[0]], [work.becomes(d) for d in shape]])


def _slice(work: Bucketing, node: Any) -> None:
    source, axis, start, end, step = (
        (*node.args, *(0, 0, None, 1)[len(node.args) - 1 :]) if len(node.args) < 5 else node.args
    )
    layout = list(work.of(source))
    axis = axis % len(layout)
    before, after = source.meta["type"].shape[axis], node.meta["type"].shape[axis]
    if work.size in layout[axis]:
        if after != before or step != 1:
            raise NotExact("a part of the dimension is taken")
        work.layouts[node], work.new[node] = tuple(layout), work.new[source]
        return
    layout[axis] = work.whole(after)
    if after == work.size:  # the first rows of a table
        if start not in (0, None) or step != 1 or not isinstance(before, int) or before < work.bucket:
            raise NotExact(f"a table has no {work.bucket} rows from its first")
        work.again(node, tuple(layout), [work.new[source], axis, 0, work.bucket])
        return
    if any(work._made_from(value) for value in (start, end)):
        raise NotExact("the size says which part of a tensor is taken")
    work.again(node, tuple(layout))


def _select(work: Bucketing, node: Any) -> None:
    source, axis, index = node.args
    layout = list(work.of(source))
    axis = axis % len(layout)
    if work._made_from(index) or (work.size in layout[axis] and (layout[axis] != (work.size,) or index != 0)):
        raise NotExact("an element is taken by its place, which is not the first")
    del layout[axis]
    work.again(node, tuple(layout))


def _cat(work: Bucketing, node: Any) -> None:
    parts: Any = node.args[0]
    axis = (node.args[1] if len(node.args) > 1 else 0) % node.meta["type"].ndim
    for part in parts:
        if len(work.of(part)) == node.meta["type"].ndim:
            work.apart(node, work.of(part), [axis])
    layout = list(work.broadcast(node, *(work.of(part)[:axis] + ((),) + work.of(part)[axis + 1 :] for part in parts)))
    layout[axis] = work.whole(node.meta["type"].shape[axis])
    work.again(node, tuple(layout))


def _split(work: Bucketing, node: Any) -> None:
    layout = list(work.of(node.args[0]))
    axis = (node.args[2] if len(node.args) > 2 else 0) % len(layout)
    work.apart(node, tuple(layout), [axis])
    parts = [(*layout[:axis], work.whole(part.shape[axis]), *layout[axis + 1 :]) for part in node.meta["type"]]
    work.again(node, tuple(parts))


# --- operators that combine positions ---------------------------------------------------------------------------------


def _least(dtype: torch.dtype) -> Any:
    return float("-inf") if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Any:
    return float("inf") if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max


def _reduction(neutral: Callable[[torch.dtype], Any]) -> Handler:
    def handler(work: Bucketing, node: Any) -> None:
        source: Any = node.args[0]
        layout = work.of(source)
        given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        chosen = range(len(layout)) if given in (None, []) else given if isinstance(given, (list, tuple)) else [given]
        axes = sorted(axis % max(len(layout), 1) for axis in chosen)
        keeps = (len(node.args) > 2 and bool(node.args[2])) or bool(node.kwargs.get("keepdim"))
        value = work.new[source]
        for axis in axes:
            if work.size in layout[axis]:
                value = work.masked(node, source, axis, neutral(source.meta["type"].dtype), value)
        kept = tuple(
            () if axis in axes else factors for axis, factors in enumerate(layout) if keeps or axis not in axes
        )
        work.again(node, kept, [value, *work.mapped(node.args[1:], False)])

    return handler


def _mean(work: Bucketing, node: Any) -> None:
    """The sum of what is there, over how many there are."""
    source: Any = node.args[0]
    layout, type_ = work.of(source), source.meta["type"]
    given: Any = node.args[1] if len(node.args) > 1 else None
    axes = list(range(len(layout))) if given in (None, []) else [axis % len(layout) for axis in given]
    keeps = len(node.args) > 2 and bool(node.args[2])
    kept = tuple(() if axis in axes else factors for axis, factors in enumerate(layout) if keeps or axis not in axes)
    if not any(work.size in layout[axis] for axis in axes):
        work.again(node, kept)
        return
    if node.meta["type"].dtype not in (torch.float32, torch.float64) or type_.dtype != node.meta["type"].dtype:
        raise NotExact("mean of numbers that are rounded before they are divided")
    value = work.new[source]
    for axis in axes:
        if work.size in layout[axis]:
            value = work.masked(node, source, axis, 0, value)
    total = work.build.call(aten.sum.dim_IntList, value, axes, keeps)
    count = work.build.call(
        aten.full.default, [], product(type_.shape[axis] for axis in axes), dtype=type_.dtype, device=type_.device
    )
    work.finish(node, kept, work.build.call(aten.div.Tensor, total, count))


def _softmax(work: Bucketing, node: Any) -> None:
    source: Any = node.args[0]
    layout = work.of(source)
    axis = node.args[1] % max(len(layout), 1)
    value = work.new[source]
    if work.size in layout[axis]:
        value = work.masked(node, source, axis, float("-inf"))
    work.again(node, layout, [value, *work.mapped(node.args[1:], False)])


def _product(first: int) -> Handler:
    """A matrix product of operands `first` and the next; the operand before them, if any, is added."""

    def handler(work: Bucketing, node: Any) -> None:
        left: Any = node.args[first]
        right: Any = node.args[first + 1]
        a, b = work.of(left), work.of(right)
        args = work.mapped(node.args, False)
        if work.size in a[-1] or work.size in b[-2]:
            args[first] = work.masked(node, left, len(a) - 1, 0)
            args[first + 1] = work.masked(node, right, len(b) - 2, 0)
        layout: Layout = (*work.broadcast(node, a[:-2], b[:-2]), a[-2], b[-1]) if len(a) > 2 else (a[-2], b[-1])
        if first:
            layout = work.broadcast(node, layout, work.of(node.args[0]))
        work.again(node, layout, args)

    return handler


def _attention(work: Bucketing, node: Any) -> None:
    """softmax(q k + mask) v, as the CPU's fused kernel takes it."""
    query, key, value = node.args[:3]
    q, k, v = (work.of(operand) for operand in (query, key, value))
    work.apart(node, q, [3])
    work.apart(node, v, [3])
    args = work.mapped(node.args, False)
    kwargs = work.mapped(node.kwargs, False)
    if work.size in k[2] or work.size in v[2]:
        causal = len(node.args) > 4 and bool(node.args[4])
        if causal and q[2] != k[2]:
            raise NotExact("causal attention over keys that are not the queries")
        args[1] = work.masked(node, key, 2, 0)
        args[2] = work.masked(node, value, 2, 0)
        if not causal:
            given: Any = node.kwargs.get("attn_mask")
            type_: TensorType = args[0].meta["type"]
            if given is None:
                empty = work.build.call(
                    aten.zeros.default, [1, 1, 1, work.bucket], dtype=type_.dtype, device=type_.device
                )
                work.layouts[empty] = ((), (), (), (work.size,))
                mask = work.masked(node, empty, 3, float("-inf"), empty)
                shape = [type_.shape[0], type_.shape[1], type_.shape[2], work.bucket]
                kwargs["attn_mask"] = work.build.call(aten.expand.default, mask, shape)
            elif work.of(given)[-1] != (work.size,):
                raise NotExact("attention with a mask that does not tell keys apart")
            elif not given.meta["type"].dtype.is_floating_point:
                raise NotExact("attention with a mask of truths")
            else:
                kwargs["attn_mask"] = work.masked(node, given, given.meta["type"].ndim - 1, float("-inf"))
    layout = work.broadcast(node, q[:2], k[:2])
    made = work.build.call(node.target, *args, **kwargs)
    work.finish(node, ((*layout, q[2], v[3]), (*layout, q[2])), made)


def _indexed(work: Bucketing, node: Any) -> None:
    """x[i, j]: an index into the bucketed dimension must be known not to count from its end."""
    source, indices = node.args
    layout = work.of(source)
    given: Any = indices
    used = [axis for axis, index in enumerate(given) if index is not None]
    for axis in used:
        if work.size in layout[axis] and not _counts(given[axis]):
            raise NotExact("an index into the dimension may count from its end")
        if given[axis].meta["type"].dtype in (torch.bool, torch.uint8):
            raise NotExact("a mask chooses positions")
    shared = work.broadcast(node, *(work.of(given[axis]) for axis in used))
    first, last = used[0], used[-1]
    rest = [factors for axis, factors in enumerate(layout) if axis not in used]
    at = first if last - first == len(used) - 1 else 0
    work.again(node, (*rest[:at], *shared, *rest[at:]))


def _gather(work: Bucketing, node: Any) -> None:
    source, given, index = node.args[:3]
    layout, chosen = work.of(source), work.of(index)
    axis = given % max(len(layout), 1)
    if work.size in layout[axis] and not _counts(index):
        raise NotExact("an index into the dimension may count from its end")
    if any(
        a != b and (work.size in a or work.size in b)
        for place, (a, b) in enumerate(zip(layout, chosen, strict=True))
        if place != axis
    ):
        raise NotExact("gather of a part")
    work.again(node, chosen)


def _index_select(work: Bucketing, node: Any) -> None:
    source, given, index = node.args
    layout = list(work.of(source))
    axis = given % max(len(layout), 1)
    if work.size in layout[axis] and not _counts(index):
        raise NotExact("an index into the dimension may count from its end")
    layout[axis] = work.of(index)[0]
    work.again(node, tuple(layout))


_KEEP_COUNTS = {
    aten.view, aten.reshape, aten.unsqueeze, aten.expand, aten.slice, aten.clone, aten._to_copy, aten.permute,
    aten.transpose, aten.alias,
}  # fmt: skip


def _counts(node: Any) -> bool:
    """Whether the elements are 0, 1, 2… in some order or shape."""
    while isinstance(node.target, OpOverload) and node.target.overloadpacket in _KEEP_COUNTS:
        node = node.args[0]
    return bool(node.target is aten.arange.default)


_HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(
        (aten.clone.default, aten._to_copy.default, aten.alias.default, aten.detach.default, aten.copy.default), _copy
    ),
    **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), _factory),
    **dict.fromkeys((aten.new_ones.default, aten.new_zeros.default, aten.new_full.default), _factory),
    **dict.fromkeys((aten.full_like.default, aten.zeros_like.default, aten.ones_like.default), _copy),
    **dict.fromkeys((aten.arange.default, aten.arange.start), _arange),
    aten.embedding.default: _embedding,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_batch_norm.default: _batch_norm,
    aten.cumsum.default: _cumulate,
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), _view),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permuted),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), _reduction(lambda dtype: 0)),
    **dict.fromkeys((aten.amax.default,), _reduction(_least)),
    **dict.fromkeys((aten.amin.default,), _reduction(_most)),
    **dict.fromkeys((aten.any.dim, aten.any.default), _reduction(lambda dtype: False)),
    **dict.fromkeys((aten.all.dim, aten.all.default), _reduction(lambda dtype: True)),
    **dict.fromkeys((aten.mean.dim, aten.mean.default), _mean),
    **dict.fromkeys((aten._softmax.default, aten._log_softmax.default), _softmax),
    **dict.fromkeys((aten.mm.default, aten.bmm.default), _product(0)),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _product(1)),
    ATTENTION: _attention,
    aten.index.Tensor: _indexed,
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
}

__all__ = ["NotExact", "bucketed"]


def bucketed(graph: Graph, size: Symbol, bucket: int, env: ShapeEnv) -> Graph:
    """The graph with `size` padded to `bucket`; `env` knows that it is no larger. Raises NotExact."""
    return Bucketing(graph, size, bucket, env, Rules(_HANDLERS, _pointwise, _apart)).run()
