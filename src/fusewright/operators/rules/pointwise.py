"""Shape rules of pointwise operators: broadcasting, type promotion and TensorIterator's layout; and of their in-place
forms."""

from __future__ import annotations

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.operators.rules.common import (
    Rule,
    broadcast,
    common_device,
    complex_of,
    fresh,
    is_contiguous,
    is_integral,
    iterator_strides,
    preserved_strides,
    promote,
    same_shape,
)
from fusewright.sizes.expressions import Expr
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
NUMBERS = (bool, int, float, complex, Expr)


def iterate(operands: list[object], dtype: torch.dtype) -> TensorType:
    """The result over these operands, in the order in which TensorIterator holds them; Python numbers are operands
    too."""
    tensors = [operand for operand in operands if isinstance(operand, TensorType)]
    shape = tensors[0].shape if len(tensors) == 1 else broadcast(*(t.shape for t in tensors))
    numbers = len(tensors) != len(operands)
    return TensorType(shape, iterator_strides(shape, tensors, numbers), dtype, common_device(*tensors))


def promoting(operands: list[object], dtype: torch.dtype, computed: torch.dtype | None = None) -> TensorType:
    """As `iterate`, where a CPU converts operands of another dtype than `computed` (by default the result's) first:
    what has gaps or expanded dimensions then lies densely."""
    wanted = dtype if computed is None else computed
    return iterate(
        [_converted(t, wanted) if isinstance(t, TensorType) and t.device.type == "cpu" else t for t in operands], dtype
    )


def _converted(t: TensorType, dtype: torch.dtype) -> TensorType:
    return t if t.dtype == dtype else replace(t, stride=preserved_strides(t))


def _dtype(kind: str, *values: object) -> torch.dtype | None:
    """The result's dtype; None where the operator refuses these dtypes (its own kernel says why)."""
    dtype = promote(*values)
    if kind == "float":
        return torch.get_default_dtype() if is_integral(dtype) else dtype
    if kind == "bool":
        return torch.bool
    if kind == "floating":  # refuses integers
        return dtype if dtype.is_floating_point else None
    if kind == "number":  # refuses bool
        return None if dtype == torch.bool else dtype
    if kind == "integral":
        return dtype if is_integral(dtype) else None
    if kind == "real":
        return None if dtype.is_complex else dtype
    return dtype


def unary(kind: str) -> Rule:
    def rule(self: TensorType) -> object:
        dtype = _dtype(kind, self)
        return NotImplemented if dtype is None else promoting([self], dtype, self.dtype if kind == "bool" else dtype)

    return rule


def _absolute(self: TensorType) -> object:
    return NotImplemented if self.dtype.is_complex else iterate([self], self.dtype)


def binary(kind: str) -> Rule:
    def rule(self: object, other: object, *, alpha: object = 1) -> object:
        if not isinstance(self, TensorType) and not isinstance(other, TensorType):
            return NotImplemented  # two numbers, of which PyTorch makes tensors
        dtype = _dtype(kind, self, other)
        if dtype is None or (isinstance(alpha, float) and is_integral(dtype)) or isinstance(alpha, (bool, complex)):
            return NotImplemented
        return promoting([self, other], dtype, promote(self, other) if kind == "bool" else dtype)

    return rule


def _subtract(self: object, other: object, alpha: object = 1) -> object:
    if any(isinstance(v, bool) or (isinstance(v, TensorType) and v.dtype == torch.bool) for v in (self, other)):
        raise TypeError("subtraction is not defined for bool")  # PyTorch's meta kernel of sub.Scalar lets it pass
    return binary("any")(self, other, alpha=alpha)


def _divide_mode(self: object, other: object, *, rounding_mode: str | None = None) -> object:
    return binary("float" if rounding_mode is None else "number")(self, other)


def _where(condition: TensorType, self: object, other: object) -> object:
    if not isinstance(self, TensorType) or not isinstance(other, TensorType) or condition.dtype != torch.bool:
        return NotImplemented
    dtype = promote(self, other)
    return iterate([condition, _converted(self, dtype), _converted(other, dtype)], dtype)


def _clamp(self: TensorType, min: object = None, max: object = None) -> object:
    if self.dtype.is_complex or self.dtype == torch.bool or (min is None and max is None):
        return NotImplemented
    if any(isinstance(v, TensorType) for v in (min, max)):
        return NotImplemented
    return iterate([self], promote(self, min, max))


def _clamp_one(self: TensorType, bound: object = None) -> object:
    return _clamp(self, bound)


