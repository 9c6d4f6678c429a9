"""Operators that take a Python number, when the number is known only at run time.

Takes an operator and its arguments, among them run-time floats; records the same computation over tensors: the number
becomes a 0-dimensional tensor of the dtype that the operator would have converted it to. Always holds: the result has
the dtype that a Python float would have given; an operator without a row gets the number's present value, which then is
guarded (or the graph breaks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.operators.schema import argument
from fusewright.sizes.symfloat import FloatNode, node_of

if TYPE_CHECKING:
    from fusewright.sizes.interfaces import Recorder

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_HALF = (torch.float16, torch.bfloat16)
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float32}


def holds_float(args: Args, kwargs: Kwargs) -> bool:
    """Whether an argument is a run-time float."""
    return any(type(value) is torch.SymFloat and node_of(value) is not None for value in (*args, *kwargs.values()))


_SIZES_AS_NUMBERS = frozenset({
    aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub, aten.mul, aten.mul_, aten.div, aten.div_, aten.pow, aten.pow_,
    aten.remainder,
    aten.remainder_, aten.fmod, aten.fmod_, aten.floor_divide, aten.floor_divide_, aten.eq, aten.ne, aten.lt, aten.le,
    aten.gt, aten.ge,
    aten.eq_, aten.ne_, aten.lt_, aten.le_, aten.gt_, aten.ge_, aten.clamp, aten.clamp_, aten.clamp_min,
    aten.clamp_min_, aten.clamp_max,
    aten.clamp_max_, aten.masked_fill, aten.masked_fill_, aten.where, aten.full, aten.full_like, aten.new_full,
    aten.fill, aten.fill_,
    aten.arange, aten.scalar_tensor, aten.addcmul, aten.addcdiv, aten.lerp, aten.bitwise_and, aten.bitwise_or,
    aten.bitwise_xor,
    aten.bitwise_left_shift, aten.bitwise_right_shift, aten.constant_pad_nd,
})  # fmt: skip
"""Operators whose lowering takes a symbolic integer for a number."""


@cache
def _numbers(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """(place, name) of the arguments that are numbers, of an operator that needs to know them."""
    if func.overloadpacket in _SIZES_AS_NUMBERS:
        return ()
    return tuple(
        (place, a.name)
        for place, a in enumerate(func._schema.arguments)
        if str(a.type) in ("number", "Optional[number]")
    )


def with_fixed_numbers(func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with the values of sizes that stand for numbers (the slope of leaky_relu), which are then
    guarded."""
    for place, name in _numbers(func):
        if place < len(args) and type(args[place]) is torch.SymInt:
            args = (*args[:place], int(args[place]), *args[place + 1 :])
        elif type(kwargs.get(name)) is torch.SymInt:
            kwargs = {**kwargs, name: int(kwargs[name])}
    return args, kwargs


