"""Programs and what can be observed of them: the harness of tests/capture/interpret/test_language.py.

A program is a maker: it gives a function, a list of argument tuples (one for each call), and perhaps a callable that gives further state to
look at after each call. It is made twice, so that the eager and the compiled run share nothing. Observed are: the result, or the exception
with its message, chain and the user's lines of its traceback; output and warnings; the arguments, the state, the closure of the function.
Everything is described in one walk that numbers objects as it meets them: a list that is returned twice must be one list, a returned argument
the argument, tensors that share memory must share it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import os
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fusewright
from fusewright.base.events import STREAM, Broken, Captured, Event, InternalError, Skipped

Made = tuple[Any, ...]  # (function, calls) or (function, calls, state)
FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclasses.dataclass(frozen=True)
class Program:
    """make  the maker; codes  the breaks that may happen in it (none: it is captured whole)"""

    make: Callable[[], Made]
    codes: frozenset[str]

    @property
    def name(self) -> str:
        return f"{self.make.__module__.rsplit('.', 1)[-1]}.{self.make.__name__}"


PROGRAMS: list[Program] = []


def program(*codes: Any) -> Any:
    """Enters a maker into the list: `@program`, or `@program("code of a break", …)` where breaks are part of the program."""

    def enter(make: Callable[[], Made]) -> Callable[[], Made]:
        PROGRAMS.append(Program(make, frozenset(code for code in codes if isinstance(code, str))))
        return make

    return enter(codes[0]) if codes and callable(codes[0]) else enter


class Raises:
    """Stands for the result of a call that raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def x() -> torch.Tensor:
    """2 x 3, small whole numbers: every order of summation gives the same bits."""
    return torch.arange(6.0).reshape(2, 3) - 2


# Observation.


class _Walk:
    """Describes objects as a flat list of comparable tokens."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.alive: list[Any] = []

    def describe(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind in (int, float, complex, bool, str, bytes, type(Ellipsis), type(NotImplemented)):
            self.tokens.append((kind.__name__, repr(value)))
            return
        if kind is tuple and all(type(part) in (int, float, bool, str, type(None)) for part in value):
            self.tokens.append(("tuple", repr(value)))  # CPython shares equal constants as it likes
            return
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device)):
            self.tokens.append((kind.__name__, getattr(value, "__qualname__", None) or str(value)))
            if (
                isinstance(value, type)
                and value.__module__.startswith(__name__.rsplit(".", 1)[0])
                and "<locals>" in value.__qualname__
            ):
                self._once(value, lambda: self._class(value))
            return
        self._once(value, lambda: self._parts(value))

    def _once(self, value: Any, describe: Callable[[], None]) -> None:
        number = self.numbers.get(id(value))
        if number is not None:
            self.tokens.append(("again", number))
            return
        self.numbers[id(value)] = len(self.numbers)
        self.alive.append(value)
        self.tokens.append(("new", type(value).__qualname__))
        describe()

    def _class(self, cls: type) -> None:
        self.tokens.append([base.__qualname__ for base in cls.__mro__])
        for name, value in vars(cls).items():
            if name not in ("__dict__", "__weakref__", "__static_attributes__", "__firstlineno__"):
                self.tokens.append(name)
                if not isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType)):
                    self.describe(value)

    def _parts(self, value: Any) -> None:
        for base, describe in _DESCRIBERS:
            if isinstance(value, base):
                describe(self, value)
                break
        else:
            if type(value).__reduce_ex__ is object.__reduce_ex__ and not getattr(type(value), "__dictoffset__", 0):
                self._opaque(value)
        for cls in type(value).__mro__:
            for name in vars(cls).get("__slots__", ()) if not isinstance(vars(cls).get("__slots__"), str) else ():
                if name not in ("__dict__", "__weakref__") and cls.__module__.startswith("tests."):
                    self.tokens.append(name)
                    self.describe(
                        getattr(
                            value,
                            name.replace("__", f"_{cls.__name__}__", 1) if name.startswith("__") else name,
                            "unset",
                        )
                    )
        if not isinstance(value, types.FunctionType):
            for name, part in _namespace(value).items():
                self.tokens.append(name)
                # Handles of hooks are numbered through the process.
                self.describe(
                    list(part.values())
                    if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and part
                    else part
                )

    def _opaque(self, value: Any) -> None:
        try:
            reduced = value.__reduce__()
        except TypeError:
            return
        if isinstance(reduced, tuple):
            for part in reduced:
                self.describe(part)

    def _tensor(self, value: torch.Tensor) -> None:
        plain = value.detach().as_subclass(torch.Tensor)
        self.tokens.append(plain.clone())
        self.tokens.append((value.requires_grad, value.dtype, value.stride(), value.is_leaf))
        address = plain.untyped_storage()._cdata
        self.alive.append(plain)
        self.tokens.append(("storage", self.storages.setdefault(address, len(self.storages)), plain.storage_offset()))
        if value.is_leaf and value.grad is not None:
            self.describe(value.grad)

    def _function(self, value: types.FunctionType) -> None:
        self.tokens.append((value.__name__, value.__qualname__, value.__module__, value.__doc__))
        for cell in value.__closure__ or ():
            self.describe(cell)
        for part in (value.__defaults__, value.__kwdefaults__, value.__annotations__, value.__dict__):
            self.describe(part)

    def _cell(self, value: types.CellType) -> None:
        try:
            self.describe(value.cell_contents)
        except ValueError:
            self.tokens.append("empty")

    def _error(self, value: BaseException) -> None:
        self.tokens.append(str(value))
        for part in (value.args, value.__cause__, value.__context__, value.__suppress_context__):
            self.describe(part)
        self.tokens.append(user_lines(value))
        if isinstance(value, BaseExceptionGroup):
            for part in value.exceptions:
                self.describe(part)


def _namespace(value: Any) -> dict[str, Any]:
    """The instance dictionary, without running a `__getattribute__` of the program's."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _sequence(walk: _Walk, value: Any) -> None:
    walk.tokens.append(len(value))
    for part in list(value):
        walk.describe(part)
    if isinstance(value, collections.deque):
        walk.tokens.append(value.maxlen)


