"""Which elementwise operations can be generated for which dtype: pure data, for lowering to ask before it makes an
`Apply`.

Takes an operation's name (loops/ir.py OPERATIONS) and the dtype of its first value argument (of `where`: the dtype of
the chosen values; of `cast`: the source); gives yes or no. Always holds: what is said to be supported is generated, and
agrees with eager.
"""

from __future__ import annotations

import torch

FLOATS = frozenset({torch.float32, torch.float64})
HALVES = frozenset({torch.bfloat16, torch.float16})
SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64})
INTEGERS = SIGNED | UNSIGNED
BOOL = frozenset({torch.bool})
_NUMBERS = FLOATS | INTEGERS
_ALL = _NUMBERS | HALVES | BOOL

SUPPORTED: dict[str, frozenset[torch.dtype]] = {
    **dict.fromkeys(("add", "mul", "minimum", "maximum"), _NUMBERS | BOOL),
    **dict.fromkeys(("sub", "neg", "abs", "sign"), _NUMBERS),
    **dict.fromkeys(("fmin", "fmax"), _NUMBERS),
    "div": FLOATS,
    **dict.fromkeys(("floor_divide", "trunc_divide", "remainder", "fmod"), _NUMBERS),
    "pow": _NUMBERS,
    "fma": FLOATS,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _NUMBERS | BOOL),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor", "logical_not"), BOOL),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), INTEGERS | BOOL),
    **dict.fromkeys(("shift_left", "shift_right"), INTEGERS),
    **dict.fromkeys(("where", "cast"), _ALL),
    "bitcast": _NUMBERS | HALVES,
    **dict.fromkeys(
        (
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos",
            "tan", "asin", "acos",
            "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv",
            "lgamma", "digamma",
            "frac", "copysign", "hypot", "nextafter",
        ),
        FLOATS,
    ),
    **dict.fromkeys(("floor", "ceil", "round", "trunc", "isnan", "isinf", "isfinite", "signbit"), _NUMBERS),
}  # fmt: skip


def supports(op: str, dtype: torch.dtype) -> bool:
    """Whether `op` can be generated for values of `dtype`. Raises KeyError for an operation that the loop IR does not
    have."""
    return dtype in SUPPORTED[op]
