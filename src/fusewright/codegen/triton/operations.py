"""Elementwise operations as Triton text: one row an operation, from operand texts to the text of the value.

Takes an `Apply` node and the texts of its operands; gives an expression. Always holds: the value has the node's dtype,
and means what the ATen operator of the name means. Where every float that a kernel stores is a half (`Style.fast`),
division and the exponential may be approximate: their error (2 units of float32's last place) is far below a half's
rounding. So is that of 1 + erf(x) (1e-5 of its value).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.codegen.analysis import children, walk
from fusewright.codegen.device_kernel import Unsupported
from fusewright.loops.ir import FLOAT8, Apply, Constant, Expression, constant

TYPES: dict[torch.dtype, str] = {
    torch.float32: "fp32", torch.float64: "fp64", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip
"""In a kernel's signature."""
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64})
HALVES = frozenset({torch.float16, torch.bfloat16})


def language_type(dtype: torch.dtype) -> str:
    """`tl.float32` and its like."""
    if dtype is torch.bool:
        return "tl.int1"
    if dtype not in TYPES:
        raise Unsupported(f"values of {dtype}")
    return f"tl.float8{TYPES[dtype][3:]}" if dtype in FLOAT8 else "tl." + str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Style:
    fast: bool = False


Emitter = Callable[[Apply, list[str], Style], str]


def rounded(roots: Sequence[Expression]) -> frozenset[Expression]:
    """What lies below casts to a half, and nowhere else, in expressions with these roots: its last bits are lost."""
    exact: set[Expression] = set()
    below: list[Expression] = []
    waiting = list(roots)
    while waiting:
        expr = waiting.pop()
        if expr not in exact:
            exact.add(expr)
            halved = isinstance(expr, Apply) and expr.op == "cast" and expr.dtype in HALVES
            (below if halved else waiting).extend(children(expr))
    return frozenset(walk(below)) - exact


def literal(node: Constant) -> str | None:
    """The constant written in place, where Triton gives it the other operand's type exactly; None where it needs a type
    of its own."""
    value = node.value
    if node.dtype is torch.float64 or node.dtype is torch.bool:
        return None
    if isinstance(value, float):
        return repr(value) if value == value and abs(value) != float("inf") else None
    return str(value) if abs(value) < 1 << 31 else None


def typed(node: Constant) -> str:
    value = node.value
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        text = f'float("{value}")'
    else:
        text = repr(value)
    return f"tl.full([], {text}, {language_type(node.dtype)})"


def _source(node: Apply) -> torch.dtype:
    return node.args[0].dtype


def _infix(symbol: str, on_bool: str | None = None) -> Emitter:
    def emit(node: Apply, args: list[str], style: Style) -> str:
        if _source(node) is torch.bool:
            if on_bool is None:
                raise Unsupported(f"{node.op} of bools")
            return f"({args[0]} {on_bool} {args[1]})"
        return f"({args[0]} {symbol} {args[1]})"

    return emit


def _compare(symbol: str) -> Emitter:
    def emit(node: Apply, args: list[str], style: Style) -> str:
        if _source(node) is torch.bool:
            args = [f"{arg}.to(tl.int8)" for arg in args]
        return f"({args[0]} {symbol} {args[1]})"

    return emit


def _library(name: str) -> Emitter:
    def emit(node: Apply, args: list[str], style: Style) -> str:
        if not _source(node).is_floating_point:
            raise Unsupported(f"{node.op} of {_source(node)}")
        return f"lib.{name}({', '.join(args)})"

    return emit


def _either(fast: Emitter, exact: Emitter) -> Emitter:
    return lambda node, args, style: (fast if style.fast and _source(node) is torch.float32 else exact)(
        node, args, style
    )


def _text(template: str) -> Emitter:
    return lambda node, args, style: template.format(*args)


def _by_kind(on_float: str, on_int: str, on_bool: str | None = None, on_unsigned: str | None = None) -> Emitter:
    """Templates by the kind of the first operand."""

    def emit(node: Apply, args: list[str], style: Style) -> str:
        dtype = _source(node)
        if dtype is torch.bool:
            if on_bool is None:
                raise Unsupported(f"{node.op} of bools")
            return on_bool.format(*args)
        if dtype.is_floating_point:
            return on_float.format(*args)
        return (on_unsigned if on_unsigned is not None and dtype in UNSIGNED else on_int).format(
            *args, bits=dtype.itemsize * 8
        )

    return emit


def _quotient(node: Apply, args: list[str], style: Style) -> str:
    if _source(node) is torch.float32 and not style.fast:
        return f"tl.div_rn({args[0]}, {args[1]})"
    return f"({args[0]} / {args[1]})"


