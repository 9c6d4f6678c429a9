"""Random generators of the program's own, whose states are tensors of the graph.

Takes a `torch.Generator` on the CPU; gives its state, and what is drawn from it. Always holds: the generator itself is
not touched: its state is an input, and the state after the last draw is written back by `finish`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.effects import DeferredCall
from fusewright.capture.guards.sources import GeneratorState
from fusewright.operators import generator_states as states

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Generator = torch.Generator


def is_own_generator(value: Any) -> bool:
    """A CALL guard's callable: a generator on the CPU other than PyTorch's."""
    return type(value) is Generator and value is not torch.default_generator and value.device.type == "cpu"


def state_of(world: World, generator: Generator) -> Any:
    """The state of a generator of the program's, as it is now."""
    known = world.generators.get(id(generator))
    if known is not None:
        return known[1]
    record = world.outside(generator)
    if not is_own_generator(generator):
        raise GraphBreak("random-state", "a generator of a GPU")
    if record is None:
        raise GraphBreak("random-state", "a generator that is made in another way than by torch.Generator()")
    world.guard("CALL", record.source, is_own_generator)
    traced = world.recorder.input(generator.get_state(), "generator_state")
    world.input_sources.append(GeneratorState(record.source))
    world.generators[id(generator)] = (generator, traced, None)
    return traced


def set_state(world: World, generator: Generator, state: Any) -> None:
    """Notes the state that a generator of the program's has from now on."""
    if id(generator) not in world.generators:
        state_of(world, generator)
    _, _, written = world.generators[id(generator)]
    if world.outside(generator) is not None:
        if written is None:
            written = DeferredCall(Generator.set_state, (generator, state), {}, changes="a torch.Generator")
            world.effects.calls.append(written)
        written.args = (generator, state)
    world.generators[id(generator)] = (generator, state, written)


def is_own(generator: Generator) -> bool:
    """Whether a generator is PyTorch's own, which operators draw from when they are given none."""
    return generator is torch.default_generator


def drawing(world: World, fn: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """A call that is given a generator: PyTorch's own stands for it meanwhile."""
    (generator,) = {id(one): one for one in (*args, *kwargs.values()) if isinstance(one, Generator)}.values()
    args = tuple(None if one is generator else one for one in args)
    kwargs = {name: None if one is generator else one for name, one in kwargs.items()}
    given = next((one for one in args if isinstance(one, torch.Tensor)), None)
    device = kwargs.get("device") or (torch.get_default_device() if given is None else given.device)
    if torch.device(device).type != generator.device.type:
        raise GraphBreak("operator-failed", f"a generator of {generator.device} for numbers on {device}")
    if is_own(generator):
        world.guard_identity(generator)
        return world.torch_call(fn, args, kwargs)
    kept = world.torch_call(states.BEGIN, (state_of(world, generator),), {})
    own, world.recorder.draws = world.recorder.draws, None  # kernels draw from PyTorch's generator
    try:
        made = world.torch_call(fn, args, kwargs)
    finally:
        world.recorder.draws = own
    set_state(world, generator, world.torch_call(states.END, (kept,), {}))
    return made
