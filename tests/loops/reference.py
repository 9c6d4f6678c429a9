"""A reference interpreter of loop programs: slow, obvious, and strict.

Takes a `LoopProgram` and inputs; gives what the graph returns. Every loop nest is evaluated at all its points at once with torch
operators. Always holds: a load or store outside its buffer, an operation on mixed dtypes, and half-typed arithmetic are errors here, so the
tests find programs that only happen to give the right numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusewright.loops.ir import (
    Apply,
    Axis,
    BufferRef,
    CheckedIndex,
    Constant,
    Expression,
    Extern,
    IndexValue,
    Load,
    LocalValue,
    LoopProgram,
    Masked,
    Pointwise,
    Reduction,
    Scan,
    Store,
)
from fusewright.sizes.expressions import Dim, Expr, FloorDiv, Max, Min, Mod, Sum, Symbol, evaluate

Index = int | Tensor
HALF = (torch.bfloat16, torch.float16)


class OutOfRange(IndexError):
    """A CheckedIndex was out of range: the compiled kernel would set its status flag."""


def _divide(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    def divide(a: Tensor, b: Tensor) -> Tensor:
        if not a.dtype.is_floating_point and bool((b == 0).any()):
            raise ZeroDivisionError("integer division by zero in a loop")
        return torch.div(a, b, rounding_mode=mode)

    return divide


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "add sub mul div remainder fmod neg abs sign pow minimum maximum fmin fmax eq ne lt le gt ge logical_and logical_or "
            "logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not where exp exp2 expm1 log log2 log10 log1p sqrt rsqrt "
            "reciprocal sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sigmoid erf erfc erfinv lgamma digamma "
            "floor ceil round trunc frac isnan isinf isfinite signbit copysign hypot nextafter"
        ).split()
    },
    "floor_divide": _divide("floor"),
    "trunc_divide": _divide("trunc"),
    "fma": lambda a, b, c: a * b + c,
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
}
PREDICATES = frozenset(
    "eq ne lt le gt ge isnan isinf isfinite signbit logical_and logical_or logical_xor logical_not".split()
)


def index_value(dim: Dim, values: Mapping[Expr, Index]) -> Index:
    """A Dim at many points at once."""
    if isinstance(dim, int):
        return dim
    if isinstance(dim, Symbol):
        return values[dim]
    if isinstance(dim, Sum):
        result: Index = dim.constant
        for monomial, count in dim.terms:
            product: Index = count
            for atom in monomial:
                product = product * index_value(atom, values)
            result = result + product
        return result
    if isinstance(dim, (FloorDiv, Mod)):
        a, b = index_value(dim.left, values), index_value(dim.right, values)
        return a // b if isinstance(dim, FloorDiv) else a % b
    assert isinstance(dim, (Min, Max))
    choose = torch.minimum if isinstance(dim, Min) else torch.maximum
    operands = [torch.as_tensor(index_value(operand, values)) for operand in dim.operands]
    found = operands[0]
    for operand in operands[1:]:
        found = choose(found, operand)
    return found


@dataclass
class Memory:
    """Flat buffers by name, and the values of the size symbols."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[Expr, int] = field(default_factory=dict)

    def size(self, dim: Dim) -> int:
        return evaluate(dim, self.sizes)

    def window(self, ref: BufferRef) -> Tensor:
        flat = self.buffers[ref.buffer]
        assert flat.dtype == ref.dtype, f"{ref.buffer} read as {ref.dtype}"
        shape, stride, offset = (
            [self.size(n) for n in ref.shape],
            [self.size(n) for n in ref.stride],
            self.size(ref.offset),
        )
        if all(shape):
            last = offset + sum((n - 1) * s for n, s in zip(shape, stride))
            assert 0 <= offset <= last < flat.numel() and all(s >= 0 for s in stride), (
                f"window {ref} outside its buffer"
            )
        return flat.as_strided(shape, stride, flat.storage_offset() + offset)


