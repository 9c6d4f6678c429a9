"""NumPy arrays: traced as tensors where NumPy's meaning is exactly an operator's.

Takes arrays from outside (plain, writeable, of a dtype in DTYPES) and `tensor.numpy()`; gives `TracedArray`s whose
operators and functions record torch operators. Always holds: dtypes follow NumPy's promotion (asked of NumPy itself); a
result without dimensions is a NumPy scalar, as NumPy gives it; an array from outside is never written to; what has no
row here is a graph break.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from fusewright.base.signals import GraphBreak
from fusewright.capture.border.values.tensor import placeholder_name
from fusewright.capture.guards.sources import ArrayTensor, Source
from fusewright.capture.guards.types import IsArrayLike

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip
TORCH_DTYPES = {np.dtype(kind): dtype for dtype, kind in DTYPES.items()}
_WEAK = (bool, int, float)  # Python numbers adapt to the array's dtype


Row = Callable[["Tracer", Any, tuple[Any, ...], dict[str, Any]], Any]


def _refuse(what: str) -> NoReturn:
    raise GraphBreak("numpy-call", what)


class TracedArray:
    """An array, or with `scalar` a NumPy scalar, that stands for `tensor`."""

    __slots__ = ("scalar", "tensor", "world")

    def __init__(self, world: World, tensor: torch.Tensor, scalar: bool = False) -> None:
        self.world, self.tensor, self.scalar = world, tensor, scalar

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(DTYPES[self.tensor.dtype])

    def __len__(self) -> int:
        if not self.tensor.dim():
            raise TypeError("len() of unsized object")
        return int(self.tensor.shape[0])

    def __iter__(self) -> Iterator[TracedArray]:
        return iter([self[index] for index in range(len(self))])

    def __getitem__(self, key: Any) -> TracedArray:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(part is None or part is Ellipsis or type(part) is int or _plain_slice(part) for part in parts):
            _refuse("an index that is no number, slice, None or Ellipsis")
        return self.made(operator.getitem, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key]  # the same keys
        if _is_outside(self):
            _refuse("a store into an array from outside")
        if type(value) is not TracedArray and type(value) not in _WEAK:
            _refuse(f"a store of a {type(value).__name__} into an array")
        given = value.tensor if type(value) is TracedArray else value
        self.world.torch_call(operator.setitem, (self.tensor, key, given), {})

    def __bool__(self) -> NoReturn:
        raise GraphBreak("data-dependent-branch", "the truth value of an array")

    def _number(self, *args: object) -> NoReturn:
        raise GraphBreak("data-dependent-scalar", "an element of an array is read into Python")

    __float__ = __int__ = __index__ = __complex__ = _number

    def _text(self, *args: object) -> NoReturn:
        raise GraphBreak("print-tensor", "the text of an array")

    __repr__ = __str__ = __format__ = _text  # type: ignore[assignment]

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("an array given to native code")

    __reduce_ex__ = __deepcopy__ = __copy__ = __contains__ = __array__  # type: ignore[assignment]

    def __neg__(self) -> TracedArray:
        if self.tensor.dtype is torch.bool:
            raise TypeError("The numpy boolean negative, the `-` operator, is not supported")
        return self.made(torch.neg)

    def __abs__(self) -> TracedArray:
        return self.made(torch.abs)

    def __invert__(self) -> TracedArray:
        return self.made(torch.bitwise_not) if self.tensor.dtype in _INTEGERS else _refuse("~ of floats")

    def made(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> TracedArray:
        """The result of a torch function of this array's tensor."""
        return result(self.world, self.world.torch_call(function, (self.tensor, *args), kwargs))


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def _is_outside(array: TracedArray) -> bool:
    """Whether its memory may belong to an array or tensor from outside."""
    return bool(getattr(array.tensor, "input_storage", True))


def _plain_slice(part: Any) -> bool:
    return isinstance(part, slice) and all(
        bound is None or type(bound) is int for bound in (part.start, part.stop, part.step)
    ) and (part.step is None or part.step > 0)  # fmt: skip


def result(world: World, tensor: torch.Tensor) -> TracedArray:
    """The array for a computed tensor; without dimensions it is a scalar."""
    if tensor.dtype not in DTYPES:
        _refuse(f"a result of dtype {tensor.dtype}")
    return TracedArray(world, tensor, not tensor.dim())


