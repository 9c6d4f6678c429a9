"""A backward in several parts, so that gradients reach their parameters bucket by bucket and communication overlaps
with what is left.

Takes a backward graph and the bytes of a bucket; gives the graph's parts in the order in which they run. Takes the
compiled parts; gives a chain of autograd nodes, one a part: the engine accumulates the gradients of one part (and runs
the hooks of DistributedDataParallel on them) before it starts the next one. Always holds: the parts together compute
what the whole graph computes, each node once.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fusewright.autograd.recompute import elements
from fusewright.base.errors import RuntimeFallback
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.graph.nodes import ancestors
from fusewright.sizes.expressions import Expr
from fusewright.sizes.tensor_type import TensorType, symbols_in

Node = torch.fx.Node


@dataclass(slots=True)
class Part:
    """One part of a backward. The values of a backward are numbered: first its placeholders, then what parts hand on,
    in their order.

    graph      placeholders → (gradients..., values handed on...)
    reads      numbers of the values that the placeholders are
    gradients  which of the backward's outputs it computes, in order
    """

    graph: torch.fx.Graph
    reads: tuple[int, ...]
    gradients: tuple[int, ...]


def buckets(graph: torch.fx.Graph, capacity: int, first: int) -> list[list[int]]:
    """The backward's outputs (positions) by bucket, in the order in which they become ready: the first bucket holds
    about `first` bytes, later ones about `capacity`. Outputs that are no tensors belong to no bucket."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    ready = sorted((order[item], position) for position, item in enumerate(_results(graph)) if isinstance(item, Node))
    found: list[list[int]] = [[]]
    filled = 0
    for _, position in ready:
        if filled >= (first if len(found) == 1 else capacity):
            found.append([])
            filled = 0
        found[-1].append(position)
        filled += _bytes(_results(graph)[position])
    return [bucket for bucket in found if bucket]


def _results(graph: torch.fx.Graph) -> tuple[Any, ...]:
    return tuple(next(node for node in reversed(graph.nodes) if node.op == "output").args[0])  # type: ignore[arg-type]


def _bytes(node: Node) -> int:
    kind = node.meta.get("type")
    if not isinstance(kind, TensorType):
        return 0
    return elements(kind) * kind.dtype.itemsize


def parts_of(graph: torch.fx.Graph, groups: Sequence[Sequence[int]]) -> list[Part]:
    """Cuts a backward graph: part i computes the outputs `groups[i]`, and nothing that an earlier one has computed."""
    results = _results(graph)
    nodes = [node for node in graph.nodes if node.op != "output"]
    number: dict[Node, int] = {
        node: index for index, node in enumerate(node for node in nodes if node.op == "placeholder")
    }
    needed = ancestors(one for one in results if isinstance(one, Node))
    owner: dict[Node, int] = dict.fromkeys(number, -1)
    for index, group in enumerate(groups):
        pending = [results[position] for position in group]
        while pending:
            node = pending.pop()
            if node not in owner:
                owner[node] = index
                pending += node.all_input_nodes
                # only tensors are handed on: the results of an operator that has several are told apart where it runs
                pending += (user for user in node.users if user.target is operator.getitem and user in needed)
    handed = {node for node in owner for user in node.users if user in owner and owner[node] not in (-1, owner[user])}
    handed |= {
        results[position]
        for index, group in enumerate(groups)
        for position in group
        if owner[results[position]] not in (-1, index)
    }
    sizes = [node for node in nodes if node.op == "placeholder" and isinstance(node.meta.get("type"), Expr)]
    parts: list[Part] = []
    for index, group in enumerate(groups):
        inside = [node for node in nodes if owner.get(node) == index]
        wanted = [results[position] for position in group]
        reads = dict.fromkeys(
            argument for node in inside for argument in node.all_input_nodes if owner[argument] != index
        )
        reads |= dict.fromkeys(node for node in wanted if owner[node] != index)
        used = symbols_in([(node.meta.get("type"), node.args, node.kwargs) for node in (*inside, *reads)])
        reads |= dict.fromkeys(node for node in sizes if node.meta["type"] in used)
        made = torch.fx.Graph()
        values: dict[Node, Node] = {}
        for node in reads:
            values[node] = made.placeholder(node.name)
            values[node].meta = dict(node.meta)
        for node in inside:
            values[node] = made.node_copy(node, values.__getitem__)
            values[node].meta = dict(node.meta)
        on = [node for node in inside if node in handed]
        made.output(tuple(values[node] for node in (*wanted, *on)))
        parts.append(Part(made, tuple(number[node] for node in reads), tuple(group)))
        for node in on:
            number[node] = len(number)
    return parts


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """A compiled part: `run` over the values at `reads` gives the gradients at `gradients`, then the values to hand
    on."""

    run: Callable[..., tuple[Any, ...]]
    reads: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass(slots=True)
