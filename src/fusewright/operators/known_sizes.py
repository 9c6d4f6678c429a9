"""Calls of a library's operators whose result has a size that depends on data, as an operator with a known size: that
of the first call.

Takes the operator's name, its arguments and the size; gives its result. Always holds: a result of another size is an
error that begins with MARK, so that the call is repeated eagerly and the version ends (compiler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

MARK = "taken for granted at the first call: "
"""What an error begins with that says that something is not as it was; then comes the place (see `place`)."""

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define(
    "of_size(str name, str kinds, Tensor[] tensors, Scalar[] numbers, ScalarType dtype, int[] size, str place)"
    " -> Tensor"
)
OF_SIZE = torch.ops.fusewright.of_size.default


_overloads: dict[str, OpOverload] = {}


def arguments(func: OpOverload, args: Sequence[object]) -> tuple[str, str, list[torch.Tensor], list[Any]] | None:
    """The operator's name and its arguments as `of_size` takes them; None for others than tensors and numbers."""
    if not all(isinstance(value, (torch.Tensor, bool, int, float)) for value in args):
        return None
    kinds = "".join("t" if isinstance(value, torch.Tensor) else "n" for value in args)
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    _overloads[func.name()] = func  # to look it up would add an attribute to its namespace, which programs may ask for
    return func.name(), kinds, tensors, [value for value in args if not isinstance(value, torch.Tensor)]


def _run(
    name: str, kinds: str, tensors: list[torch.Tensor], numbers: list[Any], dtype: Any, size: list[int], place: str
) -> torch.Tensor:
    func = _overloads.get(name)
    if func is None:  # the graph comes from the disk cache
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        func = _overloads[name] = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    left, right = iter(tensors), iter(numbers)
    result: torch.Tensor = func(*(next(left if kind == "t" else right) for kind in kinds))
    if list(result.shape) != size or result.dtype != dtype:
        raise RuntimeError(MARK + place)
    return result.contiguous()


_LIBRARY.impl("of_size", _run, "CPU")
