"""From a captured frame to a program's graph: inputs lifted, writes as outputs, sizes computed by operators.

Takes a functional graph with symbolic sizes in its arguments and `copy_` at its end; gives a torch.fx.Graph whose
placeholders are parameters, buffers, constants and user tensors in that order, and whose outputs are the new values of
buffers, of inputs, and the results. Always holds: the graph reads no size but those of its own inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from fusewright.base.errors import ExportError
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.exporting.text import call_text, line_text
from fusewright.sizes.expressions import Dim, Expr, to_tuples
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten

_ORDER = ("parameter", "buffer", "constant", "user")
_SIZE_FUNCTIONS: dict[str, Any] = {
    "+": operator.add,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": torch.sym_min,
    "max": torch.sym_max,
}


@dataclass(slots=True)
class Input:
    """A placeholder to be: `kind` and `target` as the signature has them; `type` of its tensor."""

    kind: str
    target: Any
    name: str
    type: Any = None


@dataclass(slots=True)
class Lifted:
    """The new graph; its inputs in order; what its outputs are, as (kind, target)."""

    graph: torch.fx.Graph
    inputs: list[Input]
    outputs: list[tuple[str, Any]] = field(default_factory=list)


def lift(
    old: torch.fx.Graph,
    inputs: Mapping[torch.fx.Node, Input],
    extra: list[Input],
    sizes: Mapping[str, tuple[int, int]],
    detaches: bool,
) -> Lifted:
    """`inputs`: what the old graph's tensors are; `extra`: user tensors that it does not read; `sizes`: symbol → (leaf,
    dimension); `detaches`: gradients do not pass what was recorded without them."""
    return _Lifter(old, inputs, extra, sizes, detaches).run()


class _Lifter:
    def __init__(self, old: Any, inputs: Any, extra: Any, sizes: Any, detaches: bool) -> None:
        self.old, self.inputs, self.sizes, self.detaches = old, inputs, sizes, detaches
        self.new = torch.fx.Graph()
        self.made: dict[torch.fx.Node, Any] = {}
        self.leaves: dict[int, torch.fx.Node] = {}
        self.trees: dict[Any, Any] = {}
        self.at: Any = None  # the node that is being copied
        self.order = sorted(
            [*inputs.items(), *((None, one) for one in extra)],
            key=lambda pair: (_ORDER.index(pair[1].kind), pair[1].target if pair[1].kind == "user" else 0),
        )

    def run(self) -> Lifted:
        for node, one in self.order:
            placeholder = self.new.placeholder(one.name)
            placeholder.target = placeholder.name
            placeholder.meta["type"] = one.type
            if node is not None:
                self.made[node] = placeholder
            if one.kind == "user":
                self.leaves[one.target] = placeholder
        mutated: dict[torch.fx.Node, Any] = {}
        for node in self.old.nodes:
            self.at = node
            if node.meta.get("epilogue"):
                target, value = node.args[:2]
                mutated[target] = self.made[value]
            elif node.op == "call_function":
                self.call(node)
        lifted = Lifted(self.new, [one for _, one in self.order])
        outputs: list[Any] = []
        for kind, name in (("buffer", "buffer_mutation"), ("user", "input_mutation")):
            for node, value in mutated.items():
                if self.inputs[node].kind == kind:
                    outputs.append(value)
                    lifted.outputs.append((name, self.inputs[node].target))
        others = [self.inputs[node] for node in mutated if self.inputs[node].kind not in ("buffer", "user")]
        if others:
            raise ExportError(f"the program writes to {others[0].kind} {others[0].target}, which a program cannot hold")
        (every,) = (node.args[0] for node in self.old.nodes if node.op == "output")
        *returned, unused = every  # see trace._call
        for value in returned:
            outputs.append(self.renewed(value, mutated) if isinstance(value, torch.fx.Node) else self.argument(value))
            lifted.outputs.append(("user", None))
        self.new.output(tuple(outputs))
        if not self.made[unused].users:
            self.new.erase_node(self.made[unused])
        return lifted

    def call(self, node: torch.fx.Node) -> None:
        made = self.new.create_node(
            "call_function", node.target, self.argument(node.args), self.argument(node.kwargs), name=node.name
        )
        made.meta = {name: node.meta[name] for name in ("type", "location") if name in node.meta}
        self.made[node] = made
        source = node.args[0] if node.target is operator.getitem else node
        if self.detaches and isinstance(source, torch.fx.Node) and source.meta.get("no_grad"):
            kind = node.meta.get("type")
            if isinstance(kind, TensorType) and (kind.dtype.is_floating_point or kind.dtype.is_complex):
                detached = self.new.call_function(aten.detach.default, (made,))
                detached.meta = dict(made.meta)
                self.made[node] = detached

    def renewed(self, value: torch.fx.Node, mutated: dict[torch.fx.Node, Any]) -> Any:
        """What is returned: a view of an input that was written to shows the new value."""
        chain = []
        at = value
        while at.op == "call_function" and at not in mutated:
            schema = getattr(at.target, "_schema", None)
            if schema is None or not schema.returns or schema.returns[0].alias_info is None:
                return self.made[value]
            chain.append(at)
            at = at.args[0]  # type: ignore[assignment]
        if at not in mutated:
            return self.made[value]
        kept, self.made[at] = self.made[at], mutated[at]
        older = {node: self.made[node] for node in chain}
        for node in reversed(chain):
            self.call(node)
        made = self.made[value]
        self.made |= {**older, at: kept}
        return made

    def argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            if value not in self.made:
                if isinstance(value.meta.get("type"), Expr):
                    return self.size(value.meta["type"])
                raise ExportError(f"a program cannot hold what {value.format_node()} reads")
            return self.made[value]
        if isinstance(value, Expr):
            return self.size(value)
        if isinstance(value, (tuple, list)):
            items = [self.argument(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {name: self.argument(item) for name, item in value.items()}
        return value

    def size(self, value: Dim) -> Any:
        return value if isinstance(value, int) else self.tree(to_tuples(value), value)

    def tree(self, tree: Any, value: Any = None) -> Any:
        if isinstance(tree, int):
            return tree
        if tree not in self.trees:
            if tree[0] == "sym":
                if tree[1] not in self.sizes:
                    raise ExportError(
                        f"a size or a number of {call_text(self.at)} is known only when the program runs, and a "
                        f"program computes with sizes of its arguments alone{line_text(self.at)}\n  what to do: pass "
                        "the number as an argument, or keep it a tensor"
                    )
                leaf, dim = self.sizes[tree[1]]
                made = self.new.call_function(aten.sym_size.int, (self.leaves[leaf], dim))
            else:
                operands = (self.tree(tree[1]), self.tree(tree[2]))
                made = self.new.call_function(_SIZE_FUNCTIONS[tree[0]], operands)
            made.meta["type"] = tree[1] if tree[0] == "sym" else None
            self.trees[tree] = made
        return self.trees[tree]
