"""What generated kernels call beside Triton's own language: elementary functions, PyTorch's division rules, combining
functions.

Takes and gives Triton tensors. Imported only where Triton is (a compiler process, or a test under the interpreter); it
imports nothing of fusewright, so that a compiler process needs no PyTorch. Always holds: a function means what the ATen
operator of its name means.
"""

from typing import Any

import triton
import triton.language as tl
from triton import knobs

_ELEMENTARY = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "tanh",
    "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "pow", "fmod", "hypot", "copysign", "nextafter",
    "trunc", "rint", "rsqrt",
)  # fmt: skip


def _from_libdevice(name: str) -> Any:
    from triton.language.extra.cuda import libdevice

    return getattr(libdevice, name)


def _interpreted(name: str) -> Any:
    """The function under Triton's interpreter, whose tensors are NumPy arrays: computed by PyTorch on the CPU."""
    import numpy
    import torch
    from triton.runtime.interpreter import TensorHandle

    function: Any = {"pow": torch.pow, "rint": torch.round}.get(name) or getattr(torch, name)

    def call(*arguments: Any) -> Any:
        arrays = [torch.from_numpy(numpy.ascontiguousarray(argument.handle.data)) for argument in arguments]
        data = function(*torch.broadcast_tensors(*arrays)).numpy()
        scalar = arguments[0].dtype
        blocks = any(argument.type.is_block() for argument in arguments)  # a number is an array of one element
        return tl.tensor(TensorHandle(data, scalar), tl.block_type(scalar, list(data.shape)) if blocks else scalar)

    return call


def _interpreted_quotient(a: Any, b: Any) -> Any:
    return a / b


_find = _interpreted if knobs.runtime.interpret else _from_libdevice
(
    exp, exp2, expm1, log, log2, log10, log1p, sin, cos, tan, asin, acos, atan, atan2, sinh, cosh, tanh, asinh, acosh,
    atanh, erf, erfc,
    erfinv, lgamma, pow, fmod, hypot, copysign, nextafter, trunc, rint, rsqrt,
) = map(_find, _ELEMENTARY)  # fmt: skip

fast_quotient = _interpreted_quotient if knobs.runtime.interpret else _from_libdevice("fast_dividef")


def _interpreted_nothing(*arguments: Any) -> None:
    """What says when a program runs, or where its memory should be."""


