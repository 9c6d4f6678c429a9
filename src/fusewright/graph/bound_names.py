"""Torch-level graphs as modules whose code calls the functions that the graph has.

Takes a graph and the module of its constants; gives a GraphModule. PyTorch writes `torch.sin(x)` for a call of that
function; a program that has kept it may put another one there. Always holds: the text is PyTorch's own, but the name
leads to the function that was recorded, in every backend that runs the text; so does it when the text is made again.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx.node import _get_qualified_name

from fusewright._native import isinstance


def as_module(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """`graph` as a GraphModule. A target that no name of its own leads to gets a function that calls it."""
    names: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "call_function":
            name = _name_of(node.target)
            if not name or (name.startswith("torch.") and names.setdefault(name, node.target) is not node.target):
                node.target = _calling(node.target)
    graph.set_codegen(_Binding())
    return torch.fx.GraphModule(root, graph)


class _Binding(torch.fx.graph.CodeGen):
    def _gen_python_code(self, nodes: Any, *args: Any, **kwargs: Any) -> torch.fx.graph.PythonCode:
        code = super()._gen_python_code(nodes, *args, **kwargs)
        bound = _Names(torch)
        for node in nodes:
            if node.op == "call_function" and (name := _name_of(node.target)).startswith("torch."):
                _bind(bound, name, node.target)
        code.globals["torch"] = bound
        return code


class _Names(types.ModuleType):
    """A module of PyTorch's in which some names lead to what a graph has."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        vars(self)["__getattr__"] = module.__getattribute__  # what a module does not have it asks this for


def _name_of(target: Any) -> str:
    """The name that PyTorch writes, or "" where that does not lead to `target`."""
    try:
        name = _get_qualified_name(target)
    except (AttributeError, RuntimeError):  # a method that another one has replaced, a lambda
        return ""
    return name if not name.startswith("torch.") or _bind(_Names(torch), name, target) else ""


def _bind(place: Any, name: str, target: Any) -> bool:
    """Whether `name` leads to `target`: bound where it lies in a module; what classes and operators have is there, and
    a class of tensors is guarded."""
    _, *way, last = name.split(".")
    for part in way:
        found = getattr(place, part, None)
        if type(place) is _Names:
            if isinstance(found, types.ModuleType) and type(found) is not _Names:
                found = _Names(found)
            setattr(place, part, found)
        place = found
    if type(place) is _Names:
        setattr(place, last, target)
    return getattr(place, last, None) is target


def _calling(target: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    call.__name__ = call.__qualname__ = str(getattr(target, "__name__", "call"))
    return call
