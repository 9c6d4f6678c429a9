"""The text of an ATen graph, for people and for goldens: one line a node, `%3: float32[4, 8] = aten.add.Tensor(%1, %2)
# file:line`.

Takes a torch.fx.Graph whose nodes carry meta["type"] and meta["location"]; gives text.
Always holds: equal graphs print equally, whatever the names of their nodes; placeholders and constants keep their
names.
"""

from __future__ import annotations

import os.path

import torch
import torch.fx
from torch._ops import OpOverload

from fusewright.sizes.tensor_type import TensorType


def print_graph(graph: torch.fx.Graph, locations: bool = True) -> str:
    """The text of `graph`; without `locations` it does not depend on where the program stands."""
    names: dict[torch.fx.Node, str] = {}
    lines: list[str] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            names[node] = f"%{node.target}"
            kind = "input" if node.op == "placeholder" else "constant"
            text = f"%{node.target}: {type_text(node.meta.get('type'))} = {kind}"
            if node.meta.get("unused"):
                text += " (unused)"
        elif node.op == "output":
            text = f"return {_argument_text(node.args[0], names)}"
        else:
            names[node] = f"%{len(names)}"
            arguments = [_argument_text(a, names) for a in node.args]
            arguments += [f"{k}={_argument_text(v, names)}" for k, v in node.kwargs.items()]
            text = f"{names[node]}: {type_text(node.meta.get('type'))} = {_target_text(node)}({', '.join(arguments)})"
            if node.meta.get("epilogue"):
                text += "  (epilogue)"
        location = node.meta.get("location") if locations and node.op.startswith("call") else None
        if location:
            text += f"  # {os.path.basename(location[-1].file)}:{location[-1].line}"
        lines.append(text)
    return "\n".join(lines) + "\n"


def type_text(type_: object) -> str:
    """float32[4, 8] for a dense row-major tensor; other strides follow, as float32[4, 8 | 1, 4]."""
    if isinstance(type_, TensorType):
        text = ", ".join(str(d) for d in type_.shape)
        running: object = 1
        dense = True
        for size, stride in zip(reversed(type_.shape), reversed(type_.stride), strict=True):
            dense = dense and (size == 1 or stride == running)
            running = running * size  # type: ignore[arg-type, operator]
        if not dense:
            text += " | " + ", ".join(str(d) for d in type_.stride)
        device = "" if type_.device.type == "cpu" else f"@{type_.device}"
        return f"{str(type_.dtype).removeprefix('torch.')}[{text}]{device}"
    if isinstance(type_, (list, tuple)):
        return f"({', '.join(type_text(item) for item in type_)})"
    return "-" if type_ is None else f"size {type_}"


def _target_text(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        name = str(target)
        return name.removesuffix(".default")
    if isinstance(target, str):
        return f".{target}"
    return getattr(target, "__name__", str(target))


def _argument_text(value: object, names: dict[torch.fx.Node, str]) -> str:
    if isinstance(value, torch.fx.Node):
        return names.get(value, f"%{value.name}")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument_text(item, names) for item in value)}]"
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return str(value)
    return repr(value)
