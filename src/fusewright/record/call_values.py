"""What recorded tensors hold at the call that is being captured.

Takes nodes of the graph so far; gives real tensors, by running the operators that lead to them on the call's own
inputs. Always holds: nothing outside sees it. What the graph writes to is copied first, what is drawn is drawn from a
state that is put back, an operator with an effect or of the user's own is not run: a tensor that depends on one has no
value here (None). Neither has one that depends on what is drawn, unless it is the same in several draws. Each other
operator runs once, unless a later one turns out to write to an input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from fusewright._native import isinstance
from fusewright.base.pytorch import torch
from fusewright.graph.collectives import is_collective
from fusewright.operators.known_sizes import OF_SIZE
from fusewright.operators.numpy_calls import NUMPY_CALL
from fusewright.operators.overlap import view_chain
from fusewright.operators.schema import argument, facts, written_by
from fusewright.sizes.expressions import Expr
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import symbols_in

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
        self._changed: set[int] = set()  # storages of values that an operator has written to

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
        written = frozenset(storage for one in order if _writes(one) for storage in self._written_inputs(one))
        if written != self._written:
            self._forget()
            self._written = written
        late = self._late(order)
        real = dict(self.inputs)
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
            for one in order:
                if one in self._values:
                    continue
                if one in late and self._meets_writes(one, real):
                    self._forget()
                    return self._computed(node, order)
                try:
                    self._values[one] = self._run(one, real)
                except Exception:  # eager will meet it too, where it matters
                    self._values[one] = NoValueError
                if _writes(one):
                    if self._values[one] is NoValueError:
                        self._forget()
                        return None
                    self._changed.update(_storage(self._values[target]) for target in _targets(one))
        found = self._values[node]
        return found if isinstance(found, torch.Tensor) else None

    def _forget(self) -> None:
        self._values.clear()
        self._copies.clear()
        self._changed.clear()
        self._written = frozenset()

    def _late(self, order: Sequence[Node]) -> frozenset[Node]:
        """The operators that have not run yet and come before a write that has."""
        missing: list[Node] = []
        late: list[Node] = []
        for node in order:
            if node not in self._values:
                missing.append(node)
            elif missing and _writes(node):
                late += missing
                missing.clear()
        return frozenset(late)

    def _meets_writes(self, node: Node, real: Mapping[Node, object]) -> bool:
        """Whether an operator that should have run earlier would read what was written to since."""
        if node.op == "placeholder":
            return _storage(real.get(node)) in self._written
        return any(_storage(self._values.get(source)) in self._changed for source in node.all_input_nodes)

    def shape_of(self, func: OpOverload, args: Sequence[object]) -> tuple[int, ...]:
        """The shape of the result for these real arguments."""
        return self.ask(lambda: tuple(func(*args).shape))

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer to a question about real tensors, which is not recorded."""
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast():
            return question()

    def is_fixed(self, node: Node) -> bool:
        """Whether the value follows from the program alone."""
        return not any(
            one.op == "placeholder" or one.meta.get("random") or _takes_open_size(one) for one in self._needed(node)
        )

    def varies(self, node: Node) -> bool:
        """Whether an operator that leads to the value takes a size that the graph leaves open."""
        return any(map(_takes_open_size, self._needed(node)))

    def writes_to_inputs(self, node: Node) -> bool:
        """Whether an operator among those that lead to the value writes to an input."""
        return any(any(self._written_inputs(one)) for one in self._needed(node) if _writes(one))

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

    def _written_inputs(self, node: Node) -> Iterator[int]:
        """The storages of the inputs that an operator writes to."""
        roots = {view_chain(target)[0] for target in _targets(node)}
        return (_storage(real) for one, real in self.inputs if one in roots and isinstance(real, torch.Tensor))

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
        real = torch.detach(real)
        storage = real.untyped_storage()
        if storage._cdata not in self._written:
            return real
        if storage._cdata not in self._copies:
            copy: Any = storage.clone()
            self._copies[storage._cdata] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(copy)
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


def _targets(node: Node) -> list[Node]:
    """What an operator writes to."""
    func: Any = node.target
    found = (argument(func, node.args, dict(node.kwargs), index) for index in written_by(func, node.args))
    return [target for target in found if isinstance(target, Node)]


def _storage(value: object) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(written_by(node.target, node.args))


def _is_runnable(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or is_collective(node):
        return False
    if node.target.namespace == "fusewright" and node.target not in (OF_SIZE, NUMPY_CALL):  # draws, messages
        return False
    known = facts(node.target)
    return not (known.effect or node.target._schema.name in OPDEFS)


def _takes_open_size(node: Node) -> bool:
    return bool(symbols_in((node.args, node.kwargs)))
