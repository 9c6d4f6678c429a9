"""Cutting a frame at a graph break: what happens after the graph, as source.

Takes the root frame, standing in front of the instruction that breaks; gives the `Continuation` that performs that one
instruction eagerly and calls the resume function (two of them where the instruction branches; a third where an
exception of it is handled in this frame). Always holds: the frame is not changed; `CannotCut` says why a frame cannot
be cut. No torch.
"""

from __future__ import annotations

import builtins
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

from fusewright import _native
from fusewright._native import isinstance
from fusewright.base.records import replace
from fusewright.capture.breaks.cut_state import (
    ARITHMETIC,
    BRANCHES,
    CONTAINERS,
    GIVES_NUMBER,
    GIVES_TEXT,
    MAY_FAIL,
    TEXT,
    TIDYING,
    State,
    is_quiet,
)
from fusewright.capture.breaks.eager_step import CALL, HANDLING, PAUSED, Source, load_global, perform
from fusewright.capture.breaks.last_references import refuse_to_lose
from fusewright.capture.bytecode.instructions import NULL, CodeInfo, Handler, Instruction
from fusewright.capture.bytecode.liveness import live_slots
from fusewright.capture.bytecode.resume import (
    EMPTY,
    HANDLED,
    PAIRS,
    PASSED,
    CannotCut,
    Entry,
    LastInstruction,
    Layout,
    Tail,
    cycle,
    origin_of,
    raising_code,
    resume_code,
    shared_resumption,
)
from fusewright.capture.interpret.continuation import LET_GO, Continuation
from fusewright.capture.interpret.opcodes.calls import FRAME_CALLS
from fusewright.capture.interpret.pending import Pending
from fusewright.capture.interpret.tracebacks import Place, Saved

SCALARS = frozenset({bool, int, float})
END = object()  # what `next` gives at the end of an iterator
TAIL = "__tail"
_tensor_loops: weakref.WeakKeyDictionary[CodeInfo, set[int]] = weakref.WeakKeyDictionary()  # by first instruction
_FOLLOWED = 48  # instructions that are followed right behind the break
_VALUE_NAME = re.compile(r"__(?:local|cell|stack|handled)\d+\b")


# Breaks whose callee runs its functions a second time later, when no frame is compiled: they must then do the same as
# the first time.
UNDISTURBED = frozenset({"checkpoint"})


def cut(frame: Any, code: str = "", operators: int = 1) -> Continuation:
    """The continuation of a root frame that stops at `frame.pc`, because of the break `code`, up to which that many
    tensor operators were recorded. Raises CannotCut."""
    return _Cut(frame, code, operators).build()


