"""Comparisons of numbers that the program reads from small tensors: whether an optimizer has made enough steps.

Takes a node of the graph that holds a float which the graph computes from one element of an input; gives the outcome
of a comparison with a constant, as the input is now. Always holds: the outcome, not the number, is what the capture is
for: a guard reads the input at each call, does the same arithmetic as Python would, and compares. A number of any
other origin has no answer, and neither has one on a GPU, which would have to be waited for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.capture.border.native import unwatched
from fusewright.capture.border.values.memory import TENSOR_CLASSES
from fusewright.capture.guards import Guard
from fusewright.capture.guards.sources import Source
from fusewright.graph.known_values import known_value
from fusewright.operators.schema import argument, facts
from fusewright.sizes.float_operators import PYTHON_FORMS

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

aten = torch.ops.aten
Function = Callable[..., float]
Operand = int | float
"""An int is the place of an earlier step's result, 0 that of the element itself; a float is a constant."""
Step = tuple[Function, tuple[Operand, ...]]

_DTYPES = (torch.float32, torch.float64)
_ADDITIONS = frozenset({aten.add_.Tensor, aten.add_.Scalar})
_COPIES = frozenset({aten._to_copy.default, aten.clone.default, aten.expand.default})
_FAILED = object()


class NumberTest:
    """A comparison of what `steps` compute from an element. The last element and its outcome are kept: the step counts
    of an optimizer's tensors are all the same number."""

    __slots__ = ("last", "other", "relation", "steps")

    def __init__(self, steps: tuple[Step, ...], relation: Callable[[float, float], bool], other: float) -> None:
        self.steps, self.relation, self.other = steps, relation, other
        self.last: tuple[float, object] = (float("nan"), _FAILED)  # unequal to any element

    def __call__(self, element: float) -> object:
        last, outcome = self.last
        if last == element and (element or str(last) == str(element)):  # the zeros divide differently
            return outcome
        values = [element]
        try:
            for function, operands in self.steps:
                values.append(function(*[values[one] if type(one) is int else one for one in operands]))
            outcome = self.relation(values[-1], self.other)
        except (ArithmeticError, ValueError, TypeError):  # what Python raises, or a complex number
            outcome = _FAILED
        self.last = (element, outcome)
        return outcome


class SameOutcomes:
    """The guard callable of a tensor: comparisons of numbers that are computed from it have the same outcomes."""

    def __init__(self) -> None:
        self.tests: dict[NumberTest, object] = {}

    def __call__(self, tensor: object) -> bool:
        if type(tensor) not in TENSOR_CLASSES or tensor.numel() != 1 or not tensor.is_cpu:  # type: ignore[attr-defined]
            return False
        element = tensor.item()  # type: ignore[attr-defined]
        return all(test(element) == outcome for test, outcome in self.tests.items())

    def __repr__(self) -> str:
        return "holds a number of which comparisons have the same outcomes"


def ask(world: World, node: torch.fx.Node, relation: Callable[[float, float], bool], other: float) -> bool | None:
    """Whether the number that `node` holds is so related to `other`: guarded. None where it has no answer."""
    found = _steps(node, world.recorder.constants)
    if found is None:
        return None
    placeholder, steps = found
    if placeholder is None:  # the program made the tensor
        outcome = NumberTest(steps, relation, other)(0.0)
        return None if outcome is _FAILED else bool(outcome)
    inputs: list[tuple[torch.Tensor, Source, Any]] = world.inputs
    found_input = next((one for one in inputs if one[2].node is placeholder), None)
    if found_input is None:
        return None
    real, source, _ = found_input
    if type(real) not in TENSOR_CLASSES or not real.is_cpu or real.numel() != 1 or real.dtype not in _DTYPES:
        return None
    asked, tests = world.number_tests
    test = tests.setdefault((steps, relation, other), NumberTest(steps, relation, other))
    outcome = test(unwatched(real.item))
    if outcome is _FAILED:
        return None
    if source not in asked:
        asked[source] = SameOutcomes()
    asked[source].tests[test] = outcome
    return bool(outcome)


