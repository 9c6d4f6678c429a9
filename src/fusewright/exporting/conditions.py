"""One compiled version of a program: what its plan is given, and what must hold for it, as guards.

Takes a program's signature and a version as its file has it; gives guards and sources for capture/guards. Always holds:
arguments that pass the guards are what the signature says, in the memory that the program was captured for, and each
weight is as it was loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, field
from fusewright.capture.guards import Guard, TensorGuard
from fusewright.capture.guards.sources import Constant, FunctionSource, Item, Source, TensorSize, TensorStride
from fusewright.exporting.program import Signature
from fusewright.runtime.artifact import CompiledGraph

CONTAINERS: tuple[type, ...] = (tuple, list, dict, OrderedDict)
"""Those that guards look into."""


@dataclass(slots=True)
class Version:
    """One compiled version of a program.

    inputs   where each input of the plan comes from: ("leaf", number), ("state" or "constant", name), ("size", leaf,
             dimension)
    results  the flat results: ("output", number), ("leaf", number), ("state" or "constant", name), ("value", value)
    facts    relations between sizes that it is for: (operator, left, right); a size is named "LEAF.DIMENSION"
    """

    target: str
    inputs: list[list[Any]]
    results: list[list[Any]]
    facts: list[list[Any]]
    graph: CompiledGraph = field(repr=False)
    device_code: bytes = field(default=b"", repr=False)  # of its kernels on GPUs: see device_code.py

    def to_json(self) -> dict[str, Any]:
        return {"target": self.target, "inputs": self.inputs, "results": self.results, "facts": self.facts}


@dataclass(slots=True)
class Known:
    """What all versions of a program share. written: the leaves that it writes to; tensors: its weights by kind and
    name; as_loaded: how each was when it was loaded."""

    signature: Signature
    written: list[int]
    tensors: dict[str, dict[str, torch.Tensor]]
    as_loaded: dict[tuple[str, str], TensorGuard]

    @classmethod
    def of(cls, signature: Signature, tensors: dict[str, dict[str, torch.Tensor]]) -> Known:
        written = [record["target"] for record in signature.outputs if record["kind"] == "input_mutation"]
        as_loaded = {
            (kind, name): TensorGuard(type(one), one.dtype, one.device, None, tuple(one.shape), tuple(one.stride()))
            for kind, named in tensors.items()
            for name, one in named.items()
        }
        return cls(signature, written, tensors, as_loaded)


class Walk:
    """The containers of the arguments: guards that they are so, and where each leaf is."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        self.sources: list[Source] = []
        self.paths: list[tuple[Any, ...]] = []
        self.plain = True

    def enter(self, spec: pytree.TreeSpec, source: Source, path: tuple[Any, ...]) -> None:
        if spec.is_leaf():
            self.sources.append(source)
            self.paths.append(path)
            return
        self.plain &= spec.type in CONTAINERS
        keys = spec.context if spec.type in (dict, OrderedDict) else range(len(spec.children()))
        self.guards.append(Guard("TYPE", source, spec.type))
        if spec.type in (dict, OrderedDict):
            self.guards.append(Guard("KEYS", source, tuple(keys)))
        else:
            self.guards.append(Guard("LENGTH", source, len(keys)))
        for key, child in zip(keys, spec.children()):
            self.enter(child, Item(source, key), (*path, key))


