"""Runs one program in several worlds, and says what the compiled one does that eager does not.

Takes the text of a program; gives a `Finding`, or None. The text defines `program`, functions whose names begin with
`step`, which call it and change what it reads, and perhaps SETTINGS, the arguments of `fusewright.compile`. It is
executed once in a world in which `program` is compiled and once in one in which it is not. After each step everything
that is reachable must be equal: the step's result or exception, tensors that `made` has given, the global names, the
random generators. Where numbers differ by rounding, a third world, in which every float is a double, says who is nearer.
A step whose name ends in `_again` changes nothing before it calls, so it must not compile each time.

Always holds: worlds share nothing, so a program may write to all that it can reach; a difference is reported only if a
second eager world equals the first.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import gc
import io
import linecache
import math
import os
import random
import re
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

import fusewright
from fusewright.base.events import STREAM, Captured, Event, FellBack, InternalError
from fusewright.base.records import dataclass, field, replace
from fusewright.operators.schema import facts
from tests.fuzz import module_layers, state, tensor_libraries
from tests.fuzz.compare import EXACTLY, Begun, Leaf, difference, flatten
from tests.fuzz.deviations import DEVIATIONS, IN_BACKWARD, IN_GRADIENTS_OF_GRADIENTS, Deviation
from tests.fuzz.python_classes import PRELUDE

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "b8": torch.bool,
}
HALVES = (torch.float16, torch.bfloat16)
HALF = re.compile(r"\bb?f16\b")
AUTOCAST = re.compile(r"autocast\(|bfloat16|\.half\(")
SPECIAL = (math.nan, math.inf, -math.inf, -0.0)
# Where programs make tensors. On a GPU products and convolutions are exact, and the same each time, so that ours are as
# near to eager's as on a CPU.
DEVICE = torch.device(os.environ.get("FUZZ_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True


@dataclass(slots=True)
class Finding:
    """kind: the difference's kind, `exception`, `internal`, `needless` (a compile), `crash` or `hang`; step: its name;
    detail: in words."""

    kind: str
    step: str
    detail: str

    @property
    def like(self) -> str:
        """What a smaller program's finding must share: the kind, and of a class which ones."""
        return f"{self.kind}{self.detail.partition(': ')[2]}" if self.kind == "class" else self.kind

    def __str__(self) -> str:
        return f"{self.kind} in {self.step}: {self.detail}"


