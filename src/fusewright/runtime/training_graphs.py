"""CUDA graphs of training: the forward and the backward of one graph, recorded as a pair and replayed as one launch
each.

Takes the two plans of a joint graph; gives `TrainingGraphs`, which the autograd function calls in their place. What the
forward saves stays in the recording's memory until the backward has read it; a *lease* says that somebody may still
read it. Results of the forward are copied out; gradients are lent where they lie, in memory that only the backward
writes, and copied out once the program was seen to keep some; parameters are read in place; what moves is copied in.
Always holds: a forward is replayed only when no lease of its recording is pending; a backward is replayed only for the
forward that was replayed last, on exactly the tensors that it saved, and while no gradient that it lent is alive: so
nothing that the program holds is ever overwritten. Everything else runs the plans themselves, and `without` counts why.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.base.signals import memory_was_short
from fusewright.codegen.call_plan_types import WRITES_INPUT, CallPlan, SlotStep
from fusewright.runtime.cudagraphs import (
    MOST_RECORDINGS,
    Inputs,
    Loaded,
    copies_of,
    forget,
    like,
    record,
    sizes_of,
    unsafe_reason,
)
from fusewright.runtime.host_steps import together

PENDING = "an earlier forward still waits for its backward"
HOOKED = "saved tensors came back from hooks as others"
DROPPED = "the recording was made again between forward and backward"
MOVING = "its inputs keep moving"
SIZES = "too many different sizes"
KEPT = "gradients of an earlier call are still there"
SHORT = "memory is short"
CAPTURING = "the program records a CUDA graph of its own"


class Machine(Protocol):
    """What records and replays work on one GPU."""

    def capturing(self) -> bool: ...

    def memory(self) -> Any:
        """Memory for recordings: of a forward and what it saves, or of a backward and its gradients."""

    def record(self, memory: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
        """(recording, what `run` gave). Raises what recording raises, with the GPU as it was before."""

    def replay(self, recording: Any) -> None: ...

    def stream(self) -> Any:
        """The stream that work goes to now."""

    def wait(self, stream: Any, other: Any) -> None:
        """Lets `stream` wait for all work given to `other`."""


class Gpu:
    """The real one."""

    def __init__(self, index: int) -> None:
        self.index = index

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def memory(self) -> Any:
        with torch.cuda.device(self.index):
            return torch.cuda.MemPool()

    def record(self, memory: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
        return record(self.index, memory, run)

    def replay(self, recording: Any) -> None:
        with torch.cuda.device(self.index):
            recording.replay()

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.index)

    def wait(self, stream: Any, other: Any) -> None:
        stream.wait_stream(other)


@dataclass(frozen=True, slots=True)
class Half:
    """A native plan, forward or backward. draws: give its last inputs, anew at each call."""

    loaded: Loaded
    draws: tuple[Callable[[], torch.Tensor], ...] = ()

    @property
    def call_plan(self) -> CallPlan:
        return self.loaded.call_plan

    def __call__(self, *inputs: Any) -> Any:
        return self.loaded.plan(*self.drawn(inputs))

    def on_host(self, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """What a replay leaves out: the results of the steps in the CPU's memory, if there are any. It comes before
        the replay, since it may refuse the call."""
        return None if self.loaded.host is None else self.loaded.host(*inputs)

    def drawn(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The plan's inputs."""
        return (*inputs, *(draw() for draw in self.draws)) if self.draws else inputs

    def consume(self, inputs: list[Any]) -> Any:
        """The results; empties the list, so that each tensor may be freed after its last reader."""
        return self.loaded.plan.consume(inputs)


class Lease:
    """One replayed forward whose saved values the backward may still read: it lives as long as the gradient function.

    done       the backward has run and keeps nothing: the recording may be replayed
    addresses  of the values saved, as the backward must find them"""

    __slots__ = ("__weakref__", "addresses", "done", "recording")

    def __init__(self, recording: _Recording) -> None:
        self.recording = recording
        self.done = False
        self.addresses: list[int] = []