class Conditions:
    """What must hold for a version, over the sources of the leaves."""

    def __init__(self, known: Known, version: Version, leaves: Sequence[Source]) -> None:
        self.known, self.version, self.leaves = known, version, leaves
        self.signature = known.signature
        symbols = self.signature.symbols
        self.names = {name: f"{known['leaf']}.{known['dim']}" for name, known in symbols.items()}

    def inputs(self) -> list[Source]:
        """The source of each input of the plan."""
        return [
            TensorSize(self.leaves[target[0]], target[1]) if kind == "size" else self.source(kind, target[0])
            for kind, *target in self.version.inputs
        ]

    def source(self, kind: str, target: Any) -> Source:
        if kind == "leaf":
            return self.leaves[target]
        value = self.known.tensors[kind][target]
        return Constant(id(value), value, f"weight_{id(value):x}")

    def guards(self) -> list[Guard]:
        found: list[Guard] = []
        for leaf, record in enumerate(self.signature.leaves):
            found += self.value(leaf, record) if record["kind"] == "value" else self.tensor(leaf, record)
        for kind, target, *_ in self.version.inputs:
            if kind in self.known.tensors:
                found.append(Guard("TENSOR", self.source(kind, target), self.known.as_loaded[kind, target]))
        found += self.sizes()
        found += self.apart()
        return found

    def value(self, leaf: int, record: Mapping[str, Any]) -> list[Guard]:
        kind = "IS" if record["value"] is None else "EQUALS"
        return [Guard(kind, self.leaves[leaf], record["value"])]  # type: ignore[arg-type]

    def tensor(self, leaf: int, record: Mapping[str, Any]) -> list[Guard]:
        """Type, dtype and device, and rows in the order of the program's memory."""
        source, shape, order = self.leaves[leaf], record["shape"], record["order"]
        fixed = tuple(size if isinstance(size, int) else None for size in shape)
        strides: list[int | None] = [None] * len(shape)
        found: list[Guard] = []
        step: Any = 1
        for dim in reversed(order):
            if isinstance(step, int):
                strides[dim] = step
            else:
                stride = f"stride {leaf}.{dim}"
                found.append(self.relation("==", stride, step))
            size = fixed[dim] if isinstance(fixed[dim], int) else f"{leaf}.{dim}"
            step = (
                step * size
                if isinstance(step, int) and isinstance(size, int)
                else size
                if step == 1
                else ["*", step, size]
            )
        requires_grad = False if leaf in self.known.written else None
        dtype, device = getattr(torch, record["dtype"]), self.device(record["device"])
        guard = TensorGuard(torch.Tensor, dtype, device, requires_grad, fixed, tuple(strides))
        return [Guard("TENSOR", source, guard), *found]

    def device(self, kind: str) -> torch.device:
        """The device of this type that the plan is for."""
        numbers = {slot.device_index for slot in self.version.graph.plan.slots if slot.device == kind}
        return torch.device(kind) if kind == "cpu" or len(numbers) != 1 else torch.device(kind, max(numbers.pop(), 0))

    def sizes(self) -> list[Guard]:
        """Ranges, sizes that follow from others, constraints, and the version's own conditions."""
        found: list[Guard] = []
        for name, known in self.signature.symbols.items():
            if known["min"] > 0:
                found.append(self.relation("<=", known["min"], self.names[name]))
            if known["max"] is not None:
                found.append(self.relation("<=", self.names[name], known["max"]))
        for leaf, record in enumerate(self.signature.leaves):
            for dim, size in enumerate(record.get("shape", ())):
                if not isinstance(size, int) and (not isinstance(size, str) or self.names[size] != f"{leaf}.{dim}"):
                    found.append(self.relation("==", f"{leaf}.{dim}", self.placed(size)))
        for fact in self.signature.constraints:
            found.append(self.relation(fact["op"], self.placed(fact["left"]), self.placed(fact["right"])))
        found += [self.relation(*fact) for fact in self.version.facts]
        return found

    def placed(self, size: Any) -> Any:
        """A size of the signature by places instead of symbols."""
        if isinstance(size, list):
            return [size[0], self.placed(size[1]), self.placed(size[2])]
        return self.names[size] if isinstance(size, str) else size

    def relation(self, op: str, left: Any, right: Any) -> Guard:
        sources: dict[str, Source] = {}

        def tree(size: Any) -> Any:
            if isinstance(size, list):
                return (size[0], tree(size[1]), tree(size[2]))
            if isinstance(size, int):
                return size
            leaf, dim = map(int, size.removeprefix("stride ").split("."))
            kind = TensorStride if size.startswith("stride ") else TensorSize
            sources[size] = kind(self.leaves[leaf], dim)
            return ("sym", size)

        return Guard("SIZE", FunctionSource(), ((op, tree(left), tree(right)), sources))

    def apart(self) -> list[Guard]:
        """What a program writes to shares no memory with anything else that it reads or writes."""
        outputs = self.signature.outputs
        buffers = {record["target"] for record in outputs if record["kind"] == "buffer_mutation"}
        if not buffers and not self.known.written:
            return []
        sources = [source for source, record in zip(self.leaves, self.signature.leaves) if record["kind"] == "tensor"]
        memory: dict[int, Source] = {}
        for kind, target, *_ in self.version.inputs:
            if kind in self.known.tensors and (self.known.written or target in buffers):
                value = self.known.tensors[kind][target]
                memory.setdefault(value.untyped_storage().data_ptr(), self.source(kind, target))
        sources += memory.values()
        return [Guard("NO_OVERLAP", sources[0], tuple(sources))] if len(sources) > 1 else []
