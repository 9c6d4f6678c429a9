"""`package`: programs with the machine code that runs them. docs/export-format.md specifies the file.

Takes exported programs, by name, and targets; compiles each for inference and writes one file. Always holds: whatever a
compiled version relies on beside its program's signature is written as a condition of that version; sizes of 1 that the
general version leaves out have a version of their own.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from fusewright.backends.native import as_data
from fusewright.backends.registry import GraphToCompile
from fusewright.base import options as option_tables
from fusewright.base.errors import CannotFunctionalise, ExportError, OptionError, describe_break, near_misses
from fusewright.base.events import STREAM
from fusewright.base.options import TARGETS
from fusewright.base.pytorch import torch
from fusewright.base.rewrites import Rewrites
from fusewright.base.signals import GraphBreak, SkipFrame
from fusewright.capture.attempt import capture_frame
from fusewright.capture.frame import CapturedFrame
from fusewright.capture.guards.sources import TensorSize
from fusewright.capture.settings import CaptureOptions
from fusewright.codegen.device_kernel import Unsupported
from fusewright.exporting import device_code
from fusewright.exporting.archive import stored, texts_of, weights_of, write_weights
from fusewright.exporting.conditions import Version
from fusewright.exporting.dims import Dim
from fusewright.exporting.packaged import (
    MANIFEST,
    PACKAGE_VERSION,
    SEAL,
    ed25519_key,
    is_name,
    made_with,
)
from fusewright.exporting.prepare import described, operators_of, preparation
from fusewright.exporting.program import ExportedProgram, ProgramModule, holds, zeros_of
from fusewright.exporting.request import STAND_INS, Request, choose_roots, stand_in
from fusewright.exporting.results import flat_results
from fusewright.exporting.standalone import BY_MEMORY, by_kernels, channels_last_weights, check, in_loops
from fusewright.exporting.symbols import Captured, located
from fusewright.exporting.trace import alone, decomposed, sizes_again, tree
from fusewright.graph.builder import env_of
from fusewright.runtime import cuda_code
from fusewright.runtime.artifact import NotSerialisable, dump
from fusewright.runtime.host import needs
from fusewright.sizes.expressions import Relation, Symbol, free_symbols

MOST_VERSIONS = 8
"""Of one program for one target: one in general, others for sizes of 1."""
_MOST_TRIES = 20_000


def package(
    programs: ExportedProgram | Mapping[str, ExportedProgram],
    file: Any,
    targets: tuple[str, ...],
    options: Mapping[str, Any] | None,
    sign_key: Any,
    standalone: bool,
) -> None:
    """See `fusewright.package`."""
    named = dict(programs) if isinstance(programs, Mapping) else {"forward": programs}
    for name, program in named.items():
        if not is_name(name) or not isinstance(program, ExportedProgram):
            raise ExportError(
                f"package takes exported programs by names that are identifiers, got {name!r}: {program!r:.80}"
            )
    wanted = (targets,) if isinstance(targets, str) else tuple(dict.fromkeys(targets))
    if not named or not wanted:
        raise ExportError("package takes at least one program and one target")
    wanted, archs = _targets(wanted, named, standalone)
    if standalone:
        named = channels_last_weights(named)
    seal = None if sign_key is None else ed25519_key(sign_key, "sign_key", "Private").sign
    every = {
        f"{name}/{weight}": value for name, program in named.items() for weight, value in weights_of(program).items()
    }
    tensors, stored_as = stored(every)
    parts: dict[str, bytes] = {}
    operators: dict[str, Any] = {}
    manifest: dict[str, Any] = {"format": PACKAGE_VERSION, "made_with": made_with(), "programs": {}}
    manifest["targets"] = {target: dict(zip(("machine", "flags"), needs(target))) for target in wanted}
    if archs:
        wanted = (device_code.TARGET,)
        manifest["targets"] = {device_code.TARGET: {"machine": "cuda", "flags": [f"sm_{arch}" for arch in archs]}}
    for name, program in named.items():
        own = {weight: stored_as[f"{name}/{weight}"] for weight in weights_of(program)}
        parts |= {f"{name}/{part}": text.encode() for part, text in texts_of(program, own).items()}
        sizes = example_sizes(program)
        versions = [
            version
            for target in wanted
            for version in compiled(program, target, sizes, options, name, standalone, archs)
        ]
        records = []
        for number, version in enumerate(versions):
            part = f"{name}/{number}.code"
            try:
                parts[part] = dump(version.graph)
            except NotSerialisable as error:
                raise ExportError(f"{name} cannot be packaged: it holds {error}") from error
            records.append({"part": part, **version.to_json()})
            if archs:
                records[-1]["kernels"] = f"{name}/{number}.cuda"
                parts[f"{name}/{number}.cuda"] = version.device_code
            operators |= described(operators_of(version.graph))
            prepared = preparation(version, program, sizes)
            if prepared is not None:
                unpacked = {**(options or {}), "pack_weights": False}
                (made,) = _versions(prepared.program, version.target, {}, unpacked, name)
                part = f"{name}/{number}.prepare"
                parts[part] = dump(made.graph)
                records[-1]["prepare"] = prepared.to_json(part, made.inputs)
        manifest["programs"][name] = {"sizes": sizes, "versions": records}
    manifest["operators"] = operators
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        hashes = {"weights.safetensors": write_weights(archive, tensors)}
        for part, data in parts.items():
            archive.writestr(zipfile.ZipInfo(part), data)
            hashes[part] = hashlib.sha256(data).hexdigest()
        text = json.dumps({**manifest, "hashes": hashes}, indent=1).encode()
        archive.writestr(zipfile.ZipInfo(MANIFEST), text)
        if seal is not None:
            archive.writestr(zipfile.ZipInfo(SEAL), seal(text))


def _targets(
    wanted: tuple[str, ...], named: Mapping[str, ExportedProgram], standalone: bool
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Processors, or architectures of GPUs: those asked for, or of this machine's where the programs are on a GPU.
    Raises OptionError for a name that is neither, ExportError for both in one file."""
    archs = {target: device_code.arch_of(target) for target in wanted}
    for target, arch in archs.items():
        if target not in TARGETS and arch is None:
            known = (*TARGETS, "sm_80", "sm_90")
            raise OptionError(f"unknown target {target!r}: {near_misses(str(target), known)}")
    devices = {device for program in named.values() for device in _devices(program)}
    if wanted == ("native",) and "cuda" in {device.type for device in devices}:
        indices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
        return wanted, tuple(dict.fromkeys(cuda_code.processor(index).arch for index in indices))
    on_gpu = [arch for arch in archs.values() if arch is not None]
    if on_gpu and (len(on_gpu) < len(wanted) or standalone):
        raise ExportError("a package is for processors or for GPUs, and one for GPUs is not standalone")
    if bool(on_gpu) != ("cuda" in {device.type for device in devices}):
        raise ExportError(f"the programs are on {', '.join(sorted(map(str, devices)))}, and the targets are {wanted}")
    return wanted, tuple(on_gpu)


