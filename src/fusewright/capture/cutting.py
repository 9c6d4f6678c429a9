"""Cutting a frame at a graph break: what happens after the graph, as source.

Takes the root frame, standing in front of the instruction that breaks; gives the `Continuation` that performs that one instruction
eagerly and calls the resume function (two of them where the instruction branches; a third where an exception of it is handled in this
frame). Always holds: the frame is not changed; `CannotCut` says why a frame cannot be cut. No torch.
"""

from __future__ import annotations

import builtins
import re
import types
from dataclasses import dataclass
from typing import Any

from fusewright.capture.bytecode import NULL, CodeInfo, Instruction
from fusewright.capture.continuation import Continuation
from fusewright.capture.eager_step import CALL, Source, perform
from fusewright.capture.liveness import live_slots
from fusewright.capture.opcodes.calls import FRAME_CALLS
from fusewright.capture.resume import CannotCut, Layout, Resumption, origin_of, reachable, resume_code, successors

SCALARS = frozenset({bool, int, float})
_FOLLOWED = 24  # instructions that are followed to find a return or a branch right behind the break
_VALUE_NAME = re.compile(r"__(?:local|cell|stack)\d+\b")


@dataclass(slots=True)
class _State:
    """Where a path stands: the next instruction, the stack and the plain variables as expressions, and which of these are scalars."""

    index: int
    stack: list[str | None]
    variables: dict[int, str]
    scalars: frozenset[str]


def cut(frame: Any) -> Continuation:
    """The continuation of a root frame that stops at `frame.pc`. Raises CannotCut."""
    return _Cut(frame).build()


