"""Functions that the kernels of a module share: their names, and loops to write them with.

Takes instructions in program order; gives a function's text and its name. Always holds: equal functions are in the
module once; one with another text has another name, so that the code of who calls it is known to differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from fusewright.codegen.llvm.emit.builder import FunctionBuilder, Value
from fusewright.codegen.llvm.emit.target import Target
from fusewright.codegen.llvm.emit.types import type_text

Body = Callable[[Value, list[Value]], list[Value]]
"""The code of one turn of a loop: its index and what it carries, to what the next turn gets."""


def define(stem: str, text: str, declarations: dict[str, str]) -> str:
    """Adds a function to the module; gives its name. text: from its parameters on."""
    name = f"fw.{stem}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    declarations.setdefault(name, f"define internal void @{name}{text}")
    return name


class Writer:
    """A function under construction whose values all live in one scope: nothing is hoisted."""

    def __init__(self, target: Target, declarations: dict[str, str]) -> None:
        self.b = FunctionBuilder(target, declarations)

    def loop(self, stem: str, start: Value, stop: Value, step: int, carried: list[Value], body: Body) -> list[Value]:
        """`body` from `start` to `stop`, at least once."""
        b = self.b
        before, loop = b.scope.cursor.block, b.block(stem)
        before.lines.append(f"  br label %{loop.label}")
        b.scope.cursor.block = loop
        index, phis = Value(b.name(), "i64"), [Value(b.name(), value.type, value.lanes) for value in carried]
        after = body(index, phis)
        following = b.op("add nsw", index, b.const(step, "i64"))
        more = b.compare("icmp slt", following, stop)
        latch, done = b.scope.cursor.block, b.block(f"after_{stem}")
        b.emit(f"  br i1 {more.text}, label %{loop.label}, label %{done.label}")
        heads = [f"  {index.text} = phi i64 [ {start.text}, %{before.label} ], [ {following.text}, %{latch.label} ]"]
        for phi, old, new in zip(phis, carried, after):
            kind = type_text(phi.type, phi.lanes)
            heads.append(f"  {phi.text} = phi {kind} [ {old.text}, %{before.label} ], [ {new.text}, %{latch.label} ]")
        loop.lines[:0] = heads
        b.scope.cursor.block = done
        return after

    def loop_if_any(
        self, stem: str, start: Value, stop: Value, step: int, carried: list[Value], body: Body
    ) -> list[Value]:
        b = self.b
        enough = b.compare("icmp slt", start, stop)
        before, inside = b.scope.cursor.block, b.block(f"some_{stem}")
        b.scope.cursor.block = inside
        after = self.loop(stem, start, stop, step, carried, body)
        last, joined = b.scope.cursor.block, b.block(f"joined_{stem}")
        before.lines.append(f"  br i1 {enough.text}, label %{inside.label}, label %{joined.label}")
        last.lines.append(f"  br label %{joined.label}")
        b.scope.cursor.block = joined
        kinds = [type_text(old.type, old.lanes) for old in carried]
        return [
            b.value(f"phi {kind} [ {old.text}, %{before.label} ], [ {new.text}, %{last.label} ]", old.type, old.lanes)
            for kind, old, new in zip(kinds, carried, after)
        ]
