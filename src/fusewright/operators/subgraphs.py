"""Operators whose arguments are graphs: a choice between two, and loops, with their gradients.

Takes functional ATen subgraphs; gives a key under which the operators below find them when a compiled graph runs. A
gradient runs the forward again, step by step, and differentiates each step. Always holds: the key is made of what the
subgraphs compute, so that equal keys mean equal results in any process; a subgraph is given tensors laid out as its
placeholders promise, and results are laid out as the capture promised and share no memory with the inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.sizes.tensor_type import TensorType

Tensors = Sequence[torch.Tensor]
Steps = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Body:
    """A graph over (sizes..., tensors...), and the strides of the tensors that it takes (None where they depend on
    sizes)."""

    run: Callable[..., tuple[torch.Tensor, ...]]
    strides: tuple[Steps, ...]

    def __call__(self, sizes: Sequence[int], tensors: Tensors) -> tuple[torch.Tensor, ...]:
        return self.run(*sizes, *map(_with_strides, tensors, self.strides))


@dataclass(frozen=True, slots=True)
class Program:
    """Branches (true, false); a loop's (condition, body) or (body,). With a gradient of the body last where an operator
    ends in `_backward`. strides: those of the operator's results."""

    bodies: tuple[Body, ...]
    strides: tuple[Steps, ...]


_programs: dict[str, Program] = {}

_LIBRARY = torch.library.Library("fusewright", "DEF")
_LOOP = "str key, SymInt[] sizes, Tensor[] carried, "
_SCHEMAS = {
    "choose": "str key, Tensor predicate, SymInt[] sizes, Tensor[] inputs, Tensor? state=None",
    "repeat": f"{_LOOP}Tensor[] inputs",
    "repeat_backward": f"{_LOOP}Tensor[] inputs, Tensor[] tangents, Tensor? state",
    "scan": f"{_LOOP}Tensor[] rows, Tensor[] inputs",
    "scan_backward": f"{_LOOP}Tensor[] rows, Tensor[] inputs, Tensor[] tangents, Tensor? state",
}
"""Each is there twice: as `drawing`, its subgraphs draw random numbers."""


def _steps(kind: object) -> Steps:
    if not isinstance(kind, TensorType) or not all(isinstance(step, int) for step in kind.stride):
        return None
    return tuple(kind.stride)  # type: ignore[arg-type]


def register(graphs: Sequence[torch.fx.Graph], results: Sequence[TensorType]) -> str:
    """Enters subgraphs, as `Program` has them; gives their key. A subgraph's placeholders are sizes, then tensors."""
    texts = [str(part) for part in graphs]
    types = [str([node.meta.get("type") for node in part.nodes]) for part in graphs]
    key = hashlib.sha256("\0".join([*texts, *types]).encode()).hexdigest()[:24]
    if key not in _programs:
        bodies = []
        for graph in graphs:
            kinds = [node.meta.get("type") for node in graph.find_nodes(op="placeholder")]
            takes = tuple(_steps(kind) for kind in kinds if isinstance(kind, TensorType))
            bodies.append(Body(torch.fx.GraphModule(torch.nn.Module(), graph).forward, takes))  # type: ignore[arg-type]
        _programs[key] = Program(tuple(bodies), tuple(map(_steps, results)))
    return key


def _choose(
    key: str, predicate: torch.Tensor, sizes: list[int], inputs: list[torch.Tensor], state: torch.Tensor | None = None
) -> list[torch.Tensor]:
    program = _programs[key]
    with _drawing_from(state):
        # Tensors on meta, of which types are asked for, hold no predicate; the bodies' results are of the same types.
        outputs = program.bodies[0 if predicate.is_meta or predicate else 1](sizes, inputs)
    return _laid_out(outputs, program.strides, inputs)


def _goes_on(condition: torch.Tensor) -> bool:
    """Not on meta: what a loop carries keeps its types."""
    return not condition.is_meta and bool(condition)


