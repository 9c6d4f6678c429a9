"""`load_package`: programs that run by the machine code in their file.

Takes a path, an open file or bytes; gives a `Package`, whose programs are called as compiled functions are: guards that
are built from the signature run natively, then the plan. Always holds: no byte of code is used before its hash (and the
signature, where a key is given) holds; no compiler stage is imported, unless no code in the file runs here; what no
compiled version is for runs operator by operator.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem, itemgetter
from typing import Any, Literal

from torch.utils import _pytree as pytree

from fusewright import _native
from fusewright.base.errors import ExportError, ProgramFileError, ProgramInputError, RuntimeFallback
from fusewright.base.options import TARGETS
from fusewright.base.pytorch import torch
from fusewright.capture.guards import build_program
from fusewright.capture.guards.sources import Item, Local
from fusewright.exporting import device_code
from fusewright.exporting.archive import (
    GRAPH,
    SIGNATURE,
    WEIGHTS,
    guarded,
    read_json,
    read_parts,
    read_program,
    read_weights,
    require,
)
from fusewright.exporting.conditions import Conditions, Known, Version, Walk
from fusewright.exporting.program import (
    RELATIONS,
    SIZE_OPERATORS,
    ExportedProgram,
    ProgramModule,
    laid_out,
)
from fusewright.exporting.subclasses import replaced
from fusewright.process import PROCESS
from fusewright.runtime import artifact
from fusewright.runtime.artifact import ArtifactError, CompiledGraph, load_graph
from fusewright.runtime.host import runs_here
from fusewright.runtime.launch import NOTHING, LoadError, load_with_code
from fusewright.runtime.parameters import with_prepacking

PACKAGE_VERSION = 1
MANIFEST, SEAL = "package.json", "package.ed25519"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}\Z")
_PART = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}/(?:graph\.txt|signature\.json|[0-9]{1,4}\.(?:code|prepare|cuda))\Z")
_PREFERRED = (device_code.TARGET, "native", *sorted((target for target in TARGETS if target != "native"), reverse=True))


def is_name(name: Any) -> bool:
    """Whether a program in a package may have this name."""
    return isinstance(name, str) and _NAME.match(name) is not None and not hasattr(Package, name)


def made_with() -> dict[str, Any]:
    """What a plan fits besides the processor: PyTorch's C functions, and the form of plans."""
    return {"torch": torch.__version__.partition("+")[0], "plan": artifact.VERSION}


# --- the file --------------------------------------------------------------------------------------------------------


def load_package(file: Any, verify_key: Any, target: str | None) -> Package:
    """See `fusewright.load_package`."""
    parts = read_parts(file, lambda name: name in (MANIFEST, SEAL, WEIGHTS) or _PART.match(name) is not None)
    for name in (MANIFEST, WEIGHTS):
        require(name in parts, f"{name}: is missing: the file is no package")
    if verify_key is not None:
        _verify(parts, verify_key)
    manifest = guarded(MANIFEST, lambda: read_json(bytes(parts[MANIFEST])))
    require(manifest.get("format") == PACKAGE_VERSION, f"{MANIFEST}: format {manifest.get('format')!r:.40}")
    guarded(MANIFEST, lambda: _check_hashes(parts, manifest["hashes"], verify_key is not None))
    tensors = read_weights(parts)
    made: dict[str, Any] = {}
    programs: dict[str, ExportedProgram] = {}
    records = guarded(MANIFEST, lambda: dict(manifest["programs"]))
    for name in records:
        require(is_name(name), f"{MANIFEST}: {name!r:.80} is no name of a program")
        own = {part: parts.get(f"{name}/{part}") for part in (GRAPH, SIGNATURE)}
        for part, data in own.items():
            require(data is not None, f"{name}/{part}: is missing")
        programs[name] = read_program(own, tensors, made, lazily=True)  # type: ignore[arg-type]
    needs = guarded(MANIFEST, lambda: _needs(manifest))
    chosen = _chosen(needs, manifest.get("made_with"), target)
    if chosen is None:
        return Package({name: _compiled(program, records[name], name) for name, program in programs.items()})
    read = functools.partial(_versions, parts, target=chosen)
    return Package(
        {name: EntryPoint(program, read(records[name], program), chosen) for name, program in programs.items()}
    )


