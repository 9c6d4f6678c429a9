"""Weights that are tensor subclasses over other tensors (quantised ones): a program holds the inner tensors, by names
below the weight's, and what it was captured for as data.

Takes a weight; gives its inner tensors and a record, which JSON holds. Always holds: no class is needed to load or run
a program; a new value is taken only if all but its tensors is as it was at the export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusewright.base.errors import ProgramInputError


def flattened(name: str, value: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """The inner tensors of a weight by name, and its record: {"class", "context", "tensors"}, where `tensors` has None
    or a further record for each attribute. A plain tensor is itself, and has None."""
    if not is_traceable_wrapper_subclass(value):
        return {name: value}, None
    attributes, context = value.__tensor_flatten__()
    found: dict[str, torch.Tensor] = {}
    records: dict[str, Any] = {}
    for attribute in attributes:
        inner, records[attribute] = flattened(f"{name}.{attribute}", getattr(value, attribute))
        found |= inner
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return found, {"class": kind, "context": _text(context), "tensors": records}


def _text(context: Any) -> str:
    """All but the tensors of a value, as text. Two objects that print as themselves are never alike."""
    return repr(context)


def is_record(value: Any, depth: int = 0) -> bool:
    """Whether a value that was read is such a record."""
    if value is None:
        return depth > 0
    inner = value.get("tensors") if isinstance(value, dict) and depth < 8 else None
    texts = isinstance(inner, dict) and all(type(value.get(one)) is str for one in ("class", "context"))
    return texts and all(type(name) is str and is_record(one, depth + 1) for name, one in inner.items())  # type: ignore


def replaced(state: Mapping[str, torch.Tensor], records: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """New values of weights as the program has them: those of subclasses by their inner tensors. Raises
    ProgramInputError for one of another class or context than at the export."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        inner, record = flattened(name, value)
        if record is not None and record != records.get(name):
            known = records.get(name)
            was = "a plain tensor" if known is None else f"a {known['class']} with {known['context']:.200}"
            raise ProgramInputError(
                f"{name} was {was} at the export, and a {record['class']} with {record['context']:.200} was given: "
                "export the model again"
            )
        found |= inner
    return found