@dataclass
class Points:
    """All points of a loop nest: `indices` maps loop variables to integers (tensors that broadcast to `shape`), `active` says where the
    evaluation counts, `locals` are kernel-local values."""

    memory: Memory
    shape: tuple[int, ...]
    indices: dict[Expr, Index]
    locals: dict[str, Tensor] = field(default_factory=dict)
    active: Tensor | None = None
    memo: dict[Expression, Tensor] = field(default_factory=dict)

    def index(self, dim: Dim, bindings: Sequence[tuple[Expr, Expression]] = ()) -> Tensor:
        values = {**self.memory.sizes, **self.indices}
        for bound, expression in bindings:
            assert expression.dtype == torch.int64, "a binding is an int64 expression"
            values[bound] = self.evaluate(expression)
        return torch.as_tensor(index_value(dim, values)).expand(self.shape)

    def restricted(self, mask: Tensor) -> Points:
        active = mask if self.active is None else mask & self.active
        return Points(self.memory, self.shape, self.indices, self.locals, active)

    def address(self, buffer: str, dim: Dim, bindings: Sequence[tuple[Expr, Expression]]) -> Tensor:
        found = self.index(dim, bindings)
        if self.active is not None:
            found = torch.where(self.active, found, 0)
        size = self.memory.buffers[buffer].numel()
        assert found.numel() == 0 or (int(found.min()) >= 0 and int(found.max()) < size), (
            f"{buffer}[{dim}] outside 0..{size - 1}"
        )
        return found

    def evaluate(self, expression: Expression) -> Tensor:
        found = self.memo.get(expression)
        if found is None:
            found = self.memo[expression] = self._evaluate(expression)
            assert found.dtype == expression.dtype, f"{expression} gave {found.dtype}"
        return found

    def _evaluate(self, e: Expression) -> Tensor:
        match e:
            case Constant():
                return torch.tensor(e.value, dtype=e.dtype)
            case IndexValue():
                return self.index(e.index).to(torch.int64)
            case LocalValue():
                return self.locals[e.name]
            case Load():
                address = self.address(e.buffer, e.index, e.bindings)
                flat = self.memory.buffers[e.buffer]
                if flat.numel() == 0:
                    return torch.zeros(self.shape, dtype=e.dtype)
                return flat[address]
            case Masked():
                mask = self.evaluate(e.mask)
                assert mask.dtype == torch.bool and e.body.dtype == e.other.dtype == e.dtype
                body = self.restricted(mask.expand(self.shape)).evaluate(e.body)
                other = self.restricted(~mask.expand(self.shape)).evaluate(e.other)
                return torch.where(mask, body, other)
            case CheckedIndex():
                value = self.evaluate(e.value)
                extent = self.index(e.extent)
                low = -extent if e.wrap else torch.zeros_like(extent)
                bad = (value < low) | (value >= extent)
                bad = bad if self.active is None else bad & self.active
                if bool(bad.any()):
                    raise OutOfRange(f"index out of range for size {e.extent}")
                wrapped = torch.where(value < 0, value + extent, value) if e.wrap else value
                return wrapped if self.active is None else torch.where(self.active, wrapped, 0)
            case Apply():
                return self.apply(e, [self.evaluate(arg) for arg in e.args])
        raise TypeError(f"not an expression: {e!r}")

    def apply(self, e: Apply, args: list[Tensor]) -> Tensor:
        if e.op == "cast":
            return (args[0] != 0) if e.dtype == torch.bool else args[0].to(e.dtype)
        if e.op == "bitcast":
            return args[0].contiguous().view(e.dtype)
        dtypes = {arg.dtype for arg in args[1:]} if e.op == "where" else {arg.dtype for arg in args}
        assert len(dtypes) == 1, f"{e.op} on {dtypes}"
        assert not dtypes & set(HALF), f"{e.op} on half values"
        assert e.dtype == (torch.bool if e.op in PREDICATES else next(iter(dtypes))), f"{e.op} claims {e.dtype}"
        assert torch.bool not in dtypes or e.op in PREDICATES or e.op == "where", f"{e.op} on bool"
        return OPERATIONS[e.op](*args)


def grid(
    memory: Memory, axes: Sequence[Axis], before: int = 0, after: int = 0
) -> tuple[tuple[int, ...], dict[Expr, Index]]:
    """The shape of a loop nest, and the index tensor of each of its variables, with room for `before`/`after` more dimensions."""
    shape = tuple(memory.size(axis.extent) for axis in axes)
    indices: dict[Expr, Index] = {}
    for k, (axis, size) in enumerate(zip(axes, shape)):
        position = [1] * (before + len(axes) + after)
        position[before + k] = size
        indices[axis.symbol] = torch.arange(size).reshape(position)
    assert len(indices) == len(axes), "a loop variable is used twice"
    return shape, indices


def store(points: Points, statement: Store) -> None:
    flat = points.memory.buffers[statement.buffer]
    value = points.evaluate(statement.value)
    assert value.dtype == flat.dtype, f"storing {value.dtype} into {statement.buffer} of {flat.dtype}"
    address = points.address(statement.buffer, statement.index, statement.bindings)
    accumulate(flat, address.reshape(-1), value.expand(points.shape).reshape(-1), statement.mode)


def accumulate(flat: Tensor, address: Tensor, value: Tensor, mode: str) -> None:
    if mode == "write":
        flat[address] = value
    elif mode == "add":
        flat.index_add_(0, address, value) if flat.dtype != torch.bool else flat.index_put_(
            (address,), value, accumulate=True
        )
    else:
        flat.scatter_reduce_(0, address, value, "amax" if mode == "max" else "amin")


def reduce(kind: str, value: Tensor) -> Tensor:
    """Along the last dimension."""
    table: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda v: v.sum(-1, dtype=v.dtype),
        "prod": lambda v: v.prod(-1, dtype=v.dtype),
        "max": lambda v: v.amax(-1),
        "min": lambda v: v.amin(-1),
        "any": lambda v: v.any(-1),
        "all": lambda v: v.all(-1),
        "argmax": lambda v: v.argmax(-1),
        "argmin": lambda v: v.argmin(-1),
    }
    return table[kind](value.to(torch.uint8) if value.dtype == torch.bool and kind.startswith("arg") else value)


