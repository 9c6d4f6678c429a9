"""Functions of NumPy's, and methods of its arrays, that are called with traced arrays.

Takes a function or a method with its arguments; gives what it gives, recorded as operators. Always holds: a row's
result has NumPy's dtype and shape; what NumPy raises because of an array's values is raised by NumPy, in a repeated
call; a function without a row is a graph break.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.capture.border.absent import LOOK_LIKE
from fusewright.capture.border.values.array import (
    BINARY,
    DTYPES,
    TORCH_DTYPES,
    Row,
    TracedArray,
    by_numpy,
    cast,
    common_dtype,
    elementwise,
    has_array,
    matmul,
    of_tensor,
    or_by_numpy,
    power,
    refuse,
    result,
)
from fusewright.record.torch_level import checking
from fusewright.sizes.symfloat import float_of_tensor

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World


def _reduction(function: Callable[..., Any], widen: bool = False) -> Callable[..., Any]:
    def call(world: World, array: Any, axis: Any = None, keepdims: bool = False) -> TracedArray:
        if (
            type(array) is not TracedArray
            or array.dtype.kind != "f"
            or not (axis is None or type(axis) is int)
            or not array.tensor.numel()
        ):
            refuse("a reduction of integers, of nothing, or over several axes")
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
            array = TracedArray(world, world.torch_call(torch._C.TensorBase.to, (array.tensor, to), {}))
        return floats(world, array, axis, keepdims)

    return call


def _reshape(world: World, array: Any, *shape: Any) -> TracedArray:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    if (
        type(array) is not TracedArray
        or not all(type(size) is int for size in sizes)
        or not array.tensor.is_contiguous()
    ):
        refuse("reshape of an array that is not contiguous")
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
        refuse("astype to a dtype that is not traced, or from floats to integers")
    made = world.torch_call(torch._C.TensorBase.to, (array.tensor, wanted), {"copy": True})
    return TracedArray(world, made, array.scalar)


def _copy(world: World, array: Any) -> TracedArray:
    copied = world.torch_call(torch.clone, (array.tensor,), {})
    return TracedArray(world, world.torch_call(torch._C.TensorBase.contiguous, (copied,), {}))


def _where(world: World, condition: Any, chosen: Any, other: Any) -> TracedArray:
    dtype = common_dtype((chosen, other))
    if type(condition) is not TracedArray or condition.tensor.dtype is not torch.bool:
        refuse("where with a condition that is no array of bools")
    common = TORCH_DTYPES[dtype]
    sides = [cast(world, value, common) for value in (chosen, other)]
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
            refuse("joining arrays of several dtypes")
        return result(world, world.torch_call(function, ([array.tensor for array in arrays], axis), {}))

    return call


def _unary(function: Callable[..., Any], kinds: str = "f") -> Callable[..., Any]:
    def call(world: World, array: Any) -> TracedArray:
        if type(array) is not TracedArray or array.dtype.kind not in kinds:
            refuse(f"{getattr(function, '__name__', function)} of other things than an array of floats")
        return array.made(function)

    return call


def _as_array(world: World, array: Any, dtype: Any = None, copy: bool = True) -> TracedArray:
    """np.array and np.asarray of an array; of a scalar, an array without dimensions is no scalar."""
    if isinstance(array, torch.Tensor):
        array = of_tensor(world, array)
    if type(array) is not TracedArray or array.scalar or type(copy) is not bool:
        refuse("an array of other things than one array")
    if copy and not array.tensor.is_contiguous():
        refuse("a copy of an array that is not contiguous")
    if dtype is not None and np.dtype(dtype) != array.dtype:
        return _astype(world, array, dtype)
    return _copy(world, array) if copy else array


def _asarray(world: World, array: Any, dtype: Any = None) -> Any:
    if type(array) in (list, tuple):  # a new array in any case
        return by_numpy(world, np.array, (array,), {} if dtype is None else {"dtype": dtype})
    return _as_array(world, array, dtype, False)


def _truths(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: World, array: Any, axis: Any = None, keepdims: bool = False) -> TracedArray:
        if type(array) is not TracedArray or array.dtype == np.uint8 or (axis is None and keepdims):
            refuse("any or all of bytes, or with keepdims over all axes")
        if not (axis is None or type(axis) is int):
            refuse("any or all over several axes")
        return array.made(function) if axis is None else array.made(function, axis, keepdim=keepdims)

    return call


def _places(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: World, array: Any, axis: Any = None) -> TracedArray:
        if type(array) is not TracedArray or array.dtype.kind not in "fi" or not array.tensor.numel():
            refuse("argmax or argmin of bools, or of nothing")
        return array.made(function, axis)

    return call


def _deviation(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(world: World, array: Any, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> TracedArray:
        if type(array) is not TracedArray or array.dtype.kind != "f" or not array.tensor.dim():
            refuse("std or var of other things than an array of floats")
        if not (axis is None or type(axis) is int) or array.tensor.numel() == 0 or ddof not in (0, 1):
            refuse("std or var of nothing, or over several axes")
        if ddof and 1 in (array.tensor.shape if axis is None else array.tensor.shape[axis : axis + 1 or None]):
            refuse("std or var of one element")
        return array.made(function, axis, correction=ddof, keepdim=keepdims)

    return call


def _cumsum(world: World, array: Any, axis: Any = None) -> TracedArray:
    if type(array) is not TracedArray or array.dtype not in (np.float32, np.float64, np.int64):
        refuse("cumsum of other things than an array of floats or int64")
    return array.made(torch.cumsum, axis) if axis is not None else array.made(torch.ravel).made(torch.cumsum, 0)


def _norm(world: World, array: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> TracedArray:
    floats = type(array) is TracedArray and array.dtype.kind == "f"
    if not floats or ord is not None or not (axis is None or type(axis) is int) or not array.tensor.dim():
        refuse("linalg.norm with an order, over several axes, or of other things than floats")
    return array.made(torch.linalg.vector_norm, 2, axis, keepdim=keepdims)


def _clip(world: World, array: Any, low: Any = None, high: Any = None) -> TracedArray:
    if type(array) is not TracedArray or array.dtype.kind != "f" or (low is None and high is None):
        refuse("clip of other things than an array of floats")
    for bound, function in ((low, torch.maximum), (high, torch.minimum)):
        array = array if bound is None else elementwise(function, "f")(world, array, bound)
    return array


def _dot(world: World, left: Any, right: Any) -> TracedArray:
    if any(type(side) is not TracedArray or side.tensor.dim() not in (1, 2) for side in (left, right)):
        refuse("dot of other things than vectors and matrices")
    return matmul(world, left, right)


def _outer(world: World, left: Any, right: Any) -> TracedArray:
    sides = (left, right)
    if any(type(side) is not TracedArray or side.tensor.dim() != 1 or side.dtype != left.dtype for side in sides):
        refuse("outer of other things than two vectors of one dtype")
    return result(world, world.torch_call(torch.outer, (left.tensor, right.tensor), {}))


def _floats(what: str, *arrays: Any) -> None:
    """Refuses other things than arrays of one floating dtype."""
    if any(type(one) is not TracedArray or one.dtype.kind != "f" or one.dtype != arrays[0].dtype for one in arrays):
        refuse(f"{what} of other things than arrays of one floating dtype")


def _checked(function: Callable[..., Any], dims: tuple[tuple[int, ...], ...]) -> Callable[..., Any]:
    """A function of matrices with numbers of dimensions out of `dims`, which also gives the places where it failed:
    where there are any, the call is repeated, and NumPy raises."""

    def call(world: World, *arrays: Any) -> TracedArray:
        _floats(function.__name__, *arrays)
        shapes = [one.tensor.shape for one in arrays]
        square = len(shapes[0]) > 1 and shapes[0][-1] == shapes[0][-2] and 0 not in shapes[0]
        if not square or tuple(map(len, shapes)) not in dims or any(one[0] != shapes[0][-1] for one in shapes[1:]):
            refuse(f"{function.__name__} of arrays of these shapes")
        made, failed = world.torch_call(function, tuple(one.tensor for one in arrays), {})
        passed = world.torch_call(torch.all, (world.torch_call(torch.eq, (failed, 0), {}),), {})
        world.torch_call(torch._assert_async, checking(world.recorder.level, passed), {})
        return _copy(world, TracedArray(world, made))

    return call


def _determinant(world: World, array: Any) -> TracedArray:
    _floats("linalg.det", array)
    if array.tensor.dim() < 2 or array.tensor.shape[-1] != array.tensor.shape[-2]:
        refuse("linalg.det of other things than square matrices")
    return array.made(torch.linalg.det)  # type: ignore[no-any-return]


def _einsum(world: World, text: Any, *arrays: Any) -> TracedArray:
    _floats("einsum", *arrays)
    plain = type(text) is str and all(one.isalpha() or one in ",-> " for one in text)
    if not plain or len(arrays) < 2 or not all(one.tensor.is_contiguous() for one in arrays):
        refuse("einsum with an ellipsis, of one array, or of arrays that are not contiguous")
    made = world.torch_call(torch.einsum, (text, *(one.tensor for one in arrays)), {})
    return result(world, world.torch_call(torch._C.TensorBase.contiguous, (made,), {}))


def _median(world: World, array: Any, axis: Any = None) -> TracedArray:
    _floats("median", array)
    if not (axis is None or type(axis) is int) or array.scalar or not array.tensor.numel():
        refuse("median over several axes, or of nothing")
    axis, array = (0, array.made(torch.ravel)) if axis is None else (axis, array)
    ordered, _ = world.torch_call(torch.sort, (array.tensor,), {"dim": axis})
    size = int(array.tensor.shape[axis])
    low, high, last = (
        world.torch_call(torch.select, (ordered, axis, place), {}) for place in ((size - 1) // 2, size // 2, size - 1)
    )
    middle = low if size % 2 else world.torch_call(torch.div, (world.torch_call(torch.add, (low, high), {}), 2), {})
    is_nan = world.torch_call(torch.isnan, (last,), {})  # which come last
    return result(world, world.torch_call(torch.where, (is_nan, last, middle), {}))


def _meshgrid(world: World, *arrays: Any, indexing: str = "xy") -> Any:
    if len(arrays) < 2 or any(type(one) is not TracedArray or one.tensor.dim() != 1 for one in arrays):
        refuse("meshgrid of other things than two or more vectors")
    if indexing not in ("xy", "ij"):
        refuse("meshgrid with another indexing")
    grids = world.torch_call(torch.meshgrid, tuple(one.tensor for one in arrays), {"indexing": indexing})
    made = (_copy(world, TracedArray(world, grid)) for grid in grids)
    return tuple(made) if isinstance(np.meshgrid(0, 0), tuple) else list(made)


def _flattened(world: World, array: Any) -> TracedArray:
    if type(array) is not TracedArray or array.scalar or not array.tensor.is_contiguous():
        refuse("an array that is not contiguous is flattened")
    return TracedArray(world, world.torch_call(torch._C.TensorBase.view, (array.tensor, -1), {}))


def _listed(world: World, array: TracedArray) -> Any:
    known = world.recorder.read(array.tensor)
    if known is None:
        world.recorder.lacks_form("data-dependent-scalar", "ndarray.tolist()")
    return known.tolist()


def _flat_copy(world: World, array: TracedArray) -> TracedArray:
    return _copy(world, array.made(torch.reshape, (-1,)))


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    def read(world: World, array: TracedArray) -> TracedArray:
        if array.dtype.kind != "c":
            refuse("the real or imaginary part of real numbers")
        return array.made(function)

    return read


def _split(world: World, array: Any, parts: Any, axis: int = 0) -> list[TracedArray]:
    if type(array) is not TracedArray or type(parts) is not int or array.tensor.shape[axis] % parts:
        refuse("split at given places, or into parts of different sizes")
    made = world.torch_call(torch.tensor_split, (array.tensor, parts), {"dim": axis})
    return [TracedArray(world, part) for part in made]


def _viewed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result is a view, as PyTorch's is."""

    def call(world: World, array: Any, *args: Any, **kwargs: Any) -> TracedArray:
        if type(array) is not TracedArray or array.scalar:
            refuse(f"{function.__name__} of a scalar")
        return TracedArray(world, world.torch_call(function, (array.tensor, *args), kwargs))

    return call


