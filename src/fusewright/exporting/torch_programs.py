"""PyTorch's own exported programs: what ours is made of one, and one of ours.

Takes a torch.export.ExportedProgram; gives what `export` takes for the same program. Takes ours; gives PyTorch's.
Always holds: named sizes keep their names and ranges.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from typing import Any, cast

from torch.utils import _pytree as pytree

from fusewright.base.errors import ExportError
from fusewright.base.pytorch import torch
from fusewright.exporting.dims import Dim, Hint
from fusewright.exporting.program import (
    ExportedProgram,
    Signature,
    computing,
    holds,
    size_value,
    steps_of,
    zeros_of,
)
from fusewright.exporting.request import STAND_INS
from fusewright.exporting.text import call_text, line_text
from fusewright.operators import generator_states
from fusewright.operators.rules import create


def is_torch_program(model: Any) -> bool:
    """Whether this is a torch.export.ExportedProgram; PyTorch's exporter is not imported to tell."""
    module = sys.modules.get("torch.export.exported_program")
    return module is not None and isinstance(model, module.ExportedProgram)


def parts_of(program: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """(module, args, kwargs, sizes by flat argument) of PyTorch's program. Raises ExportError without examples."""
    if program.example_inputs is None:
        raise ExportError("the torch.export.ExportedProgram has no example inputs")
    args, kwargs = program.example_inputs
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    shapes = [getattr(values.get(name), "shape", ()) for name in program.graph_signature.user_inputs]
    bounds = {str(one): (int(r.lower), r.upper) for one, r in program.range_constraints.items()}
    dims = [{dim: _dim(size, bounds) for dim, size in enumerate(shape) if type(size) is not int} for shape in shapes]
    return program.module(check_guards=False), args, kwargs, dims


def _dim(size: Any, bounds: dict[str, tuple[int, Any]]) -> Dim | Hint:
    """The named size of a symbolic size of PyTorch's."""
    expression = size.node.expr
    names = [str(one) for one in expression.free_symbols]
    if len(names) != 1:
        return Dim.AUTO
    (one,) = expression.free_symbols
    least, most = bounds.get(names[0], (0, None))
    finite = most is not None and most.is_finite and int(most) < sys.maxsize // 2
    named = Dim(names[0], min=max(1, least), max=int(most) if finite else None)
    offset = int(expression.subs(one, 0))
    return named * (int(expression.subs(one, 1)) - offset) + offset


def to_torch(program: ExportedProgram) -> Any:
    """PyTorch's exported program of ours, by PyTorch's exporter."""
    args, kwargs = examples_of(program)
    exporter = importlib.import_module("torch.export")
    dims = _torch_shapes(program, exporter.Dim)
    shapes = pytree.tree_unflatten(dims, program.in_spec)
    module = program.module()
    module.fusewright_checks = False  # PyTorch's program has its own
    named = {**({"args": shapes[0]} if args else {}), **shapes[1]}
    _describe_own(program.graph)
    steps, outputs = steps_of(program.graph)
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    at: list[torch.fx.Node] = []

    def noted(node: torch.fx.Node, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            at[:] = [node]
            made = function(*args, **kwargs)
            at.clear()
            return made

        return call

    written = [(noted(node, one), *given) for node, (one, *given) in zip(nodes, steps, strict=True)]
    module.fusewright_compute = computing(cast(Any, written), outputs)
    try:
        return exporter.export(module, args, kwargs, dynamic_shapes=named if any(dims) else None, strict=False)
    except Exception as error:
        where = "".join(f" at {call_text(node)}{line_text(node)}" for node in at)
        said = str(error).strip().split("\n")[0]
        said = f"{where}\n  {type(error).__name__}: {said}"
        raise ExportError(f"PyTorch's exporter refuses this program{said}") from error


_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_described: set[Any] = set()


def _describe_own(graph: torch.fx.Graph) -> None:
    """Tells PyTorch's tracing what those operators of this library's own give that may have no tensors as arguments: it
    asks meta kernels only about tensors, and some of these have such a kernel too."""
    rules = {**{one: create.RULES[one] for one in (create.CLOCK, create.HOST_DRAW)}, **generator_states.RULES}
    for operator in {node.target for node in graph.nodes} & (rules.keys() - _described):
        if operator._schema.returns:
            torch.library.register_fake(operator, _fake(rules[operator]), lib=_LIBRARY, allow_override=True)
        _described.add(operator)


def _fake(rule: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def fake(*args: Any, **kwargs: Any) -> torch.Tensor:
        kind = rule(*args, **kwargs)
        return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=kind.device)

    return fake


def examples_of(program: ExportedProgram) -> Any:
    """(args, kwargs) for an exporter that would fix a size of 1, as PyTorch's: the program's own, and zeros in place of
    tensors that have such a size, and of all where the program was loaded."""
    signature = program.graph_signature
    own = [] if program.example_inputs is None else pytree.tree_leaves(program.example_inputs)
    sizes = _example_sizes(signature, own)
    leaves: list[Any] = []
    for place, leaf in enumerate(signature.leaves):
        if leaf["kind"] != "tensor":
            leaves.append(leaf["value"])
            continue
        given = own[place] if own else None
        shape = [size_value(size, sizes) for size in leaf["shape"]]
        leaves.append(given if given is not None and list(given.shape) == shape else zeros_of(leaf, sizes))
    return pytree.tree_unflatten(leaves, program.in_spec)


def _example_sizes(signature: Signature, own: list[Any]) -> dict[str, int]:
    """A value above 1 for each size that may change, such that all constraints hold."""
    choices = []
    for known in signature.symbols.values():
        example = own[known["leaf"]].shape[known["dim"]] if own else 0
        least, most = known["min"], known["max"]
        choices.append([
            one
            for one in (example, *STAND_INS, *range(max(2, least), max(2, least) + 64))
            if one >= max(2, least) and (most is None or one <= most)
        ])  # fmt: skip
    for values in itertools.islice(itertools.product(*choices), 100_000):
        sizes = dict(zip(signature.symbols, values))
        if all(holds(fact, sizes) for fact in signature.constraints):
            return sizes
    raise ExportError("no sizes above 1 were found for which the program's constraints hold")


def _torch_shapes(program: ExportedProgram, kind: Any) -> list[Any]:
    """For each leaf PyTorch's sizes of its dimensions, under our names and ranges."""
    named: dict[str, Any] = {
        name: kind(known["label"], min=known["min"], max=known["max"])
        for name, known in program.graph_signature.symbols.items()
        if known["label"].isidentifier()
    }

    def size_of(tree: Any) -> Any:
        if isinstance(tree, str):
            return named.get(tree, kind.AUTO)
        operation, left, right = tree
        root = size_of(left) if isinstance(right, int) else kind.AUTO
        if operation not in "+*" or root is kind.AUTO:
            return kind.AUTO
        return root * right if operation == "*" else root + right

    return [
        {dim: size_of(size) for dim, size in enumerate(leaf.get("shape", ())) if not isinstance(size, int)} or None
        for leaf in program.graph_signature.leaves
    ]