@dataclass(slots=True)
class World:
    """One copy of a program with all that it can reach. wide: floats are doubles; nudged: halves that are made differ by
    one rounding, up and down by turns after so many; rounding: what operators round differs by one rounding more."""

    text: str
    wide: bool = False
    nudged: int = 0
    compiled: bool = False
    rounding: Rounding | None = None
    names: dict[str, Any] = field(default_factory=dict)
    made: list[torch.Tensor] = field(default_factory=list)
    hidden: frozenset[str] = frozenset()
    random: tuple[Any, ...] = ()
    error: Exception | None = None  # of the last step
    python: bool = False  # whether what is said in errors and printed counts
    state: bool = False  # whether the process must be put back when it is done with
    draft: bool = False  # whether it is only asked for its errors
    partly: bool = False  # whether the program says itself which parts of it are compiled
    begun: Begun = field(default_factory=Begun)
    seen: dict[str, Any] = field(default_factory=dict)  # roots of the last step

    def __post_init__(self) -> None:
        _seed()
        _on_device()
        self.names.update(self.prelude())
        self.hidden = frozenset(self.names)
        if self.draft:  # of its steps and classes others have asked before
            for part in re.split(r"^(?=def (?:program|step0)\()", self.text, flags=re.MULTILINE):
                exec(_code(part, "<fuzz>"), self.names)
            return
        with self.precision():
            exec(_compiled(self.text), self.names)  # text that a generator of this folder has written
        if self.compiled and not self.partly:
            self.names["program"] = self.compile(self.names["program"])
        self.random = _random_state()

    def compile(self, what: Any, how: Callable[..., Any] = fusewright.compile) -> Any:
        """What the program calls in the place of this: itself, if nothing is to be compiled."""
        if not self.compiled or not callable(what):  # a part that a change has replaced
            return what
        settings = {"recompile_limit": 64, **self.names.get("SETTINGS", {})}
        if settings.get("backend", "native") == "native":
            settings["options"] = {"fallback_random": True, **settings.get("options", {})}
        return how(what, **settings)

    def compile_part(self, what: Any) -> Any:
        self.partly = True
        return self.compile(what)

    def compile_in_place(self, module: torch.nn.Module) -> None:
        self.partly = True
        self.compile(module, fusewright.compile_)

    def prelude(self) -> dict[str, Any]:
        dtypes = {name: self.dtype(dtype) for name, dtype in DTYPES.items()}
        return {
            "__name__": "world",
            "torch": torch,
            "F": torch.nn.functional,
            "fusewright": fusewright,
            "made": self.make if self.rounding is None else _disable_current_modes()(self.make),
            "backward": backward,
            "begin": self.begin,
            "compiled": self.compile_part,
            "compiled_": self.compile_in_place,
            "caught": caught,
            "in_eager": not self.compiled,  # for what deviations add
            **FUNCTIONS,
            **tensor_libraries.NAMES,
            **dtypes,
        }

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Numbers without a dtype are doubles too where floats are."""
        before = torch.get_default_dtype()
        if self.wide:
            torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            if self.wide:
                torch.set_default_dtype(before)

    def begin(self, **more: bool) -> None:
        """Gives the program the names that Python programs begin with; state=True: also those of state.py; modules=True:
        of modules.py."""
        sys.modules.setdefault("world", types.ModuleType("world"))  # dataclasses ask for it
        before, tracer = len(self.names), sys.gettrace()
        sys.settrace(None)
        parts = [PRELUDE]
        if more.get("state"):
            state.restore()
            _on_device()
            torch.set_default_dtype(self.dtype(torch.float32))
            parts.append(state.PRELUDE)
            self.state = True
        if more.get("modules"):
            parts.append(module_layers.PRELUDE)
        for code in _spoken_of(self.text, tuple(parts)):
            exec(code, self.names)
        if not self.draft:
            self.begun.note([*self.names.values()][before:])
        if self.state:
            self.names.update(LOG=[], KEPT=[], COUNT=[0])
        self.python = True
        sys.settrace(tracer)

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        if not self.wide:
            return dtype
        return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype

    def make(
        self, shape: tuple[int, ...], dtype: torch.dtype, seed: int, grad: bool = False, special: bool = False
    ) -> torch.Tensor:
        """A tensor of quarters between -6 and 6 (whole numbers from -9 to 9), which both worlds hold exactly."""
        generator = torch.Generator().manual_seed(seed)

        def whole(low: int, high: int) -> torch.Tensor:
            return torch.randint(low, high, shape, generator=generator, device="cpu")

        if dtype == torch.bool:
            made = whole(0, 2) > 0
        elif dtype.is_complex:
            made = torch.complex(whole(-24, 25).double() / 4, whole(-24, 25).double() / 4).to(dtype)
        elif dtype.is_floating_point:
            made = whole(-24, 25).to(dtype) / 4
            if special:
                made = torch.where(whole(0, 6) == 0, torch.tensor(SPECIAL, dtype=dtype, device="cpu")[whole(0, 4)], made)
        else:
            made = whole(0 if dtype == torch.uint8 else -9, 10).to(dtype)
        if self.nudged and dtype in HALVES:
            by = torch.finfo(dtype).eps * (1 - 2 * (torch.arange(made.numel(), device="cpu").reshape(shape) // self.nudged % 2))
            made = (made.double() * (1 + by)).to(dtype)
        made = made.to(DEVICE)
        made.requires_grad_(grad and (dtype.is_floating_point or dtype.is_complex))
        self.made.append(made)
        return made

    def run(self, step: str) -> list[Leaf]:
        """Runs a step; gives everything that can be told afterwards."""
        result, error, self.seen = None, None, {}
        _set_random_state(self.random)
        text = io.StringIO()
        try:
            with contextlib.redirect_stdout(text), self.precision(), self.rounding or contextlib.nullcontext():
                result = self.names[step]()
        except Exception as raised:
            _end_checkpoints(raised)
            error = raised if self.python else raised.with_traceback(None)
        self.random = _random_state()
        self.error = error
        self.seen = {**self.roots(result, error), "printed": text.getvalue()}
        return self.leaves(self.begun.objects())

    def leaves(self, objects: dict[int, int]) -> list[Leaf]:
        """objects: the numbers of those whose contents are not told."""
        with torch._C.DisableTorchFunctionSubclass():
            return flatten(self.seen, objects)

    def roots(self, result: Any, error: Exception | None) -> dict[str, Any]:
        state = {
            name: value
            for name, value in self.names.items()
            if name not in self.hidden and name not in UNSEEN and not name.startswith("step")
        }
        # Of PyTorch's own exceptions only the class is promised.
        plain = error is not None and all(isinstance(value, str | int | float | tuple | None) for value in error.args)
        said = error and (type(error).__name__, *(error.args if plain and type(error) in TOLD else ()))
        if self.python and error is not None:
            said = error
        # How much an operator has drawn before it fails is nobody's business.
        drawn = None if error else (hash(b"".join(one.numpy().tobytes() for one in self.random[0])), hash(self.random[1:3]))
        return {"exception": said, "made": self.made, "result": result, "state": state, "generator": drawn}


def _end_checkpoints(error: BaseException | None) -> None:
    """Ends the generators of checkpoints that an error has left. Up to PyTorch 2.11 the hooks on saved tensors stay in
    place while the error lives: the other world, and the next program, would run under them."""
    left, seen = [], set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals is vars(torch.utils.checkpoint):
                left += [one for one in frame.f_locals.values() if isinstance(one, types.GeneratorType)]
        error = error.__context__
    for one in reversed(left):  # the hooks are a stack
        one.close()


UNSEEN = ("program", "SETTINGS", "__builtins__", "__warningregistry__")  # warnings of operators are not promised
TOLD = (KeyError, AttributeError, ZeroDivisionError, StopIteration, AssertionError, NameError, UnboundLocalError)


def backward(*results: Any, again: bool = False, apart: bool = False) -> None:
    """Takes the gradient of a sum of everything that has one, with weights that differ. `again`: also the gradient of the
    gradient's squares. `apart`: in a backward of their own."""
    total: Any = 0
    for number, leaf in enumerate(pytree.tree_leaves(results)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = torch.arange(leaf.numel(), device=leaf.device).reshape(leaf.shape) % 5 + (number + 1)
            total = total + _parts(leaf * weights.to(leaf.dtype)).sum()
    if isinstance(total, torch.Tensor):
        try:
            leaves = list(_leaves(total)) if again else []
            if leaves:  # what was computed from a view that was made in no_grad leads to none
                first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
                squares = sum(_parts(one).square().sum() for one in first if one is not None)
                if not apart:
                    total = total + squares
                elif isinstance(squares, torch.Tensor) and squares.requires_grad:
                    squares.backward(retain_graph=True)
            total.backward()
        except RuntimeError as error:
            error.add_note(IN_BACKWARD)
            if again:
                error.add_note(IN_GRADIENTS_OF_GRADIENTS)
            raise


def _parts(value: torch.Tensor) -> torch.Tensor:
    """Real numbers, whose sum has a gradient."""
    return torch.view_as_real(value) if value.is_complex() else value


def _leaves(result: torch.Tensor) -> Iterator[torch.Tensor]:
    """What gradients of `result` are added up in."""
    pending, seen = [result.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [following for following, _ in node.next_functions]


def caught(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return type(error).__name__


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(one)
        return one * one

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * ctx.saved_tensors[0] * gradient


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(one: torch.Tensor, by: Any) -> torch.Tensor:
        return one * by

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.by, None

    @staticmethod
    def jvp(ctx: Any, one: torch.Tensor, by: Any) -> torch.Tensor:
        return one * ctx.by


class Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> Any:
        sign = one.sign() if not one.is_complex() else one.sgn()
        ctx.mark_non_differentiable(sign)
        ctx.set_materialize_grads(False)
        return one + 1, sign

    @staticmethod
    def backward(ctx: Any, gradient: Any, _: Any) -> Any:
        return gradient


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(one)
        return one.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


FUNCTIONS = {one.__name__: one for one in (Squared, Scaled, Parted, Doubled)}


def steps_of(world: World) -> list[str]:
    return [name for name in world.names if name.startswith("step")]


def examine(text: str, deviations: Sequence[Deviation] = DEVIATIONS) -> Finding | None:
    """What differs first, beyond these deviations. Raises what the program's text raises when it is executed."""
    heard: list[Event] = []

    def listen(event: Event) -> None:
        if isinstance(event, InternalError | Captured | FellBack):
            heard.append(event)

    fusewright.reset()
    collects = gc.isenabled()
    gc.disable()  # when the collector closes a generator in a cycle is no part of a program, and compiles make garbage
    eager = World(text)
    ours = World(text, compiled=True)
    try:
        with warnings.catch_warnings(), STREAM.listening(listen):
            warnings.simplefilter("ignore")
            return _first_difference(text, eager, ours, heard, deviations)
    finally:
        if ours.state:
            state.restore()
        if collects:
            gc.enable()


def _first_difference(
    text: str, eager: World, ours: World, heard: list[Event], deviations: Sequence[Deviation]
) -> Finding | None:
    steps = steps_of(eager)
    for place, step in enumerate(steps):
        fell_back = any(isinstance(event, FellBack) for event in heard)  # the next call is captured anew
        heard.clear()
        theirs, mine = eager.run(step), ours.run(step)
        if failed := [event for event in heard if isinstance(event, InternalError)]:
            return Finding("internal", step, failed[0].trace.strip().splitlines()[-1][:300])
        errors = (ours.error, eager.error)
        if all(map(_says_text, errors)) and any(row.ends(*errors) for row in DEVIATIONS):
            return None
        so_far = steps[: place + 1]
        wide = functools.partial(_replay, eager, so_far, wide=True)
        nudged = functools.partial(_nudged, eager, so_far)
        halves = "modules=True" in text and AUTOCAST.search(text) is not None
        found = difference(mine, theirs, wide, nudged, halves)
        if found is not None:  # also where one of them has changed what it began with, and says so by all of it
            theirs, mine = eager.leaves({}), ours.leaves({})
            found = difference(mine, theirs, wide, nudged, halves)
        if found is None:
            if step.endswith("_again") and not fell_back and any(isinstance(event, Captured) for event in heard):
                # One more compile is allowed for what the call before has changed itself: a cache that it has filled.
                heard.clear()
                eager.run(step)
                ours.run(step)
                again = any(isinstance(event, Captured) for event in heard)
                said = "captured again by a call that is as the one before"
                return Finding("needless", step, said) if again else None  # (a replay would be a call behind)
            theirs = mine = []  # the next step may see how often a tensor's memory is in use
            continue
        again = _replay(eager, so_far)
        if again is None or difference(again, theirs, lambda: None) is not None:
            return None  # eager does not agree with itself
        found = replace(found, raised=eager.error is not None)
        # A row that looks at another program may need the other rows for that one, never itself: two explain enough.
        first = len(deviations) == len(DEVIATIONS)
        others = {row: [one for one in deviations if first and one is not row] for row in deviations}
        if not any(row.covers(found, text, partial(examine, deviations=others[row])) for row in deviations):
            return Finding("exception" if found.where.startswith("exception") else found.kind, step, str(found))
        return None
    return None


def _says_text(error: Exception | None) -> bool:
    """Whether to ask what an error says runs nothing of the program's."""
    return error is None or (type(error).__module__ != "world" and all(type(one) in EXACTLY for one in error.args))


def _nudged(first: World, steps: list[str]) -> list[list[Leaf]]:
    """By turns, by pairs, and all one way; up first, and down first."""
    found = [_replay(first, steps, rounding=Rounding(turn, up)) for turn in TURNS for up in (0, 1)]
    if HALF.search(first.text):
        found += [_replay(first, steps, nudged=turn) for turn in TURNS]
    return [leaves for leaves in found if leaves is not None]


TURNS = (1, 2, 1 << 30)


class Rounding(TorchDispatchMode):
    """Eager operators whose results are rounded once more: each number that an operator has rounded moves by one
    rounding, up or down by turns after so many, and from operator to operator. So results that cancel are judged by what
    cancels. What is exact, a copy or a sum of small numbers, stays as it is."""

    def __init__(self, turn: int, count: int) -> None:
        super().__init__()
        self.turn, self.count = turn, count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # where operators that are made of others come whole
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        precise = self.precise(func, args, kwargs)
        made = func(*args, **kwargs)
        self.count += 1
        for one, exact in zip(pytree.tree_leaves(made), precise):
            if isinstance(one, torch.Tensor) and one._is_zerotensor():  # has no memory
                continue
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.shape == exact.shape and one.numel():
                up = (torch.arange(one.numel(), device=one.device).reshape(one.shape) // self.turn + self.count) % 2 == 0
                value, off = one.double(), (one.double() - exact.double()).abs()
                by = torch.maximum(torch.finfo(one.dtype).eps * value.abs(), 2 * off) * torch.where(up, 1.0, -1.0)
                one.copy_(torch.where((off != 0) & exact.isfinite(), value + by, value))
        return made

    def precise(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        """The results in float64; none of views, of random numbers, and where the operator does not know that type."""
        if torch.Tag.nondeterministic_seeded in func.tags or facts(func).is_view or facts(func).parts_of is not None:
            return []

        def widened(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.to(torch.float64) if value.is_floating_point() else value.clone()
            return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

        try:
            return pytree.tree_leaves(func(*pytree.tree_map(widened, args), **pytree.tree_map(widened, kwargs)))
        except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):  # which the operator says itself
            return []


def _replay(
    first: World, steps: list[str], wide: bool = False, nudged: int = 0, rounding: Rounding | None = None
) -> list[Leaf] | None:
    try:
        world = World(first.text, wide, nudged, rounding=rounding)
        for step in steps:
            world.run(step)
    except Exception:  # text that does not run in float64 has no reference
        return None
    return world.leaves({})


class TooLong(BaseException):
    """A program has run more lines than it may."""


SECONDS = (5.0, 0.02)  # after which a draft is stopped, and again each time that it has gone on


def errors_of(text: str, most: int = 20_000, largest: float = math.inf) -> int | None:
    """How many steps raise in eager; None if the text does not run, or not within so many lines, or if numbers of the
    module `m` or of a result become larger: then the last digits decide."""
    return next(_errors_of(text, most, largest))


def _errors_of(text: str, left: int, largest: float) -> Iterator[int | None]:
    """In a generator, for which an exception is handled apart: where a tracer raises in a comprehension in an `except`,
    CPython 3.12 leaves what was handled there to the caller, as the context of all that is raised later."""

    def count(frame: types.FrameType, event: str, argument: object) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TooLong
        return count

    def enter(frame: types.FrameType, event: str, argument: object) -> Any:
        return count if frame.f_code.co_filename.startswith("<fuzz") else None

    def stop(number: int, frame: types.FrameType | None) -> None:
        while frame is not None and frame.f_code is not _errors_of.__code__:
            if frame.f_code.co_filename.startswith("<fuzz"):  # none is where only what puts things back calls others
                break
            frame = frame.f_back
        if over or frame is None:
            return
        signal.setitimer(signal.ITIMER_REAL, SECONDS[1])  # only now: where this takes longer, it would interrupt itself
        if frame.f_code is not _errors_of.__code__:
            raise TooLong  # again and again: a program may catch it, and lines are no longer counted then

    before, errors, over, handler = sys.gettrace(), 0, False, signal.signal(signal.SIGALRM, stop)
    output = sys.stdout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            signal.setitimer(signal.ITIMER_REAL, SECONDS[0])
            sys.settrace(enter)
            sys.stdout = io.StringIO()
            world = World(text, draft=True)
            for step in steps_of(world):
                result = None
                try:
                    result = world.names[step]()
                except Exception:
                    errors += 1
                if largest < math.inf and any(_largest(one) > largest for one in (result, world.names["m"])):
                    left = -1
                    break
        except (Exception, TooLong):  # text that is no program
            left = -1
        finally:
            over = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            sys.settrace(before)
            sys.stdout = output
            if "state=True" in text:
                state.restore()
    yield errors if left >= 0 else None


def _largest(value: Any) -> float:
    """The largest number in the value's tensors, or in a module's parameters and their gradients. NaN is none."""
    if isinstance(value, torch.nn.Module):
        value = [part for one in value.parameters() for part in (one, None if one.is_leaf is False else one.grad)]
    tensors = [one.detach() for one in pytree.tree_leaves(value) if type(one) in (torch.Tensor, torch.nn.Parameter)]
    plain = [one for one in tensors if one.layout is torch.strided and one.is_floating_point() and one.numel()]
    with torch.no_grad():
        return max((float(one.double().abs().nan_to_num(nan=0.0, posinf=math.inf).max()) for one in plain), default=0.0)


def check(text: str) -> None:
    """Prints what is found."""
    print(examine(text) or "equal")


def printed(text: str) -> str:
    """The program as a file that runs."""
    return f'from tests.fuzz.session import check\n\ncheck(r"""\n{text.strip()}\n""")\n'


def _on_device() -> None:
    """Tensors for which a program names no device are made there too."""
    if DEVICE.type != "cpu":
        torch.set_default_device(DEVICE)


def _seed() -> None:
    torch.default_generator.manual_seed(0)
    if DEVICE.type == "cuda":
        torch.cuda.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _random_state() -> tuple[Any, ...]:
    """The generators' states, and the number of the next hook, which a program can tell too."""
    numpy = np.random.get_state()
    drawn = (torch.random.get_rng_state(), *([torch.cuda.get_rng_state()] if DEVICE.type == "cuda" else ()))
    return drawn, random.getstate(), (numpy[1].tobytes(), numpy[2]), numpy, RemovableHandle.next_id


def _set_random_state(state: tuple[Any, ...]) -> None:
    torch.random.set_rng_state(state[0][0])
    if DEVICE.type == "cuda":
        torch.cuda.set_rng_state(state[0][1])
    random.setstate(state[1])
    np.random.set_state(state[3])
    RemovableHandle.next_id = state[4]


@functools.lru_cache(16)
def _compiled(text: str) -> types.CodeType:
    """The text's code, under a name with which tracebacks and `inspect` find the text."""
    return compile(text, _listed(text), "exec")


def _listed(text: str) -> str:
    name = f"<fuzz {hash(text) & 0xFFFFFFFF:x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    return name


WORD = re.compile(r"[A-Za-z_]\w*")


@functools.lru_cache(16)
def _spoken_of(text: str, preludes: tuple[str, ...]) -> list[types.CodeType]:
    """The statements of what programs begin with that this text speaks of, by the names that they give, and those that
    these speak of. Most programs speak of a few, and each of their worlds begins with all that it has."""
    speaks, statements = _statements(preludes)
    wanted, pending = {""}, {"", *WORD.findall(text)} & speaks.keys()
    while pending:
        wanted |= pending
        pending = set().union(*(speaks[name] for name in pending)) - wanted
    return [code for name, code in statements if name in wanted]


@functools.lru_cache(8)
def _statements(preludes: tuple[str, ...]) -> tuple[dict[str, set[str]], list[tuple[str, types.CodeType]]]:
    """(names that are given, each with those of them that its statements speak of; the statements, with these names). No
    name where a statement gives several or none, which all programs need; what is called `_` goes with what stands before
    it."""
    words: dict[str, set[str]] = {"": set()}
    statements: list[tuple[str, types.CodeType]] = []
    for prelude in preludes:
        for node in ast.parse(prelude).body:
            match node:
                case ast.FunctionDef(name="_"):
                    name = statements[-1][0]
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(name)]):
                    pass
                case _:
                    name = ""
            words.setdefault(name, set()).update(WORD.findall(ast.unparse(node)))
            statements.append((name, compile(ast.Module([node], []), _listed(prelude), "exec")))
    return {name: held & words.keys() for name, held in words.items()}, statements


@functools.lru_cache(64)
def _code(text: str, name: str) -> types.CodeType:
    return compile(text, name, "exec")


# A dataclass compiles each of its methods: those of the programs' common class are the same each time.
dataclasses.exec = lambda text, *names: exec(_code(text, "<string>"), *names)  # type: ignore[attr-defined]
