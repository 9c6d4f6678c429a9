"""Containers of arguments and results as plain data, and back.

Takes a tree of torch.utils._pytree; gives what JSON holds. Always holds: reading one imports nothing; a type that is no
builtin must be registered with PyTorch already.
"""

from __future__ import annotations

import collections
import json
from typing import Any

from torch.utils import _pytree as pytree

from fusewright.base.errors import ExportError, ProgramFileError

_DEEPEST = 64
_PLAIN: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "ordered_dict": collections.OrderedDict}
_KINDS = {kind: name for name, kind in _PLAIN.items()}


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