def scan(kind: str, value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Along the last dimension."""
    if kind in ("max", "min"):
        return (torch.cummax if kind == "max" else torch.cummin)(value, -1)
    table = {"sum": torch.cumsum, "prod": torch.cumprod, "logaddexp": torch.logcumsumexp}
    return (
        table[kind](value, -1).to(value.dtype) if kind == "logaddexp" else table[kind](value, -1, dtype=value.dtype)
    ), None


def run_pointwise(memory: Memory, operation: Pointwise) -> None:
    shape, indices = grid(memory, operation.axes)
    points = Points(memory, shape, indices)
    for statement in operation.stores:
        store(points, statement)


def run_reduction(memory: Memory, operation: Reduction) -> None:
    outer, indices = grid(memory, operation.axes, after=len(operation.reduced))
    inner, more = grid(memory, operation.reduced, before=len(operation.axes))
    value = Points(memory, outer + inner, {**indices, **more}).evaluate(operation.value).expand(outer + inner)
    assert value.dtype not in HALF, "accumulating in half precision"
    result = reduce(operation.kind, value.reshape(*outer, math.prod(inner)))
    _, indices = grid(memory, operation.axes)
    points = Points(memory, outer, indices, {"acc": result})
    store(points, Store(operation.buffer, operation.index, operation.finish))


def run_scan(memory: Memory, operation: Scan) -> None:
    axes = (*operation.axes, operation.scanned)
    shape, indices = grid(memory, axes)
    value = Points(memory, shape, indices).evaluate(operation.value).expand(shape)
    result, position = scan(operation.kind, value.contiguous())
    points = Points(memory, shape, indices, {"acc": result})
    store(points, Store(operation.buffer, operation.index, operation.finish))
    if operation.position_buffer is not None:
        assert position is not None
        points.locals["position"] = position
        from fusewright.loops.ir import local_value

        store(points, Store(operation.position_buffer, operation.index, local_value("position", torch.int64)))


def run_extern(memory: Memory, operation: Extern) -> None:
    def argument(arg: Any) -> Any:
        if isinstance(arg, BufferRef):
            return memory.window(arg)
        if isinstance(arg, tuple):
            return [argument(item) for item in arg]
        return memory.size(arg) if isinstance(arg, Expr) else arg

    result = operation.target(
        *(argument(arg) for arg in operation.args), **{name: argument(arg) for name, arg in operation.kwargs}
    )
    flat: list[Any] = []

    def spread(item: Any) -> None:
        if isinstance(item, (tuple, list)):
            for part in item:
                spread(part)
        else:
            flat.append(item)

    spread(result)
    for name, item in zip(operation.outputs, flat):
        if name is not None:
            target = memory.buffers[name]
            if item.numel() == 0:
                continue
            shape, stride = EXPECTED[name]
            shape, stride = [memory.size(n) for n in shape], [memory.size(n) for n in stride]
            assert list(item.shape) == shape and item.dtype == target.dtype, (
                f"{operation.name}: {item.shape} {item.dtype}"
            )
            target.as_strided(shape, stride).copy_(item)


EXPECTED: dict[str, tuple[Any, Any]] = {}
RUNNERS: dict[type, Callable[[Memory, Any], None]] = {
    Pointwise: run_pointwise,
    Reduction: run_reduction,
    Scan: run_scan,
    Extern: run_extern,
}


def flat_view(tensor: Tensor) -> Tensor:
    """Everything from the tensor's first element to the end of its storage, as one dimension sharing its memory."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.detach().as_strided((length,), (1,), tensor.storage_offset())


def prepare(program: Any, inputs: Sequence[Any]) -> Memory:
    """Memory with the inputs, constants and fresh buffers of a LoopProgram (or a scheduled Plan) in place."""
    memory = Memory()
    for symbol, (position, dim) in program.size_symbols.items():
        memory.sizes[symbol] = dim if position < 0 else inputs[position] if dim < 0 else inputs[position].shape[dim]
    for name, buffer in program.buffers.items():
        if buffer.role == "input":
            memory.buffers[name] = flat_view(inputs[buffer.position])
        elif buffer.role == "constant":
            memory.buffers[name] = flat_view(program.constants[buffer.position])
        else:
            memory.buffers[name] = torch.empty(memory.size(buffer.span()), dtype=buffer.dtype)
            EXPECTED[name] = (buffer.shape, buffer.stride)
    return memory


def collect(program: Any, memory: Memory, inputs: Sequence[Any]) -> list[Any]:
    """The outputs, aliasing the inputs where the program says so."""
    results: list[Any] = []
    for output in program.outputs:
        if output.kind == "size":
            results.append(memory.size(output.value))
        elif output.kind == "value":
            results.append(output.value)
        else:
            buffer = program.buffers[output.buffer]
            ref = output.ref or BufferRef(buffer.name, buffer.shape, buffer.stride, 0, buffer.dtype)
            results.append(memory.window(ref))
    return results


def run(program: LoopProgram, inputs: Sequence[Any]) -> list[Any]:
    """What the program returns for these inputs (which it may update)."""
    memory = prepare(program, inputs)
    for operation in program.operations:
        RUNNERS[type(operation)](memory, operation)
    return collect(program, memory, inputs)