def is_traceable(real: np.ndarray) -> bool:
    """Whether `torch.from_numpy` takes an array as it is, and its dtype is known here."""
    plain = real.dtype in TORCH_DTYPES and real.dtype.isnative and real.flags.writeable and real.flags.aligned
    return plain and all(step >= 0 and step % real.itemsize == 0 for step in real.strides)


def load_array(world: World, real: np.ndarray, source: Source) -> object:
    """A traceable array from outside: a graph input, read through `torch.from_numpy` at every call."""
    world.guard("TYPE", source, np.ndarray)
    world.guard("CALL", source, IsArrayLike(real.dtype, real.shape, real.strides))
    traced = world.recorder.input(torch.from_numpy(real), placeholder_name(source), requires_grad=False)
    world.input_sources.append(ArrayTensor(source))
    world.uses_arrays = world.reads_arrays = True
    return world.stand_in(real, source, TracedArray(world, traced))


def of_tensor(world: World, tensor: torch.Tensor) -> TracedArray:
    """`tensor.numpy()`."""
    if tensor.requires_grad or tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
        raise GraphBreak(
            "tensor-address", "Tensor.numpy() of a tensor that requires a gradient, or of a kind that is not traced"
        )
    world.uses_arrays = True
    return TracedArray(world, world.torch_call(torch.Tensor.detach, (tensor,), {}))


def has_array(values: Any) -> bool:
    """Whether an argument is a traced array, also inside lists and tuples."""
    return any(type(value) is TracedArray or (type(value) in (list, tuple) and has_array(value)) for value in values)


# Operators


def _dtype_of(value: Any) -> Any:
    if type(value) is TracedArray:
        return value.dtype
    if type(value) in _WEAK:
        return value
    if issubclass(type(value), np.generic) and value.dtype in TORCH_DTYPES:
        return value.dtype
    _refuse(f"an array with a {type(value).__name__}")


def _common(values: Any) -> np.dtype:
    """NumPy's own promotion. A Python int must fit, as NumPy demands."""
    try:
        dtype = np.result_type(*(_dtype_of(value) for value in values))
    except (TypeError, OverflowError) as error:
        raise GraphBreak("numpy-call", str(error)) from error
    if dtype not in TORCH_DTYPES:
        _refuse(f"a result of dtype {dtype}")
    if dtype.kind in "iu" and any(
        type(value) is int and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max for value in values
    ):
        _refuse(f"a Python int that does not fit {dtype}")
    return dtype


def _elementwise(function: Callable[..., Any], kinds: str, to_float: bool = False) -> Callable[..., Any]:
    """A function of one or two operands, brought to their common dtype first. `kinds`: dtype kinds that it takes."""

    def call(world: World, *values: Any) -> TracedArray:
        dtype = _common(values)
        if to_float and dtype.kind in "biu":
            dtype = np.dtype(np.float64)
        if dtype.kind not in kinds:
            _refuse(f"{getattr(function, '__name__', function)} of {dtype}")
        common = TORCH_DTYPES[dtype]
        operands = [_cast(world, value, common) for value in values]
        if not isinstance(operands[0], torch.Tensor):
            operands[0] = world.torch_call(torch.tensor, (operands[0],), {"dtype": common})
        if function in (torch.maximum, torch.minimum) and not isinstance(operands[-1], torch.Tensor):
            operands[-1] = world.torch_call(torch.tensor, (operands[-1],), {"dtype": common})
        return result(world, world.torch_call(function, tuple(operands), {}))

    return call


def _cast(world: World, value: Any, dtype: torch.dtype) -> Any:
    if type(value) is TracedArray:
        return (
            value.tensor
            if value.tensor.dtype is dtype
            else world.torch_call(torch.Tensor.to, (value.tensor, dtype), {})
        )
    number = value.item() if isinstance(value, np.generic) else value
    return float(number) if dtype.is_floating_point else number


_RELATIONS = {"<": torch.lt, "<=": torch.le, "==": torch.eq, "!=": torch.ne, ">": torch.gt, ">=": torch.ge}
_COMPARE = {op: _elementwise(fn, "biuf") for op, fn in _RELATIONS.items()}
_BINARY: dict[str, Callable[..., Any]] = {
    "+": _elementwise(torch.add, "iuf"), "-": _elementwise(torch.sub, "iuf"), "*": _elementwise(torch.mul, "iuf"),
    "/": _elementwise(torch.true_divide, "f", to_float=True), "&": _elementwise(torch.bitwise_and, "biu"),
    "|": _elementwise(torch.bitwise_or, "biu"), "^": _elementwise(torch.bitwise_xor, "biu"), **_COMPARE,
}  # fmt: skip


