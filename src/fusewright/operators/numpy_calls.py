"""Functions of NumPy's as operators: a graph calls NumPy itself where no operator of PyTorch has exactly its meaning.

Takes the name of a function, its arguments as a text, and the arrays among them as tensors on the CPU; gives the arrays
of its result as tensors. Always holds: a function here computes from its arguments alone, and gives fresh memory; its
result has the shapes and dtypes that `described` has found, or the operator raises, and the call runs eagerly.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fusewright.base.pytorch import methods, torch
from fusewright.base.records import dataclass
from fusewright.sizes.tensor_type import TensorType

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define("numpy_call(str name, str arguments, str results, Tensor[] arrays) -> Tensor[]")
NUMPY_CALL = torch.ops.fusewright.numpy_call.default

_NAMES = {
    np: """
        sort argsort partition argpartition median percentile quantile nanmedian nanpercentile nanquantile lexsort
        nanmean nansum nanstd nanvar nanmax nanmin nanprod nanargmax nanargmin nancumsum nancumprod sum prod mean
        std var max min amax amin argmax argmin all any ptp average cumsum cumprod diff ediff1d gradient trapezoid
        cross kron inner outer vdot tensordot trace dot tile roll pad triu tril interp searchsorted digitize convolve
        correlate corrcoef cov take take_along_axis select choose clip round around nan_to_num isclose where histogram
        concatenate stack hstack vstack dstack column_stack append insert delete array_equal allclose count_nonzero
        polyval polyfit heaviside sinc i0 unwrap angle fix isneginf isposinf cbrt vander repeat matmul
        array zeros_like ones_like full_like isin resize block vecdot reshape ravel einsum
    """,
    np.linalg: """
        norm inv solve det slogdet svd svdvals qr cholesky eigh eigvalsh pinv matrix_power matrix_rank matrix_norm
        vector_norm cond tensorinv tensorsolve multi_dot
    """,
    np.fft: "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 hfft ihfft fftfreq rfftfreq fftshift ifftshift",
}


_OPERATORS = """
    getitem pow mod floordiv lshift rshift invert add sub mul truediv and_ or_ xor matmul lt le eq ne gt ge neg
"""


def _setitem(array: np.ndarray, key: Any, value: Any) -> np.ndarray:
    made = array.copy()
    made[key] = value
    return made


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"{module.__name__}.{name}": getattr(module, name)
        for module, names in _NAMES.items()
        for name in names.split()
        if hasattr(module, name)
    },
    **{f"numpy.{name}": found for name, found in vars(np).items() if isinstance(found, np.ufunc) and found.nout == 1},
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    "setitem": _setitem,
    "astype": np.ndarray.astype,
}
_BY_ID = {id(function): name for name, function in _FUNCTIONS.items()}


def of_numpy() -> Iterator[Callable[..., Any]]:
    """NumPy's functions here that are written in Python or wrapped by it: all but its ufuncs."""
    return (one for name, one in _FUNCTIONS.items() if name.startswith("numpy.") and not isinstance(one, np.ufunc))


def name_of(function: Any) -> str | None:
    """The name of a function that may be an operator; None for any other."""
    return _BY_ID.get(id(function))


# Arguments as text: literals, and ("", kind, ...) for what is none.


def encoded(value: Any, arrays: list[Any], is_array: Callable[[Any], Any]) -> Any:
    """`value` as literals; arrays (for which `is_array` gives a tensor and whether it is a scalar) are put into
    `arrays`. Raises TypeError for what has no text."""
    kind = type(value)
    if kind in (tuple, list):
        return kind(encoded(part, arrays, is_array) for part in value)
    if value is None or value is Ellipsis or kind in (bool, int, str):
        return value
    if kind is float:
        return value if value - value == 0 else ("", "float", str(value))
    if kind is slice:
        return ("", "slice", *(encoded(part, arrays, is_array) for part in (value.start, value.stop, value.step)))
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return ("", "dtype", np.dtype(value).str)
    if kind is type and value in (bool, int, float, complex):
        return ("", "dtype", np.dtype(value).str)
    if kind is complex:
        return ("", "complex", str(value))
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return ("", "number", value.dtype.str, encoded(value.item(), arrays, is_array))
    found = is_array(value)
    if found is None:
        raise TypeError(f"a {kind.__name__}")
    arrays.append(found[0])
    return ("", "scalar" if found[1] else "array", len(arrays) - 1)


_DECODE: dict[str, Callable[..., Any]] = {
    "float": lambda arrays, text: float(text),
    "complex": lambda arrays, text: complex(text),
    "slice": lambda arrays, *bounds: slice(*bounds),
    "dtype": lambda arrays, text: np.dtype(text),
    "number": lambda arrays, dtype, value: np.dtype(dtype).type(value),
    "array": lambda arrays, place: arrays[place],
    "scalar": lambda arrays, place: arrays[place][()],
}


