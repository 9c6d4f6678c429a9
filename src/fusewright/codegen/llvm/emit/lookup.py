"""Odd functions that reach 1: a polynomial for each of 16 pieces, its coefficients taken from registers by a
permutation.

Takes a builder and a vector of 16 floats of a processor that permutes 16 floats in one instruction (AVX-512); gives the
value, half the instructions of what math.py writes for others. Always holds: at most 2 ulp from the correctly rounded
result, signs and NaN kept.

The pieces are centred on multiples of a width w, the last one holds 1 and all that is beyond. The number of a piece is
the low bits of |x| / w rounded by addition; the distance from its centre is exact. The polynomials are ours: weighted
least squares on Chebyshev nodes, coefficients rounded to float32 one at a time from the lowest, the rest refitted; odd
around 0.
"""

from __future__ import annotations

from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.types import float_literal

LANES = 16
_ROUND = 12582912.0  # 1.5 * 2^23
_PERMUTE = "llvm.x86.avx512.permvar.sf.512"
# Few bits, so that multiples are exact in float32; 14.5 times the width is where the function rounds to 1.
_ERF_WIDTH, _TANH_WIDTH = 139 / 512, 0.625
# [power of the distance][piece]
_ERF = (
    (
        0.0, 0.29897475, 0.55743784, 0.7506011, 0.8753997, 0.9451022, 0.97875607, 0.9928023,
        0.9978701, 0.99945056, 0.9998767, 0.9999759, 0.99999595, 0.9999994, 0.99999994, 1.0,
    ),
    (
        1.1283791, 1.0482043, 0.8402695, 0.5812632, 0.34698352, 0.17874198, 0.079455875, 0.030479455,
        0.010089511, 0.0028821384, 0.00071046303, 0.00015112979, 2.7742199e-05, 4.3945465e-06, 6.0071716e-07, 0.0,
    ),
    (
        0.0, -0.28456038, -0.45623705, -0.47340915, -0.37680843, -0.24262887, -0.12942411, -0.05791855,
        -0.021909421, -0.0070364946, -0.0019348159, -0.00044995017, -9.6270414e-05, -1.6382979e-05, -5.955223e-06, 0.0,
    ),
    (
        -0.37610927, -0.29790518, -0.11498182, 0.06328737, 0.15712386, 0.15998824, 0.114066295, 0.063225806,
        0.028365739, 0.010510133, 0.0032538886, 0.0008480331, 0.0001869938, 3.501181e-05, 5.5812616e-06, 0.0,
    ),
    (
        0.0, 0.13400564, 0.18223348, 0.13156666, 0.040789824, -0.027252318, -0.04957172, -0.040892184,
        -0.023705844, -0.010793688, -0.0035481076, -0.0011906223, -2.3742872e-05, -2.0025416e-05, 0.00014926722, 0.0,
    ),
    (
        0.11157693, 0.074771956, -0.0033856775, -0.061354443, -0.064227864, -0.033091974, -0.002042147, 0.011864623,
        0.0118572125, 0.0071127545, 0.0031442905, 0.001091754, 0.00030701642, 7.109627e-05, 1.37035895e-05, 0.0,
    ),
)  # fmt: skip
_TANH = (
    (
        0.0, 0.5545997, 0.84828365, 0.95404524, 0.9866143, 0.99614656, 0.99889445, 0.99968314,
        0.9999092, 0.999974, 0.99999255, 0.99999785, 0.9999994, 0.9999998, 0.99999994, 1.0,
    ),
    (
        1.0, 0.6924191, 0.28041485, 0.08979764, 0.026592227, 0.00769209, 0.0022098923, 0.00063364446,
        0.00018158324, 5.202784e-05, 1.4906502e-05, 4.270807e-06, 1.2236086e-06, 3.5056988e-07, 1.0043996e-07, 0.0,
    ),
    (
        0.0, -0.38401446, -0.23787223, -0.08566894, -0.026235342, -0.0076648286, -0.0022082955, -0.0006346027,
        -0.00018302992, -5.420775e-05, -1.51273725e-05, -3.4221582e-06, -2.5142463e-06, -6.153334e-08, 6.6819786e-07,
        0.0,
    ),
    (
        -0.33332977, -0.017829727, 0.10831211, 0.05180171, 0.01702101, 0.005068861, 0.0014683788, 0.00042202813,
        0.000121022065, 3.4682238e-05, 9.9374365e-06, 2.8471816e-06, 8.157333e-07, 2.3371263e-07, 6.695996e-08, 0.0,
    ),
    (
        0.0, 0.13790107, -0.0125624025, -0.020911023, -0.008067057, -0.0024463828, -0.00071356556, -0.0001870012,
        -3.0525498e-05, 2.7325103e-05, -4.434258e-07, -1.8800145e-05, 2.6019152e-05, -6.0351313e-06, -1.5772031e-05,
        0.0,
    ),
    (
        0.13311349, -0.05512482, -0.019231606, 0.0046300525, 0.0028573067, 0.0009675416, 0.00028976589, 8.408591e-05,
        2.418656e-05, 6.9396337e-06, 1.9873996e-06, 5.6945987e-07, 1.6322278e-07, 4.6748568e-08, 1.3390937e-08, 0.0,
    ),
    (
        0.0, -0.024467839, 0.014922029, 0.0009858141, -0.0006015126, -0.00058895827, -0.0001972581, -0.00016704517,
        -0.00018341512, -0.0002636303, -2.7141617e-05, 0.00010146587, -0.00015465978, 3.4607714e-05, 9.2070084e-05, 0.0,
    ),
    (
        -0.05005338, 0.028627092, -0.004249893, -0.0011892719, 7.566704e-05, 7.082837e-05, 2.6301286e-05, 7.917852e-06,
        2.2586537e-06, 6.3374944e-07, 1.9007315e-07, 5.45159e-08, 1.52109e-08, 4.455101e-09, 1.292325e-09, 0.0,
    ),
)  # fmt: skip