class Lent:
    """The memory of a gradient that the program gets as it is. uses: of the storage, while nobody has it."""

    __slots__ = ("storage", "uses")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.uses = self.count()

    def count(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata)  # type: ignore[attr-defined, no-any-return]

    def is_free(self) -> bool:
        return self.count() <= self.uses


@dataclass(slots=True)
class _Recording:
    """What is known for one combination of sizes. `graph`: of the forward; `back`: of the backward, once it has been
    recorded."""

    inputs: Inputs
    memory: Any = None
    graph: Any = None
    results: tuple[Any, ...] = ()
    back: Any = None
    tangents: list[torch.Tensor] = field(default_factory=list)
    gradients: tuple[Any, ...] = ()
    lent: dict[int, Lent] = field(default_factory=dict)  # gradients that are not copied out, by place
    copies: bool = False  # the program keeps gradients, which are copied out from now on
    lease: Any = None  # a weak reference to the last one
    last: Any = None  # the stream of the last replay

    def drop(self) -> None:
        self.graph = self.memory = self.last = None
        self.results, self.inputs.copied = (), {}
        self.drop_backward()

    def drop_backward(self) -> None:
        """Gradients that were lent stay what they are: they hold their memory."""
        self.back = None
        self.gradients, self.lent, self.tangents = (), {}, []

    def pending(self) -> bool:
        lease = None if self.lease is None else self.lease()
        return lease is not None and not lease.done


