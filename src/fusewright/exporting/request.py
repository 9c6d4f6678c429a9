"""What a program is captured for: the flat arguments, their names, and the sizes that may change.

Takes a model, example arguments and what is said of their sizes; gives a `Request`, and stand-ins for its tensors.
Always holds: a stand-in has the example's layout, its own sizes where they are fixed, and no value of it.
"""

from __future__ import annotations

from typing import Any, cast

from torch.utils import _pytree as pytree

from fusewright.base import marks
from fusewright.base.errors import ExportError
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.exporting.dims import Declared, Dim, Hint, bound_arguments, declared

STAND_INS = (5, 7, 11, 13, 17, 3, 2)
"""What an example's size of 1 is taken to be: seldom another size of a program."""


@dataclass(slots=True)
class Request:
    """One export: the model, the flat arguments, their containers and names, and the sizes that may change."""

    model: Any
    leaves: list[Any]
    spec: pytree.TreeSpec
    names: list[str]
    dims: Declared
    roots: dict[str, int] = field(default_factory=dict)  # the example's value of each named size


def request_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, flat: Any) -> Request:
    if hasattr(shapes, "dynamic_shapes"):  # torch.export.ShapesCollection, which knows tensors by identity
        shapes = shapes.dynamic_shapes(model, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    # One tensor in two places is two inputs.
    apart = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    own_args, own_kwargs = pytree.tree_unflatten(apart, spec)
    positions = {id(leaf): place for place, leaf in enumerate(apart)}
    dims = declared(model, own_args, own_kwargs, shapes, positions)
    if flat is not None:
        dims = {(leaf, dim): size for leaf, sizes in enumerate(flat) for dim, size in sizes.items()}
    names = [""] * len(leaves)
    for path, leaf in pytree.tree_flatten_with_path(bound_arguments(model, own_args, own_kwargs))[0]:
        if isinstance(leaf, torch.Tensor):
            names[positions[id(leaf)]] = str(cast(Any, path[0]).key) + pytree.keystr(path[1:])
    paths = pytree.tree_flatten_with_path((args, kwargs))[0]
    names = [name or f"args{pytree.keystr(path[1:])}" for name, (path, _) in zip(names, paths, strict=True)]
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
            raise ExportError(
                f"{name} is a {type(leaf).__name__}: arguments are tensors, numbers, strings and None, in containers "
                "that torch.utils._pytree knows"
            )
    request = Request(model, leaves, spec, names, dims)
    choose_roots(request)
    return request


def choose_roots(request: Request) -> None:
    """The sizes that the capture takes for its examples: the example's own, but for 1."""
    taken = {size for leaf in request.leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape}
    named: dict[str, Dim] = {}
    for (leaf, dim), size in request.dims.items():
        if isinstance(size, Hint):
            continue
        known = named.setdefault(size.name, size)
        if (known.min, known.max) != (size.min, size.max):
            raise ExportError(f"there are two sizes of the name {size.name!r}, with other ranges")
        example = request.leaves[leaf].shape[dim]
        root, rest = divmod(example - size.offset, size.scale)
        what = f"dimension {dim} of {request.names[leaf]} is {size!r}"
        if rest or root < 0 or request.roots.setdefault(size.name, root) != root:
            raise ExportError(f"{what}, but the example has {example} there ({size.where})")
        if root < size.min or (size.max is not None and root > size.max):
            raise ExportError(
                f"{what} with {size.min} <= {size.name}"
                + ("" if size.max is None else f" <= {size.max}")
                + f", but the example has {example} there ({size.where})"
            )
    for name, size in named.items():
        if not any(
            isinstance(one, Dim) and one.name == name and (one.scale, one.offset) == (1, 0)
            for one in request.dims.values()
        ):
            raise ExportError(f"{size.name!r} is the size of no dimension by itself ({size.where})")
        if request.roots[name] < 2:
            top = size.max
            fits = [one for one in STAND_INS if one >= size.min and (top is None or one <= top)]
            fits = [one for one in fits if one not in taken] or fits or [max(2, size.min)]
            if top is not None and fits[0] > top:
                raise ExportError(f"{size.name!r} has no size above 1 in its range ({size.where}): leave it fixed")
            request.roots[name] = fits[0]
            taken.add(fits[0])


def stand_in(request: Request, leaf: int, fixed: dict[str, int]) -> Any:
    """A tensor of the sizes of the capture: its values are not looked at. `fixed`: named sizes that it has as they
    are."""
    real = request.leaves[leaf]
    if not isinstance(real, torch.Tensor):
        return real
    sizes, static, dynamic = list(real.shape), [], []
    for dim in range(real.dim()):
        size = request.dims.get((leaf, dim))
        label = size.name if isinstance(size, Dim) else f"{leaf}.{dim}"
        if size is None or label in fixed:
            static.append(dim)
            sizes[dim] = (
                sizes[dim] if size is None else size.of(fixed[label]) if isinstance(size, Dim) else fixed[label]
            )
        else:
            dynamic.append(dim)
            sizes[dim] = size.of(request.roots[label]) if isinstance(size, Dim) else _at_least_two(sizes[dim])
    order = memory_order(real)
    made = torch.zeros([sizes[dim] for dim in order], dtype=real.dtype, device=real.device)
    made = made.permute([order.index(dim) for dim in range(real.dim())]).detach()
    if real.requires_grad:
        made.requires_grad_()
    setattr(made, marks.STATIC, set(static))
    setattr(made, marks.MAYBE_DYNAMIC, set(dynamic))
    ranges = set()
    for dim in dynamic:
        size = request.dims[leaf, dim]
        if isinstance(size, Dim):
            ranges.add(marks.DimRange(dim, size.of(size.min), None if size.max is None else size.of(size.max)))
        else:
            ranges.add(marks.DimRange(dim, 1, None))
    setattr(made, marks.RANGES, ranges)
    return made


def _at_least_two(size: int) -> int:
    return size if size >= 2 else STAND_INS[0]


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
