"""Resume functions: the rest of a frame, cut from the original code object at one instruction.

Takes a code object, the instruction to go on at and what is live there; gives a code object whose arguments are the
live variables and stack values, and whose body restores the stack and jumps to the instruction (or raises a given
exception there, as if that instruction had). A cell that the frame made is passed as an argument and lies in a plain
slot, where LOAD_DEREF reads it as well (so that one function object serves all calls); free variables stay free
variables. Always holds: names, line numbers and handlers are those of the original; a resume function that breaks again
is cut from the original once more; one (code, layout) gives one code object. No torch.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from fusewright._native import isinstance
from fusewright.base.records import dataclass
from fusewright.capture.bytecode.instructions import (
    CO_FAST_KINDS,
    CO_VARARGS,
    CO_VARKEYWORDS,
    CodeInfo,
    Handler,
    Instruction,
    Item,
    Positions,
    assemble,
    decoded,
    never_falls_through,
)
from fusewright.capture.bytecode.liveness import reads_frame

ERROR = "__raised"
HELD = "__held"  # begins the name of an argument that goes to the stack
# Instructions whose argument is one slot, by whether the slot holds the value itself or a cell.
_FAST = frozenset(
    {
        "LOAD_FAST",
        "LOAD_FAST_BORROW",
        "LOAD_FAST_CHECK",
        "LOAD_FAST_AND_CLEAR",
        "STORE_FAST",
        "STORE_FAST_MAYBE_NULL",
        "DELETE_FAST",
        "MAKE_CELL",
    }
)
_DEREF = frozenset(
    {"LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
)
# A borrowed reference counts on a variable that stays as it is, which was shown for the original code: a resume
# function takes references of its own.
_BORROWS = {"LOAD_FAST_BORROW": "LOAD_FAST"}
PAIRS = {
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}


# What a stack entry of a resume function is: NULL; a value that is passed; the exception that a handler saved, for
# which the one that it handles is passed. An instruction's positions stand for CPython's note of where a passing
# exception was raised.
EMPTY, PASSED, HANDLED = "empty", "passed", "handled"
Entry = str | Positions


class CannotCut(Exception):
    """The code cannot be cut here; the message says why."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a resume function is given. All numbers are those of the original code.

    index      the instruction to go on at; with `raising`, the one that raises
    variables  the slots of plain variables that are passed
    stack      what each stack entry is
    """

    index: int
    variables: tuple[int, ...]
    stack: tuple[Entry, ...]
    raising: bool = False

    def given(self) -> list[int]:
        """The stack entries for which a value is passed."""
        return [depth for depth, entry in enumerate(self.stack) if entry in (PASSED, HANDLED)]


@dataclass(eq=False, slots=True)
class ResumeCode:
    """A resume function's code. Its arguments: the layout's variables, the cells in the original slots `cells`, the
    passed stack values, the exception if the layout is raising. `free` are the original slots of its free variables, in
    order."""

    code: types.CodeType
    layout: Layout
    cells: tuple[int, ...]
    free: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a code object was cut from. `indices` and `slots` give the original's number for each of ours (-1:
    none)."""

    info: CodeInfo
    indices: tuple[int, ...]
    slots: tuple[int, ...]


_codes: dict[int, tuple[weakref.ref[types.CodeType], dict[Layout, ResumeCode]]] = {}
_origins: dict[
    int, tuple[weakref.ref[types.CodeType], weakref.ref[types.CodeType], tuple[int, ...], tuple[int, ...]]
] = {}


def origin_of(code: types.CodeType) -> Origin:
    """The original that `code` was cut from; itself, one to one, if it is no resume function."""
    entry = _origins.get(id(code))
    if entry is None:
        info = decoded(code)
        return Origin(info, tuple(range(len(info.instructions))), tuple(range(len(info.slots))))
    original = entry[1]()
    if original is None:
        raise CannotCut("the original code is gone")
    return Origin(decoded(original), entry[2], entry[3])


def resume_code(info: CodeInfo, layout: Layout) -> ResumeCode:
    """The resume function's code for `layout` in the original `info`; made once. Raises CannotCut."""
    original = info.code
    key = id(original)
    if key not in _codes:
        _codes[key] = (weakref.ref(original, lambda _: _codes.pop(key, None)), {})
    made = _codes[key][1]
    if layout not in made:
        made[layout] = _Cutter(info, layout).cut()
    return made[layout]


_raising: dict[int, tuple[weakref.ref[types.CodeType], dict[int, types.CodeType]]] = {}


