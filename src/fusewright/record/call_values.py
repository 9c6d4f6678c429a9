"""What recorded tensors hold at the call that is being captured.

Takes nodes of the graph so far; gives real tensors, by running the operators that lead to them on the call's own
inputs. Always holds: nothing outside sees it. What the graph writes to is copied first, what is drawn is drawn from a
state that is put back, an operator with an effect or of the user's own is not run: a tensor that depends on one has no
value here (None). Neither has one that depends on what is drawn, unless it is the same in several draws. Each other
operator runs once, unless a later one turns out to write to an input.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from fusewright.operators.overlap import view_chain
from fusewright.operators.schema import argument, facts
from fusewright.sizes.expressions import Expr
from fusewright.sizes.shape_env import ShapeEnv

Node = torch.fx.Node


DRAWS, MOST_DRAWN = 8, 64
"""How often what depends on random numbers is computed, and the most operators that this may take."""


class NoValueError(Exception):
    """The call does not say what a node holds."""


class CallValues:
    """The values of one capture's nodes; `inputs`: its placeholders with the call's values."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        inputs: Sequence[tuple[Node, object]],
        constants: Mapping[str, torch.Tensor],
        env: ShapeEnv | None,
    ) -> None:
        self.graph, self.inputs, self.constants, self.env = graph, inputs, constants, env
        self._values: dict[Node, Any] = {}  # NoValueError: it has none
        self._written: frozenset[int] = frozenset()  # storages of inputs that are written to
        self._copies: dict[int, torch.Tensor] = {}  # of these

    def of(self, node: Node) -> torch.Tensor | None:
        """The value of `node`, or None."""
        order = self._needed(node)
        if not any(one.meta.get("random") for one in order):
            return self._computed(node, order)
        if len(order) > MOST_DRAWN:
            return None
        with torch.random.fork_rng(devices=[]):
            found = []
            for _ in range(DRAWS):
                self._forget()
                found.append(self._computed(node, order))
            self._forget()
        first = found[0]
        alike = first is not None and all(other is not None and torch.equal(first, other) for other in found)
        return first if alike else None

    def _computed(self, node: Node, order: Sequence[Node]) -> torch.Tensor | None:
        written = frozenset(filter(None, (self._written_input(one) for one in order if _writes(one))))
        if written != self._written or self._are_late(order):
            self._forget()
            self._written = written
        real = dict(self.inputs)
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            for one in order:
                if one not in self._values:
                    try:
                        self._values[one] = self._run(one, real)
                    except Exception:  # eager will meet it too, where it matters
                        self._values[one] = NoValueError
                if self._values[one] is NoValueError and _writes(one):
                    self._forget()
                    return None
        found = self._values[node]
        return found if isinstance(found, torch.Tensor) else None

    def _forget(self) -> None:
        self._values.clear()
        self._copies.clear()
        self._written = frozenset()

    def _are_late(self, order: Sequence[Node]) -> bool:
        """Whether an operator that has not run yet comes before a write that has."""
        missing = False
        for node in order:
            if node not in self._values:
                missing = True
            elif missing and _writes(node):
                return True
        return False

    def inputs_of(self, node: Node) -> list[Node]:
        """The placeholders that the value of `node` depends on."""
        return [one for one in self._needed(node) if one.op == "placeholder"]

    def _needed(self, node: Node) -> list[Node]:
        """What must run for the value that `node` has by now, in order: what it is computed from, and every write."""
        needed, order = {node}, []
        for one in reversed(self.graph.nodes):
            if one in needed or _writes(one):
                needed.update(one.all_input_nodes)
                order.append(one)
        return order[::-1]

    def _written_input(self, node: Node) -> int | None:
        """The storage of the input that an operator writes to."""
        for index in facts(node.target).written:  # type: ignore[arg-type]
            target = argument(node.target, node.args, dict(node.kwargs), index)  # type: ignore[arg-type]
            root = view_chain(target)[0] if isinstance(target, Node) else None
            real = next((value for one, value in self.inputs if one is root), None)
            if isinstance(real, torch.Tensor):
                return real.untyped_storage()._cdata
        return None

    def _run(self, node: Node, real: Mapping[Node, object]) -> object:
        if node.op == "placeholder":
            value = real.get(node)
            return self._input(value) if isinstance(value, torch.Tensor) else self._plain(value)
        if node.op == "get_attr":
            return self.constants[str(node.target)].clone()  # the program may write to it
        if node.op != "call_function" or not (node.target is operator.getitem or _is_runnable(node)):
            raise NoValueError
        args = self._plain(node.args)
        kwargs = {name: self._plain(value) for name, value in node.kwargs.items()}
        return node.target(*args, **kwargs)  # type: ignore[operator, misc]

    def _input(self, real: torch.Tensor) -> torch.Tensor:
        real = real.detach()
        storage = real.untyped_storage()
        if storage._cdata not in self._written:
            return real
        if storage._cdata not in self._copies:
            self._copies[storage._cdata] = torch.empty(0, dtype=torch.uint8).set_(storage.clone())  # type: ignore[call-overload]
        memory = self._copies[storage._cdata].untyped_storage()
        return real.new_empty(0).set_(memory, real.storage_offset(), real.shape, real.stride())  # type: ignore[call-overload]

    def _plain(self, value: object) -> Any:
        if isinstance(value, Node):
            found = self._values[value]
            if found is NoValueError:
                raise NoValueError
            return found
        if isinstance(value, Expr):
            if self.env is None:
                raise NoValueError
            return self.env.real(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._plain, value))
        return value


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(facts(node.target).written)


def _is_runnable(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or node.target.namespace == "fusewright":  # Python's own generators
        return False
    known = facts(node.target)
    return not (known.effect or node.target._schema.name in OPDEFS)