def _at_least(dims: int) -> Callable[..., Any]:
    def call(world: World, array: Any) -> TracedArray:
        if type(array) is not TracedArray or array.scalar:
            refuse("a scalar made an array")
        lacking = dims - array.tensor.dim()
        return array if lacking <= 0 else array[(None,) * lacking]  # type: ignore[no-any-return]

    return call


def _contiguous(world: World, array: Any, dtype: Any = None) -> TracedArray:
    if type(array) is not TracedArray or array.scalar or (dtype is not None and np.dtype(dtype) != array.dtype):
        refuse("ascontiguousarray with another dtype, or of a scalar")
    return array if array.tensor.is_contiguous() else _copy(world, array)


def _number(world: World, array: TracedArray, *place: Any) -> Any:
    """`array.item(...)`, and what `float(array)` and `int(array)` ask."""
    if len(place) == 1 and type(place[0]) is int:
        array = array.made(torch.reshape, (-1,))[place[0]]
    elif place:
        array = array[place[0] if len(place) == 1 else place]
    recorder = world.recorder
    if array.tensor.numel() != 1:
        refuse("item() of several elements")
    if array.dtype.kind != "f" or recorder.env is None:
        return world.tracer.call(torch._C.TensorBase.item, (array.tensor,))
    if recorder.level != "aten":
        recorder.lacks_form("data-dependent-scalar", "a float that is read from an array")
    return float_of_tensor(recorder, array.tensor)