class _Cut:
    def __init__(self, frame: Any) -> None:
        self.frame = frame
        self.options = frame.tracer.options
        origin = origin_of(frame.info.code)
        self.info: CodeInfo = origin.info
        self.index = origin.indices[frame.pc]
        self.live = live_slots(self.info)
        self.held = {
            old: value for old, value in zip(origin.slots, frame.locals) if old >= 0 and value is not NULL
        }
        self.values: dict[str, object] = {}
        for slot, value in self.held.items():
            self.values[f"__{'cell' if slot in self.info.cells else 'local'}{slot}"] = value
        for depth, value in enumerate(frame.stack):
            if value is not NULL:
                self.values[f"__stack{depth}"] = value
        self.resumptions: dict[Layout, str] = {}
        stack: list[str | None] = [None if value is NULL else f"__stack{depth}" for depth, value in enumerate(frame.stack)]
        self.source = Source(stack, frame.function)
        self.source.constants[CALL] = self.options.call_eager

    def build(self) -> Continuation:
        instruction = self.info.instructions[self.index] if self.index >= 0 else None
        if instruction is None:
            raise CannotCut("the break is in the prologue of a resume function")
        if self.frame.tracer.handled_exception() is not None:
            raise CannotCut("the break is inside an exception handler")
        if self.index in reachable(self.info, successors(self.info, self.index)):
            raise CannotCut("the break is inside a loop")
        self._check_callee(instruction)
        scalars = frozenset(name for name, value in self.values.items() if type(value) in SCALARS)
        variables = {slot: f"__local{slot}" for slot in self.held if slot not in self.info.cells}
        before = _State(self.index, list(self.source.stack), dict(variables), scalars)
        if instruction.action in _BRANCHES:
            lines = self._branch(before, fresh=False)
            step: list[str] = []
        else:
            perform(self.source, instruction)
            step = self.source.lines
            after = _State(self.index + 1, self.source.stack, variables, scalars)
            lines = self._after(after, step)
        handler = self.info.handlers[self.index]
        if handler is not None:
            if not step:
                step, lines = lines[:1], lines[1:]  # a branch: the call of bool, then the two exits
            lines = self._guarded(step, before) + lines
        else:
            lines = step + lines
        used = set(_VALUE_NAME.findall("\n".join(lines)))
        names = tuple(name for name in self.values if name in used)
        return Continuation(tuple(self.values[name] for name in names), names, tuple(lines), dict(self.source.constants))

    def _check_callee(self, instruction: Instruction) -> None:
        if instruction.action not in ("CALL", "CALL_NULL_LAST"):
            return
        count = instruction.operand[0]  # type: ignore[index]
        pair = self.frame.stack[-count - 2 :][:2]
        callee = pair[1] if pair[0] is NULL else pair[0]
        if id(callee) in FRAME_CALLS and callee is not builtins.__build_class__:
            raise CannotCut("the call reads the frame that makes it")

    # -----------------------------------------------------------------------------------------------------------------
    # Exits

    def _after(self, state: _State, step: list[str]) -> list[str]:
        """What follows the eager step. A fresh Python scalar (of `.item()`, say) would be an argument of the resume function, guarded by
        value; so where only arithmetic on scalars leads to a branch or a return, that is done here too."""
        plain = self._exit(state)
        result = step[-1].split(" = ")[0] if step else ""
        if self.info.handlers[self.index] is not None or not state.stack or state.stack[-1] != result:
            return plain
        fresh = _State(state.index, list(state.stack), dict(state.variables), state.scalars | {result})
        followed = self._follow(fresh)
        if followed is None:
            return plain
        if followed == plain:
            return plain
        test = f"if type({result}) in {self.source.constant(SCALARS)}:"
        return [test, *_indented(followed), *plain]

    def _exit(self, state: _State) -> list[str]:
        """Returns, if nothing but loads and stores of variables stands in front of a return; calls a resume function otherwise."""
        returned = self._walk(_State(state.index, list(state.stack), dict(state.variables), frozenset()), None)
        return returned if returned is not None else [f"return {self._resume(state)}"]

    def _follow(self, state: _State) -> list[str] | None:
        """The lines up to a return or a branch through arithmetic on scalars; None if something else comes first."""
        lines: list[str] = []
        end = self._walk(state, lines)
        return None if end is None else lines + end

    def _walk(self, state: _State, arithmetic: list[str] | None) -> list[str] | None:
        """Follows instructions that run no user code. With `arithmetic`, operators on scalars are followed too (their lines are added
        to it), and a branch ends the walk with both of its exits."""
        for _ in range(_FOLLOWED):
            instruction = self.info.instructions[state.index]
            action = instruction.action
            if action == "RETURN_VALUE":
                return [f"return {self._text(state.stack[-1])}"]
            if action == "RETURN_CONST":
                return [f"return {self._constant(instruction.operand)}"]
            mover = _MOVES.get(action)
            if mover is not None and not (action == "BUILD_TUPLE" and arithmetic is not None):  # an expression, which may be used twice
                if not mover(self, state, instruction.operand):
                    return None
            elif arithmetic is not None and action in _BRANCHES:
                return self._branch(state, fresh=True) if state.stack[-1] in state.scalars else None
            elif arithmetic is not None and action in _ARITHMETIC and instruction.operand not in _MAY_FAIL:
                count = _ARITHMETIC[action]
                if not all(value in state.scalars for value in state.stack[-count:]) or self.info.handlers[state.index] is not None:
                    return None
                self._compute(state, instruction, arithmetic)
            else:
                return None
        return None

    def _compute(self, state: _State, instruction: Instruction, lines: list[str]) -> None:
        source = self.source
        saved, source.stack, source.lines = (source.stack, source.lines), state.stack, lines
        perform(source, instruction)
        state.scalars |= {self._text(state.stack[-1])}  # arithmetic on scalars gives scalars (or raises)
        source.stack, source.lines = saved
        state.index += 1

    def _branch(self, state: _State, fresh: bool) -> list[str]:
        """Both exits of a conditional jump."""
        instruction = self.info.instructions[state.index]
        value = self._text(state.stack[-1])
        saved = self.source.lines
        lines: list[str] = []
        self.source.lines = lines
        condition = self.source.apply(bool, value)
        self.source.lines = saved
        keeps, jumps_when = _BRANCHES[instruction.action]
        rest = state.stack[:-1]
        jumped = _State(instruction.target, list(state.stack) if keeps else list(rest), dict(state.variables), state.scalars)
        passed = _State(state.index + 1, list(rest), dict(state.variables), state.scalars)
        if_true, if_false = (jumped, passed) if jumps_when else (passed, jumped)
        return [*lines, f"if {condition}:", *_indented(self._exit(if_true)), *self._exit(if_false)]

    def _guarded(self, step: list[str], before: _State) -> list[str]:
        """The step, with its exceptions raised inside a resume function that stands where the step stood."""
        handler = self.info.handlers[self.index]
        assert handler is not None
        state = _State(self.index, before.stack[: handler.depth], before.variables, before.scalars)
        resume = self._resume(state, "__error")
        return [
            "__error = None",
            "try:",
            *_indented(step),
            "except BaseException as __caught:",
            "    __error = __caught",
            "if __error is not None:",
            "    try:",
            f"        return {resume}",
            "    finally:",
            "        del __error",
        ]

    # -----------------------------------------------------------------------------------------------------------------
    # The call of a resume function

    def _resume(self, state: _State, error: str = "") -> str:
        handler = self.info.handlers[state.index] if error else None
        live = self.live[handler.target if handler is not None else state.index]
        slots = tuple(slot for slot in sorted(state.variables) if live >> slot & 1)
        layout = Layout(state.index, slots, tuple(value is not None for value in state.stack), bool(error))
        made = resume_code(self.info, layout)
        name = self.resumptions.get(layout)
        if name is None:
            name = self.resumptions[layout] = f"__resume{len(self.resumptions)}"
            self.source.constants[name] = Resumption(made.code, self.options.wrap_resume)
        arguments = [state.variables[slot] for slot in slots]
        arguments += [self._cell(slot) for slot in made.cells]
        arguments += [value for value in state.stack if value is not None]
        closure = "".join(f"__function.__closure__[{self._free_index(slot)}], " for slot in made.free)
        return f"{name}({', '.join(['__function', f'({closure})', *arguments, *([error] if error else [])])})"

    def _cell(self, slot: int) -> str:
        if not isinstance(self.held.get(slot), types.CellType):
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


