"""Containers of arguments and results as plain data, and back.

Takes a tree of torch.utils._pytree; gives what JSON holds. Always holds: reading one imports nothing; a type that is no
builtin must be registered with PyTorch already.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils import _pytree as pytree

from fusewright.base.errors import ExportError, ProgramFileError
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass

_DEEPEST = 64
_PLAIN: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "ordered_dict": collections.OrderedDict}
_KINDS = {kind: name for name, kind in _PLAIN.items()}


@dataclass(frozen=True, slots=True)
class Part:
    """What of a result is neither a container nor a leaf. kind: "object", an instance of `value` whose attributes have
    these names; or "dtype", "device", "class": `value` itself."""

    kind: str
    value: Any
    names: tuple[str, ...] = ()


class _Opened:
    """The node of a `Part` in a tree: its children are the attributes."""


def _made(children: Iterable[Any], part: Part) -> Any:
    if part.kind != "object":
        return part.value
    made = object.__new__(part.value)
    made.__dict__.update(zip(part.names, children))
    return made


pytree.register_pytree_node(_Opened, lambda value: ([], value), _made)


def is_plain_class(kind: Any) -> bool:
    """Whether an instance is no more than its attributes."""
    return (
        isinstance(kind, type)
        and kind.__new__ is object.__new__
        and not issubclass(kind, (torch.nn.Module, torch.Tensor))
        and not hasattr(kind, "__del__")
        and all(name in ("__dict__", "__weakref__") for one in kind.__mro__ for name in vars(one).get("__slots__", ()))
        and kind.__dictoffset__ != 0
    )


def opened(result: Any, again: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves and the tree of a result; `again`: the result of a second run. An object of a class that PyTorch has
    no containers for is its attributes, if each run makes it anew."""
    seen: dict[int, Any] = {}

    def tree(one: Any, other: Any) -> tuple[list[Any], pytree.TreeSpec]:
        leaves, spec = pytree.tree_flatten(one)
        inner = [leaf(*pair) for pair in zip(leaves, pytree.tree_flatten(other)[0], strict=True)]
        parts = iter([part for _, part in inner])
        return [value for values, _ in inner for value in values], _replaced(spec, parts)

    def leaf(one: Any, other: Any) -> tuple[list[Any], pytree.TreeSpec]:
        kind = {torch.dtype: "dtype", torch.device: "device"}.get(type(one), "class" if isinstance(one, type) else "")
        if kind:
            return [], pytree.TreeSpec(_Opened, Part(kind, one), [])
        if one is other or not is_plain_class(type(one)):
            return [one], pytree.treespec_leaf()
        if id(one) in seen:
            raise ExportError(f"a program cannot return one {type(one).__name__} in two places")
        seen[id(one)] = one
        names = tuple(vars(one))
        leaves, spec = tree([vars(one)[name] for name in names], [vars(other)[name] for name in names])
        return leaves, pytree.TreeSpec(_Opened, Part("object", type(one), names), spec.children())

    return tree(result, again)


def _replaced(spec: pytree.TreeSpec, parts: Iterator[pytree.TreeSpec]) -> pytree.TreeSpec:
    """The tree with these in place of its leaves."""
    if spec.is_leaf():
        return next(parts)
    return pytree.TreeSpec(spec.type, spec.context, [_replaced(child, parts) for child in spec.children()])


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _safe_class(name: Any) -> type:
    """The class of this name, if the user has told PyTorch that a file may name it."""
    listed = (one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals())
    found = next((one for one in listed if isinstance(one, type) and _class_name(one) == name), None)
    if found is None:
        raise ProgramFileError(
            f"signature.json: the program returns the class {name!r:.200}. If you trust it, call "
            "torch.serialization.add_safe_globals with it before loading"
        )
    return found