def ed25519_key(key: Any, argument: str, half: Literal["Private", "Public"]) -> Any:
    """An Ed25519 key of the `cryptography` package, given as such or as its 32 bytes. Raises ExportError, which names
    the argument."""
    try:
        ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError:
        raise ExportError(f"{argument} needs the package cryptography: pip install fusewright[sign]") from None
    kind = getattr(ed25519, f"Ed25519{half}Key")
    if isinstance(key, (bytes, bytearray)):
        try:
            key = getattr(kind, f"from_{half.lower()}_bytes")(bytes(key))
        except ValueError as error:
            raise ExportError(f"{argument} is no Ed25519 key: {error}") from None
    if not isinstance(key, kind):
        raise ExportError(f"{argument} takes an {kind.__name__} or its 32 bytes, got {type(key).__name__}")
    return key


def _verify(parts: Mapping[str, memoryview], key: Any) -> None:
    """Raises ProgramFileError unless the manifest, which has the hashes of all other parts, was signed by this key."""
    key = ed25519_key(key, "verify_key", "Public")
    invalid = importlib.import_module("cryptography.exceptions").InvalidSignature
    require(SEAL in parts, f"{SEAL}: is missing: the package is not signed")
    try:
        key.verify(bytes(parts[SEAL]), bytes(parts[MANIFEST]))
    except invalid:
        raise ProgramFileError(f"{SEAL}: the package was not signed by this key, or was changed") from None


def _check_hashes(parts: Mapping[str, memoryview], hashes: Any, weights: bool) -> None:
    """`weights`: theirs too (against damage they have a checksum, which is checked by now)."""
    require(isinstance(hashes, dict), f"{MANIFEST}: hashes are damaged")
    names = parts.keys() - {MANIFEST, SEAL}
    for name in sorted(names ^ hashes.keys()):
        require(False, f"{name!s:.80}: {'has no hash' if name in names else 'is missing'}")
    for name in names if weights else names - {WEIGHTS}:
        found = hashlib.sha256(parts[name]).hexdigest()
        require(found == hashes[name], f"{name}: its hash differs: the file is damaged")


