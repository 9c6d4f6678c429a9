"""A compiled graph as bytes, for the disk cache and for export.

Takes a `CallPlan` or a `CompiledGraph` (plan, machine code, what is told about the kernels); gives bytes, and the same
back from them. The format is a tagged binary tree: one byte for the kind of a value, then its content; integers are
variable-length. Operators are stored by name and looked up again.
Always holds: reading executes nothing that the bytes name except the lookup of a registered operator: no pickle, no
eval. Bytes that are damaged or of another version raise ArtifactError. What has no bytes (a Python callable, an opaque
tensor) raises NotSerialisable.
"""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fusewright.base.pytorch import bytes_of, torch
from fusewright.base.records import dataclass, fields
from fusewright.codegen.call_plan_types import (
    CallPlan,
    CCall,
    Gather,
    Guarded,
    KernelCall,
    KernelGroup,
    LaunchCall,
    OutputSpec,
    PythonCall,
    SlotSpec,
    SlotStep,
)
from fusewright.graph.freezing import Prepacking, Ref, Size, Step
from fusewright.sizes.tensor_type import TensorType

MAGIC = b"FWCP"
VERSION = 6
_HEADER = struct.Struct("<4sHI")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What users can be told about a kernel. lines: positions of nodes in the graph that are put down to the source
    lines that it came from. text: the generated code, compressed by zlib."""

    name: str
    origins: tuple[str, ...]
    lines: tuple[int, ...]
    text: bytes


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """One compiled graph. code: the object file of its kernels. facts: (operator, left, right) of each relation between
    sizes that compiling relied on, sides as `sizes.to_tuples` gives them: they are guards of whoever uses the plan.
    prepacking: what computes the plan's last inputs from parameters. autotuned: (question, winner, seconds of each
    candidate, text) of what was measured for it. calls: (name, lines as a kernel's) of each library call."""

    plan: CallPlan
    code: bytes
    kernels: tuple[KernelFacts, ...]
    facts: tuple[tuple[str, Any, Any], ...]
    prepacking: Prepacking | None = None
    autotuned: tuple[tuple[str, str, tuple[tuple[str, float], ...], str], ...] = ()
    calls: tuple[tuple[str, tuple[int, ...]], ...] = ()


_RECORDS: tuple[type, ...] = (
    CallPlan, SlotSpec, KernelCall, CCall, PythonCall, SlotStep, Gather, OutputSpec, KernelFacts, CompiledGraph,
    KernelGroup,
    LaunchCall, Prepacking, Step, Ref, TensorType, Size, Guarded,
)  # fmt: skip
_FIELDS: tuple[tuple[str, ...], ...] = tuple(tuple(field.name for field in fields(kind)) for kind in _RECORDS)
_RECORD_NUMBERS: dict[type, tuple[int, tuple[str, ...]]] = {kind: (i, _FIELDS[i]) for i, kind in enumerate(_RECORDS)}
Record = TypeVar("Record")
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class NotSerialisable(TypeError):
    """The plan holds something that cannot be written: a Python callable, or a tensor without plain memory."""


class ArtifactError(ValueError):
    """The bytes are not a call plan of this version."""


def dump(value: CallPlan | CompiledGraph) -> bytes:
    """The value as bytes, its constant tensors included. Raises NotSerialisable."""
    out = bytearray()
    _write(out, value)
    return _HEADER.pack(MAGIC, VERSION, zlib.crc32(out)) + bytes(out)


def load_plan(data: bytes) -> CallPlan:
    """The plan that `dump` wrote. Raises ArtifactError."""
    return _load(data, CallPlan)


def load_graph(data: bytes) -> CompiledGraph:
    """The compiled graph that `dump` wrote. Raises ArtifactError."""
    return _load(data, CompiledGraph)


def _load(data: bytes, kind: type[Record]) -> Record:
    if len(data) < _HEADER.size:
        raise ArtifactError("too short for a call plan")
    magic, version, checksum = _HEADER.unpack_from(data)
    body = data[_HEADER.size :]
    if magic != MAGIC or version != VERSION or zlib.crc32(body) != checksum:
        raise ArtifactError("not a call plan of this version, or damaged")
    reader = _Reader(body)
    try:
        value = reader.value()
    except (IndexError, KeyError, AttributeError, TypeError, UnicodeDecodeError, struct.error, RuntimeError) as error:
        raise ArtifactError(f"a call plan that does not make sense: {error}") from error
    if not isinstance(value, kind) or reader.position != len(body):
        raise ArtifactError(f"not a {kind.__name__}")
    return value


# --- GPUs ------------------------------------------------------------------------------------------------------------


def on_gpus(value: Record, numbers: Mapping[int, int]) -> Record:
    """A plan, or a compiled graph, that does on GPU `numbers[k]` what the given one does on GPU k. Raises ArtifactError
    for one that uses another GPU."""
    if all(number == moved for number, moved in numbers.items()):
        return value
    try:
        made: Record = _moved(value, numbers)
    except KeyError as error:
        raise ArtifactError(f"a call plan for GPU {error}, of {list(numbers)}") from error
    return made


def _moved(value: Any, numbers: Mapping[int, int]) -> Any:
    if isinstance(value, torch.device):
        numbered = value.type == "cuda" and value.index is not None
        return torch.device("cuda", numbers[value.index]) if numbered else value
    if isinstance(value, (tuple, list)):
        items = (_moved(one, numbers) for one in value)
        return type(value)(items) if type(value) in (tuple, list) else value
    if isinstance(value, dict):
        return {key: _moved(one, numbers) for key, one in value.items()}
    if type(value) not in _RECORD_NUMBERS:
        return value
    _, names = _RECORD_NUMBERS[type(value)]
    parts = {name: _moved(getattr(value, name), numbers) for name in names}
    if isinstance(value, SlotSpec) and value.device == "cuda" and value.device_index >= 0:
        parts["device_index"] = numbers[value.device_index]
    elif isinstance(value, LaunchCall):
        parts["device"] = numbers[value.device]
    return type(value)(**parts)


# --- writing ---------------------------------------------------------------------------------------------------------


def _write_unsigned(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_bytes(out: bytearray, data: bytes) -> None:
    _write_unsigned(out, len(data))
    out += data


def _write_integer(out: bytearray, value: int) -> None:
    _write_unsigned(out, value << 1 if value >= 0 else (-value << 1) - 1)


def _write_text(out: bytearray, value: str) -> None:
    _write_bytes(out, value.encode())


def _write_items(out: bytearray, items: Any) -> None:
    _write_unsigned(out, len(items))
    for item in items:
        if type(item) is int and 0 <= item < 64:  # most of what a plan holds
            out += _SMALL[item]
        else:
            _write(out, item)


def _write_torch_constant(out: bytearray, value: Any) -> None:
    _write_text(out, str(value).removeprefix("torch."))


def _write_operator(out: bytearray, value: torch._ops.OpOverload) -> None:
    _write_text(out, value._schema.name)
    _write_text(out, value._overloadname)


def _write_tensor(out: bytearray, value: torch.Tensor) -> None:
    if (
        type(value) not in (torch.Tensor, torch.nn.Parameter)
        or value.layout is not torch.strided
        or value.device.type != "cpu"
    ):
        raise NotSerialisable(f"a constant {type(value).__name__} of layout {value.layout} on {value.device}")
    _write(out, value.dtype)
    _write(out, tuple(value.shape))
    _write(out, tuple(value.stride()))
    _write_bytes(out, bytes_of(value))


def _write_record(out: bytearray, value: Any) -> None:
    number, names = _RECORD_NUMBERS[type(value)]
    _write_unsigned(out, number)
    for name in names:
        item = getattr(value, name)
        if type(item) is int and 0 <= item < 64:
            out += _SMALL[item]
        else:
            _write(out, item)


_WRITERS: dict[type, tuple[bytes, Callable[[bytearray, Any], None]]] = {
    type(None): (b"N", lambda out, value: None),
    bool: (b"B", lambda out, value: out.append(value)),
    int: (b"I", _write_integer),
    float: (b"F", lambda out, value: out.extend(struct.pack("<d", value))),
    complex: (b"C", lambda out, value: out.extend(struct.pack("<dd", value.real, value.imag))),
    str: (b"S", _write_text),
    bytes: (b"Y", _write_bytes),
    tuple: (b"T", _write_items),
    list: (b"L", _write_items),
    torch.device: (b"D", lambda out, value: _write_text(out, str(value))),
    torch._ops.OpOverload: (b"O", _write_operator),
    torch.Tensor: (b"X", _write_tensor),
    torch.nn.Parameter: (b"X", _write_tensor),
    **dict.fromkeys(_TORCH_CONSTANTS, (b"K", _write_torch_constant)),
    **dict.fromkeys(_RECORDS, (b"R", _write_record)),
}


_SMALL = tuple(b"I" + bytes([number << 1]) for number in range(64))
"""What `_write` comes to for a small number."""


def _write(out: bytearray, value: Any) -> None:
    row = _WRITERS.get(type(value))
    if row is None:
        raise NotSerialisable(f"{value!r} of type {type(value).__name__}")
    tag, write = row
    out += tag
    write(out, value)


# --- reading ---------------------------------------------------------------------------------------------------------


OWN_OPERATORS = (
    "decompositions.recurrent",
    "generator_states",
    "host_draws",
    "known_sizes",
    "numpy_calls",
    "philox",
    "subgraphs",
)
"""The modules of `fusewright.operators` that register operators which a file may hold."""


def is_registered(name: str, overload: str) -> bool:
    """Whether there is a kernel for the operator `namespace::name`. Those of this library's own are registered when
    their modules are imported: here, if no capture has done so."""
    qualified = name if overload in ("", "default") else f"{name}.{overload}"
    found = bool(torch._C._dispatch_has_kernel(qualified))
    if not found and name.startswith("fusewright::"):
        for module in OWN_OPERATORS:
            importlib.import_module(f"fusewright.operators.{module}")
        found = bool(torch._C._dispatch_has_kernel(qualified))
    return found


def find_operator(name: str, overload: str) -> torch._ops.OpOverload:
    """The registered operator `namespace::name`, overload `overload`. Raises AttributeError when there is none."""
    is_registered(name, overload)
    namespace, _, operator = name.partition("::")
    found = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise AttributeError(f"{name}.{overload} is no operator")
    return found


class _Reader:
    __slots__ = ("data", "operators", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.operators: dict[tuple[str, str], torch._ops.OpOverload] = {}

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise IndexError("the data ends too early")
        part = self.data[self.position : end]
        self.position = end
        return part

    def byte(self) -> int:
        found = self.data[self.position]
        self.position += 1
        return found

    def unsigned(self) -> int:
        result = self.byte()
        if result < 0x80:  # nearly always
            return result
        result &= 0x7F
        shift = 7
        while True:
            byte = self.byte()
            result |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return result

    def integer(self) -> int:
        coded = self.unsigned()
        return coded >> 1 if coded & 1 == 0 else -((coded + 1) >> 1)

    def bytes(self) -> bytes:
        return self.take(self.unsigned())

    def text(self) -> str:
        return self.take(self.unsigned()).decode()

    def items(self) -> list[Any]:
        return [self.value() for _ in range(self.unsigned())]

    def float(self) -> float:
        return struct.unpack("<d", self.take(8))[0]

    def complex(self) -> complex:
        return complex(*struct.unpack("<dd", self.take(16)))

    def torch_constant(self) -> Any:
        found = getattr(torch, self.text())
        if not isinstance(found, _TORCH_CONSTANTS):
            raise TypeError(f"{found!r} is no dtype, layout or memory format")
        return found

    def operator(self) -> torch._ops.OpOverload:
        names = self.text(), self.text()
        if names not in self.operators:
            self.operators[names] = find_operator(*names)
        return self.operators[names]

    def tensor(self) -> torch.Tensor:
        dtype, shape, stride = self.value(), self.value(), self.value()
        data = self.bytes()
        made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        if data:
            made.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape))
        return made

    def record(self) -> Any:
        number = self.unsigned()
        return _RECORDS[number](*[self.value() for _ in _FIELDS[number]])

    def value(self) -> Any:
        return _READERS[self.byte()](self)


_READERS: dict[int, Callable[[_Reader], Any]] = {
    ord(tag): read
    for tag, read in {
        "N": lambda reader: None,
        "B": lambda reader: bool(reader.byte()),
        "I": _Reader.integer,
        "F": _Reader.float,
        "C": _Reader.complex,
        "S": _Reader.text,
        "Y": _Reader.bytes,
        "T": lambda reader: tuple(reader.items()),
        "L": _Reader.items,
        "D": lambda reader: torch.device(reader.text()),
        "O": _Reader.operator,
        "X": _Reader.tensor,
        "K": _Reader.torch_constant,
        "R": _Reader.record,
    }.items()
}
