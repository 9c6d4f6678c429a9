"""Which function loads a value from outside, by its type.

Takes the world, a real value and its source; gives what stands for it inside. Always holds: by exact type first, then
by the first base that fits; `object` fits everything.
"""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fusewright.base.signals import GraphBreak
from fusewright.capture.border.interfaces import World as Border
from fusewright.capture.border.values import (
    array,
    constant,
    dict as dicts,
    function,
    list as lists,
    object as objects,
    set as sets,
    tensor,
    tuple as tuples,
)
from fusewright.capture.guards.sources import Source

if TYPE_CHECKING:
    pass


Loader = Callable[[Border, Any, Source], object]


def _load_array(world: Border, real: np.ndarray, source: Source) -> object:
    return (array.load_array if array.is_traceable(real) else objects.load_object)(world, real, source)


def _load_other(world: Border, real: object, source: Source) -> object:
    """An object; one whose memory native code reads without asking it (`bytes(x)`, `torch.tensor(x)`) is read by eager
    code alone."""
    if _has_buffer(real):
        raise GraphBreak("opaque-object", f"{source.text()}, a {type(real).__qualname__}, which shares its memory")
    return objects.load_object(world, real, source)


def _has_buffer(real: object) -> bool:
    if sys.version_info >= (3, 12):
        return any("__buffer__" in vars(base) for base in type(real).__mro__)
    try:
        memoryview(real).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    except ValueError:  # it is closed, or released
        return True
    return True


# By exact type first, then by the first base that fits.
LOADERS: dict[type, Loader] = {
    **constant.EXACT,
    **function.EXACT,
    types.ModuleType: function.load_identity,
    type: function.load_identity,
    dict: dicts.load_exact,
    types.MappingProxyType: dicts.load_proxy,
    bytearray: lists.load_bytearray,
    np.ndarray: _load_array,
    torch.Generator: objects.load_object,
    **dict.fromkeys(dicts.VIEWS, dicts.load_view),
}


BASE_LOADERS: tuple[tuple[Any, Loader], ...] = (
    (torch.Tensor, tensor.load_tensor),
    (torch.nn.Module, objects.load_object),
    (objects.OF_PROCESSES, function.load_identity),
    (constant.PLACEMENTS, constant.load_is),
    (type, function.load_identity),
    (enum.Enum, constant.load_is),
    (types.ModuleType, function.load_identity),
    (dict, dicts.load_subclass),
    (list, lists.load_list),
    (collections.deque, lists.load_list),
    (tuple, tuples.load_tuple),
    ((set, frozenset), sets.load_set),
    (np.generic, constant.load_equals),
    ((int, float, complex, str, bytes), objects.load_derived),
    (object, _load_other),
)
