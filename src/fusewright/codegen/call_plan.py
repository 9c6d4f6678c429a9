"""The call plan of a scheduled graph: which memory, tensors and calls, in which order, one native call goes through.

Takes a schedule's `Plan` and the `KernelCode` of its kernels; gives a `CallPlan` (plain data, see call_plan_types.py),
which runtime/launch.py turns into the native object. `describe` prints it, one line a step.
Always holds: every tensor that a step reads exists before the step; memory that the call allocates is released after
its last reader; an input is marked as changed before the first step that writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile

import torch

from fusewright.base.records import dataclass, field, replace
from fusewright.codegen.call_plan_text import describe
from fusewright.codegen.call_plan_types import (
    CallPlan,
    CCall,
    Guarded,
    KernelCall,
    KernelGroup,
    LaunchCall,
    OutputSpec,
    PythonCall,
    SlotKind,
    SlotSpec,
    SlotStep,
    StepSpec,
    slots_of,
    touched_by,
)
from fusewright.codegen.device_kernel import DeviceKernel
from fusewright.codegen.extern_calls import encode_extern
from fusewright.codegen.kernel_code import KernelCode
from fusewright.codegen.size_values import ValueTable
from fusewright.loops.externs import references
from fusewright.loops.ir import Buffer, BufferRef, Output
from fusewright.schedule.plan import Kernel, Plan, RunExtern, RunKernel
from fusewright.sizes.expressions import Dim, free_symbols

__all__ = ["build_call_plan", "describe"]


def build_call_plan(
    plan: Plan,
    kernels: Mapping[str, KernelCode | DeviceKernel],
    *,
    name: str = "graph",
    single: bool = False,
    available: Callable[[str], bool] = lambda symbol: True,
    consumes: bool = False,
) -> CallPlan:
    """The call plan of `plan`. `kernels` by kernel name; `single`: the one output is given as it is, not in a tuple;
    `available`: whether PyTorch exports a C function; `consumes`: inputs are dropped after their last reader too (for
    `Plan.consume`).

    Raises ValueError when the schedule contradicts itself (a size that no input gives, memory that is
    returned but was planned as temporary)."""
    return _Builder(plan, kernels, available, consumes).build(name, single)


@dataclass(slots=True)
class _Slot:
    """A slot while the plan is built: `needs_pointer` is known when every reader is."""

    name: str
    kind: SlotKind
    where: int
    dtype: torch.dtype
    device: torch.device
    shape: Sequence[Dim]
    stride: Sequence[Dim]
    offset: Dim
    needs_pointer: bool = False


@dataclass(slots=True)
class _Builder:
    plan: Plan
    kernels: Mapping[str, KernelCode | DeviceKernel]
    available: Callable[[str], bool]
    consumes: bool = False
    values: ValueTable = field(init=False)
    arena_device: torch.device = field(init=False)
    slots: list[_Slot] = field(default_factory=list)
    steps: list[StepSpec] = field(default_factory=list)
    buffer_slots: dict[str, int] = field(default_factory=dict)
    overwritten: frozenset[str] = field(init=False)  # buffers whose memory another one takes over
    window_slots: dict[BufferRef, int] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    allocated: set[int] = field(default_factory=set)
    mutated: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.values = ValueTable(self.plan.size_symbols)
        # There is one arena, on the GPU if there is one: temporaries on other devices have memory of their own.
        on_gpus = {self.plan.buffers[name].device for name in self.plan.placements} - {torch.device("cpu")}
        self.arena_device = on_gpus.pop() if len(on_gpus) == 1 else torch.device("cpu")
        self.overwritten = frozenset(self.plan.takes_over.values())

    def build(self, name: str, single: bool) -> CallPlan:
        plan = self.plan
        for step in plan.steps:
            if not isinstance(step, RunKernel) and step.extern.placement == "returned":
                self.returned.update(buffer for buffer in step.extern.outputs if buffer is not None)
        for index, step in enumerate(plan.steps):
            if isinstance(step, RunExtern):
                self.extern(step)
            elif not step.horizontal:
                others = takewhile(
                    lambda other: isinstance(other, RunKernel) and other.horizontal, plan.steps[index + 1 :]
                )
                self.region([step, *others])  # type: ignore[list-item]
        outputs = tuple(self.output(output) for output in plan.outputs)
        arena = self.values.of(plan.arena_size)
        slots = tuple(self.frozen(slot) for slot in self.slots)
        steps = self.with_releases({output.slot for output in outputs})
        texts = {entry: self.values.text(entry) for entry in self.values.texts}
        return CallPlan(
            name,
            self.input_kinds(),
            tuple(self.values.initial),
            tuple(self.values.symbols),
            tuple(self.values.program),
            slots,
            steps,
            outputs,
            arena,
            single,
            tuple(plan.constants),
            tuple(sorted(texts.items())),
        )

    # --- slots -------------------------------------------------------------------------------------------------------

    def new_slot(self, slot: _Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def slot_of(self, name: str) -> int:
        """The slot of a buffer; one that takes over another's memory has its slot."""
        found = self.buffer_slots.get(name)
        if found is None and name in self.plan.takes_over:
            found = self.buffer_slots[name] = self.slot_of(self.plan.takes_over[name])
        elif found is None:
            found = self.buffer_slots[name] = self.new_slot(self.buffer_slot(self.plan.buffers[name]))
        return found

    def buffer_slot(self, buffer: Buffer) -> _Slot:
        kind: SlotKind
        where = 0
        offset: Dim = 0
        if buffer.role in ("input", "constant"):
            kind, where = ("input" if buffer.role == "input" else "constant"), buffer.position
        elif buffer.name in self.returned:
            kind = "returned"
        elif buffer.role == "output" or buffer.device != self.arena_device or buffer.name not in self.plan.placements:
            kind = "fresh"
        else:
            kind, offset = "arena", self.plan.placements[buffer.name].offset
        return _Slot(buffer.name, kind, where, buffer.dtype, buffer.device, buffer.shape, buffer.stride, offset)

    def pointer_slot(self, name: str) -> int:
        """The slot of a buffer whose memory a kernel or a window reads or writes."""
        slot = self.slot_of(name)
        self.slots[slot].needs_pointer = True
        return slot

    def frozen(self, slot: _Slot) -> SlotSpec:
        # A shape that the data decide: the operator makes the tensor, and nobody asks.
        unknown = slot.kind == "returned" and any(
            s not in self.plan.size_symbols for dim in slot.shape for s in free_symbols(dim)
        )
        shape, stride = ((), ()) if unknown else (slot.shape, slot.stride)
        return SlotSpec(
            slot.name,
            slot.kind,
            slot.needs_pointer,
            slot.where,
            slot.dtype,
            slot.device.type,
            -1 if slot.device.index is None else slot.device.index,
            -1 if unknown else len(shape),
            self.values.run(shape),
            self.values.run(stride),
            self.values.of(slot.offset),
        )

    # --- what extern_calls.Places asks --------------------------------------------------------------------------------

    def tensor(self, ref: BufferRef) -> int:
        buffer = self.plan.buffers[ref.buffer]
        slot = self.slot_of(ref.buffer)
        own = self.slots[slot]
        whole = (ref.shape, ref.stride, ref.dtype) == (
            tuple(own.shape),
            tuple(own.stride),
            own.dtype,
        ) and ref.offset == 0
        if whole and own.kind != "arena":
            return slot
        found = self.window_slots.get(ref)
        if found is None:
            self.pointer_slot(ref.buffer)
            window = _Slot(
                f"{ref.buffer}[...]", "window", slot, ref.dtype, buffer.device, ref.shape, ref.stride, ref.offset
            )
            found = self.window_slots[ref] = self.new_slot(window)
        return found

    def result(self, buffer: str | None) -> int:
        if buffer is not None:
            return self.slot_of(buffer)
        return self.new_slot(_Slot("_", "returned", 0, torch.float32, torch.device("cpu"), (), (), 0))

    def out(self, buffer: str) -> int:
        whole = self.plan.buffers[buffer]
        return self.tensor(BufferRef(buffer, whole.shape, whole.stride, 0, whole.dtype))

    def aliases(self, n: int) -> int:
        first = len(self.slots)
        for _ in range(n):
            self.new_slot(_Slot("list", "alias", 0, torch.float32, torch.device("cpu"), (), (), 0))
        return first

    def entry(self, dim: Dim) -> int:
        return self.values.of(dim)

    def run(self, dims: Sequence[Dim]) -> int:
        return self.values.run(dims)

    def is_temporary(self, slot: int) -> bool:
        return self.slots[slot].kind == "window"

    # --- steps -------------------------------------------------------------------------------------------------------

    def region(self, steps: Sequence[RunKernel]) -> None:
        """One kernel, or several that run at the same time (those on a GPU one after the other, in its queue)."""
        calls = []
        for step in steps:
            kernel, code = self.plan.kernels[step.kernel], self.kernels[step.kernel]
            self.before_writing(sorted(kernel.written))
            self.in_place_of_operators(sorted(kernel.written & self.returned), step.when)
            buffers = tuple(self.pointer_slot(name) for name in code.buffers)
            sizes = tuple(self.values.of(size) for size in code.sizes)
            if isinstance(code, DeviceKernel):
                self.launch(kernel, code, buffers, sizes)
            else:
                extent = code.extent if step.when is None else code.extent * step.when
                calls.append(KernelCall(kernel.name, code.key, buffers, self.values.of(extent), code.grain, sizes))
        if calls:
            self.steps.append(calls[0] if len(calls) == 1 else KernelGroup(tuple(calls)))

    def launch(self, kernel: Kernel, code: DeviceKernel, buffers: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """A kernel on a GPU. Memory of its own is allocated for this launch."""
        device = next(self.plan.buffers[name].device for name in code.buffers if name in kernel.written)
        spills = []
        for spill in code.spills:
            slot = self.new_slot(
                _Slot(f"{kernel.name}.rows", "fresh", 0, spill.dtype, device, (spill.elements,), (1,), 0, True)
            )
            self.steps.append(SlotStep("allocate", slot))
            spills.append(slot)
        if code.scratch:
            size = (code.grid * code.scratch,)
            slot = self.new_slot(_Slot(f"{kernel.name}.scratch", "fresh", 0, torch.uint8, device, size, (1,), 0, True))
            self.steps.append(SlotStep("allocate", slot))
            spills.append(slot)
        by_value = tuple(k in code.scalars for k in range(len(buffers))) + (False,) * len(spills)
        written = tuple(name in kernel.written for name in code.buffers) + (True,) * len(spills)
        grid = self.values.of(code.grid)
        touched = (*buffers, *spills)
        self.steps.append(
            LaunchCall(
                kernel.name, code.key, device.index or 0, touched, by_value, written, grid, sizes, code.scratch > 0,
                code.waits,
            )
        )

    def in_place_of_operators(self, buffers: Sequence[str], when: Dim | None) -> None:
        """Makes the results that an operator returns, where a kernel is to write them instead of it."""
        slots = [self.slot_of(name) for name in buffers]
        if slots:
            if when is None:
                raise ValueError("a kernel writes what an operator returns")
            self.steps.append(Guarded(self.values.of(when), tuple(SlotStep("allocate", slot) for slot in slots)))

    def extern(self, step: RunExtern) -> None:
        extern = step.extern
        names = {ref.buffer for ref in references((extern.args, extern.kwargs))}
        names.update(buffer for buffer in extern.outputs if buffer is not None)
        devices = {self.plan.buffers[name].device.type for name in names}
        written = list(extern.mutates)
        if extern.placement == "out":
            written += [buffer for buffer in extern.outputs if buffer is not None]
        self.before_writing(written)
        empty = [
            name
            for name in sorted(names)
            if 0 in self.plan.buffers[name].shape and self.slots[self.slot_of(name)].kind == "fresh"
        ]
        self.before_writing(empty)  # no kernel writes what has no elements
        calls = encode_extern(extern, self, devices, self.available)
        touched = dict.fromkeys(slot for call in calls for slot in slots_of(call))
        made: list[StepSpec] = [SlotStep("window", slot) for slot in touched if self.slots[slot].kind == "window"]
        made += calls
        for call in calls:
            results = call.results if isinstance(call, PythonCall) else c_results(call)
            for slot in results:
                if slot >= 0 and self.slots[slot].name != "_":
                    made.append(SlotStep("own" if self.slots[slot].name in self.overwritten else "check", slot))
        self.steps += made if step.when is None else [Guarded(self.values.of(step.when), tuple(made))]  # type: ignore

    def before_writing(self, buffers: Sequence[str]) -> None:
        """Makes what must exist, and marks what belongs to the caller, before a step writes these buffers."""
        for name in buffers:
            slot = self.slot_of(name)
            kind = self.slots[slot].kind
            if kind == "fresh" and slot not in self.allocated:
                self.allocated.add(slot)
                self.steps.append(SlotStep("allocate", slot))
            elif kind in ("input", "constant") and slot not in self.mutated:
                self.mutated.add(slot)
                counted = self.plan.buffers[name].counted
                self.steps += [SlotStep("mutate", slot)] * counted or [SlotStep("change", slot)]

    def with_releases(self, kept: set[int]) -> tuple[StepSpec, ...]:
        """The steps, with each tensor that the call allocates dropped after its last reader."""
        last: dict[int, int] = {}
        for position, touched in enumerate(touched_by(self.steps)):
            for slot in touched:
                last[slot] = position
                if self.slots[slot].kind == "window":
                    last[self.slots[slot].where] = position
        after: dict[int, list[StepSpec]] = {}
        dropped = ("fresh", "returned", "input") if self.consumes else ("fresh", "returned")
        for slot, position in last.items():
            if self.slots[slot].kind in dropped and slot not in kept:
                after.setdefault(position, []).append(SlotStep("release", slot))
        steps: list[StepSpec] = []
        for position, step in enumerate(self.steps):
            steps.append(step)
            steps.extend(after.get(position, ()))
        return tuple(steps)

    # --- inputs and outputs ------------------------------------------------------------------------------------------

    def input_kinds(self) -> str:
        tensors = {buffer.position for buffer in self.plan.buffers.values() if buffer.role == "input"}
        integers = {position for position, dim in self.plan.size_symbols.values() if position >= 0 and dim == -1}
        return "".join("t" if p in tensors else "i" if p in integers else "x" for p in range(len(self.plan.inputs)))

    def output(self, output: Output) -> OutputSpec:
        if output.kind == "value":
            return OutputSpec("value", value=output.value)
        if output.kind == "size":
            return OutputSpec("size", offset=self.values.of(output.value))
        name = output.buffer if output.kind == "buffer" else output.ref.buffer  # type: ignore[union-attr]
        slot = self.slot_of(name)
        if self.slots[slot].kind == "arena":
            raise ValueError(f"buffer {name} is an output of the graph but was planned as temporary memory")
        if self.slots[slot].kind == "fresh" and slot not in self.allocated:
            self.before_writing([name])  # an output of no elements, which no kernel writes
        buffer, own = self.plan.buffers[name], self.slots[slot]
        if output.kind == "buffer" and (buffer.shape, buffer.stride) == (own.shape, own.stride):
            return OutputSpec("buffer", slot)
        # Otherwise it is the memory of a temporary of another shape.
        ref = output.ref or BufferRef(name, buffer.shape, buffer.stride, 0, buffer.dtype)
        spec = OutputSpec(
            "view",
            slot,
            ref.dtype,
            len(ref.shape),
            self.values.run(ref.shape),
            self.values.run(ref.stride),
            self.values.of(ref.offset),
        )
        private = ref.dtype == buffer.dtype and (output.own or self.is_private(name, ref))
        return replace(spec, kind="private view") if private else spec

    def is_private(self, name: str, ref: BufferRef) -> bool:
        """Whether a view's base can be seen by nobody else: made by this call, and given out by this one output
        only."""
        buffer = self.plan.buffers[name]
        if buffer.role in ("input", "constant"):
            return False
        bases = [output.buffer or (output.ref.buffer if output.ref is not None else "") for output in self.plan.outputs]
        return bases.count(name) == 1


def c_results(call: StepSpec) -> tuple[int, ...]:
    """The slots that a C call fills."""
    if not isinstance(call, CCall):
        return ()
    return tuple(payload for kind, payload in call.integers if kind == "result" and isinstance(payload, int))
