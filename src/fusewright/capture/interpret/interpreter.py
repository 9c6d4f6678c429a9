"""The symbolic interpreter: frames, the run loop, unwinding, cells, and the user's stack.

Takes the root function with the real values of its arguments, and a `World` through which every operation on values
goes; interprets the function's bytecode up to its end, or up to the step in front of which it must stop. Always holds:
only a `UserException` is unwound through the user's exception tables; signals pass through; anything else is a defect
and propagates.
"""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base.exception_fields import context_chain, context_of, set_context, set_traceback, traceback_of
from fusewright.base.location import Location
from fusewright.base.signals import GraphBreak, SkipFrame, UserException
from fusewright.capture.assumptions import Assumptions
from fusewright.capture.border.absent import STAND_FOR, AbsentTraceback
from fusewright.capture.border.arguments import bind
from fusewright.capture.border.effects import DELETED
from fusewright.capture.border.interfaces import Tracer as AnyTracer
from fusewright.capture.border.native import native
from fusewright.capture.border.values.list import APPEND, LONG, intent_of, load_for
from fusewright.capture.bytecode.instructions import CO_ASYNC, CO_FAST_KINDS, CO_GENERATOR, NULL, CodeInfo, decoded
from fusewright.capture.bytecode.liveness import live_slots
from fusewright.capture.bytecode.resume import LastInstruction, origin_of
from fusewright.capture.guards.sources import module_path
from fusewright.capture.guards.text import text_of_error
from fusewright.capture.interpret.callers import left
from fusewright.capture.interpret.continuation import Continuation, returning
from fusewright.capture.interpret.generators import InterpretedGenerator
from fusewright.capture.interpret.opcodes import HANDLERS, unsupported
from fusewright.capture.interpret.pending import Pending
from fusewright.capture.interpret.predication import Branches
from fusewright.capture.interpret.tracebacks import Raised
from fusewright.capture.settings import CaptureOptions, History, KnownBreak
from fusewright.record.recorder import Recorder

if TYPE_CHECKING:
    from fusewright.capture.border.world import World

# Instructions that only move values, compare classes of exceptions, or leave.
_HARMLESS = frozenset(
    {
        "NOP", "POP_TOP", "PUSH_NULL", "COPY", "SWAP", "LOAD_CONST", "LOAD_FAST", "STORE_FAST", "DELETE_FAST",
        "LOAD_GLOBAL",
        "PUSH_EXC_INFO", "POP_EXCEPT", "RERAISE", "CHECK_EXC_MATCH", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE",
        "JUMP_FORWARD",
        "RETURN_VALUE", "RETURN_CONST", "CALL_INTRINSIC_1", "CLEANUP_THROW",
    }
)  # fmt: skip


_RAISE_AGAIN = frozenset({"RERAISE", "CLEANUP_THROW"})
"""Instructions at which a traceback does not grow."""


def _refuse_to_close(frame: Frame | None, operand: object) -> object:
    raise SkipFrame(
        "generator-abandoned", "a generator is left where closing it runs a handler, or closes what it delegates to"
    )


_CALL_COST = 16  # instructions that entering a frame counts as


class Handling:
    """The exception being handled, by generator: CPython's `exc_info` chain."""

    __slots__ = ("error", "previous")

    def __init__(self, previous: Handling | None = None) -> None:
        self.error: BaseException | None = None
        self.previous = previous


