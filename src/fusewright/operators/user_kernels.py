"""Triton kernels that the program itself launches: what one writes, and the operator that launches it.

Takes a kernel, as a capture meets it, with what it is called with; gives a key under which the operator
`fusewright::launch` finds it when a compiled graph runs. Always holds: the operator writes into memory of its own, and
gives that; a tensor counts as written unless the kernel's Triton IR shows that it is not; each tensor reaches the
kernel with the strides that the capture saw. Triton is used as the program has loaded it.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch._ops import OpOverload

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.sizes.expressions import Dim
from fusewright.sizes.tensor_type import TensorType, contiguous_strides


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument: tensor number `index` of the launch."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """An argument: number `index` of the launch."""

    index: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch in a program.

    positional, named  the arguments: each a Tensor, a Number or itself
    layouts   for each tensor its dimensions, dtype, device, and whether it holds nothing yet: the operator then makes
        it. Its sizes and then its strides stand first among the numbers, tensor by tensor
    written   the tensors that the kernel writes; laid_out: those of them that come back with their strides, not
        contiguous
    grids     (meta-parameters, the place of three numbers) for each configuration that may be chosen
    """

    kernel: Any
    positional: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]
    layouts: tuple[tuple[int, torch.dtype, torch.device, bool], ...]
    written: tuple[int, ...]
    laid_out: frozenset[int]
    grids: tuple[tuple[dict[str, Any], int], ...]


_launches: dict[str, Launch] = {}
_places: dict[tuple[int, str, str], str] = {}

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define("launch(str key, SymInt[] numbers, Tensor[] tensors) -> Tensor[]")


def register(launch: Launch) -> str:
    """Enters a launch; gives its key. Numbers count up in each process: a graph from the disk cache holds the key that
    the present capture has given. The rest of the key is what decides the results' types."""
    text = repr((launch.positional, launch.named, launch.layouts, launch.written, sorted(launch.laid_out)))
    place = (id(launch.kernel), text, repr(launch.grids))  # the kernel lives as long as its launch
    if place not in _places:
        digest = hashlib.sha256(repr((launch.layouts, launch.written, sorted(launch.laid_out))).encode()).hexdigest()
        _places[place] = f"{len(_places)}:{digest[:12]}"
        _launches[_places[place]] = launch
    return _places[place]


def _sizes_and_strides(launch: Launch, numbers: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Of each tensor, from where they stand among the numbers."""
    rest = iter(numbers)
    for dimensions, *_ in launch.layouts:
        yield tuple(itertools.islice(rest, dimensions)), tuple(itertools.islice(rest, dimensions))


def _launch(key: str, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    launch = _launches[key]
    given = iter(tensors)
    values: list[torch.Tensor] = []
    layouts = zip(launch.layouts, _sizes_and_strides(launch, numbers), strict=True)
    for index, ((_, dtype, device, fresh), (shape, strides)) in enumerate(layouts):
        value = None if fresh else next(given)
        if value is None or index in launch.written or value.stride() != strides:
            own = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            value = own if value is None else own.copy_(value)
        values.append(value)

    def real(argument: Any) -> Any:
        if type(argument) is Tensor:
            return values[argument.index]
        return numbers[argument.index] if type(argument) is Number else argument

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        for wanted, at in launch.grids:
            if all(_plain(meta.get(name)) == value for name, value in wanted.items()):
                return tuple(numbers[at : at + 3])
        raise RuntimeError("a Triton kernel was launched with meta-parameters that no configuration of it has")

    if all(numbers[launch.grids[0][1] + axis] > 0 for axis in range(3)) or len(launch.grids) > 1:
        named = {name: real(argument) for name, argument in launch.named}
        launch.kernel.run(*map(real, launch.positional), grid=grid, warmup=False, **named)
    return [values[index] if index in launch.laid_out else values[index].contiguous() for index in launch.written]


def _plain(value: Any) -> Any:
    """The value of a `tl.constexpr`."""
    return value.value if type(value).__name__ == "constexpr" else value


def result_types(key: str, numbers: Sequence[Dim], tensors: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """The shape rule. (No kernel may run to find it.)"""
    launch = _launches[key]
    found: list[TensorType] = []
    layouts = zip(launch.layouts, _sizes_and_strides(launch, numbers), strict=True)
    for index, ((_, dtype, device, _), (shape, strides)) in enumerate(layouts):
        if index in launch.written:
            laid_out = strides if index in launch.laid_out else contiguous_strides(shape)
            found.append(TensorType(shape, laid_out, dtype, device, False, 0))
    return tuple(found)


_LIBRARY.impl("launch", _launch, "CompositeExplicitAutograd")
LAUNCH = torch.ops.fusewright.launch.default
RULES: dict[OpOverload, Any] = {LAUNCH: result_types}


# --- what a kernel writes


def written(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> frozenset[str] | None:
    """The names of the arguments through which a kernel may write: `signature` has Triton's types, "constexpr" for
    `constants`. None: its IR cannot be had, or does not tell."""
    try:
        text = _triton_ir(kernel, signature, constants)
    except Exception:  # whatever Triton raises: the caller then takes every tensor as written
        return None
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    found = written_in(text)
    return None if found is None else frozenset(names[position] for position in found)


def _triton_ir(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> str:
    """The kernel's IR, with what it calls inlined. The target does not matter before code is chosen for one."""
    jit, compiler, backends, native = (
        importlib.import_module(f"triton.{name}")
        for name in ("runtime.jit", "compiler", "backends.compiler", "_C.libtriton")
    )
    function = kernel if isinstance(kernel, jit.JITFunction) else jit.JITFunction(kernel.fn)
    target = backends.GPUTarget("cuda", 80, 32)
    backend = compiler.make_backend(target)
    options = backend.parse_options({})
    context = native.ir.context()
    native.ir.load_dialects(context)
    backend.load_dialects(context)
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    source = compiler.ASTSource(function, signature, places, {})
    parts = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *parts, context)
    return str(backend.make_ttir(module, {}, options, 80))