METHODS: dict[str, Callable[..., Any]] = {
    "sum": _mean_or_sum_of_any(torch.sum, torch.int64), "mean": _mean_or_sum_of_any(torch.mean, torch.float64),
    "max": _reduction(torch.amax), "min": _reduction(torch.amin), "reshape": _reshape, "transpose": _transpose,
    "astype": _astype,
    "copy": _copy, "any": _truths(torch.any), "all": _truths(torch.all), "argmax": _places(torch.argmax),
    "argmin": _places(torch.argmin), "std": _deviation(torch.std), "var": _deviation(torch.var), "cumsum": _cumsum,
    "clip": _clip, "dot": _dot, "tolist": _listed, "ravel": _flattened,
    "item": _number, "flatten": _flat_copy, "squeeze": _viewed(torch.squeeze), "swapaxes": _viewed(torch.swapaxes),
}  # fmt: skip

FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sin: _unary(torch.sin), np.cos: _unary(torch.cos), np.tan: _unary(torch.tan), np.tanh: _unary(torch.tanh),
    np.exp: _unary(torch.exp),
    np.expm1: _unary(torch.expm1), np.log: _unary(torch.log), np.log1p: _unary(torch.log1p),
    np.log2: _unary(torch.log2),
    np.sqrt: _unary(torch.sqrt), np.floor: _unary(torch.floor), np.ceil: _unary(torch.ceil), np.abs: _unary(torch.abs),
    np.negative: _unary(torch.neg), np.square: _unary(torch.square), np.isnan: _unary(torch.isnan),
    np.isfinite: _unary(torch.isfinite),
    np.add: BINARY["+"], np.subtract: BINARY["-"], np.multiply: BINARY["*"], np.divide: BINARY["/"],
    np.maximum: elementwise(torch.maximum, "iuf"), np.minimum: elementwise(torch.minimum, "iuf"), np.matmul: matmul,
    np.greater: BINARY[">"], np.less: BINARY["<"], np.equal: BINARY["=="], np.sum: METHODS["sum"],
    np.mean: METHODS["mean"],
    np.max: METHODS["max"], np.min: METHODS["min"], np.where: _where, np.concatenate: _joined(torch.cat),
    np.stack: _joined(torch.stack),
    np.reshape: _reshape, np.transpose: _transpose, np.array: _as_array,
    np.asarray: _asarray, np.copy: _as_array,
    np.power: power, np.linalg.norm: _norm, np.dot: _dot, np.outer: _outer, np.meshgrid: _meshgrid,
    np.linalg.inv: _checked(torch.linalg.inv_ex, ((2,), (3,), (4,))),
    np.linalg.solve: _checked(torch.linalg.solve_ex, ((2, 1), (2, 2))),
    np.split: _split, np.squeeze: METHODS["squeeze"], np.swapaxes: METHODS["swapaxes"],
    np.expand_dims: _viewed(torch.unsqueeze), np.moveaxis: _viewed(torch.movedim), np.real: _real(torch.real),
    np.imag: _real(torch.imag), np.ravel: _flattened,
    np.atleast_1d: _at_least(1), np.atleast_2d: _at_least(2), np.ascontiguousarray: _contiguous,
    np.ndim: lambda world, array: array.tensor.dim(),
    np.shape: lambda world, array: tuple(map(int, array.tensor.shape)),
    np.size: lambda world, array: int(array.tensor.numel()),
    np.linalg.det: _determinant, np.einsum: _einsum, np.median: _median,
    **{getattr(np, name): METHODS[name] for name in ("any", "all", "argmax", "argmin", "std", "var", "cumsum", "clip")},
}  # fmt: skip
_BY_ID = {id(function): row for function, row in FUNCTIONS.items()}


