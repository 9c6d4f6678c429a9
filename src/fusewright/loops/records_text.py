"""Records of plain data as complete text, and back: what a stage gives another, for tests and reports of defects.

Takes any record of ours that is made of records, sizes, values of the loop IR and plain data (a schedule, a call plan);
gives text, and from the text an equal record. What has no text (a tensor, a Python function) stands there as
`object(0)`, `object(1)`, ... and is handed over beside it. Always holds: parse_record(text, kinds, objects) == record;
text is never executed: it can name the given kinds of records, operators of PyTorch, and nothing else.

    item    = Name [range {"," range}] "(" {field "=" item} ")"    a record, without the fields that have their default
            | "size(" dim ")" | "value(" {name "=" value ";"} value ")"   as in loops/parser.py, with dtypes
            | "(" items ")" | "[" items "]" | "{" item ":" item ... "}" | "set(" items ")"
            | number | string | "None" | "True" | "False" | "torch." name | "device(" string ")" | "bytes(" string ")"
            | "operator(" name ")" | "object(" number ")"

A range says what a symbol of sizes in the record may be. Symbols of one name may differ between two parts of a record
(a loop's): then each part says it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, is_dataclass
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.base.records import fields
from fusewright.loops import ir
from fusewright.loops.parser import FLOAT, NAME, Parser
from fusewright.loops.printer import ExpressionPrinter, dtype_name, range_text, symbols_below
from fusewright.sizes.expressions import Dim, Expr, Symbol, free_symbols

WIDTH = 116
TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
Known = Mapping[str, Expr]


def print_record(record: Any) -> tuple[str, tuple[Any, ...]]:
    """The text, and the objects that it holds no text of."""
    printer = _Printer()
    return printer.item(record, {}, 0) + "\n", tuple(printer.objects)


def parse_record(text: str, kinds: Iterable[type], objects: Sequence[Any] = ()) -> Any:
    """The record that `print_record` printed, of these kinds of records. Raises ParseError."""
    return _Parser(text, {kind.__name__: kind for kind in kinds}, objects).whole()


class _Values(ExpressionPrinter):
    """Values whose text says by itself what their names are: buffers and locals stand with their dtypes."""

    def _body(self, e: ir.Expression) -> tuple[str, int]:
        text, strength = super()._body(e)
        if isinstance(e, ir.Load):
            return f"{e.buffer}:{dtype_name(e.dtype)}{text.removeprefix(e.buffer)}", strength
        return f"{text}:{dtype_name(e.dtype)}" if isinstance(e, ir.LocalValue) else text, strength


class _Printer:
    def __init__(self) -> None:
        self.objects: list[Any] = []

    def item(self, value: Any, known: Known, indent: int) -> str:
        if isinstance(value, (Expr, ir.Expression)):
            return self.sizes_or_values(value, known)
        if is_dataclass(value) and not isinstance(value, type):
            return self.record(value, known, indent)
        if isinstance(value, dict):
            pairs = (
                f"{self.item(key, known, indent)}: {self.item(one, known, indent + 2)}" for key, one in value.items()
            )
            return block("{", pairs, "}", indent)
        if isinstance(value, (tuple, list)):
            texts = (self.item(one, known, indent + 2) for one in value)
            return block("[", texts, "]", indent) if isinstance(value, list) else block("(", texts, ")", indent)
        if isinstance(value, frozenset):
            return block("set(", sorted(self.item(one, known, indent + 2) for one in value), ")", indent)
        return self.plain(value)

    def plain(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, float):
            return repr(value)
        if isinstance(value, str):
            return json.dumps(value)
        if isinstance(value, bytes):
            return f'bytes("{value.hex()}")'
        if isinstance(value, TORCH_CONSTANTS):
            return str(value)
        if isinstance(value, torch.device):
            return f'device("{value}")'
        if isinstance(value, torch._ops.OpOverload):
            return f"operator({value})"
        self.objects.append(value)
        return f"object({len(self.objects) - 1})"

    def sizes_or_values(self, value: Expr | ir.Expression, known: Known) -> str:
        for symbol in symbols_below([value]):
            if known.get(str(symbol)) is not symbol:
                raise ValueError(f"two symbols in one place are called {symbol}")
        if isinstance(value, Expr):
            return f"size({value})"
        printer = _Values([value])
        result = printer.text(value)
        return f"value({'; '.join([*printer.lines, result])})"

    def record(self, value: Any, known: Known, indent: int) -> str:
        ranges = _unambiguous(value, known)
        inside = {**known, **{str(symbol): symbol for symbol in ranges}}
        shown = [(f.name, getattr(value, f.name)) for f in fields(value) if not _is_default(f, getattr(value, f.name))]
        texts = (f"{name}={self.item(one, inside, indent + 2)}" for name, one in shown)
        heading = f"[{', '.join(map(range_text, ranges))}]" if ranges else ""
        return block(f"{type(value).__name__}{heading}(", texts, ")", indent)


def block(start: str, texts: Iterable[str], end: str, indent: int) -> str:
    """The texts on one line, or a line each."""
    items = list(texts)
    line = start + ", ".join(items) + end
    if len(line) + indent <= WIDTH and "\n" not in line:
        return line
    inner = "".join(f"{' ' * (indent + 2)}{item},\n" for item in items)
    return f"{start}\n{inner}{' ' * indent}{end}"


def _is_default(field: Any, value: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return default is not MISSING and type(value) is type(default) and bool(value == default)


def _unambiguous(record: Any, known: Known) -> list[Symbol]:
    """The symbols below the record that are not known, without those whose name stands for several there; each behind
    those that its range needs."""
    by_name: dict[str, set[Expr]] = {}
    waiting = [*symbols_below([record])]
    while waiting:
        symbol = waiting.pop()
        found = by_name.setdefault(str(symbol), set())
        if symbol not in found:
            found.add(symbol)
            waiting.extend(_needed(symbol))
    several = {symbol for found in by_name.values() if len(found) > 1 for symbol in found}
    ready = set(known.values()) - several
    new = sorted({symbol for found in by_name.values() for symbol in found} - several - ready, key=str)
    ordered: list[Symbol] = []
    while now := [symbol for symbol in new if _needed(symbol) <= ready]:
        ordered += [symbol for symbol in now if isinstance(symbol, Symbol)]
        ready.update(now)
        new = [symbol for symbol in new if symbol not in ready]
    return ordered


def _needed(symbol: Expr) -> frozenset[Symbol]:
    upper: Dim | None = symbol.upper if isinstance(symbol, Symbol) else None
    return frozenset() if upper is None else free_symbols(upper)


class _Parser(Parser):
    def __init__(self, text: str, kinds: Mapping[str, type], objects: Sequence[Any]) -> None:
        super().__init__(text)
        self.kinds, self.objects = kinds, objects
        self.readers: dict[str, Callable[[], Any]] = {
            "size(": self.dim,
            "value(": self.defined_value,
            "set(": lambda: frozenset(self.items(r"(?=\))")),
            "bytes(": lambda: bytes.fromhex(self.string()),
            "device(": lambda: torch.device(self.string()),
            "operator(": self.operator,
            "object(": self.object,
        }

    def accept(self, pattern: str) -> str | None:
        while super().accept(r"\n") is not None:
            pass
        return super().accept(pattern)

    def whole(self) -> Any:
        found = self.item()
        self.accept(r"\s*")
        return found if self.at == len(self.text) else self.fail("the end of the text")

    def items(self, end: str) -> list[Any]:
        return self.several(self.item, end)

    def several(self, one: Callable[[], Any], end: str) -> list[Any]:
        """As before; a comma may stand before the end too."""
        found: list[Any] = []
        while self.accept(end) is None:
            found.append(one())
            if self.accept(",") is None:
                self.expect(end)
                break
        return found

    def item(self) -> Any:
        if (word := self.accept(r"(?:None|True|False)\b")) is not None:
            return {"None": None, "True": True, "False": False}[word]
        if (number := self.accept(FLOAT)) is not None:
            return float(number)
        if (digits := self.accept(r"-?\d+")) is not None:
            return int(digits)
        if self.accept(r'(?=")') is not None:
            return self.string()
        if (constant := self.accept(r"torch\.\w+")) is not None:
            found = getattr(torch, constant.removeprefix("torch."), None)
            return found if isinstance(found, TORCH_CONSTANTS) else self.fail("a dtype, a layout or a memory format")
        if self.accept(r"\("):
            return tuple(self.items(r"\)"))
        if self.accept(r"\["):
            return self.items(r"\]")
        if self.accept(r"\{"):
            return dict(self.several(self.pair, r"\}"))
        if (reader := self.accept("|".join(map(re.escape, self.readers)))) is not None:
            found = self.readers[reader]()
            self.expect(r"\)")
            return found
        return self.record()

    def pair(self) -> tuple[Any, Any]:
        key = self.item()
        self.expect(":")
        return key, self.item()

    def string(self) -> str:
        return json.loads(self.expect(r'"(?:[^"\\\n]|\\.)*"', "a string"))

    def object(self) -> Any:
        number = self.integer()
        return self.objects[number] if 0 <= number < len(self.objects) else self.fail("the number of an object")

    def record(self) -> Any:
        start, kind = self.at, self.kinds.get(self.accept(NAME) or "")
        if kind is None:
            self.at = start
            self.fail("a record")
        outside = self.symbols
        if self.accept(r"\["):
            self.symbols = dict(outside)
            self.several(self.range, r"\]")
        self.expect(r"\(")
        given = dict(self.several(self.field, r"\)"))
        self.symbols = outside
        try:
            return kind(**given)
        except TypeError:
            self.at = start
            self.fail(f"the fields of {kind.__name__}")

    def field(self) -> tuple[str, Any]:
        name = self.name()
        self.expect("=")
        return name, self.item()

    def defined_value(self) -> ir.Expression:
        self.values = {}
        self.definitions()
        return self.value()

    def atom(self) -> ir.Expression:
        if (name := self.accept(rf"{NAME}(?=:\w)")) is None or name in ("True", "False", "inf", "nan"):
            if name is not None:
                self.at -= len(name)
            return super().atom()
        self.expect(":")
        dtype = self.dtype()
        if self.accept(r"\[") is None:
            return ir.local_value(name, dtype)
        index = self.dim()
        self.expect(r"\]")
        return ir.load(name, index, dtype, self.bindings())
