"""Bytecode as data: decoding, assembling, and every difference between CPython 3.11 to 3.14.

Takes a code object; gives `CodeInfo`: its instructions with jump targets as indices, operands resolved, the handler of
each instruction from the exception table, and positions. `assemble` is the way back, as far as resume functions need
it.

Always holds: `Instruction.name` and `.arg` are CPython's own (so that they can be assembled again);
`Instruction.action` and `.operand` are the version-independent reading that the interpreter's table is keyed by. Caches
and EXTENDED_ARG are not instructions here. No torch.
"""

from __future__ import annotations

import dis
import opcode
import sys
import types
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fusewright._native import isinstance
from fusewright.base.records import dataclass, field

_TABLES: Any = opcode  # its tables are not public, and not in its type stub
VERSION = sys.version_info[:2]
SUPPORTED = ((3, 11), (3, 12), (3, 13), (3, 14))
Positions = tuple[int | None, int | None, int | None, int | None]

CO_OPTIMIZED, CO_NEWLOCALS, CO_VARARGS, CO_VARKEYWORDS = 0x1, 0x2, 0x4, 0x8
CO_GENERATOR, CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR = 0x20, 0x80, 0x100, 0x200
CO_FAST_KINDS = CO_OPTIMIZED | CO_NEWLOCALS
CO_ASYNC = CO_COROUTINE | CO_ITERABLE_COROUTINE | CO_ASYNC_GENERATOR

_NULL_FIRST = VERSION < (3, 13)  # the empty half of a callable's pair of stack slots: below the callable, or above it
CALLABLE_DEPTH = 2 if _NULL_FIRST else 3  # in CALL_FUNCTION_EX: from the keyword dict down to the callable