class ArrayMethod:
    """`array.name`, to be called."""

    __slots__ = ("array", "name")

    def __init__(self, array: TracedArray, name: str) -> None:
        self.array, self.name = array, name

    def __eq__(self, other: object) -> bool:
        return type(other) is ArrayMethod and other.array is self.array and other.name == self.name

    def __hash__(self) -> int:
        return hash((id(self.array), self.name))


LOOK_LIKE[ArrayMethod] = lambda method: getattr(np.empty(0, method.array.dtype), method.name)


def getattr_array(world: World, array: TracedArray, name: str) -> Any:
    """Attributes: what NumPy would answer; methods without a row are a graph break."""
    answer = _ATTRIBUTES.get(name)
    if answer is not None:
        return answer(world, array)
    if name in METHODS or name in _IN_PLACE or name in _BY_NUMPY:
        return ArrayMethod(array, name)
    refuse(f"ndarray.{name}")


_ATTRIBUTES: dict[str, Callable[[Any, TracedArray], Any]] = {
    "shape": lambda world, array: tuple(int(size) for size in array.tensor.shape),
    "ndim": lambda world, array: array.tensor.dim(),
    "size": lambda world, array: int(array.tensor.numel()),
    "dtype": lambda world, array: world.load(array.dtype, world.constant(array.dtype, "dtype")),
    "T": lambda world, array: _transpose(world, array),
    "real": _real(torch.real),
    "imag": _real(torch.imag),
    "itemsize": lambda world, array: array.dtype.itemsize,
    "nbytes": lambda world, array: int(array.tensor.numel()) * array.dtype.itemsize,
    "strides": lambda world, array: tuple(int(step) * array.dtype.itemsize for step in array.tensor.stride()),
    "base": lambda world, array: refuse("ndarray.base"),
}

