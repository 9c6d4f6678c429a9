"""The instruction at a graph break, as Python source: one row per instruction that can break.

Takes the instruction and the source expressions that stand for the stack values; gives the lines that perform it
eagerly. Always holds: an instruction is performed by one call of `__call` (the eager call under the frame hook), so
that whatever Python code it runs is compiled in its turn; instructions without a row cannot be broken at. No torch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

from fusewright.base.exception_fields import traceback_of
from fusewright.capture.bytecode.instructions import Instruction, no_special_method, too_many_values
from fusewright.capture.bytecode.resume import CannotCut

CALL = "__call"  # with the frame hook installed
PAUSED = "__paused"  # without it
HANDLING = "__handling"  # while an exception is being handled

_BINARY: dict[str, Callable[..., object]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow, "@": operator.matmul, "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}  # fmt: skip
_INPLACE: dict[str, Callable[..., object]] = {
    "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv, "//": operator.ifloordiv,
    "%": operator.imod,
    "**": operator.ipow, "@": operator.imatmul, "<<": operator.ilshift, ">>": operator.irshift, "&": operator.iand,
    "|": operator.ior,
    "^": operator.ixor,
}  # fmt: skip
_COMPARE: dict[str, Callable[..., object]] = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


class Source:
    """Python source under construction: lines, the stack as expressions (None: NULL), and the constants that the lines
    mention."""

    def __init__(self, stack: list[str | None], function: Any) -> None:
        self.lines: list[str] = []
        self.stack = stack
        self.constants: dict[str, object] = {}
        self.function = function
        self.handled = ""  # the exception that is being handled
        self.known: dict[str, object] = {}  # what the expressions of the stack are in this capture
        self._results = 0

    def constant(self, value: object) -> str:
        """The name of a constant."""
        for name, known in self.constants.items():
            if known is value:
                return name
        hint = str(getattr(value, "__name__", "constant")).strip("_<>")
        name = f"__{hint if hint.isidentifier() else 'constant'}_{len(self.constants)}"
        self.constants[name] = value
        return name

    def pop(self) -> str:
        value = self.stack.pop()
        if value is None:
            raise CannotCut("an instruction takes an empty stack slot")
        return value

    def call(self, function: str, *arguments: str, caller: str = CALL) -> str:
        """A line that calls `function`; the name of its result."""
        name = self.next_result()
        self._results += 1
        called = (HANDLING, self.handled, caller) if self.handled else (caller,)
        self.lines.append(f"{name} = {called[0]}({', '.join((*called[1:], function, *arguments))})")
        return name

    def next_result(self) -> str:
        """The variable that the next call assigns."""
        return f"__result{self._results}"

    def apply(self, function: Callable[..., object], *arguments: str) -> str:
        return self.call(self.constant(function), *arguments)


Row = Callable[[Source, Any], None]
ROWS: dict[str, Row] = {}


def _row(*names: str) -> Callable[[Row], Row]:
    def enter(row: Row) -> Row:
        for name in names:
            ROWS[name] = row
        return row

    return enter


def perform(source: Source, instruction: Instruction) -> None:
    """Adds the lines that perform `instruction`. Raises CannotCut."""
    row = ROWS.get(instruction.action)
    if row is None:
        raise CannotCut(f"a break at {instruction.name}")
    row(source, instruction.operand)


@_row("CALL")
def _call(source: Source, operand: tuple[int, tuple[str, ...]]) -> None:
    count, names = operand
    arguments = [source.pop() for _ in range(count)][::-1]
    function = source.pop()
    below = source.stack.pop()
    if below is not None:
        arguments.insert(0, function)
        function = below
    source.stack.append(source.call(function, *_named(arguments, names)))


def _named(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    first = len(arguments) - len(names)
    return arguments[:first] + [f"{name}={value}" for name, value in zip(names, arguments[first:])]


def _call_null_last(source: Source, arguments: list[str]) -> None:
    receiver = source.stack.pop()
    function = source.pop()
    if receiver is not None:
        arguments.insert(0, receiver)
    source.stack.append(source.call(function, *arguments))


@_row("CALL_NULL_LAST")
def _call_313(source: Source, operand: tuple[int, tuple[str, ...]]) -> None:
    _call_null_last(source, [source.pop() for _ in range(operand[0])][::-1])


@_row("CALL_KW")
def _call_keywords_313(source: Source, count: int) -> None:
    names = source.pop()
    keywords = source.known.get(names, source.constants.get(names))
    if type(keywords) is not tuple:
        raise CannotCut("a call whose keyword names are not known")
    _call_null_last(source, _named([source.pop() for _ in range(count)][::-1], keywords))


@_row("CALL_FUNCTION_EX")
def _call_ex(source: Source, has_keywords: bool) -> None:
    keywords = [f"**{source.pop()}"] if has_keywords else []
    arguments = f"*{source.pop()}"
    above = source.stack.pop()
    below = source.stack.pop()
    function = above if below is None else below
    if function is None:
        raise CannotCut("a call without a callable")
    source.stack.append(source.call(function, arguments, *keywords))


@_row("CALL_FUNCTION_EX_NULL_LAST")
def _call_ex_313(source: Source, has_keywords: bool) -> None:
    given = source.stack.pop() if has_keywords else None
    keywords = [] if given is None else [f"**{given}"]
    _call_null_last(source, [f"*{source.pop()}", *keywords])


def _binary(table: dict[str, Callable[..., object]]) -> Row:
    def row(source: Source, symbol: str) -> None:
        right, left = source.pop(), source.pop()
        source.stack.append(source.apply(table[symbol], left, right))

    return row


ROWS["BINARY_OP"] = _binary(_BINARY)
ROWS["INPLACE_OP"] = _binary(_INPLACE)
ROWS["COMPARE_OP"] = _binary(_COMPARE)


@_row("COMPARE_OP_BOOL")
def _compare_bool(source: Source, symbol: str) -> None:
    ROWS["COMPARE_OP"](source, symbol)
    source.stack.append(source.apply(bool, source.pop()))


def _unary(function: Callable[..., object]) -> Row:
    def row(source: Source, operand: object) -> None:
        source.stack.append(source.apply(function, source.pop()))

    return row


ROWS["UNARY_NEGATIVE"] = _unary(operator.neg)
ROWS["UNARY_POSITIVE"] = _unary(operator.pos)
ROWS["UNARY_INVERT"] = _unary(operator.invert)
ROWS["UNARY_NOT"] = _unary(operator.not_)
ROWS["TO_BOOL"] = _unary(bool)
ROWS["GET_ITER"] = _unary(iter)
ROWS["FORMAT_SIMPLE"] = _unary(format)


@_row("CONTAINS_OP")
def _contains(source: Source, inverted: int) -> None:
    container, item = source.pop(), source.pop()
    found = source.apply(operator.contains, container, item)
    source.stack.append(f"(not {found})" if inverted else found)


@_row("BINARY_SUBSCR")
def _getitem(source: Source, operand: object) -> None:
    key, target = source.pop(), source.pop()
    source.stack.append(source.apply(operator.getitem, target, key))


@_row("BINARY_SLICE")
def _getslice(source: Source, operand: object) -> None:
    stop, start, target = source.pop(), source.pop(), source.pop()
    source.stack.append(source.apply(operator.getitem, target, f"{source.constant(slice)}({start}, {stop})"))


@_row("STORE_SUBSCR")
def _setitem(source: Source, operand: object) -> None:
    key, target, value = source.pop(), source.pop(), source.pop()
    source.apply(operator.setitem, target, key, value)


@_row("STORE_SLICE")
def _setslice(source: Source, operand: object) -> None:
    stop, start, target, value = source.pop(), source.pop(), source.pop(), source.pop()
    source.apply(operator.setitem, target, f"{source.constant(slice)}({start}, {stop})", value)


@_row("DELETE_SUBSCR")
def _delitem(source: Source, operand: object) -> None:
    key, target = source.pop(), source.pop()
    source.apply(operator.delitem, target, key)


@_row("LOAD_ATTR")
def _load_attr(source: Source, name: str) -> None:
    source.stack.append(source.apply(getattr, source.pop(), repr(name)))


@_row("NULL_LOAD_ATTR")
def _null_load_attr(source: Source, name: str) -> None:
    value = source.apply(getattr, source.pop(), repr(name))
    source.stack += [None, value]


@_row("LOAD_ATTR_NULL")
def _load_attr_null(source: Source, name: str) -> None:
    value = source.apply(getattr, source.pop(), repr(name))
    source.stack += [value, None]


@_row("STORE_ATTR")
def _store_attr(source: Source, name: str) -> None:
    target, value = source.pop(), source.pop()
    source.apply(setattr, target, repr(name), value)


@_row("DELETE_ATTR")
def _delete_attr(source: Source, name: str) -> None:
    source.apply(delattr, source.pop(), repr(name))


def load_global(function: Any, name: str) -> object:
    """A global name as the function's own LOAD_GLOBAL finds it."""
    namespace = function.__globals__
    if name in namespace:
        return namespace[name]
    found = function.__builtins__
    if name in found:
        return found[name]
    raise NameError(f"name '{name}' is not defined", name=name)


