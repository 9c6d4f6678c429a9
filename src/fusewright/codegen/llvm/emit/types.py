"""How each torch dtype is held in memory and in registers, and the LLVM spelling of both.

Takes torch dtypes; gives `ElementType` rows. Always holds: a bool is i8 (0 or 1) in memory and i1 in registers; a
bfloat16 is its 16 bits (i16) in memory and in registers, because only conversions touch it.
"""

from __future__ import annotations

import struct
from functools import cache

import torch

from fusewright.base.records import dataclass


@dataclass(frozen=True, slots=True)
class ElementType:
    """memory/register: LLVM scalar types. size: bytes in memory. kind: float, int (see `signed`), bool or half
    (converted before arithmetic).
    """

    memory: str
    register: str
    size: int
    kind: str
    signed: bool = True


ELEMENT_TYPES: dict[torch.dtype, ElementType] = {
    torch.float32: ElementType("float", "float", 4, "float"),
    torch.float64: ElementType("double", "double", 8, "float"),
    torch.bfloat16: ElementType("i16", "i16", 2, "half"),
    torch.float16: ElementType("half", "half", 2, "half"),
    torch.int8: ElementType("i8", "i8", 1, "int"),
    torch.int16: ElementType("i16", "i16", 2, "int"),
    torch.int32: ElementType("i32", "i32", 4, "int"),
    torch.int64: ElementType("i64", "i64", 8, "int"),
    torch.uint8: ElementType("i8", "i8", 1, "int", signed=False),
    torch.uint16: ElementType("i16", "i16", 2, "int", signed=False),
    torch.uint32: ElementType("i32", "i32", 4, "int", signed=False),
    torch.uint64: ElementType("i64", "i64", 8, "int", signed=False),
    torch.bool: ElementType("i8", "i1", 1, "bool"),
}

TYPE_BITS: dict[str, int] = {
    "float": 32,
    "double": 64,
    "half": 16,
    "i1": 1,
    "i8": 8,
    "i16": 16,
    "i32": 32,
    "i64": 64,
    "ptr": 64,
}
INTEGER_OF: dict[str, str] = {"float": "i32", "double": "i64", "half": "i16"}
SUFFIXES: dict[str, str] = {"float": "f32", "double": "f64", "half": "f16", "ptr": "p0"}


@cache
def type_text(scalar: str, lanes: int) -> str:
    """The LLVM type of `lanes` elements; one lane is a scalar."""
    return scalar if lanes == 1 else f"<{lanes} x {scalar}>"


@cache
def suffix(scalar: str, lanes: int) -> str:
    """The type's spelling inside an intrinsic's name: v16f32, f32, i64."""
    name = SUFFIXES.get(scalar, scalar)
    return name if lanes == 1 else f"v{lanes}{name}"


def float_literal(value: float, scalar: str) -> str:
    """LLVM's exact spelling: the bits of the double that equals the (rounded) value."""
    if scalar == "float":
        value = _to_float32(value)
    elif scalar == "half":
        return "0xH" + struct.pack(">e", value).hex().upper()
    return "0x" + struct.pack(">d", value).hex().upper()


def _to_float32(value: float) -> float:
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:  # beyond the largest float32: rounds to infinity, as a C cast does
        return float("inf") if value > 0 else float("-inf")


def int_literal(value: int, scalar: str) -> str:
    """Two's complement wrap-around into the type's width."""
    bits = TYPE_BITS[scalar]
    if bits == 1:
        return "true" if value else "false"
    wrapped = value & ((1 << bits) - 1)
    return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)


def literal(value: bool | int | float, scalar: str) -> str:
    if scalar in SUFFIXES:
        return float_literal(float(value), scalar)
    return int_literal(int(value), scalar)