class _Null:
    """Stands for CPython's NULL on the interpreter's stack, and in an unbound local variable."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NULL"

    def __bool__(self) -> bool:
        return False


NULL = _Null()


@dataclass(slots=True)
class Instruction:
    """One instruction. `target` is an index into `CodeInfo.instructions` (-1: no jump); `offset` counts code units."""

    name: str
    arg: int
    action: str
    operand: object
    target: int
    offset: int
    positions: Positions


@dataclass(frozen=True, slots=True)
class Handler:
    """A row of the exception table, in instruction indices: where to go, with how much stack, and whether lasti is
    pushed."""

    target: int
    depth: int
    lasti: bool


@dataclass(eq=False, slots=True, weakref_slot=True)
class CodeInfo:
    """A decoded code object (which it does not keep alive).

    handlers   for each instruction, its handler or None
    slots      the names of the fast locals in `localsplus` order: variables, then cells that are no variables, then
        free variables
    cells      the slots that hold cells (of this code, then free ones from `first_free` on)
    start      the first instruction after the prologue that makes cells and copies the closure
    ops        room for the interpreter's (handler, operand) records
    locations  room for the interpreter's locations, by instruction
    tests      room for the lines that decide about the next turn of a `while` loop
    """

    reference: weakref.ref[types.CodeType]
    instructions: list[Instruction]
    handlers: list[Handler | None]
    slots: tuple[str, ...]
    cells: frozenset[int]
    first_free: int
    start: int
    ops: list[tuple[Callable[..., object], object]] | None = None
    locations: dict[int, Any] = field(default_factory=dict)
    tests: frozenset[int] | None = None

    @property
    def code(self) -> types.CodeType:
        """The code object, which the caller keeps alive by its function."""
        code = self.reference()
        assert code is not None
        return code

    def line(self, index: int) -> int:
        """The source line of instruction `index` (that of the function where CPython notes none)."""
        line = self.instructions[index].positions[0]
        return self.code.co_firstlineno if line is None else line

    def is_programs(self, handler: Handler | None) -> bool:
        """Whether it is no handler of the compiler's own: 3.12 wraps each generator's body in one that turns
        StopIteration into RuntimeError, and each `yield from` in one that hands on what is thrown."""
        while handler is not None and self.instructions[handler.target].name == "CLEANUP_THROW":
            handler = self.handlers[handler.target]
        return handler is not None and self.instructions[handler.target].operand != "INTRINSIC_STOPITERATION_ERROR"


_decoded: dict[int, tuple[weakref.ref[types.CodeType], CodeInfo]] = {}


def decoded(code: types.CodeType) -> CodeInfo:
    """`decode(code)`, made once per code object. (By identity: two code objects may be equal and come from different
    files.)"""
    entry = _decoded.get(id(code))
    if entry is not None:
        return entry[1]
    info = decode(code)
    key = id(code)
    # The cached info must not keep its own key alive; it is dropped with the code object.
    _decoded[key] = (weakref.ref(code, lambda _: _decoded.pop(key, None)), info)
    return info


def cache_entries(name: str) -> int:
    """Code units of inline cache that follow the instruction `name`."""
    entries = _TABLES._inline_cache_entries
    return entries.get(name, 0) if isinstance(entries, dict) else entries[dis.opmap[name]]


_CACHES = {name: cache_entries(name) for name in dis.opmap if dis.opmap[name] < 256}
_JUMPS = frozenset(dis.opname[number] for number in (*dis.hasjrel, *dis.hasjabs) if number < 256)
_BACKWARD = frozenset(name for name in _JUMPS if "BACKWARD" in name)


def never_falls_through(name: str) -> bool:
    """True for the instructions after which control does not go on to the next one."""
    return name in _ENDS


_ENDS = frozenset(
    {
        "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD",
        "JUMP_BACKWARD_NO_INTERRUPT", "INTERPRETER_EXIT",
    }
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Operands: one row per instruction whose argument needs reading. A row gives the action's name and its operand.


def _const(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    return name, code.co_consts[arg]


def _name(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    return name, code.co_names[arg]


def _load_global(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    if not arg & 1:
        return "LOAD_GLOBAL", code.co_names[arg >> 1]
    return ("NULL_LOAD_GLOBAL" if _NULL_FIRST else "LOAD_GLOBAL_NULL"), code.co_names[arg >> 1]


_METHOD = "NULL_LOAD_ATTR" if _NULL_FIRST else "LOAD_ATTR_NULL"


def _load_attr(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    if VERSION < (3, 12):
        return "LOAD_ATTR", code.co_names[arg]
    return (_METHOD if arg & 1 else "LOAD_ATTR"), code.co_names[arg >> 1]


def _load_super_attr(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    kind = _METHOD.replace("ATTR", "SUPER_ATTR") if arg & 1 else "LOAD_SUPER_ATTR"
    # Whether it stands for `super()` or `super(a, b)` makes no difference: the class and the receiver are on the stack.
    return kind, code.co_names[arg >> 2]


def _compare(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    if VERSION < (3, 12):
        return name, dis.cmp_op[arg]
    if VERSION < (3, 13):
        return name, dis.cmp_op[arg >> 4]
    return ("COMPARE_OP_BOOL" if arg & 16 else name), dis.cmp_op[arg >> 5]


def _binary(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    symbol = _TABLES._nb_ops[arg][1]
    if symbol == "[]":
        return "BINARY_SUBSCR", symbol
    return ("INPLACE_OP", symbol[:-1]) if symbol.endswith("=") else ("BINARY_OP", symbol)


def _call(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    return ("CALL" if _NULL_FIRST else "CALL_NULL_LAST"), (arg, ())


def _call_ex(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    # 3.14 always pushes keywords, NULL where there are none
    return ("CALL_FUNCTION_EX" if _NULL_FIRST else "CALL_FUNCTION_EX_NULL_LAST"), VERSION >= (3, 14) or bool(arg & 1)


def _two_slots(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    return name, (arg >> 4, arg & 15)


def _intrinsic_1(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    return name, _TABLES._intrinsic_1_descs[arg]


def _intrinsic_2(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    return name, _TABLES._intrinsic_2_descs[arg]


def _common_constant(code: types.CodeType, name: str, arg: int) -> tuple[str, object]:
    value = _TABLES._common_constants[arg]
    return ("LOAD_ASSERTION_ERROR" if value is AssertionError else "LOAD_CONST"), value


def _renamed(action: str) -> Callable[[types.CodeType, str, int], tuple[str, object]]:
    return lambda code, name, arg: (action, arg)


_OPERANDS: dict[str, Callable[[types.CodeType, str, int], tuple[str, object]]] = {
    "LOAD_CONST": _const,
    "RETURN_CONST": _const,
    "LOAD_SMALL_INT": _renamed("LOAD_CONST"),
    "LOAD_COMMON_CONSTANT": _common_constant,
    "KW_NAMES": _const,
    "LOAD_GLOBAL": _load_global,
    "LOAD_ATTR": _load_attr,
    "LOAD_METHOD": lambda code, name, arg: (_METHOD, code.co_names[arg]),
    "LOAD_SUPER_ATTR": _load_super_attr,
    "COMPARE_OP": _compare,
    "BINARY_OP": _binary,
    "CALL": _call,
    "CALL_FUNCTION_EX": _call_ex,
    "LOAD_FAST_LOAD_FAST": _two_slots,
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": lambda code, name, arg: ("LOAD_FAST_LOAD_FAST", (arg >> 4, arg & 15)),
    "LOAD_FAST_BORROW": _renamed("LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": _two_slots,
    "STORE_FAST_STORE_FAST": _two_slots,
    "CALL_INTRINSIC_1": _intrinsic_1,
    "CALL_INTRINSIC_2": _intrinsic_2,
    "FORMAT_VALUE": lambda code, name, arg: (name, (arg & 3, bool(arg & 4))),
    "POP_JUMP_FORWARD_IF_TRUE": _renamed("POP_JUMP_IF_TRUE"),
    "POP_JUMP_BACKWARD_IF_TRUE": _renamed("POP_JUMP_IF_TRUE"),
    "POP_JUMP_FORWARD_IF_FALSE": _renamed("POP_JUMP_IF_FALSE"),
    "POP_JUMP_BACKWARD_IF_FALSE": _renamed("POP_JUMP_IF_FALSE"),
    "POP_JUMP_FORWARD_IF_NONE": _renamed("POP_JUMP_IF_NONE"),
    "POP_JUMP_BACKWARD_IF_NONE": _renamed("POP_JUMP_IF_NONE"),
    "POP_JUMP_FORWARD_IF_NOT_NONE": _renamed("POP_JUMP_IF_NOT_NONE"),
    "POP_JUMP_BACKWARD_IF_NOT_NONE": _renamed("POP_JUMP_IF_NOT_NONE"),
    # 3.11 drops the receiver itself, later versions by END_SEND
    "SEND": _renamed("SEND_POP" if VERSION < (3, 12) else "SEND"),
    "LOAD_FAST_CHECK": _renamed("LOAD_FAST"),  # the interpreter always checks
    "LOAD_SPECIAL": lambda code, name, arg: (name, _TABLES._special_method_names[arg]),
    # where the exit function lies: from 3.14 on with an empty half above it
    "WITH_EXCEPT_START": lambda code, name, arg: (name, 4 if VERSION < (3, 14) else 5),
    "NOT_TAKEN": _renamed("NOP"),
    "POP_ITER": _renamed("POP_TOP"),
    "LOAD_CLASSDEREF": _renamed("LOAD_FROM_CLASS_OR_DEREF"),
    "JUMP_BACKWARD_NO_INTERRUPT": _renamed("JUMP_BACKWARD"),
    "PRECALL": _renamed("NOP"),
    "RESUME": _renamed("NOP"),
    "MAKE_FUNCTION": lambda code, name, arg: (name, arg if VERSION < (3, 13) else 0),
} | dict.fromkeys(
    (
        "STORE_ATTR", "DELETE_ATTR", "LOAD_NAME", "STORE_NAME", "DELETE_NAME", "STORE_GLOBAL", "DELETE_GLOBAL",
        "IMPORT_NAME",
        "IMPORT_FROM", "LOAD_FROM_DICT_OR_GLOBALS",
    ),
    _name,
)  # fmt: skip


def no_special_method(cls: type, name: str) -> str:
    """CPython's message where a `with` statement finds no method `name` on `cls`."""
    protocol = "asynchronous context manager" if name.startswith("__a") else "context manager"
    if VERSION < (3, 14):
        missed = f" (missed {name} method)" if name.endswith("exit__") else ""
        return f"'{cls.__name__}' object does not support the {protocol} protocol{missed}"
    module = "" if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}."
    text = f"'{module}{cls.__qualname__}' object does not support the {protocol} protocol (missed {name} method)"
    if name.startswith("__a") or not (hasattr(cls, "__aenter__") and hasattr(cls, "__aexit__")):
        return text
    return f"{text} but it supports the asynchronous {protocol} protocol. Did you mean to use 'async with'?"


