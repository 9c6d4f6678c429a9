"""The node behind `torch.SymInt`: carries a symbolic size through PyTorch's dispatcher and through user code.

Takes a `Dim` (or a relation, or a float that came from one) and the `ShapeEnv` of the capture; gives `torch.SymInt`,
`torch.SymBool`.
Always holds: asking for a concrete value (`int()`, `bool()`, float arithmetic) records a guard, so an answer is never a
guess. The method names are the protocol of PyTorch's C++ `PythonSymNodeImpl` (torch/csrc/utils/python_symnode.h) and of
`torch.SymInt`.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence

import torch

from fusewright.sizes.expressions import Dim, Expr, Relation, RelationOp, bounds, maximum, minimum
from fusewright.sizes.shape_env import ShapeEnv


class _NoUnbackedSymbols:
    """What PyTorch's helpers see as `node.expr`: they look only for sizes that have no example value, and there are
    none here."""

    __slots__ = ()
    free_symbols: frozenset[object] = frozenset()
    args: tuple[object, ...] = ()
    is_Symbol = False


_EXPR = _NoUnbackedSymbols()
_HASH = torch.SymInt.__hash__.__code__


def _fits(d: Dim) -> bool:
    """Whether the numbers in it are of 64 bits, as those of guards and plans are."""
    numbers = (d,) if isinstance(d, int) else (d.constant, *(count for _, count in d.terms))
    return max(map(abs, numbers)) <= sys.maxsize


_PYTHON_TYPES: dict[type, type] = {bool: bool, Relation: bool, float: float}


class SymNode:
    """One symbolic integer, boolean (a Relation) or concrete number. Arithmetic on floats specialises: it gives
    concrete numbers."""

    __slots__ = ("env", "pytype", "value")

    def __init__(self, value: Dim | Relation | float | bool, env: ShapeEnv) -> None:
        self.value = value
        self.env = env
        # PyTorch asks some 40,000 times in a capture of BERT
        self.pytype: type = _PYTHON_TYPES.get(value.__class__, int)

    shape_env = None  # PyTorch's own environment; its helpers fall back to `guard_bool` when there is none
    _hint = None  # PyTorch's cache of the example's value; None means not cached

    # --- what it is

    @property
    def expr(self) -> object:
        """For PyTorch's helpers only; the value is `value`."""
        return _EXPR

    @property
    def dim(self) -> Dim:
        """The symbolic integer. Raises TypeError for a boolean or a float."""
        if self.pytype is not int:
            raise TypeError(f"{self.value} is not an integer")
        return self.value  # type: ignore[return-value]

    @property
    def constant(self) -> int | float | bool | None:
        return self.value if isinstance(self.value, (bool, int, float)) else None

    @property
    def hint(self) -> int | float | bool:
        return self._concrete_hint()

    def is_int(self) -> bool:
        return self.pytype is int

    def is_float(self) -> bool:
        return self.pytype is float

    def is_bool(self) -> bool:
        return self.pytype is bool

    def is_nested_int(self) -> bool:
        """Never, but that is the question by which `torch.SymInt.__hash__` decides whether a number has a hash: one
        that a set or a dictionary asks for is the concrete number's, which is guarded then."""
        return sys._getframe(1).f_code is _HASH

    def nested_int(self) -> int | None:
        return self.guard_int("", 0) if sys._getframe(1).f_code is _HASH else None

    def is_constant(self) -> bool:
        return isinstance(self.value, int)  # not for floats: torch.SymFloat has no way to unwrap a constant

    def is_symbolic(self) -> bool:
        return self.constant is None

    def has_hint(self) -> bool:
        return not self.env.unbacked or not self.env.is_unbacked(self.value)

    def maybe_as_int(self) -> int | None:
        return self.value if isinstance(self.value, int) and not isinstance(self.value, bool) else None

    def str(self) -> object:
        """What the program shows of a size is a number, which is then guarded."""
        guard = self.guard_bool if self.is_bool() else self.guard_float if self.is_float() else self.guard_int
        return f"{guard('', 0)}"

    __str__ = __repr__ = _graph_repr = str  # type: ignore[assignment]

    def _concrete_hint(self) -> int | float | bool:
        if isinstance(self.value, Relation):
            relation = self.value
            return Relation(relation.op, self.env.hint(relation.left), self.env.hint(relation.right)).holds({})
        return self.value if isinstance(self.value, float) else self.env.hint(self.value)

    def require_hint(self, fallback: object = None) -> int | float | bool:
        return self._concrete_hint()

    # --- concrete values: each one is a guard

    def int_(self) -> int:
        return self.guard_int("", 0)

    def bool_(self) -> bool:
        return self.guard_bool("", 0)

    def guard_int(self, file: object, line: int) -> int:
        return int(self.value) if isinstance(self.value, (bool, float)) else self.env.specialise(self.dim)

    def guard_float(self, file: object, line: int) -> float:
        return self.value if isinstance(self.value, float) else float(self.guard_int(file, line))

    def guard_bool(self, file: object, line: int) -> bool:
        if isinstance(self.value, Relation):
            return self.env.guard(self.value)
        if isinstance(self.value, (bool, int, float)):
            return bool(self.value)
        return self.env.guard(Relation("!=", self.value, 0))

    guard_size_oblivious = guard_or_false = guard_or_true = guard_bool

    def expect_true(self, file: object, line: int) -> bool:
        return self.env.expect(self.value) if isinstance(self.value, Relation) else self.guard_bool(file, line)

    def statically_known_true(self, file: object, line: int) -> bool:
        return self.env.known(self.value) is True if isinstance(self.value, Relation) else self.value is True

    # --- making nodes

    def wrap_int(self, number: int) -> SymNode:
        return SymNode(int(number), self.env)

    def wrap_float(self, number: float) -> SymNode:
        return SymNode(float(number), self.env)

    def wrap_bool(self, truth: bool) -> SymNode:
        return SymNode(bool(truth), self.env)

    def clone(self) -> SymNode:
        return self

    # --- arithmetic

    def _integers(self, other: SymNode) -> bool:
        return self.pytype is int and other.pytype is int

    def _number(self) -> int | float:
        return self.value if isinstance(self.value, float) else self.guard_int("", 0)

    def _arithmetic(self, other: SymNode, operation: Callable[[Dim, Dim], Dim]) -> SymNode:
        if self._integers(other) and _fits(self.dim) and _fits(other.dim):
            made = self.env.simplify(operation(self.dim, other.dim))
            if self._fits_now(made):
                return SymNode(made, self.env)
        return SymNode(operation(self._number(), other._number()), self.env)  # type: ignore[arg-type]

    def _fits_now(self, made: Dim) -> bool:
        """Whether a result is of 64 bits. That one of numbers is, which need not be sizes, is guarded."""
        if not _fits(made) or isinstance(made, int):
            return _fits(made)
        most = bounds(made)[1]
        return most is None or most <= sys.maxsize or self.env.guard(Relation("<=", made, sys.maxsize))

    def sym_sum(self, nodes: Sequence[SymNode]) -> SymNode:
        result: SymNode = SymNode(0, self.env)
        for node in nodes:
            result = result.add(node)
        return result

    def add(self, other: SymNode) -> SymNode:
        return self._arithmetic(other, operator.add)

    def sub(self, other: SymNode) -> SymNode:
        return self._arithmetic(other, operator.sub)

    def mul(self, other: SymNode) -> SymNode:
        return self._arithmetic(other, operator.mul)

    def _divide(self, other: SymNode, operation: Callable[[Dim, Dim], Dim]) -> SymNode:
        self._check_divisor(other, operation)
        return self._arithmetic(other, operation)

    def _check_divisor(self, other: SymNode, operation: Callable[..., object]) -> None:
        """Raises what Python raises for a divisor that is zero, which it then is whenever this code runs."""
        if self._integers(other) and not self.env.guard(Relation("!=", other.dim, 0)):
            operation(1, 0)

    def floordiv(self, other: SymNode) -> SymNode:
        return self._divide(other, operator.floordiv)

    int_floordiv = floordiv

    def mod(self, other: SymNode) -> SymNode:
        return self._divide(other, operator.mod)

    def truediv(self, other: SymNode) -> object:
        self._check_divisor(other, operator.truediv)
        left, right = self.sym_float(), other.sym_float()
        if type(left) is SymNode and type(right) is SymNode:
            return SymNode(left._number() / right._number(), self.env)
        # One of them is a run-time float, whose node also takes constants.
        if type(left) is SymNode:
            left = right.wrap_float(left._number())  # type: ignore[attr-defined]
        return left.truediv(right)  # type: ignore[attr-defined]

    float_truediv = int_truediv = truediv

    def pow(self, other: SymNode) -> SymNode:
        if self._integers(other):
            power = other.guard_int("", 0)
            if power >= 0:
                made = self.dim**power
                return SymNode(made if self._fits_now(made) else self._number() ** power, self.env)
        return SymNode(float(self._number()) ** other._number(), self.env)

    float_pow = pow_by_natural = pow

    def neg(self) -> SymNode:
        return SymNode(-self.value if isinstance(self.value, float) else -self.dim, self.env)

    def pos(self) -> SymNode:
        return self

    def abs(self) -> SymNode:
        return (
            SymNode(abs(self.value), self.env)
            if isinstance(self.value, float)
            else SymNode(maximum(self.dim, -self.dim), self.env)
        )

    def _rounded(self, rounding: Callable[[float], int]) -> SymNode:
        return SymNode(rounding(self.value), self.env) if isinstance(self.value, float) else self

    def floor(self) -> SymNode:
        return self._rounded(math.floor)

    def ceil(self) -> SymNode:
        return self._rounded(math.ceil)

    def trunc(self) -> SymNode:
        return self._rounded(math.trunc)

    def round(self, digits: object = None) -> SymNode:
        return self._rounded(round)

    def sym_float(self) -> object:
        """A float that is known at run time, where the graph can compute one; else the value is specialised."""
        if isinstance(self.value, Expr) and self.env.float_of is not None:
            return self.env.float_of(self.value)
        return SymNode(float(self._number()), self.env)

    def sym_min(self, other: SymNode) -> SymNode:
        return self._arithmetic(other, minimum if self._integers(other) else min)  # type: ignore[arg-type]

    def sym_max(self, other: SymNode) -> SymNode:
        if self._integers(other):  # PyTorch's contiguous strides are products of max(size, 1)
            for larger, smaller in ((self, other), (other, self)):
                if self.env.generally(Relation("<=", smaller.dim, larger.dim)):
                    return larger
        return self._arithmetic(other, maximum if self._integers(other) else max)  # type: ignore[arg-type]

    # --- relations

    def _relation(self, other: SymNode, op: RelationOp, swap: bool = False) -> SymNode:
        left, right = (other, self) if swap else (self, other)
        if left.is_int() and right.is_int():
            relation = Relation(op, left.dim, right.dim)
            answer = self.env.known(relation)
            return SymNode(relation if answer is None else answer, self.env)
        plain = {"==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le}[op]
        return SymNode(plain(left._plain(), right._plain()), self.env)

    def _plain(self) -> int | float | bool:
        return self.guard_bool("", 0) if self.is_bool() else self._number()

    def eq(self, other: SymNode) -> SymNode:
        return self._relation(other, "==")

    def ne(self, other: SymNode) -> SymNode:
        return self._relation(other, "!=")

    def lt(self, other: SymNode) -> SymNode:
        return self._relation(other, "<")

    def le(self, other: SymNode) -> SymNode:
        return self._relation(other, "<=")

    def gt(self, other: SymNode) -> SymNode:
        return self._relation(other, "<", swap=True)

    def ge(self, other: SymNode) -> SymNode:
        return self._relation(other, "<=", swap=True)

    # Logic on undecided relations decides them: there is no symbolic form for a conjunction.
    def sym_and(self, other: SymNode) -> SymNode:
        return SymNode(self.guard_bool("", 0) and other.guard_bool("", 0), self.env)

    def sym_or(self, other: SymNode) -> SymNode:
        return SymNode(self.guard_bool("", 0) or other.guard_bool("", 0), self.env)

    and_ = sym_and
    or_ = sym_or

    def sym_not(self) -> SymNode:
        if isinstance(self.value, Relation):
            return SymNode(self.value.negated(), self.env)
        return SymNode(not self.value, self.env)

    def sym_ite(self, if_true: SymNode, if_false: SymNode) -> SymNode:
        return if_true if self.guard_bool("", 0) else if_false

    # --- memory formats of symbolic tensors (PyTorch asks the node, lazily)

    def _dims(self, nodes: Sequence[object]) -> list[Dim]:
        return [dim_of(node) for node in nodes]

    def _row_major(self, sizes: Sequence[object], strides: Sequence[object], order: Sequence[int]) -> SymNode:
        """Whether the strides are dense with the dimensions laid out in `order`, innermost first."""
        shape, steps = self._dims(sizes), self._dims(strides)
        guard, known = self.env.guard, self.env.known
        if any(known(Relation("==", size, 0)) for size in shape):
            return SymNode(True, self.env)
        expected: Dim = 1
        for axis in order:
            right = known(Relation("==", steps[axis], expected)) or known(Relation("==", shape[axis], 1))
            if not right and guard(Relation("!=", shape[axis], 1)) and not guard(Relation("==", steps[axis], expected)):
                return SymNode(False, self.env)
            expected = expected * shape[axis]
        return SymNode(True, self.env)

    def is_contiguous(self, sizes: Sequence[object], strides: Sequence[object]) -> SymNode:
        return self._row_major(sizes, strides, range(len(sizes) - 1, -1, -1))

    def is_channels_last_contiguous_2d(self, sizes: Sequence[object], strides: Sequence[object]) -> SymNode:
        return self._row_major(sizes, strides, (1, 3, 2, 0)) if len(sizes) == 4 else SymNode(False, self.env)

    def is_channels_last_contiguous_3d(self, sizes: Sequence[object], strides: Sequence[object]) -> SymNode:
        return self._row_major(sizes, strides, (1, 4, 3, 2, 0)) if len(sizes) == 5 else SymNode(False, self.env)

    def _channels_last_strides(
        self, sizes: Sequence[object], strides: Sequence[object], order: Sequence[int]
    ) -> SymNode:
        """PyTorch's looser test (c10/core/MemoryFormat.h, is_channels_last_strides_2d_s4): strides that grow in this
        order."""
        shape, steps = self._dims(sizes), self._dims(strides)
        guard = self.env.guard
        if len(shape) != len(order) or guard(Relation("==", steps[1], 0)):
            return SymNode(False, self.env)
        least: Dim = 0
        for axis in order:
            if guard(Relation("==", shape[axis], 0)) or guard(Relation("<", steps[axis], least)):
                return SymNode(False, self.env)
            if axis == 0 and guard(Relation("==", least, steps[1])):
                return SymNode(False, self.env)
            least = steps[axis]
            if guard(Relation("<", 1, shape[axis])):
                least = least * shape[axis]
        return SymNode(True, self.env)

    def is_channels_last_strides_2d(self, sizes: Sequence[object], strides: Sequence[object]) -> SymNode:
        return self._channels_last_strides(sizes, strides, (1, 3, 2, 0))

    def is_channels_last_strides_3d(self, sizes: Sequence[object], strides: Sequence[object]) -> SymNode:
        return self._channels_last_strides(sizes, strides, (1, 4, 3, 2, 0))

    def is_non_overlapping_and_dense(self, sizes: Sequence[object], strides: Sequence[object]) -> SymNode:
        steps = [self.env.hint(d) for d in self._dims(strides)]
        order = sorted(range(len(steps)), key=lambda axis: steps[axis])
        return self._row_major(sizes, strides, order)


def dim_of(size: object) -> Dim:
    """The Dim behind an int, a torch.SymInt or a node. Raises TypeError for a SymInt that is not of this compiler."""
    if isinstance(size, torch.SymInt):
        size = size.node
    if isinstance(size, SymNode):
        return size.dim
    if isinstance(size, int):
        return size
    constant = getattr(size, "maybe_as_int", lambda: None)()
    if constant is not None:
        return constant
    # A node of ours that C++ hands back in its own wrapper.
    value = getattr(size, "value", None)
    if not isinstance(value, (int, Expr)):
        raise TypeError(f"{size!r} is not a size of this capture")
    return value


def size_of(d: Dim, env: ShapeEnv | None) -> int | torch.SymInt:
    """What PyTorch is given for `d`: an int, or a torch.SymInt over a node of `env`."""
    if isinstance(d, int):
        return d
    assert env is not None, "a symbolic size needs the capture's ShapeEnv"
    simpler = env.simplify(d)
    return simpler if isinstance(simpler, int) else torch.SymInt(SymNode(simpler, env))


__all__ = ["SymNode", "dim_of", "size_of"]