def raising_code(info: CodeInfo, index: int) -> types.CodeType:
    """A function of one argument that raises it again, at the line (and columns) of instruction `index` of the
    original, whose name and file it has. The exception's traceback and context stay as they are."""
    original = info.code
    key = id(original)
    if key not in _raising:
        _raising[key] = (weakref.ref(original, lambda _: _raising.pop(key, None)), {})
    made = _raising[key][1]
    if index not in made:
        here = info.instructions[index].positions
        items = [Item("RESUME", 0, positions=here), *_move(0, here), Item("RERAISE", 0, positions=here)]
        bytecode, lines, exceptions = assemble(items, original.co_firstlineno)
        made[index] = original.replace(
            co_argcount=1,
            co_posonlyargcount=0,
            co_kwonlyargcount=0,
            co_nlocals=1,
            co_varnames=(ERROR,),
            co_cellvars=(),
            co_freevars=(),
            co_flags=CO_FAST_KINDS,
            co_stacksize=1,
            co_code=bytecode,
            co_linetable=lines,
            co_exceptiontable=exceptions,
        )
    return made[index]


def successors(info: CodeInfo, index: int) -> list[int]:
    """The instructions that may come next, handlers included."""
    instruction = info.instructions[index]
    following = [] if never_falls_through(instruction.name) else [index + 1]
    if instruction.target >= 0:
        following.append(instruction.target)
        if instruction.name == "FOR_ITER":
            following.append(int(instruction.operand))  # type: ignore[call-overload]
    handler = info.handlers[index]
    if handler is not None:
        following.append(handler.target)
    return following


def reachable(info: CodeInfo, starts: Iterable[int]) -> set[int]:
    """All instructions that may run from `starts` on."""
    seen: set[int] = set()
    pending = list(starts)
    while pending:
        index = pending.pop()
        if index not in seen:
            seen.add(index)
            pending.extend(successors(info, index))
    return seen


def cycle(info: CodeInfo, index: int) -> set[int]:
    """The instructions of the loops around `index`: those that it reaches and that reach it. Empty outside of loops."""
    forward = reachable(info, successors(info, index))
    if index not in forward:
        return set()
    comes_from: dict[int, list[int]] = {}
    for earlier in forward:
        for later in successors(info, earlier):
            comes_from.setdefault(later, []).append(earlier)
    seen: set[int] = set()
    pending = [index]
    while pending:
        at = pending.pop()
        if at not in seen:
            seen.add(at)
            pending.extend(comes_from.get(at, ()))
    return seen


def in_loop(code: types.CodeType) -> bool:
    """Whether `code` is a resume function that goes on inside a loop."""
    if id(code) not in _origins:
        return False
    origin = origin_of(code)
    start = next((index for index in origin.indices if index >= 0), -1)
    return start >= 0 and bool(cycle(origin.info, start))


def referenced_cells(info: CodeInfo, indices: set[int]) -> tuple[int, ...]:
    """The cell slots that these instructions use (all of them where the frame may be inspected, `__class__` always)."""
    if reads_frame(info):
        return tuple(sorted(info.cells))
    used = {info.instructions[index].arg for index in indices if info.instructions[index].name in _DEREF}
    for index in indices:
        instruction = info.instructions[index]
        if instruction.name in _FAST and instruction.arg in info.cells:
            used.add(instruction.arg)  # CPython 3.13 loads closures by LOAD_FAST
    used |= {slot for slot in info.cells if info.slots[slot] == "__class__"}
    return tuple(sorted(used))


class LastInstruction(int):
    """What CPython pushes below an exception that is only passing through: where it was raised, for the line number of
    the frame.

    As an int it is the offset, in code units, in the resume function that it stands in (0 in interpreted frames);
    `positions` are those of the instruction."""

    positions: Positions

    def __new__(cls, positions: Positions, offset: int = 0) -> LastInstruction:
        made = super().__new__(cls, offset)
        made.positions = positions
        return made


