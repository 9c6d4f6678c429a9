"""How many arguments a native callable takes.

Takes a builtin function, or a method with its receiver; says whether it takes certain arguments. Always holds: rows of
the tables are reached only with arguments that the callable takes, so that the complaint about others is its own.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from fusewright.base.records import dataclass
from fusewright.capture.border.native import native

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class _Arity:
    """How many arguments a function takes at least, how many by position at least and at most, and the names that it
    knows (None: any)."""

    least: int
    first: int
    most: int
    names: frozenset[str] | None

    def allows(self, args: Args, kwargs: Kwargs) -> bool:
        count = len(args)
        if not self.first <= count <= self.most or count + len(kwargs) < self.least:
            return False
        return not kwargs or self.names is None or self.names.issuperset(kwargs)


def _by_position(first: int, most: int, *names: str) -> _Arity:
    return _Arity(first, first, most, frozenset(names))


# Those without a signature, in CPython 3.11, whose rows do not look for themselves.
_UNSIGNED: dict[Any, _Arity] = {
    getattr: _by_position(2, 3), iter: _by_position(1, 2), next: _by_position(1, 2), vars: _by_position(0, 1),
    dir: _by_position(0, 1), bool: _by_position(0, 1), functools.reduce: _by_position(2, 3),
    min: _by_position(1, _ANY, "key", "default"), max: _by_position(1, _ANY, "key", "default"),
    type: _Arity(1, 1, 3, None), dict: _Arity(0, 0, 1, None), OrderedDict: _Arity(0, 0, 1, None),
    defaultdict: _Arity(0, 0, 2, None),
    functools._lru_cache_wrapper: _Arity(1, 0, _ANY, None),  # type: ignore[attr-defined]
    str.format_map: _by_position(2, 2), deque.count: _by_position(2, 2), deque.index: _by_position(2, 4),
    deque.remove: _by_position(2, 2),
}  # fmt: skip


@functools.cache
def _arity(function: Any) -> _Arity | None:
    """None for a function without a signature: its row looks for itself."""
    if type(function) is types.WrapperDescriptorType and function.__name__ == "__get__":
        return _by_position(2, 3)  # its signature asks for the owner
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return _UNSIGNED.get(function)
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return _Arity(
        least=sum(one.default is one.empty for one in positional),
        first=sum(one.default is one.empty for one in positional if one.kind is one.POSITIONAL_ONLY),
        most=_ANY if any(one.kind is one.VAR_POSITIONAL for one in parameters) else len(positional),
        names=None
        if any(one.kind is one.VAR_KEYWORD for one in parameters)
        else frozenset(one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY),
    )


def checked(function: Any, row: Callable[[Any, Args, Kwargs], Any]) -> Callable[[Any, Args, Kwargs], Any]:
    """The row, reached only with arguments that `function` takes: the complaint about others is its own."""

    def run(tracer: Any, args: Args, kwargs: Kwargs) -> Any:
        arity = _arity(function)  # asked when it is needed: 300 signatures would take a tenth of a warm start
        if arity is not None and not arity.allows(args, kwargs):
            return native(function, *args, **kwargs)
        return row(tracer, args, kwargs)

    return run


def method_takes(fn: Any, owner: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether a method of a builtin type, bound to `owner` or the descriptor itself, takes these arguments."""
    descriptor = _descriptor(fn, type(owner))
    arity = None if descriptor is None else _arity(descriptor)
    return arity is None or arity.allows((owner, *args), kwargs)


_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType)


def _descriptor(fn: Any, kind: type) -> Any:
    """What was bound, if it was: the class may have a method in Python of that name, which calls it."""
    kinds = (fn.__objclass__,) if hasattr(fn, "__objclass__") else kind.__mro__
    found = (base.__dict__.get(fn.__name__) for base in kinds)
    return next((one for one in found if type(one) in _DESCRIPTORS), None)
