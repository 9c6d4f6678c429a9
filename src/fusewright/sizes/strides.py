"""What the strides of a tensor say: whether elements share memory, and which strides are products of symbolic sizes.

Takes types and real tensors; gives answers about their layout. Always holds: of symbolic sizes nothing is asked that
would be a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from fusewright.sizes.arithmetic import monomial_quotient
from fusewright.sizes.estimate import NO_EXAMPLES
from fusewright.sizes.expressions import Dim, Expr, Term, evaluate, product, total
from fusewright.sizes.tensor_type import TensorType


def magnitude(d: Dim) -> float:
    """A number that orders products of sizes as their values do when sizes are above 1: the degree first."""
    return float(d) if isinstance(d, int) else max(1e6 ** len(monomial) * count for monomial, count in d.terms)


def dense_order(shape: Sequence[Dim], stride: Sequence[Dim]) -> list[int]:
    """The dimensions of dense strides, the innermost first: of each the step is that of the one inside times its size.
    Where a guard has made a number of a product of sizes, no step is that: the smallest number comes next. Equal steps
    (a size of 1 is involved) put the larger size outside."""
    left = sorted(range(len(shape)), key=lambda axis: (magnitude(stride[axis]), magnitude(shape[axis])))
    order: list[int] = []
    expected: Dim = 1
    while left:
        numbers = [axis for axis in left if isinstance(stride[axis], int)] if isinstance(expected, Expr) else []
        axis = next((axis for axis in left if stride[axis] == expected), (numbers or left)[0])
        left.remove(axis)
        order.append(axis)
        expected = stride[axis] * shape[axis]
    return order


def steps_along(index: Dim, strides: Iterable[Dim]) -> dict[Dim, Dim] | None:
    """stride → how many such steps an index is made of, each of its terms along the longest stride that divides it; the
    longest first. None where something is left over."""
    longest_first = [(stride, only_term(stride)) for stride in sorted(set(strides), key=magnitude, reverse=True)]
    found: dict[Dim, list[Dim]] = {stride: [] for stride, _ in longest_first}
    left = index if isinstance(index, int) else index.constant
    for term in () if isinstance(index, int) else index.terms:
        for stride, step in longest_first:
            steps = term_quotient(term, step)
            if steps is not None:
                found[stride].append(steps)
                break
        else:
            return None
    for stride, (atoms, number) in longest_first:
        if number and not atoms:
            count = left // number if left >= 0 else -(-left // number)
            found[stride].append(count)
            left -= count * number
    return None if left else {stride: total(steps) for stride, steps in found.items()}


def only_term(d: Dim) -> Term:
    """(atoms, number) of a product; a number of 0 where it is none."""
    if isinstance(d, int):
        return (), d
    return d.terms[0] if len(d.terms) == 1 and not d.constant else ((), 0)


def term_quotient(term: Term, by: Term) -> Dim | None:
    """None where it is no product of sizes and a whole number."""
    atoms = monomial_quotient(term[0], by[0]) if by[1] and term[1] % by[1] == 0 else None
    return None if atoms is None else product(atoms) * (term[1] // by[1])


def shares_elements(type_: TensorType, examples: Mapping[Expr, int] = NO_EXAMPLES) -> bool:
    """Whether elements may share memory: an expanded dimension (eager then refuses to write), or steps that do not step
    over each other (eager's answer then depends on the order of its loop). Symbolic sizes are taken as in `examples`,
    where these know them: if elements of an input share no memory there, its guards say that they never do."""
    dims = list(zip(type_.shape, type_.stride, strict=True))
    if not all(isinstance(extent, int) for dim in dims for extent in dim):
        try:
            dims = [(evaluate(size, examples), evaluate(stride, examples)) for size, stride in dims]
        except KeyError:
            return any(isinstance(stride, int) and stride == 0 and size != 1 for size, stride in dims)
    reach = 0
    steps: list[Any] = sorted((stride, size) for size, stride in dims)  # type: ignore[type-var]
    for stride, size in steps:
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def symbolic_strides(tensor: torch.Tensor, shape: tuple[Dim, ...], own: Mapping[int, Dim]) -> tuple[Dim, ...]:
    """Strides in terms of symbolic sizes: a stride that equals size * stride of an inner dimension in the example is
    that product; one that does not is a symbol of its own where `own` has one for it."""
    sizes, strides = tensor.shape, tensor.stride()
    result: list[Dim] = list(strides)
    order = sorted(range(len(strides)), key=lambda axis: (strides[axis], -axis))
    for position, axis in enumerate(order):
        for inner in reversed(order[:position]):
            if sizes[inner] * strides[inner] == strides[axis] and sizes[inner] != 1:
                result[axis] = shape[inner] * result[inner]
                break
        else:
            result[axis] = own.get(axis, result[axis])
    return tuple(result)


def tight_strides(tensor: torch.Tensor) -> dict[int, list[int]]:
    """axis → the axes inside of it, for axes whose stride steps over the elements of those, by less than their product:
    a part of a larger tensor that ends before another step."""
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: strides[axis])
    found: dict[int, list[int]] = {}
    for position, (inner, axis) in enumerate(pairwise(order), 1):
        reach = sum((sizes[one] - 1) * strides[one] for one in order[:position])
        if reach < strides[axis] < sizes[inner] * strides[inner]:
            found[axis] = order[:position]
    return found


def free_strides(tensor: torch.Tensor) -> dict[int, int]:
    """axis → the next axis inside of it, for axes of several elements whose stride steps over the inner ones by more
    than their product: the tensor is a window on a larger one."""
    sizes, strides = tensor.shape, tensor.stride()
    order = sorted((axis for axis, size in enumerate(sizes) if size > 1), key=lambda axis: strides[axis])
    return {axis: inner for inner, axis in pairwise(order) if strides[axis] > sizes[inner] * strides[inner] > 0}
