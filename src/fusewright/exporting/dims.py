"""Named sizes: which dimensions of a program's inputs may change, and within which ranges.

Takes what users write (fusewright.Dim, torch.export.Dim, None, ints, nested by argument); gives for each (leaf of the
arguments, dimension) an affine `Dim`, or `AUTO`. Always holds: a dimension that nobody names is fixed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from fusewright.base.errors import ExportError


class Hint:
    """What is said of a dimension instead of a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Dim.{self.name}"


class Dim:
    """A named size of at least `min` and at most `max`. `2 * batch` and `batch + 1` are sizes that follow from it.

    Dim.AUTO     the size may change as far as the program lets it
    Dim.DYNAMIC  the same, and it is an error if the program fixes the size
    Dim.STATIC   the size is fixed
    """

    AUTO: ClassVar[Hint] = Hint("AUTO")
    DYNAMIC: ClassVar[Hint] = Hint("DYNAMIC")
    STATIC: ClassVar[Hint] = Hint("STATIC")

    def __init__(self, name: str, min: int = 1, max: int | None = None) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ExportError(f"Dim takes a name that is an identifier, got {name!r}")
        if type(min) is not int or min < 0 or (max is not None and (type(max) is not int or max < min)):
            raise ExportError(f"Dim({name!r}) takes a range of sizes of 0 or more, got min={min!r}, max={max!r}")
        self.name, self.min, self.max = name, min, max
        self.scale, self.offset = 1, 0
        self.where = caller()

    def _derived(self, scale: int, offset: int) -> Dim:
        if scale < 1:
            raise ExportError(f"a size that follows from {self.name!r} must grow with it, got {scale} * {self.name}")
        made = object.__new__(Dim)
        made.__dict__.update(self.__dict__, scale=scale, offset=offset)
        return made

    def __mul__(self, factor: int) -> Dim:
        return self._derived(self.scale * factor, self.offset * factor) if type(factor) is int else NotImplemented

    def __add__(self, summand: int) -> Dim:
        return self._derived(self.scale, self.offset + summand) if type(summand) is int else NotImplemented

    def __sub__(self, summand: int) -> Dim:
        return self._derived(self.scale, self.offset - summand) if type(summand) is int else NotImplemented

    __rmul__, __radd__ = __mul__, __add__

    def of(self, root: int) -> int:
        """The size where the named size is `root`."""
        return self.scale * root + self.offset

    def __repr__(self) -> str:
        scaled = self.name if self.scale == 1 else f"{self.scale}*{self.name}"
        return scaled if not self.offset else f"{scaled} {'+' if self.offset > 0 else '-'} {abs(self.offset)}"


Declared = dict[tuple[int, int], "Dim | Hint"]


def declared(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, positions: Mapping[int, int]
) -> Declared:
    """(leaf, dimension) → its size, for those that may change. `positions`: id of a tensor → its leaf."""
    if shapes is None:
        return {}
    bound = bound_arguments(model, args, kwargs)
    if isinstance(shapes, (tuple, list)):
        if len(shapes) != len(bound):
            raise ExportError(
                f"dynamic_shapes has {len(shapes)} elements, and the call has {len(bound)} arguments: {list(bound)}"
            )
        shapes = dict(zip(bound, shapes, strict=True))
    if not isinstance(shapes, dict):
        raise ExportError(f"dynamic_shapes takes a dict by argument's name, a tuple or a list, got {shapes!r}")
    found: Declared = {}
    _walk(bound, shapes, "", positions, found, caller())
    return found


def caller() -> str:
    """The user's line: the innermost one outside of this package."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("fusewright."):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def bound_arguments(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments by the names that the model's signature has for them."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{f"arg{place}": value for place, value in enumerate(args)}, **kwargs}


def _walk(value: Any, spec: Any, path: str, positions: Mapping[int, int], found: Declared, where: str) -> None:
    if spec is None:
        return
    if isinstance(value, torch.Tensor):
        _tensor(value, spec, path, positions[id(value)], found, where)
    elif isinstance(value, dict) and isinstance(spec, dict):
        unknown = [key for key in spec if key not in value]
        nested = value.get("kwargs")
        if unknown and not path and isinstance(nested, dict) and all(key in nested for key in unknown):
            _walk(nested, {key: spec[key] for key in unknown}, "", positions, found, where)
        elif unknown:
            raise ExportError(f"dynamic_shapes{path} names {unknown[0]!r}, which is none of {list(value)}")
        for key, item in value.items():
            _walk(item, spec.get(key), f"{path}[{key!r}]", positions, found, where)
    elif isinstance(value, (tuple, list)) and isinstance(spec, (tuple, list)):
        if len(value) != len(spec):
            raise ExportError(f"dynamic_shapes{path} has {len(spec)} elements for {len(value)}")
        for place, (item, inner) in enumerate(zip(value, spec, strict=True)):
            _walk(item, inner, f"{path}[{place}]", positions, found, where)
    else:
        raise ExportError(f"dynamic_shapes{path} is {spec!r}, for an argument of type {type(value).__name__}")


def _tensor(tensor: torch.Tensor, spec: Any, path: str, leaf: int, found: Declared, where: str) -> None:
    if isinstance(spec, (tuple, list)):
        if len(spec) != tensor.dim():
            raise ExportError(f"dynamic_shapes{path} has {len(spec)} sizes for a tensor of {tensor.dim()} dimensions")
        spec = dict(enumerate(spec))
    if not isinstance(spec, dict):
        spec = dict.fromkeys(range(tensor.dim()), spec)
    for key, size in spec.items():
        if type(key) is not int or not -tensor.dim() <= key < tensor.dim():
            raise ExportError(f"dynamic_shapes{path}: a tensor of {tensor.dim()} dimensions has no dimension {key!r}")
        dim = key % tensor.dim()
        if type(size) is int:
            if size != tensor.shape[dim]:
                raise ExportError(
                    f"dynamic_shapes{path}: dimension {dim} is fixed to {size}, the example has {tensor.shape[dim]}"
                )
            continue
        made = ours(size, where)
        if made is not None and made is not Dim.STATIC:
            found[leaf, dim] = made


def ours(size: Any, where: str) -> Dim | Hint | None:
    """What stands for a size that the user gave, PyTorch's own kinds included."""
    if size is None or isinstance(size, (Dim, Hint)):
        return size
    kind = type(size)
    if kind.__module__ == "torch.export.dynamic_shapes":
        if kind.__name__ == "_DimHint":
            return getattr(Dim, size.type.name)
        if hasattr(size, "root") and isinstance(getattr(size.root, "min", None), int):
            return _affine(ours(size.root, where), size.fn)
        if isinstance(getattr(size, "min", None), int):
            # PyTorch's own ranges start at 0 unless told; nothing is said of 0 by that.
            most = size.max if size.max < sys.maxsize // 2 else None
            made = Dim(size.__name__, min=max(1, size.min), max=most)
            made.where = where
            return made
    raise ExportError(f"a size in dynamic_shapes is a Dim, Dim.AUTO, Dim.STATIC, an int or None, got {size!r}")


def _affine(root: Any, function: Callable[[int], int]) -> Dim:
    offset, scale = int(function(0)), int(function(1)) - int(function(0))
    return root._derived(scale, offset)