def outcome_guards(world: World) -> list[Guard]:
    """The guards on what was asked."""
    why = "comparisons of numbers that are computed from it have the same outcome"
    return [Guard("CALL", source, outcomes, why) for source, outcomes in world.number_tests[0].items()]


def _steps(
    node: torch.fx.Node, constants: Mapping[str, torch.Tensor]
) -> tuple[torch.fx.Node | None, tuple[Step, ...]] | None:
    """(the input that a 0-dimensional float64 node is computed from, if any; how), or None where it has another
    origin."""
    places: dict[torch.fx.Node, Operand] = {}
    steps: list[Step] = []
    inputs: list[torch.fx.Node] = []

    def add(function: Function, operands: tuple[Operand, ...]) -> int:
        steps.append((function, operands))
        return len(steps)

    def visit(one: Any) -> Operand | None:
        if isinstance(one, (int, float)):
            return float(one)
        if not isinstance(one, torch.fx.Node):
            return None
        if one not in places:
            found = visit_node(one)
            if found is None:
                return None
            places[one] = found
        return places[one]

    def visit_node(one: torch.fx.Node) -> Operand | None:
        if one.target is aten.full.default:
            return visit(one.args[1]) if one.args[0] == [] else None
        if one.target is aten._to_copy.default:
            return element(one)
        function = PYTHON_FORMS.get(one.target)
        if function is None or one.kwargs:
            return None
        operands = tuple(map(visit, one.args))
        return None if None in operands else add(function, operands)  # type: ignore[arg-type]

    def element(copy: torch.fx.Node) -> Operand | None:
        """The element as `copy` reads it: what was added to it before is part of the number."""
        (origin,) = copy.all_input_nodes
        kind = origin.meta.get("type")
        if kind is None or kind.dtype not in _DTYPES or tuple(kind.shape):
            return None
        place: Operand = 0
        if origin.op == "placeholder":
            if inputs and inputs[0] is not origin:
                return None
            inputs[:] = [origin]
        else:
            made = known_value(origin, constants, as_made=True)
            if made is None or facts(origin.target).is_view:  # type: ignore[arg-type]
                return None
            place = float(unwatched(made.item))
        for user in sorted(user for user in origin.users if user < copy):
            if not isinstance(user.target, OpOverload) or (known := facts(user.target)).is_view:
                return None
            if not any(argument(user.target, user.args, dict(user.kwargs), one) is origin for one in known.written):
                continue
            addend = user.args[1] if len(user.args) == 2 else None
            if user.args[0] is not origin or user.kwargs:
                return None
            if user.target is aten.copy_.default:
                stored = rounded(addend, kind.dtype)
                if stored is None:
                    return None
                place = stored
                continue
            if user.target not in _ADDITIONS or isinstance(addend, bool):
                return None
            if not isinstance(addend, (int, float)) or _single(addend) != addend:
                return None
            place = add(_add_single if kind.dtype is torch.float32 else float.__add__, (place, float(addend)))
        return place

    def rounded(value: Any, dtype: torch.dtype) -> Operand | None:
        """A number that is stored to such an element."""
        node: Any = value
        if not isinstance(node, torch.fx.Node):
            return None
        made = known_value(node, constants, as_made=True)
        if made is not None and made.numel() == 1 and all(user.target is aten.copy_.default for user in node.users):
            if any(user.args[0] is node for user in node.users) or made.is_complex():
                return None
            return unwatched(made.to(dtype).item)  # type: ignore[no-any-return]
        while node.target in _COPIES:
            (node,) = node.all_input_nodes
        kind = node.meta.get("type")
        if kind is None or kind.dtype is not torch.float64 or tuple(kind.shape):
            return None
        place = visit(node)
        return place if place is None or dtype is torch.float64 else add(_single, (place,))

    place = visit(node)
    if place is None:
        return None
    if type(place) is float or place != len(steps):
        add(float.__pos__, (place,))
    return (inputs[0] if inputs else None), tuple(steps)


def _single(value: float) -> float:
    return ctypes.c_float(value).value


def _add_single(left: float, right: float) -> float:
    """The sum in float32 (rounding that of doubles is the same)."""
    return _single(left + right)