def binary(world: World, op: str, left: Any, right: Any, inplace: bool = False) -> Any:
    """`left op right` where a side is a traced array."""
    row = _power if op == "**" else _BINARY.get(op)
    if op == "@" and not inplace:
        return _matmul(world, left, right)
    if row is None or isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        _refuse(f"{type(left).__name__} {op} {type(right).__name__}")
    made = row(world, left, right)
    if not inplace or type(left) is not TracedArray or left.scalar:
        return made
    if _is_outside(left) or made.dtype != left.dtype or made.tensor.shape != left.tensor.shape:
        _refuse(f"{op}= of an array from outside, or with another dtype")
    world.torch_call(torch.Tensor.copy_, (left.tensor, made.tensor), {})
    return left


def _matmul(world: World, left: Any, right: Any) -> TracedArray:
    if (
        type(left) is not TracedArray
        or type(right) is not TracedArray
        or left.dtype != right.dtype
        or left.dtype.kind != "f"
    ):
        _refuse("@ of other things than two arrays of one floating dtype")
    if (
        not left.tensor.dim()
        or not right.tensor.dim()
        or left.tensor.shape[-1] != right.tensor.shape[-2 if right.tensor.dim() > 1 else 0]
    ):
        _refuse("@ of shapes that do not fit")
    return result(world, world.torch_call(torch.matmul, (left.tensor, right.tensor), {}))


def _reflected(op: str) -> Any:
    return lambda self, other: binary(self.world, op, other, self)


def _forward(op: str) -> Any:
    return lambda self, other: binary(self.world, op, self, other)


# For native code that computes with arrays (the builtins sum, max, sorted).
for _name, _op in {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "and": "&", "or": "|", "xor": "^",
                   "matmul": "@", "mod": "%", "floordiv": "//", "pow": "**", "lshift": "<<", "rshift": ">>"
                   }.items():  # fmt: skip
    setattr(TracedArray, f"__{_name}__", _forward(_op))
    setattr(TracedArray, f"__r{_name}__", _reflected(_op))
for _name, _op in {"lt": "<", "le": "<=", "eq": "==", "ne": "!=", "gt": ">", "ge": ">="}.items():
    setattr(TracedArray, f"__{_name}__", _forward(_op))
TracedArray.__hash__ = None  # type: ignore[method-assign, assignment]


# Functions and methods


def _reduction(function: Callable[..., Any], widen: bool = False) -> Callable[..., Any]:
    def call(world: World, array: Any, axis: Any = None, keepdims: bool = False) -> TracedArray:
        if (
            type(array) is not TracedArray
            or array.dtype.kind != "f"
            or not (axis is None or type(axis) is int)
            or not array.tensor.numel()
        ):
            _refuse("a reduction of integers, of nothing, or over several axes")
        axes = tuple(range(array.tensor.dim())) if axis is None else (axis,)
        if not axes:
            return array
        return array.made(function, axes, keepdim=keepdims)

    return call


def _mean_or_sum_of_any(function: Callable[..., Any], to: torch.dtype) -> Callable[..., Any]:
    floats = _reduction(function)

    def call(world: World, array: Any, axis: Any = None, keepdims: bool = False) -> TracedArray:
        if type(array) is TracedArray and array.dtype.kind in "i" and array.dtype.itemsize == 8:
            if to is torch.int64:
                axes = tuple(range(array.tensor.dim())) if axis is None else (axis,)
                return array.made(function, axes, keepdim=keepdims)
            array = TracedArray(world, world.torch_call(torch.Tensor.to, (array.tensor, to), {}))
        return floats(world, array, axis, keepdims)

    return call


def _reshape(world: World, array: Any, *shape: Any) -> TracedArray:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    if (
        type(array) is not TracedArray
        or not all(type(size) is int for size in sizes)
        or not array.tensor.is_contiguous()
    ):
        _refuse("reshape of an array that is not contiguous")
    return TracedArray(world, world.torch_call(torch.reshape, (array.tensor, sizes), {}))


