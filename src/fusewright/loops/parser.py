"""Loop programs from their text: the inverse of `print_program(program, complete=True)`.

Takes text, and the values of the program's constants, which no text holds; gives a `LoopProgram` without locations.
Always holds: parse_program(print_program(p, complete=True)) == p but for locations; text is never executed: it can name
operators of PyTorch, and nothing else. An error says the line, the column, and what was expected there.

    program    = {"symbol" range | "size" name "=" where | buffer | "inputs" names | "maker" name "=" name} {operation}
                 "return" outputs
    operation  = "op" name ":" [range {"," range}] (extern | {loop} {statement})
    range      = name "in" [int] ".." [dim]
    loop       = ("for" | "scan") [name "<" dim {"," name "<" dim}] ":"
    statement  = name "=" value | "acc" "=" kind "(" "acc" "," value ")" | name "[" dim "]" [bindings] mode value
    value      = choice of INFIX, "if" "else", "-", "not", calls, loads, literals (see `Parser.value`)
    dim        = sums of products of names, integers, "//", "%", "min(...)", "max(...)", parentheses
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from fusewright.base.pytorch import torch
from fusewright.loops import ir
from fusewright.loops.printer import DTYPE_NAMES, IMPLIED, INFIX, MODES, RENAMED, implied_dtype
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

Item = TypeVar("Item")

NAME = r"[A-Za-z_]\w*"
FLOAT = r"-?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|inf\b|nan\b)"
OPERATOR = r"\w+\.\w+\.\w+"
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
OPERATORS = {text: (op, strength) for op, (text, strength) in INFIX.items() if op != "logical_xor"}
CALLS = {name: name for name in ir.OPERATIONS} | {short: op for op, short in RENAMED.items()}
SYMBOLS = "|".join(
    re.escape(text) + (r"\b" if text.isalpha() else "") for text in sorted(OPERATORS, key=len, reverse=True)
)


class ParseError(ValueError):
    """The text is not what a printer of ours wrote."""


def parse_program(text: str, constants: Sequence[torch.Tensor] = ()) -> ir.LoopProgram:
    return Parser(text).program(tuple(constants))


class Parser:
    """Recursive descent over the characters of a text; blanks and comments are skipped before each token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.symbols: dict[str, Expr] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.values: dict[str, ir.Expression] = {}

    # --- tokens ---

    def fail(self, expected: str) -> NoReturn:
        self.accept("(?!)")  # to where the next token begins
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - self.text.rfind("\n", 0, self.at)
        found = self.text[self.at : self.at + 20].split("\n")[0]
        raise ParseError(f"line {line}, column {column}: expected {expected}, found {found!r}")

    def accept(self, pattern: str) -> str | None:
        """The next token, if it matches."""
        skipped = re.compile(r"[ ]*(?:#[^\n]*)?").match(self.text, self.at)
        assert skipped is not None
        found = re.compile(pattern).match(self.text, skipped.end())
        if found is None:
            self.at = skipped.end()
            return None
        self.at = found.end()
        return found.group()

    def expect(self, pattern: str, what: str = "") -> str:
        found = self.accept(pattern)
        return self.fail(what or pattern.replace("\\", "")) if found is None else found

    def name(self) -> str:
        return self.expect(NAME, "a name")

    def integer(self) -> int:
        return int(self.expect(r"-?\d+", "an integer"))

    def lines(self) -> None:
        """The end of a line, and empty lines behind it."""
        self.expect(r"\n", "the end of the line")
        while self.accept(r"\n"):
            pass

    def several(self, one: Callable[[], Item], end: str) -> list[Item]:
        """one, one, ... and `end`, which is taken."""
        found: list[Item] = []
        while self.accept(end) is None:
            if found:
                self.expect(",")
            found.append(one())
        return found

    # --- sizes ---

    def dim(self) -> Dim:
        total: Dim = -1 * self.product() if self.accept("-") else self.product()
        while sign := self.accept(r"[-+]"):
            total = total + self.product() if sign == "+" else total - self.product()
        return total

    def product(self) -> Dim:
        result = self.factor()
        while operator := self.accept(r"\*|//|%"):
            right = self.factor()
            make: Any = {"*": lambda a, b: a * b, "//": sizes.floor_div, "%": sizes.modulo}[operator]
            result = make(result, right)
        return result

    def factor(self) -> Dim:
        if digits := self.accept(r"\d+"):
            return int(digits)
        if self.accept(r"\("):
            inner = self.dim()
            self.expect(r"\)")
            return inner
        if choice := self.accept(r"(?:min|max)\("):
            operands = self.several(self.dim, r"\)")
            result = operands[0] if operands else self.fail("a size")
            for operand in operands[1:]:
                result = (sizes.minimum if choice == "min(" else sizes.maximum)(result, operand)
            return result
        return self.symbol()

    def symbol(self) -> Expr:
        start = self.at
        found = self.symbols.get(self.expect(NAME, "a size"))
        if found is None:
            self.at = start
            self.fail("a symbol with a range")
        return found

    def range(self) -> None:
        name = self.name()
        self.expect(r"in\b")
        lower = self.accept(r"-?\d+")
        self.expect(r"\.\.")
        upper = None if self.accept(r"(?=[],\n])") is not None else self.dim()
        self.symbols[name] = sizes.symbol(name, None if lower is None else int(lower), upper)

    def dims(self) -> tuple[Dim, ...]:
        """2x(s0)x3, or `scalar`."""
        if self.accept(r"scalar\b"):
            return ()
        found: list[Dim] = []
        while True:
            found.append(int(digits) if (digits := self.accept(r"-?\d+")) else self.factor())
            if self.accept("x") is None:
                return tuple(found)

    def shape(self) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
        shape = self.dims()
        return shape, self.dims() if self.accept(r"by\b") else ()

    def dtype(self) -> torch.dtype:
        start, name = self.at, self.name()
        found = DTYPES.get(name, getattr(torch, name, None))
        if not isinstance(found, torch.dtype):
            self.at = start
            self.fail("a dtype")
        return found

    # --- values ---

    def value(self, strength: int = 0) -> ir.Expression:
        """An expression whose operators all bind at least as much as `strength`."""
        if self.accept(r"not\b"):
            left: ir.Expression = ir.apply("logical_not", self.value(3), dtype=torch.bool)
        elif self.accept(rf"(?!{FLOAT})-(?!\d)"):
            inner = self.value(9)
            left = ir.apply("neg", inner, dtype=inner.dtype)
        else:
            left = self.atom()
        while True:
            start = self.at
            operator = self.accept(SYMBOLS)
            if operator is None or (self.text[self.at : self.at + 1] == "=" and operator not in ("<", ">")):
                self.at = start
                break
            op, own = OPERATORS[operator]
            if own < strength:
                self.at = start
                break
            right = self.value(own + 1)
            left = ir.apply(op, left, right, dtype=implied_dtype(op, (left, right)))
        if strength == 0 and self.accept(r"if\b"):
            mask = self.value(1)
            self.expect(r"else\b")
            return ir.masked(mask, left, self.value(1))
        return left

    def atom(self) -> ir.Expression:
        if self.accept(r"\("):
            inner = self.value()
            self.expect(r"\)")
            return inner
        if (literal := self.accept(rf"{FLOAT}|-?\d+|True\b|False\b")) is not None:
            plain: bool | int | float = (
                literal == "True" if literal in ("True", "False")
                else int(literal) if re.fullmatch(r"-?\d+", literal) else float(literal)
            )  # fmt: skip
            return ir.constant(plain, self.dtype() if self.accept(":(?! )") else IMPLIED[type(plain)])
        start, name = self.at, self.name()
        if self.accept(r"\["):
            return self.load(name, start)
        if self.accept(r"\("):
            return self.call(name, start)
        if name in CALLS and self.accept(r"\."):
            dtype = self.dtype()
            self.expect(r"\(")
            return ir.apply(CALLS[name], *self.several(self.value, r"\)"), dtype=dtype)
        if name not in self.values:
            self.at = start
            self.fail("a value")
        return self.values[name]

    def load(self, buffer: str, start: int) -> ir.Expression:
        if buffer not in self.dtypes:
            self.at = start
            self.fail("the name of a buffer")
        index = self.dim()
        self.expect(r"\]")
        return ir.load(buffer, index, self.dtypes[buffer], self.bindings())

    def bindings(self) -> tuple[tuple[Expr, ir.Expression], ...]:
        def one() -> tuple[Expr, ir.Expression]:
            symbol = self.symbol()
            self.expect(":")
            return symbol, self.value()

        return tuple(self.several(one, r"\}")) if self.accept(r"\{") else ()

    def call(self, name: str, start: int) -> ir.Expression:
        if name == "index":
            index = self.dim()
            self.expect(r"\)")
            return ir.index_value(index)
        if name == "check":
            value = self.value(4)
            self.expect("<")
            extent, wrap = self.dim(), self.accept(", wrap") is not None
            self.expect(r"\)")
            return ir.checked_index(value, extent, wrap)
        args = self.several(self.value, r"\)")
        op = CALLS.get(name)
        if op is None and name in DTYPES and len(args) == 1:
            return ir.apply("cast", args[0], dtype=DTYPES[name])
        if op is None or len(args) != ir.OPERATIONS[op]:
            self.at = start
            self.fail("an operation with its number of arguments")
        return ir.apply(op, *args, dtype=implied_dtype(op, args))

    # --- operations ---

    def axes(self) -> tuple[ir.Axis, ...]:
        def one() -> ir.Axis:
            symbol = self.symbol()
            self.expect("<")
            return ir.Axis(symbol, self.dim())

        return tuple(self.several(one, ":"))

    def operation(self) -> ir.Operation:
        name = self.expect(r"[^:\n]+", "a name")
        self.expect(":")
        outside = self.symbols
        self.symbols, self.values = dict(outside), {}
        self.several(lambda: self.range(), r"(?=\n)")
        self.lines()
        found = self.extern(name) if self.accept(rf"(?=[\w, ]*= {OPERATOR}\()") is not None else self.loops(name)
        self.symbols = outside
        return found

    def loops(self, name: str) -> ir.Operation:
        headers: list[tuple[str, tuple[ir.Axis, ...]]] = []
        stores: list[ir.Store] = []
        kind: Any = ""
        value: Any = None
        position: str | None = None
        while self.accept(r"(?=op\b|return\b)") is None:
            if loop := self.accept(r"(?:for|scan)\b"):
                headers.append((loop, self.axes()))
            elif self.accept(r"acc = "):
                kind = self.name()
                self.expect(r"\(acc,")
                value = self.value()
                self.expect(r"\)")
                dtype = torch.int64 if kind in ("argmax", "argmin") else value.dtype
                self.values = {"acc": ir.local_value("acc", dtype)}
            elif position_of := self.accept(rf"{NAME}(?=\[[^\n]*\] = position\(acc\))"):
                position = position_of
                self.expect(r"\[[^\n]*\] = position\(acc\)")
            else:
                self.definitions()
                if self.accept(r"(?=\n)") is None:
                    stores.append(self.store())
            self.lines()
        if value is None:
            return ir.Pointwise(name, headers[0][1] if headers else (), tuple(stores))
        axes = headers[0][1] if len(headers) > 1 else ()
        if not headers or len(stores) != 1:
            self.fail("one loop and one store of what was accumulated")
        last, (store,) = headers[-1], stores
        if last[0] == "scan":
            return ir.Scan(name, axes, last[1][0], kind, value, store.buffer, store.index, store.value, position)
        return ir.Reduction(name, axes, last[1], kind, value, store.buffer, store.index, store.value)

    def definitions(self) -> None:
        """`t0 = value`, each behind the one before: on lines of their own, or with a semicolon between."""
        while (name := self.accept(r"t\d+(?= = )")) is not None:
            self.expect("=")
            self.values[name] = self.value()
            if self.accept(";") is None:
                return

    def store(self) -> ir.Store:
        buffer = self.name()
        self.expect(r"\[")
        index = self.dim()
        self.expect(r"\]")
        bindings = self.bindings()
        mode = self.expect("|".join(map(re.escape, MODES.values())), "an assignment")
        self.definitions()
        return ir.Store(
            buffer, index, self.value(), {text: mode for mode, text in MODES.items()}[mode], bindings  # type: ignore
        )

    # --- calls of operators ---

    def operator(self) -> Any:
        start = self.at
        found: Any = torch.ops
        for part in self.expect(OPERATOR, "an operator").split("."):
            found = getattr(found, part, None)
        if not isinstance(found, torch._ops.OpOverload):
            self.at = start
            self.fail("an operator of PyTorch")
        return found

    def target(self) -> Any:
        found = self.operator()
        self.expect(r"\(")
        return found

    def argument(self) -> Any:
        if self.accept(r"\["):
            return tuple(self.several(self.argument, r"\]"))
        if (word := self.accept(r"(?:None|True|False)\b")) is not None:
            return {"None": None, "True": True, "False": False}[word]
        if (text := self.accept(r"'[^'\\\n]*'")) is not None:
            return text[1:-1]
        if (number := self.accept(FLOAT)) is not None:
            return float(number)
        if (plain := self.accept(r"torch\.\w+")) is not None:
            found = getattr(torch, plain.removeprefix("torch."), None)
            kinds = (torch.dtype, torch.memory_format, torch.layout)
            return found if isinstance(found, kinds) else self.fail("a dtype, a layout or a memory format")
        if (device := self.accept(r"(?:cpu|cuda|meta)(?::\d+)?(?=[,)\]])")) is not None:
            return torch.device(device)
        start, name = self.at, self.accept(rf"{NAME}(?=\()")
        if name in self.dtypes:
            return self.ref(name)
        self.at = start
        return self.dim()

    def ref(self, name: str) -> ir.BufferRef:
        self.expect(r"\(")
        shape, stride = self.shape()
        offset = self.dim() if self.accept(r"\+") else 0
        self.expect(r"\)")
        return ir.BufferRef(name, shape, stride, offset, self.dtypes[name])

    def extern(self, name: str) -> ir.Extern:
        outputs = tuple(None if found == "_" else found for found in self.several(self.name, "="))
        target = self.target()
        args: list[Any] = []
        kwargs: list[tuple[str, Any]] = []

        def one() -> None:
            key = self.accept(rf"{NAME}(?==)")
            if key is None:
                args.append(self.argument())
            else:
                self.expect("=")
                kwargs.append((key, self.argument()))

        self.several(one, r"\)")
        notes: dict[str, Any] = {}
        if self.accept(r"\["):
            self.several(lambda: self.note(notes), r"\]")
        self.lines()
        return ir.Extern(name, target, tuple(args), tuple(kwargs), outputs, **notes)

    def note(self, notes: dict[str, Any]) -> None:
        if self.accept(r"up to\b"):
            most = self.integer()
            self.expect("rows:")
            target = self.target()
            notes["skinny"] = ir.SkinnyGemm(most, target, tuple(self.several(self.argument, r"\)")))
        elif self.accept(r"keeps\b"):
            notes["keeps"] = (*notes.get("keeps", ()), self.argument())
        elif self.accept(r"writes\b"):
            notes["mutates"] = (*notes.get("mutates", ()), self.name())
        elif self.expect(r"(?:out|ordered)\b") == "out":
            notes["placement"] = "out"
        else:
            notes["ordered"] = True

    # --- programs ---

    def buffer(self) -> ir.Buffer:
        role: Any = self.expect(r"(?:input|constant|temporary|output)\b", "a buffer")
        name = self.name()
        self.expect(":")
        dtype = self.dtypes[name] = self.dtype()
        self.expect(r"\[")
        shape, stride = self.shape()
        self.expect(r"\]")
        device = torch.device(self.expect(r"[a-z]+(?::\d+)?", "a device"))
        self.expect(r"at\b")
        position = self.integer()
        self.expect(r"\+")
        offset = self.dim()
        counted = 1 if self.accept(r"counted\b") is None else self.integer()
        return ir.Buffer(name, shape, stride, dtype, device, role, position, offset, counted)

    def size(self) -> tuple[Expr, tuple[int, int]]:
        symbol = self.symbol()
        self.expect("=")
        if self.accept("input") is None:
            return symbol, (-1, self.integer())
        position, dim = self.integer(), -1
        if self.accept(r"\.shape\["):
            dim = self.integer()
            self.expect(r"\]")
        return symbol, (position, dim)

    def output(self) -> ir.Output:
        kind = self.expect(r"(?:buffer|view|size|value)\b", "the kind of an output")
        if kind == "buffer":
            return ir.Output("buffer", self.name())
        if kind == "view":
            own = self.accept(r"own\b") is not None
            ref = self.ref(self.name())
            return ir.Output("view", ref.buffer, ref, own=own)
        return ir.Output(kind, value=self.argument())  # type: ignore[arg-type]

    def program(self, constants: tuple[torch.Tensor, ...]) -> ir.LoopProgram:
        made = ir.LoopProgram(constants=constants)
        while self.accept(r"op\b|return\b") is None:
            if self.accept(r"symbol\b"):
                self.range()
            elif self.accept(r"size\b"):
                symbol, where = self.size()
                made.size_symbols[symbol] = where
            elif self.accept(r"inputs\b"):
                made.inputs = tuple("" if name == "_" else name for name in self.several(self.name, r"(?=\n)"))
            elif self.accept(r"maker\b"):
                name = self.name()
                self.expect("=")
                made.makers[name] = self.expect(r"[^\n]+", "a node's name")
            else:
                buffer = self.buffer()
                made.buffers[buffer.name] = buffer
            self.lines()
        while self.text[: self.at].endswith("op"):
            made.operations.append(self.operation())
            if self.accept(r"op\b") is None:
                self.expect(r"return\b", "an operation, or return")
        made.outputs = () if self.accept(r"\(\)") else tuple(self.several(self.output, r"(?=\n)"))
        self.lines()
        if self.at != len(self.text):
            self.fail("the end of the text")
        return made