class _Cut:
    def __init__(self, frame: Any, code: str = "", operators: int = 1) -> None:
        self.frame = frame
        self.operators = operators
        options = self.options = frame.tracer.options
        origin = origin_of(frame.info.code)
        self.info: CodeInfo = origin.info
        self.resumed = origin.info is not frame.info
        self.index = origin.indices[frame.pc]
        self.live = live_slots(self.info)
        self.held = {old: value for old, value in zip(origin.slots, frame.locals) if old >= 0 and value is not NULL}
        kinds = {slot: "cell" if slot in self.info.cells else "local" for slot in self.held}
        self.values: dict[str, object] = {f"__{kinds[slot]}{slot}": value for slot, value in self.held.items()}
        self.entries: dict[str, Entry] = {}  # what the stack's expressions are, where they are no plain values
        stack = self._stack()
        self.known = dict(self.values)
        self.resumptions: dict[Layout, str] = {}
        self.source = Source(stack, frame.function)
        self.source.known = self.known
        self.source.constants[CALL] = options.call_paused if code in UNDISTURBED else options.call_eager
        self.source.constants[PAUSED] = options.call_paused
        self.source.constants[HANDLING] = _native.call_handling

    def _stack(self) -> list[str | None]:
        """The stack as expressions. A handler has saved the exception that was handled before it: what counts is the
        one that it handles, which the next handler has saved, or which is being handled now."""
        stack: list[str | None] = []
        saved = ""
        for depth, value in enumerate(self.frame.stack):
            name = f"__stack{depth}"
            if type(value) is Saved:
                if saved:
                    self.values[saved] = value.error
                name = saved = f"__handled{depth}"
                self.entries[name] = HANDLED
            elif type(value) is LastInstruction:
                name = f"__raised_at{depth}"
                self.entries[name] = value.positions
            elif value is not NULL:
                self.values[name] = value
            stack.append(None if value is NULL else name)
        if saved:
            self.values[saved] = self.frame.tracer.handling.error
        return stack

    def _handled(self, state: State) -> str:
        """The exception that is being handled."""
        return next(
            (value for value in reversed(state.stack) if value is not None and self.entries.get(value) == HANDLED), ""
        )

    def build(self) -> Continuation:
        instruction = self.info.instructions[self.index] if self.index >= 0 else None
        if instruction is None:
            raise CannotCut("the break is in the prologue of a resume function")
        if self.frame.variables is not None:
            raise CannotCut("what locals() has given belongs to the frame")
        self._check_loop(instruction)
        self._check_callee(instruction)
        refuse_to_lose(value for slot, value in self.held.items() if not self.live[self.index] >> slot & 1)
        scalars = frozenset(name for name, value in self.values.items() if type(value) in SCALARS)
        variables = {slot: f"__local{slot}" for slot in self.held if slot not in self.info.cells}
        texts = frozenset(name for name, value in self.values.items() if type(value) is str)
        before = State(self.index, list(self.source.stack), dict(variables), scalars, texts)
        step: list[str] = []
        self.source.handled = self._handled(before)
        if instruction.action in BRANCHES:
            lines = self._branch(before)
        elif instruction.action == "FOR_ITER":
            lines = self._advance(before)
        else:
            perform(self.source, instruction)
            step = self.source.lines
            after = State(self.index + 1, self.source.stack, variables, scalars, texts)
            lines = self._after(after, step)
        if not step:
            step, lines = lines[:1], lines[1:]  # a branch or a loop: the call of bool or next, then the two exits
        lines = self._guarded(step, before) + lines
        used = set(_VALUE_NAME.findall("\n".join(lines)))
        names = tuple(name for name in self.values if name in used)
        return Continuation(
            tuple(self.values[name] for name in names), names, tuple(lines), dict(self.source.constants)
        )

    def _check_loop(self, instruction: Instruction) -> None:
        """In a loop the parts between the breaks run once for each iteration: worth it where one of them works on
        tensors. (An outside iterator at the head of a loop is given a try: what follows may.)"""
        loop = cycle(self.info, self.index)
        if not loop:
            return
        known = _tensor_loops.setdefault(self.info, set())
        if self.operators:
            known.add(min(loop))
        elif min(loop) not in known and (self.resumed or instruction.action != "FOR_ITER"):
            raise CannotCut("the break is inside a loop, in which no tensor operation comes before it")

    def _check_callee(self, instruction: Instruction) -> None:
        if instruction.action not in _CALLS:
            return
        count = instruction.operand[0]  # type: ignore[index]
        pair = self.frame.stack[-count - 2 :][:2]
        callee = pair[1] if pair[0] is NULL else pair[0]
        if id(callee) in FRAME_CALLS and callee is not builtins.__build_class__:
            raise CannotCut("the call reads the frame that makes it")

    # -----------------------------------------------------------------------------------------------------------------
    # Exits

    def _after(self, state: State, step: list[str]) -> list[str]:
        """What follows the eager step. A fresh Python scalar (of `.item()`, say) would be an argument of the resume
        function, guarded by value. So what only computes with it, formats it, prints it, stores it or branches on it is
        done here too, if it is gone then."""
        plain = self._exit(state)
        result = step[-1].split(" = ")[0] if step else ""
        if not state.stack or state.stack[-1] != result:
            return plain
        started = state.copy()
        started.scalars, started.fresh = state.scalars | {result}, frozenset({result})
        followed = self._follow(started)
        if followed is None or followed == plain:
            return plain
        test = f"if type({result}) in {self.source.constant(SCALARS)}:"
        return [test, *_indented(followed), *plain]

    def _exit(self, state: State) -> list[str]:
        """Returns, if nothing but loads and stores of variables stands in front of a return; calls a resume function
        otherwise."""
        returned = self._walk_to_return(state.copy())
        if returned is not None:
            return returned
        # What the next instructions drop or store need not travel as a stack value.
        settled = state.copy()
        while (instruction := self.info.instructions[settled.index]).action in _SETTLING:
            if not _MOVES[instruction.action](self, settled, instruction.operand):
                break
            state = settled.copy()
        return [f"return {self._resume(state)}"]

    def _walk_to_return(self, state: State) -> list[str] | None:
        for _ in range(_FOLLOWED):
            instruction = self.info.instructions[state.index]
            if instruction.action in _RETURNS:
                return self._returned(state, instruction)
            mover = _MOVES.get(instruction.action)
            if mover is None or not mover(self, state, instruction.operand):
                return None
        return None

    def _returned(self, state: State, instruction: Instruction) -> list[str]:
        value = (
            self._constant(instruction.operand) if instruction.action == "RETURN_CONST" else self._text(state.stack[-1])
        )
        return [f"return {value}"]

    def _follow(self, state: State) -> list[str] | None:
        """The lines that follow a fresh scalar up to a return, a branch on it, or the point where nothing depends on it
        any more; None where something else comes first."""
        lines: list[str] = []
        for _ in range(_FOLLOWED):
            instruction = self.info.instructions[state.index]
            action = instruction.action
            if action in _RETURNS:
                return lines + self._returned(state, instruction)
            if not self._depends(state):
                return lines + self._exit(state)
            mover = _MOVES.get(action)
            if mover is not None and action != "BUILD_TUPLE":  # an expression that is used twice would be made twice
                if not mover(self, state, instruction.operand):
                    return None
                continue
            if self.info.handlers[state.index] is not None:
                return None
            if action in BRANCHES:
                return lines + self._branch(state) if state.stack[-1] in state.scalars else None
            follower = _FOLLOWERS.get(action)
            if follower is None or not follower(self, state, instruction.operand):
                return None
            self._perform(state, instruction, lines)
        return None

    def _depends(self, state: State) -> bool:
        live = self.live[state.index]
        return any(value in state.fresh for value in state.stack) or any(
            value in state.fresh for slot, value in state.variables.items() if live >> slot & 1
        )

    def _perform(self, state: State, instruction: Instruction, lines: list[str]) -> None:
        """Performs an instruction that follows the break; what it pushes counts as fresh."""
        source = self.source
        saved, source.stack, source.lines = (source.stack, source.lines), state.stack, lines
        source.handled = self._handled(state)
        before = set(state.stack)
        made_by = self._callee(state, instruction)
        start = len(lines)
        perform(source, instruction)
        source.stack, source.lines = saved
        if instruction.action in _FAILING:
            lines[start:] = self._caught(lines[start:], state.index, self._raised(state.index))
        made = frozenset(value for value in state.stack[-2:] if value is not None and value not in before)
        if instruction.action in ARITHMETIC or made_by in GIVES_NUMBER:
            state.scalars |= made  # arithmetic on numbers gives numbers (or raises)
        elif instruction.action in TEXT or made_by in GIVES_TEXT:
            state.texts |= made
        if instruction.action not in _GLOBALS and instruction.action not in _METHODS:
            state.fresh |= made
        state.index += 1

    def _callee(self, state: State, instruction: Instruction) -> object:
        """The callable of a call that follows the break, if it is a builtin."""
        if instruction.action not in _CALLS:
            return None
        count = instruction.operand[0]  # type: ignore[index]
        pair = state.stack[len(state.stack) - count - 2 :][:2]
        function = self.known.get(next((value for value in pair if value is not None), ""))
        return function if isinstance(function, (types.BuiltinFunctionType, type)) else None

    def _branch(self, state: State) -> list[str]:
        """Both exits of a conditional jump."""
        instruction = self.info.instructions[state.index]
        self.source.handled = self._handled(state)
        lines, condition = self._apart(bool, self._text(state.stack[-1]))
        keeps, jumps_when = BRANCHES[instruction.action]
        rest = state.stack[:-1]
        jumped = replace(state.copy(), index=instruction.target, stack=list(state.stack) if keeps else list(rest))
        passed = replace(state.copy(), index=state.index + 1, stack=list(rest))
        if_true, if_false = (jumped, passed) if jumps_when else (passed, jumped)
        return [*lines, f"if {condition}:", *_indented(self._exit(if_true)), *self._exit(if_false)]

    def _apart(self, function: Callable[..., object], *arguments: str) -> tuple[list[str], str]:
        """The lines of a call alone, and its result."""
        saved, self.source.lines = self.source.lines, []
        result = self.source.apply(function, *arguments)
        lines, self.source.lines = self.source.lines, saved
        return lines, result

    def _advance(self, state: State) -> list[str]:
        """The next element of an iterator: on in the body with it, or behind the loop."""
        instruction = self.info.instructions[state.index]
        end = self.source.constant(END)
        lines, element = self._apart(next, self._text(state.stack[-1]), end)
        body = replace(state.copy(), index=state.index + 1, stack=[*state.stack, element])
        behind = replace(state.copy(), index=int(instruction.operand), stack=state.stack[:-1])  # type: ignore
        return [*lines, f"if {element} is {end}:", *_indented(self._exit(behind)), *self._exit(body)]

    def _guarded(self, step: list[str], before: State) -> list[str]:
        """The step, with its exceptions raised inside a function that stands where the step stood: a resume function
        where the frame handles them, otherwise one that raises and has the user's name and line for the traceback."""
        handler = self._handler()
        if handler is None:
            again = self._raised(self.index)
        else:
            again = self._resume(State(self.index, before.stack[: handler.depth], before.variables), "__error")
        return ["__error = None", LET_GO, *self._caught(step, self.index, again, LET_GO)]

    def _raised(self, index: int) -> str:
        """A call that raises an error where an instruction stands."""
        function = types.FunctionType(raising_code(self.info, index), self.frame.function.__globals__)
        return f"{self.source.constant(function)}(__error)"

    def _caught(self, step: list[str], index: int, again: str, *between: str) -> list[str]:
        place = self.source.constant(Place(self.info, index, self.frame.function.__globals__))
        return [
            "try:",
            *_indented(step),
            "except BaseException as __caught:",
            f"    __error = {place}.catches(__caught)",
            *between,
            "if __error is not None:",
            "    try:",
            f"        return {again}",
            "    finally:",
            "        del __error",
        ]

    def _handler(self) -> Handler | None:
        """What handles an exception of the step in this frame; None where all that would run tidies up and raises it
        again."""
        handler = self.info.handlers[self.index]
        index = -1 if handler is None else handler.target
        for _ in range(_FOLLOWED):
            if index < 0 or self.info.instructions[index].action not in TIDYING:
                break
            if self.info.instructions[index].action == "RERAISE":
                outer = self.info.handlers[index]
                if outer is None:
                    return None
                index = outer.target
            else:
                index += 1
        return handler

    # -----------------------------------------------------------------------------------------------------------------
    # The call of a resume function

    def _resume(self, state: State, error: str = "") -> str:
        handler = self.info.handlers[state.index] if error else None
        live = self.live[handler.target if handler is not None else state.index]
        slots = tuple(slot for slot in sorted(state.variables) if live >> slot & 1)
        entries = tuple(EMPTY if value is None else self.entries.get(value, PASSED) for value in state.stack)
        layout = Layout(state.index, slots, entries, bool(error))
        made = resume_code(self.info, layout)
        name = self.resumptions.get(layout)
        if name is None:
            name = self.resumptions[layout] = f"__resume{len(self.resumptions)}"
            wrap = self.options.wrap_resume
            self.source.constants[name] = shared_resumption(self.options.resumptions, made.code, wrap)
        arguments = [state.variables[slot] for slot in slots]
        arguments += [self._cell(slot) for slot in made.cells]
        arguments += [self._text(state.stack[depth]) for depth in layout.given()]
        closure = "".join(f"__function.__closure__[{self._free_index(slot)}], " for slot in made.free)
        given = ["__function", f"({closure})", *arguments, *([error] if error else [])]
        if not self.resumed:
            return f"{name}({', '.join(given)})"
        self.source.constants[TAIL] = Tail  # a loop would otherwise nest one call for each iteration
        return f"{TAIL}({', '.join((name, *given))})"

    def _cell(self, slot: int) -> str:
        held = self.held.get(slot)
        if not isinstance(held.real if type(held) is Pending else held, types.CellType):
            raise CannotCut(f"the variable {self.info.slots[slot]} has no cell yet")
        return f"__cell{slot}"

    def _free_index(self, slot: int) -> int:
        return self.frame.info.code.co_freevars.index(self.info.slots[slot])

    def _text(self, value: str | None) -> str:
        if value is None:
            raise CannotCut("an instruction takes an empty stack slot")
        return value

    def _constant(self, value: object) -> str:
        if value is None or value is True or value is False or type(value) in (int, str):
            return repr(value)
        return self.source.constant(value)


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


_RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
_SETTLING = frozenset({"NOP", "POP_TOP", "STORE_FAST", "POP_EXCEPT"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "NULL_LOAD_GLOBAL", "LOAD_GLOBAL_NULL"})
_METHODS = frozenset({"LOAD_ATTR", "NULL_LOAD_ATTR", "LOAD_ATTR_NULL"})
_CALLS = frozenset({"CALL", "CALL_NULL_LAST"})
# What may raise for numbers and strings too, so that an error must show the user's line.
_FAILING = frozenset({*_CALLS, "FORMAT_VALUE", "FORMAT_WITH_SPEC", "STORE_ATTR", "STORE_SUBSCR"})


# What may follow a fresh scalar outside of the graph: whether the instruction touches numbers and strings only, or
# hands them on to a builtin, an output function, an attribute or an item. (More would be right too, but a loss.)
def _takes_simple(count: int) -> Callable[[_Cut, State, Any], bool]:
    def check(cut: _Cut, state: State, operand: Any) -> bool:
        return all(value in state.scalars or value in state.texts for value in state.stack[len(state.stack) - count :])

    return check


def _computes(count: int) -> Callable[[_Cut, State, Any], bool]:
    def check(cut: _Cut, state: State, operand: Any) -> bool:
        return operand not in MAY_FAIL and all(value in state.scalars for value in state.stack[-count:])

    return check


