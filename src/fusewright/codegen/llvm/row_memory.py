"""Memory that a kernel has for itself: one row of a reduction, and tiles that are transposed.

Takes a kernel's emitter at its first block; gives its pointers to that memory. Always holds: little of it lies on the
stack, the rest comes from malloc; out of memory, what was allocated is freed, and the call falls back to eager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusewright.codegen.llvm import staging
from fusewright.codegen.llvm.emit.builder import Block, Value
from fusewright.codegen.llvm.emit.context import Context
from fusewright.codegen.llvm.emit.memory import LINE, Pointer
from fusewright.codegen.llvm.emit.types import ELEMENT_TYPES
from fusewright.sizes import expressions as sizes

if TYPE_CHECKING:
    from fusewright.codegen.llvm.emitter import KernelEmitter

STACK_LIMIT = 64 * 1024
"""Bytes of scratch kept on the stack; more comes from malloc (a libgomp thread's stack may be small)."""


def place(emitter: KernelEmitter, entry: Context, finish: Block) -> None:
    """Scratch memory, and the tiles that are transposed."""
    b, strategy = emitter.b, emitter.strategy
    lanes = strategy.wide or (strategy.lanes if strategy.mode == "outer" else 1)
    copies = strategy.copies if strategy.mode == "outer" and not strategy.wide else 1
    total = 0
    for scratch in emitter.kernel.scratch:
        element = ELEMENT_TYPES[scratch.dtype]
        one = scratch.size * (element.size * lanes)
        on_stack = max(one, 1) if isinstance(one, int) and total + one * copies <= STACK_LIMIT else None
        total += (on_stack or 0) * copies
        texts: dict[int, str] = {}
        for copy in range(copies):
            if on_stack is not None:
                text = b.name()
                b.blocks[0].lines.insert(0, f"  {text} = alloca [{on_stack} x i8], align 64")
            else:
                text = _allocate(emitter, emitter.indexer.scalar(entry, sizes.maximum(one, 1)), finish)
            texts[copy * lanes] = text
        emitter.pointers[scratch.name] = Pointer(
            texts[0], scratch.dtype, lanes if lanes > 1 else 0, texts if lanes > 1 else None
        )

    for load, _, size in staging.place(emitter):
        if size is None:
            emitter.tiles[load] = b.name()
            b.blocks[0].lines.insert(0, f"  {emitter.tiles[load]} = alloca [{staging.SMALL} x i8], align 64")
        else:
            emitter.tiles[load] = _aligned(emitter, _allocate(emitter, b.const(size + LINE, "i64"), finish))


def _allocate(emitter: KernelEmitter, size: Value, finish: Block) -> str:
    made = emitter.b.call("malloc", [size], "ptr")
    _branch_out_allocation(emitter, made, finish)
    emitter.freed.append(made.text)
    return made.text


def _aligned(emitter: KernelEmitter, pointer: str) -> str:
    """The first line of the cache that begins at `pointer` or after it."""
    b = emitter.b
    address = b.value(f"ptrtoint ptr {pointer} to i64", "i64")
    rest = b.op("and", b.op("sub", b.const(0, "i64"), address), b.const(LINE - 1, "i64"))
    return b.value(f"getelementptr i8, ptr {pointer}, i64 {rest.text}", "ptr").text


def _branch_out_allocation(emitter: KernelEmitter, made: Value, finish: Block) -> None:
    """Out of memory: what was allocated is freed, and the call falls back to eager."""
    b = emitter.b
    block, following = b.block("exhausted"), b.block("body")
    for pointer in emitter.freed:
        block.lines.append(f"  call void @free(ptr {pointer})")
    block.lines += ["  store i1 true, ptr %failed", f"  br label %{finish.label}"]
    b.declarations.setdefault("free", "declare void @free(ptr)")
    null = b.value(f"icmp eq ptr {made.text}, null", "i1")
    b.entry.cursor.block.lines.append(f"  br i1 {null.text}, label %{block.label}, label %{following.label}")
    b.entry.cursor.block = following
