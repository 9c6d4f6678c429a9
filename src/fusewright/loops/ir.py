"""The loop IR: a graph as loops over buffers, in plain data that prints, compares and hashes.

Takes nothing; defines the types between lowering (`loops/lower`), scheduling (`schedule`) and code generation
(`codegen`).

Always holds:
- Expressions are hash-consed: structurally equal expressions are the same object, so equality and hashing are by
identity, a shared
  subexpression is shared, and walks must memoise by identity (an expression is a DAG, not a tree).
- An index is a `Dim` (sizes/expressions.py) over loop variables and size symbols, counted in elements from the buffer's
start, strides
  included.
- Arithmetic is done in the dtype of the expression. bfloat16 and float16 appear only in `Load`, in `Store`d values and
as the target of a
  `cast`: lowering computes in float32 between them. bool is its own dtype (a mask), stored as one byte 0 or 1.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch

from fusewright.base.location import Location
from fusewright.base.records import dataclass, field
from fusewright.sizes.expressions import Dim, Expr, Symbol, symbol

# --- expressions ----------------------------------------------------------------------------------------------------

_interned: WeakValueDictionary[tuple[Any, ...], Expression] = WeakValueDictionary()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Expression:
    """A value computed at one point of an iteration space. Construct with the functions below, never directly."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Load(Expression):
    """`buffer[index]`. `bindings` are symbols of `index` whose values are computed at run time (indirect indexing):
    (symbol, int64 expression) pairs, already bounds-checked or wrapped by a `check`/`wrap` of lowering's making."""

    buffer: str
    index: Dim
    bindings: tuple[tuple[Expr, Expression], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Constant(Expression):
    """A literal. Floats are kept exactly (inf, nan and -0.0 included)."""

    value: bool | int | float


@dataclass(frozen=True, slots=True, eq=False)
class IndexValue(Expression):
    """The value of an index (a loop variable, a size, arithmetic on them) as an integer of dtype int64."""

    index: Dim


@dataclass(frozen=True, slots=True, eq=False)
class Apply(Expression):
    """An elementwise operation from `OPERATIONS` on arguments."""

    op: str
    args: tuple[Expression, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Masked(Expression):
    """`body` where `mask` is true, else `other`. Loads inside `body` are not performed where the mask is false, nor
    those inside `other` where it is true (their index may be out of range there)."""

    mask: Expression
    body: Expression
    other: Expression


@dataclass(frozen=True, slots=True, eq=False)
class CheckedIndex(Expression):
    """An int64 index into a dimension of size `extent`. Negative values in -extent..-1 are wrapped when `wrap`;
    what is still out of range sets the kernel's status flag (the call then falls back to eager, which raises PyTorch's
    own IndexError) and yields 0, so that no memory outside the buffer is touched."""

    value: Expression
    extent: Dim
    wrap: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class LocalValue(Expression):
    """The value of a kernel-local name: a reduction's result or a definition (only in scheduled kernels)."""

    name: str


def _intern(key: tuple[Any, ...], make: Any) -> Any:
    found = _interned.get(key)
    if found is None:
        found = make()
        _interned[key] = found
    return found


def load(buffer: str, index: Dim, dtype: torch.dtype, bindings: tuple[tuple[Expr, Expression], ...] = ()) -> Load:
    return _intern(("load", buffer, index, dtype, bindings), lambda: Load(dtype, buffer, index, bindings))


def constant(value: bool | int | float, dtype: torch.dtype) -> Constant:
    """`value` converted to the Python type of `dtype` first, an integer to what its bits hold of it; keyed by type and
    bits so that 1, True, 1.0 and -0.0 differ. Of a complex dtype it stands for the elements of an empty tensor."""
    if dtype.is_floating_point:
        value = float(value)
        key: Any = value.hex()
    elif dtype is torch.bool:
        value = bool(value)
        key = value
    else:
        value = key = int(value) if dtype.is_complex else _wrapped(int(value), dtype)
    return _intern(("constant", type(value), key, dtype), lambda: Constant(dtype, value))


def _as_float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, value)


def _wrapped(value: int, dtype: torch.dtype) -> int:
    least, most = _range_of(dtype)
    return value if least <= value <= most else (value - least) % (1 << 8 * dtype.itemsize) + least


@cache
def _range_of(dtype: torch.dtype) -> tuple[int, int]:
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def index_value(index: Dim) -> Expression:
    if isinstance(index, int):
        return constant(index, torch.int64)
    return _intern(("index", index), lambda: IndexValue(torch.int64, index))


def apply(op: str, *args: Expression, dtype: torch.dtype) -> Apply:
    if op not in OPERATIONS:
        raise ValueError(f"unknown loop operation {op!r}")
    if op in OF_FLOATS and not dtype.is_floating_point:
        raise TypeError(f"{op} of {dtype}: code generation has it for floats only")
    return _intern(("apply", op, args, dtype), lambda: Apply(dtype, op, args))


def cast(value: Expression, dtype: torch.dtype) -> Expression:
    """Conversion with PyTorch's semantics (float to int truncates, anything to bool is `!= 0`)."""
    if value.dtype == dtype:
        return value
    if isinstance(value, Constant) and _is_rounded(value):
        number = _as_float32(value.value) if value.dtype is torch.float32 else value.value
        if not dtype.is_floating_point:
            whole = _as_integer(number, dtype) if isinstance(number, float) else number
            return apply("cast", value, dtype=dtype) if whole is None else constant(whole, dtype)
        if isinstance(number, float) and abs(number) >= _overflows_at(dtype):
            return constant(math.copysign(math.inf, number), dtype)
        if dtype is torch.float64 or (isinstance(number, int) and abs(number) <= 2 / torch.finfo(dtype).eps):
            return constant(number, dtype)  # others are rounded, by the machine
    return apply("cast", value, dtype=dtype)


def _as_integer(number: float, dtype: torch.dtype) -> int | None:
    """What a conversion makes of it on every device; None where it is out of range: there code generation says so for
    its own (`_float_to_int` in codegen/llvm/emit/expressions.py, `beyond` in codegen/triton/operations.py)."""
    if dtype is torch.bool:
        return int(number != 0)
    narrow = dtype in (torch.int8, torch.int16, torch.uint8)  # by way of a wider one, of which they take the low bits
    least, most = _range_of(torch.int32 if narrow else dtype)
    return int(number) if math.isfinite(number) and least <= int(number) <= most else None


def _is_rounded(one: Constant) -> bool:
    """Whether its value is a number of its dtype, and not only near to one."""
    number, dtype = one.value, one.dtype
    if dtype.itemsize > 2 or not isinstance(number, float) or not number or not math.isfinite(number):
        return True
    spacing = math.ldexp(torch.finfo(dtype).eps, math.frexp(number)[1] - 1)
    return number % spacing == 0 and torch.finfo(dtype).tiny <= abs(number) <= torch.finfo(dtype).max


@cache
def _overflows_at(dtype: torch.dtype) -> float:
    """From where on a number is rounded to infinity."""
    if dtype is torch.float64 or dtype in FLOAT8:
        return math.inf
    most = torch.finfo(dtype).max
    return most + math.ulp(most) * 2**52 * torch.finfo(dtype).eps / 2


def masked(mask: Expression, body: Expression, other: Expression) -> Expression:
    return _intern(("masked", mask, body, other), lambda: Masked(body.dtype, mask, body, other))


def checked_index(value: Expression, extent: Dim, wrap: bool = True) -> CheckedIndex:
    return _intern(("checked", value, extent, wrap), lambda: CheckedIndex(torch.int64, value, extent, wrap))


def local_value(name: str, dtype: torch.dtype) -> LocalValue:
    return _intern(("local", name, dtype), lambda: LocalValue(dtype, name))


FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""Memory's alone: values of them are computed in float32."""
OPERATIONS: dict[str, int] = {
    # name: number of arguments. Semantics are those of the ATen operator of the same name on floats and integers.
    "add": 2, "sub": 2, "mul": 2, "div": 2, "floor_divide": 2, "trunc_divide": 2, "remainder": 2, "fmod": 2,
    "neg": 1, "abs": 1, "sign": 1, "pow": 2, "fma": 3,
    "minimum": 2, "maximum": 2,  # NaN propagates
    "fmin": 2, "fmax": 2,  # NaN loses
    "eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2,  # result bool
    "logical_and": 2, "logical_or": 2, "logical_xor": 2, "logical_not": 1,  # bool arguments, bool result
    "bitwise_and": 2, "bitwise_or": 2, "bitwise_xor": 2, "bitwise_not": 1, "shift_left": 2, "shift_right": 2,
    "where": 3,  # (bool, a, b)
    "cast": 1, "bitcast": 1,
    "exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log2": 1, "log10": 1, "log1p": 1, "sqrt": 1, "rsqrt": 1,
    "reciprocal": 1,
    "sin": 1, "cos": 1, "tan": 1, "asin": 1, "acos": 1, "atan": 1, "atan2": 2, "sinh": 1, "cosh": 1, "tanh": 1,
    "asinh": 1, "acosh": 1, "atanh": 1, "sigmoid": 1, "erf": 1, "erfc": 1, "erfinv": 1, "lgamma": 1, "digamma": 1,
    "floor": 1, "ceil": 1, "round": 1, "trunc": 1, "frac": 1,
    "isnan": 1, "isinf": 1, "isfinite": 1, "signbit": 1, "copysign": 2, "hypot": 2, "nextafter": 2,
}  # fmt: skip
OF_FLOATS = frozenset(
    """exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan atan2 sinh cosh tanh asinh
    acosh atanh sigmoid erf erfc erfinv lgamma digamma copysign hypot nextafter""".split()
)
"""Operations whose results are floats."""

# --- statements and operations --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axis:
    """One loop: `symbol` runs from 0 to extent - 1."""

    symbol: Expr
    extent: Dim


@dataclass(frozen=True, slots=True)
class Store:
    """`buffer[index] = value` ("write"), or an accumulation into memory ("add", "max", "min": atomic where iterations
    may collide). `bindings` as in Load."""

    buffer: str
    index: Dim
    value: Expression
    mode: Literal["write", "add", "max", "min"] = "write"
    bindings: tuple[tuple[Expr, Expression], ...] = ()


ReductionKind = Literal["sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "xor_sum"]
"""max/min propagate NaN; argmax/argmin give the int64 position in the flattened reduced axes, of the first extreme or
the first NaN."""


@dataclass(frozen=True, slots=True)
class Pointwise:
    """For every point of `axes`, perform the stores (all of them at the same point; stores never read what this
    operation writes)."""

    name: str
    axes: tuple[Axis, ...]
    stores: tuple[Store, ...]
    locations: tuple[Location, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduction:
    """For every point of `axes`: accumulate `value` over `reduced`, then store result to buffer[index].

    The accumulator's dtype is `value.dtype` (float32 for half inputs; argmax accumulates pairs and its result is
    int64). `finish` is an expression over local_value("acc", ...) applied before the store (e.g. division by the count,
    a cast).
    """

    name: str
    axes: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    kind: ReductionKind
    value: Expression
    buffer: str
    index: Dim
    finish: Expression
    locations: tuple[Location, ...] = ()


@dataclass(frozen=True, slots=True)
class Scan:
    """For every point of `axes`: run along `scanned` in order, combining `value` into a running accumulator ("sum",
    "prod", "max", "min", "logaddexp") and storing finish(accumulator) to buffer[index] at every step. For "max"/"min"
    with `position_buffer`, the int64 position of the (last, as ATen does) extreme is stored there at the same index."""

    name: str
    axes: tuple[Axis, ...]
    scanned: Axis
    kind: Literal["sum", "prod", "max", "min", "logaddexp"]
    value: Expression
    buffer: str
    index: Dim
    finish: Expression
    position_buffer: str | None = None
    locations: tuple[Location, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A strided window on a buffer, as an argument of an extern operator: elements buffer[offset + sum(i_k *
    stride_k)]."""

    buffer: str
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    offset: Dim
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class SkinnyGemm:
    """Another way to the result of an extern that multiplies matrices, which may be taken for 1 to `most` rows:
    `target`, aten.mm or aten.addmm, of other operands (a layer's weights as they are, where the extern reads them
    packed)."""

    most: int
    target: torch._ops.OpOverload
    args: tuple[BufferRef, ...]


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of a library operator. args/kwargs are nested tuples of BufferRef, Dim, and plain constants.

    outputs: the buffers that receive the results, in order (None for a result that nobody reads).
    placement "out": `target` is called in its out= form and writes into buffers that the memory plan places;
    "returned": the operator allocates its results. mutates: buffers written in place (e.g. a random generator's none,
    index_put_'s one). ordered: must keep its order among other ordered externs (random numbers, side effects). skinny:
    what its operands are besides, see there. keeps: of a collective's wait, what the collective reads until then;
    of such a collective, that too.
    """

    name: str
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str | None, ...]
    placement: Literal["out", "returned"] = "returned"
    mutates: tuple[str, ...] = ()
    ordered: bool = False
    locations: tuple[Location, ...] = ()
    skinny: SkinnyGemm | None = None
    keeps: tuple[BufferRef, ...] = ()


Operation = Pointwise | Reduction | Scan | Extern


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory. shape/stride are what an extern or the user sees; kernels index it flat, and see complex
    numbers as pairs of reals.

    role: "input" (the caller's tensor; `position` says which graph input), "constant" (captured tensor; `position`
    indexes LoopProgram.constants), "temporary", "output" (freshly allocated for the user at every call).
    """

    name: str
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device
    role: Literal["input", "constant", "temporary", "output"]
    position: int = -1
    offset: Dim = 0
    counted: int = 1  # how often the version of an input grows if it is written to

    @property
    def element(self) -> torch.dtype:
        """The dtype of what kernels index."""
        return self.dtype.to_real() if self.dtype.is_complex else self.dtype

    def span(self) -> Dim:
        """Number of elements (as kernels index them) from the first to the last one addressed."""
        total: Dim = 1
        for size, stride in zip(self.shape, self.stride):
            if isinstance(size, int) and size == 0:
                return 0
            total = total + (size - 1) * stride
        return 2 * total if self.dtype.is_complex else total


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the graph: a buffer as it is, a strided view of a buffer (`ref`), a size, or None/constant
    (`value`). own: the view stands for the buffer, which was made in another shape: other views are views of it."""

    kind: Literal["buffer", "view", "size", "value"]
    buffer: str = ""
    ref: BufferRef | None = None
    value: Any = None
    own: bool = False


def argument_symbol(number: int) -> Symbol:
    """What stands in a kernel for a number that it is given as an argument."""
    return symbol(f"argument{number:06d}", 0, None)


def is_argument(size: Expr) -> bool:
    """Whether a symbol is one of `argument_symbol`'s."""
    return isinstance(size, Symbol) and size.name.startswith("argument")


@dataclass(slots=True)
class LoopProgram:
    """A whole graph as loops: operations in a valid order over named buffers.

    `size_symbols` maps each symbol of the sizes in use to where its value is found at run time:
    (input position, dimension), or (input position, -1) when the input itself is the integer. (-1, n) is the number n
    itself: what kernels that are otherwise equal differ in, given to them as an argument so that they share their code.
    makers: the node of the graph in whose lowering each temporary or output was made.
    """

    buffers: dict[str, Buffer] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    inputs: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    size_symbols: dict[Expr, tuple[int, int]] = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)
