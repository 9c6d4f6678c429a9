"""Arguments of a library operator as a call plan passes them: to its C function where it has one, to its Python object
otherwise.

Takes an `Extern` and a `Places` that gives slots and value entries; gives the steps of the call.
Always holds: what a row of loops/externs.py cannot express for these arguments (an argument class without an encoding,
a tensor that is on several devices, integer arithmetic with a C function that takes doubles) goes through Python, which
expresses everything.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.torch_version import TorchVersion

from fusewright.base.records import dataclass, replace
from fusewright.codegen.call_plan_types import CCall, Gather, PythonCall, StepSpec
from fusewright.loops.externs import (
    CLASSES,
    OF_A_NEW_TENSOR,
    ExternRow,
    may_keep_arguments,
    references,
    row_of,
    schema_name,
)
from fusewright.loops.ir import BufferRef, Extern
from fusewright.sizes.expressions import Dim, Expr

MAX_INTEGERS = 24
MAX_DOUBLES = 6
# Before PyTorch 2.13 its C functions read an optional list of sizes (a SymInt[]?) after they have freed it
# (pointer_to_optional_list in torch/csrc/inductor/aoti_torch/utils.h): wrong results, or the process ends.
_FREES_SIZES = TorchVersion(torch.__version__) < "2.13"


class Places(Protocol):
    """What the builder of a call plan offers to the encoding of arguments."""

    def tensor(self, ref: BufferRef) -> int: ...  # the slot of a tensor argument
    def result(self, buffer: str | None) -> int: ...  # the slot of a result; a slot of its own when nobody reads it
    def out(self, buffer: str) -> int: ...  # the slot of a tensor to write into
    def aliases(self, n: int) -> int: ...  # the first of n new consecutive slots
    def entry(self, dim: Dim) -> int: ...  # a value entry
    def run(self, dims: Sequence[Dim]) -> int: ...  # the first of consecutive value entries
    def is_temporary(self, slot: int) -> bool: ...  # whether the slot's memory is reused after its last reader


class Inexpressible(Exception):
    """The C function cannot be called with these arguments."""


@dataclass(slots=True)
class Encoding:
    """The arguments of one C call, in order."""

    places: Places
    before: list[StepSpec]
    integers: list[tuple[str, int | bytes]]
    doubles: list[float]

    def integer(self, value: Any) -> None:
        if isinstance(value, Expr):
            self.integers.append(("value", self.places.entry(value)))
        elif isinstance(value, int):
            self.integers.append(("immediate", int(value)))
        else:
            raise Inexpressible

    def null(self) -> None:
        self.integers.append(("immediate", 0))

    def packed(self, layout: str, *values: Any) -> None:
        self.integers.append(("bytes", struct.pack(layout, *values)))


def _tensor(e: Encoding, value: Any) -> None:
    if not isinstance(value, BufferRef):
        raise Inexpressible
    e.integers.append(("handle", e.places.tensor(value)))


def _optional_tensor(e: Encoding, value: Any) -> None:
    if value is None:
        e.null()
    elif isinstance(value, BufferRef):
        e.integers.append(("handles", e.places.tensor(value)))
    else:
        raise Inexpressible


def _tensor_list(e: Encoding, value: Any) -> None:
    if not value or not all(isinstance(item, BufferRef) for item in value):
        raise Inexpressible
    sources = tuple(e.places.tensor(item) for item in value)
    first = e.places.aliases(len(sources))
    e.before.append(Gather(first, sources))
    e.integers.append(("handles", first))
    e.integer(len(sources))


def _int(e: Encoding, value: Any) -> None:
    e.integer(value)


def _optional_int(e: Encoding, value: Any) -> None:
    if value is None:
        e.null()
    else:
        e.integers.append(("values", e.places.entry(_dim(value))))


def _dim(value: Any) -> Dim:
    if not isinstance(value, (int, Expr)):
        raise Inexpressible
    return value


def _int_list(e: Encoding, value: Any) -> None:
    _dims(e, value, "values")


def _optional_int_list(e: Encoding, value: Any) -> None:
    if value is None:
        e.null()
        e.null()
    else:
        _dims(e, value, "pointer to values")


def _dims(e: Encoding, value: Any, kind: str) -> None:
    if not isinstance(value, (tuple, list)):
        raise Inexpressible
    dims = [_dim(item) for item in value]
    e.integers.append((kind, e.places.run(dims)))
    e.integer(len(dims))


def _bool(e: Encoding, value: Any) -> None:
    e.integer(bool(value))


def _optional_bool(e: Encoding, value: Any) -> None:
    e.null() if value is None else e.packed("=i", bool(value))


def _bool_list(e: Encoding, value: Any) -> None:
    e.packed(f"={len(value)}i", *(bool(item) for item in value))
    e.integer(len(value))


def _float(e: Encoding, value: Any) -> None:
    if not isinstance(value, (int, float)):
        raise Inexpressible
    e.doubles.append(float(value))


def _optional_float(e: Encoding, value: Any) -> None:
    if value is None:
        e.null()
    elif isinstance(value, (int, float)):
        e.packed("=d", float(value))
    else:
        raise Inexpressible


def _empty_list(e: Encoding, value: Any) -> None:
    if value:
        raise Inexpressible
    e.null()
    e.null()


def _string(e: Encoding, value: Any) -> None:
    e.integers.append(("bytes", str(value).encode() + b"\0"))


def _optional_string(e: Encoding, value: Any) -> None:
    if value is None:
        e.null()
    else:
        e.integers.append(("pointer to bytes", str(value).encode() + b"\0"))


def _none(e: Encoding, value: Any) -> None:
    if value is not None:
        raise Inexpressible
    e.null()


_ENCODERS: dict[str, Callable[[Encoding, Any], None]] = {
    "tensor": _tensor,
    "optional tensor": _optional_tensor,
    "tensor list": _tensor_list,
    "int": _int,
    "optional int": _optional_int,
    "int list": _int_list,
    "optional int list": _optional_int_list,
    "bool": _bool,
    "optional bool": _optional_bool,
    "bool list": _bool_list,
    "float": _float,
    "scalar": _float,
    "optional float": _optional_float,
    "empty list": _empty_list,
    "string": _string,
    "optional string": _optional_string,
    "none": _none,
}


def _bound_arguments(extern: Extern) -> list[tuple[str, Any]]:
    """(class, value) of every argument of the schema (or of its out= form's), defaults filled in."""
    keywords = dict(extern.kwargs)
    bound: list[tuple[str, Any]] = []
    for position, argument in enumerate(extern.target._schema.arguments):
        if extern.placement == "out" and argument.name in OF_A_NEW_TENSOR:
            continue
        if position < len(extern.args):
            value = extern.args[position]
        elif argument.name in keywords:
            value = keywords[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise Inexpressible
        name = CLASSES.get(str(argument.real_type))
        freed = _FREES_SIZES and name == "optional int list" and value is not None
        if name is None or (freed and f"SymInt[]? {argument.name}" in str(extern.target._schema)):
            raise Inexpressible
        bound.append((name, value))
    return bound


def _c_call(extern: Extern, row: ExternRow, places: Places, devices: set[str]) -> list[StepSpec]:
    kinds = [str(result.type) for result in extern.target._schema.returns]
    if len(devices) != 1 or any(kind not in ("Tensor", "int", "SymInt") for kind in kinds):
        raise Inexpressible
    if row.placement != extern.placement or len(extern.outputs) != len(extern.target._schema.returns):
        raise Inexpressible
    arguments = _bound_arguments(extern)
    refs = references((extern.args, extern.kwargs))
    if any(name == "scalar" for name, _ in arguments) and not all(ref.dtype.is_floating_point for ref in refs):
        raise Inexpressible
    encoding = Encoding(places, [], [], [])
    if row.placement == "out":
        (buffer,) = extern.outputs
        if buffer is None:
            raise Inexpressible
        encoding.integers.append(("handle", places.out(buffer)))
    for name, value in arguments:
        _ENCODERS[name](encoding, value)
    if row.placement == "returned":
        for kind, buffer in zip(kinds, extern.outputs, strict=True):
            if kind == "Tensor":
                encoding.integers.append(("result", places.result(buffer)))
            elif buffer is None:
                encoding.integers.append(("scratch", 0))
            else:
                raise Inexpressible
    if len(encoding.integers) > MAX_INTEGERS or len(encoding.doubles) > MAX_DOUBLES:
        raise Inexpressible
    name = schema_name(extern.target) or extern.name
    return [*encoding.before, CCall(name, row.symbol, tuple(encoding.integers), tuple(encoding.doubles), extern.name)]


def _on_device(row: ExternRow, devices: set[str]) -> ExternRow | None:
    """The row for the device type of all tensors: PyTorch names the C functions of its CPU and CUDA operators alike."""
    if devices == {"cpu"}:
        return row if "_torch_cpu_" in row.symbol else None
    return replace(row, symbol=row.symbol.replace("_torch_cpu_", "_torch_cuda_")) if devices == {"cuda"} else None


def _is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_constant(item) for item in value)
    return not isinstance(value, (BufferRef, Expr))


def _plain(value: Any, as_list: bool) -> Any:
    if isinstance(value, (tuple, list)):
        items = [_plain(item, as_list) for item in value]
        return items if as_list else tuple(items)
    return value


@dataclass(slots=True)
class _Postfix:
    places: Places
    as_list: bool
    private: bool
    written: frozenset[str]
    program: list[tuple[str, int]]
    constants: list[Any]

    def push(self, value: Any) -> None:
        if isinstance(value, BufferRef):
            slot = self.places.tensor(value)
            private = self.private and value.buffer not in self.written and self.places.is_temporary(slot)
            self.program.append(("private tensor" if private else "tensor", slot))
        elif isinstance(value, Expr):
            self.program.append(("value", self.places.entry(value)))
        elif _is_constant(value):
            self.program.append(("constant", len(self.constants)))
            self.constants.append(_plain(value, self.as_list))
        else:
            for item in value:
                self.push(item)
            self.program.append(("list" if self.as_list else "tuple", len(value)))


def _python_call(extern: Extern, places: Places) -> list[StepSpec]:
    target = extern.target
    operator = isinstance(target, torch._ops.OpOverload)
    private = may_keep_arguments(target) and not (operator and extern.keeps)
    postfix = _Postfix(places, operator, private, frozenset(extern.mutates), [], [])
    for value in extern.args:
        postfix.push(value)
    out = extern.placement == "out"
    keywords = [name for name, _ in extern.kwargs if not (out and name in OF_A_NEW_TENSOR)]
    for name, value in extern.kwargs:
        if name in keywords:
            postfix.push(value)
    results: tuple[int, ...] = ()
    if out:
        overload = target._schema.overload_name
        target = getattr(target.overloadpacket, f"{overload}_out" if overload else "out")
        (buffer,) = extern.outputs
        assert buffer is not None
        postfix.program.append(("tensor", places.out(buffer)))
        keywords.append("out")
    else:
        results = tuple(-1 if buffer is None else places.result(buffer) for buffer in extern.outputs)
    name = schema_name(target) or str(getattr(target, "__name__", type(target).__name__))
    program, constants = tuple(postfix.program), tuple(postfix.constants)
    return [PythonCall(name, target, program, constants, tuple(keywords), results, extern.name)]


def encode_extern(
    extern: Extern, places: Places, devices: set[str], available: Callable[[str], bool]
) -> list[StepSpec]:
    """The steps that call `extern`. `devices`: device types of its buffers; `available`: whether PyTorch exports a
    function."""
    row = row_of(extern.target)
    row = None if row is None else _on_device(row, devices)
    if row is not None and available(row.symbol):
        try:
            return _c_call(extern, row, places, devices)
        except Inexpressible:
            pass
    return _python_call(extern, places)
