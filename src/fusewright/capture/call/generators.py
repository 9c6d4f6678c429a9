"""Random generators of PyTorch's: seeds, states, and draws from one that the program gives.

Takes a generator on the CPU, PyTorch's own or one of the program's; gives what is drawn from it. Always holds: of a
generator of the program's the graph has the state, which `finish` writes back; a generator of another device, and a
seed that is asked for, are graph breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.native import native
from fusewright.capture.border.values.generator import is_own, set_state, state_of
from fusewright.operators import generator_states as states

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer, World

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Generator = torch.Generator


def call_method(tracer: Tracer, name: str, generator: Generator, args: Args, kwargs: Kwargs) -> Any:
    """`generator.name(...)`"""
    world = tracer.world
    given = (*args, *kwargs.values())
    if name == "get_state" and not given:
        if is_own(generator):
            world.guard_identity(generator)
            return world.torch_call(states.GET, (), {})
        return world.torch_call(torch.clone, (state_of(world, generator),), {})
    if name == "set_state" and len(given) == 1 and isinstance(given[0], torch.Tensor):
        if is_own(generator):
            world.guard_identity(generator)
            return _changed(world, states.SET, given)
        # that the state is one is seen when it is set: PyTorch's generator takes it, and gives it back
        kept = world.torch_call(states.BEGIN, given, {})
        set_state(world, generator, world.torch_call(states.END, (kept,), {}))
        return generator
    if name == "manual_seed" and len(given) == 1 and type(given[0]) in (int, torch.SymInt):
        if is_own(generator):
            raise GraphBreak("random-state", "PyTorch's generator is seeded alone; torch.manual_seed seeds all")
        _check_seed(given[0])
        set_state(world, generator, world.torch_call(states.SEEDED, given, {}))
        return generator
    raise GraphBreak("random-state", f"Generator.{name}")


def _check_seed(seed: Any) -> None:
    if type(seed) is int and not -(2**63) <= seed < 2**63:
        raise GraphBreak("random-state", "a seed of more than 63 bits")


def _changed(world: World, operator: torch._ops.OpOverload, given: Args) -> None:
    """PyTorch's generator is seeded or set: what kernels draw themselves begins anew."""
    world.torch_call(operator, given, {})
    if world.recorder.draws is not None:
        world.recorder.draws.seeds.clear()


def _manual_seed(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch.manual_seed(seed)"""
    (seed,) = (*args, *kwargs.values())
    if type(seed) not in (int, torch.SymInt):
        raise GraphBreak("random-state", f"a seed of type {type(seed).__name__}")
    _check_seed(seed)
    _changed(tracer.world, states.SEED, (seed,))
    own = torch.default_generator
    return tracer.world.load(own, tracer.world.constant(own, "default_generator"))


def _made(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch.Generator(device="cpu")"""
    generator = native(Generator, *args, **kwargs)
    if generator.device.type != "cpu":
        raise GraphBreak("random-state", "a generator of a GPU")
    # (of the state that it begins with, eager's is another object's, and the same)
    tracer.world.generators[id(generator)] = (generator, generator.get_state(), None)
    return generator


NAMED_ROWS: dict[tuple[str, str], Callable[[Any, Args, Kwargs], Any]] = {
    ("torch.random", "manual_seed"): _manual_seed,  # the others are interpreted
}
ROWS = [(Generator, _made)]