def _formats(cut: _Cut, state: State, operand: tuple[int, bool]) -> bool:
    return _takes_simple(2 if operand[1] else 1)(cut, state, operand)


def _builds_string(cut: _Cut, state: State, count: int) -> bool:
    return _takes_simple(count)(cut, state, count)


def _knows_global(cut: _Cut, state: State, name: str) -> bool:
    try:
        value = load_global(cut.frame.function, name)
    except NameError:
        return False
    # The name of the result that the line will get.
    cut.known[cut.source.next_result()] = value
    return True


def _computes_all(state: State, count: int) -> bool:
    return all(value in state.scalars for value in state.stack[len(state.stack) - count :])


def _calls_quietly(cut: _Cut, state: State, operand: tuple[int, tuple[str, ...]]) -> bool:
    count = operand[0]
    if not _takes_simple(count)(cut, state, operand):
        return False
    pair = state.stack[len(state.stack) - count - 2 :][:2]
    function = next((value for value in pair if value is not None), None)
    if function is None or function not in cut.known:
        return False
    known = cut.known[function]
    return is_quiet(known) and (known not in GIVES_NUMBER or _computes_all(state, count))


def _takes_method(cut: _Cut, state: State, name: str) -> bool:
    known = cut.known.get(state.stack[-1] or "")
    known = known.real if type(known) is Pending else known
    if type(known) not in CONTAINERS or not hasattr(known, name):
        return False
    cut.known[cut.source.next_result()] = getattr(known, name)
    return True


