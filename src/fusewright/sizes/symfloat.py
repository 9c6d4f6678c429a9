"""Floats whose value is known only when the compiled code runs: a learning rate that a scheduler changes, a step count
kept in a tensor.

Takes a recorder and a 0-dimensional float64 tensor of its graph; gives a `torch.SymFloat` that Python arithmetic works
on. Arithmetic is recorded in float64, so that it gives what Python's gives. Always holds: asking for the concrete value
either becomes a guard on the outside float that it came from, or breaks the graph; an answer is never a guess. Where
Python raises (a division by zero), so does capture, and compiled code serves only values for which Python does not
(`float_domains`). Of what a tensor holds nothing is known: a step count is taken to be in range, and for a number that
the program has read by itself (`checked`) the graph checks that Python would not have raised. The method names are the
protocol of `torch.SymFloat` (as in symint.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.base.signals import GraphBreak
from fusewright.sizes.expressions import Dim, Relation
from fusewright.sizes.float_domains import ANYTHING, Interval, bounds, is_defined, on_all, piece_of
from fusewright.sizes.float_operators import (
    BINARY,
    COMPARED,
    CONSTANT_LEFT,
    CONSTANT_RIGHT,
    MATH_FUNCTIONS,
    RAISES,
    RELATIONS,
    SWAPPED,
    UNARY,
)
from fusewright.sizes.symint import SymNode, size_of
from fusewright.sizes.tensor_type import held_number

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder
    from fusewright.sizes.shape_env import ShapeEnv

aten = torch.ops.aten


@dataclass(slots=True, eq=False)
class OutsideFloat:
    """A Python float that existed before capture, and the guard callable of what the program asked about it. `tests`:
    the questions, each with its answer; `fixed`: the program needed its value, so that the capture is for this value
    alone."""

    source: object
    value: float
    tests: list[tuple[Callable[[float], bool], bool]] = field(default_factory=list)
    fixed: bool = False

    def fix(self) -> None:
        """Called when the program needs the value."""
        self.fixed = True

    piece: Interval = ANYTHING

    def __call__(self, value: float) -> bool:
        """Whether another value gives the same answers."""
        return all(test(value) == answer for test, answer in self.tests)

    def __repr__(self) -> str:
        return f"gives comparisons the same outcomes as {self.value!r}"

    def interval(self) -> Interval:
        """What holds the values that the tests accept."""
        return self.piece

    def pin(self) -> None:
        """Makes the interval smaller, by a test."""
        piece = piece_of(self.value)
        if piece is None:
            return self.fix()
        if self.piece == ANYTHING:
            self.piece = piece
            self.tests.append((lambda value: piece[0] <= value <= piece[1], True))


@dataclass(slots=True, eq=False)
class OutsideInt:
    """A Python int of the program (a symbol, or arithmetic on such) that is used as a float. `tests` are not kept: its
    value is fixed."""

    size: Dim
    env: ShapeEnv

    @property
    def value(self) -> float:
        return float(self.env.hint(self.size))

    def fix(self) -> None:
        """Called when the program needs the value."""
        self.env.specialise(self.size)

    def interval(self) -> Interval:
        """What holds the values that the guards accept."""
        known = self.env.known
        lower = next((bound for bound in (1, 0) if known(Relation("<=", bound, self.size))), -_LARGEST_INT)
        upper = -1 if known(Relation("<=", self.size, -1)) else _LARGEST_INT
        return float(lower), float(upper)

    def pin(self) -> None:
        """Makes the interval smaller, by a guard."""
        if self.value > 0:
            self.env.settle(Relation("<=", 1, self.size))
        elif self.value < 0:
            self.env.settle(Relation("<=", self.size, -1))
        else:
            self.fix()


_LARGEST_INT = 1 << 63


@dataclass(frozen=True, slots=True)
class _History:
    """What a value was computed from (`origins`, empty for a constant), and how, when that is one outside float.
    interval: what holds the values that it may have."""

    origins: tuple[OutsideFloat | OutsideInt, ...]
    value: float
    compute: Callable[[float], float] | None
    interval: Callable[[], Interval]


def _constant(value: float) -> _History:
    return _History((), value, None, lambda: (value, value))


def _outside(origin: OutsideFloat | OutsideInt) -> _History:
    return _History(
        (origin,), origin.value, (lambda value: value) if isinstance(origin, OutsideFloat) else None, origin.interval
    )


class FloatNode:
    """One run-time float (`tensor` holds it) or a constant that meets one (`tensor` is None)."""

    __slots__ = ("checked", "history", "recorder", "tensor")

    def __init__(
        self, recorder: Recorder, tensor: torch.Tensor | None, history: _History | None, checked: bool = False
    ) -> None:
        self.recorder = recorder
        self.tensor = tensor
        self.history = history
        self.checked = checked

    shape_env = None
    _hint = None

    # --- what it is

    @property
    def pytype(self) -> type:
        return float

    @property
    def constant(self) -> float | None:
        return self.history.value if self.tensor is None and self.history is not None else None

    def is_int(self) -> bool:
        return False

    is_bool = is_nested_int = is_constant = is_int

    def is_float(self) -> bool:
        return True

    def is_symbolic(self) -> bool:
        return self.tensor is not None

    def has_hint(self) -> bool:
        return self.history is not None

    @property
    def hint(self) -> float:
        return self.guard_float("", 0)

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> float | None:
        return self.constant

    def _graph_repr(self) -> object:
        return f"{self.guard_float('', 0)}"

    __str__ = __repr__ = _graph_repr  # type: ignore[assignment]

    # --- concrete values

    def guard_float(self, file: object, line: int) -> float:
        """The value, which the capture is for from now on."""
        if self.history is None:
            value = self.recorder.read(self.tensor)
            if value is None:
                raise GraphBreak("data-dependent-scalar", "a Python number is read from a tensor")
            return float(held_number(value))
        for origin in self.history.origins:
            origin.fix()
        return self.history.value

    def int_(self) -> int:
        return int(self.guard_float("", 0))

    def bool_(self) -> bool:
        return bool(self._relation(self.wrap_float(0.0), "!=").guard_bool("", 0))

    def guard_int(self, file: object, line: int) -> int:
        return int(self.guard_float(file, line))

    def guard_bool(self, file: object, line: int) -> bool:
        return self.bool_()

    def wrap_float(self, number: float) -> FloatNode:
        return FloatNode(self.recorder, None, _constant(float(number)))

    wrap_int = wrap_float

    def wrap_bool(self, truth: bool) -> FloatNode:
        return self.wrap_float(float(truth))

    def clone(self) -> FloatNode:
        return self

    sym_float = pos = clone

    # --- arithmetic

    def operand(self) -> torch.Tensor:
        """The value as a tensor of the graph: 0-dimensional, float64, on the CPU."""
        if self.tensor is None:
            assert self.history is not None
            with self.recorder.recording():
                made = self.recorder.dispatch(
                    aten.full.default, ([], self.history.value), {"dtype": torch.float64, "device": _CPU}
                )
            self.tensor = made  # type: ignore[assignment]
        assert self.tensor is not None
        return self.tensor

    def _unary(self, name: str) -> FloatNode:
        history = _history((self,), name)
        with self.recorder.recording():
            tensor = self.recorder.dispatch(UNARY[name][0], (self.operand(),), {})
            if self.checked and name in RAISES:
                self._check(tensor, self.operand())
        return FloatNode(self.recorder, tensor, history, self.checked)  # type: ignore[arg-type]

    def _check(self, result: torch.Tensor, *operands: torch.Tensor) -> None:
        """Where Python raises (a division by zero, a root of a negative number), the result is not finite."""
        call = self.recorder.dispatch
        with torch.no_grad():
            # x - x is 0 where x is finite
            fine = call(aten.eq.Scalar, (call(aten.sub.Tensor, (result, result), {}), 0), {})
            for operand in operands:
                strange = call(aten.ne.Scalar, (call(aten.sub.Tensor, (operand, operand), {}), 0), {})
                fine = call(aten.logical_or.default, (fine, strange), {})
            aten._assert_async.default(fine)  # through the dispatcher: its type is asked of a kernel

    def _binary(self, name: str, other: object) -> FloatNode:
        target = BINARY[name][0]
        right = self._node(other)
        history = _history((self, right), name)
        read = [side.tensor for side in (self, right) if side.tensor is not None]
        with self.recorder.recording():
            if right.tensor is None and name in CONSTANT_RIGHT:
                tensor = self.recorder.dispatch(CONSTANT_RIGHT[name], (self.operand(), right.constant), {})
            elif self.tensor is None and name in CONSTANT_LEFT:
                swapped, target = CONSTANT_LEFT[name]
                arguments = (right.operand(), self.constant) if swapped else (self.constant, right.operand())
                tensor = self.recorder.dispatch(target, arguments, {})
            else:
                tensor = self.recorder.dispatch(target, (self.operand(), right.operand()), {})
            checked = self.checked or right.checked
            if checked and name in RAISES:
                self._check(tensor, *read)  # type: ignore[arg-type]
        return FloatNode(self.recorder, tensor, history, checked)  # type: ignore[arg-type]

    def _node(self, other: object) -> FloatNode:
        if isinstance(other, FloatNode):
            return other
        assert isinstance(other, SymNode)
        number = other.sym_float()
        return number if isinstance(number, FloatNode) else self.wrap_float(other.guard_float("", 0))

    def add(self, other: object) -> FloatNode:
        return self._binary("add", other)

    def sub(self, other: object) -> FloatNode:
        return self._binary("sub", other)

    def mul(self, other: object) -> FloatNode:
        return self._binary("mul", other)

    def truediv(self, other: object) -> FloatNode:
        return self._binary("div", other)

    float_truediv = int_truediv = truediv

    def pow(self, other: object) -> FloatNode:
        return self._binary("pow", other)

    float_pow = pow

    def neg(self) -> FloatNode:
        return self._unary("neg")

    def abs(self) -> FloatNode:
        return self._unary("abs")

    def function(self, name: str) -> FloatNode:
        """A function of the math module, by name (a key of MATH_FUNCTIONS)."""
        return self._unary(name)

    # Rounding gives integers, which sizes may depend on: for one value only.
    def floor(self) -> SymNode:
        return SymNode(math.floor(self.guard_float("", 0)), self._env())

    def ceil(self) -> SymNode:
        return SymNode(math.ceil(self.guard_float("", 0)), self._env())

    def trunc(self) -> SymNode:
        return SymNode(math.trunc(self.guard_float("", 0)), self._env())

    def round(self, digits: int | None = None) -> object:
        value = round(self.guard_float("", 0), digits)
        return self.wrap_float(value) if isinstance(value, float) else SymNode(value, self._env())

    def mod(self, other: object) -> FloatNode:
        return self.wrap_float(self.guard_float("", 0) % self._node(other).guard_float("", 0))

    def floordiv(self, other: object) -> FloatNode:
        return self.wrap_float(self.guard_float("", 0) // self._node(other).guard_float("", 0))

    def sym_min(self, other: object) -> FloatNode:
        right = self._node(other)
        return self if self.le(right).constant else right

    def sym_max(self, other: object) -> FloatNode:
        right = self._node(other)
        return self if self.ge(right).constant else right

    def is_integer(self) -> SymNode:
        return SymNode(self.guard_float("", 0).is_integer(), self._env())

    # --- relations

    def _test(self, relation: Callable[[float, float], bool], other: float) -> bool:
        """Whether the relation to a constant holds. The answer, not the value, is what the capture depends on."""
        history = self.history
        if history is not None and (answer := on_all(relation, history.interval(), other)) is not None:
            return answer
        if (
            history is None
            or len(history.origins) != 1
            or history.compute is None
            or not isinstance(history.origins[0], OutsideFloat)
        ):
            return relation(self.guard_float("", 0), other)
        compute = history.compute
        answer = relation(history.value, other)
        history.origins[0].tests.append((lambda value: relation(compute(value), other), answer))
        return answer

    def _asked_of_tensor(self, relation: Callable[[float, float], bool], other: float) -> bool | None:
        ask = self.recorder.ask_number if self.history is None else None
        return None if ask is None or self.tensor is None else ask(self.tensor.node, relation, other)  # type: ignore

    def _relation(self, other: object, op: str) -> SymNode:
        right = self._node(other)
        side, relation, number = self, RELATIONS[op], right.constant
        if number is None and self.constant is not None:
            side, relation, number = right, RELATIONS[SWAPPED.get(op, op)], self.constant
        answer = None if number is None else side._asked_of_tensor(relation, number)
        if answer is None and (self.history is None or right.history is None) and self.recorder.speculation is not None:
            with self.recorder.recording():
                condition = self.recorder.dispatch(COMPARED[op], (self.operand(), right.operand()), {})
            value = self.recorder.read(condition)
            answer = None if value is None else bool(held_number(value))
        if answer is None:
            answer = side._test(relation, right.guard_float("", 0) if number is None else number)
        return SymNode(answer, self._env())

    def eq(self, other: object) -> SymNode:
        return self._relation(other, "==")

    def ne(self, other: object) -> SymNode:
        return self._relation(other, "!=")

    def lt(self, other: object) -> SymNode:
        return self._relation(other, "<")

    def le(self, other: object) -> SymNode:
        return self._relation(other, "<=")

    def gt(self, other: object) -> SymNode:
        return self._relation(other, ">")

    def ge(self, other: object) -> SymNode:
        return self._relation(other, ">=")

    def _env(self) -> ShapeEnv:
        """For nodes of constants, which ask it nothing."""
        return self.recorder.env  # type: ignore[return-value]


class _ShapeFloat(FloatNode):
    """A float that a meta kernel computes from sizes. Nothing is recorded: such a kernel makes shapes only, and what it
    multiplies its elements with is of no interest. Asking for the value (to round it to a size, say) fixes the sizes,
    as with any other."""

    __slots__ = ("env",)

    def __init__(self, env: ShapeEnv, history: _History | None) -> None:
        self.env = env
        self.history = history

    @property
    def constant(self) -> float | None:
        return self.history.value if self.history is not None and not self.history.origins else None

    def is_symbolic(self) -> bool:
        return self.constant is None

    def wrap_float(self, number: float) -> FloatNode:
        return _ShapeFloat(self.env, _constant(float(number)))

    wrap_int = wrap_float

    def _unary(self, name: str) -> FloatNode:
        return _ShapeFloat(self.env, _history_of_shapes((self,), name))  # type: ignore[arg-type]

    def _binary(self, name: str, other: object) -> FloatNode:
        return _ShapeFloat(self.env, _history_of_shapes((self, self._node(other)), name))  # type: ignore[arg-type]

    def _env(self) -> ShapeEnv:
        return self.env


_CPU = torch.device("cpu")


def _history(nodes: tuple[FloatNode, ...], name: str) -> _History | None:
    """What the result of a function comes from, None where a tensor holds one of its arguments. Raises what Python
    raises for the values that the arguments have; where other values would tell another story, they are left to another
    compile."""
    parts = [node.history for node in nodes if node.history is not None]
    if len(parts) < len(nodes):
        return None
    plain = (UNARY.get(name) or BINARY[name])[1]
    origins = tuple(dict.fromkeys(origin for part in parts for origin in part.origins))
    compute: Callable[[float], float] | None = None
    if len(origins) == 1:
        steps = [part.compute if part.origins else (lambda _, constant=part.value: constant) for part in parts]
        if all(steps):
            compute = lambda given: plain(*(step(given) for step in steps))  # type: ignore[misc]  # noqa: E731
    try:
        value, error = plain(*(part.value for part in parts)), None
    except (ArithmeticError, ValueError) as raised:
        value, error = math.nan, raised
    intervals = lambda: tuple(part.interval() for part in parts)  # noqa: E731
    if origins and not is_defined(name, intervals()):
        _keep_defined(name, origins, compute, intervals, error is None)
    if error is not None:
        if " got " in str(error):  # from CPython 3.14 on the message may tell the value
            for origin in origins:
                origin.fix()
        raise error
    return _History(origins, value, compute, lambda: bounds(name, intervals()))


def _history_of_shapes(nodes: tuple[FloatNode, ...], name: str) -> _History | None:
    """The same inside of a meta kernel, where only the value that is asked for must be there: the real kernel divides
    as C does."""
    try:
        return _history(nodes, name)
    except (ArithmeticError, ValueError):
        return None


def _keep_defined(
    name: str, origins: tuple[OutsideFloat | OutsideInt, ...], compute: Callable[[float], float] | None,
    intervals: Callable[[], tuple[Interval, ...]], defined: bool,
) -> None:  # fmt: skip
    """Makes it part of what the capture is for that the function is defined for the values of its arguments, or is
    not."""
    if compute is not None and isinstance(origins[0], OutsideFloat):
        origins[0].tests.append((lambda given: _is_defined_at(compute, given), defined))
        return
    for origin in origins:
        origin.pin()
    if not is_defined(name, intervals()):
        for origin in origins:
            origin.fix()


def _is_defined_at(compute: Callable[[float], float], given: float) -> bool:
    try:
        compute(given)
    except (ArithmeticError, ValueError):
        return False
    return True


def float_of_input(recorder: Recorder, tensor: torch.Tensor, origin: OutsideFloat) -> torch.SymFloat:
    """The float that a tensor holds, where it is known of what float that is."""
    recorder.has_floats = True
    return torch.SymFloat(FloatNode(recorder, tensor, _outside(origin)))


def float_of_size(recorder: Recorder, env: ShapeEnv, size: Dim) -> FloatNode:
    """The node of `float(n)` for an int `n` that is known at run time."""
    recorder.has_floats = True
    with recorder.recording():
        tensor = recorder.dispatch(
            aten.full.default, ([], size_of(size, env)), {"dtype": torch.float64, "device": _CPU}
        )
    return FloatNode(recorder, tensor, _outside(OutsideInt(size, env)))  # type: ignore[arg-type]


def shape_float(env: ShapeEnv, size: Dim) -> FloatNode:
    """The node of `float(n)` inside of a meta kernel."""
    return _ShapeFloat(env, _outside(OutsideInt(size, env)))


def float_of_tensor(recorder: Recorder, tensor: torch.Tensor, checked: bool = False) -> torch.SymFloat:
    """What `tensor.item()` would give, as a float, for a tensor of one element. checked: the graph checks arithmetic
    with it."""
    recorder.has_floats = True
    with recorder.recording():
        flat = recorder.dispatch(aten.reshape.default, (tensor, []), {}) if tensor.dim() else tensor
        value = recorder.dispatch(aten._to_copy.default, (flat,), {"dtype": torch.float64, "device": _CPU})
    return torch.SymFloat(FloatNode(recorder, value, None, checked))  # type: ignore[arg-type]


def power(left: object, right: object) -> object:
    """`left ** right` for Python numbers. (torch.SymFloat's own refuses negative bases by asking for the value.)"""
    if isinstance(left, float) and isinstance(right, torch.SymInt):
        right = torch.sym_float(right)
    elif isinstance(left, torch.SymInt) and isinstance(right, float):
        left = torch.sym_float(left)
    node = node_of(left) or node_of(right)
    if node is None:
        return operator.pow(left, right)  # type: ignore[call-overload]
    sides = [node_of(side) or node.wrap_float(float(side)) for side in (left, right)]  # type: ignore[arg-type]
    return torch.SymFloat(sides[0].pow(sides[1]))


def has_root(value: object) -> bool:
    """Whether a run-time float, or a symbolic int, to a power between 0 and 1 is what Python gives: of a negative one
    Python makes a complex number. The sign of an outside number is guarded; a number that a tensor holds is taken to be
    positive where the program takes its root."""
    if isinstance(value, torch.SymInt):
        return isinstance(value.node, SymNode) and value.node.has_hint() and bool(value >= 0)
    node = node_of(value)
    return node is not None and (node.history is None or bool(value >= 0))  # type: ignore[operator]


def is_share(value: object) -> bool:
    """Whether an outside float (a decay rate) lies between 0 and 1, which is guarded: its powers are what Python
    gives."""
    node = node_of(value)
    return node is not None and node.history is not None and bool(value > 0) and bool(value <= 1)  # type: ignore


def apply(function: object, value: torch.SymFloat | torch.SymInt) -> torch.SymFloat | None:
    """A function of the math module on a run-time number; None for other functions and numbers."""
    name = MATH_FUNCTIONS.get(function)
    node = None if name is None else node_of(torch.sym_float(value))
    if node is None or name is None:
        return None
    try:
        return torch.SymFloat(node.function(name))
    except ValueError as error:
        if type(value) is torch.SymInt and " got " in str(error):
            function(int(value))  # type: ignore[operator]  # from CPython 3.14 on an int's message tells no value
        raise


def node_of(value: object) -> FloatNode | None:
    """The node of a run-time float; None for anything else."""
    if type(value) is torch.SymFloat and isinstance(value.node, FloatNode):
        return value.node
    return None


# The protocol has this name, which would hide the type in the annotations above.
FloatNode.str = FloatNode._graph_repr  # type: ignore[attr-defined]
