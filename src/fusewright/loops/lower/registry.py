"""The table of operators: which function says how an ATen operator is expressed as loops.

Takes the rows that the operator files of this package register on import; gives `find(target)`. An operator without a
row becomes an extern call with eager's semantics; a row that meets a case it does not express raises `Fallback`, with
the same outcome, and so has what code generation refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx

from fusewright.base.records import dataclass
from fusewright.loops.ir import Expression, Operation

Refuses = Callable[[torch.device, Iterable[Expression | Operation], str], bool]
"""Whether there is no code for one of these in a kernel on that device, or for what the node of that name computes."""


class Fallback(Exception):
    """Raised by a row: this call is left to PyTorch's own operator."""


@dataclass(frozen=True, slots=True)
class Row:
    """`function(call, *args, **kwargs)` gives a Value (or a tuple of them, None for an output that does not exist).

    view: the result aliases the first argument, as a pure index map. accepts: for a row that leaves most calls to the
    operator (by `Fallback`), whether it takes the call of this node.
    """

    function: Callable[..., Any]
    view: bool = False
    accepts: Callable[[torch.fx.Node], bool] | None = None


_ROWS: dict[torch._ops.OpOverload, Row] = {}
MISSING: list[str] = []
"""Names that this version of PyTorch does not have (a test pins that there are none in the version we develop
against)."""


def operator(name: str) -> torch._ops.OpOverload | None:
    """The overload called `name`: "add.Tensor", "relu" (for relu.default) or "prims::fma"."""
    namespace, _, rest = name.rpartition("::")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), packet_name, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def lowers(
    *names: str, view: bool = False, accepts: Callable[[torch.fx.Node], bool] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as the row of these operators."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            target = operator(name)
            if target is None:
                MISSING.append(name)
            elif target in _ROWS:
                raise ValueError(f"two rows for {name}")
            else:
                _ROWS[target] = Row(function, view, accepts)
        return function

    return register


def find(target: object) -> Row | None:
    return _ROWS.get(target)  # type: ignore[call-overload]


def registered() -> tuple[torch._ops.OpOverload, ...]:
    return tuple(_ROWS)