def _devices(program: ExportedProgram) -> set[torch.device]:
    found = {value.device for value in weights_of(program).values()}
    return found | {torch.device(one["device"]) for one in program.graph_signature.leaves if one["kind"] == "tensor"}


def example_sizes(program: ExportedProgram) -> dict[str, int]:
    """A value of each size that may change: the example's, or some that the program holds for."""
    symbols = program.graph_signature.symbols
    if program.example_inputs is not None:
        leaves = torch.utils._pytree.tree_leaves(program.example_inputs)
        return {name: int(leaves[known["leaf"]].shape[known["dim"]]) for name, known in symbols.items()}
    choices = []
    for known in symbols.values():
        least, most = max(2, known["min"]), known["max"]
        fits = [size for size in STAND_INS if size >= least and (most is None or size <= most)]
        choices.append([*fits, known["min"]] if not fits or most is not None else fits)
    for tried in itertools.islice(itertools.product(*choices), _MOST_TRIES):
        values = dict(zip(symbols, tried))
        if all(holds(fact, values) for fact in program.graph_signature.constraints):
            return values
    raise ExportError("no sizes were found that the program holds for: package it in the process that exports it")


def compiled(
    program: ExportedProgram,
    target: str,
    sizes: Mapping[str, int],
    options: Mapping[str, Any] | None,
    name: str,
    standalone: bool = False,
    archs: tuple[int, ...] = (),
) -> list[Version]:
    """The program compiled for inference on `target`: one version for its sizes in general, and others for sizes of 1
    where the general one is not for them. sizes: of the example, by symbol; archs: of GPUs, where it is on one."""
    if not standalone:
        return _versions(program, target, sizes, options, name, archs)
    options = {**(options or {}), "pack_weights": False, "library_products": False, "vector_functions": False}
    if any("type" not in node.meta for node in program.graph.nodes if node.op != "output"):  # it was loaded
        program = decomposed(program, lambda node: node.target, native=True)  # type: ignore[arg-type, return-value]
    by_memory = any(node.target in BY_MEMORY for node in program.graph.nodes)
    candidates = [in_loops] if by_memory else [by_kernels(target, True), by_kernels(target, False), in_loops]
    for number, function_of in enumerate(candidates):
        written = decomposed(program, function_of, laid_out=True, native=True)
        made = _versions(written, target, sizes, options, name)
        try:
            for version in made:
                check(name, version.graph, program.graph)
            return made
        except ExportError:  # a product may be left whose kernel does not fit: loops always do
            if number == len(candidates) - 1:
                raise
    raise AssertionError("the last one returns or raises")


