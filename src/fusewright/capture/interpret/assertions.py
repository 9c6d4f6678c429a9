"""Branches of which one side only raises: `assert (x > 0).all()`, `if bad.any(): raise ValueError(...)`.

Takes a conditional jump on a tensor; gives the way that does not raise, with a check of the condition in the graph.
Always holds: a check that fails lets the call run eagerly from its start, so the exception is the program's own, raised
where it raises it.
"""

from __future__ import annotations

from typing import Any

from fusewright.base.pytorch import torch
from fusewright.capture.bytecode.instructions import CodeInfo
from fusewright.record.torch_level import checking
from fusewright.record.traced_tensor import TracedTensor

_LEAVE = frozenset({"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "RERAISE", "SEND", "FOR_ITER"})
_JUMPS = {"POP_JUMP_IF_TRUE": True, "POP_JUMP_IF_FALSE": False}
_LONGEST = 400
"""Instructions of a block that makes its message."""


def truth(frame: Any, condition: object, at: int) -> bool:
    """The truth of `condition`, which instruction `at` may be a conditional jump on. A tensor's breaks the graph,
    unless only one side of the jump goes on."""
    jumps_if = _JUMPS.get(frame.info.instructions[at].action)
    if (
        jumps_if is None
        or type(condition) is not TracedTensor
        or any(size != 1 for size in condition.tensor_type.shape)
    ):
        return bool(frame.world.truth(condition))
    world = frame.world
    # On a GPU a failed assertion ends the process.
    if condition.device.type != "cpu" or world.recorder.known_value(condition) is not None:
        return bool(world.truth(condition))
    jump, stay = _only_raises(frame.info, frame.info.instructions[at].target), _only_raises(frame.info, at + 1)
    if jump == stay:
        return bool(world.truth(condition))
    found = jumps_if if stay else not jumps_if
    held = condition if found else world.torch_call(torch.logical_not, (condition,), {})
    world.torch_call(torch._assert_async, checking(world.recorder.level, held), {})
    return found


def _only_raises(info: CodeInfo, place: int) -> bool:
    """Whether every way on from `place` leads to a raise that the frame does not catch, without a loop."""
    pending, seen = [place], set[int]()
    while pending:
        index = pending.pop()
        if index in seen:
            continue
        seen.add(index)
        instruction = info.instructions[index]
        if instruction.action == "RAISE_VARARGS":
            if info.handlers[index] is not None:
                return False
            continue
        if instruction.action in _LEAVE or len(seen) > _LONGEST or -1 < instruction.target <= index:
            return False
        if instruction.target != -1:
            pending.append(instruction.target)
        if instruction.action != "JUMP_FORWARD":
            pending.append(index + 1)
    return True