# Methods that are as the functions of their names, and those that write to the array what such a function gives.
_BY_NUMPY = frozenset("""
    argsort argpartition prod ptp round repeat take trace cumprod searchsorted choose dot compress swapaxes
    nonzero squeeze diagonal
""".split())  # fmt: skip
_IN_PLACE = frozenset({"sort", "partition"})


def call_method(tracer: Tracer, fn: ArrayMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`array.sum(axis=0)`."""
    function = np.ndarray.astype if fn.name == "astype" else getattr(np, fn.name, None)
    if fn.name in _IN_PLACE:
        fn.array.fill(by_numpy(tracer.world, function, (fn.array, *args), kwargs))
        return None
    return _called(tracer, METHODS.get(fn.name), function, (fn.array, *args), kwargs)


def takes(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Row | None:
    """The rule for a call that is given a traced array: of a function of NumPy's, or of torch.from_numpy and its kin.
    None: any other."""
    if not (has_array(args) or has_array(kwargs.values())):
        return None
    if id(fn) in _TO_TENSOR:
        return _to_tensor
    if isinstance(fn, type) and issubclass(fn, np.generic):
        return _to_dtype
    if isinstance(fn, np.ufunc) or str(getattr(fn, "__module__", "")).startswith("numpy"):
        return call_function
    return None


def _to_dtype(tracer: Tracer, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """np.float32(array)"""
    if len(args) != 1 or kwargs or type(args[0]) is not TracedArray or fn not in DTYPES.values():
        refuse(f"numpy.{fn.__name__} of several arguments")
    made = or_by_numpy(tracer.world, _astype, np.ndarray.astype, (args[0], fn))
    return TracedArray(tracer.world, made.tensor, not made.tensor.dim())


def call_function(tracer: Tracer, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _called(tracer, _BY_ID.get(id(fn)), fn, args, kwargs)


def _called(
    tracer: Tracer, row: Callable[..., Any] | None, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    out = kwargs.get("out")
    if isinstance(fn, np.ufunc) and len(args) == fn.nin + 1 and fn.nout == 1:  # np.exp(x, out)
        args, out = args[:-1], args[-1]
    made = or_by_numpy(tracer.world, row, fn, args, {name: value for name, value in kwargs.items() if name != "out"})
    if out is None:
        return made
    if type(out) is tuple and len(out) == 1:
        out = out[0]
    if type(out) is not TracedArray or out.scalar or type(made) is not TracedArray:
        refuse("out= of other things than one array")
    out.fill(made)
    return out


def _to_tensor(tracer: Tracer, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.from_numpy and torch.as_tensor share the array's memory; torch.tensor copies it."""
    array, *rest = args
    if rest or kwargs or type(array) is not TracedArray or (array.scalar and fn is torch.from_numpy):
        refuse(f"torch.{fn.__name__} of an array with further arguments")
    return tracer.world.torch_call(torch.clone, (array.tensor,), {}) if fn is torch.tensor else array.tensor


_TO_TENSOR = frozenset({id(torch.from_numpy), id(torch.as_tensor), id(torch.tensor)})