class TrainingGraphs:
    """The pair of plans, replayed from CUDA graphs where that is possible.

    saved    for each saved value, in the backward's order: n >= 0, input n of the forward; ~n, its result n (see
        autograd.joint.Split)
    outputs  how many of the forward's results are the program's; the others are only saved
    reason   why nothing is recorded, as far as is known; without: how often each reason kept a call from being
        replayed"""

    def __init__(
        self,
        forward: Half,
        backward: Half,
        saved: Sequence[int],
        outputs: int,
        tell: Callable[[str], None],
        machine: Machine,
    ) -> None:
        self.halves = {"forward": forward, "backward": backward}
        self.saved = tuple(saved)
        self.outputs = outputs
        self.tell = tell
        self.machine = machine
        self.dynamic = bool(forward.call_plan.symbols) or bool(backward.call_plan.symbols)
        self.tensors = [position for position, kind in enumerate(forward.call_plan.inputs) if kind == "t"]
        drawn = len(forward.call_plan.inputs) - len(forward.draws)
        # they are new at every call
        self.drawn = frozenset(k for k, position in enumerate(self.tensors) if position >= drawn)
        steps = [step for step in forward.call_plan.steps if isinstance(step, SlotStep) and step.kind in WRITES_INPUT]
        places = [(step.kind, forward.call_plan.slots[step.slot].where) for step in steps]
        self.written = sorted({place for _, place in places})
        self.counted = [place for kind, place in places if kind == "mutate"]  # once for each write
        self.recordings: dict[Any, _Recording] = {}
        self.without: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.warm = 0
        self.reason = ""
        for direction, half in self.halves.items():
            if found := unsafe_reason(half.call_plan, copied_out=True, may_write=direction == "forward"):
                self.refuse(f"the {direction}: {found}")
                break

    def refuse(self, reason: str) -> None:
        """From now on nothing is recorded or replayed."""
        self.reason = reason
        for recording in self.recordings.values():
            recording.drop()
        self.tell(f"no CUDA graph: {reason}")

    def _tried(self, record: Callable[[_Recording, Any], bool], recording: _Recording, given: Any) -> bool:
        """Whether that is recorded now. Where memory is short, what was recorded is given back."""
        try:
            return record(recording, given)
        except Exception as error:
            if not memory_was_short(error):
                raise
            forget(self.recordings)
            self._skip(SHORT)
            return False

    def _skip(self, reason: str) -> None:
        """Counts a call that is not replayed, and says why the first time."""
        self.without[reason] += 1
        if self.without[reason] == 1:
            self.tell(f"a call in training runs without its CUDA graph: {reason}")

    # --- forward -----------------------------------------------------------------------------------------------------

    def forward(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Lease | None]:
        """The forward's results, and a lease when its backward may be replayed."""
        half = self.halves["forward"]
        inputs = half.drawn(inputs)
        with self.lock:
            recording = None if self.reason else self._ready(inputs)
            if recording is not None:
                return self._replay_forward(recording, inputs)
        return half.loaded.plan(*inputs), None

    def _ready(self, inputs: tuple[Any, ...]) -> _Recording | None:
        """The recording that this call can be replayed from, made now if it is time."""
        if self.machine.capturing():
            self._skip(CAPTURING)
            return None
        key = sizes_of(inputs) if self.dynamic else None
        recording = self.recordings.get(key)
        if recording is None:
            if len(self.recordings) >= MOST_RECORDINGS:
                self._skip(SIZES)
                return None
            recording = self.recordings[key] = _Recording(Inputs(set(self.drawn)))
        if recording.inputs.keep_moving:
            self._skip(MOVING)
            return None
        if recording.pending():
            self._skip(PENDING)
            return None
        recorded = recording.graph is not None
        if recording.inputs.are_in_place([inputs[position].data_ptr() for position in self.tensors], recorded):
            return recording
        if recorded:
            recording.drop()
        ready = recording.inputs.may_be_recorded and self._tried(self._record_forward, recording, inputs)
        return recording if ready else None

    def _record_forward(self, recording: _Recording, inputs: tuple[Any, ...]) -> bool:
        if any(self.tensors[k] in self.written for k in recording.inputs.moving):
            self.refuse("an input that it writes to does not stay in place")
            return False
        with torch.no_grad():
            mine = recording.inputs.settle(self.tensors, inputs)
            if mine is None:
                self.refuse("an input's elements share memory")
                return False
            recording.memory = self.machine.memory()
            # the plan counts the writes that it is recorded with, which are made by each replay
            with torch.autograd._unsafe_preserve_version_counter(tuple(inputs[place] for place in self.counted)):
                found = self._recorded(recording.memory, "forward", mine)
        if found is None:
            return False
        recording.graph, recording.results = found
        return True

    def _recorded(self, memory: Any, direction: str, inputs: list[Any]) -> tuple[Any, tuple[Any, ...]] | None:
        run = self.halves[direction].loaded.on_gpu
        try:
            return self.machine.record(memory, lambda: run(*inputs))
        except Exception as error:  # a library that cannot be recorded says so in many ways; the plan itself is right
            if memory_was_short(error):
                raise
            self.refuse(f"recording the {direction} failed: {error}")
            return None

    def _replay_forward(self, recording: _Recording, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], Lease]:
        host = self.halves["forward"].on_host(inputs)
        with torch.no_grad():
            self._after_last(recording)
            recording.inputs.copy_in(inputs)
            self.machine.replay(recording.graph)
            if self.counted:
                torch.autograd.graph.increment_version([inputs[position] for position in self.counted])
            results = recording.results
            lease = Lease(recording)
            recording.lease = weakref.ref(lease)
            return together((*copies_of(results[: self.outputs]), *results[self.outputs :]), host), lease

    def _after_last(self, recording: _Recording) -> None:
        """This replay waits for the one before, if that went to another stream."""
        stream = self.machine.stream()
        if recording.last is not None and recording.last != stream:
            self.machine.wait(stream, recording.last)
        recording.last = stream

    def saved_by(self, lease: Lease, values: Sequence[Any]) -> None:
        """Notes what was saved for the backward, in order."""
        lease.addresses = _addresses(values)

    # --- backward ----------------------------------------------------------------------------------------------------

    def backward(self, lease: Lease | None, values: list[Any]) -> tuple[Any, ...]:
        """The gradients. `values`: what was saved, then the tangents; the list is emptied where the plan itself
        runs."""
        if lease is not None:
            with self.lock:
                recording = lease.recording
                if self._can_replay(recording, lease, values):
                    return self._replay_backward(recording, values)
        self.warm += 1
        return self.halves["backward"].consume(values)  # type: ignore[no-any-return]

    def finished(self, lease: Lease, kept: bool) -> None:
        """A backward has run; kept: the program keeps the graph, and may ask for another one."""
        if not kept:
            lease.done = True

    def _can_replay(self, recording: _Recording, lease: Lease, values: list[Any]) -> bool:
        if self.reason:
            return False
        if self.machine.capturing():
            self._skip(CAPTURING)
        elif recording.lease is None or recording.lease() is not lease or recording.graph is None:
            self._skip(DROPPED)
        elif _addresses(values[: len(self.saved)]) != lease.addresses:
            self._skip(HOOKED)
        elif recording.back is not None and not all(one.is_free() for one in recording.lent.values()):
            self._skip(KEPT)
            recording.drop_backward()
            recording.copies = True
        elif recording.back is not None:
            return True
        elif self.warm:
            return self._tried(self._record_backward, recording, values)
        return False

    def _record_backward(self, recording: _Recording, values: list[Any]) -> bool:
        saved = len(self.saved)
        mine = [self._at_home(recording, place, value) for place, value in zip(self.saved, values)]
        with torch.no_grad():
            recording.tangents = [tensor for value in values[saved:] if (tensor := like(value)) is not None]
            if len(recording.tangents) != len(values) - saved:
                self.refuse("a gradient's elements share memory")
                return False
            self._copy_tangents(recording, values)
            inputs = [*mine, *recording.tangents]
            found = self._recorded(recording.memory if recording.copies else self.machine.memory(), "backward", inputs)
        if found is None:
            return False
        recording.back, recording.gradients = found
        recording.lent = {} if recording.copies else _lendable(recording.gradients, inputs)
        return True

    def _at_home(self, recording: _Recording, place: int, value: Any) -> Any:
        """Where the recorded forward has a saved value; the value itself, if that comes from elsewhere."""
        if not isinstance(value, torch.Tensor):
            return value
        found = recording.results[~place] if place < 0 else recording.inputs.copied.get(place)
        return value if found is None else found

    def _copy_tangents(self, recording: _Recording, values: list[Any]) -> None:
        if recording.tangents:
            torch._foreach_copy_(recording.tangents, values[len(self.saved) :])

    def _replay_backward(self, recording: _Recording, values: list[Any]) -> tuple[Any, ...]:
        host = self.halves["backward"].on_host(values)
        with torch.no_grad():
            self._after_last(recording)
            self._copy_tangents(recording, values)
            self.machine.replay(recording.back)
            found: list[Any] = list(recording.gradients)
            for place in recording.lent:
                found[place] = found[place].data  # with a version of its own
            others = [place for place in range(len(found)) if place not in recording.lent]
            for place, copy in zip(others, copies_of([found[place] for place in others])):
                found[place] = copy
            return together(tuple(found), host)


def _lendable(gradients: Sequence[Any], inputs: Sequence[Any]) -> dict[int, Lent]:
    """The gradients that lie in memory of their own, by place."""
    storages = {
        place: value.untyped_storage() for place, value in enumerate(gradients) if isinstance(value, torch.Tensor)
    }
    often = Counter(storage.data_ptr() for storage in storages.values())
    often.update(value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor))
    return {place: Lent(storage) for place, storage in storages.items() if often[storage.data_ptr()] == 1}


def _addresses(values: Sequence[Any]) -> list[int]:
    return [value.data_ptr() for value in values if isinstance(value, torch.Tensor)]