_VALUE = r"%[\w$.-]+"
_ARGUMENT = r"(%[\w$.-]+): ([!\w.]+)"
_LINE = r'(?:(?P<results>%[^=]*?) = )?"?(?P<name>[a-z_]+\.[\w.]+)"?(?P<rest>.*)'
_LOCATION = r"\s*loc\((?:[^()]|\([^()]*\))*\)$"
_LOADS = frozenset({"tt.load", "tt.descriptor_load", "tt.descriptor_gather"})
_STORES = frozenset({
    "tt.store", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_store", "tt.descriptor_scatter",
    "tt.descriptor_reduce",
})  # fmt: skip
_PURE = (
    r"(arith|math|ub)\..*|scf\.(for|if|while|yield|condition)|tt\.(return|reduce|reduce\.return|scan|scan\.return|"
    r"addptr|splat|unsplat|broadcast|expand_dims|reshape|trans|make_range|get_program_id|get_num_programs|dot|"
    r"dot_scaled|bitcast|cat|join|split|gather|histogram|make_tensor_ptr|advance|make_tensor_descriptor|clampf|"
    r"precise_sqrt|precise_divf|mulhiui|fp_to_fp|ptr_to_int|assert|print|map_elementwise|map_elementwise\.return)"
    r"|llvm\.intr\.assume"
)


def written_in(text: str) -> set[int] | None:
    """The positions of the arguments of a function in Triton's IR through which it may write."""
    sources: dict[str, set[str]] = {}
    regions: list[str] = []
    arguments: list[str] = []
    roots: set[str] = set()
    numbers: set[str] = set()
    for raw in text.splitlines():
        line = re.sub(_LOCATION, "", raw.strip())
        if line.startswith(("#", "module", "}", "^")) and "tt.func" not in line:
            if line.startswith("^"):  # the values of a region's start
                for value in re.findall(_VALUE, line):
                    sources.setdefault(value, set()).update(regions[-1:])
            elif line.startswith("}") and regions:
                region = regions.pop()
                if line.endswith("{"):
                    regions.append(region)
            elif line.endswith("{"):
                regions.append("")
            continue
        if "tt.func" in line:
            if arguments:
                return None  # something was not inlined
            arguments = re.findall(_VALUE, line)
            numbers = {name for name, kind in re.findall(_ARGUMENT, line) if not kind.startswith("!tt")}
            regions.append("")
            continue
        parsed = re.match(_LINE, line)
        if parsed is None:
            continue
        name, rest = parsed["name"], parsed["rest"]
        results = [value.partition(":")[0] for value in re.findall(_VALUE, (parsed["results"] or "").replace(":", " "))]
        operands = re.findall(_VALUE, rest)
        if name in _STORES:
            roots.update(operands[:1])
        elif name in _LOADS:
            if "!tt.ptr<!tt.ptr" in rest:
                return None
            operands = []
        elif not re.fullmatch(_PURE, name):
            if name.startswith("cf.") or name == "tt.int_to_ptr":
                return None
            roots.update(operands)
        group = results[0] if results else ""
        if name in ("scf.yield", "scf.condition"):
            sources.setdefault(regions[-1], set()).update(operands)
        elif name in ("scf.for", "scf.while"):
            for carried in re.findall(_VALUE, " ".join(re.findall(r"(%[\w$.-]+) = ", rest))):
                sources.setdefault(carried, set()).add(group)
        for result in results:
            sources.setdefault(result, set()).update(operands[:1] if name == "tt.addptr" else operands)
        if line.endswith("{"):
            regions.append(group)
    return _reached(roots, sources, arguments, numbers)


def _reached(
    roots: Iterable[str], sources: dict[str, set[str]], arguments: Sequence[str], numbers: set[str]
) -> set[int]:
    seen: set[str] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            waiting.extend(sources.get(value, ()))
    return {position for position, name in enumerate(arguments) if name in seen and name not in numbers}
