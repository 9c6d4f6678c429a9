"""torch.cond, while_loop, map, scan and associative_scan as plain Python: what they mean, without a compiler inside.

Takes and gives what PyTorch's functions of these names do. Capture follows these bodies where it records no operator,
and they run in PyTorch's place inside compiled calls: PyTorch's own would start torch.compile. Always holds: gradients
are autograd's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


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
    stacked = [torch.stack([row[k] for row in flat], min(at, flat[0][k].dim())) for k in range(len(flat[0]))]
    return carry, pytree.tree_unflatten(stacked, pytree.tree_structure(outputs[0]))


def associative_scan(
    combine_fn: Callable[..., Any], xs: Any, dim: int = 0, reverse: bool = False, combine_mode: str = "pointwise"
) -> Any:
    """`torch._higher_order_ops.associative_scan`: every prefix of `dim`, combined."""
    leaves, spec = pytree.tree_flatten(xs)
    length = leaves[0].shape[dim]
    places = list(reversed(range(length))) if reverse else list(range(length))
    total = pytree.tree_unflatten([leaf.narrow(dim, places[0], 1) for leaf in leaves], spec)
    parts = [pytree.tree_leaves(total)]
    for i in places[1:]:
        total = combine_fn(total, pytree.tree_unflatten([leaf.narrow(dim, i, 1) for leaf in leaves], spec))
        parts.append(pytree.tree_leaves(total))
    if reverse:
        parts.reverse()
    return pytree.tree_unflatten([torch.cat([part[k] for part in parts], dim) for k in range(len(leaves))], spec)


PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._higher_order_ops.cond", "cond"): cond,
    ("torch._higher_order_ops.while_loop", "while_loop"): while_loop,
    ("torch._higher_order_ops.map", "map"): map,
    ("torch._higher_order_ops.scan", "scan"): scan,
    ("torch._higher_order_ops.associative_scan", "associative_scan"): associative_scan,
}
"""By the module that defines PyTorch's function, and its name."""
