"""What the runtime without Python needs to call a library: the operators' signatures, and what computes the values that
a plan keeps beside its weights.

Takes a compiled version and its program; gives plain data for the manifest, and a program of the arithmetic on weights.
Always holds: that program has no argument but weights, whose memory is as its leaves say.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx
from torch.utils import _pytree as pytree

from fusewright.base.records import dataclass
from fusewright.codegen.call_plan_types import Guarded, PythonCall
from fusewright.exporting.conditions import Version
from fusewright.exporting.program import ExportedProgram, Signature, size_value, zeros_of
from fusewright.exporting.request import memory_order
from fusewright.graph.freezing import Prepacking, Ref, Size, Step
from fusewright.runtime.artifact import CompiledGraph
from fusewright.sizes.expressions import from_tuples

Operator = torch._ops.OpOverload


def operators_of(graph: CompiledGraph) -> list[Operator]:
    """The operators that the graph's plan calls by name, and those that prepare its values."""
    found = [one.target for step in graph.plan.steps for one in (step.steps if isinstance(step, Guarded) else (step,))
             if isinstance(one, PythonCall)]  # fmt: skip
    steps = () if graph.prepacking is None else graph.prepacking.steps
    found += [step.target for step in steps if _makes_own_layout(step)]
    return [target for target in found if isinstance(target, Operator)]


def described(targets: Iterable[Operator]) -> dict[str, Any]:
    """What PyTorch's C dispatcher is to be given, by operator."""
    found: dict[str, Any] = {}
    for target in targets:
        schema = target._schema
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        arguments = []
        for one in schema.arguments:
            record: dict[str, Any] = {"name": one.name, "type": str(one.real_type)}
            if one.has_default_value() and _is_json(one.default_value):
                record["default"] = one.default_value
            arguments.append(record)
        results = [str(one.real_type) for one in schema.returns]
        found[name] = {
            "name": schema.name, "overload": schema.overload_name, "arguments": arguments, "results": results,
        }  # fmt: skip
    return found


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, float, str)


def _makes_own_layout(step: Step) -> bool:
    """Whether the step is a call of a library's own operator, whose result may have a layout that only it reads."""
    return step.target is not None and step.target.namespace not in ("aten", "prims")


def _ends_with_own_layouts(prepacking: Prepacking) -> bool:
    """Whether no step computes with what such a call gives."""
    own: set[int] = set()

    def reads_own(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(reads_own, value))
        return isinstance(value, Ref) and value.index in own

    for number, step in enumerate(prepacking.steps, len(prepacking.inputs)):
        reads = reads_own((step.args, step.kwargs))
        if _makes_own_layout(step) or (reads and step.target is None and len(step.args) == 1):  # the value itself
            own.add(number)
        if (reads and number not in own) or (_makes_own_layout(step) and (reads or step.kwargs)):
            return False
    return True


@dataclass(slots=True)
class Preparation:
    """program: computes `values` results of the weights `inputs` (kind, name), which are its arguments. results: each
    prepared value: ["value", number] or ["operator", name, arguments], an argument {"value": number} or a constant.
    usual: sizes that values are prepared for."""

    program: ExportedProgram
    inputs: list[list[Any]]
    results: list[list[Any]]
    usual: list[int]

    def to_json(self, part: str, inputs: list[list[Any]]) -> dict[str, Any]:
        """Its record in the manifest. inputs: of the compiled program's plan, by leaf."""
        weights = [self.inputs[leaf] for _, leaf in inputs]
        values = len(self.program.graph_signature.results)
        return {"part": part, "inputs": weights, "values": values, "results": self.results, "usual": self.usual}


