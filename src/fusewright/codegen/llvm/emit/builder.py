"""Writing LLVM IR as text: values, blocks, scopes and the loop that ties them together.

Takes calls in program order; gives the text of one function. Always holds: a scope's cursor stands before every loop
that is being written inside the scope, so that a value may be added to an outer scope at any time and dominates
whatever follows; a value lives in the memo of the scope that holds it and is never seen outside that scope's contexts.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fusewright.base.records import dataclass, field
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.emit.types import literal, suffix, type_text

_T = TypeVar("_T")


class Value:
    """An operand: `text` is an SSA name or a literal; `lanes` 1 is a scalar, equal in all lanes. `home`: the scope that
    holds it (None: a literal).
    """

    __slots__ = ("home", "lanes", "text", "type")

    def __init__(self, text: str, type_: str, lanes: int = 1, home: Scope | None = None) -> None:
        self.text = text
        self.type = type_
        self.lanes = lanes
        self.home = home

    @property
    def typed(self) -> str:
        return f"{type_text(self.type, self.lanes)} {self.text}"

    def __repr__(self) -> str:
        return self.typed


@dataclass(slots=True)
class Block:
    label: str
    lines: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Cursor:
    """Where a scope writes next; shared by scopes of one level."""

    block: Block


@dataclass(slots=True, eq=False)
class Scope:
    """A level of the program: what is known there. `defines`: loop symbols and locals that get their value at this
    level.

    `lane`: values here belong to one vector of lanes. `mask`: the lanes (or, if scalar, whether) memory may be touched,
    None for all. `barrier`: memory accesses below must not be moved above it.
    """

    cursor: Cursor
    defines: set[Any] = field(default_factory=set)
    values: dict[Any, Value] = field(default_factory=dict)
    memo: dict[Any, Value] = field(default_factory=dict)
    lane: bool = False
    mask: Value | None = None
    barrier: bool = False
    children: dict[Any, Scope] = field(default_factory=dict)


class FunctionBuilder:
    """One function under construction. Instructions go to `scope`'s cursor."""

    def __init__(
        self,
        target: Target,
        declarations: dict[str, str],
        halves: bool = False,
        plain_nans: bool = False,
        passed_over: frozenset[str] = frozenset(),
    ) -> None:
        self.target = target
        self.passed_over = passed_over  # maxima that may be those of the numbers alone, see nans.py
        self.plain_nans = plain_nans  # every NaN may be rounded to bfloat16 as if it were a number, see nans.py
        self.halves = halves  # all floats that are stored are halves: some functions need less precision
        self.unrounded: dict[str, Value] = {}  # name of a bfloat16 in an i16 -> the float32 that was rounded
        self.declarations = declarations  # symbol -> its declaration or definition, shared by the functions of a module
        self.blocks: list[Block] = []
        self._names = 0
        self._slot: str | None = None
        self.scope = Scope(Cursor(self.block("entry")))
        self.entry = self.scope
        self.mask: Value | None = None  # the lanes that count where the next instruction goes
        self.failed = Value("%failed", "ptr")  # a flag on the stack: some index or divisor was out of range

    # --- blocks and names

    def name(self) -> str:
        self._names += 1
        return f"%v{self._names}"

    def block(self, stem: str) -> Block:
        """A new block, placed at the end of the function."""
        made = Block(f"{stem}{len(self.blocks)}" if self.blocks else stem)
        self.blocks.append(made)
        return made

    def emit(self, line: str) -> None:
        self.scope.cursor.block.lines.append(line)

    def interleave(self, cursor: Cursor, parts: Sequence[Callable[[], _T]]) -> list[_T]:
        """Writes `parts`, which are independent but for values that several use, and lets their lines take turns: a
        processor sees some hundred instructions ahead, so that of several long chains one after another it works on one
        or two."""
        block, start = cursor.block, len(cursor.block.lines)
        results, ends = [], []
        for part in parts:
            results.append(part())
            ends.append(len(block.lines))
        written = block.lines[start:]
        if (
            len(parts) > 1
            and cursor.block is block
            and not any("%failed" in line or line.startswith("  br ") for line in written)
        ):
            chains = [block.lines[first:last] for first, last in zip([start, *ends], ends)]
            block.lines[start:] = _take_turns(chains)
        return results

    def text(self, header: str) -> str:
        lines = [header + " {"]
        for block in self.blocks:
            lines.append(block.label + ":")
            lines.extend(block.lines)
        lines.append("}")
        return "\n".join(lines)

    # --- values

    def value(self, rhs: str, type_: str, lanes: int = 1) -> Value:
        name = self.name()
        self.emit(f"  {name} = {rhs}")
        return Value(name, type_, lanes, self.scope)

    def const(self, value: bool | int | float, type_: str) -> Value:
        return Value(literal(value, type_), type_)

    def splat(self, value: Value, lanes: int) -> Value:
        """`value` in all lanes. A scalar that lives in an outer scope is spread there, once."""
        if value.lanes == lanes:
            return value
        if value.lanes != 1:
            raise AssertionError(f"{value} cannot become {lanes} lanes")
        if value.home is None:
            return Value(f"splat ({value.type} {value.text})", value.type, lanes)
        key = ("splat", value.text, lanes)
        found = value.home.memo.get(key)
        if found is None:
            saved, self.scope = self.scope, value.home
            vector = type_text(value.type, lanes)
            one = self.value(f"insertelement {vector} poison, {value.type} {value.text}, i64 0", value.type, lanes)
            found = self.value(
                f"shufflevector {vector} {one.text}, {vector} poison, <{lanes} x i32> zeroinitializer",
                value.type,
                lanes,
            )
            value.home.memo[key] = found
            self.scope = saved
        return found

    def lane(self, value: Value, index: int) -> Value:
        if value.lanes == 1:
            return value
        return self.value(f"extractelement {value.typed}, i64 {index}", value.type)

    def match(self, *values: Value) -> list[Value]:
        """The same values with a common number of lanes."""
        lanes = max(v.lanes for v in values)
        return [self.splat(v, lanes) if v.lanes != lanes else v for v in values]

    def op(self, opcode: str, *values: Value) -> Value:
        """An instruction whose operands and result have one type: `fadd`, `and`, `shl`."""
        if len(values) == 1:
            (a,) = values
            return self.value(f"{opcode} {a.typed}", a.type, a.lanes)
        a, b = values
        if a.lanes != b.lanes:
            a, b = self.match(a, b)
        return self.value(f"{opcode} {a.typed}, {b.text}", a.type, a.lanes)

    def compare(self, opcode: str, a: Value, b: Value) -> Value:
        """`icmp slt`, `fcmp une`: a mask."""
        a, b = self.match(a, b)
        return self.value(f"{opcode} {a.typed}, {b.text}", "i1", a.lanes)

    def select(self, mask: Value, a: Value, b: Value) -> Value:
        if a.text == b.text and a.lanes == b.lanes:
            return a
        lanes = max(a.lanes, b.lanes, mask.lanes)
        a, b = self.splat(a, lanes), self.splat(b, lanes)
        return self.value(f"select {mask.typed}, {a.typed}, {b.typed}", a.type, lanes)

    def convert(self, opcode: str, value: Value, type_: str) -> Value:
        """`fpext`, `trunc`, `bitcast` (of equal widths), ...: lane by lane."""
        if value.type == type_:
            return value
        return self.value(f"{opcode} {value.typed} to {type_text(type_, value.lanes)}", type_, value.lanes)

    def intrinsic(
        self, name: str, *values: Value, type_: str | None = None, lanes: int | None = None, flags: str = ""
    ) -> Value:
        """A call of `llvm.<name>.<suffix of the first operand>` on operands of equal lanes."""
        matched = self.match(*values)
        first = matched[0]
        return self.call(
            f"llvm.{name}.{suffix(first.type, first.lanes)}", matched, type_ or first.type, lanes or first.lanes, flags
        )

    def call(
        self, symbol: str, values: list[Value], type_: str, lanes: int = 1, flags: str = "", attributes: str = ""
    ) -> Value:
        result = type_text(type_, lanes)
        if symbol not in self.declarations:
            parameters = ", ".join(type_text(v.type, v.lanes) for v in values)
            self.declarations[symbol] = f"declare {result} @{symbol}({parameters}){attributes}"
        space = flags + " " if flags else ""
        return self.value(f"call {space}{result} @{symbol}({', '.join(v.typed for v in values)})", type_, lanes)

    def call_void(self, symbol: str, values: list[Value]) -> None:
        if symbol not in self.declarations:
            self.declarations[symbol] = (
                f"declare void @{symbol}({', '.join(type_text(v.type, v.lanes) for v in values)})"
            )
        self.emit(f"  call void @{symbol}({', '.join(v.typed for v in values)})")

    def report(self, bad: Value) -> None:
        """Remembers that `bad` holds in a lane that counts; the kernel's end tells the caller."""
        if self.mask is not None:
            bad = self.op("and", bad, self.mask)
        flag = self.any_lane(bad)
        before = self.value("load i1, ptr %failed", "i1")
        self.emit(f"  store i1 {self.op('or', before, flag).text}, ptr %failed")

    def unknown(self, value: Value) -> Value:
        """The same i64, of which LLVM knows nothing."""
        if self._slot is None:
            self._slot = self.name()
            self.blocks[0].lines.insert(0, f"  {self._slot} = alloca i64, align 8")
        self.emit(f"  store volatile i64 {value.text}, ptr {self._slot}, align 8")
        return self.value(f"load volatile i64, ptr {self._slot}, align 8", "i64")

    # --- shorthands that math.py and the emitters read well with

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.intrinsic("fma", a, b, c)

    def constant_like(self, value: float | int, like: Value) -> Value:
        return self.const(value, like.type)

    def any_lane(self, mask: Value) -> Value:
        if mask.lanes == 1:
            return mask
        return self.intrinsic("vector.reduce.or", mask, type_="i1", lanes=1)

    def both(self, a: Value | None, b: Value | None) -> Value | None:
        """The conjunction of two masks, None standing for all lanes."""
        if a is None or b is None:
            return a if b is None else b
        return self.op("and", a, b)


_NAME = re.compile(r"%v\d+\b")


def _take_turns(chains: list[list[str]]) -> list[str]:
    """The lines of all chains, each chain in its order; a line waits for what an earlier chain defines."""
    pending = {line.split(" = ", 1)[0].strip() for chain in chains for line in chain if " = " in line}
    queues = [deque((line, set(_NAME.findall(line)) & pending) for line in chain) for chain in chains]
    merged: list[str] = []
    while any(queues):
        for queue in queues:
            if not queue:
                continue
            line, needs = queue[0]
            made = line.split(" = ", 1)[0].strip() if " = " in line else ""
            if needs & pending <= {made}:
                queue.popleft()
                pending.discard(made)
                merged.append(line)
    return merged
