"""Graphs from text, for the goldens of passes: `graph_of(print_graph(graph, locations=False))` prints as `graph` does.

%x: float32[4, 8] = input
%w: float32[8, 8] = stable input            (a parameter, for packing)
%h = aten.mm(%x, %w)                        (its type follows from its arguments)
%y = aten.native_layer_norm(%h, [8], None, None, 1e-05)
%0 = getitem(%y, 0)
return [%0]
"""

from __future__ import annotations

import ast
import operator
import re

import torch

from fusewright.graph.builder import Builder
from fusewright.graph.nodes import add_placeholder
from fusewright.sizes.tensor_type import TensorType, contiguous_strides

INPUT = re.compile(r"%(\w+): (\w+)\[([^]|]*)(?:\| ([^]]*))?\](?:@(\w+(?::\d+)?))? = (stable )?input")
CALL = re.compile(r"%(\w+)(?:: [^=]*)? = ([\w.]+)\((.*)\)")


def graph_of(text: str) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    build = Builder(graph)
    nodes: dict[str, torch.fx.Node] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if (found := INPUT.fullmatch(line)) is not None:
            name, dtype, shape, stride, device, stable = found.groups()
            node = nodes[name] = add_placeholder(graph, name)
            node.target = name
            sizes = tuple(map(int, filter(None, shape.strip().split(", "))))
            steps = contiguous_strides(sizes) if stride is None else tuple(map(int, stride.split(", ")))
            kind = TensorType(sizes, steps, getattr(torch, dtype), torch.device(device or "cpu"))
            node.meta.update(type=kind, location=(), **({"stable": True} if stable else {}))
        elif line.startswith("return "):
            values = tuple(_value(ast.parse(_names(line[7:]), mode="eval").body, nodes))  # type: ignore[arg-type]
            kinds = tuple(value.meta["type"] if isinstance(value, torch.fx.Node) else value for value in values)
            graph.output(values).meta.update(type=kinds, location=(), env=None)
        elif (found := CALL.fullmatch(line)) is not None:
            name, target, arguments = found.groups()
            call = ast.parse(f"f({_names(arguments)})", mode="eval").body
            assert isinstance(call, ast.Call)
            args = [_value(one, nodes) for one in call.args]
            if target == "getitem":
                nodes[name] = build.node(operator.getitem, args, {}, args[0].meta["type"][args[1]])  # type: ignore
            else:
                parts = target.split(".")
                packet = getattr(getattr(torch.ops, parts[0]), parts[1])
                overload = getattr(packet, parts[2] if len(parts) > 2 else "default")
                keywords = {str(one.arg): _value(one.value, nodes) for one in call.keywords}
                nodes[name] = build.call(overload, *args, **keywords)
        else:
            raise ValueError(f"no line of a graph: {line}")
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            node.meta["unused"] = True
    graph.lint()
    return graph


def _names(text: str) -> str:
    return text.replace("%", "node_")


def _value(tree: ast.expr, nodes: dict[str, torch.fx.Node]) -> object:
    if isinstance(tree, (ast.List, ast.Tuple)):
        return [_value(one, nodes) for one in tree.elts]
    if isinstance(tree, ast.Name):
        return nodes[tree.id.removeprefix("node_")] if tree.id.startswith("node_") else _constant(tree.id)
    return ast.literal_eval(tree)


def _constant(name: str) -> object:
    return torch.device(name) if name in ("cpu", "cuda") else getattr(torch, name)
