"""NumPy arrays: traced as tensors where NumPy's meaning is exactly an operator's.

Takes arrays from outside (plain, writeable, of a dtype in DTYPES) and `tensor.numpy()`; gives `TracedArray`s whose
operators and functions record torch operators, or a call of NumPy's own function (operators/numpy_calls.py). Always
holds: dtypes follow NumPy's promotion (asked of NumPy itself); a result without dimensions is a NumPy scalar, as NumPy
gives it; what neither has a row here nor is known to be a pure function of arrays is a graph break.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak, raised_by_handler
from fusewright.capture.border.native import unwatched
from fusewright.capture.border.values.tensor import placeholder_name
from fusewright.capture.guards.sources import ArrayTensor, Source
from fusewright.capture.guards.types import IsArrayLike
from fusewright.operators import numpy_calls
from fusewright.sizes.tensor_type import TensorType, held_number

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_, torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}  # fmt: skip
TORCH_DTYPES = {np.dtype(kind): dtype for dtype, kind in DTYPES.items()}
_WEAK = (bool, int, float, complex)  # Python numbers adapt to the array's dtype


Row = Callable[["Tracer", Any, tuple[Any, ...], dict[str, Any]], Any]


def refuse(what: str) -> NoReturn:
    raise GraphBreak("numpy-call", what)


_ELEMENT = ("data-dependent-scalar", "an element of an array is read into Python")


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

    def __getitem__(self, key: Any) -> Any:
        if _is_plain(key):
            return self.made(operator.getitem, key)
        return by_numpy(self.world, operator.getitem, (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        if not _is_plain(key) or (type(value) is not TracedArray and type(value) not in _WEAK):
            self.fill(by_numpy(self.world, "setitem", (self, key, value)))
            return
        given = value.tensor if type(value) is TracedArray else value
        self.world.torch_call(operator.setitem, (self.tensor, key, given), {})

    def fill(self, made: TracedArray) -> None:
        """Writes other elements into the array's memory: as `out=` and in-place operators do."""
        if made.tensor.shape != self.tensor.shape or not np.can_cast(made.dtype, self.dtype, "same_kind"):
            refuse(f"a store of an array of {made.dtype} into one of {self.dtype}, or of another shape")
        self.world.torch_call(torch._C.TensorBase.copy_, (self.tensor, made.tensor), {})

    def __bool__(self) -> bool:
        return bool(self._number("data-dependent-branch", "the truth value of an array"))

    def _number(self, code: str, what: str) -> Any:
        value = self.world.recorder.read(self.tensor) if self.tensor.numel() == 1 else None
        if value is None:
            raise GraphBreak(code, what)
        return held_number(value)

    def __float__(self) -> float:
        return float(self._number(*_ELEMENT))

    def __int__(self) -> int:
        return int(self._number(*_ELEMENT))

    def __index__(self) -> int:
        return operator.index(self._number(*_ELEMENT))

    def __complex__(self) -> complex:
        return complex(self._number(*_ELEMENT))

    def _text(self, *args: object) -> NoReturn:
        raise GraphBreak("print-tensor", "the text of an array")

    __repr__ = __str__ = __format__ = _text  # type: ignore[assignment]

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        refuse("an array given to native code")

    __reduce_ex__ = __deepcopy__ = __copy__ = __contains__ = __array__  # type: ignore[assignment]

    def __neg__(self) -> Any:
        if self.tensor.dtype is torch.bool:
            raise TypeError("The numpy boolean negative, the `-` operator, is not supported")
        return self.made(torch.neg)

    def __abs__(self) -> Any:
        return self.made(torch.abs)

    def __invert__(self) -> Any:
        if self.tensor.dtype.is_floating_point or self.tensor.dtype.is_complex:
            refuse("~ of floats")
        return self.made(torch.bitwise_not)

    def __pos__(self) -> Any:
        return self.made(torch.clone)

    def made(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a torch function of this array's tensor."""
        return result(self.world, self.world.torch_call(function, (self.tensor, *args), kwargs))


def _index_parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _is_mask(part: Any) -> bool:
    return type(part) is TracedArray and part.tensor.dtype is torch.bool


def _is_plain(key: Any) -> bool:
    """Whether an index is one of numbers, slices, None and Ellipsis, which mean to PyTorch what they mean to NumPy."""
    return all(
        part is None or part is Ellipsis or type(part) is int or _plain_slice(part) for part in _index_parts(key)
    )


def _plain_slice(part: Any) -> bool:
    return isinstance(part, slice) and all(
        bound is None or type(bound) is int for bound in (part.start, part.stop, part.step)
    ) and (part.step is None or part.step > 0)  # fmt: skip


def result(world: World, tensor: torch.Tensor) -> Any:
    """The array for a computed tensor; without dimensions it is a scalar, and NumPy's own where its value is known."""
    if tensor.dtype not in DTYPES:
        refuse(f"a result of dtype {tensor.dtype}")
    known = None if tensor.dim() else world.recorder.known_value(tensor)
    return TracedArray(world, tensor, not tensor.dim()) if known is None else known.numpy()[()]


def of_data(world: World, value: Any) -> Any:
    """What NumPy made of data alone, inside."""
    if isinstance(value, (tuple, list)):
        return type(value)(of_data(world, part) for part in value)
    if not isinstance(value, np.ndarray):
        return value
    dtype = TORCH_DTYPES.get(value.dtype)
    if dtype is None or not value.dtype.isnative or not value.flags.c_contiguous:
        refuse(f"an array of dtype {value.dtype}, or in another order than C's")
    world.uses_arrays = True
    if 0 < value.size <= _WRITTEN_OUT:
        tensor = world.torch_call(torch.tensor, (value.tolist(),), {"dtype": dtype, "device": "cpu"})
    else:
        tensor = world.torch_call(torch.clone, (torch.from_numpy(value.copy()),), {})
    return TracedArray(world, tensor)


def on_values(
    world: World, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What NumPy itself gives for arrays whose values are known, or taken for granted; None where they are not."""
    if world.recorder.speculation is None or not (numpy_calls.name_of(function) or id(function) in _PURE):
        return None
    reals: list[np.ndarray] = []
    try:
        ready = tuple(_real(world, value, reals) for value in args)
        keywords = {name: _real(world, value, reals) for name, value in kwargs.items()}
    except LookupError:
        return None
    try:
        found = unwatched(function, *ready, **keywords)
    except Exception as error:  # of the arguments, or of a write to one: whatever it is, eager does it better
        if raised_by_handler(error):
            raise
        return None
    if isinstance(found, np.ndarray) and any(np.may_share_memory(found, real) for real in reals):
        return None  # a view: what is written to one is seen in the other
    return of_data(world, found)


def _real(world: World, value: Any, reals: list[np.ndarray]) -> Any:
    """The argument as NumPy takes it. Raises LookupError."""
    if type(value) is TracedArray:
        held = world.recorder.read(value.tensor, MOST_READ)
        if held is None:
            raise LookupError
        real = numpy_calls.read_only(held)
        reals.append(real)
        return real[()] if value.scalar else real
    if type(value) in (list, tuple):
        return type(value)(_real(world, part, reals) for part in value)
    if isinstance(value, (*_WEAK, str, slice, np.generic, type, np.dtype)) or value is None or value is Ellipsis:
        return value
    raise LookupError


_PURE = frozenset(
    id(getattr(np, name))
    for name in """
    flatnonzero nonzero unique argwhere intersect1d setdiff1d union1d bincount flip broadcast_to atleast_1d
    expand_dims squeeze linspace logspace geomspace arange full diag diagonal
    """.split()
)
"""Functions that are no operators (numpy_calls.py): their results' shapes depend on data, or they give views."""
MOST_READ = 4096
"""Elements of an array that NumPy computes with at capture."""
_WRITTEN_OUT = 1024
"""What arrays of at most so many elements hold stays known to the graph."""


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
    world.uses_arrays = True
    world.arrays.append((real, source, traced))
    return world.stand_in(real, source, TracedArray(world, traced))


def of_tensor(world: World, tensor: torch.Tensor) -> TracedArray:
    """`tensor.numpy()`."""
    if tensor.requires_grad or tensor.device.type != "cpu" or tensor.dtype not in DTYPES:
        raise GraphBreak(
            "tensor-address", "Tensor.numpy() of a tensor that requires a gradient, or of a kind that is not traced"
        )
    world.uses_arrays = True
    return TracedArray(world, world.torch_call(torch._C.TensorBase.detach, (tensor,), {}))


def has_array(values: Any) -> bool:
    """Whether an argument is an array, or holds one."""
    return any(type(value) is TracedArray or (type(value) in (list, tuple) and has_array(value)) for value in values)


def as_index(key: Any) -> Any:
    """A tensor's index: arrays of whole numbers or bools mean what tensors of them do."""
    if type(key) is tuple:
        return tuple(map(as_index, key))
    return key.tensor if type(key) is TracedArray and key.dtype.kind in "bi" and key.tensor.dim() else key


# Operators


def _dtype_of(value: Any) -> Any:
    if type(value) is TracedArray:
        return value.dtype
    if type(value) in _WEAK:
        return value
    if issubclass(type(value), np.generic) and value.dtype in TORCH_DTYPES:
        return value.dtype
    refuse(f"an array with a {type(value).__name__}")


def common_dtype(values: Any) -> np.dtype:
    """NumPy's own promotion. A Python int must fit, as NumPy demands."""
    try:
        dtype = np.result_type(*(_dtype_of(value) for value in values))
    except (TypeError, OverflowError) as error:
        raise GraphBreak("numpy-call", str(error)) from error
    if dtype not in TORCH_DTYPES:
        refuse(f"a result of dtype {dtype}")
    if dtype.kind in "iu" and any(
        type(value) is int and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max for value in values
    ):
        refuse(f"a Python int that does not fit {dtype}")
    return dtype


def elementwise(function: Callable[..., Any], kinds: str, to_float: bool = False) -> Callable[..., Any]:
    """A function of one or two operands, brought to their common dtype first. `kinds`: dtype kinds that it takes."""

    def call(world: World, *values: Any) -> TracedArray:
        dtype = common_dtype(values)
        if to_float and dtype.kind in "biu":
            dtype = np.dtype(np.float64)
        if dtype.kind not in kinds:
            refuse(f"{getattr(function, '__name__', function)} of {dtype}")
        common = TORCH_DTYPES[dtype]
        operands = [cast(world, value, common) for value in values]
        if not isinstance(operands[0], torch.Tensor):
            operands[0] = world.torch_call(torch.tensor, (operands[0],), {"dtype": common})
        if function in (torch.maximum, torch.minimum) and not isinstance(operands[-1], torch.Tensor):
            operands[-1] = world.torch_call(torch.tensor, (operands[-1],), {"dtype": common})
        return result(world, world.torch_call(function, tuple(operands), {}))

    return call


def cast(world: World, value: Any, dtype: torch.dtype) -> Any:
    if type(value) is TracedArray:
        return (
            value.tensor
            if value.tensor.dtype is dtype
            else world.torch_call(torch._C.TensorBase.to, (value.tensor, dtype), {})
        )
    number = value.item() if isinstance(value, np.generic) else value
    return float(number) if dtype.is_floating_point else number


_RELATIONS = {"<": torch.lt, "<=": torch.le, "==": torch.eq, "!=": torch.ne, ">": torch.gt, ">=": torch.ge}
_COMPARE = {op: elementwise(fn, "biuf") for op, fn in _RELATIONS.items()}
BINARY: dict[str, Callable[..., Any]] = {
    "+": elementwise(torch.add, "iuf"), "-": elementwise(torch.sub, "iuf"), "*": elementwise(torch.mul, "iuf"),
    "/": elementwise(torch.true_divide, "f", to_float=True), "&": elementwise(torch.bitwise_and, "biu"),
    "|": elementwise(torch.bitwise_or, "biu"), "^": elementwise(torch.bitwise_xor, "biu"), **_COMPARE,
}  # fmt: skip


def binary(world: World, op: str, left: Any, right: Any, inplace: bool = False) -> Any:
    """`left op right` where a side is a traced array."""
    row = {"**": power, "@": matmul}.get(op) or BINARY.get(op)
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        refuse(f"{type(left).__name__} {op} {type(right).__name__}")
    made = or_by_numpy(world, row, _OPERATORS[op], (left, right))
    if not inplace or type(left) is not TracedArray or left.scalar:
        return made
    left.fill(made)
    return left


_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "&": operator.and_,
    "|": operator.or_, "^": operator.xor, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
    ">": operator.gt, ">=": operator.ge, "**": operator.pow, "%": operator.mod, "//": operator.floordiv,
    "<<": operator.lshift, ">>": operator.rshift, "@": operator.matmul,
}  # fmt: skip


def or_by_numpy(
    world: World, row: Callable[..., Any] | None, function: Any, args: tuple[Any, ...], kwargs: Any = None
) -> Any:
    """What a row gives; where there is none, or it refuses these arguments, NumPy itself is called by the graph."""
    if row is not None:
        try:
            return row(world, *args, **(kwargs or {}))
        except TypeError:  # arguments that the row does not take (dtype=, where=)
            pass
        except GraphBreak as refused:
            if refused.code != "numpy-call":
                raise
    return by_numpy(world, function, args, kwargs)


def by_numpy(world: World, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """A call of NumPy's own function as an operator of the graph; where its result's shape depends on data, NumPy's
    result for the values that are known or taken for granted."""
    try:
        return _as_operator(world, function, args, kwargs or {})
    except GraphBreak as refused:
        found = on_values(world, function, args, kwargs or {}) if refused.code == "numpy-call" else None
        if found is None:
            raise
        return found


def _as_operator(world: World, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shown = function if type(function) is str else getattr(function, "__name__", function)
    name = function if type(function) is str else numpy_calls.name_of(function)
    if name is None:
        refuse(f"numpy.{shown}")
    if function is operator.getitem and any(map(_is_mask, _index_parts(args[1]))):
        refuse("a choice of elements by a mask, whose number depends on data")
    given: list[torch.Tensor] = []

    def is_array(value: Any) -> tuple[torch.Tensor, bool] | None:
        return (value.tensor, value.scalar) if type(value) is TracedArray else None

    try:
        pairs = tuple(kwargs.items())
        text = repr((*numpy_calls.encoded((args, pairs), given, is_array), _errors(world)))
        about = numpy_calls.described(name, text, tuple(map(_static_type, given)))
        kinds = [TORCH_DTYPES[np.dtype(dtype)] for dtype, *_ in numpy_calls.parsed(about.results)]
    except Exception as error:  # of the arguments: whatever it is, eager says it better
        raise GraphBreak("numpy-call", f"numpy.{shown}: {error}") from error
    made = world.torch_call(numpy_calls.NUMPY_CALL, (name, text, about.results, given), {})
    if about.plain:
        return world.tracer.call(torch._C.TensorBase.item, (made[0],))
    assert len(made) == len(kinds)
    parts = [TracedArray(world, part, scalar) for part, scalar in zip(made, about.scalars)]
    return parts[0] if about.together is None else about.together(parts)


def _errors(world: World) -> tuple[tuple[str, object], ...]:
    """What the program has set with `np.errstate`, where that is not how the call began. (What raises or calls back is
    asked for nowhere else.)"""
    now = np.geterr()
    if not {"warn", "ignore"}.issuperset(now.values()):
        refuse("an error state of NumPy's other than warn and ignore")
    if not world.error_states:
        world.guard_answer(np.geterr, (), now)
        return ()
    return tuple(now.items())


def _static_type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride())), tensor.dtype, tensor.device)


def power(world: World, left: Any, right: Any) -> TracedArray:
    if common_dtype((left, right)).kind != "f":
        refuse("a power of integers")
    return elementwise(torch.pow, "f")(world, left, right)


def matmul(world: World, left: Any, right: Any) -> TracedArray:
    if (
        type(left) is not TracedArray
        or type(right) is not TracedArray
        or left.dtype != right.dtype
        or left.dtype.kind != "f"
    ):
        refuse("@ of other things than two arrays of one floating dtype")
    if (
        not left.tensor.dim()
        or not right.tensor.dim()
        or left.tensor.shape[-1] != right.tensor.shape[-2 if right.tensor.dim() > 1 else 0]
    ):
        refuse("@ of shapes that do not fit")
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


def array_type(array: TracedArray) -> type:
    """What `type(array)` gives."""
    return DTYPES[array.tensor.dtype] if array.scalar else np.ndarray
