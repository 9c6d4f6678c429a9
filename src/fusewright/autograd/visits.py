"""Several outputs of one group, which may lead to different inputs.

A backward visits whatever the outputs that it starts from lead to: hooks of those inputs are called, and the graphs
behind them run; hooks of another output, which has no gradient, are not. So each output has a node of its own, and each
set of inputs that the same outputs lead to; tokens (no elements) tie them:

    output ─► _Outputs ─token─► _Inputs ─► inputs

Takes a group and a run of the forward; gives the group's outputs. Always holds: the compiled backward runs once for a
backward pass, when the gradients of all outputs that take part are there; should PyTorch's engine ask for it earlier,
it runs again for what came later.
"""

from __future__ import annotations

import weakref
from typing import Any

from fusewright.autograd.halves import FREED, Call, Group, Halves, Reach, gradients, remember
from fusewright.base.pytorch import torch


def anchor(device: torch.device | None = None) -> torch.Tensor:
    """Makes outputs that lead to no input require a gradient."""
    return torch.empty(0, device=device, requires_grad=True)


class _Pass:
    """The backward pass under way (task), and what it has brought.

    saved    the output of _Saved, whose node holds what the forward saved; None: the node of the only inputs does
    exits    the nodes of the outputs, as weak references; waiting: those of them that have not run in this pass
    given    the outputs' gradients; found: the gradients of the inputs, once they are known
    freed    which of the group's `frees` earlier passes have freed
    device   of the tokens: the engine runs a node on the stream that its gradients are made on
    """

    __slots__ = ("device", "exits", "found", "freed", "given", "group", "saved", "task", "waiting")

    def __init__(self, saved: torch.Tensor | None, group: Group, device: torch.device) -> None:
        self.saved = saved
        self.group = group
        self.device = device
        self.freed: set[int] = set()
        self.exits: list[weakref.ref[Any]] = []
        self.waiting: set[int] = set()
        self.given: list[Any] = [None] * len(group.tangents)
        self.found: list[Any] | None = None
        self.task = -1

    def arrive(self, exit: int, places: tuple[int, ...], tangents: tuple[Any, ...]) -> None:
        task = torch._C._current_graph_task_id()
        if task != self.task:
            self.task, self.given, self.found = task, [None] * len(self.given), None
            self.waiting = set(range(len(self.exits)))
        self.waiting.discard(exit)
        for place, tangent in zip(places, tangents):
            self.given[place] = tangent
            if tangent is not None:
                self.found = None

    def take(self, ctx: Any, places: tuple[int, ...]) -> list[Any]:
        """The gradients at `places` (-1: none) for the node `ctx`; each is taken once in a pass."""
        if self.found is None:
            frees = self.group.frees
            visited = {
                index for index, part in enumerate(frees) if any(self.given[place] is not None for place in part)
            }
            if visited & self.freed:
                raise RuntimeError(FREED)
            last = not any(map(self._comes, self.waiting))
            if last and not torch._C._autograd._get_current_graph_task_keep_graph():
                self.freed |= visited
            holder = ctx if self.saved is None else self.saved.grad_fn
            self.found = list(gradients(holder, self.given, last and len(self.freed) == len(frees)))
            if last:
                self.given = [None if tangent is None else True for tangent in self.given]
        taken = []
        for place in places:
            taken.append(self.found[place] if self.group.gives(place, self.given) else None)
            if place >= 0:
                self.found[place] = None  # whoever accumulates it may keep it as it is
        return taken

    def _comes(self, exit: int) -> bool:
        node = self.exits[exit]()
        return node is not None and torch._C._will_engine_execute_node(node)


class _Saved(torch.autograd.Function):
    """Holds what the forward saved. No output leads to it."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, group: Group, call: Call, *inputs: Any) -> torch.Tensor:
        remember(ctx, halves, group, call)
        return torch.empty(0, device="cpu")


class _Inputs(torch.autograd.Function):
    """forward(ctx, state, reach, saved, *inputs, *tokens) → token. saved: what `remember` takes, if this node holds it;
    tokens: of the nodes that stand beyond."""

    @staticmethod
    def forward(
        ctx: Any, state: _Pass, reach: Reach, saved: tuple[Halves, Group, Call] | None, *inputs: Any
    ) -> torch.Tensor:
        ctx.state, ctx.reach = state, reach
        if saved is not None:
            remember(ctx, *saved)
        return torch.empty(0, device=state.device)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        reach: Reach = ctx.reach
        if not reach.reached_by(ctx.state.given):
            return (None,) * len(ctx.needs_input_grad)
        beyond = [torch.empty(0, device=ctx.state.device) for _ in reach.beyond]
        return (None, None, None, *ctx.state.take(ctx, reach.gradients), *beyond)


class _Outputs(torch.autograd.Function):
    """forward(ctx, state, places, values, *tokens) → values."""

    @staticmethod
    def forward(
        ctx: Any, state: _Pass, places: tuple[int, ...], values: tuple[Any, ...], *tokens: Any
    ) -> tuple[Any, ...]:
        ctx.state, ctx.places, ctx.exit = state, places, len(state.exits)
        state.exits.append(weakref.ref(ctx))
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        ctx.state.arrive(ctx.exit, ctx.places, tangents)
        return (None, None, None, *(torch.empty(0, device=ctx.state.device) for _ in ctx.needs_input_grad[3:]))


def apply(halves: Halves, group: Group, call: Call) -> list[Any]:
    """The outputs of the group, in the order of its tangents."""
    wanted = [[call.value(position) for position in reach.inputs] for reach in group.reaches]
    alone = (halves, group, call) if len(group.reaches) == len(group.frees) == 1 else None
    saved = None if alone or not wanted else _Saved.apply(halves, group, call, *wanted[0])
    state = _Pass(saved, group, call.results[group.tangents[0]].device)
    # Nodes made later run earlier, where the engine has the choice: all outputs before any inputs.
    tokens: list[Any] = []
    for reach, of in zip(group.reaches, wanted):
        tokens.append(_Inputs.apply(state, reach, alone, *of, *[tokens[place] for place in reach.beyond]))
    outputs: list[Any] = [None] * len(group.tangents)
    for places, leads in group.exits:
        values = tuple([call.results[group.tangents[place]] for place in places])
        made = _Outputs.apply(state, places, values, *([tokens[place] for place in leads] or [anchor(state.device)]))
        for place, output in zip(places, made):
            outputs[place] = output
    return outputs