class Frame:
    """One interpreted frame. `pc` is the next instruction; `namespace` is set in class bodies only."""

    __slots__ = (
        "_callers", "_locations", "_module",
        "back",
        "begun",
        "finished",
        "function",
        "info",
        "locals",
        "namespace",
        "ops",
        "pc",
        "stack",
        "tracer",
        "value",
        "variables",
        "world",
    )  # fmt: skip

    def __init__(self, tracer: Tracer, function: types.FunctionType, info: CodeInfo, arguments: list[Any]) -> None:
        self.tracer = tracer
        self.world = tracer.world
        self.function = function
        self.info = info
        self.ops = info.ops or link(info)
        self.locals: list[Any] = arguments + [NULL] * (len(info.slots) - len(arguments))
        self.stack: list[Any] = []
        self.pc = 0
        self.namespace: dict[str, object] | None = None
        self.variables: dict[str, object] | None = None  # what `locals()` has given, if it must give that again
        self.value: Any = None
        self.finished = False
        self.back: Frame | None = None
        self.begun = 0  # operators that were recorded when it was entered
        self._callers: tuple[Location, ...] | None = None
        self._module: str | None = None
        self._locations: dict[int, Location] = {}

    def local(self, slot: int) -> Any:
        """What a variable holds (NULL: nothing); an argument is loaded when it is first read."""
        value = self.locals[slot]
        if type(value) is Pending:
            value = self.tracer.load_pending(value)
            if id(value) not in self.world.unread:  # the next read of such a list may be a true one
                self.locals[slot] = value
        return value

    def enter(self, back: Frame | None) -> None:
        """Begins to run (again), called by `back`."""
        self.back = back
        self.begun = self.tracer.recorder.op_count
        self._callers = None

    def stack_here(self) -> tuple[Location, ...]:
        """The user's stack up to this frame, outermost first. Callers stand still while a frame runs, so theirs is made
        once."""
        if self._callers is None:
            self._callers = () if self.back is None else self.back.stack_here()
        if self._module is None:
            self._module = self._path_of_module()
            # Where no module is named, all calls of the code share their locations.
            self._locations = {} if self._module else self.info.locations
        index = self.pc - 1 if self.pc else 0
        location = self._locations.get(index)
        if location is None:
            code = self.info.code
            place = code.co_filename, self.info.line(index), code.co_qualname
            location = self._locations[index] = Location(*place, self._module)
        return (*self._callers, location)

    def _path_of_module(self) -> str:
        """The path of the module whose method this is, if it is one's."""
        first = self.locals[0] if self.locals else None
        source = self.world.source_of(first) if issubclass(type(first), torch.nn.Module) else None
        return "" if source is None else module_path(source)

    def unwind(self, error: BaseException) -> None:
        """Goes to the handler of the instruction that raised, or raises on."""
        if isinstance(error, RecursionError):
            raise SkipFrame("recursion", "a RecursionError, which depends on the depth of the interpreter itself")
        index = self.pc - 1
        handler = self.info.handlers[index]
        instruction = self.info.instructions[index]
        again = (instruction.action, instruction.operand) == ("RAISE_VARARGS", 0) and self.tracer.is_handled(error)
        if instruction.action not in _RAISE_AGAIN and not again:
            self.tracer.note_raised(error, self)
        self.tracer.forget_traceback(error)
        if handler is None:
            raise UserException(error)
        stack = self.stack
        del stack[handler.depth :]
        if handler.lasti:
            stack.append(LastInstruction(instruction.positions))
        stack.append(error)
        self.pc = handler.target


def link(info: CodeInfo) -> list[tuple[Callable[..., object], object]]:
    """The (handler, operand) records of a code object, made once."""
    info.ops = [
        (HANDLERS.get(instruction.action) or unsupported(instruction.action), instruction.operand)
        for instruction in info.instructions
    ]
    for index, (handler, operand) in enumerate(info.ops):
        action = info.instructions[index].action
        if action in _LOADS and (intent := intent_of(info.instructions, index)):
            info.ops[index] = load_for(intent, action, handler), operand
    return info.ops


