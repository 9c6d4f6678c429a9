"""User code that has a part in a graph's gradients: applications of custom autograd functions, hooks on tensors and on
what is saved.

The recorder notes them as it goes; `autograd/replay.py` calls them again, natively, for gradients of gradients. Always
holds: what is noted names nodes of the recorded graph and otherwise only values that do not depend on the call.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.graph.nodes import leaves
from fusewright.record.traced_tensor import TracedTensor
from fusewright.sizes.symint import dim_of


class Shape(tuple[Any, ...]):
    """A torch.Size, some of whose numbers are expressions."""


@dataclass(frozen=True, slots=True)
class Application:
    """`function(*args)`, whose operators were recorded as `nodes` and whose result's tensors as `outputs` (None: no
    tensor).

    args      nodes stand for tensors, size expressions for symbolic ints
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    nodes: tuple[torch.fx.Node, ...]
    outputs: tuple[torch.fx.Node | None, ...]


@dataclass(frozen=True, slots=True)
class Called:
    """A function of the program's that autograd calls.

    function  itself, or (made by the call) one that lacks what it holds
    held      what it holds then, as `Application` has arguments: the variables of enclosing functions (NotImplemented:
              one from outside of the call, which is there), the defaults, and those of keywords
    """

    function: Any
    held: tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]] | None = None

    def over(self, held: Any) -> Any:
        """The function over what it holds in one call."""
        if held is None:
            return self.function
        cells = zip(self.function.__closure__ or (), held[0])
        closure = tuple(cell if value is NotImplemented else types.CellType(value) for cell, value in cells)
        made = _like(self.function, closure, held[1])
        made.__kwdefaults__ = held[2]
        return made


@dataclass(frozen=True, slots=True)
class Hook:
    """What is called with the gradient of `tensor`, as that is behind the node `after`."""

    tensor: torch.fx.Node
    after: torch.fx.Node
    called: Called


@dataclass(slots=True)
class Saving:
    """What autograd calls with the tensors that the nodes behind `after`, up to `last` (None: to the end), save, and
    when it needs them. as_packed: whether what `pack` looks up is what it was."""

    pack: Called
    unpack: Called
    as_packed: Callable[[], bool]
    after: torch.fx.Node | None
    last: torch.fx.Node | None = None


UserCode = Application | Hook | Saving


class SeesSaved:
    """An open context whose functions see what autograd saves; a world closes what a capture leaves open."""

    def __init__(self, saving: Saving | None) -> None:
        self.saving = saving

    def __exit__(self, *args: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()


class Forbids:
    """An open context in which there are no functions that see it, and what forbade them before."""

    def __init__(self, before: str | None) -> None:
        self.before = before

    def __exit__(self, *args: object) -> None:
        if self.before is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(self.before)


def called(function: types.FunctionType, from_outside: Callable[[Any], bool]) -> Called | None:
    """A function that the call has made; None of one that holds what may be another object at another call.
    `from_outside`: whether a cell was there before."""
    cells = function.__closure__ or ()
    values = tuple(NotImplemented if from_outside(cell) else content(cell) for cell in cells)
    keywords = {name: again(value, False) for name, value in (function.__kwdefaults__ or {}).items()}
    held = tuple(again(value, False) for value in values), again(function.__defaults__ or (), False), keywords
    if any(one is VARYING for one in leaves(held)):
        return None
    closure = tuple(cell if value is NotImplemented else types.CellType() for cell, value in zip(cells, values))
    return Called(_like(function, closure, ()), held)


def _like(function: types.FunctionType, closure: tuple[Any, ...], defaults: tuple[Any, ...]) -> types.FunctionType:
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)


def note_saved(saved: dict[torch.fx.Node, int], func: Any, args: Any, node: torch.fx.Node) -> None:
    """Notes a result that autograd has saved, for which it detaches it, and later gives a formula with its history:
    that is written in no graph, and the operators run again for gradients of gradients. `saved`: who made it."""
    if func is torch.ops.aten.detach.default:
        made_by = _made_by(args[0])
        number = saved.get(args[0].node) if made_by is None else made_by
        if number is not None:
            saved[node] = number
    elif saved and torch.is_grad_enabled():
        for one in leaves(args):
            number = saved.get(one.node) if isinstance(one, TracedTensor) else None
            if number is not None and number == _made_by(one):
                one.node.meta["saved"] = True


def _made_by(tensor: TracedTensor) -> int | None:
    """The number of the autograd node that gives the tensor. (A view has none that was made under no_grad and whose
    base was written to since.)"""
    if not tensor.requires_grad:
        return None
    try:
        return None if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()
    except RuntimeError:
        return None


def content(cell: types.CellType) -> Any:
    """What a cell holds; VARYING if nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return VARYING


class VARYING:
    """Stands for a value that may be another object at another call."""


def again(value: Any, lists: bool = True) -> Any:
    """An argument as `Application` has it. lists: what they hold is asked for now, so it may change later."""
    if isinstance(value, TracedTensor):
        return value.node
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return dim_of(value) if isinstance(value, torch.SymInt) else VARYING
    if type(value) in (tuple, torch.Size) or (lists and type(value) is list):
        items = [again(item, lists) for item in value]
        return VARYING if VARYING in items else Shape(items) if type(value) is torch.Size else type(value)(items)
    return value if type(value) in _CONSTANT else VARYING


_CONSTANT = frozenset(
    {int, float, bool, str, bytes, complex, torch.dtype, torch.device, torch.memory_format, torch.layout, type(None),
     type(NotImplemented), types.ModuleType}
)