def _decoded(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    if type(value) is tuple and value[:1] == ("",):
        return _DECODE[value[1]](arrays, *(_decoded(part, arrays) for part in value[2:]))
    return type(value)(_decoded(part, arrays) for part in value) if type(value) in (tuple, list) else value


@functools.lru_cache(4096)
def parsed(text: str) -> Any:
    """What such a text says."""
    return ast.literal_eval(text)


def _called(name: str, arguments: str, arrays: Sequence[np.ndarray]) -> Any:
    args, kwargs, errors = parsed(arguments)
    function = _FUNCTIONS[name]
    if errors:
        function = np.errstate(**dict(errors))(function)
    return function(*_decoded(args, arrays), **{key: _decoded(value, arrays) for key, value in kwargs})


def _parts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def read_only(tensor: torch.Tensor) -> np.ndarray:
    """Its array as an argument: a function that writes to one (a positional `out`, `overwrite_input=True`) raises."""
    array: np.ndarray = methods.numpy(tensor)
    array.flags.writeable = False
    return array


def _kernel(name: str, arguments: str, results: str, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    found = _parts(_called(name, arguments, [read_only(torch.detach(one)) for one in arrays]))
    for part, about in zip(found, parsed(results), strict=True):
        own = np.array(part)  # a copy, in the same order
        if _layout(own) != about:
            raise RuntimeError(f"{name} gives an array of {own.dtype} and shape {own.shape}, not {about}")
        made.append(torch.from_numpy(own))
    return made


def _layout(array: np.ndarray) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """dtype, shape, strides in elements"""
    return array.dtype.str, array.shape, tuple(step // array.itemsize for step in array.strides)


_LIBRARY.impl("numpy_call", _kernel, "CompositeExplicitAutograd")


@dataclass(frozen=True, slots=True)
class Described:
    """results  the text that the operator takes; numpys: which of the results are NumPy scalars; together: what puts
    them together (None: there is one); plain: the result is a bool or an int of Python's"""

    results: str
    scalars: tuple[bool, ...]
    together: Callable[[list[Any]], Any] | None
    plain: bool


@functools.lru_cache(512)
def described(name: str, arguments: str, arrays: tuple[TensorType, ...]) -> Described:
    """What a call gives, found by making it with other elements. Raises what NumPy raises, or TypeError for a result
    that no operator can give."""
    error: Exception | None = None
    for fill in _FILLS:
        try:
            with np.errstate(all="ignore"):
                made = _called(name, arguments, given := [_example(one, fill) for one in arrays])
            break
        except np.linalg.LinAlgError as raised:  # not for these elements
            error = raised
    else:
        raise TypeError(str(error))
    parts = _parts(made)
    for part in parts:
        whole = isinstance(part, np.ndarray)
        if not whole and not isinstance(part, (np.generic, bool, int)):
            raise TypeError(f"a result of type {type(part).__name__}")
        if whole and any(np.may_share_memory(part, one) for one in given):
            raise TypeError("a result that is a view")
    kind = type(made)
    listed = isinstance(made, (tuple, list))
    return Described(
        repr([_layout(np.array(part)) for part in parts]),
        tuple(not isinstance(part, np.ndarray) for part in parts),
        None if not listed else kind if kind in (tuple, list) else lambda elements: kind(*elements),
        not listed and type(made) in (bool, int),
    )


_FILLS: tuple[Callable[[np.ndarray], None], ...] = (
    lambda array: np.copyto(array, (np.sin(np.arange(array.size) * 12.9898 + 1) + 1.5).reshape(array.shape)),
    lambda array: np.copyto(array, np.eye(*array.shape[-2:]) if array.ndim > 1 else 1.0),
)
"""Of floats; ints and bools are 0, an index wherever there are elements."""


def _example(kind: TensorType, fill: Callable[[np.ndarray], None]) -> np.ndarray:
    sizes: Any = kind.shape, kind.stride
    made: Any = torch.empty_strided(*sizes, dtype=kind.dtype, device="cpu").numpy()
    if made.dtype.kind in "fc":
        fill(made)
    else:
        made[...] = 0
    made.flags.writeable = False
    return made  # type: ignore[no-any-return]


def result_types(name: str, arguments: str, results: str, arrays: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """The shape rule."""
    return tuple(
        TensorType(shape, strides, _torch_dtype(dtype), torch.device("cpu"))
        for dtype, shape, strides in parsed(results)
    )


@functools.cache
def _torch_dtype(dtype: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _meta(name: str, arguments: str, results: str, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.empty_strided(shape, strides, dtype=_torch_dtype(dtype), device="meta")
        for dtype, shape, strides in parsed(results)
    ]


_LIBRARY.impl("numpy_call", _meta, "Meta")
RULES = {NUMPY_CALL: result_types}
