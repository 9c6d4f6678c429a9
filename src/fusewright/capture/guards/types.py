"""Guards as data: what must still hold for a captured frame to be reused.

Takes nothing; gives frozen dataclasses. Always holds: a guard says what it looks at and what it wants, never how it is
checked (csrc/guards.cpp does that natively, guard_check.py in Python, and the two agree).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from fusewright.base.records import dataclass
from fusewright.capture.guards.sources import Source, held, unheld
from fusewright.capture.guards.text import text_of

GuardKind = Literal[
    "TYPE",  # type(source) is value
    "IS",  # source is value (functions, classes, modules, None, enum members, singletons)
    "EQUALS",  # same type and equal to the constant `value`; floats bit for bit, nested tuples of constants allowed
    "LENGTH",  # len(source) == value, for builtin containers and subclasses, without running Python code
    "KEYS",  # the dict's keys, in order, are the tuple `value` (constants by equality, others by identity)
    "ABSENT",  # the key `value` is not in the dict `source`
    "TYPE_ATTRIBUTE",  # MRO lookup of value=(type, name) still finds value[2] (or nothing: MISSING); source is unused
    "TENSOR",  # value: TensorGuard
    "SAME",  # source is the very object that the source `value` gives (aliasing)
    "DIFFERENT",  # the sources in tuple `value` are pairwise different objects (source is the first)
    "NO_OVERLAP",  # the tensors at the sources in tuple `value` share no storage
    "BOUND",  # closure cell / attribute is bound (value True) or unbound (value False)
    # value: a graph.sizes.Relation, a nested tuple ("<=", ("sym", "s0"), 7), or a pair (one of these, {name: Source})
    "SIZE",
    "STATE",  # value: GlobalState; source is unused
    "CALL",  # value(object) is truthy: slow, general; value is a Python callable, `why` is its text
]


class Missing:
    """Marks "no such attribute" in a TYPE_ATTRIBUTE guard."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()
MOST_GUARDS = 1 << 17
"""Of one capture: each is compiled, and asked at every call. An outside list has one for each element."""


@dataclass(frozen=True, slots=True)
class TensorGuard:
    """What a graph assumes of an input tensor. None in shape or stride: that dimension is symbolic.

    cls: exact type of the tensor object; `requires_grad` None means that it does not matter;
    conj/neg bits, sparse layouts and subclass dispatch are never accepted by capture, so they must be absent here too.
    """

    cls: type
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool | None
    shape: tuple[int | None, ...]
    stride: tuple[int | None, ...]
    inference: bool | None = None


@dataclass(frozen=True, slots=True)
class GlobalState:
    """Interpreter-wide settings that a capture depends on (read afresh at each call, all of them in C where possible).

    autocast is (device, enabled, dtype) for each device of torch_state.AUTOCAST_DEVICES; deterministic is (enabled,
    warn only); default_device is None unless a mode on the torch-function stack has set one; modes_known: no other
    mode, tracer or transform is on; tensor_class: the number of what torch.Tensor and Parameter hold (torch_state.py).
    """

    grad_enabled: bool
    inference_mode: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    default_dtype: torch.dtype
    default_device: str | None
    deterministic: tuple[bool, bool]
    torch_function_enabled: bool
    torch_function_modes: int
    modes_known: bool
    num_threads: int
    matmul_precision: str
    tensor_class: int


@dataclass(frozen=True, slots=True, eq=False)
class AnswersAgain:
    """A CALL guard's callable: `function(*args)` still answers `value` (the very object when `identical`), whatever it
    is called with."""

    function: Callable[..., object]
    args: tuple[object, ...]
    value: object
    identical: bool = False

    def __call__(self, subject: object) -> bool:
        answer = self.function(*self.args)
        return answer is self.value or (
            not self.identical and type(answer) is type(self.value) and bool(answer == self.value)
        )

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"{name}({', '.join(map(text_of, self.args))}) answers {text_of(self.value)}"

    def __hash__(self) -> int:
        return hash((id(self.function), len(self.args)))

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is AnswersAgain
            and self.function is other.function
            and len(self.args) == len(other.args)
            and all(mine is theirs for mine, theirs in zip(self.args, other.args))
        )


@dataclass(frozen=True, slots=True)
class HoldsValue:
    """A CALL guard's callable: what the object holds as an instance of the builtin type `base`, whatever its own class
    makes of it."""

    base: type
    content: object

    @classmethod
    def of(cls, base: type, value: object) -> HoldsValue:
        return cls(base, _content(base, value))

    def __call__(self, subject: object) -> bool:
        return _content(self.base, subject) == self.content

    def __repr__(self) -> str:
        return f"holds the {self.base.__name__} {self.content}"


@dataclass(frozen=True, slots=True)
class IsArrayLike:
    """A CALL guard's callable: a NumPy array of this layout that may be written to."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __call__(self, array: Any) -> bool:
        alike = array.dtype == self.dtype and array.shape == self.shape and array.strides == self.strides
        return bool(alike and array.flags.writeable)

    def __repr__(self) -> str:
        return f"is a writable array of {self.dtype}, shape {self.shape} and strides {self.strides}"


def _content(base: type, value: object) -> object:
    """A plain value: floats as text, which tells zeros by their sign and finds NaN equal to itself."""
    return _CONTENTS[base](value)


_CONTENTS: dict[type, Callable[[Any], object]] = {
    int: int.__index__,
    float: float.__repr__,
    complex: complex.__repr__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}


SMALL_SIZES = "a size of 0 or 1 may broadcast or vanish"
"""Why a size is guarded to be 2 or more. Such a guard is given up where the graph is shown to do the same
(generalise/widening.py)."""


ASKED_AT = "asked at "
"""How the reason of a guard on sizes begins that the program has asked for; its line follows."""
STRIDE = "a stride that follows from the sizes"
"""Why a stride is guarded to be a product of sizes. Of a tensor without elements it need not be."""


@dataclass(frozen=True, slots=True)
class Guard:
    """One fact about the outside world. `why` says what asked for it, where that was not the program; `held`: the
    value, or (of IS) what stands for it in sources.py."""

    kind: GuardKind
    source: Source
    held: object
    why: str = ""

    @classmethod
    def of(cls, kind: GuardKind, source: Source, value: object) -> Guard:
        return cls(kind, source, held(value) if kind == "IS" else value)

    @property
    def value(self) -> object:
        return unheld(self.held)