def too_many_values(expected: int, cls: type, count: Callable[[], int]) -> str:
    """CPython's message where unpacking to `expected` variables finds more; `count()` is the length of a builtin
    container."""
    if VERSION < (3, 14) or cls not in (list, tuple, dict):
        return f"too many values to unpack (expected {expected})"
    return f"too many values to unpack (expected {expected}, got {count()})"


def _asks_length() -> bool:
    class Asked:
        asked = False

        def __iter__(self) -> Iterator[object]:
            return iter(())

        def __len__(self) -> int:
            self.asked = True
            return 0

    tuple(asked := Asked())
    return asked.asked


TUPLES_ASK_LENGTH = _asks_length()
"""Whether CPython asks an iterable for its length when it makes a tuple of it; from some 3.14 on only for a list."""
THROW_OF_PARTS = "the (type, exc, tb) signature of throw() is deprecated, use the single-arg signature instead."
"""CPython's warning, from 3.12 on, where `throw` is given more than an exception."""
PARTIAL_WILL_BIND = (
    "functools.partial will be a method descriptor in future Python versions; wrap it in staticmethod() if you want to "
    "preserve the old behavior"
)
"""CPython 3.13's warning where a `functools.partial` is read from a class through an instance."""


def localsplus(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[int], int]:
    """Names of all fast locals, the slots that are cells, and the first free variable's slot."""
    variables = code.co_varnames
    pure_cells = tuple(name for name in code.co_cellvars if name not in variables)
    names = variables + pure_cells + code.co_freevars
    cellvars = frozenset(code.co_cellvars)
    first_free = len(variables) + len(pure_cells)
    cells = {slot for slot in range(first_free) if names[slot] in cellvars} | set(range(first_free, len(names)))
    return names, frozenset(cells), first_free


