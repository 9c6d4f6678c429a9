"""CUDA graphs: a native plan whose GPU work is recorded once and then replayed as one launch.

Takes a native plan and its `CallPlan`; gives a callable that means the same. Inputs that stay in place (parameters) are
read there; those that move are copied into memory of the recording, in one batch; results are copied out, so that what
the caller holds is never overwritten. What the plan does in the CPU's memory runs at each call, before a replay: its
checks may refuse the call. Always holds: a recording is replayed only when every input that it reads in place has the
address that was recorded; what cannot be recorded runs the plan itself, and `reason` says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.base.signals import memory_was_short
from fusewright.codegen.call_plan_types import (
    WRITES_INPUT,
    CallPlan,
    CCall,
    KernelCall,
    KernelGroup,
    LaunchCall,
    PythonCall,
    SlotStep,
)
from fusewright.graph.seeds import replays_draws
from fusewright.runtime.artifact import find_operator
from fusewright.runtime.host_steps import together

WARM_UP = 2
"""Calls that run the plan before it is recorded: libraries choose their algorithms, and inputs show whether they
move."""
MOST_RECORDINGS = 8
"""Of one plan, for different sizes; further ones run the plan."""
MOST_REPEATS = 4
"""Times that a recording is made again because an input that seemed to stay has moved."""


def unsafe_reason(plan: CallPlan, copied_out: bool = False, may_write: bool = False) -> str:
    """Why the plan cannot be recorded; empty when it can. copied_out: no result need share memory with an input or with
    another result, since who records it copies what the program gets; may_write: it may write to inputs, which then
    stay in place."""
    devices = {(slot.device, slot.device_index) for slot in plan.slots if not slot.is_nobodys}
    if not any(device == "cuda" for device, _ in devices):
        return "it runs on no GPU"
    if len(devices) > 1:
        return "it touches memory of several devices"
    for step in plan.steps:
        if (
            isinstance(step, SlotStep)
            and step.kind in WRITES_INPUT
            and not (may_write and plan.slots[step.slot].kind == "input")
        ):
            return "it writes to an input"
        if isinstance(step, (KernelCall, KernelGroup)):
            return "a kernel runs on the CPU"
        if isinstance(step, LaunchCall) and any(step.by_value):
            return "a kernel reads a number in CPU memory"
        if isinstance(step, (PythonCall, CCall)) and _is_unsafe(
            step.target if isinstance(step, PythonCall) else _operator(step.name)
        ):
            return f"{step.name} draws random numbers, or its result's size depends on data"
    for output in () if copied_out else plan.outputs:
        if output.kind == "view" or (
            output.kind in ("buffer", "private view") and plan.slots[output.slot].kind in ("input", "constant")
        ):
            return "a result shares memory with an input"
    return ""


def _operator(name: str) -> torch._ops.OpOverload:
    """The operator that a C function stands for, by `namespace::name` or `namespace::name.overload`."""
    stem, _, overload = name.partition(".")
    return find_operator(stem, overload or "default")


def _is_unsafe(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True
    tags = target.tags
    seeded = torch.Tag.nondeterministic_seeded in tags and not replays_draws(target)
    return seeded or torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


@dataclass(slots=True)
class Inputs:
    """What is known of a plan's tensor inputs, for one combination of sizes. They are counted among the tensors: input
    `k`.

    moving     those that were seen at two addresses, and what its owner puts there from the start: a recording reads
        copies of these
    addresses  at the last call
    fixed      those that the recording reads in place; copied: memory of the recording for the others, by position
        among all inputs
    repeats    how often a recording was dropped because one of them had moved"""

    moving: set[int] = field(default_factory=set)
    calls: int = 0
    repeats: int = 0
    addresses: list[int] = field(default_factory=list)
    fixed: list[int] = field(default_factory=list)
    copied: dict[int, torch.Tensor] = field(default_factory=dict)

    def are_in_place(self, addresses: list[int], recorded: bool) -> bool:
        """Takes in where the inputs of a call are. Whether a recording, if there is one (`recorded`), may be replayed:
        else it is stale."""
        if recorded and all(addresses[k] == self.addresses[k] for k in self.fixed):
            return True
        if self.addresses:
            self.moving.update(k for k, (new, old) in enumerate(zip(addresses, self.addresses)) if new != old)
        self.repeats += recorded
        self.addresses = addresses
        self.calls += 1
        return False

    @property
    def keep_moving(self) -> bool:
        return self.repeats > MOST_REPEATS

    @property
    def may_be_recorded(self) -> bool:
        return self.calls > WARM_UP and not self.keep_moving

    def settle(self, tensors: Sequence[int], inputs: Sequence[Any]) -> list[Any] | None:
        """The inputs that a recording is made with: copies of those that move. None where the elements of one of these
        share memory. tensors: positions of the tensors among the inputs."""
        mine = list(inputs)
        self.copied = {}
        for k in sorted(self.moving):
            copy = like(inputs[tensors[k]])
            if copy is None:
                return None
            self.copied[tensors[k]] = mine[tensors[k]] = copy
        self.fixed = [k for k in range(len(tensors)) if k not in self.moving]
        self.copy_in(inputs)
        return mine

    def copy_in(self, inputs: Sequence[Any]) -> None:
        """Gives the recording this call's values of what moves, in one batch."""
        if self.copied:
            torch._foreach_copy_(list(self.copied.values()), [inputs[position] for position in self.copied])