def _reciprocal(node: Apply, args: list[str], style: Style) -> str:
    if _source(node) is torch.float32 and not style.fast:
        return f"tl.div_rn(tl.full([], 1.0, tl.float32), {args[0]})"
    return f"(1.0 / {args[0]})"


def _root(node: Apply, args: list[str], style: Style) -> str:
    return f"tl.sqrt_rn({args[0]})" if _source(node) is torch.float32 else f"tl.sqrt({args[0]})"


_POWERS: dict[float, str] = {2.0: "({0} * {0})", 3.0: "({0} * {0} * {0})", 1.0: "{0}"}


def _power(node: Apply, args: list[str], style: Style) -> str:
    exponent = node.args[1]
    if not _source(node).is_floating_point:
        return f"lib.integer_power({args[0]}, {args[1]})"
    if isinstance(exponent, Constant):
        if exponent.value in _POWERS:
            return _POWERS[float(exponent.value)].format(args[0])
        if exponent.value == 0.5:
            return _root(node, args, style)
    return f"lib.pow({args[0]}, {args[1]})"


def cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """PyTorch's conversion: floats truncate towards integers, narrow ones by way of int32; anything to bool is
    `!= 0`."""
    if source is target:
        return text
    if target is torch.bool:
        return f"({text} != 0)"
    wanted = language_type(target)
    if source in FLOAT8:
        return cast(f"{text}.to(tl.float32)", torch.float32, target)
    if target in FLOAT8:
        through = cast(text, source, torch.float32)
        return f"lib.to_{'e4m3' if target is torch.float8_e4m3fn else 'e5m2'}({through})"
    if source.is_floating_point:
        if target in HALVES or (source in HALVES and target.is_floating_point):
            through = text if source is torch.float32 else f"{text}.to(tl.float32)"
            return through if target is torch.float32 else f"{through}.to({wanted})"
        if not target.is_floating_point and target.itemsize < 4:
            return f"{text}.to(tl.int32).to({wanted})"
        if target in UNSIGNED:
            return f"{text}.to(tl.int64).to({wanted})"
    elif target in HALVES:
        return f"{text}.to(tl.float32).to({wanted})"
    return f"{text}.to({wanted})"


def beyond(node: Apply) -> Constant | None:
    """A number that is cast to an integer beyond its range, as a GPU has it: the nearest in range of the type that it
    goes through, of which a narrow one takes the low bits; NaN is 0 in 32 bits, or the highest bit alone. Where the
    compiler finds the number itself, it takes anything."""
    (argument,), target = node.args, node.dtype
    if not isinstance(argument, Constant) or not isinstance(argument.value, float):
        return None
    if target is torch.bool or target.is_floating_point:
        return None
    wide, signed = target.itemsize == 8 or target is torch.uint8, target.is_signed or target is torch.uint8
    bits = 64 if wide else 32
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    number = torch.tensor(argument.value, dtype=argument.dtype, device="cpu").item()
    if math.isnan(number):
        return constant(1 << bits - 1 if wide or argument.dtype is torch.float64 else 0, target)
    return constant(int(min(max(number, least), most)), target)


def _cast(node: Apply, args: list[str], style: Style) -> str:
    known = beyond(node)
    return cast(args[0], _source(node), node.dtype) if known is None else typed(known)


def _bitcast(node: Apply, args: list[str], style: Style) -> str:
    if _source(node).itemsize != node.dtype.itemsize or torch.bool in (_source(node), node.dtype):
        raise Unsupported(f"bitcast of {_source(node)} to {node.dtype}")
    return f"{args[0]}.to({language_type(node.dtype)}, bitcast=True)"


def _sign_bit(node: Apply, args: list[str], style: Style) -> str:
    dtype = _source(node)
    if dtype.is_floating_point:
        return f"({args[0]}.to(tl.int{dtype.itemsize * 8}, bitcast=True) < 0)"
    return "tl.full([], False, tl.int1)" if dtype in UNSIGNED else f"({args[0]} < 0)"


_PROPAGATE = ", propagate_nan=tl.PropagateNan.ALL"
ELEMENTARY = (
    "exp2", "expm1", "log2", "log10", "log1p", "rsqrt", "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh",
    "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma", "copysign", "hypot",
    "nextafter",
)  # fmt: skip

