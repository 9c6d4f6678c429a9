"""Which fast locals are live in front of each instruction.

Takes a decoded code object; gives, for each instruction, a bit set of the slots whose present value may still be read.
Always holds: too many slots may be live, never too few.
"""

from __future__ import annotations

import weakref

from fusewright.capture.bytecode.instructions import CodeInfo, never_falls_through

# What touches a cell reads its slot: the cell itself stays.
_READS = frozenset(
    {
        "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "DELETE_FAST", "LOAD_FAST_AND_CLEAR", "LOAD_CLOSURE",
        "MAKE_CELL", "LOAD_DEREF", "STORE_DEREF",
        "DELETE_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF",
    }
)  # fmt: skip
_FRAME_READERS = frozenset({"_getframe", "currentframe", "f_locals"})
_BUILTIN_READERS = frozenset({"locals", "vars", "dir", "eval", "exec"})

_cache: weakref.WeakKeyDictionary[CodeInfo, list[int]] = weakref.WeakKeyDictionary()


def reads_frame(info: CodeInfo) -> bool:
    """Whether the code may ask for its variables by their names. `model.eval` and `torch.stack` do not."""
    names = info.code.co_names
    if not _FRAME_READERS.isdisjoint(names) or ("inspect" in names and "stack" in names):
        return True
    return not _BUILTIN_READERS.isdisjoint(names) and (
        "builtins" in names
        or any("LOAD_GLOBAL" in one.action and one.operand in _BUILTIN_READERS for one in info.instructions)
    )


def live_slots(info: CodeInfo) -> list[int]:
    """One bit set per instruction."""
    known = _cache.get(info)
    if known is None:
        known = _cache[info] = _solve(info)
    return known


def _reads_and_writes(info: CodeInfo) -> tuple[list[int], list[int]]:
    """Per instruction, the slots that it reads before it writes, and the slots that it writes."""
    reads, writes = [], []
    for instruction in info.instructions:
        read = written = 0
        name, arg = instruction.name, instruction.arg
        if name in _READS:
            read = 1 << arg
        elif name in ("STORE_FAST", "STORE_FAST_MAYBE_NULL"):
            written = 1 << arg
        elif instruction.action == "LOAD_FAST_LOAD_FAST":
            read = 1 << (arg >> 4) | 1 << (arg & 15)
        elif name == "STORE_FAST_STORE_FAST":
            written = 1 << (arg >> 4) | 1 << (arg & 15)
        elif name == "STORE_FAST_LOAD_FAST":
            written = 1 << (arg >> 4)
            read = 1 << (arg & 15) & ~written
        reads.append(read)
        writes.append(written)
    return reads, writes


def _solve(info: CodeInfo) -> list[int]:
    count = len(info.instructions)
    if reads_frame(info):
        return [(1 << len(info.slots)) - 1] * count
    # `super()` reads the first argument behind the compiler's back.
    always = 1 if "__class__" in info.code.co_freevars and info.code.co_argcount else 0
    reads, writes = _reads_and_writes(info)
    live = [0] * (count + 1)
    changed = True
    while changed:
        changed = False
        for index in range(count - 1, -1, -1):
            instruction = info.instructions[index]
            after = 0 if never_falls_through(instruction.name) else live[index + 1]
            if instruction.target >= 0:
                after |= live[instruction.target]
            handler = info.handlers[index]
            # Where an instruction raises, what it would have written has not been written.
            raised = live[handler.target] if handler is not None else 0
            value = reads[index] | after & ~writes[index] | raised | always
            if value != live[index]:
                live[index] = value
                changed = True
    return live[:count]
