"""`tensor.grad_fn` of a tensor made inside: a node of the autograd graph that the capture's own backward goes through.

Takes such a tensor; gives what stands for the node. Always holds: a hook on the node is interpreted when the backward
is recorded, as hooks on tensors are; a node that leaves the frame is a graph break, since the compiled code has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fusewright.base.signals import GraphBreak
from fusewright.capture.border.absent import LOOK_LIKE
from fusewright.capture.border.native import Trampoline, unwatched
from fusewright.record.traced_tensor import is_leaf

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import World


class GradientNode:
    """A node, as the program may use it."""

    __slots__ = ("node", "world")

    def __init__(self, world: World, node: Any) -> None:
        self.world, self.node = world, node

    def _inside(self) -> Any:
        """The node, which is no input's: those have other ones at each call."""
        node, inputs = self.node, self.world.recorder.inputs
        if hasattr(node, "variable") or any(node is one.meta.get("history") for one, _ in inputs):
            raise GraphBreak("tensor-address", "the autograd node of an input")
        return node

    def name(self) -> str:
        return self._inside().name()  # type: ignore[no-any-return]

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        return self._register(self._inside().register_hook, hook)

    def register_prehook(self, hook: Callable[..., Any]) -> Any:
        return self._register(self._inside().register_prehook, hook)

    @property
    def next_functions(self) -> tuple[tuple[GradientNode | None, int], ...]:
        return tuple((node_of(self.world, node), place) for node, place in self._inside().next_functions)

    def _register(self, register: Callable[..., Any], hook: Callable[..., Any]) -> Any:
        tracer, recorder = self.world.tracer, self.world.recorder
        if not tracer.assumptions.custom_gradients:
            raise GraphBreak("autograd-call", f"a hook on an autograd node: {tracer.assumptions.gradient_refused}")
        recorder.user_code += 1
        recorder.user_gradients = None
        self.node.metadata["hooked"] = True
        return unwatched(register, Trampoline(tracer, hook))

    def __getattr__(self, name: str) -> Any:
        raise GraphBreak("tensor-address", f"{name} of an autograd node")


LOOK_LIKE[GradientNode] = lambda stand_in: stand_in._inside()


def node_of(world: World, node: Any) -> GradientNode | None:
    """What stands for a node: the same object for the same node."""
    if node is None:
        return None
    return world.gradient_nodes.setdefault(node, GradientNode(world, node))


def gradient_node(world: World, tensor: torch.Tensor) -> GradientNode | None:
    """`tensor.grad_fn` of a tensor made inside."""
    options, recorder = world.tracer.options, world.recorder
    if is_leaf(tensor):
        return None
    if recorder.level != "aten" or options.differentiate is None:
        recorder.lacks_form("tensor-address", "Tensor.grad_fn asks for its autograd node")
    return node_of(world, tensor.grad_fn)