def _needs(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The targets that the file has code for, and what each needs."""
    for name, need in manifest["targets"].items():
        flags = need["flags"]
        sound = name in (*TARGETS, device_code.TARGET) and type(need["machine"]) is str and isinstance(flags, list)
        require(sound and all(type(flag) is str for flag in flags), f"{MANIFEST}: target {name!r:.40} is damaged")
    return manifest["targets"]


def _chosen(needs: Mapping[str, Any], maker: Any, target: str | None) -> str | None:
    """The target whose code is used; None where none of the file's runs here. `maker`: see `made_with`."""
    if target is not None and target not in needs:
        raise ExportError(f"the package has no code for {target!r}: it has {', '.join(needs)}")
    if maker != made_with():
        return None
    fits = [name for name in _PREFERRED if name in needs and _runs(name, needs[name])]
    if target is not None and target not in fits:
        raise ExportError(f"the package's code for {target!r} does not run on this machine")
    return target or next(iter(fits), None)


def _runs(target: str, need: Mapping[str, Any]) -> bool:
    if target != device_code.TARGET:
        return runs_here(need["machine"], need["flags"])
    return device_code.fits(arch for arch in map(device_code.arch_of, need["flags"]) if arch is not None)


def _versions(parts: Mapping[str, memoryview], record: Any, program: ExportedProgram, target: str) -> list[Version]:
    def read() -> list[Version]:
        found = []
        for one in record["versions"]:
            if one["target"] == target:
                name = one["part"]
                require(_PART.match(name) and name in parts, f"{MANIFEST}: there is no part {name!r:.80}")
                graph = guarded(name, lambda name=name: _graph(bytes(parts[name]), name))  # type: ignore[misc]
                kernels = one.get("kernels")
                sound = kernels is None or (_PART.match(kernels) and kernels in parts)
                require(sound, f"{MANIFEST}: there is no part {kernels!r:.80}")
                code = b"" if kernels is None else bytes(parts[kernels])
                found.append(Version(target, one["inputs"], one["results"], one["facts"], graph, code))
                _check_version(found[-1], program)
        return found

    return guarded(MANIFEST, read)


def _graph(data: bytes, name: str) -> CompiledGraph:
    try:
        return load_graph(data)
    except ArtifactError as error:
        raise ProgramFileError(f"{name}: {error}") from error


def _check_version(version: Version, program: ExportedProgram) -> None:
    """Raises ProgramFileError for a version that does not fit its program."""
    leaves, plan = program.graph_signature.leaves, version.graph.plan
    tensors: dict[str, Any] = {"state": program.state, "constant": program.constants}

    def is_leaf(value: Any) -> bool:
        return type(value) is int and 0 <= value < len(leaves) and leaves[value]["kind"] == "tensor"

    def is_size(leaf: Any, dim: Any) -> bool:
        return is_leaf(leaf) and type(dim) is int and 0 <= dim < len(leaves[leaf]["shape"])

    def is_tree(size: Any, depth: int = 0) -> bool:
        if isinstance(size, list):
            inside = depth < 64 and len(size) == 3 and size[0] in SIZE_OPERATORS
            return inside and is_tree(size[1], depth + 1) and is_tree(size[2], depth + 1)
        if type(size) is str and re.fullmatch(r"\d{1,6}\.\d{1,2}", size):
            return is_size(*map(int, size.split(".")))
        return type(size) is int

    added = 0 if version.graph.prepacking is None else version.graph.prepacking.added
    kinds = plan.inputs[: len(version.inputs)]
    require(len(version.inputs) + added == len(plan.inputs), f"{MANIFEST}: inputs do not fit the plan")
    for (kind, *target), native in zip(version.inputs, kinds):
        good = kind == "size" and len(target) == 2 and is_size(*target) and native != "t"
        good |= kind == "leaf" and is_leaf(*target) and native != "i"
        good |= kind in tensors and target[0] in tensors[kind] and native != "i"
        require(good, f"{MANIFEST}: an input of a plan is damaged")
    require(len(version.results) == len(program.graph_signature.results), f"{MANIFEST}: results do not fit")
    for kind, target in version.results:
        good = kind == "output" and type(target) is int and 0 <= target < len(plan.outputs)
        good |= kind == "leaf" and is_leaf(target)
        good |= kind in tensors and target in tensors[kind]
        good |= kind == "value" and type(target) in (bool, int, float, str, type(None))
        require(good, f"{MANIFEST}: a result of a plan is damaged")
    for op, left, right in version.facts:
        require(op in RELATIONS and is_tree(left) and is_tree(right), f"{MANIFEST}: a condition is damaged")


def _compiled(program: ExportedProgram, record: Mapping[str, Any], name: str) -> EntryPoint:
    """The program, compiled here."""
    on_gpu = "cuda" in {one.get("device") for one in program.graph_signature.leaves}
    if importlib.util.find_spec("triton" if on_gpu else "llvmlite") is None:
        raise ExportError(
            "no code in the package runs on this machine with this PyTorch, and it cannot be compiled again: that "
            f"needs the package {'triton' if on_gpu else 'llvmlite'}"
        )
    compiler = importlib.import_module("fusewright.exporting.package")  # lazy: brings the compiler
    sizes = record.get("sizes")
    symbols = program.graph_signature.symbols
    known = (
        isinstance(sizes, dict) and sizes.keys() == symbols.keys() and all(type(one) is int for one in sizes.values())
    )
    require(known, f"{MANIFEST}: the example's sizes are damaged")
    return EntryPoint(program, compiler.compiled_here(program, sizes, name), "native")


# --- what is called --------------------------------------------------------------------------------------------------


class Package:
    """Programs of a package: `package(x)` calls the only one (or "forward"), `package.decode(x)` one by name.

    programs  the exported programs by name; they share their weights
    target    whose code runs: a name of `package`'s targets ("native" too where the programs were compiled here)
    """

    __slots__ = ("__call__", "__dict__", "__weakref__", "_entries")

    def __init__(self, entries: dict[str, EntryPoint]) -> None:
        self._entries = entries
        for name, entry in entries.items():
            self.__dict__[name] = entry.call
        only = entries.get("forward") or (next(iter(entries.values())) if len(entries) == 1 else None)
        self.__call__ = self._ambiguous if only is None else only.call  # type: ignore[method-assign]

    def _ambiguous(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"the package has several programs, which are called by name: {', '.join(self._entries)}")

    @property
    def programs(self) -> dict[str, ExportedProgram]:
        return {name: entry.program for name, entry in self._entries.items()}

    @property
    def target(self) -> str:
        return next(entry.target for entry in self._entries.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights by name. Where programs have different ones of a name, the later ones are PROGRAM.NAME."""
        found: dict[str, torch.Tensor] = {}
        for name, entry in self._entries.items():
            for weight, value in entry.program.state_dict.items():
                found[weight if found.get(weight, value) is value else f"{name}.{weight}"] = value
        return found

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Writes new values into the weights; all programs see them. A weight that was a tensor subclass is given as
        such, or by its inner tensors. Raises ProgramInputError, and changes nothing, unless there is one of the same
        shape and dtype for every name."""
        own = self.state_dict()
        records: dict[str, Any] = {}
        for name, entry in self._entries.items():
            for weight, record in entry.program.graph_signature.subclasses.items():
                records[weight if records.get(weight, record) == record else f"{name}.{weight}"] = record
        state = replaced(state, records)
        wrong = sorted(own.keys() ^ state.keys())
        if wrong:
            raise ProgramInputError(f"missing or unknown weights: {', '.join(wrong[:8])}")
        for name, value in own.items():
            if (value.shape, value.dtype) != (state[name].shape, state[name].dtype):
                raise ProgramInputError(
                    f"{name} is {value.dtype} {tuple(value.shape)}, got {state[name].dtype} {tuple(state[name].shape)}"
                )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(state[name])


class EntryPoint:
    """One program. call: a native compiled function whose versions are those of the file; see `Package`."""

    def __init__(self, program: ExportedProgram, versions: Sequence[Version], target: str) -> None:
        self.program, self.versions, self.target = program, versions, target
        self.spec: pytree.TreeSpec = program.in_spec
        self.known = Known.of(program.graph_signature, {"state": program.state, "constant": program.constants})
        self.graphs = [_native_plan(version) for version in versions]

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.slowly(args, kwargs)

        self.call = _native.CompiledFunction(call, None)
        self.call.hooked = False
        self.call.plainly = self.by_operators
        self.function = call
        args, kwargs = Local(0, "args"), Local(1, "kwargs")
        walk = Walk()
        walk.enter(self.spec.children()[0], args, (0,))
        walk.enter(self.spec.children()[1], kwargs, (1,))
        if walk.plain:
            for version, graph in zip(versions, self.graphs):
                conditions = Conditions(self.known, version, walk.sources)
                guards = build_program((*walk.guards, *conditions.guards()), conditions.inputs())
                self.call.append(_native.Entry(guards, graph, self.finish(version, walk.paths)))

    @functools.cached_property
    def module(self) -> ProgramModule:
        """What runs operator by operator; read from the file when a call first needs it."""
        return self.program.module()

    @functools.cached_property
    def flat(self) -> list[tuple[Any, Any, Any]]:
        """Guards over flat arguments, the plan and what makes the result, of each version."""
        count = self.spec.num_leaves
        sources = [Item(Local(0, "leaves"), leaf) for leaf in range(count)]
        found = []
        for version, graph in zip(self.versions, self.graphs):
            conditions = Conditions(self.known, version, sources)
            guards = build_program(conditions.guards(), conditions.inputs())
            found.append((guards, graph, self.finish(version, [(0, leaf) for leaf in range(count)])))
        return found

    def slowly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call whose arguments are not as the versions' guards have them: an error; or they are once they are laid
        out in memory as the program says; or the program runs operator by operator."""
        leaves = self.module.fusewright_checked(args, kwargs)
        if PROCESS.stance != "force_eager":
            plain = [_as_example(leaf, record) for leaf, record in zip(leaves, self.program.graph_signature.leaves)]
            if all(plain[leaf] is leaves[leaf] for leaf in self.known.written):
                for guards, graph, finish in self.flat:
                    inputs = guards.inputs((plain,), self.function)
                    if inputs is None:
                        continue
                    try:
                        outputs = graph(*inputs)
                    except RuntimeFallback:
                        break
                    return outputs[0] if finish is None else finish(outputs, self.function, leaves)
        return self.by_operators(*args, **kwargs)

    def by_operators(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch._C._DisableAutocast():
            return self.module(*args, **kwargs)

    def finish(self, version: Version, paths: Sequence[tuple[Any, ...]]) -> Callable[..., Any] | None:
        """Makes the result of the plan's outputs and the call's locals, where the arguments lie at `paths`."""
        if (
            self.program.out_spec.is_leaf()
            and version.results == [["output", 0]]
            and len(version.graph.plan.outputs) == 1
        ):
            return None
        getters = iter([self.getter(kind, target, paths) for kind, target in version.results])
        build = _function(_builder(self.program.out_spec, getters))
        return lambda outputs, function, *locals: build(outputs, locals)

    def getter(self, kind: str, target: Any, paths: Sequence[tuple[Any, ...]]) -> Getter:
        if kind == "output":
            return target
        if kind == "leaf":
            return lambda outputs, locals: functools.reduce(getitem, paths[target], locals)
        value = target if kind == "value" else self.known.tensors[kind][target]
        return lambda outputs, locals: value


def _native_plan(version: Version) -> Any:
    """The plan in memory, with its code. Raises ProgramFileError for code that does not load."""
    compiled = version.graph
    try:
        more = device_code.functions(version.device_code, compiled.plan) if version.device_code else NOTHING
        made = load_with_code(compiled.plan, compiled.code, more=more)
    except (LoadError, ValueError, TypeError) as error:
        raise ProgramFileError(f"code for {version.target}: {error}") from error
    if compiled.prepacking is None:
        return made
    return with_prepacking(made, compiled.prepacking, len(version.inputs))


def _as_example(leaf: Any, record: Mapping[str, Any]) -> Any:
    """A tensor in memory as the program was captured for: strides of dimensions that do not matter too."""
    if record["kind"] != "tensor":
        return leaf
    if type(leaf) is not torch.Tensor:
        if type(leaf) is not torch.nn.Parameter:
            return leaf
        leaf = leaf.detach()
    if leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg() or leaf.requires_grad:
        return leaf.detach().resolve_conj().resolve_neg() if leaf.layout is torch.strided else leaf
    wanted, step = [0] * leaf.dim(), 1
    for dim in reversed(record["order"]):
        wanted[dim] = step
        step *= leaf.shape[dim]
    if leaf.stride() == tuple(wanted):
        return leaf
    return laid_out(leaf, record["order"]).as_strided(leaf.shape, wanted)


Getter = int | Callable[[Any, Any], Any]
"""Gives a part of the result: the plan's output of this number, or a function of all outputs and the call's locals."""


def _function(getter: Getter) -> Callable[[Any, Any], Any]:
    return (lambda outputs, locals: outputs[getter]) if isinstance(getter, int) else getter


def _builder(spec: pytree.TreeSpec, getters: Iterator[Getter]) -> Getter:
    """What builds a container, of what gives its leaves."""
    if spec.is_leaf():
        return next(getters)
    inner = [_builder(child, getters) for child in spec.children()]
    numbers = [one for one in inner if isinstance(one, int)]
    items: Callable[[Any, Any], Any]
    if len(numbers) == len(inner) > 1:
        pick = itemgetter(*numbers)
        items = lambda outputs, locals: pick(outputs)  # noqa: E731  (a tuple, made natively)
        if spec.type is tuple:
            return items
    else:
        functions = [_function(one) for one in inner]
        items = lambda outputs, locals: [one(outputs, locals) for one in functions]  # noqa: E731
    if spec.type in (tuple, list):
        kind = spec.type
        return lambda outputs, locals: kind(items(outputs, locals))
    if spec.type is dict:
        keys = tuple(spec.context)
        return lambda outputs, locals: dict(zip(keys, items(outputs, locals)))
    context, unflatten = spec.context, pytree.SUPPORTED_NODES[spec.type].unflatten_fn
    return lambda outputs, locals: unflatten(items(outputs, locals), context)