class Progress:
    """One backward under way.

    device   of the graph's outputs
    values   the values so far
    wanted   for each gradient, whether anything that it depends on has a gradient
    whole    all gradients, once they are known in another way
    replay   computes all of them in another way, told why; dropped when the last part has run
    """

    parts: tuple[CompiledPart, ...]
    device: torch.device
    values: list[Any] = field(default_factory=list)
    wanted: Sequence[bool] = ()
    whole: Sequence[Any] | None = None
    replay: Callable[[str], Sequence[Any]] | None = None

    def run(self, index: int) -> list[Any]:
        """The gradients of part `index`, None where they are not wanted."""
        part = self.parts[index]
        results = self._results(part)
        if index == len(self.parts) - 1:
            self.values, self.whole, self.replay = [], None, None
        return [gradient if self.wanted[position] else None for position, gradient in zip(part.gradients, results)]

    def _results(self, part: CompiledPart) -> Sequence[Any]:
        if self.whole is None:
            try:
                results = part.run(*(self.values[number] for number in part.reads))
            except RuntimeFallback as error:
                assert self.replay is not None
                self.whole = self.replay(str(error))
            else:
                self.values += results[len(part.gradients) :]
                return results
        return [self.whole[position] for position in part.gradients]


class _Later(torch.autograd.Function):
    """forward(ctx, progress, index, token, *inputs) → token: its backward runs part `index`, whose gradients belong to
    the inputs.

    The token (no elements) ties the parts together: its gradient arrives when the part before has run. It lies where
    the gradients do: PyTorch's engine has a thread for each device, and another one would begin this part beside the
    accumulation of the gradients before, so that their communication waited for kernels of this part, too."""

    @staticmethod
    def forward(ctx: Any, progress: Progress, index: int, token: torch.Tensor | None, *inputs: Any) -> torch.Tensor:
        ctx.progress, ctx.index, ctx.last = progress, index, token is None
        return torch.empty(0, device=progress.device)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        gradients = ctx.progress.run(ctx.index)
        gradients = [gradient if wanted else None for gradient, wanted in zip(gradients, ctx.needs_input_grad[3:])]
        return (None, None, None if ctx.last else token, *gradients)


def chain(progress: Progress, inputs: Sequence[Sequence[Any]]) -> torch.Tensor:
    """The token that the node of the first part takes as an input. inputs: for each part, the tensors that its
    gradients belong to."""
    token: torch.Tensor | None = None
    for index in range(len(progress.parts) - 1, 0, -1):
        token = _Later.apply(progress, index, token, *inputs[index])
    assert token is not None
    return token


def bucket_bytes() -> tuple[int, int] | None:
    """(first bucket, later buckets) in bytes while the forward of a DistributedDataParallel module runs; None outside
    of one."""
    module = sys.modules.get("torch.nn.parallel.distributed")
    active = None if module is None else module.DistributedDataParallel._get_active_ddp_module()
    if active is None:
        return None
    capacity = int(active.bucket_bytes_cap)
    return min(capacity, int(torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)), capacity
