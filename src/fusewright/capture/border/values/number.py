"""Python floats and ints from outside that change from call to call: a learning rate, a step count, a loss weight.

Takes a number and its source; gives a `torch.SymFloat` or `torch.SymInt` that the compiled code reads at every call,
once the number has been seen with two values (the first capture is for the value that it met, as with sizes). Always
holds: what the program asks about such a number, and what it needs of its value, is guarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.capture.border.dynamic import from_argument, is_symbolic_throughout
from fusewright.capture.border.values.memory import Address, Storage
from fusewright.capture.border.values.tensor_number import outcome_guards
from fusewright.capture.border.values.text import Carried, TensorText
from fusewright.capture.guards import Guard
from fusewright.capture.guards.sources import Attribute, InstanceDict, Item, NumberTensor, Source
from fusewright.sizes.symfloat import OutsideFloat, float_of_input
from fusewright.sizes.symint import size_of

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World

SMALLEST, LARGEST = 2, 2**31 - 1
"""Ints below are what programs count and choose with, ints above may leave the 64 bits that native code computes in:
both are captured by value. Those below are served by the code for larger ones where that is shown to do the same
(generalise/widening.py), as with sizes."""


def _may_change(world: World, kind: type) -> bool:
    """Whether numbers of this type can be inputs. At torch level a float would be a tensor, which promotes
    otherwise."""
    return (
        kind in (int, float)
        and world.tracer.options.dynamic is not False
        and world.recorder.env is not None
        and (kind is int or world.recorder.level == "aten")
    )


def may_vary(world: World, real: int) -> bool:
    """Whether an int that has changed becomes a symbol. At torch level 0 and 1 do too: nothing there shows that the
    graph of a larger one serves them."""
    return (SMALLEST if world.recorder.level == "aten" else 0) <= real <= LARGEST


def tuple_has_changed(world: World, real: tuple[object, ...], source: Source) -> bool:
    """Whether this place has held tuples of other numbers; what the elements were is noted for each of them."""
    if not any(_may_change(world, type(element)) for element in real):
        return False
    history: Any = world.tracer.history
    code = world.tracer.function.__code__
    seen = history.setdefault((code, "tuple", source), real)
    if seen == real:
        return False
    if seen is not None and len(seen) == len(real):
        for index, element in enumerate(seen):
            if _may_change(world, type(element)):
                history.setdefault((code, "number", Item(source, index)), (element,))
    history[code, "tuple", source] = None
    return True


def has_changed(world: World, real: float | int, source: Source) -> bool:
    """Whether this place has held different numbers at different captures of this function (which is noted), or may be
    taken to: under dynamic=True, the ints that objects among the arguments hold (the length of a key-value cache)."""
    history = world.tracer.history
    if not _may_change(world, type(real)):
        return False
    code = world.tracer.function.__code__
    if is_symbolic_throughout(world.tracer) and type(real) is int and _is_attribute(source):
        if from_argument(source, world.module_sources):
            return True
    key = (code, "number", source)
    seen: Any = history.setdefault(key, (real,))  # type: ignore[arg-type]
    if seen[0] is None:
        return True
    if type(seen[0]) is type(real) and (seen[0] == real or real != real):
        return False
    history[key] = (None,)
    return True


def _is_attribute(source: Source) -> bool:
    return isinstance(source, Attribute) or (isinstance(source, Item) and isinstance(source.base, InstanceDict))


def load_float(world: World, real: float, source: Source) -> object:
    """A float: an input of the graph if it has changed before, else None."""
    known = world.numbers.get(source)
    if known is not None:
        return known[0]
    origin = OutsideFloat(source, real)
    world.recorder.has_floats = True
    held = torch.tensor(real, dtype=torch.float64, device="cpu")
    tensor = world.recorder.input(held, f"number_{len(world.numbers)}")
    world.input_sources.append(NumberTensor(source))
    value = float_of_input(world.recorder, tensor, origin)
    world.numbers[source] = (value, origin)
    world.number_stand_in(real, source, value)
    return value


def load_int(world: World, real: int, source: Source) -> object:
    """An int: a symbol, as the size of a tensor is."""
    known = world.numbers.get(source)
    if known is not None:
        return known[0]
    env = world.recorder.env
    assert env is not None
    symbol = env.create(f"n{len(env.symbols)}", real, source, 0, LARGEST)
    env.numbers.add(symbol)
    world.recorder.size_input(symbol, symbol.name)
    world.input_sources.append(source)
    value = size_of(symbol, env)
    world.guard("TYPE", source, int)
    world.numbers[source] = (value, None)
    world.number_stand_in(real, source, value)
    return value


def number_guards(world: World) -> list[Guard]:
    """The guards on floats: the type, and the value or what was asked about it; and those on tensors that hold one."""
    guards = outcome_guards(world)
    for source, (_, origin) in world.numbers.items():
        if origin is None:
            continue
        if origin.fixed:
            guards.append(Guard("EQUALS", source, origin.value, "the program needs the value of this number"))
            continue
        guards.append(Guard("TYPE", source, float, "a number that changes from call to call"))
        if origin.tests:
            guards.append(Guard("CALL", source, origin, "comparisons of this number have the same outcome"))
    return guards


def python_type(value: object) -> type | None:
    """The type that a symbolic number, or another stand-in made inside, has for the program."""
    return value.kind if type(value) is Carried else _TYPES.get(type(value))


_TYPES: dict[type, type] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
    TensorText: str,
    Address: int,
    Storage: torch.UntypedStorage,
}