def _raw_instructions(code: types.CodeType) -> Iterator[tuple[int, str, int, int]]:
    """(offset of the first unit, extended arguments included; name; argument; offset of the unit after the caches)."""
    raw = code.co_code
    units = len(raw) // 2
    position, start, extended = 0, 0, 0
    while position < units:
        number, low = raw[2 * position], raw[2 * position + 1]
        name = dis.opname[number]
        arg = extended | low
        position += 1
        if name == "EXTENDED_ARG":
            extended = arg << 8
            continue
        position += _CACHES.get(name, 0)
        yield start, name, arg, position
        start, extended = position, 0


def decode(code: types.CodeType) -> CodeInfo:
    """Decodes `code`; see `CodeInfo`."""
    raw = list(_raw_instructions(code))
    index_at = {start: index for index, (start, _, _, _) in enumerate(raw)}
    positions = list(code.co_positions())
    instructions: list[Instruction] = []
    keywords: Any = ()
    for start, name, arg, after in raw:
        row = _OPERANDS.get(name)
        action, operand = (name, arg) if row is None else row(code, name, arg)
        target = -1
        if name in _JUMPS:
            target = index_at[after - arg if name in _BACKWARD else after + arg]
            operand = target
        if name == "KW_NAMES":  # belongs to the CALL that follows; nothing jumps in between
            keywords, action = operand, "NOP"
        elif action == "CALL":
            operand, keywords = (arg, keywords), ()
        elif name == "FOR_ITER":
            operand = target + _EXHAUSTED_SKIP
        instructions.append(
            Instruction(name, arg, action, operand, target, start, positions[after - 1 - _CACHES.get(name, 0)])
        )
    slots, cells, first_free = localsplus(code)
    return CodeInfo(
        weakref.ref(code),
        instructions,
        _handlers(code, raw, index_at),
        slots,
        cells,
        first_free,
        _prologue_end(instructions),
    )


