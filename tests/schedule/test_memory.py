"""The arena: lifetimes never overlap in memory, dying inputs are reused in place, library results are freed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fusewright.schedule import ScheduleOptions, memory
from fusewright.schedule.memory import Lifetime
from fusewright.schedule.plan import Plan
from fusewright.schedule.verify import PlanError, verify
from fusewright.sizes.expressions import symbol
from tests.schedule import programs as p
from tests.schedule.programs import Builder
from tests.schedule.reference import schedule

SIGMOID = torch.ops.aten.sigmoid.default


def chain(length: int, shape: tuple, placement: str) -> Plan:  # type: ignore[type-arg]
    """extern, pointwise, extern, pointwise, ... each reading the one before."""
    b = Builder()
    x = b.input(*shape)
    if not all(isinstance(n, int) for n in shape):
        b.program.size_symbols = {shape[0]: (0, 0)}
    for k in range(length):
        x = b.pointwise(
            f"add_{k}", lambda v: p.add(v, 1.0), b.extern("sigmoid", SIGMOID, x, shape=shape, placement=placement)
        )
    return schedule(b.done(x))


def test_a_chain_needs_two_blocks_whatever_its_length() -> None:
    size = 64 * 32 * 4
    for length in (3, 8):
        plan = chain(length, (64, 32), "out")
        verify(plan)
        assert plan.arena_size == 2 * size  # the pointwise kernels work in place
        pairs = [pair for kernel in plan.kernels.values() for pair in kernel.inplace]
        assert len(pairs) == length and len(plan.takes_over) == 1  # the output is the memory of the last call


def test_symbolic_sizes_use_slots_again() -> None:
    batch = symbol("s0", 2)
    plan = chain(6, (batch, 32), "out")
    verify(plan)
    slots = {place.offset for place in plan.placements.values()}
    assert len(slots) == 2


def test_returned_results_have_a_last_use_and_no_place() -> None:
    plan = chain(3, (64, 32), "returned")
    verify(plan)
    returned = [step.extern.outputs[0] for step in plan.steps if hasattr(step, "extern")]
    assert list(plan.last_use) == returned and not set(returned) & set(plan.placements)
    assert list(plan.last_use.values()) == [1, 3, 5]


def test_memory_of_their_own_is_taken_over_in_place() -> None:
    b = Builder()
    x = b.input(64, 32)
    for k in range(3):
        x = b.pointwise(
            f"add_{k}", lambda v: p.add(v, 1.0), b.extern("sigmoid", SIGMOID, x, shape=(64, 32), placement="out")
        )
    program = b.done(b.extern("sigmoid", SIGMOID, x, shape=(64, 32), placement="out"))
    plan = schedule(program, ScheduleOptions(own_bytes=4096))
    verify(plan)
    assert not plan.placements and len(plan.takes_over) == 3  # each sum lies where its sigmoid lay
    pairs = {(read, written) for kernel in plan.kernels.values() for read, written in kernel.inplace}
    assert pairs == {(read, written) for written, read in plan.takes_over.items()}
    assert not schedule(program, ScheduleOptions(own_bytes=1 << 20)).takes_over


def ending(placement: str, *shape: int, shapes: int = 1, device: str = "cpu") -> Plan:
    """A library call whose result a kernel reads last and makes the outputs of."""
    b = Builder()
    x = b.extern("sigmoid", SIGMOID, b.input(64, 256), shape=(64, 256), placement=placement)
    made = [b.pointwise(f"add_{k}", lambda v: p.add(v, 1.0), x.reshape(*shape)) for k in range(shapes)]
    program = b.done(*made)
    for name, buffer in program.buffers.items():
        program.buffers[name] = replace(buffer, device=torch.device(device))
    return schedule(program)


def test_an_output_takes_over_memory() -> None:
    for device in ("cpu", "cuda:0"):
        plan = ending("out", 64, 256, device=device)
        verify(plan)
        assert list(plan.takes_over) == [plan.outputs[0].buffer] and not plan.placements
        plan = ending("out", 128, 128, device=device)  # the user gets another tensor on that memory
        verify(plan)
        assert len(plan.takes_over) == 1
    assert not ending("returned", 64, 256).takes_over  # nobody says that this memory is the call's own


def test_one_of_several_outputs_takes_over_memory() -> None:
    plan = ending("out", 64, 256, shapes=2)
    verify(plan)
    assert len(plan.takes_over) == 1
    # A block of a GPU may hold an element twice: nothing else is made of what is overwritten.
    assert not ending("out", 64, 256, shapes=2, device="cuda:0").takes_over


def test_an_output_and_a_view_of_it_have_their_own_memory() -> None:
    """A view's base is the output itself, which a tensor of the temporary's shape would not be."""
    for rows, taken in ((64, 1), (128, 0)):
        b = Builder()
        x = b.extern("sigmoid", SIGMOID, b.input(64, 256), shape=(64, 256), placement="out")
        y = b.pointwise("add", lambda v: p.add(v, 1.0), x.reshape(rows, 64 * 256 // rows))
        plan = schedule(b.done(y, y.permute(1, 0)))
        verify(plan)
        assert len(plan.takes_over) == taken


def test_memory_is_not_taken_from_what_is_read_later_or_given_out() -> None:
    for later in (True, False):
        b = Builder()
        x = b.extern("sigmoid", SIGMOID, b.input(64, 256), shape=(64, 256), placement="out")
        y = b.pointwise("add", lambda v: p.add(v, 1.0), x)
        z = b.extern("sigmoid", SIGMOID, x, shape=(64, 256), placement="out") if later else x
        plan = schedule(b.done(y, z))
        verify(plan)
        kernel = next(k for k, step in enumerate(plan.steps) if hasattr(step, "kernel"))
        assert bool(plan.takes_over) == (later and kernel == len(plan.steps) - 1)


def test_verify_finds_memory_that_is_taken_too_early() -> None:
    plan = ending("out", 64, 256)
    (written,) = plan.takes_over
    plan.takes_over[written] = "t1" if plan.takes_over[written] != "t1" else "t0"
    with pytest.raises(PlanError, match="takes over"):
        verify(plan)


def test_no_reuse_in_place_where_elements_are_read_elsewhere() -> None:
    b = Builder()
    x = b.extern("sigmoid", SIGMOID, b.input(64, 64), shape=(64, 64), placement="out")
    y = b.pointwise("transpose", lambda v: p.add(v, 1.0), x.permute(1, 0))
    plan = schedule(b.done(b.extern("sigmoid", SIGMOID, y, shape=(64, 64), placement="out")))
    verify(plan)
    assert all(not kernel.inplace for kernel in plan.kernels.values())
    assert plan.arena_size == 2 * 64 * 64 * 4


def test_no_reuse_in_place_across_stages() -> None:
    """A softmax reads its row in an earlier stage than it writes it: the last stage reads it again, so sharing is not allowed."""
    b = Builder()
    x = b.extern("sigmoid", SIGMOID, b.input(64, 64), shape=(64, 64), placement="out")
    y = p.softmax(b, x)
    plan = schedule(b.done(b.extern("sigmoid", SIGMOID, y, shape=(64, 64), placement="out")))
    verify(plan)
    (kernel,) = plan.kernels.values()
    assert kernel.inplace == ()


@pytest.mark.parametrize("seed", range(20))
def test_random_lifetimes_never_overlap(seed: int) -> None:
    choose = random.Random(seed)
    lifetimes = {}
    for k in range(40):
        first = choose.randrange(50)
        lifetimes[f"b{k}"] = Lifetime(first, first + choose.randrange(10))
    sizes = {name: 64 * choose.randint(1, 20) for name in lifetimes}
    placements, arena = memory._assign(lifetimes, sizes, {})
    names = list(lifetimes)
    for k, a in enumerate(names):
        assert placements[a].offset % 64 == 0 and placements[a].offset + sizes[a] <= arena
        for b in names[k + 1 :]:
            if lifetimes[a].first <= lifetimes[b].last and lifetimes[b].first <= lifetimes[a].last:
                apart = (
                    placements[a].offset + sizes[a] <= placements[b].offset
                    or placements[b].offset + sizes[b] <= placements[a].offset
                )
                assert apart
    peak = max(sum(sizes[n] for n, life in lifetimes.items() if life.first <= t <= life.last) for t in range(60))
    assert peak <= arena <= 1.5 * peak


def test_verify_finds_an_overlap() -> None:
    plan = chain(3, (64, 32), "out")
    for name in plan.placements:
        plan.placements[name] = memory.Placement(0, plan.placements[name].size)
    with pytest.raises(PlanError, match="overlap"):
        verify(plan)


def test_the_result_of_an_in_place_call_keeps_its_memory_alive() -> None:
    """add_ returns its argument: while the result is read, nothing else may be placed there, nor run across the call."""
    b = Builder()
    x, y = b.input(64, 32), b.input(64, 32)
    first = b.pointwise("first", p.relu, x)
    before = b.pointwise("before", p.tanh, first)
    same = b.extern("add_", torch.ops.aten.add_.Tensor, first, y, shape=(64, 32))
    (call,) = [k for k, operation in enumerate(b.program.operations) if operation.name == "add_"]
    b.program.operations[call] = replace(b.program.operations[call], mutates=(first.buffer,))
    between = b.extern("sigmoid", SIGMOID, before, shape=(64, 32), placement="out")
    program = b.done(b.pointwise("last", p.add, same, between))
    plan = schedule(program)
    verify(plan)
    last_read = max(
        k
        for k, step in enumerate(plan.steps)
        if hasattr(step, "kernel") and same.buffer in plan.kernels[step.kernel].buffers
    )
    clash = [
        name
        for name, place in plan.placements.items()
        if place.offset == plan.placements[first.buffer].offset and name != first.buffer
    ]
    assert last_read == len(plan.steps) - 1 and not clash