def sizes_of(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What a recording is made for, where sizes vary."""
    return tuple(tuple(item.shape) if isinstance(item, torch.Tensor) else item for item in inputs)


@dataclass(slots=True)
class _Recording:
    inputs: Inputs = field(default_factory=Inputs)
    graph: Any = None
    results: Any = ()

    def drop(self) -> None:
        self.graph, self.results, self.inputs.copied = None, (), {}


@dataclass(slots=True)
class _Pool:
    """Memory that all recordings of one GPU share: they run one after the other. It outlives them, since PyTorch
    forgets an unused pool."""

    memory: torch.cuda.MemPool
    stream: torch.cuda.Stream
    last: torch.cuda.Stream | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)


_pools: dict[int, _Pool] = {}


def _pool(index: int) -> _Pool:
    found = _pools.get(index)
    if found is None:
        with torch.cuda.device(index):
            found = _pools[index] = _Pool(torch.cuda.MemPool(), torch.cuda.Stream(index))
    return found


@dataclass(frozen=True, slots=True)
class Loaded:
    """A native plan, as it is recorded.

    plan       runs the whole call
    call_plan  of what a recording holds; on_gpu: the native plan of that
    host       runs the rest, the steps in the CPU's memory, if there are any (see host_steps.py)"""

    plan: Any
    call_plan: CallPlan
    on_gpu: Callable[..., Any]
    host: Callable[..., tuple[Any, ...]] | None = None


class Recorder:
    """A plan that is replayed from a CUDA graph where that is possible. reason: why it is not, as far as is known."""

    def __init__(self, loaded: Loaded, tell: Callable[[str], None]) -> None:
        self.plan, self.on_gpu, self.host = loaded.plan, loaded.on_gpu, loaded.host
        call_plan = loaded.call_plan
        self.tell = tell
        self.dynamic = bool(call_plan.symbols)
        self.tensors = [position for position, kind in enumerate(call_plan.inputs) if kind == "t"]
        self.index = max((slot.device_index for slot in call_plan.slots if slot.device == "cuda"), default=0)
        self.recordings: dict[Any, _Recording] = {}
        self.reason = unsafe_reason(call_plan)
        if self.reason:
            tell(f"no CUDA graph: {self.reason}")

    def __call__(self, *inputs: Any) -> Any:
        if self.reason or torch.cuda.is_current_stream_capturing():
            return self.plan(*inputs)
        key = sizes_of(inputs) if self.dynamic else None
        recording = self.recordings.get(key)
        if recording is None:
            if len(self.recordings) >= MOST_RECORDINGS:
                return self.plan(*inputs)
            recording = self.recordings[key] = _Recording()
        recorded = recording.graph is not None
        if recording.inputs.are_in_place([inputs[position].data_ptr() for position in self.tensors], recorded):
            return self._replay(recording, inputs)
        if recorded:
            recording.drop()
            if recording.inputs.keep_moving:
                self.tell("no CUDA graph: its inputs keep moving")
        return self._record(recording, inputs) if recording.inputs.may_be_recorded else self.plan(*inputs)

    def _record(self, recording: _Recording, inputs: tuple[Any, ...]) -> Any:
        pool = _pool(self.index)
        with pool.lock, torch.no_grad(), torch.cuda.device(self.index):
            try:
                mine = recording.inputs.settle(self.tensors, inputs)
                if mine is None:
                    return self._refuse("an input's elements share memory", recording, inputs)
                recording.graph, recording.results = record(self.index, pool.memory, lambda: self.on_gpu(*mine))
            # a library that cannot be recorded says so in many ways; the plan itself is right
            except Exception as error:
                if not memory_was_short(error):
                    return self._refuse(f"recording failed: {error}", recording, inputs)
                forget(self.recordings)
                return self.plan(*inputs)
        return self._replay(recording, inputs)

    def _refuse(self, reason: str, recording: _Recording, inputs: tuple[Any, ...]) -> Any:
        """Runs the plan, from now on always."""
        self.reason = reason
        self.tell(f"no CUDA graph: {reason}")
        recording.drop()
        return self.plan(*inputs)

    def _replay(self, recording: _Recording, inputs: tuple[Any, ...]) -> Any:
        host = None if self.host is None else self.host(*inputs)
        pool = _pool(self.index)
        with pool.lock, torch.no_grad(), torch.cuda.device(self.index):
            stream = torch.cuda.current_stream()
            if pool.last is not None and pool.last != stream:
                stream.wait_stream(pool.last)
            pool.last = stream
            recording.inputs.copy_in(inputs)
            recording.graph.replay()
            results = recording.results
            if isinstance(results, torch.Tensor):
                return copies_of((results,))[0]
            return together(copies_of(results), host)


def record(index: int, memory: torch.cuda.MemPool, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """(the graph of the work that `run` gives GPU `index`, what `run` returned, whose tensors lie in `memory`). Raises
    what `run` and the recording raise, with the GPU as it was before."""
    with torch.cuda.device(index):
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        torch.cuda.synchronize(index)
        try:
            with torch.cuda.graph(
                graph, pool=cast(Any, memory.id), stream=_pool(index).stream, capture_error_mode="thread_local"
            ):
                results = run()
        except Exception:
            _recover(index, stream)
            raise
    return graph, results


def _recover(index: int, stream: torch.cuda.Stream) -> None:
    """After a recording that failed, PyTorch leaves its stream current, and its random numbers in the state of a
    recording."""
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state().graphsafe_get_state())
    torch.cuda.synchronize(index)


def like(tensor: torch.Tensor) -> torch.Tensor | None:
    """Memory laid out as `tensor`; None where its elements overlap."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride())):
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def forget(recordings: dict[Any, Any]) -> None:
    """Gives back what was recorded. It is recorded anew after as many calls as at first."""
    for one in recordings.values():
        one.drop()
    recordings.clear()


def copies_of(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values in memory of their own, copied in one batch."""
    made = [like(value) if isinstance(value, torch.Tensor) else value for value in values]
    pairs = [(new, old) for new, old in zip(made, values) if isinstance(new, torch.Tensor)]
    if pairs:
        torch._foreach_copy_([new for new, _ in pairs], [old for _, old in pairs])
    return tuple(
        _overlapping(old) if new is None and isinstance(old, torch.Tensor) else new for new, old in zip(made, values)
    )


def _overlapping(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose elements share memory as those of `tensor` do."""
    shape, stride = tensor.shape, tensor.stride()
    span = 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if tensor.numel() else 0
    memory = tensor.as_strided((span,), (1,)).clone().untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, 0, shape, stride)