# At the end of a loop CPython 3.12 and 3.13 drop the iterator themselves and skip the instructions that are there to
# drop it. 3.14 has the second of the two drop it, which comes to the same.
_EXHAUSTED_SKIP = {(3, 11): 0, (3, 12): 1}.get(VERSION, 2)


def _prologue_end(instructions: Sequence[Instruction]) -> int:
    for index, instruction in enumerate(instructions):
        if instruction.name not in ("MAKE_CELL", "COPY_FREE_VARS"):
            return index
    return len(instructions)


def _handlers(
    code: types.CodeType, raw: list[tuple[int, str, int, int]], index_at: dict[int, int]
) -> list[Handler | None]:
    handlers: list[Handler | None] = [None] * len(raw)
    # An instruction is covered when the unit that holds its opcode is (extended arguments may lie before the range).
    units = [after - 1 - _CACHES.get(name, 0) for _, name, _, after in raw]
    for start, end, target, depth, lasti in parse_exception_table(code.co_exceptiontable):
        handler = Handler(index_at[target], depth, lasti)
        for index in range(bisect_left(units, start), bisect_left(units, end)):
            handlers[index] = handler
    return handlers


def parse_exception_table(table: bytes) -> list[tuple[int, int, int, int, bool]]:
    """Rows (start, end, target, depth, lasti) in code units. Format: Objects/exception_handling_notes.txt of
    CPython."""
    stream = iter(table)

    def number(first: int) -> int:
        value, byte = first & 63, first
        while byte & 64:
            byte = next(stream)
            value = value << 6 | byte & 63
        return value

    rows = []
    for byte in stream:
        start = number(byte)
        length, target, depth_lasti = (number(next(stream)) for _ in range(3))
        rows.append((start, start + length, target, depth_lasti >> 1, bool(depth_lasti & 1)))
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Assembling


@dataclass(slots=True)
class Item:
    """One instruction to assemble. `target` and the handler's target are indices into the list of items."""

    name: str
    arg: int = 0
    target: int = -1
    positions: Positions = (None, None, None, None)
    handler: Handler | None = None


def assemble(items: Sequence[Item], first_line: int) -> tuple[bytes, bytes, bytes]:
    """Bytecode, line table and exception table of `items`."""
    args = [item.arg for item in items]
    widths = [_extensions(arg) for arg in args]
    while True:
        starts, ends = _layout(items, widths)
        grew = False
        for index, item in enumerate(items):
            if item.target < 0:
                continue
            distance = starts[item.target] - ends[index]
            args[index] = -distance if item.name in _BACKWARD else distance
            if args[index] < 0:
                raise ValueError(f"{item.name} jumps the wrong way")
            # Widths only grow, or two jumps could make each other shrink and grow for ever.
            if _extensions(args[index]) > widths[index]:
                widths[index] = _extensions(args[index])
                grew = True
        if not grew:
            break
    output = bytearray()
    for item, arg, width in zip(items, args, widths):
        for level in range(width, 0, -1):
            output += bytes((dis.opmap["EXTENDED_ARG"], arg >> 8 * level & 255))
        output += bytes((dis.opmap[item.name], arg & 255))
        output += bytes(2 * _CACHES.get(item.name, 0))
    lengths = [end - start for start, end in zip(starts, ends)]
    return bytes(output), _line_table(items, lengths, first_line), _exception_table(items, starts, ends)