def _load_global_text(source: Source, name: str) -> str:
    return source.apply(load_global, "__function", repr(name))


@_row("LOAD_GLOBAL")
def _load_global(source: Source, name: str) -> None:
    source.stack.append(_load_global_text(source, name))


@_row("NULL_LOAD_GLOBAL")
def _null_load_global(source: Source, name: str) -> None:
    source.stack += [None, _load_global_text(source, name)]


@_row("LOAD_GLOBAL_NULL")
def _load_global_null(source: Source, name: str) -> None:
    source.stack += [_load_global_text(source, name), None]


@_row("STORE_GLOBAL")
def _store_global(source: Source, name: str) -> None:
    source.apply(operator.setitem, "__function.__globals__", repr(name), source.pop())


@_row("FORMAT_VALUE")
def _format(source: Source, operand: tuple[int, bool]) -> None:
    conversion, has_spec = operand
    spec = source.pop() if has_spec else "''"
    value = source.pop()
    if conversion:
        value = source.apply((str, repr, ascii)[conversion - 1], value)
    source.stack.append(source.apply(format, value, spec))


@_row("FORMAT_WITH_SPEC")
def _format_with_spec(source: Source, operand: object) -> None:
    spec, value = source.pop(), source.pop()
    source.stack.append(source.apply(format, value, spec))