def compiled_here(program: ExportedProgram, sizes: Mapping[str, int], name: str) -> list[Version]:
    """The same for this machine's processor, or its GPU."""
    _, archs = _targets(("native",), {name: program}, False)
    return compiled(program, "native", sizes, None, name, False, archs)


def _versions(
    program: ExportedProgram,
    target: str,
    sizes: Mapping[str, int],
    options: Mapping[str, Any] | None,
    name: str,
    archs: tuple[int, ...] = (),
) -> list[Version]:
    processor = "native" if archs else target
    settings = option_tables.settings(backend="native", options={**(options or {}), "target": processor})
    request = _request(program, sizes)
    waiting: list[dict[str, int]] = [{}]
    made: list[Version] = []
    with alone(), torch.no_grad(), cuda_code.generating_for(archs):
        for fixed in waiting:  # grows
            compiling = _Compiling(request, program, settings, name, target, archs)
            version, ones = compiling.version(fixed)
            made.append(version)
            further = [{**fixed, label: 1} for label in ones]
            waiting += [one for one in further if one not in waiting and len(waiting) < MOST_VERSIONS]
    return made


def _request(program: ExportedProgram, sizes: Mapping[str, int]) -> Request:
    signature = program.graph_signature
    leaves: list[Any] = []
    for record in signature.leaves:
        if record["kind"] == "value":
            leaves.append(record["value"])
            continue
        leaves.append(zeros_of(record, sizes))
    for device in _devices(program):
        if device.type not in ("cpu", "cuda"):
            raise ExportError(f"packages hold code for CPUs and CUDA's GPUs, and the program is on {device}")
    again = sizes_again(program, every=True)
    dims = {(leaf, dim): size for leaf, named in enumerate(again) for dim, size in named.items()}
    names = [record["name"] for record in signature.leaves]
    request = Request(program.module(), leaves, program.in_spec, names, dims)
    choose_roots(request)
    return request


def _flat(module: ProgramModule, leaves: tuple[Any, ...]) -> Any:
    # The second result sees to it that there is a graph: it is taken out again.
    return module.fusewright_run(leaves), torch.zeros((), device="cpu")