def _extensions(arg: int) -> int:
    """How many EXTENDED_ARG an argument needs."""
    return max(0, (arg.bit_length() - 1) // 8)


def _layout(items: Sequence[Item], widths: Sequence[int]) -> tuple[list[int], list[int]]:
    starts, ends, position = [], [], 0
    for item, width in zip(items, widths):
        starts.append(position)
        position += width + 1 + _CACHES.get(item.name, 0)
        ends.append(position)
    return starts, ends


def _line_table(items: Sequence[Item], lengths: Sequence[int], first_line: int) -> bytes:
    """The location table (PEP 626, PEP 657; format: Objects/locations.md of CPython), in its long forms only."""
    table = bytearray()
    previous = first_line
    for item, length in zip(items, lengths):
        line, end_line, column, end_column = item.positions
        while length > 0:
            units = min(length, 8)
            length -= units
            if line is None:
                table.append(0x80 | 15 << 3 | units - 1)
                continue
            if end_line is None or column is None or end_column is None or end_line < line:
                table.append(0x80 | 13 << 3 | units - 1)
                table += _signed(line - previous)
            else:
                table.append(0x80 | 14 << 3 | units - 1)
                table += _signed(line - previous)
                table += _unsigned(end_line - line) + _unsigned(column + 1) + _unsigned(end_column + 1)
            previous = line
    return bytes(table)


def _unsigned(value: int) -> bytes:
    output = bytearray()
    while value >= 64:
        output.append(64 | value & 63)
        value >>= 6
    output.append(value)
    return bytes(output)


def _signed(value: int) -> bytes:
    return _unsigned(-value << 1 | 1 if value < 0 else value << 1)


def _exception_table(items: Sequence[Item], starts: Sequence[int], ends: Sequence[int]) -> bytes:
    rows: list[tuple[int, int, Handler]] = []
    for index, item in enumerate(items):
        if item.handler is None:
            continue
        if rows and rows[-1][1] == starts[index] and rows[-1][2] == item.handler:
            rows[-1] = (rows[-1][0], ends[index], item.handler)
        else:
            rows.append((starts[index], ends[index], item.handler))
    table = bytearray()
    for start, end, handler in rows:
        first = bytearray()
        for value in (start, end - start, starts[handler.target], handler.depth << 1 | handler.lasti):
            first += _big_endian(value)
        first[0] |= 128  # marks the beginning of a row
        table += first
    return bytes(table)


def _big_endian(value: int) -> bytes:
    groups = [value & 63]
    while value := value >> 6:
        groups.append(value & 63)
    return bytes([group | 64 for group in reversed(groups[1:])] + groups[:1])


def offset_of(code: types.CodeType, name: str) -> int:
    """Where the first instruction `name` of a code object stands, in bytes (as tracebacks count)."""
    return next(
        2 * (after - 1 - _CACHES.get(found, 0)) for _, found, _, after in _raw_instructions(code) if found == name
    )


def intrinsic_body(name: str, count: int) -> types.CodeType:
    """The code of a function of `count` arguments that does nothing but the intrinsic `name`."""
    numbers = _TABLES._intrinsic_1_descs if count == 1 else _TABLES._intrinsic_2_descs
    items = [Item("RESUME"), *(Item("LOAD_FAST", slot) for slot in range(count))]
    items += [Item(f"CALL_INTRINSIC_{count}", numbers.index(name)), Item("RETURN_VALUE")]
    model: Callable[..., object] = (lambda a: a) if count == 1 else (lambda a, b: a)
    bytecode, lines, exceptions = assemble(items, model.__code__.co_firstlineno)
    return model.__code__.replace(
        co_code=bytecode, co_linetable=lines, co_exceptiontable=exceptions, co_name=name, co_stacksize=2
    )


def constant_body(code: types.CodeType) -> types.CodeType:
    """A code object with the signature of `code` and a body that returns None (binds arguments as CPython does, and
    nothing else)."""
    items = [Item("COPY_FREE_VARS", len(code.co_freevars))] if code.co_freevars else []
    items += [Item("RESUME", 0), Item("LOAD_CONST", 0), Item("RETURN_VALUE")]
    bytecode, lines, exceptions = assemble(items, code.co_firstlineno)
    flags = code.co_flags & ~(CO_GENERATOR | CO_ASYNC)
    return code.replace(
        co_code=bytecode, co_linetable=lines, co_exceptiontable=exceptions, co_consts=(None,), co_flags=flags
    )