class _Cutter:
    """Makes one resume code object."""

    def __init__(self, info: CodeInfo, layout: Layout) -> None:
        self.info = info
        self.layout = layout
        handler = info.handlers[layout.index]
        if layout.raising and handler is None:
            raise CannotCut("nothing handles an exception here")
        self.handler = handler if layout.raising else None
        self.start = handler.target if layout.raising and handler is not None else layout.index
        self.kept = sorted(reachable(info, [self.start]))
        used = referenced_cells(info, set(self.kept))
        self.cells = tuple(slot for slot in used if slot < info.first_free)
        self.free = tuple(slot for slot in used if slot >= info.first_free)
        self.raised_at: list[LastInstruction] = []
        self._check_cells()

        before = [info.instructions[max(layout.index - back, 0)].name for back in (1, 2)]
        if not layout.raising and (before[0] == "KW_NAMES" or before == ["PRECALL", "KW_NAMES"]):
            raise CannotCut("between the keyword names of a call and the call")

    def _check_cells(self) -> None:
        for index in self.kept:
            instruction = self.info.instructions[index]
            moved = instruction.name in _FAST and instruction.action != "LOAD_FAST"
            if instruction.name in ("MAKE_CELL", "COPY_FREE_VARS") or (moved and instruction.arg in self.info.cells):
                raise CannotCut("a comprehension makes a cell of its own in what follows")
        if self.cells and reads_frame(self.info):
            raise CannotCut("the frame is inspected (locals), and has variables that inner functions share")
        # super() without arguments takes the frame's first variable, whatever it is: so that must be the first here
        # too.
        calls_super = any(self.info.instructions[index].operand == "super" for index in self.kept)
        if calls_super and "__class__" in self.info.code.co_freevars and self.layout.variables[:1] != (0,):
            raise CannotCut("super() needs the first argument, which is a cell or deleted")

    def cut(self) -> ResumeCode:
        info, layout = self.info, self.layout
        passed = (*layout.variables, *self.cells)
        extra = [f"{HELD}{depth}" for depth in layout.given()] + [ERROR] * layout.raising
        others = [slot for slot in range(info.first_free) if slot not in info.cells and slot not in layout.variables]
        variables = [*(info.slots[slot] for slot in passed), *extra, *(info.slots[slot] for slot in others)]
        free = [info.slots[slot] for slot in self.free]
        slot_of = {name: slot for slot, name in enumerate(variables)}
        new_slots = {slot: slot_of[info.slots[slot]] for slot in (*passed, *others)}
        new_slots |= {slot: len(variables) + position for position, slot in enumerate(self.free)}
        items, indices = self._items(slot_of, new_slots, len(free))
        bytecode, lines, exceptions = assemble(items, info.code.co_firstlineno)
        count = len(passed) + len(extra)
        code = info.code.replace(
            co_argcount=count,
            co_posonlyargcount=0,
            co_kwonlyargcount=0,
            co_nlocals=len(variables),
            co_varnames=tuple(variables),
            co_cellvars=(),
            co_freevars=tuple(free),
            co_flags=(info.code.co_flags | CO_FAST_KINDS) & ~(CO_VARARGS | CO_VARKEYWORDS),
            co_stacksize=info.code.co_stacksize + 3,
            co_consts=(*info.code.co_consts, *self.raised_at),
            co_code=bytecode,
            co_linetable=lines,
            co_exceptiontable=exceptions,
        )
        backward = {new: old for old, new in new_slots.items()}
        _note_origin(
            code, info.code, tuple(indices), tuple(backward.get(slot, -1) for slot in range(len(variables) + len(free)))
        )
        return ResumeCode(code, layout, self.cells, self.free)

    def _items(self, slot_of: dict[str, int], new_slots: dict[int, int], free: int) -> tuple[list[Item], list[int]]:
        info, layout = self.info, self.layout
        here = info.instructions[layout.index].positions
        prefix = [Item("COPY_FREE_VARS", free)] if free else []
        prefix.append(Item("RESUME", 0, positions=here))
        raised_at = [entry for entry in layout.stack if isinstance(entry, tuple)]
        for positions in raised_at:  # an instruction of that line, which stands where the note says
            self.raised_at.append(LastInstruction(positions, len(prefix)))
            prefix.append(Item("NOP", positions=positions))
        noted = iter(range(len(info.code.co_consts), len(info.code.co_consts) + len(raised_at)))
        for depth, entry in enumerate(layout.stack):
            if entry == EMPTY:
                prefix.append(Item("PUSH_NULL", positions=here))
            elif isinstance(entry, tuple):
                prefix.append(Item("LOAD_CONST", next(noted), positions=here))
            else:
                prefix += _move(slot_of[f"{HELD}{depth}"], here)
            if entry == HANDLED:
                prefix += [Item("PUSH_EXC_INFO", positions=here), Item("POP_TOP", positions=here)]
        if layout.raising:
            prefix += _move(slot_of[ERROR], here)
            # it has been raised: traceback and context are as they should be
            prefix.append(Item("RERAISE", 0, positions=here))
        else:
            prefix.append(Item("JUMP_FORWARD", positions=here))
        kept = set(self.kept)
        bodies = []
        for index in self.kept:
            # CPython 3.13 looks for the handler of a call that failed one unit in front of it, so what has lost its
            # predecessor gets one. But a loop that ends skips the unit that it jumps to: that must be END_FOR.
            one = info.instructions[index]
            alone = index - 1 not in kept and one.name != "END_FOR"
            filler = [Item("NOP", positions=one.positions)] if alone else []
            bodies.append(filler + self._rewritten(one, new_slots))
        place: dict[int, int] = {}
        position = len(prefix)
        for index, body in zip(self.kept, bodies):
            place[index] = position
            position += len(body)
        if layout.raising:
            prefix[-1].handler = self._moved(self.handler, place)
        else:
            prefix[-1].target = place[self.start]
        items, indices = prefix, [-1] * len(prefix)
        for index, body in zip(self.kept, bodies):
            for item in body:
                item.target = place[item.target] if item.target >= 0 else -1
                item.handler = self._moved(info.handlers[index], place)
            items.extend(body)
            indices.extend([index] * len(body))
        return items, indices

    @staticmethod
    def _moved(handler: Handler | None, place: dict[int, int]) -> Handler | None:
        return None if handler is None else Handler(place[handler.target], handler.depth, handler.lasti)

    @staticmethod
    def _rewritten(instruction: Instruction, new_slots: dict[int, int]) -> list[Item]:
        name, arg, positions = instruction.name, instruction.arg, instruction.positions
        if name in PAIRS:  # the new numbers may not fit into four bits
            first, second = PAIRS[name]
            return [
                Item(first, new_slots[arg >> 4], positions=positions),
                Item(second, new_slots[arg & 15], positions=positions),
            ]
        if name in _FAST or name in _DEREF:
            arg = new_slots[arg]
        return [Item(_BORROWS.get(name, name), arg, instruction.target, positions)]