def preparation(version: Version, program: ExportedProgram, sizes: Mapping[str, int]) -> Preparation | None:
    """The prepacking of `version` as a program; None where it has none, a weight has gaps in memory, or it goes on
    computing with what another library's operator gives. sizes: of the example, by symbol."""
    prepacking = version.graph.prepacking
    if prepacking is None or not _ends_with_own_layouts(prepacking):
        return None
    kinds: Any = {"state": program.state, "constant": program.constants}
    inputs = [version.inputs[position] for position in prepacking.inputs]
    weights = [kinds[kind][name] for kind, name in inputs]
    leaves = [_leaf(f"weight_{number}", weight) for number, weight in enumerate(weights)]
    if any(not _lies_so(weight, leaf) for weight, leaf in zip(weights, leaves)):
        return None
    shapes = [leaf.get("shape", ()) for leaf in program.graph_signature.leaves]
    places = [version.inputs[position] for position, _ in prepacking.usual]
    usual = [size_value(shapes[leaf][dim], sizes) for _, leaf, dim in places]
    graph, results, count = _graph(prepacking, leaves, usual)
    takes, gives = pytree.tree_structure(((0,) * len(leaves), {})), pytree.tree_structure([0] * count)
    signature = Signature(
        leaves=leaves,
        inputs=[{"kind": "user", "target": leaf} for leaf in range(len(leaves))],
        outputs=[{"kind": "user", "target": None}] * count,
        results=[{"kind": "output", "target": number} for number in range(count)],
    )
    return Preparation(ExportedProgram(graph, signature, {}, {}, (takes, gives)), inputs, results, usual)


def _leaf(name: str, weight: torch.Tensor) -> dict[str, Any]:
    dtype = str(weight.dtype).removeprefix("torch.")
    record = {"name": name, "kind": "tensor", "dtype": dtype, "device": weight.device.type, "shape": [*weight.shape]}
    return {**record, "order": memory_order(weight), "where": ["a weight's size"] * weight.dim()}


def _lies_so(weight: torch.Tensor, leaf: Mapping[str, Any]) -> bool:
    wanted = zeros_of({**leaf, "device": "meta"}, {}).stride()
    return all(size == 1 or a == b for size, a, b in zip(weight.shape, weight.stride(), wanted))


def _graph(
    prepacking: Prepacking, leaves: list[dict[str, Any]], usual: list[int]
) -> tuple[torch.fx.Graph, list[list[Any]], int]:
    """The arithmetic as a graph, what each prepared value is, and how many results the graph has."""
    graph = torch.fx.Graph()
    values: list[Any] = [graph.placeholder(leaf["name"]) for leaf in leaves]
    numbers = dict(zip((name for _, name in prepacking.usual), usual))

    def argument(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.index]
        if isinstance(value, Size):
            return from_tuples(value.tree, numbers)
        return [argument(item) for item in value] if isinstance(value, tuple) else value

    for step in prepacking.steps:
        args = argument(step.args)
        if step.target is None:
            values.append(graph.call_function(operator.getitem, tuple(args)) if len(args) == 2 else args[0])
        elif _makes_own_layout(step):
            assert step.target is not None and not step.kwargs, step
            values.append(_Own(step.target, args))
        else:
            keywords = {name: argument(value) for name, value in step.kwargs}
            values.append(graph.call_function(step.target, tuple(args), keywords))
    outputs: dict[torch.fx.Node, int] = {}
    aliases: dict[torch.fx.Node, torch.fx.Node] = {}

    def number(value: torch.fx.Node) -> int:
        if value.op == "placeholder":  # a result of its own, not the argument
            value = aliases.setdefault(value, graph.call_function(torch.ops.aten.alias.default, (value,)))
        return outputs.setdefault(value, len(outputs))

    results: list[list[Any]] = []
    for ref in prepacking.results:
        value = values[ref.index]
        if isinstance(value, _Own):
            (name,) = described([value.target])
            given = [{"value": number(one)} if isinstance(one, torch.fx.Node) else one for one in value.args]
            results.append(["operator", name, given])
        else:
            results.append(["value", number(value)])
    graph.output(tuple(outputs))
    graph.eliminate_dead_code()
    return graph, results, len(outputs)


@dataclass(slots=True)
class _Own:
    """A call of an operator that makes a layout of its own."""

    target: Operator
    args: list[Any]