class _Call:
    """One operator call, with its arguments by position."""

    def __init__(self, recorder: Recorder, func: OpOverload, args: Args, kwargs: Kwargs) -> None:
        self.recorder, self.func, self.args, self.kwargs = recorder, func, args, kwargs

    def __getitem__(self, index: int) -> Any:
        return argument(self.func, self.args, self.kwargs, index)

    def run(self, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        return self.recorder.dispatch(func, args, kwargs)

    def convert(self, value: Any, dtype: torch.dtype) -> Any:
        return value if value.dtype == dtype else self.run(aten._to_copy.default, value, dtype=dtype)

    def number(self, value: Any, like: Any, exact: bool = False) -> Any:
        """The number as a tensor that meets tensor `like` as a Python float would. Half types compute in float32,
        unless `exact`."""
        node = node_of(value)
        assert node is not None
        dtype = torch.result_type(like, 1.0)
        if dtype in _HALF and like.dim() and not exact:
            dtype = torch.float32
        return self.convert(node.operand(), _REAL.get(dtype, dtype))

    def tensor(self, value: Any) -> Any:
        """A tensor operand in the dtype that it has next to a float."""
        return self.convert(value, torch.result_type(value, 1.0))

    def pair(self, left: Any, right: Any, exact: bool = False) -> tuple[Any, Any]:
        """Two operands, one of them perhaps a run-time float, as tensors."""
        if node_of(left) is not None:
            return self.number(left, right, exact), self.tensor(right)
        if node_of(right) is not None:
            return self.tensor(left), self.number(right, left, exact)
        return left, right

    def scaled(self, value: Any, factor: Any) -> Any:
        """value * factor, where either may be a number."""
        if node_of(factor) is None and not isinstance(factor, torch.Tensor):
            if factor == 1:
                return value
            if node_of(value) is not None:
                return torch.SymFloat(value.node.mul(value.node.wrap_float(float(factor))))
            return self.run(aten.mul.Tensor, value, factor)
        if node_of(value) is not None:
            return torch.SymFloat(value.node.mul(factor.node))
        if not isinstance(value, torch.Tensor):
            return torch.SymFloat(factor.node.mul(factor.node.wrap_float(float(value))))
        left, right = self.pair(value, factor)
        return self.run(aten.mul.Tensor, left, right)


    def exactly(self, compute: Callable[..., Any], *places: int) -> Any:
        """`compute` of these arguments as PyTorch's kernels do it that scale an operand: in the type of the result, and
        half types in float32, so that the scaled operand is not rounded by itself."""
        given = [self[place] for place in places]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        kind = functools.reduce(torch.promote_types, [one.dtype for one in tensors])
        if len(tensors) == 2:
            kind = torch.result_type(*tensors)
        if all(one.dtype == kind for one in tensors) and kind not in _HALF:
            return compute(*given)
        wide = torch.float32 if kind in _HALF else kind
        return self.convert(
            compute(*(self.convert(one, wide) if isinstance(one, torch.Tensor) else one for one in given)), kind
        )


def _binary(target: OpOverload, exact: bool = False) -> Callable[[_Call], Any]:
    return lambda call: call.run(target, *call.pair(call[0], call[1], exact))


def _additive(target: OpOverload) -> Callable[[_Call], Any]:
    """self ± alpha * other."""

    def add(call: _Call, left: Any, right: Any) -> Any:
        alpha = call[2]
        other = call.scaled(right, 1 if alpha is None else alpha)
        if not isinstance(other, torch.Tensor) and node_of(other) is None:
            return call.run(target, left, other)
        return call.run(target, *call.pair(left, other))

    return lambda call: call.exactly(functools.partial(add, call), 0, 1)


def _reversed_sub(call: _Call) -> Any:
    alpha = call[2]
    if isinstance(call[1], torch.Tensor):
        return call.run(aten.sub.Tensor, call[1], call[0], alpha=1 if alpha is None else alpha)
    left = call.scaled(call[0], 1 if alpha is None else alpha)
    if node_of(call[1]) is None:
        return call.run(aten.rsub.Scalar, left, call[1])
    value, number = call.pair(left, call[1])
    return call.run(aten.sub.Tensor, number, value)


def _divided(call: _Call) -> Any:
    return call.run(aten.div.Tensor_mode, *call.pair(call[0], call[1]), rounding_mode=call[2])


def _add_product(call: _Call) -> Any:
    def add(left: Any, first: Any, second: Any) -> Any:
        return call.run(aten.add.Tensor, left, call.run(aten.mul.Tensor, call.scaled(first, call[3]), second))

    return call.exactly(add, 0, 1, 2)


def _add_quotient(call: _Call) -> Any:
    def add(left: Any, first: Any, second: Any) -> Any:
        return call.run(aten.add.Tensor, left, call.run(aten.div.Tensor, call.scaled(first, call[3]), second))

    return call.exactly(add, 0, 1, 2)


def _lerp(call: _Call) -> Any:
    return call.run(aten.lerp.Tensor, call[0], call[1], call.number(call[2], call[0], exact=True))


def _clamp(call: _Call) -> Any:
    value = call.tensor(call[0])
    bounds = (
        (call[1], aten.maximum.default, aten.clamp_min.default),
        (call[2], aten.minimum.default, aten.clamp_max.default),
    )
    for limit, target, plain in bounds:
        if limit is None:
            continue
        if node_of(limit) is None:
            value = call.run(plain, value, limit)
        else:
            value = call.run(target, value, call.number(limit, value, exact=True))
    return value


def _clamp_low(call: _Call) -> Any:
    value = call.tensor(call[0])
    return call.run(aten.maximum.default, value, call.number(call[1], value, exact=True))


def _clamp_high(call: _Call) -> Any:
    value = call.tensor(call[0])
    return call.run(aten.minimum.default, value, call.number(call[1], value, exact=True))


def _is_checked(dtype: torch.dtype) -> bool:
    """Whether eager makes an error of a number that this dtype cannot hold."""
    return not dtype.is_complex and dtype not in (torch.bool, torch.float32, torch.float64, torch.bfloat16)


def _filled(call: _Call) -> Any:
    like = call[0]
    if _is_checked(like.dtype):
        return NotImplemented
    node = node_of(call[1])
    assert node is not None
    return call.run(aten.expand.default, call.convert(node.operand(), like.dtype), list(like.shape))


def _masked(call: _Call) -> Any:
    if _is_checked(call[0].dtype):
        return NotImplemented
    node = node_of(call[2])
    assert node is not None
    return call.run(aten.where.self, call[1], call.convert(node.operand(), call[0].dtype), call[0])


def _full(call: _Call) -> Any:
    node = node_of(call[1])
    assert node is not None
    dtype = call.kwargs.get("dtype") or torch.get_default_dtype()
    if _is_checked(dtype):
        return NotImplemented
    device = call.kwargs.get("device") or torch.device("cpu")
    value = call.run(aten._to_copy.default, node.operand(), dtype=dtype, device=device)
    return call.run(
        aten.clone.default, call.run(aten.expand.default, value, list(call[0])), memory_format=torch.contiguous_format
    )


def _full_like(call: _Call) -> Any:
    if _is_checked(call.kwargs.get("dtype") or call[0].dtype):
        return NotImplemented
    node = node_of(call[1])
    assert node is not None
    options = {name: value for name, value in call.kwargs.items() if value is not None}
    made = call.run(aten.empty_like.default, call[0], **options)
    return call.run(aten.copy_.default, made, call.convert(node.operand(), made.dtype))


def _scalar_tensor(call: _Call) -> Any:
    node = node_of(call[0])
    assert node is not None
    options = {name: call.kwargs.get(name) for name in ("dtype", "device")}
    options["dtype"] = options["dtype"] or torch.get_default_dtype()
    return call.run(aten._to_copy.default, node.operand(), **options)


_COMPARISONS = {name: getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_ROWS: dict[OpOverload, Callable[[_Call], Any]] = {
    aten.add.Tensor: _additive(aten.add.Tensor),
    aten.add.Scalar: _additive(aten.add.Tensor),
    aten.sub.Tensor: _additive(aten.sub.Tensor),
    aten.sub.Scalar: _additive(aten.sub.Tensor),
    aten.rsub.Scalar: _reversed_sub,
    aten.rsub.Tensor: _reversed_sub,
    aten.mul.Tensor: _binary(aten.mul.Tensor),
    aten.mul.Scalar: _binary(aten.mul.Tensor),
    aten.div.Tensor: _binary(aten.div.Tensor),
    aten.div.Scalar: _binary(aten.div.Tensor),
    aten.div.Tensor_mode: _divided,
    aten.div.Scalar_mode: _divided,
    aten.pow.Tensor_Scalar: _binary(aten.pow.Tensor_Tensor),
    aten.pow.Scalar: _binary(aten.pow.Tensor_Tensor),
    aten.fmod.Scalar: _binary(aten.fmod.Tensor, exact=True),
    aten.remainder.Scalar: _binary(aten.remainder.Tensor, exact=True),
    aten.addcmul.default: _add_product,
    aten.addcdiv.default: _add_quotient,
    aten.lerp.Scalar: _lerp,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp_low,
    aten.clamp_max.default: _clamp_high,
    aten.fill.Scalar: _filled,
    aten.masked_fill.Scalar: _masked,
    aten.full.default: _full,
    aten.full_like.default: _full_like,
    aten.scalar_tensor.default: _scalar_tensor,
    **{getattr(aten, name).Scalar: _binary(target, exact=True) for name, target in _COMPARISONS.items()},
}


def _functional(func: OpOverload) -> OpOverload | None:
    """The operator that gives as a new tensor what an in-place one writes."""
    namespace, name = func._schema.name.split("::")
    if namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    return None if packet is None else getattr(packet, func._overloadname, None)


def record(recorder: Recorder, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Records `func` on arguments among which are run-time floats."""
    row = _ROWS.get(func)
    if row is not None and (found := row(_Call(recorder, func, args, kwargs))) is not NotImplemented:
        return found
    functional = _functional(func)
    row = _ROWS.get(functional) if functional is not None else None
    if row is not None and torch.result_type(args[0], 1.0) == args[0].dtype:
        assert functional is not None
        result = row(_Call(recorder, functional, args, kwargs))
        if result is not NotImplemented:
            return recorder.dispatch(aten.copy_.default, (args[0], result), {})
    plain_args = tuple(_present(value) for value in args)
    return recorder.dispatch(func, plain_args, {name: _present(value) for name, value in kwargs.items()})


def _present(value: Any) -> Any:
    node = node_of(value)
    return value if node is None else node.guard_float("", 0)


__all__ = ["FloatNode", "holds_float", "record"]


OF_NUMBERS = (torch.ops.aten._to_copy.default, torch.ops.aten._conj_physical.default)
"""vmap converts the number of an operator, and a gradient conjugates it: a tensor without dimensions to them."""


def record_number(recorder: Recorder, func: OpOverload, number: complex, kwargs: dict[str, object]) -> object:
    """One of OF_NUMBERS, of a number."""
    value = number.conjugate() if func is OF_NUMBERS[1] else number
    options = {"dtype": kwargs.get("dtype"), "device": kwargs.get("device") or torch.device("cpu")}
    return recorder.dispatch(torch.ops.aten.full.default, ([], value), options)
