"""Speculation on data: a value that the program reads from a tensor is taken to be what it is at the call at hand.

Takes a traced tensor that decides something in Python (a branch, `item()`, the size of a mask's result); gives its
value at this call, with a check in the graph. None where that is not worth a try: then the read is a graph break.
Always holds: a call that holds another value fails the check before anything that it changes is visible, runs eagerly,
and ends the version; a place where a value has differed is not taken for granted again. A `while` loop is not unrolled
by its data: only a test of few operators may be repeated.
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.signals import Retry
from fusewright.capture.bytecode.resume import origin_of
from fusewright.capture.guards.sources import Item, Local
from fusewright.operators.known_sizes import MARK
from fusewright.record.call_values import CallValues
from fusewright.record.traced_tensor import TracedTensor
from fusewright.sizes.tensor_type import held_number

if TYPE_CHECKING:
    from fusewright.capture.bytecode.instructions import CodeInfo
    from fusewright.capture.interpret.interpreter import Tracer

TAKEN = "taken for granted"
"""What is noted of a place, in the history: its value has been taken for granted; () once it has differed."""
DIFFERED, MOST_DIFFERENT = "differed", 3
"""What is noted of a function beside the calls of it that held another value, and how many of these end it: each costs
a compile."""
MOST_TURNS = 16
"""Reads of one place, with the path of the module that it is in, in one capture: a loop over 90 classes, each with a
mask of its own, is not one graph."""
MOST_LIGHT_TURNS, LIGHT = 8, 64
"""Turns of a `while` loop that data decide, and operators of one turn: past that the loop is not unrolled."""
FEW_ELEMENTS = 64
"""Elements of all inputs that a float depends on: one that is computed from more differs from call to call (a loss)."""


MOST_COMPARED = 4096
"""Elements of an input that is compared with what it was."""


class Speculation:
    """The values that one attempt takes for granted."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        recorder = tracer.recorder
        self.values = CallValues(recorder.graph, recorder.inputs, recorder.constants, recorder.env)
        self.count = 0
        self._asked: dict[str, list[int]] = {}  # by place: how long the graph was when it was asked

    def value(self, tensor: TracedTensor, most: int) -> torch.Tensor | None:
        """What the tensor holds at this call, from now on what it is checked to hold; None where nothing is taken for
        granted, or it has more than `most` elements."""
        type_ = tensor.tensor_type
        shape = [size for size in type_.shape if isinstance(size, int)]
        if type_.device.type != "cpu" or len(shape) < len(type_.shape):
            return None  # on a GPU a failed assertion ends the process
        if math.prod(shape) > most or type_.dtype.is_complex:
            return None
        if self.values.is_fixed(tensor.node):
            return self.values.of(tensor.node)
        place = self._place()
        if place is None or self._is_counter(tensor):
            return None
        value = self.values.of(tensor.node)
        if value is None or value.shape != type_.shape:
            return None
        if type_.dtype.is_floating_point:
            conditions = self._same_inputs(tensor)
            if conditions is None:
                return None
        else:
            conditions = [self._same(tensor, value)]
        for condition in conditions:
            self._take(place, condition)
        return value

    def count_of(self, mask: TracedTensor) -> int | None:
        """The number of elements that are not zero, as `value`."""
        if mask.device.type != "cpu" or (place := self._place()) is None:
            return None
        value = self.values.of(mask.node)
        if value is None:
            return None
        found = self.values.ask(lambda: int(value.count_nonzero()))
        call = self.tracer.recorder.call
        self._take(place, call(torch.eq, (call(torch.count_nonzero, (mask,)), found)))
        return found

    def shape_of(self, func: OpOverload, args: Sequence[object]) -> tuple[tuple[int, ...], str] | None:
        """The shape of an operator's result at this call, and the name of the place."""
        tensors = [one for one in args if isinstance(one, TracedTensor)]
        place = self._place() if all(one.device.type == "cpu" for one in tensors) else None
        if place is None:
            return None
        values = [self.values.of(one.node) if isinstance(one, TracedTensor) else one for one in args]
        if any(value is None for value in values):
            return None
        self._note(place)
        return self.values.shape_of(func, values), place

    def _same(self, tensor: TracedTensor, value: torch.Tensor) -> object:
        call = self.tracer.recorder.call
        if value.numel() != 1:
            return call(torch.all, (call(torch.eq, (tensor, self.values.ask(value.clone))),))
        number = held_number(value)
        if value.dtype is torch.bool:
            return tensor if number else call(torch.logical_not, (tensor,))
        return call(torch.eq, (tensor, number))

    def _same_inputs(self, tensor: TracedTensor) -> list[object] | None:
        """That what floats are computed from is the same: computed by other code, their last bits may differ. None
        where that is much, or nothing that stays: a size that varies, for one."""
        if not self._is_setting(tensor) or self.values.writes_to_inputs(tensor.node) or self.values.varies(tensor.node):
            return None
        inputs = dict(self.tracer.recorder.inputs)
        conditions = []
        for node in self.values.inputs_of(tensor.node):
            real, traced = inputs[node], node.meta.get("example_value")
            if not isinstance(real, torch.Tensor) or not isinstance(traced, TracedTensor):
                continue
            static = all(isinstance(size, int) for size in traced.tensor_type.shape)
            if not static or real.numel() > MOST_COMPARED or self.values.ask(real.isnan().any):
                return None
            conditions.append(self._same(traced, real.detach()))
        return conditions

    def _take(self, place: str, condition: object) -> None:
        recorder = self.tracer.recorder
        with torch.no_grad():
            recorder.call(torch.ops.aten._assert_async.msg, (condition, MARK + place))
        self._note(place)

    def _note(self, place: str) -> None:
        self.count += 1
        self.tracer.history.setdefault((place, TAKEN), (1,))

    def _arguments(self, tensor: TracedTensor) -> list[Any]:
        """The types of the frame's arguments, and parts of them, that the value is computed from; its other inputs are
        attributes of objects, or global."""
        tracer = self.tracer
        sources = dict(zip((node for node, _ in tracer.recorder.inputs), tracer.world.input_sources))
        found = []
        for node in self.values.inputs_of(tensor.node):
            source: Any = sources.get(node)
            while isinstance(source, Item):
                source = source.base
            if isinstance(source, Local):
                found.append(node.meta["type"])
        return found

    def _is_counter(self, tensor: TracedTensor) -> bool:
        """Whether the value follows from an argument of no dimensions: a step."""
        return any(getattr(type_, "shape", None) == () for type_ in self._arguments(tensor))

    def _is_setting(self, tensor: TracedTensor) -> bool:
        """Whether floats may be the same at the next call: they depend on few numbers, or on what is neither an
        argument nor trained."""
        inputs = dict(self.tracer.recorder.inputs)
        reals = [inputs[one] for one in self.values.inputs_of(tensor.node)]
        if sum(real.numel() for real in reals if isinstance(real, torch.Tensor)) <= FEW_ELEMENTS:
            return True
        return not self._arguments(tensor) and not any(isinstance(real, torch.nn.Parameter) for real in reals)

    def _place(self) -> str | None:
        """The name of where the program is, or None where nothing may be taken for granted."""
        tracer = self.tracer
        if len(tracer.history.get(differences(tracer.function), ())) >= MOST_DIFFERENT:
            return None
        stack = tracer.stack()
        text = "\n".join(f"{level.file}:{level.line} {level.module}" for level in stack)
        last = stack[-1] if stack else None
        place = f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {'' if last is None else last}"
        if tracer.history.get((place, TAKEN)) == () or self._decides_loop_of_caller():
            return None
        asked = self._asked.setdefault(place, [])
        here = len(tracer.recorder.graph.nodes)
        tests = tracer.frame is not None and tests_a_loop(tracer.frame.info, tracer.frame.pc - 1)
        most = MOST_LIGHT_TURNS if tests else MOST_TURNS
        if len(asked) >= most or (tests and asked and here - asked[-1] > LIGHT):
            tracer.history[place, TAKEN] = ()
            raise Retry()
        asked.append(here)
        return place

    def _decides_loop_of_caller(self) -> bool:
        """Whether a function that is running was called by the test of a `while` loop."""
        frame: Any = self.tracer.frame
        frame = None if frame is None else frame.back
        while frame is not None:
            if tests_a_loop(frame.info, frame.pc - 1):
                return True
            frame = frame.back
        return False


def differences(function: types.FunctionType) -> object:
    """Where the history counts the calls of a function, resumed or not, that held another value."""
    return origin_of(function.__code__).info.code, DIFFERED


def tests_a_loop(info: CodeInfo, index: int) -> bool:
    """Whether the line of an instruction decides about the next turn of a `while` loop: it is the test, which CPython
    repeats at the loop's end, or stands in a loop without one."""
    if info.tests is None:
        found: set[int] = set()
        for at, instruction in enumerate(info.instructions):
            if not -1 < instruction.target <= at or info.instructions[instruction.target].action in _NEXT:
                continue
            first = instruction.target if instruction.action == "JUMP_BACKWARD" else at
            found.update(map(info.line, range(first, at + 1)))
        info.tests = frozenset(found)
    return info.line(index) in info.tests


_NEXT = frozenset({"FOR_ITER", "SEND", "END_ASYNC_FOR"})