def _floating_with_options(self: TensorType, *options: object, **named: object) -> object:
    return iterate([self], self.dtype) if self.dtype.is_floating_point else NotImplemented


def _relu(self: TensorType) -> object:
    return NotImplemented if self.dtype == torch.bool or self.dtype.is_complex else iterate([self], self.dtype)


def _hardtanh(self: TensorType, min_val: object = -1, max_val: object = 1) -> object:
    if not self.dtype.is_floating_point:
        return NotImplemented
    return replace(fresh(self.shape, self), stride=preserved_strides(self))


def _prelu(self: TensorType, weight: TensorType) -> object:
    if weight.dtype != self.dtype or not same_shape(broadcast(self.shape, weight.shape), self.shape):
        return NotImplemented
    return _hardtanh(self)


def _addcmul(self: TensorType, tensor1: TensorType, tensor2: TensorType, *, value: object = 1) -> object:
    dtype = promote(self, tensor1, tensor2)
    if not dtype.is_floating_point:
        return NotImplemented
    return promoting([self, tensor1, tensor2], dtype)


def _lerp(self: TensorType, end: TensorType, weight: object) -> object:
    operands = [self, end, *([weight] if isinstance(weight, TensorType) else [])]
    if any(t.dtype != self.dtype for t in operands) or not self.dtype.is_floating_point:
        return NotImplemented
    return iterate(operands, self.dtype)  # type: ignore[arg-type]


def _backward(*tensors: object, **named: object) -> object:
    """Gradients over tensors of one shape, dtype and layout (the order of the iterator's operands is then of no
    matter)."""
    given = [t for t in tensors if isinstance(t, TensorType)]
    first = given[0]
    if not all(t.dtype == first.dtype and t.stride == first.stride and same_shape(t.shape, first.shape) for t in given):
        if all(t.dtype == first.dtype and same_shape(t.shape, first.shape) and is_contiguous(t) for t in given):
            return fresh(first.shape, first)
        return NotImplemented
    return iterate(given, first.dtype) if first.dtype.is_floating_point else NotImplemented  # type: ignore[arg-type]


def _pow(self: object, exponent: object) -> object:
    dtype = promote(self, exponent)
    if dtype == torch.bool or dtype.is_complex or (is_integral(dtype) and not isinstance(exponent, TensorType)):
        return NotImplemented
    number = isinstance(self, TensorType) and not isinstance(exponent, TensorType)  # no operand of the iterator
    return promoting([self] if number else [self, exponent], dtype)


def _masked_fill(self: TensorType, mask: TensorType, value: object) -> object:
    if mask.dtype != torch.bool or (isinstance(value, TensorType) and (value.shape or value.device != self.device)):
        return NotImplemented
    if isinstance(value, TensorType) and not torch.can_cast(value.dtype, self.dtype):
        return NotImplemented
    if self.dtype.is_floating_point or isinstance(value, (bool, int)):
        return fresh(broadcast(self.shape, mask.shape), self)
    return NotImplemented


def _isnan(self: TensorType) -> object:
    return iterate([self], torch.bool)


def _complex(real: TensorType, imag: TensorType) -> object:
    if real.dtype != imag.dtype:
        return NotImplemented
    return iterate([real, imag], complex_of(real.dtype))


def _gelu(self: TensorType, *, approximate: str = "none") -> object:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu has no approximation {approximate!r}")
    return _floating_with_options(self)


