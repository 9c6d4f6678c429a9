"""Operators whose arguments are graphs: a choice between two, and a loop over two.

Takes functional ATen subgraphs; gives a key under which the operators `fusewright::choose` and `fusewright::repeat`
find them when a compiled graph runs. Always holds: the key is made of what the subgraphs compute, so that equal keys
mean equal results in any process; results are laid out as the capture promised and share no memory with the inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
import torch.fx

from fusewright.base.records import dataclass
from fusewright.sizes.tensor_type import TensorType

Run = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two graphs over (sizes..., tensors...): branches (true, false), or a loop's (condition, body); and the results'
    dtypes and strides, None where a stride depends on sizes."""

    first: Run
    second: Run
    strides: tuple[tuple[int, ...] | None, ...]


_pairs: dict[str, Pair] = {}

_LIBRARY = torch.library.Library("fusewright", "DEF")
_LIBRARY.define("choose(str key, Tensor predicate, SymInt[] sizes, Tensor[] inputs) -> Tensor[]")
_LIBRARY.define("repeat(str key, SymInt[] sizes, Tensor[] carried, Tensor[] inputs) -> Tensor[]")


def register(first: torch.fx.Graph, second: torch.fx.Graph, results: Sequence[TensorType]) -> str:
    """Enters a pair of subgraphs; gives its key."""
    texts = [str(part) for part in (first, second)]
    types = [str([node.meta.get("type") for node in part.nodes]) for part in (first, second)]
    key = hashlib.sha256("\0".join([*texts, *types]).encode()).hexdigest()[:24]
    if key not in _pairs:
        strides = tuple(
            tuple(kind.stride) if all(isinstance(step, int) for step in kind.stride) else None for kind in results
        )
        runs = [torch.fx.GraphModule(torch.nn.Module(), part).forward for part in (first, second)]
        _pairs[key] = Pair(runs[0], runs[1], strides)  # type: ignore[arg-type]
    return key


def _choose(key: str, predicate: torch.Tensor, sizes: list[int], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    pair = _pairs[key]
    outputs = (pair.first if predicate else pair.second)(*sizes, *inputs)
    return _laid_out(outputs, pair.strides, inputs)


def _repeat(key: str, sizes: list[int], carried: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    pair = _pairs[key]
    values: Sequence[torch.Tensor] = carried
    while pair.first(*sizes, *values, *inputs)[0]:
        values = pair.second(*sizes, *values, *inputs)
    return _laid_out(values, pair.strides, [*carried, *inputs])


def _laid_out(
    outputs: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...] | None], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    taken = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    made: list[torch.Tensor] = []
    for output, wanted in zip(outputs, strides):
        place = output.untyped_storage().data_ptr()
        if place in taken or (wanted is not None and output.stride() != wanted):
            fresh = torch.empty_like(output) if wanted is None else output.new_empty_strided(output.shape, wanted)
            output = fresh.copy_(output)
        taken.add(output.untyped_storage().data_ptr())
        made.append(output)
    return made


_LIBRARY.impl("choose", _choose, "CompositeExplicitAutograd")
_LIBRARY.impl("repeat", _repeat, "CompositeExplicitAutograd")
CHOOSE = torch.ops.fusewright.choose.default
REPEAT = torch.ops.fusewright.repeat.default
