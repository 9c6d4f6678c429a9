"""A call plan as plain data: what the native `Plan` is built from, what prints, and what the disk cache stores.

Takes nothing; defines the types between `codegen/call_plan.py` (which makes them), `runtime/launch.py` (which loads
them) and `runtime/artifact.py` (which writes and reads them).
Always holds: slots, values and inputs are named by their index; no address and no native code of a dtype or device
appears here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from fusewright.base.records import dataclass, replace

SLOT_KINDS = ("input", "constant", "arena", "fresh", "returned", "window", "alias")
STEP_KINDS = (
    "kernel",
    "extern",
    "python",
    "allocate",
    "window",
    "release",
    "check",
    "gather",
    "mutate",
    "group",
    "launch",
    "skip",
    "own",
    "change",
)
WRITES_INPUT = ("mutate", "change")
INTEGER_KINDS = (
    "immediate",
    "value",
    "values",
    "pointer to values",
    "handle",
    "handles",
    "bytes",
    "pointer to bytes",
    "result",
    "scratch",
)
ARGUMENT_KINDS = ("constant", "tensor", "value", "list", "tuple", "private tensor")
OUTPUT_KINDS = ("buffer", "view", "private view", "size", "value")
"""Each in the order of the native enumeration (csrc/plan.h)."""

SlotKind = Literal["input", "constant", "arena", "fresh", "returned", "window", "alias"]


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """One tensor or piece of memory. `where`: input position, constant number, or the slot that a window looks at.
    sizes/strides: first value entry of a run of `ndim`; offset: value entry (bytes for "arena", elements for
    "window")."""

    name: str
    kind: SlotKind
    needs_pointer: bool
    where: int
    dtype: torch.dtype
    device: str
    device_index: int
    ndim: int
    sizes: int
    strides: int
    offset: int

    @property
    def is_nobodys(self) -> bool:
        """Whether no memory is meant: a result that nobody reads, or a member of a list."""
        return self.name in ("_", "list")

    def without_owner(self) -> SlotSpec:
        """What stands in its place in a plan that has no use for it."""
        return replace(self, name="_", kind="fresh", needs_pointer=False, where=0)


@dataclass(frozen=True, slots=True)
class KernelCall:
    """name: of the kernel in the plan; key: content hash of its machine code; sizes, extent: value entries."""

    name: str
    key: str
    buffers: tuple[int, ...]
    extent: int
    grain: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Kernels that run at the same time, in one parallel region: none of them touches what another one writes."""

    calls: tuple[KernelCall, ...]


@dataclass(frozen=True, slots=True)
class LaunchCall:
    """A kernel on GPU number `device`. key: content hash of its machine code; grid: value
    entry of its number of programs; by_value: buffers (scalars in CPU memory) whose content is the parameter; written:
    those it writes. scratch: the last buffer is scratch memory of Triton's own. waits: the kernel itself waits for
    those before it, and may be started earlier."""

    name: str
    key: str
    device: int
    buffers: tuple[int, ...]
    by_value: tuple[bool, ...]
    written: tuple[bool, ...]
    grid: int
    sizes: tuple[int, ...]
    scratch: bool = False
    waits: bool = False


@dataclass(frozen=True, slots=True)
class CCall:
    """A library operator through its C function. integers: (kind, payload) in the order of INTEGER_KINDS' meaning; the
    doubles follow in their own order (the calling conventions keep the two apart). origin: the name of the extern."""

    name: str
    symbol: str
    integers: tuple[tuple[str, int | bytes], ...]
    doubles: tuple[float, ...]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class PythonCall:
    """A call of a Python callable (an OpOverload or anything else). program: postfix, (kind, operand); the last
    len(keywords) values are keyword arguments. results: the slot of each result, -1 for one that nobody reads."""

    name: str
    target: Any
    program: tuple[tuple[str, int], ...]
    constants: tuple[Any, ...]
    keywords: tuple[str, ...]
    results: tuple[int, ...]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class SlotStep:
    """allocate: make the tensor; window: (re)make a window; release: drop it; check: compare a returned tensor with
    what the plan assumed; own: the same, and it must be the whole of its storage (kernels will write there, and it may
    be given out); mutate: an input is about to change (its version is counted); change: the same, and no version
    counts it (running statistics)."""

    kind: Literal["allocate", "window", "release", "check", "own", "mutate", "change"]
    slot: int