def _table() -> dict[OpOverload, Rule]:
    table: dict[OpOverload, Rule] = {}
    floats = "acos acosh asin asinh atan atanh cos cosh erf erfc erfinv exp exp2 expm1 log log10 log1p log2 reciprocal"
    floats += " rsqrt sigmoid sin sinh sqrt tan tanh digamma lgamma"
    for name in floats.split():
        table[getattr(aten, name).default] = unary("float")
    for name in "ceil floor round trunc sign".split():
        table[getattr(aten, name).default] = unary("real")
    for name in "gelu silu hardswish hardsigmoid leaky_relu elu mish softplus hardshrink".split():
        table[getattr(aten, name).default] = _floating_with_options
    table[aten.gelu.default] = _gelu
    table |= {
        aten.neg.default: unary("number"),
        aten.abs.default: _absolute,
        aten.relu.default: _relu,
        aten.hardtanh.default: _hardtanh,
        aten.threshold.default: lambda self, threshold, value: _relu(self),
        aten.logit.default: lambda self, eps=None: unary("float")(self),
        aten.bitwise_not.default: unary("integral"),
        aten.logical_not.default: unary("bool"),
        aten.isnan.default: _isnan,
        aten.isinf.default: lambda self: _isnan(self) if self.dtype.is_floating_point else NotImplemented,
        aten.add.Tensor: binary("any"),
        aten.add.Scalar: lambda self, other, alpha=1: binary("any")(self, other, alpha=alpha),
        aten.sub.Tensor: lambda self, other, *, alpha=1: _subtract(self, other, alpha),
        aten.sub.Scalar: _subtract,
        aten.rsub.Scalar: _subtract,
        aten.mul.Tensor: binary("any"),
        aten.mul.Scalar: binary("any"),
        aten.div.Tensor: binary("float"),
        aten.div.Scalar: binary("float"),
        aten.div.Tensor_mode: _divide_mode,
        aten.div.Scalar_mode: _divide_mode,
        aten.maximum.default: binary("real"),
        aten.minimum.default: binary("real"),
        aten.remainder.Scalar: binary("number"),
        aten.remainder.Tensor: binary("number"),
        aten.fmod.Scalar: binary("number"),
        aten.fmod.Tensor: binary("number"),
        aten.floor_divide.default: binary("number"),
        aten.atan2.default: binary("float"),
        aten.pow.Tensor_Scalar: _pow,
        aten.pow.Tensor_Tensor: _pow,
        aten.where.self: _where,
        aten.clamp.default: _clamp,
        aten.clamp_min.default: _clamp_one,
        aten.clamp_max.default: _clamp_one,
        aten.addcmul.default: _addcmul,
        aten.addcdiv.default: _addcmul,
        aten.lerp.Scalar: _lerp,
        aten.lerp.Tensor: _lerp,
        aten.masked_fill.Scalar: _masked_fill,
        aten.masked_fill.Tensor: _masked_fill,
        aten.complex.default: _complex,
        aten._prelu_kernel.default: _prelu,
        aten.softshrink.default: lambda self, lambd=0.5: _floating_with_options(self) if lambd >= 0 else NotImplemented,
    }
    for name in "eq ne lt le gt ge".split():
        for overload in ("Tensor", "Scalar"):
            table[getattr(getattr(aten, name), overload)] = binary("bool")
    for name in "logical_and logical_or logical_xor".split():
        table[getattr(aten, name).default] = binary("bool")
    for name in "bitwise_and bitwise_or bitwise_xor".split():
        table[getattr(aten, name).Tensor] = binary("integral")
        table[getattr(aten, name).Scalar] = binary("integral")
    backward = "gelu silu threshold tanh sigmoid leaky_relu hardswish"
    for name in (f"{forward}_backward" for forward in backward.split()):
        table[getattr(aten, name).default] = _backward
    return table


def in_place(form: Rule) -> Rule:
    """The rule of `op_` from that of `op`: the result is `self`, if what is computed fits into it."""

    def rule(self: TensorType, *args: object, **kwargs: object) -> object:
        found = form(self, *args, **kwargs)
        if not isinstance(found, TensorType) or not same_shape(found.shape, self.shape):
            return NotImplemented
        return self if torch.can_cast(found.dtype, self.dtype) else NotImplemented

    return rule


def _copy_in_place(self: TensorType, src: TensorType, non_blocking: bool = False) -> object:
    return self if same_shape(broadcast(self.shape, src.shape), self.shape) else NotImplemented


def _keep(self: TensorType, *args: object, **kwargs: object) -> object:
    return self


def _fill(self: TensorType, value: object) -> object:
    return self if isinstance(value, NUMBERS) or (isinstance(value, TensorType) and not value.shape) else NotImplemented


def _in_place_table(table: dict[OpOverload, Rule]) -> dict[OpOverload, Rule]:
    found: dict[OpOverload, Rule] = {}
    for op, rule in table.items():
        packet = getattr(aten, f"{op._schema.name.removeprefix('aten::')}_", None)
        overload = op._schema.overload_name or "default"
        if packet is not None and overload in packet.overloads():
            found[getattr(packet, overload)] = in_place(rule)
    found |= {
        aten.copy_.default: _copy_in_place,
        aten.zero_.default: _keep,
        aten.fill_.Scalar: _fill,
        aten.fill_.Tensor: _fill,
        aten.bernoulli_.float: _keep,
        aten.normal_.default: _keep,
        aten.uniform_.default: _keep,
    }
    return found


FUNCTIONAL = _table()
RULES: dict[OpOverload, Rule] = {**FUNCTIONAL, **_in_place_table(FUNCTIONAL)}