@_row("BUILD_STRING")
def _build_string(source: Source, count: int) -> None:
    parts = [source.pop() for _ in range(count)][::-1]
    source.stack.append(source.apply("".join, f"({', '.join(parts)},)"))


@_row("CONVERT_VALUE")
def _convert(source: Source, conversion: int) -> None:
    source.stack.append(source.apply((str, repr, ascii)[conversion - 1], source.pop()))


def unpack(value: Any, count: int) -> list[object]:
    """What UNPACK_SEQUENCE does, with its messages."""
    if not hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
        raise TypeError(f"cannot unpack non-iterable {type(value).__name__} object")
    values = list(itertools.islice(value, count + 1))
    if len(values) > count:
        raise ValueError(too_many_values(count, type(value), lambda: len(value)))
    if len(values) < count:
        raise ValueError(f"not enough values to unpack (expected {count}, got {len(values)})")
    return values


@_row("UNPACK_SEQUENCE")
def _unpack_sequence(source: Source, count: int) -> None:
    values = source.apply(unpack, source.pop(), str(count))
    source.stack.extend(f"{values}[{position}]" for position in range(count - 1, -1, -1))


@_row("LIST_EXTEND")
def _list_extend(source: Source, depth: int) -> None:
    iterable = source.pop()
    source.apply(list.extend, _target(source, depth), iterable)


@_row("SET_UPDATE")
def _set_update(source: Source, depth: int) -> None:
    iterable = source.pop()
    source.apply(set.update, _target(source, depth), iterable)


@_row("DICT_UPDATE")
def _dict_update(source: Source, depth: int) -> None:
    mapping = source.pop()
    source.apply(dict.update, _target(source, depth), mapping)


def _target(source: Source, depth: int) -> str:
    value = source.stack[-depth]
    if value is None:
        raise CannotCut("an instruction takes an empty stack slot")
    return value


def special_method(obj: Any, name: str) -> Any:
    """A special method as the evaluator looks it up: on the class, then bound."""
    kind = type(obj)
    for base in kind.__mro__:
        if name in base.__dict__:
            found = base.__dict__[name]
            getter = getattr(type(found), "__get__", None)
            return found if getter is None else getter(found, obj, kind)
    raise TypeError(no_special_method(kind, name))


@_row("BEFORE_WITH")
def _before_with(source: Source, operand: object) -> None:
    manager = source.pop()
    enter = source.apply(special_method, manager, "'__enter__'")
    leave = source.apply(special_method, manager, "'__exit__'")
    source.stack += [leave, source.call(enter)]


@_row("LOAD_SPECIAL")
def _load_special(source: Source, name: str) -> None:
    source.stack += [source.apply(special_method, source.pop(), repr(name)), None]


@_row("WITH_EXCEPT_START")
def _with_except_start(source: Source, depth: int) -> None:
    error, leave = source.stack[-1], source.stack[-depth]
    if error is None or leave is None:
        raise CannotCut("an instruction takes an empty stack slot")
    source.stack.append(source.call(leave, source.apply(type, error), error, source.apply(traceback_of, error)))


@_row("IMPORT_NAME")
def _import_name(source: Source, name: str) -> None:
    names, level = source.pop(), source.pop()
    # A module runs once: nothing in it is worth compiling.
    arguments = (repr(name), "__function.__globals__", "None", names, level)
    source.stack.append(source.call(source.constant(__import__), *arguments, caller=PAUSED))