def _transpose(world: World, array: Any, *axes: Any) -> TracedArray:
    order = (
        tuple(axes[0])
        if len(axes) == 1 and isinstance(axes[0], (list, tuple))
        else axes or tuple(reversed(range(array.tensor.dim())))
    )
    return TracedArray(world, world.torch_call(torch.permute, (array.tensor, order), {}))


def _astype(world: World, array: Any, dtype: Any) -> TracedArray:
    wanted = TORCH_DTYPES.get(np.dtype(dtype))
    if wanted is None or (array.dtype.kind == "f" and np.dtype(dtype).kind in "biu"):
        _refuse("astype to a dtype that is not traced, or from floats to integers")
    return TracedArray(world, world.torch_call(torch.Tensor.to, (array.tensor, wanted), {"copy": True}), array.scalar)


def _copy(world: World, array: Any) -> TracedArray:
    return TracedArray(
        world, world.torch_call(torch.Tensor.contiguous, (world.torch_call(torch.clone, (array.tensor,), {}),), {})
    )


def _where(world: World, condition: Any, chosen: Any, other: Any) -> TracedArray:
    dtype = _common((chosen, other))
    if type(condition) is not TracedArray or condition.tensor.dtype is not torch.bool:
        _refuse("where with a condition that is no array of bools")
    common = TORCH_DTYPES[dtype]
    sides = [_cast(world, value, common) for value in (chosen, other)]
    sides = [
        side if isinstance(side, torch.Tensor) else world.torch_call(torch.tensor, (side,), {"dtype": common})
        for side in sides
    ]
    return result(world, world.torch_call(torch.where, (condition.tensor, *sides), {}))


def _joined(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: World, arrays: Any, axis: Any = 0) -> TracedArray:
        if (
            not all(type(array) is TracedArray and array.dtype == arrays[0].dtype for array in arrays)
            or type(axis) is not int
        ):
            _refuse("joining arrays of several dtypes")
        return result(world, world.torch_call(function, ([array.tensor for array in arrays], axis), {}))

    return call


def _unary(function: Callable[..., Any], kinds: str = "f") -> Callable[..., Any]:
    def call(world: World, array: Any) -> TracedArray:
        if type(array) is not TracedArray or array.dtype.kind not in kinds:
            _refuse(f"{getattr(function, '__name__', function)} of other things than an array of floats")
        return array.made(function)

    return call


def _as_array(world: World, array: Any, dtype: Any = None, copy: bool = True) -> TracedArray:
    """np.array and np.asarray of an array; of a scalar, an array without dimensions is no scalar."""
    if type(array) is not TracedArray or array.scalar or type(copy) is not bool:
        _refuse("an array of other things than one array")
    if copy and not array.tensor.is_contiguous():
        _refuse("a copy of an array that is not contiguous")
    if dtype is not None and np.dtype(dtype) != array.dtype:
        return _astype(world, array, dtype)
    return _copy(world, array) if copy else array


def _truths(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: World, array: Any, axis: Any = None, keepdims: bool = False) -> TracedArray:
        if type(array) is not TracedArray or array.dtype == np.uint8 or (axis is None and keepdims):
            _refuse("any or all of bytes, or with keepdims over all axes")
        if not (axis is None or type(axis) is int):
            _refuse("any or all over several axes")
        return array.made(function) if axis is None else array.made(function, axis, keepdim=keepdims)

    return call


def _places(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: World, array: Any, axis: Any = None) -> TracedArray:
        if type(array) is not TracedArray or array.dtype.kind not in "fi" or not array.tensor.numel():
            _refuse("argmax or argmin of bools, or of nothing")
        return array.made(function, axis)

    return call