def _stores(cut: _Cut, state: State, operand: Any) -> bool:
    return True


_FOLLOWERS: dict[str, Callable[[_Cut, State, Any], bool]] = {
    **{action: _computes(count) for action, count in ARITHMETIC.items()},
    **dict.fromkeys(_GLOBALS, _knows_global),
    "FORMAT_VALUE": _formats,
    "FORMAT_SIMPLE": _takes_simple(1),
    "FORMAT_WITH_SPEC": _takes_simple(2),
    "CONVERT_VALUE": _takes_simple(1),
    "BUILD_STRING": _builds_string,
    **dict.fromkeys(_CALLS, _calls_quietly),
    **dict.fromkeys(_METHODS, _takes_method),
    "STORE_ATTR": _stores,
    "STORE_SUBSCR": _stores,
}


def _move_load_const(cut: _Cut, state: State, value: Any) -> bool:
    text = cut._constant(value)
    state.stack.append(text)
    if type(value) in SCALARS:
        state.scalars |= {text}
    elif type(value) is str:
        state.texts |= {text}
    state.index += 1
    return True


def _move_load_fast(cut: _Cut, state: State, slot: Any) -> bool:
    if slot not in state.variables:
        return False
    state.stack.append(state.variables[slot])
    state.index += 1
    return True