def _repeat(key: str, sizes: list[int], carried: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    program = _programs[key]
    values: Tensors = carried
    while _goes_on(program.bodies[0](sizes, (*values, *inputs))[0]):
        values = program.bodies[1](sizes, (*values, *inputs))
    return _laid_out(values, program.strides, [*carried, *inputs])


def _repeat_backward(
    key: str,
    sizes: list[int],
    carried: list[torch.Tensor],
    inputs: list[torch.Tensor],
    tangents: list[torch.Tensor],
    state: torch.Tensor | None,
) -> list[torch.Tensor]:
    program = _programs[key]
    condition, body, gradient = program.bodies
    states: list[torch.Tensor] = []
    taken: list[Tensors] = []
    with _drawing_from(state):
        values: Tensors = carried
        while _goes_on(condition(sizes, (*values, *inputs))[0]):
            taken.append(values)
            states += [] if state is None else [torch.get_rng_state()]
            values = body(sizes, (*values, *inputs))
        back = _Backwards(gradient, sizes, inputs, tangents)
        for place in reversed(range(len(taken))):
            back.step(taken[place], (), (), states[place] if states else None)
    return _laid_out(back.gradients(program.strides), program.strides, [*carried, *inputs, *tangents])


def _scan(
    key: str, sizes: list[int], carried: list[torch.Tensor], rows: list[torch.Tensor], inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    program = _programs[key]
    values: Tensors = carried
    given: list[Tensors] = []
    for place in range(len(rows[0])):
        found = program.bodies[0](sizes, (*values, *(one[place] for one in rows), *inputs))
        values = found[: len(carried)]
        given.append(found[len(carried) :])
    stacked = [torch.stack(column) for column in zip(*given, strict=True)]
    return _laid_out((*values, *stacked), program.strides, [*carried, *rows, *inputs])


def _scan_backward(
    key: str,
    sizes: list[int],
    carried: list[torch.Tensor],
    rows: list[torch.Tensor],
    inputs: list[torch.Tensor],
    tangents: list[torch.Tensor],
    state: torch.Tensor | None,
) -> list[torch.Tensor]:
    program = _programs[key]
    body, gradient = program.bodies
    places = range(len(rows[0]))
    states: list[torch.Tensor] = []
    taken: list[Tensors] = []
    with _drawing_from(state):
        values: Tensors = carried
        for place in places:
            taken.append(values)
            states += [] if state is None else [torch.get_rng_state()]
            values = body(sizes, (*values, *(one[place] for one in rows), *inputs))[: len(carried)]
        back = _Backwards(gradient, sizes, inputs, tangents[: sum(one.is_floating_point() for one in carried)])
        for place in reversed(places):
            of_rows = [one[place] for one in tangents[len(back.tangents) :]]
            back.step(taken[place], [one[place] for one in rows], of_rows, states[place] if states else None)
    return _laid_out(back.gradients(program.strides), program.strides, [*carried, *rows, *inputs, *tangents])


class _Backwards:
    """The gradients of a loop, from its last step to its first: those of what it carries are handed on, those of its
    rows collected, those of its inputs added up. A body's gradient gives the three in this order."""

    def __init__(self, body: Body, sizes: Sequence[int], inputs: Tensors, tangents: Tensors) -> None:
        self.body, self.sizes, self.inputs, self.tangents = body, sizes, inputs, tangents
        self.rows: list[list[torch.Tensor]] = []
        self.sums: list[torch.Tensor] = []
        self.steps = 0

    def step(self, carried: Tensors, rows: Tensors, of_rows: Tensors, state: torch.Tensor | None) -> None:
        if state is not None:
            torch.set_rng_state(state)
        found = self.body(self.sizes, (*carried, *rows, *self.inputs, *self.tangents, *of_rows))
        count = len(self.tangents)
        floats = sum(one.is_floating_point() for one in rows)
        self.tangents, self.steps = found[:count], self.steps + 1
        self.rows.append(list(found[count : count + floats]))
        sums = found[count + floats :]
        self.sums = [one + other for one, other in zip(self.sums, sums)] if self.sums else list(sums)

    def gradients(self, strides: Sequence[Steps]) -> list[torch.Tensor]:
        """All of them; `strides` has an entry for each."""
        stacked = [torch.stack(column[::-1]) for column in zip(*self.rows)]
        sums = self.sums
        if not self.steps:  # inputs with a gradient come first
            sums = [torch.zeros_like(one) for one in self.inputs[: len(strides) - len(self.tangents)]]
        return [*self.tangents, *stacked, *sums]


@contextmanager
def _drawing_from(state: torch.Tensor | None) -> Iterator[None]:
    """Draws random numbers once more, from where the forward began (`generator_state`)."""
    if state is None:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _with_strides(tensor: torch.Tensor, wanted: Steps) -> torch.Tensor:
    if wanted is None or tensor.stride() == wanted:
        return tensor
    return tensor.new_empty_strided(tensor.shape, wanted).copy_(tensor)


def _laid_out(outputs: Tensors, strides: Sequence[Steps], inputs: Tensors) -> list[torch.Tensor]:
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    made: list[torch.Tensor] = []
    for output, wanted in zip(outputs, strides, strict=True):
        output = output.resolve_conj().resolve_neg()
        place = output.untyped_storage().data_ptr()
        if place in taken or (wanted is not None and output.stride() != wanted):
            fresh = torch.empty_like(output) if wanted is None else output.new_empty_strided(output.shape, wanted)
            output = fresh.copy_(output)
        taken.add(output.untyped_storage().data_ptr())
        made.append(output)
    return made


def _generator_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state()


for _name, _arguments in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}({_arguments}) -> Tensor[]")
    _LIBRARY.define(f"{_name}.drawing({_arguments}) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.define("generator_state(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
for _name, _run in {
    "choose": _choose, "repeat": _repeat, "repeat_backward": _repeat_backward, "scan": _scan,
    "scan_backward": _scan_backward,
}.items():  # fmt: skip
    for _overload in (_name, f"{_name}.drawing"):
        _LIBRARY.impl(_overload, _run, "CompositeImplicitAutograd")
_LIBRARY.impl("generator_state", _generator_state, "CompositeImplicitAutograd")
CHOOSE, REPEAT, SCAN = torch.ops.fusewright.choose, torch.ops.fusewright.repeat, torch.ops.fusewright.scan
REPEAT_BACKWARD, SCAN_BACKWARD = torch.ops.fusewright.repeat_backward, torch.ops.fusewright.scan_backward
GENERATOR_STATE = torch.ops.fusewright.generator_state.default