_LISTS = (list, collections.deque)
_LOADS = frozenset({"LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "BINARY_SUBSCR"})


class Tracer:
    """One attempt to capture one root frame.

    world, recorder  the border, and what it records into
    locals           real values of the root frame's argument slots
    assumptions      what the attempt takes for granted, and the root step in front of which to stop; `cut` then builds
        what is returned
    step             root instructions begun so far
    history          what earlier captures have met
    branches         calls that depend on comparisons of sizes, and may be recorded for each outcome
    """

    def __init__(
        self,
        function: types.FunctionType,
        arguments: tuple[object, ...],
        options: CaptureOptions,
        call: Callable[[AnyTracer, object, tuple[Any, ...], dict[str, Any]], object],
        assumptions: Assumptions = Assumptions(),  # noqa: B008  (frozen)
    ) -> None:
        self.function = function
        self.locals = arguments
        self.options = options
        self.assumptions = assumptions
        self.branches = Branches(enabled=False)  # set by the attempt
        self.history = History()  # so is this
        self.known_break: KnownBreak | None = None  # and this
        self.recorder: Recorder = None  # type: ignore[assignment]  # the attempt sets both
        self.world: World = None  # type: ignore[assignment]
        self.frame: Frame | None = None
        self.root: Frame | None = None
        self.step = 0
        self.handling = Handling()
        self._around = sys.exception()  # what a caller of the root frame is handling
        self._call = call
        self._budget = options.instruction_budget
        self._depth = 0
        self._cells: dict[int, types.CellType] = {}
        self._guarded: set[InterpretedGenerator] = set()
        self._raised: dict[int, Raised] = {}
        # Exceptions raised where the frame handles nothing: their context is what its callers handle.
        self.open_contexts: dict[int, BaseException] = {}
        self._load_argument: Callable[[object, int, str], object]

    # -----------------------------------------------------------------------------------------------------------------
    # The root frame

    def run(
        self, load_argument: Callable[[object, int, str], object], cut: Callable[[Frame], Continuation]
    ) -> Continuation:
        """Interprets the root frame. `load_argument(real, slot, name)` brings an argument inside; `cut(frame)` is asked
        for the continuation when `assumptions.stop_at` is reached. Raises GraphBreak and SkipFrame."""
        code = self.function.__code__
        if code.co_flags & (CO_GENERATOR | CO_ASYNC) or code.co_flags & CO_FAST_KINDS != CO_FAST_KINDS:
            raise SkipFrame("frame-kind", "a generator, a coroutine, a class body or a module")
        info = decoded(code)
        live = live_slots(info)[0]
        self._load_argument = load_argument
        # Much of what a resume function is given is only handed on to the next one: it is loaded, and so guarded, when
        # it is read. A list may only be appended to, or indexed.
        resumes = origin_of(code).info is not info
        appends = not APPEND.isdisjoint(code.co_names)
        arguments: list[Any] = []
        real: Any
        for slot, real in enumerate(self.locals):
            load: Callable[[object, int, str], object] = (
                Pending if resumes or (type(real) in _LISTS and (appends or len(real) > LONG)) else load_argument
            )
            arguments.append(load(real, slot, info.slots[slot]) if live >> slot & 1 else NULL)
        self.root = Frame(self, self.function, info, arguments)
        return self._run_root(self.root, cut)

    def load_pending(self, argument: Pending) -> object:
        """The argument, brought inside."""
        return self._load_argument(argument.real, argument.slot, argument.name)

    def _run_root(self, frame: Frame, cut: Callable[[Frame], Continuation]) -> Continuation:
        self.frame = frame
        ops = frame.ops
        stop_at = self.assumptions.stop_at
        while True:
            try:
                while True:
                    if self.step == stop_at:
                        if self._guarded:
                            raise SkipFrame("generator-abandoned", "a generator is alive inside a try or with block")
                        return cut(frame)
                    self.step += 1
                    handler, operand = ops[frame.pc]
                    frame.pc += 1
                    if handler(frame, operand):
                        self._close_generators()
                        return returning(frame.value)
            except UserException as signal:
                error = signal.exception
            except (GraphBreak, SkipFrame) as signal:
                signal.stack = signal.stack or self.stack()
                left(frame, signal)
                raise
            if frame.info.handlers[frame.pc - 1] is None:
                self.forget_traceback(error)
                raise SkipFrame("exception-escapes", text_of_error(error), self.stack())
            frame.unwind(error)

    def _close_generators(self) -> None:
        """Closes generators that were left inside a try or with block, as their deletion would. When exactly CPython
        deletes them is not known here, so only handlers without any effect may run (`except StopIteration: return` and
        the like)."""
        if any(generator.closes_another(self._guarded) for generator in self._guarded):
            _refuse_to_close(self.root, None)
        generators = list(self._guarded)
        for frame in (generator.frame for generator in generators):  # one may close another
            frame.ops = [
                record if instruction.action in _HARMLESS else (_refuse_to_close, None)
                for record, instruction in zip(frame.ops, frame.info.instructions)
            ]
        for generator in generators:
            try:
                generator.close()
            except Exception as error:
                raise SkipFrame("generator-abandoned", f"closing a generator raised {type(error).__name__}") from error

    def forget(self) -> None:
        """Lets go of the frame's values, at the end of the attempt."""
        self.frame = self.root = self._around = None
        self.locals = ()
        del self.function  # and so what its cells hold
        self._cells.clear()
        self._guarded.clear()
        self.open_contexts.clear()
        self._raised.clear()  # an exception holds the frames that it passed
        self.handling = Handling()

    # -----------------------------------------------------------------------------------------------------------------
    # Inlined frames

    def inline(
        self, function: types.FunctionType, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        """Interprets a call of a Python function (a generator function gives an InterpretedGenerator)."""
        code = function.__code__
        if code.co_flags & CO_ASYNC:
            raise SkipFrame("frame-kind", f"{code.co_qualname} is a coroutine")
        self.world.load_function(function)
        values = bind(function, args, kwargs or {}, self.world.load_default)
        if self.branches.may_fork(self, function, values):
            return self.branches.call(self, function, lambda: Frame(self, function, decoded(code), list(values)))
        return self.execute(Frame(self, function, decoded(code), values), None)

    def called_natively(self, function: types.FunctionType, values: tuple[object, ...]) -> object:
        """Interprets a call that native code makes by itself, of a special method as a rule; `values` are the frame's
        argument slots."""
        world = self.world
        code = function.__code__
        arguments = list(values)
        if world.load_function(function):
            defaults, first = function.__defaults__ or (), code.co_argcount - len(function.__defaults__ or ())
            for index, value in enumerate(defaults):
                if arguments[first + index] is value:
                    arguments[first + index] = world.load_default(function, index)
            for name, value in (function.__kwdefaults__ or {}).items():
                slot = code.co_varnames.index(name)
                if arguments[slot] is value:
                    arguments[slot] = world.load_default(function, name)
        if arguments:
            world.guard_method(arguments[0], function)
        return self.execute(Frame(self, function, decoded(code), arguments), None)

    def run_class_body(self, function: types.FunctionType, namespace: dict[str, object]) -> object:
        """Interprets the body of a class statement in `namespace`; gives what the body returns (its `__class__` cell,
        or None)."""
        frame = Frame(self, function, decoded(function.__code__), [])
        frame.namespace = namespace
        return self.execute(frame, None)

    def execute(self, frame: Frame, error: BaseException | None) -> object:
        """Runs a frame from where it stands to its return or its next yield; `error` is thrown in at first."""
        if self._depth >= self.options.inline_depth:
            raise GraphBreak("inline-depth", f"{self._depth} interpreted calls on top of each other")
        self.spend(_CALL_COST)
        if self.known_break is not None and self.frame is self.root:
            self._meet(self.known_break, frame.info.code)
        frame.enter(self.frame)
        self.frame = frame
        self._depth += 1
        self.world.intent = ""
        ops = frame.ops
        try:
            while True:
                if error is not None:
                    frame.unwind(error)
                try:
                    while True:
                        handler, operand = ops[frame.pc]
                        frame.pc += 1
                        if handler(frame, operand):
                            value, frame.value = frame.value, None  # a generator holds its frame
                            return value
                except UserException as signal:
                    error = signal.exception
                except (GraphBreak, SkipFrame) as signal:
                    signal.stack = signal.stack or self.stack()
                    left(frame, signal)
                    raise
        finally:
            self._depth -= 1
            self.frame = frame.back
            frame.back = None

    def _meet(self, known: KnownBreak, code: types.CodeType) -> None:
        """Breaks in front of a call that is known to lead to a break."""
        root = self.root
        if root is None or known.called is not code:
            return
        if root.pc == known.pc and self.recorder.op_count == known.operators:
            raise known.again(root.stack_here())

    def call(self, function: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Any callable, by the rules of `calls.call`."""
        if type(function) is types.MethodType and type(function.__self__) in STAND_FOR:
            return native(function, *args, **(kwargs or {}))  # it looks like Python code, and is the interpreter's own
        return self._call(self, function, args, kwargs or {})

    def spend(self, instructions: int) -> None:
        """Charges work to the budget."""
        self._budget -= instructions
        if self._budget < 0:
            raise SkipFrame("instruction-budget", f"more than {self.options.instruction_budget} Python instructions")
        self.options.deadline.check()

    def stack(self) -> tuple[Location, ...]:
        """The user's stack now, outermost first."""
        return () if self.frame is None else self.frame.stack_here()

    # -----------------------------------------------------------------------------------------------------------------
    # Cells

    def new_cell(self, value: object) -> types.CellType:
        """A cell of the capture, holding `value` (NULL: empty)."""
        cell = types.CellType() if value is NULL else types.CellType(value)
        self._cells[id(cell)] = cell
        return cell

    def adopt_cell(self, cell: types.CellType) -> None:
        """Native code has made the cell during this capture."""
        self._cells[id(cell)] = cell

    def read_cell(self, cell: types.CellType) -> object:
        """What a cell holds; NULL if it is empty."""
        if id(cell) not in self._cells:
            return self.world.load_cell(cell)
        try:
            return cell.cell_contents
        except ValueError:
            return NULL

    def write_cell(self, cell: types.CellType, value: object) -> None:
        if id(cell) in self._cells:
            cell.cell_contents = value
        else:
            self.world.store_cell(cell, value)

    def clear_cell(self, cell: types.CellType) -> None:
        if id(cell) in self._cells:
            del cell.cell_contents
        else:
            self.world.store_cell(cell, DELETED)

    def is_inside_cell(self, cell: object) -> bool:
        """Whether the cell was made by an interpreted frame of this capture."""
        return id(cell) in self._cells

    # -----------------------------------------------------------------------------------------------------------------
    # Exceptions being handled

    def new_handling(self) -> Handling:
        return Handling()

    def handled_exception(self) -> BaseException | None:
        """What `sys.exception()` gives."""
        state: Handling | None = self.handling
        while state is not None and state.error is None:
            state = state.previous
        if state is None:
            self.ask_around()
        return None if state is None else state.error

    def ask_around(self) -> None:
        """The program looks at what is handled by the callers of the root frame: it is guarded that they handle
        nothing."""
        if self._around is not None:
            raise GraphBreak("frame-access", "the exception that a caller of the compiled function is handling")
        self.world.guard_answer(sys.exception, (), None, True)

    def set_context(self, error: BaseException, replace: bool = True) -> None:
        """Chains an exception that is being raised to the one being handled, as CPython does.

        With `replace` False (raised by a native operation, or on its way out) a context that it already has stays."""
        outside = self.world.source_of(error) is not None
        if self._around is not None and context_of(error) is self._around and not outside:
            set_context(error, None)  # native code raised it, for which nothing else is being handled
        state: Handling | None = self.handling
        while state is not None and state.error is None:
            state = state.previous
        if not replace and (raised := self._raised.get(id(error))) is not None and raised.chained:
            return  # on its way out: what it passes may be handling something else
        handled = None if state is None else state.error
        if handled is None and context_of(error) is None and not outside:
            self.open_contexts[id(error)] = error
        if handled is None or handled is error or (context_of(error) is not None and not replace):
            return
        if outside:
            raise SkipFrame("outside-exception", "raises an exception object that existed before (raising changes it)")
        for link in context_chain(handled):
            if context_of(link) is error:  # no ring by chaining
                set_context(link, None)
                break
        set_context(error, handled)

    def note_raised(self, error: BaseException, frame: Frame) -> None:
        """An exception leaves the instruction at which `frame` stands: its traceback grows by that line."""
        self.set_context(error, False)
        raised = self._raised.get(id(error))
        if raised is None:
            raised = self._raised[id(error)] = Raised(error)
        raised.chained = True
        raised.left += ((frame.info, frame.pc - 1, frame.function.__globals__),)

    def note_thrown(self, error: BaseException) -> None:
        """An exception is thrown into a generator: nothing that the callers handle becomes its context."""
        self._raised.setdefault(id(error), Raised(error)).chained = True

    def forget_traceback(self, error: BaseException | None) -> None:
        """Tracebacks of exceptions made inside would show, and keep alive, frames of the interpreter. (None is stored
        also where there is none: CPython's `with` reads the field itself.)"""
        while error is not None and self.world.source_of(error) is None:
            set_traceback(error, None)
            inner = context_of(error)
            error = inner if inner is not None and traceback_of(inner) is not None else None

    def traceback_of(self, error: BaseException) -> AbsentTraceback | None:
        """What stands for the traceback that an exception has now. (One from outside is taken to have one.)"""
        raised = self._raised.get(id(error))
        if raised is None:
            if self.world.source_of(error) is None:
                return None
            raised = self._raised[id(error)] = Raised(error)
        elif not raised.left and self.world.source_of(error) is None:
            return None
        known = raised.traceback
        if type(known) is not AbsentTraceback or known.left != raised.left:
            known = raised.traceback = AbsentTraceback(error, raised.left)
        return known

    def copy_traceback(self, error: BaseException, part: BaseException) -> None:
        """A part that was split off a group has the group's traceback, and its context if that is from outside."""
        if (raised := self._raised.get(id(error))) is not None and part is not error:
            self._raised[id(part)] = copied = Raised(part)
            copied.left = raised.left
        if id(error) in self.open_contexts and isinstance(error, BaseExceptionGroup):
            self.open_contexts[id(part)] = part

    def set_traceback(self, error: BaseException, traceback: AbsentTraceback) -> None:
        """Gives an exception back a traceback that it had."""
        self._raised[id(error)].left = traceback.left

    def is_handled(self, error: object) -> bool:
        """Whether interpreted code is handling the exception."""
        state: Handling | None = self.handling
        while state is not None:
            if state.error is error:
                return True
            state = state.previous
        return False

    def is_handling(self) -> bool:
        """Whether interpreted code is handling any exception."""
        state: Handling | None = self.handling
        while state is not None and state.error is None:
            state = state.previous
        return state is not None

    def suspended(self) -> int:
        """How many generators are suspended where closing them would run the user's handlers."""
        return len(self._guarded)

    def grown_tracebacks(self) -> list[Raised]:
        """The exceptions from outside whose tracebacks have grown."""
        return [
            raised for raised in self._raised.values() if raised.left and self.world.source_of(raised.error) is not None
        ]

    def note_suspension(self, generator: InterpretedGenerator, guarded: bool) -> None:
        """A generator has been suspended (or resumed): `guarded` if closing it there would run the user's handlers."""
        if guarded or generator.closes_another(self._guarded):
            self._guarded.add(generator)
        else:
            self._guarded.discard(generator)