def _deviation(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: World, array: Any, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> TracedArray:
        if type(array) is not TracedArray or array.dtype.kind != "f" or not array.tensor.dim():
            _refuse("std or var of other things than an array of floats")
        if not (axis is None or type(axis) is int) or array.tensor.numel() == 0 or ddof not in (0, 1):
            _refuse("std or var of nothing, or over several axes")
        if ddof and 1 in (array.tensor.shape if axis is None else array.tensor.shape[axis : axis + 1 or None]):
            _refuse("std or var of one element")
        return array.made(function, axis, correction=ddof, keepdim=keepdims)

    return call


def _cumsum(world: World, array: Any, axis: Any = None) -> TracedArray:
    if type(array) is not TracedArray or array.dtype not in (np.float32, np.float64, np.int64):
        _refuse("cumsum of other things than an array of floats or int64")
    return array.made(torch.cumsum, axis) if axis is not None else array.made(torch.ravel).made(torch.cumsum, 0)


def _norm(world: World, array: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> TracedArray:
    floats = type(array) is TracedArray and array.dtype.kind == "f"
    if not floats or ord is not None or not (axis is None or type(axis) is int) or not array.tensor.dim():
        _refuse("linalg.norm with an order, over several axes, or of other things than floats")
    return array.made(torch.linalg.vector_norm, 2, axis, keepdim=keepdims)


def _clip(world: World, array: Any, low: Any = None, high: Any = None) -> TracedArray:
    if type(array) is not TracedArray or array.dtype.kind != "f" or (low is None and high is None):
        _refuse("clip of other things than an array of floats")
    for bound, function in ((low, torch.maximum), (high, torch.minimum)):
        array = array if bound is None else _elementwise(function, "f")(world, array, bound)
    return array


def _power(world: World, left: Any, right: Any) -> TracedArray:
    if _common((left, right)).kind != "f":
        _refuse("a power of integers")
    return _elementwise(torch.pow, "f")(world, left, right)


def _dot(world: World, left: Any, right: Any) -> TracedArray:
    if any(type(side) is not TracedArray or side.tensor.dim() not in (1, 2) for side in (left, right)):
        _refuse("dot of other things than vectors and matrices")
    return _matmul(world, left, right)


def _outer(world: World, left: Any, right: Any) -> TracedArray:
    sides = (left, right)
    if any(type(side) is not TracedArray or side.tensor.dim() != 1 or side.dtype != left.dtype for side in sides):
        _refuse("outer of other things than two vectors of one dtype")
    return result(world, world.torch_call(torch.outer, (left.tensor, right.tensor), {}))


def _meshgrid(world: World, *arrays: Any, indexing: str = "xy") -> Any:
    if len(arrays) < 2 or any(type(one) is not TracedArray or one.tensor.dim() != 1 for one in arrays):
        _refuse("meshgrid of other things than two or more vectors")
    if indexing not in ("xy", "ij"):
        _refuse("meshgrid with another indexing")
    grids = world.torch_call(torch.meshgrid, tuple(one.tensor for one in arrays), {"indexing": indexing})
    made = (_copy(world, TracedArray(world, grid)) for grid in grids)
    return tuple(made) if isinstance(np.meshgrid(0, 0), tuple) else list(made)


def _flattened(world: World, array: Any) -> TracedArray:
    if type(array) is not TracedArray or array.scalar or not array.tensor.is_contiguous():
        _refuse("an array that is not contiguous is flattened")
    return TracedArray(world, world.torch_call(torch.Tensor.view, (array.tensor, -1), {}))


def _listed(world: World, array: TracedArray) -> Any:
    known = world.recorder.known_value(array.tensor)
    if known is None:
        world.recorder.lacks_form("data-dependent-scalar", "ndarray.tolist()")
    return known.tolist()


METHODS: dict[str, Callable[..., Any]] = {
    "sum": _mean_or_sum_of_any(torch.sum, torch.int64), "mean": _mean_or_sum_of_any(torch.mean, torch.float64),
    "max": _reduction(torch.amax), "min": _reduction(torch.amin), "reshape": _reshape, "transpose": _transpose,
    "astype": _astype,
    "copy": _copy, "any": _truths(torch.any), "all": _truths(torch.all), "argmax": _places(torch.argmax),
    "argmin": _places(torch.argmin), "std": _deviation(torch.std), "var": _deviation(torch.var), "cumsum": _cumsum,
    "clip": _clip, "dot": _dot, "tolist": _listed, "ravel": _flattened,
}  # fmt: skip

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sin: _unary(torch.sin), np.cos: _unary(torch.cos), np.tan: _unary(torch.tan), np.tanh: _unary(torch.tanh),
    np.exp: _unary(torch.exp),
    np.expm1: _unary(torch.expm1), np.log: _unary(torch.log), np.log1p: _unary(torch.log1p),
    np.log2: _unary(torch.log2),
    np.sqrt: _unary(torch.sqrt), np.floor: _unary(torch.floor), np.ceil: _unary(torch.ceil), np.abs: _unary(torch.abs),
    np.negative: _unary(torch.neg), np.square: _unary(torch.square), np.isnan: _unary(torch.isnan),
    np.isfinite: _unary(torch.isfinite),
    np.add: _BINARY["+"], np.subtract: _BINARY["-"], np.multiply: _BINARY["*"], np.divide: _BINARY["/"],
    np.maximum: _elementwise(torch.maximum, "iuf"), np.minimum: _elementwise(torch.minimum, "iuf"), np.matmul: _matmul,
    np.greater: _BINARY[">"], np.less: _BINARY["<"], np.equal: _BINARY["=="], np.sum: METHODS["sum"],
    np.mean: METHODS["mean"],
    np.max: METHODS["max"], np.min: METHODS["min"], np.where: _where, np.concatenate: _joined(torch.cat),
    np.stack: _joined(torch.stack),
    np.reshape: _reshape, np.transpose: _transpose, np.array: _as_array,
    np.asarray: lambda world, array, dtype=None: _as_array(world, array, dtype, False), np.copy: _as_array,
    np.power: _power, np.linalg.norm: _norm, np.dot: _dot, np.outer: _outer, np.meshgrid: _meshgrid,
    **{getattr(np, name): METHODS[name] for name in ("any", "all", "argmax", "argmin", "std", "var", "cumsum", "clip")},
}  # fmt: skip
_BY_ID = {id(function): row for function, row in FUNCTIONS.items()}


class ArrayMethod:
    """`array.name`, to be called."""

    __slots__ = ("array", "name")

    def __init__(self, array: TracedArray, name: str) -> None:
        self.array, self.name = array, name


def getattr_array(world: World, array: TracedArray, name: str) -> Any:
    """Attributes: what NumPy would answer; methods without a row are a graph break."""
    answer = _ATTRIBUTES.get(name)
    if answer is not None:
        return answer(world, array)
    if name in METHODS:
        return ArrayMethod(array, name)
    _refuse(f"ndarray.{name}")


_ATTRIBUTES: dict[str, Callable[[Any, TracedArray], Any]] = {
    "shape": lambda world, array: tuple(int(size) for size in array.tensor.shape),
    "ndim": lambda world, array: array.tensor.dim(),
    "size": lambda world, array: int(array.tensor.numel()),
    "dtype": lambda world, array: world.load(array.dtype, world.constant(array.dtype, "dtype")),
    "T": lambda world, array: _transpose(world, array),
}


def call_method(tracer: Tracer, fn: ArrayMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`array.sum(axis=0)`."""
    return _called(tracer, METHODS[fn.name], (fn.array, *args), kwargs)


def takes(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row | None:
    """The rule for a call that is given a traced array: of a function of NumPy's, or of torch.from_numpy and its kin.
    None: any other."""
    if not (has_array(args) or has_array(kwargs.values())):
        return None
    if id(fn) in _TO_TENSOR:
        return _to_tensor
    if isinstance(fn, np.ufunc) or str(getattr(fn, "__module__", "")).startswith("numpy"):
        return _call_function
    return None


def _call_function(tracer: Tracer, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    row = _BY_ID.get(id(fn))
    if row is None:
        _refuse(f"numpy.{getattr(fn, '__name__', fn)}")
    return _called(tracer, row, args, kwargs)


def _called(tracer: Tracer, row: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return row(tracer.world, *args, **kwargs)
    except TypeError as error:  # arguments that the row does not take (out=, dtype=, where=)
        raise GraphBreak("numpy-call", str(error)) from error


def _to_tensor(tracer: Tracer, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.from_numpy and torch.as_tensor share the array's memory; torch.tensor copies it."""
    array, *rest = args
    if rest or kwargs or type(array) is not TracedArray or (array.scalar and fn is torch.from_numpy):
        _refuse(f"torch.{fn.__name__} of an array with further arguments")
    return tracer.world.torch_call(torch.clone, (array.tensor,), {}) if fn is torch.tensor else array.tensor


def array_type(array: TracedArray) -> type:
    """What `type(array)` gives."""
    return DTYPES[array.tensor.dtype] if array.scalar else np.ndarray


_TO_TENSOR = frozenset({id(torch.from_numpy), id(torch.as_tensor), id(torch.tensor)})