def _move(slot: int, positions: Any) -> list[Item]:
    """Moves an argument to the stack: the frame must not keep the value alive."""
    return [Item("LOAD_FAST", slot, positions=positions), Item("DELETE_FAST", slot, positions=positions)]


def _note_origin(
    code: types.CodeType, original: types.CodeType, indices: tuple[int, ...], slots: tuple[int, ...]
) -> None:
    key = id(code)
    _origins[key] = (weakref.ref(code, lambda _: _origins.pop(key, None)), weakref.ref(original), indices, slots)


class Resumption:
    """A resume function waiting for its globals and cells: called as `resumption(function, cells, *values)` with the
    function whose frame broke. `wrap` makes the function object a compiled one, once for the same globals: over other
    cells it runs the versions that there are (`call_as` of what `wrap` gives; without it, it is wrapped again)."""

    __slots__ = ("__weakref__", "_bound", "code", "wrap")

    def __init__(
        self, code: types.CodeType, wrap: Callable[[types.FunctionType], Callable[..., object]]
    ) -> None:
        self.code = code
        self.wrap = wrap
        self._bound: tuple[object, Callable[..., object]] | None = None

    def __call__(self, function: types.FunctionType, cells: tuple[types.CellType, ...], *values: object) -> object:
        result = self.bound(function, cells)(*values)
        while type(result) is Tail:
            result = result.resumption.bound(result.function, result.cells)(*result.values)
        return result

    def bound(self, function: types.FunctionType, cells: tuple[types.CellType, ...]) -> Callable[..., object]:
        """The compiled resume function over these globals and cells."""
        bound = self._bound
        if bound is None or bound[0] is not function.__globals__:
            # Cells of its own: what is kept must not keep the content of the program's alive.
            made = self._made(function, tuple(types.CellType() for _ in cells))
            bound = self._bound = (function.__globals__, self.wrap(made))
        if not cells:
            return bound[1]
        made = self._made(function, cells)
        call_as = getattr(bound[1], "call_as", None)
        return self.wrap(made) if call_as is None else functools.partial(call_as, made)

    def _made(self, function: types.FunctionType, cells: tuple[types.CellType, ...]) -> types.FunctionType:
        return types.FunctionType(self.code, function.__globals__, self.code.co_name, None, cells or None)


Resumptions = weakref.WeakValueDictionary[int, Resumption]
"""The resumptions of one compiler, by their code's identity: every version of a function, and every iteration of a
loop, goes on in the resume functions that are compiled already."""


def shared_resumption(
    known: Resumptions, code: types.CodeType, wrap: Callable[[types.FunctionType], Callable[..., object]]
) -> Resumption:
    """The compiler's resumption of a resume function's code."""
    found = known.get(id(code))  # which keeps the code alive: no other one has its identity
    if found is None:
        found = known[id(code)] = Resumption(code, wrap)
    return found


class Tail:
    """What a resume function that breaks again gives: the next resume function to call, with its arguments."""

    __slots__ = ("cells", "function", "resumption", "values")

    def __init__(
        self, resumption: Resumption, function: types.FunctionType, cells: tuple[types.CellType, ...], *values: object
    ) -> None:
        self.resumption = resumption
        self.function = function
        self.cells = cells
        self.values = values
