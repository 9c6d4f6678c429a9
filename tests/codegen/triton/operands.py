"""Kernels that apply one operation to operands of every kind, in every combination: a block of numbers, a number in
memory, a number that the kernel is given by value, one in its text.

Takes an operation; gives the kernel, its buffers and tensors, and what eager makes of the same operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

import torch

from fusewright.base.records import dataclass, field
from fusewright.codegen.device_kernel import DeviceKernel
from fusewright.codegen.llvm.capabilities import BOOL, FLOATS, SIGNED, UNSIGNED, supports
from fusewright.codegen.triton import operations
from fusewright.codegen.triton.module import HEADER
from fusewright.loops.ir import OPERATIONS, Axis, Buffer, Expression, Store, apply, cast, constant, load
from fusewright.schedule.plan import Kernel, Stage
from fusewright.sizes.expressions import loop_symbol
from tests.codegen.llvm.harness import kernel_of
from tests.loops import reference

COUNT = 8
KINDS = ("block", "memory", "text", "value")
FAST = ("div", "reciprocal", "exp", "log", "sigmoid", "tanh", "add")
"""Operations with another text where every float that is stored is a half."""
POSITIVE = ("pow", "log", "log2", "log10", "sqrt", "rsqrt", "acosh", "shift_left", "shift_right")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POINT = loop_symbol("o0", COUNT)
_DTYPES = [dtype for dtype in operations.TYPES if dtype.itemsize > 1 or not dtype.is_floating_point]


@dataclass(slots=True)
class Operands:
    """tensors: by buffer; expected: what each buffer that is written shall hold."""

    stores: list[Store] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    expected: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def buffer(self, name: str, tensor: torch.Tensor, device: str = "cuda:0") -> None:
        if name not in self.buffers:
            role = "output" if name.startswith("out") else "input"
            self.tensors[name] = tensor
            shape, place = tuple(tensor.shape), torch.device(device)
            self.buffers[name] = Buffer(name, shape, tensor.stride(), tensor.dtype, place, role)  # type: ignore[arg-type]

    def operand(self, kind: str, values: torch.Tensor, place: int) -> tuple[Expression, torch.Tensor]:
        """The first of the values is the number that all but a block are."""
        dtype, number = values.dtype, values[0]
        if kind == "text":
            return constant(number.item(), dtype), number
        name = f"{kind}_{place}_{str(dtype).removeprefix('torch.')}"
        self.buffer(name, values if kind == "block" else number.clone(), "cpu" if kind == "value" else "cuda:0")
        return load(name, _POINT if kind == "block" else 0, dtype), values if kind == "block" else number

    def store(self, value: Expression, expected: torch.Tensor) -> None:
        name = f"out_{str(value.dtype).removeprefix('torch.')}"
        stored = self.expected.setdefault(name, [])
        self.stores.append(Store(name, _POINT + COUNT * len(stored), value))
        stored.append(expected.expand(COUNT).to(value.dtype))

    def kernel(self) -> Kernel:
        for name, stored in self.expected.items():
            self.buffer(name, torch.zeros(COUNT * len(stored), dtype=stored[0].dtype))
        dtypes = {name: buffer.dtype for name, buffer in self.buffers.items()}
        return kernel_of("operands", [Axis(_POINT, COUNT)], [Stage((), tuple(self.stores))], dtypes, [*self.expected])


def operands_of(op: str, kinds: Sequence[str] = KINDS, fast: bool = False) -> Operands:
    """Of each dtype that the operation is supported for. fast: its float results are stored as halves."""
    made = Operands()
    for dtype in [torch.float32] if fast else _DTYPES:
        if not supports(op, dtype) or (op in ("floor", "ceil", "round", "trunc") and dtype not in FLOATS):
            continue
        dtypes = [torch.bool, dtype, dtype] if op == "where" else [dtype] * OPERATIONS[op]
        values = [_sample(op, place, dtype) for place, dtype in enumerate(dtypes)]
        targets = {"cast": _DTYPES, "bitcast": [BITS[dtype.itemsize]]}.get(op, [dtype])
        for combination in itertools.product(kinds, repeat=len(dtypes)):
            if "value" in combination and len({*combination, "block"}) > 2:
                continue  # by then it is as one in memory
            expressions, tensors = zip(*map(made.operand, combination, values, range(3)))
            for target in targets:
                result = torch.bool if op in reference.PREDICATES else target
                value = apply(op, *expressions, dtype=result)
                expected = _eager(op, tensors, target)
                made.store(cast(value, torch.float16) if fast else value, expected)
    return made


def _sample(op: str, place: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.tensor([3, 1, 5, 2, 7, 4, 2, 6]).roll(place)
    if dtype in BOOL:
        return values > 3
    if dtype not in UNSIGNED and op not in POSITIVE:
        values = values * torch.tensor([-1, 1]).repeat(COUNT // 2)
    return values.to(dtype) / 8 if dtype.is_floating_point and op != "acosh" else values.to(dtype)


def _eager(op: str, tensors: Sequence[torch.Tensor], target: torch.dtype) -> torch.Tensor:
    """Of integers in 64 bits, which PyTorch has every operation for; the low bits are those of a narrower result."""
    if op == "cast":
        return tensors[0].to(target)
    if op == "bitcast":
        return tensors[0].view(target)
    if op in ("add", "mul", "minimum", "maximum") and target in BOOL:
        op = "logical_or" if op in ("add", "maximum") else "logical_and"
    wide = [one.to(torch.int64) if not one.is_floating_point() and one.dtype not in BOOL else one for one in tensors]
    return reference.OPERATIONS[op](*wide)


# --- functions of the library that no operation calls -----------------------------------------------------------------

_INDICES = (torch.int32, torch.int64)
_MORE = (torch.float32, torch.float64, torch.int32, torch.int64)
_POSITIONS = torch.arange(COUNT, 0, -1)


def _first(better: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, i, b, j: torch.where(better(a, b) | ((a == b) & (i < j)), i, j)


def _last(better: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, i, b, j: torch.where(better(a, b), i, j)


COMBINING: dict[str, tuple[Callable[..., torch.Tensor], Collection[torch.dtype]]] = {
    "add({0}, {1})": (torch.add, _MORE),
    "multiply({0}, {1})": (torch.mul, _MORE),
    "maximum({0}, {1})": (torch.maximum, FLOATS),
    "minimum({0}, {1})": (torch.minimum, FLOATS),
    "greater({0}, {1})": (torch.maximum, SIGNED),
    "lesser({0}, {1})": (torch.minimum, SIGNED),
    "log_add_exp({0}, {1})": (torch.logaddexp, FLOATS),
    "first_maximum({0}, {1}, {2}, {3})[1]": (_first(torch.gt), _MORE),
    "first_minimum({0}, {1}, {2}, {3})[1]": (_first(torch.lt), _MORE),
    "last_maximum({0}, {1}, {2}, {3})[1]": (_last(torch.gt), _MORE),
    "last_minimum({0}, {1}, {2}, {3})[1]": (_last(torch.lt), _MORE),
    "fast_one_plus_erf({0})": (lambda x: 1 + torch.erf(x), (torch.float32,)),
    "to_e4m3({0}).to(tl.float32)": (lambda x: x.to(torch.float8_e4m3fn).to(torch.float32), (torch.float32,)),
    "to_e5m2({0}).to(tl.float32)": (lambda x: x.to(torch.float8_e5m2).to(torch.float32), (torch.float32,)),
    "floor_quotient({0}, {1})": (lambda a, b: a // b, _INDICES),
    "floor_remainder({0}, {1})": (lambda a, b: a % b, _INDICES),
    "floor_quotient_by_positive({0}, {1})": (lambda a, b: a // b, _INDICES),
    "floor_remainder_by_positive({0}, {1})": (lambda a, b: a % b, _INDICES),
}
"""Calls, with what eager has and the dtypes of their values; positions are whole numbers of 64 bits. Indices may also be
numbers in the text."""


def called(call: str) -> tuple[DeviceKernel, dict[str, torch.Tensor], list[torch.Tensor]]:
    """A kernel with this call on each of its dtypes: (its code, tensors by parameter, what `out0`, `out1`... shall hold)."""
    eager, dtypes = COMBINING[call]
    count = call.count("{")
    tensors: dict[str, torch.Tensor] = {}
    lines, results = ["i = tl.arange(0, 8)"], []
    for dtype in dtypes:
        places = range(count)
        values = [_POSITIONS if place % 2 and count == 4 else _sample("fma", place, dtype) for place in places]
        if dtype in _INDICES and count == 2:
            values[1] = values[1].abs()
        out = f"out{len(results)}"
        results.append([])
        for place, value in enumerate(values):
            tensors[f"in{place}_{out}"] = value
        for kinds in itertools.product(("block", "memory", *(("text",) if eager in _OF_INDICES else ())), repeat=count):
            texts = {"block": "tl.load({} + i)", "memory": "tl.load({})"}
            operands = [
                str(values[place][0].item()) if kind == "text" else texts[kind].format(f"in{place}_{out}")
                for place, kind in enumerate(kinds)
            ]
            if {*kinds} == {"text"}:
                continue
            number = len(results[-1])
            lines.append(f"tl.store({out} + {number * COUNT} + i, lib.{call.format(*operands)})")
            given = [value if kind == "block" else value[0] for value, kind in zip(values, kinds)]
            results[-1].append(eager(*given).expand(COUNT))
        tensors[out] = torch.zeros(COUNT * len(results[-1]), dtype=results[-1][0].dtype)
    signature = tuple(f"*{operations.TYPES[one.dtype]}" for one in tensors.values())
    body = "".join(f"    {line}\n" for line in lines)
    text = f"{HEADER}\n\n@triton.jit\ndef called({', '.join(tensors)}):\n{body}"
    code = DeviceKernel(
        "called", call, "called", text, signature, (), tuple(tensors), frozenset(), (), (), 1, 1, 1, False
    )
    return code, tensors, [torch.cat(one) for one in results]


_OF_INDICES = [eager for eager, dtypes in COMBINING.values() if dtypes is _INDICES]