# Conditional jumps that ask for a truth value: whether the value stays on the stack when they jump, and on which truth they do.
_BRANCHES: dict[str, tuple[bool, bool]] = {
    "POP_JUMP_IF_TRUE": (False, True),
    "POP_JUMP_IF_FALSE": (False, False),
    "JUMP_IF_TRUE_OR_POP": (True, True),
    "JUMP_IF_FALSE_OR_POP": (True, False),
}

# Operators that give a scalar for scalars, by how many they take.
_MAY_FAIL = frozenset({"/", "//", "%", "**", "<<", ">>", "@", "&", "|", "^"})  # an error must show the user's line
_ARITHMETIC = {"COMPARE_OP": 2, "COMPARE_OP_BOOL": 2, "BINARY_OP": 2, "UNARY_NOT": 1, "UNARY_NEGATIVE": 1, "TO_BOOL": 1}


def _move_load_const(cut: _Cut, state: _State, value: Any) -> bool:
    text = cut._constant(value)
    state.stack.append(text)
    if type(value) in SCALARS:
        state.scalars |= {text}
    state.index += 1
    return True


def _move_load_fast(cut: _Cut, state: _State, slot: Any) -> bool:
    if slot not in state.variables:
        return False
    state.stack.append(state.variables[slot])
    state.index += 1
    return True


def _move_store_fast(cut: _Cut, state: _State, slot: Any) -> bool:
    value = state.stack.pop()
    if value is None or slot in cut.info.cells:
        return False
    state.variables[slot] = value
    state.index += 1
    return True


def _move_pop(cut: _Cut, state: _State, operand: Any) -> bool:
    state.stack.pop()
    state.index += 1
    return True


def _move_null(cut: _Cut, state: _State, operand: Any) -> bool:
    state.stack.append(None)
    state.index += 1
    return True


def _move_copy(cut: _Cut, state: _State, depth: Any) -> bool:
    state.stack.append(state.stack[-depth])
    state.index += 1
    return True


def _move_swap(cut: _Cut, state: _State, depth: Any) -> bool:
    state.stack[-1], state.stack[-depth] = state.stack[-depth], state.stack[-1]
    state.index += 1
    return True


def _move_nothing(cut: _Cut, state: _State, operand: Any) -> bool:
    state.index += 1
    return True


def _move_jump(cut: _Cut, state: _State, target: Any) -> bool:
    state.index = target
    return True


def _move_tuple(cut: _Cut, state: _State, count: Any) -> bool:
    values = state.stack[len(state.stack) - count :]
    del state.stack[len(state.stack) - count :]
    state.stack.append("(" + "".join(f"{cut._text(value)}, " for value in values) + ")")
    state.index += 1
    return True


_MOVES = {
    "NOP": _move_nothing,
    "POP_TOP": _move_pop,
    "LOAD_CONST": _move_load_const,
    "LOAD_FAST": _move_load_fast,
    "STORE_FAST": _move_store_fast,
    "PUSH_NULL": _move_null,
    "COPY": _move_copy,
    "SWAP": _move_swap,
    "JUMP_FORWARD": _move_jump,
    "BUILD_TUPLE": _move_tuple,
}