def _set(walk: _Walk, value: Any) -> None:
    walk.tokens.append(sorted(map(repr, value)))


def _dict(walk: _Walk, value: Any) -> None:
    walk.tokens.append(len(value))
    keys = (
        collections.OrderedDict.__iter__(value) if isinstance(value, collections.OrderedDict) else dict.__iter__(value)
    )
    for key in list(keys):
        walk.describe(key)
        walk.describe(dict.__getitem__(value, key))
    if isinstance(value, collections.defaultdict):
        walk.describe(value.default_factory)


def _all_of(*names: str) -> Callable[[_Walk, Any], None]:
    def describe(walk: _Walk, value: Any) -> None:
        for name in names:
            walk.describe(getattr(value, name))

    return describe


_DESCRIBERS: tuple[tuple[Any, Callable[[_Walk, Any], None]], ...] = (
    (torch.Tensor, _Walk._tensor),
    (types.FunctionType, _Walk._function),
    (types.CellType, _Walk._cell),
    (BaseException, _Walk._error),
    (dict, _dict),
    ((list, tuple, collections.deque), _sequence),
    ((set, frozenset), _set),
    ((bytearray, range), lambda walk, value: walk.tokens.append(repr(value))),
    (slice, _all_of("start", "stop", "step")),
    (types.MethodType, _all_of("__func__", "__self__")),
    ((staticmethod, classmethod), _all_of("__func__")),
    (property, _all_of("fget", "fset", "fdel")),
    (types.GeneratorType, lambda walk, value: walk.tokens.append((value.__name__, value.gi_frame is None))),
)


def user_lines(error: BaseException) -> list[tuple[str, int]]:
    """The frames of a traceback that belong to programs, as (function, line)."""
    lines = []
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if os.path.abspath(code.co_filename).startswith(FOLDER) and code.co_filename != __file__:
            lines.append((code.co_name, step.tb_lineno))
        step = step.tb_next
    return lines


def observe(function: Any, made: Made) -> list[list[Any]]:
    """Calls `function` with each tuple of arguments; what can be seen after each call, as tokens."""
    original, calls = made[0], made[1]
    state = made[2] if len(made) > 2 else tuple
    seen = []
    kept: list[Any] = []
    for args in calls:
        text, errors = io.StringIO(), io.StringIO()
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(text),
            contextlib.redirect_stderr(errors),
        ):
            warnings.simplefilter("always")
            try:
                result = function(*args)
            except BaseException as error:
                result = error
                outcome: Any = ("raised", error)
            else:
                outcome = ("returned", result)
        internal = [one for one in caught if "fusewright" in type(one.message).__module__]
        assert not internal, [str(one.message) for one in internal]
        walk = _Walk()
        walk.tokens.append(
            (
                text.getvalue(),
                errors.getvalue(),
                [(type(one.message).__name__, str(one.message), one.filename, one.lineno) for one in caught],
            )
        )
        closure = getattr(original, "__closure__", None)
        walk.describe((outcome, args, state(), closure))
        kept.append((walk, result))
        seen.append(walk.tokens)
        settings = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_device(),
        )
        seen.append([settings])
    return seen


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return (
            torch.allclose(one, other, equal_nan=True)
            if one.dtype.is_floating_point or one.dtype.is_complex
            else torch.equal(one, other)
        )
    return type(one) is type(other) and one == other


@dataclasses.dataclass
class Outcome:
    """What a compiled run did."""

    graphs: int
    operators: int
    codes: list[str]
    reports: list[str]
    skips: list[str]


@contextlib.contextmanager
def events() -> Iterator[list[Event]]:
    seen: list[Event] = []
    with STREAM.listening(seen.append):
        yield seen


def check(one: Program, backend: str, **arguments: Any) -> Outcome:
    """Runs a program eagerly and compiled; asserts that nothing differs and that only the listed breaks happen."""
    with _generators():
        made = one.make()
        eager = observe(made[0], made)
    fusewright.reset()
    made = one.make()
    with events() as seen, _generators():
        compiled = fusewright.compile(made[0], backend=backend, recompile_limit=64, **arguments)
        ours = observe(compiled, made)
    for call, (expected, found) in enumerate(zip(eager, ours)):
        for place, (a, b) in enumerate(zip(expected, found)):
            context = f"{one.name} call {call // 2}, token {place}: eager {a!r}, compiled {b!r}; before: {expected[max(0, place - 4) : place]!r}"
            assert equal(a, b), context
        assert len(expected) == len(found), (
            f"{one.name} call {call // 2}: {expected[len(found) :]!r} or {found[len(expected) :]!r}"
        )
    assert len(eager) == len(ours)
    internal = [event.trace for event in seen if isinstance(event, InternalError)]
    assert not internal, internal[0]
    # Callbacks of the garbage collector and the like run in eager regions too.
    reports = [
        event.report
        for event in seen
        if isinstance(event, (Broken, Skipped)) and (FOLDER in str(event.report) or not event.report.stack)
    ]
    captured = [event for event in seen if isinstance(event, Captured)]
    return Outcome(
        sum(event.op_count > 0 for event in captured),
        sum(event.op_count for event in captured),
        [report.code for report in reports],
        [str(report) for report in reports],
        [event.report.code for event in seen if isinstance(event, Skipped)],
    )


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