def _read_part(kind: str, data: dict[str, Any]) -> Part:
    name, keys = data.get("name"), data.get("keys", [])
    if kind == "object":
        made = _safe_class(name)
        fits = isinstance(keys, list) and all(type(key) is str for key in keys) and len(set(keys)) == len(keys)
        if not is_plain_class(made) or not fits or len(keys) != len(data["items"]):
            raise ProgramFileError(f"signature.json: damaged object of {name!r:.200}")
        return Part(kind, made, tuple(keys))
    if data["items"] or not isinstance(name, str):
        raise ProgramFileError(f"signature.json: damaged {kind}")
    if kind == "class":
        return Part(kind, _safe_class(name))
    try:
        value = torch.device(name) if kind == "device" else getattr(torch, name, None)
    except RuntimeError as error:
        raise ProgramFileError(f"signature.json: {name!r:.80} is no device") from error
    if kind == "dtype" and not isinstance(value, torch.dtype):
        raise ProgramFileError(f"signature.json: {name!r:.80} is no dtype")
    return Part(kind, value)


def container(spec: pytree.TreeSpec) -> Any:
    """The tree as plain data; None for a leaf."""
    if spec.is_leaf():
        return None
    made: dict[str, Any] = {"items": [container(child) for child in spec.children()]}
    if spec.type in _KINDS:
        keys = spec.context if spec.type in (dict, collections.OrderedDict) else None
        if keys is not None and any(type(key) not in (str, int) for key in keys):
            raise ExportError(f"the keys of dicts in a program are strings and integers, got {list(keys)}")
        return {"kind": _KINDS[spec.type], **({} if keys is None else {"keys": list(keys)}), **made}
    if isinstance(spec.context, Part):
        part = spec.context
        name = _class_name(part.value) if isinstance(part.value, type) else str(part.value).removeprefix("torch.")
        return {"kind": part.kind, "name": name, **({"keys": list(part.names)} if part.names else {}), **made}
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(spec.type)
    if known is None or not isinstance(known.serialized_type_name, str):
        # It can be used in this process, and not be saved.
        return {"kind": "unknown", "name": f"{spec.type.__module__}.{spec.type.__qualname__}", **made}
    try:
        context = spec.context if known.to_dumpable_context is None else known.to_dumpable_context(spec.context)
        text = json.dumps(context)
    except (TypeError, NotImplementedError):
        return {"kind": "unknown", "name": known.serialized_type_name, **made}
    return {"kind": "registered", "name": known.serialized_type_name, "context": text, **made}


def from_container(data: Any, depth: int = 0) -> pytree.TreeSpec:
    """The tree of what `container` gave. Raises ProgramFileError."""
    if data is None:
        return pytree.treespec_leaf()
    if depth > _DEEPEST or not isinstance(data, dict) or not isinstance(data.get("items"), list):
        raise ProgramFileError("signature.json: damaged containers")
    children = [from_container(item, depth + 1) for item in data["items"]]
    keys: Any
    kind, keys = data.get("kind"), data.get("keys")
    if kind in ("tuple", "list"):
        return pytree.TreeSpec(_PLAIN[kind], None, children)
    if kind in ("dict", "ordered_dict"):
        fits = isinstance(keys, list) and len(keys) == len(children) and all(type(key) in (str, int) for key in keys)
        if not fits or len(set(keys)) != len(keys):
            raise ProgramFileError("signature.json: damaged keys of a container")
        return pytree.TreeSpec(_PLAIN[kind], keys, children)
    if kind in ("object", "dtype", "device", "class"):
        return pytree.TreeSpec(_Opened, _read_part(kind, data), children)
    if kind == "registered":
        name = data.get("name")
        found = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name) if isinstance(name, str) else None
        if found is None:
            raise ProgramFileError(
                f"signature.json: the container {name!r} is not registered here: import the module that defines it "
                "before loading"
            )
        known = pytree.SUPPORTED_SERIALIZED_TYPES[found]
        try:
            context = json.loads(data["context"])
            context = context if known.from_dumpable_context is None else known.from_dumpable_context(context)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProgramFileError(f"signature.json: damaged container {name!r}: {error}") from error
        return pytree.TreeSpec(found, context, children)
    raise ProgramFileError(f"signature.json: unknown container {kind!r}")