OPERATIONS: dict[str, Emitter] = {
    "add": _infix("+", "|"),
    "sub": _infix("-"),
    "mul": _infix("*", "&"),
    "div": _quotient,
    "floor_divide": _by_kind(
        "lib.float_floor_quotient({0}, {1})", "lib.floor_quotient({0}, {1})", None, "lib.truncating_quotient({0}, {1})"
    ),
    "trunc_divide": _by_kind("lib.trunc({0} / {1})", "lib.truncating_quotient({0}, {1})"),
    "remainder": _by_kind("lib.float_remainder({0}, {1})", "lib.floor_remainder({0}, "
                                                           "{1})", None, "lib.truncating_remainder({0}, {1})"),
    "fmod": _by_kind("lib.fmod({0}, {1})", "lib.truncating_remainder({0}, {1})"),
    "neg": _by_kind("({0} * -1.0)", "(0 - {0})"),
    "abs": _by_kind("tl.abs({0})", "tl.abs({0})", None, "{0}"),
    "sign": _by_kind("lib.sign({0})", "lib.sign_of_integer({0})"),
    "pow": _power,
    "fma": _text("tl.fma({0}, {1}, {2})"),
    "minimum": _by_kind("tl.minimum({0}, {1}" + _PROPAGATE + ")", "tl.minimum({0}, {1})", "({0} & {1})"),
    "maximum": _by_kind("tl.maximum({0}, {1}" + _PROPAGATE + ")", "tl.maximum({0}, {1})", "({0} | {1})"),
    "fmin": _text("tl.minimum({0}, {1})"),
    "fmax": _text("tl.maximum({0}, {1})"),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "logical_and": _text("({0} & {1})"),
    "logical_or": _text("({0} | {1})"),
    "logical_xor": _text("({0} ^ {1})"),
    "logical_not": _text("({0} == 0)"),
    "bitwise_and": _infix("&", "&"),
    "bitwise_or": _infix("|", "|"),
    "bitwise_xor": _infix("^", "^"),
    "bitwise_not": _by_kind("", "(~{0})", "({0} == 0)"),
    "shift_left": _by_kind("", "lib.shift_left({0}, {1}, {bits})"),
    "shift_right": _by_kind("", "lib.shift_right({0}, {1}, "
                                "{bits})", None, "lib.shift_right_unsigned({0}, {1}, {bits})"),
    "where": _text("tl.where({0}, {1}, {2})"),
    "cast": _cast,
    "bitcast": _bitcast,
    "sqrt": _root,
    "reciprocal": _reciprocal,
    "exp": _either(_library("fast_exp"), _library("exp")),
    "log": _either(_text("tl.log({0})"), _library("log")),
    "sigmoid": _either(_library("fast_sigmoid"), _library("sigmoid")),
    "tanh": _either(_library("fast_tanh"), _library("tanh")),
    "floor": _by_kind("tl.floor({0})", "{0}"),
    "ceil": _by_kind("tl.ceil({0})", "{0}"),
    "round": _by_kind("lib.rint({0})", "{0}"),
    "trunc": _by_kind("lib.trunc({0})", "{0}"),
    "frac": _text("({0} - lib.trunc({0}))"),
    "isnan": _by_kind("({0} != {0})", "tl.full([], False, tl.int1)", "tl.full([], False, tl.int1)"),
    "isinf": _by_kind('(tl.abs({0}) == float("inf"))', "tl.full([], False, tl.int1)", "tl.full([], False, tl.int1)"),
    "isfinite": _by_kind('(tl.abs({0}) < float("inf"))', "tl.full([], True, tl.int1)", "tl.full([], True, tl.int1)"),
    "signbit": _sign_bit,
    **{name: _library(name) for name in ELEMENTARY},
}  # fmt: skip


def one_plus_erf(node: Apply) -> Expression | None:
    """x, where `node` is 1 + erf(x) in float32 (a GELU): that sum has an approximation that erf alone has not."""
    if node.op != "add" or node.dtype is not torch.float32:
        return None
    for a, b in (node.args, node.args[::-1]):
        if isinstance(a, Apply) and a.op == "erf" and isinstance(b, Constant) and b.value == 1:
            return a.args[0]
    return None


TYPED_OPERANDS = frozenset({
    "div", "fma", "where", "cast", "bitcast", "minimum", "maximum", "fmin", "fmax", "abs", "pow", "floor_divide",
    "trunc_divide",
    "remainder", "fmod", "shift_left", "shift_right", "sqrt", "reciprocal", "floor", "ceil", "round", "trunc", "frac",
    "sign", "signbit",
    "exp", "log", "sigmoid", "tanh", *ELEMENTARY,
})  # fmt: skip
"""Operations whose constant operands must carry a type."""


def apply(node: Apply, args: list[str], style: Style) -> str:
    emitter = OPERATIONS.get(node.op)
    if emitter is None:
        raise Unsupported(f"the operation {node.op}")
    return emitter(node, args, style)