@triton.jit
def _let_next_start():  # type: ignore[no-untyped-def]
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _wait():  # type: ignore[no-untyped-def]
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _fetch(places, size: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [places.to(tl.int64), tl.full(places.shape, size, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


let_next_start = _interpreted_nothing if knobs.runtime.interpret else _let_next_start
"""From here on, the next kernel may start where this one's programs leave room."""
wait = _interpreted_nothing if knobs.runtime.interpret else _wait
"""Until the kernels before this one have ended."""
fetch = _interpreted_nothing if knobs.runtime.interpret else _fetch
"""Asks the cache for `size` bytes, a multiple of 16, at each place."""


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def fast_exp(x):
    """What is smaller than a normal number is zero: two instructions, where tl.exp takes five."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def fast_sigmoid(x):
    return fast_quotient(1.0, 1.0 + fast_exp(-x))


@triton.jit
def fast_tanh(x):
    """Within 4e-6 of its value: 1 - 2 / (1 + exp(2 x)), which loses digits near zero, where three terms of the series
    take its place. Half of libdevice's instructions, and no branches."""
    z = x * x
    series = x + x * z * (z * 0.13333334 - 0.33333334)
    return tl.where(tl.abs(x) < 0.1, series, 1.0 - fast_quotient(2.0, 1.0 + fast_exp(2.0 * x)))


@triton.jit
def fast_one_plus_erf(x):
    """1 + erf(x), within 1e-5 of its value also where it is small: erfc(z) = exp(-z * z) * p(t), t = 1 / (1 + 0.425 z),
    for z >= 0, with p a polynomial of ours, fitted to the least relative error over 0 to 10. A third of libdevice's
    instructions."""
    z = tl.abs(x)
    t = fast_quotient(1.0, 1.0 + 0.425 * z)
    p = -0.15383076558776613 * t + 0.4279629103740401
    p = p * t - 0.029825678537324297
    p = p * t + 0.28688644672410857
    p = p * t + 0.2282820830841266
    p = p * t + 0.2405330521849316
    tail = p * t * fast_exp(-z * z)
    return tl.where(x < 0, tail, 2.0 - tail)


@triton.jit
def digamma(x):
    """In double whatever the type: reflection below 0, the recurrence up to 10, then the asymptotic series (Abramowitz
    and Stegun 6.3.7, 6.3.5, 6.3.18)."""
    y = x.to(tl.float64)
    z = tl.where(y < 0, 1.0 - y, y)
    total = tl.zeros_like(y)
    for _ in tl.static_range(10):
        total = tl.where(z < 10, total - 1.0 / z, total)
        z = tl.where(z < 10, z + 1.0, z)
    s = 1.0 / (z * z)
    series = s * 0.08333333333333333 - 0.021092796092796094  # B_2k / 2k, in 1 / z^2
    series = series * s + 0.007575757575757576
    series = series * s - 0.004166666666666667
    series = series * s + 0.003968253968253968
    series = series * s - 0.008333333333333333
    series = s * (series * s + 0.08333333333333333)
    result = total + (log(z) - 0.5 / z - series)
    part = y - trunc(y)
    reflected = result - 3.141592653589793 / tan(part * 3.141592653589793)
    result = tl.where(y < 0, tl.where(part == 0, float("nan"), reflected), result)
    result = tl.where(y == float("inf"), y, tl.where(y == float("-inf"), float("nan"), result))
    at_zero = copysign(tl.full(y.shape, float("inf"), tl.float64), y) * -1.0
    return tl.where(y == 0, at_zero, result).to(x.dtype)


@triton.jit
def sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(x.dtype)


@triton.jit
def sign_of_integer(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


# --- division: PyTorch's rules; a zero divisor of integers gives 0 ----------------------------------------------------
# One of two integers may be a number in the text, which has no type: what is computed of both has the other's.


@triton.jit
def truncating_quotient(a, b):
    whole = a // _not_zero(a, b)
    return tl.where(b == 0, 0, whole).to(whole.dtype)


@triton.jit
def truncating_remainder(a, b):
    rest = a % _not_zero(a, b)
    return tl.where(b == 0, 0, rest).to(rest.dtype)


@triton.jit
def _not_zero(a, b):
    return tl.where(b == 0, 1, b).to((a + b).dtype)


@triton.jit
def floor_quotient(a, b):
    quotient = truncating_quotient(a, b)
    rest = a - quotient * b
    return quotient - ((rest != 0) & ((rest < 0) != (b < 0)) & (b != 0)).to(quotient.dtype)


@triton.jit
def floor_quotient_by_positive(a, b):
    """For indices: `b` is a size or a number in the text."""
    quotient = a // b
    return quotient - (a < quotient * b).to(quotient.dtype)


@triton.jit
def floor_remainder_by_positive(a, b):
    rest = a % b
    return tl.where(rest < 0, rest + b, rest)


@triton.jit
def floor_remainder(a, b):
    rest = truncating_remainder(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest).to(rest.dtype)


@triton.jit
def float_remainder(a, b):
    rest = fmod(a, b)
    return tl.where((rest != 0) & ((b < 0) != (rest < 0)), rest + b, rest)


@triton.jit
def float_floor_quotient(a, b):
    """Python's algorithm: exact even where a / b rounds up to an integer."""
    rest = fmod(a, b)
    quotient = (a - rest) / b
    quotient = tl.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1.0, quotient)
    floored = tl.floor(quotient)
    floored = tl.where(quotient - floored > 0.5, floored + 1.0, floored)
    result = tl.where(quotient != 0, floored, tl.where(a / b < 0, -0.0, 0.0).to(a.dtype))
    return tl.where(b == 0, a / b, result)


@triton.jit
def integer_power(base, exponent):
    base, exponent = tl.broadcast(base, exponent)  # what a loop carries keeps its shape
    result = (base * 0 + 1).to(base.dtype)
    rest = exponent
    factor = base
    for _ in range(exponent.dtype.primitive_bitwidth):
        result = tl.where((rest & 1) != 0, result * factor, result).to(base.dtype)
        factor = (factor * factor).to(base.dtype)
        rest = tl.where(rest > 0, rest >> 1, 0).to(exponent.dtype)
    odd = (exponent & 1) != 0
    inverse = tl.where(base == 1, 1, tl.where(base == -1, tl.where(odd, -1, 1), 0)).to(base.dtype)
    return tl.where(exponent < 0, inverse, result).to(base.dtype)


@triton.jit
def shift_left(a, n, BITS: tl.constexpr):
    good = (n >= 0) & (n < BITS)
    return tl.where(good, a << tl.where(good, n, 0).to(n.dtype), 0).to(a.dtype)


@triton.jit
def shift_right(a, n, BITS: tl.constexpr):
    """Of signed integers: too large a shift leaves the sign."""
    good = (n >= 0) & (n < BITS)
    return (a >> tl.where(good, n, BITS - 1).to(n.dtype)).to(a.dtype)


@triton.jit
def shift_right_unsigned(a, n, BITS: tl.constexpr):
    good = n < BITS
    return tl.where(good, a >> tl.where(good, n, 0).to(n.dtype), 0).to(a.dtype)


# --- combining functions of reductions and scans ----------------------------------------------------------------------


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def to_e4m3(x):
    """What is above the largest number and not rounded to it is NaN, as in PyTorch; the processor takes the largest."""
    return tl.where(tl.abs(x) > 464.0, float("nan"), x).to(tl.float8e4nv)


@triton.jit
def to_e5m2(x):
    """What is rounded above the largest number is infinite, as in PyTorch; the processor takes the largest number."""
    infinite = tl.where(x < 0, 0xFC, 0x7C).to(tl.uint8)
    bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return tl.where(tl.abs(x) >= 61440.0, infinite, bits).to(tl.float8e5, bitcast=True)


@triton.jit
def maximum(a, b):
    """NaN propagates."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def lesser(a, b):
    return tl.minimum(a, b)


@triton.jit
def log_add_exp(a, b):
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    rest = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    same = (top == rest) & (tl.abs(top) == float("inf"))
    return tl.where(same, top, top + tl.log(1.0 + tl.exp(tl.where(same, 0.0, rest - top))))


@triton.jit
def first_maximum(a, i, b, j):
    """Of two (value, position) pairs: the larger value, NaN above all; of equal ones the smaller position."""
    a_nan = a != a
    b_nan = b != b
    better = (a > b) | (a_nan & (b == b)) | (((a == b) | (a_nan & b_nan)) & (i < j))
    return tl.where(better, a, b), tl.where(better, i, j)


@triton.jit
def first_minimum(a, i, b, j):
    a_nan = a != a
    b_nan = b != b
    better = (a < b) | (a_nan & (b == b)) | (((a == b) | (a_nan & b_nan)) & (i < j))
    return tl.where(better, a, b), tl.where(better, i, j)


@triton.jit
def last_maximum(a, i, b, j):
    """Running extreme with its last position, as ATen's cummax gives it; b comes after a."""
    keep = ((a > b) & (b == b)) | ((a != a) & (b == b))
    return tl.where(keep, a, b), tl.where(keep, i, j)


@triton.jit
def last_minimum(a, i, b, j):
    keep = ((a < b) & (b == b)) | ((a != a) & (b == b))
    return tl.where(keep, a, b), tl.where(keep, i, j)