def _move_pair(first: str, second: str) -> Callable[[_Cut, State, Any], bool]:
    """An instruction of CPython 3.13 that stands for two."""

    def move(cut: _Cut, state: State, slots: tuple[int, int]) -> bool:
        index = state.index
        if not all(_MOVES[name](cut, state, slot) for name, slot in zip((first, second), slots)):
            return False
        state.index = index + 1
        return True

    return move


def _move_store_fast(cut: _Cut, state: State, slot: Any) -> bool:
    value = state.stack.pop()
    if value is None or slot in cut.info.cells:
        return False
    state.variables[slot] = value
    state.index += 1
    return True


def _move_pop(cut: _Cut, state: State, operand: Any) -> bool:
    state.stack.pop()
    state.index += 1
    return True


def _move_null(cut: _Cut, state: State, operand: Any) -> bool:
    state.stack.append(None)
    state.index += 1
    return True


def _move_copy(cut: _Cut, state: State, depth: Any) -> bool:
    state.stack.append(state.stack[-depth])
    state.index += 1
    return True


def _move_swap(cut: _Cut, state: State, depth: Any) -> bool:
    state.stack[-1], state.stack[-depth] = state.stack[-depth], state.stack[-1]
    state.index += 1
    return True


def _move_nothing(cut: _Cut, state: State, operand: Any) -> bool:
    state.index += 1
    return True


def _move_jump(cut: _Cut, state: State, target: Any) -> bool:
    state.index = target
    return True


def _move_tuple(cut: _Cut, state: State, count: Any) -> bool:
    values = state.stack[len(state.stack) - count :]
    del state.stack[len(state.stack) - count :]
    state.stack.append("(" + "".join(f"{cut._text(value)}, " for value in values) + ")")
    state.index += 1
    return True


_MOVES = {
    "NOP": _move_nothing,
    "POP_TOP": _move_pop,
    "POP_EXCEPT": _move_pop,  # the lines run outside of the handler, each eager call within the right one
    "LOAD_CONST": _move_load_const,
    "LOAD_FAST": _move_load_fast,
    "STORE_FAST": _move_store_fast,
    **{f"{first}_{second}": _move_pair(first, second) for first, second in PAIRS.values()},
    "PUSH_NULL": _move_null,
    "COPY": _move_copy,
    "SWAP": _move_swap,
    "JUMP_FORWARD": _move_jump,
    "BUILD_TUPLE": _move_tuple,
}