def applies(b: FunctionBuilder, x: Value) -> bool:
    return b.target.x86 and b.target.masks and x.lanes == LANES and x.type == "float"


def erf(b: FunctionBuilder, x: Value) -> Value:
    """The first two terms are added apart: 2 / sqrt(pi) lies between two floats, and one rounding less keeps the result
    within 2 ulp."""
    index, r = _piece(b, x, _ERF_WIDTH)
    rest = _polynomial(b, index, r, _ERF[2:])
    line = _polynomial(b, index, r, _ERF[:2])
    return b.intrinsic("copysign", b.fma(b.op("fmul", r, r), rest, line), x)


def tanh(b: FunctionBuilder, x: Value) -> Value:
    index, r = _piece(b, x, _TANH_WIDTH)
    return b.intrinsic("copysign", _polynomial(b, index, r, _TANH), x)


def _piece(b: FunctionBuilder, x: Value, width: float) -> tuple[Value, Value]:
    """(integers whose low four bits are the number of the piece that |x| is in, |x| less the piece's centre; NaN for
    NaN)."""
    a = b.intrinsic("fabs", x)
    last = b.constant_like((LANES - 1) * width, x)
    a = b.select(b.compare("fcmp olt", last, a), last, a)
    magic = b.constant_like(_ROUND, x)
    t = b.fma(a, b.constant_like(1 / width, x), magic)
    r = b.fma(b.op("fsub", t, magic), b.constant_like(-width, x), a)
    return b.convert("bitcast", t, "i32"), r


def _polynomial(b: FunctionBuilder, index: Value, r: Value, table: tuple[tuple[float, ...], ...]) -> Value:
    result = _pick(b, index, table[-1])
    for row in reversed(table[:-1]):
        result = b.fma(result, r, _pick(b, index, row))
    return result


def _pick(b: FunctionBuilder, index: Value, row: tuple[float, ...]) -> Value:
    values = Value("<" + ", ".join(f"float {float_literal(v, 'float')}" for v in row) + ">", "float", LANES)
    return b.call(_PERMUTE, [values, index], "float", LANES)
