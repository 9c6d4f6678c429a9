"""A call plan as text, one line a step.

Takes a `CallPlan`; gives what a person reads to see what one call does: which kernels and operators, on which tensors,
in which memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusewright.codegen.call_plan_types import (
    CallPlan,
    CCall,
    Gather,
    Guarded,
    KernelCall,
    KernelGroup,
    LaunchCall,
    OutputSpec,
    PythonCall,
    SlotSpec,
    SlotStep,
)


def describe(plan: CallPlan) -> str:
    """The plan's inputs, memory, steps and outputs."""
    return _Printer(plan).text()


class _Printer:
    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan
        self.texts = dict(plan.value_texts)
        self.step_lines: dict[type, Callable[[Any], str]] = {
            KernelCall: self.kernel,
            KernelGroup: self.group,
            LaunchCall: self.launch,
            CCall: self.c_call,
            PythonCall: self.python_call,
            SlotStep: self.slot_step,
            Gather: self.gather,
            Guarded: self.guarded,
        }

    def value(self, entry: int) -> str:
        return self.texts.get(entry, str(self.plan.values[entry]))

    def run(self, first: int, n: int) -> str:
        return ", ".join(self.value(entry) for entry in range(first, first + n))

    def slot(self, index: int) -> str:
        slot = self.plan.slots[index]
        if slot.kind == "window":
            base = self.plan.slots[slot.where]
            offset = self.value(slot.offset)
            # Equal runs of sizes share their place in the value table.
            if (slot.dtype, slot.ndim, slot.sizes, slot.strides, offset) == (
                base.dtype,
                base.ndim,
                base.sizes,
                base.strides,
                "0",
            ):
                return base.name
            at = "" if offset == "0" else f" at {offset}"
            return f"{base.name}[{self.shape(slot)}{at}]"
        return f"{slot.name}#{index}" if slot.kind == "alias" or slot.name == "_" else slot.name

    def shape(self, slot: SlotSpec) -> str:
        sizes, strides = (self.run(values, slot.ndim) for values in (slot.sizes, slot.strides))
        return f"{str(slot.dtype).removeprefix('torch.')} ({sizes}) stride ({strides})"

    def kernel(self, step: KernelCall) -> str:
        buffers = ", ".join(map(self.slot, step.buffers))
        sizes = f"  sizes [{', '.join(map(self.value, step.sizes))}]" if step.sizes else ""
        return f"kernel    {step.name}({buffers})  extent {self.value(step.extent)}, grain {step.grain}{sizes}"

    def group(self, step: KernelGroup) -> str:
        return "\n".join([f"parallel  {len(step.calls)} kernels", *(f"  {self.kernel(call)}" for call in step.calls)])

    def launch(self, step: LaunchCall) -> str:
        buffers = ", ".join(map(self.slot, step.buffers))
        sizes = f"  sizes [{', '.join(map(self.value, step.sizes))}]" if step.sizes else ""
        return f"launch    {step.name}({buffers})  on GPU {step.device}, {self.value(step.grid)} programs{sizes}"

    def c_call(self, step: CCall) -> str:
        results = [
            self.slot(payload) for kind, payload in step.integers if kind == "result" and isinstance(payload, int)
        ]
        arguments: list[str] = []
        integers = [(kind, payload) for kind, payload in step.integers if kind != "result"]
        while integers:
            kind, payload = integers.pop(0)
            is_list = kind in ("values", "pointer to values") and integers and integers[0][0] == "immediate"
            if is_list and isinstance(payload, int):
                length = integers.pop(0)[1]
                arguments.append(f"[{self.run(payload, int(length))}]")
            else:
                arguments.append(self.c_argument(kind, payload))
        arguments += [repr(value) for value in step.doubles]
        left = f"{', '.join(results)} = " if results else ""
        return f"operator  {left}{step.name}({', '.join(arguments)})  by {step.symbol}"

    def c_argument(self, kind: str, payload: int | bytes) -> str:
        if isinstance(payload, bytes):
            text = payload.rstrip(b"\0")
            return repr(text.decode()) if payload.endswith(b"\0") and text.isalnum() else f"0x{payload.hex()}"
        if kind in ("handle", "handles"):
            return self.slot(payload)
        if kind == "immediate":
            return str(payload)
        return self.value(payload)

    def python_call(self, step: PythonCall) -> str:
        stack: list[str] = []
        for kind, operand in step.program:
            if kind in ("list", "tuple"):
                items = ", ".join(stack[len(stack) - operand :])
                del stack[len(stack) - operand :]
                stack.append(f"[{items}]" if kind == "list" else f"({items})")
            elif kind == "constant":
                stack.append(repr(step.constants[operand]))
            elif kind == "value":
                stack.append(self.value(operand))
            else:
                stack.append(self.slot(operand) + (" copied" if kind == "private tensor" else ""))
        positional = len(stack) - len(step.keywords)
        named = [f"{name}={text}" for name, text in zip(step.keywords, stack[positional:], strict=True)]
        results = ", ".join("_" if slot < 0 else self.slot(slot) for slot in step.results)
        left = f"{results} = " if results else ""
        return f"operator  {left}{step.name}({', '.join([*stack[:positional], *named])})  by Python"

    def slot_step(self, step: SlotStep) -> str:
        slot = self.plan.slots[step.slot]
        name = self.plan.slots[slot.where].name if slot.kind == "window" else self.slot(step.slot)
        detail = f": {self.shape(slot)}" if step.kind in ("allocate", "check", "own", "window") else ""
        offset = self.value(slot.offset)
        at = f" at {offset}" if slot.kind == "window" and offset != "0" else ""
        return f"{step.kind:9} {name}{detail}{at}"

    def gather(self, step: Gather) -> str:
        last = step.first + len(step.sources) - 1
        return f"list      #{step.first}..#{last} = {', '.join(map(self.slot, step.sources))}"

    def guarded(self, step: Guarded) -> str:
        inside = [f"  {self.step_lines[type(inner)](inner)}" for inner in step.steps]
        return "\n".join([f"if        {self.value(step.value)}:", *inside])

    def output(self, output: OutputSpec) -> str:
        if output.kind == "value":
            return repr(output.value)
        if output.kind == "size":
            return self.value(output.offset)
        name = self.plan.slots[output.slot].name
        if output.kind == "buffer":
            return name
        shape, stride = self.run(output.sizes, output.ndim), self.run(output.strides, output.ndim)
        return f"{name}[({shape}) stride ({stride}) at {self.value(output.offset)}]"

    def text(self) -> str:
        plan = self.plan
        lines = [f"plan {plan.name}: {len(plan.inputs)} inputs, {self.value(plan.arena)} bytes of temporary memory"]
        for entry, position, dim in plan.symbols:
            source = f"input {position}" if dim == -1 else f"size {dim} of input {position}"
            lines.append(f"  size      {self.value(entry)} = {source}")
        arena = [slot for slot in plan.slots if slot.kind == "arena"]
        lines += [f"  memory    {slot.name} at {self.value(slot.offset)}: {self.shape(slot)}" for slot in arena]
        lines += [f"  {self.step_lines[type(step)](step)}" for step in plan.steps]
        lines.append(f"  return    {', '.join(map(self.output, plan.outputs))}")
        return "\n".join(lines)