@dataclass(frozen=True, slots=True)
class Gather:
    """A tensor list: slots first, first + 1, ... take the handles of `sources`."""

    first: int
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guarded:
    """Steps that are performed unless the value entry `value` is 0. Kernels are not among them: their extent is 0
    then."""

    value: int
    steps: tuple[CCall | PythonCall | SlotStep | Gather, ...]


StepSpec = KernelCall | KernelGroup | LaunchCall | CCall | PythonCall | SlotStep | Gather | Guarded


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What the caller gets. "buffer": the tensor of `slot`; "view": a true view of it; "private view": a view whose
    base nobody else can see, and what other views of `slot` are views of; "size": the value entry `offset`; "value":
    `value`."""

    kind: Literal["buffer", "view", "private view", "size", "value"]
    slot: int = -1
    dtype: torch.dtype | None = None
    ndim: int = 0
    sizes: int = 0
    strides: int = 0
    offset: int = 0
    value: Any = None


@dataclass(frozen=True, slots=True)
class CallPlan:
    """A whole call. inputs: "t" tensor, "i" integer, "x" unused, one character each. arena: value entry of the
    temporary memory's size. value_texts: how a symbolic value entry prints."""

    name: str
    inputs: str
    values: tuple[int, ...]
    symbols: tuple[tuple[int, int, int], ...]
    instructions: tuple[tuple[int, int, int, int], ...]
    slots: tuple[SlotSpec, ...]
    steps: tuple[StepSpec, ...]
    outputs: tuple[OutputSpec, ...]
    arena: int
    single: bool
    constants: tuple[torch.Tensor, ...] = ()
    value_texts: tuple[tuple[int, str], ...] = ()


def kernel_calls(plan: CallPlan) -> list[KernelCall]:
    """Every call of a generated kernel, those that run together included."""
    found: list[KernelCall] = []
    for step in plan.steps:
        if isinstance(step, KernelGroup):
            found += step.calls
        elif isinstance(step, KernelCall):
            found.append(step)
    return found


def slots_of(step: StepSpec) -> tuple[int, ...]:
    """Every slot that a step touches."""
    if isinstance(step, (KernelCall, LaunchCall)):
        return step.buffers
    if isinstance(step, KernelGroup):
        return tuple(slot for call in step.calls for slot in call.buffers)
    if isinstance(step, CCall):
        return tuple(
            payload
            for kind, payload in step.integers
            if kind in ("handle", "handles", "result") and isinstance(payload, int)
        )
    if isinstance(step, PythonCall):
        arguments = tuple(operand for kind, operand in step.program if kind in ("tensor", "private tensor"))
        return arguments + tuple(slot for slot in step.results if slot >= 0)
    if isinstance(step, Gather):
        return (*range(step.first, step.first + len(step.sources)), *step.sources)
    if isinstance(step, Guarded):
        return tuple(slot for inner in step.steps for slot in slots_of(inner))
    return (step.slot,)


def touched_by(steps: Sequence[StepSpec]) -> list[tuple[int, ...]]:
    """For each step, every slot that it touches. A list borrows the handles of its members: whoever reads the list
    reads them."""
    inner = (one for step in steps for one in (step.steps if isinstance(step, Guarded) else (step,)))
    lists = {one.first: one.sources for one in inner if isinstance(one, Gather)}
    return [tuple(one for slot in slots_of(step) for one in (slot, *lists.get(slot, ()))) for step in steps]