class _Compiling:
    """One version of a program."""

    def __init__(
        self, request: Request, program: ExportedProgram, settings: Any, name: str, target: str, archs: tuple[int, ...]
    ) -> None:
        self.request, self.program, self.settings, self.name = request, program, settings, name
        self.target, self.archs = target, archs

    def version(self, fixed: dict[str, int]) -> tuple[Version, list[str]]:
        """The version where the sizes `fixed` are so, and the labels of sizes that must be 2 or more in it but may be 1
        in the program."""
        leaves = tuple(stand_in(self.request, leaf, fixed) for leaf in range(len(self.request.leaves)))
        frame = self._captured(leaves)
        graph = frame.graph
        assert graph is not None
        env, positions = (
            env_of(graph),
            {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)},
        )
        symbols = located(self.request, Captured(frame, graph, env, list(leaves), positions))
        results = [self._result(kind, target, positions) for kind, target in self._results(frame, leaves)]
        inputs = self._inputs(frame, positions)
        seldom = frozenset(at for at, (kind, *_) in enumerate(inputs) if kind in ("state", "constant"))
        rewrites = Rewrites(self.settings["stop_after_rewrites"])
        to_compile = GraphToCompile(
            graph, frame.constants, frame.example_inputs, self.name, self.settings, STREAM.emit, None, seldom, rewrites
        )
        try:
            made, kernels = as_data(to_compile)
        except (Unsupported, CannotFunctionalise) as error:
            raise ExportError(f"{self.name} cannot be packaged: {error}") from error
        places = {one: f"{leaf}.{dim}" for (leaf, dim), one in symbols.at.items()}
        facts = [["==", self._place(label), size] for label, size in fixed.items()]
        ones: list[str] = []
        larger = [Relation("<=", 2, one) for one in ([] if env is None else sorted(env.assumed, key=str))]
        for fact in [*([] if env is None else env.guards), *larger]:
            said, follows = symbols.of_roots(fact)
            if follows:
                continue
            told = [said.op, _named(tree(said.left), places), _named(tree(said.right), places)]
            facts += [told] if told not in facts else []
            if fact in larger:
                ones += [symbols.labels[one] for one in free_symbols(said.right) if isinstance(one, Symbol)]
        may_be_one = [label for label in dict.fromkeys(ones) if self._least(label) <= 1]
        if self.archs and made.code:
            raise ExportError(f"{self.name} cannot be packaged: it computes on the CPU and on a GPU")
        code = device_code.written(kernels, self.archs) if self.archs else b""
        return Version(self.target, inputs, results, facts, made, code), may_be_one

    def _captured(self, leaves: tuple[Any, ...]) -> CapturedFrame:
        try:
            arguments: Any = (self.request.model, leaves)
            frame = capture_frame(_flat, arguments, CaptureOptions(fullgraph=True))  # type: ignore[arg-type]
        except (GraphBreak, SkipFrame) as signal:
            report = describe_break(signal.code, signal.detail, signal.stack)
            raise ExportError(f"{self.name} cannot be packaged:\n{report}") from None
        if frame.graph is None or frame.eager_reason:
            raise ExportError(f"{self.name} cannot be packaged: {frame.eager_reason or 'it computes nothing'}")
        return frame

    def _results(self, frame: CapturedFrame, leaves: tuple[Any, ...]) -> list[tuple[str, Any]]:
        """What each result is. The last output of the graph, which `_flat` has added, is taken out of it."""
        flat, _ = flat_results(frame, self.request.model, (leaves,))
        assert frame.graph is not None
        (output,) = frame.graph.find_nodes(op="output")
        (*kept, added), (*kinds, _) = output.args[0], output.meta["type"]
        output.args, output.meta["type"] = (tuple(kept),), tuple(kinds)
        if isinstance(added, torch.fx.Node) and not added.users:
            frame.graph.erase_node(added)
        return flat

    def _result(self, kind: str, target: Any, positions: dict[int, int]) -> list[Any]:
        return self._outside(target, positions) if kind == "tensor" else [kind, target]

    def _outside(self, value: Any, positions: dict[int, int]) -> list[Any]:
        """Where a tensor from outside of the graph is found."""
        if id(value) in positions:
            return ["leaf", positions[id(value)]]
        for kind, tensors in (("state", self.program.state), ("constant", self.program.constants)):
            for name, one in tensors.items():
                if one is value:
                    return [kind, name]
        raise ExportError(f"{self.name} cannot be packaged: it reads a tensor that is not part of the program")

    def _inputs(self, frame: CapturedFrame, positions: dict[int, int]) -> list[list[Any]]:
        leaf_of = {
            source: positions[id(real)]
            for source, real in zip(frame.inputs, frame.example_inputs)
            if id(real) in positions
        }
        found = []
        for source, real in zip(frame.inputs, frame.example_inputs, strict=True):
            if isinstance(source, TensorSize) and source.base in leaf_of:
                found.append(["size", leaf_of[source.base], source.dim])
            elif isinstance(real, torch.Tensor):
                found.append(self._outside(real, positions))
            else:
                raise ExportError(f"{self.name} cannot be packaged: it depends on {source.text()}")
        return found

    def _place(self, label: str) -> str:
        for (leaf, dim), size in self.request.dims.items():
            if isinstance(size, Dim) and size.name == label and (size.scale, size.offset) == (1, 0):
                return f"{leaf}.{dim}"
        raise AssertionError(f"{label} is a size of some argument")

    def _least(self, label: str) -> int:
        return min(size.min for size in self.request.dims.values() if isinstance(size, Dim) and size.name == label)


def _named(size: Any, places: Mapping[Symbol, str]) -> Any:
    """A size as plain data, over places of the arguments instead of symbols."""
    if isinstance(size, list):
        return [size[0], _named(size[1], places), _named(size[2], places)]
    return size if isinstance(size, int) else next(place for one, place in places.items() if str(one) == size)
