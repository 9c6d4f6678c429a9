"""torch.cond, while_loop, map, scan and associative_scan as plain Python: what they mean, without a compiler inside.

Takes and gives what PyTorch's functions of these names do. Capture follows these bodies where it records no operator,
and they run in PyTorch's place inside compiled calls: PyTorch's own would start torch.compile. Always holds: gradients
are autograd's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from fusewright.base.pytorch import torch


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    """`torch.cond`."""
    if pred:
        return true_fn(*operands)
    return false_fn(*operands)


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any) -> Any:
    """`torch.while_loop`."""
    carried = tuple(carried_inputs)
    while cond_fn(*carried):
        carried = tuple(body_fn(*carried))
    return carried


def map(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    """`torch._higher_order_ops.map`: f over the slices of dimension 0, stacked."""
    leaves, spec = pytree.tree_flatten(xs)
    results = [f(pytree.tree_unflatten([leaf[i] for leaf in leaves], spec), *args) for i in range(leaves[0].shape[0])]
    flat = [pytree.tree_leaves(result) for result in results]
    spec = pytree.tree_structure(results[0])
    return pytree.tree_unflatten([torch.stack([row[k] for row in flat]) for k in range(len(flat[0]))], spec)


def scan(combine_fn: Callable[..., Any], init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    """`torch._higher_order_ops.scan`: a carry through the slices of `dim`, and the outputs stacked along it."""
    leaves, spec = pytree.tree_flatten(xs)
    if not leaves:
        return init, []
    length = leaves[0].shape[dim]
    carry, outputs = init, []
    for i in reversed(range(length)) if reverse else range(length):
        carry, output = combine_fn(carry, pytree.tree_unflatten([leaf.select(dim, i) for leaf in leaves], spec))
        outputs.append(output)
    if reverse:
        outputs.reverse()
    flat = [pytree.tree_leaves(output) for output in outputs]
    at = dim % leaves[0].dim()
    stacked = [torch.stack([row[k] for row in flat], at if at <= flat[0][k].dim() else 0) for k in range(len(flat[0]))]
    return carry, pytree.tree_unflatten(stacked, pytree.tree_structure(outputs[0]))


def associative_scan(
    combine_fn: Callable[..., Any], xs: Any, dim: int = 0, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """`torch._higher_order_ops.associative_scan`: every prefix of `dim`, combined. Neighbours are combined in pairs,
    all pairs at once, so that the steps are as many as the length has digits."""
    leaves, spec = pytree.tree_flatten(xs)
    at = dim % leaves[0].dim()
    rows = [leaf.movedim(at, 0) for leaf in leaves]
    rows = [row.flip(0) for row in rows] if reverse else rows
    pairwise = combine_fn if combine_mode == "pointwise" else torch.vmap(combine_fn)

    def combine(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
        return pytree.tree_leaves(pairwise(pytree.tree_unflatten(left, spec), pytree.tree_unflatten(right, spec)))

    found = _prefixes(combine, rows)
    found = [row.flip(0) for row in found] if reverse else found
    return pytree.tree_unflatten([row.movedim(0, at) for row in found], spec)


def _prefixes(combine: Callable[..., list[torch.Tensor]], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The prefixes along dimension 0: those that end at odd places are prefixes of combined pairs; each of the others
    is one of them, combined with the row behind it."""
    length = rows[0].shape[0]
    if length < 2:
        return rows
    odd = _prefixes(combine, combine([row[: length - 1 : 2] for row in rows], [row[1::2] for row in rows]))
    even = [row[:1] for row in rows]
    if length > 2:
        later = combine([row[: (length - 1) // 2] for row in odd], [row[2::2] for row in rows])
        even = [torch.cat(pair) for pair in zip(even, later)]
    made = []
    for first, second in zip(even, odd):
        pairs = torch.stack([first[: length // 2], second], 1).flatten(0, 1)
        made.append(pairs if length % 2 == 0 else torch.cat([pairs, first[length // 2 :]]))
    return made


PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._higher_order_ops.cond", "cond"): cond,
    ("torch._higher_order_ops.while_loop", "while_loop"): while_loop,
    ("torch._higher_order_ops.map", "map"): map,
    ("torch._higher_order_ops.scan", "scan"): scan,
    ("torch._higher_order_ops.associative_scan", "associative_scan"): associative_scan,
}
"""By the module that defines PyTorch's function, and its name."""
