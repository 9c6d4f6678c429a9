"""Kernels to machine code: one LLVM module for all kernels of a graph, compiled in this process by llvmlite, and object
files loaded back.

Takes `Kernel`s; gives a `CompiledModule` whose object file runtime/machine_code.py loads. The only file that imports
llvmlite, and only when first needed. Always holds: kernels with equal text are compiled once.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fusewright.base.libraries import library_path
from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass, replace
from fusewright.codegen.analysis import tree_size, values_of
from fusewright.codegen.device_kernel import WithoutCode
from fusewright.codegen.kernel_code import KernelCode, symbol_of
from fusewright.codegen.llvm.checked import Checks, with_checks
from fusewright.codegen.llvm.emit.target import LEVELS, Target, describe
from fusewright.codegen.llvm.emitter import KernelText
from fusewright.codegen.llvm.kernel import emit_kernel
from fusewright.codegen.llvm.templates.attention import emit_attention
from fusewright.codegen.llvm.templates.attention_block import emit_attention_block
from fusewright.codegen.llvm.templates.skinny_gemm import emit_product
from fusewright.codegen.signature import signature
from fusewright.schedule.plan import Kernel
from fusewright.schedule.printer import kernel_text
from fusewright.sizes.expressions import substitute

PRINTABLE_NODES = 2000
_library_names = itertools.count()
_resident: list[Any] = []  # LLVM's handles that are never freed: with them would go the code that was loaded


@dataclass(frozen=True, slots=True)
class CompiledModule:
    """codes: by kernel name. object: the object file, whose functions are the codes' symbols; empty when there is none.
    ir: the module's text.
    """

    codes: dict[str, KernelCode]
    object: bytes
    ir: str


@dataclass(frozen=True, slots=True)
class _Machine:
    """LLVM's handles for one target. functions: of llvmlite's library, as they are; lock: llvmlite's around them."""

    binding: Any
    functions: Any
    lock: Any
    target_machine: Any
    passes: Any
    pass_builder: Any
    target: Target


@cache
def _machine(without: frozenset[str] = frozenset(), name: str = "native") -> _Machine:
    """The host, another target of LEVELS, or (to test code for lesser processors on it) the host without some of LLVM's
    feature names."""
    import llvmlite.binding as llvm  # lazy: 0.16 s, and not needed where everything comes from a cache or runs on a GPU

    if name == "native":
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    library = library_path("torch_cpu")  # it exports SLEEF's functions
    if library.exists():
        llvm.load_library_permanently(str(library))
    if name == "native":
        features = {name: on and name not in without for name, on in llvm.get_host_cpu_features().items()}
        triple, cpu = llvm.get_process_triple(), "generic" if without else llvm.get_host_cpu_name()
    else:
        level = LEVELS[name]
        triple, cpu, features = level.triple, level.cpu, dict.fromkeys(level.features, True)
    target = describe(triple, cpu, features, _exported_symbols(library))
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=target.features, opt=2, reloc="pic", codemodel="small"
    )
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    passes = llvm.create_new_module_pass_manager()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    made = _Machine(llvm, llvm.ffi.lib._lib, llvm.ffi.lib._lock._lock, machine, passes, builder, target)
    if hasattr(os, "register_at_fork") and not _resident:
        os.register_at_fork(after_in_child=partial(_begin_anew, made.lock))
    _resident.append(made)
    return made


def _begin_anew(lock: Any) -> None:
    """In the child of a fork: a thread that was in LLVM is not there, and never gives back the lock. What it was using
    is left as it is."""
    lock._at_fork_reinit()
    _machine.cache_clear()
    _jit.cache_clear()


@cache
def _jit() -> Any:
    """LLVM's own loader."""
    machine = _machine()
    _resident.append(machine.binding.create_lljit_compiler(machine.target_machine))
    return _resident[-1]


def _exported_symbols(library: Path) -> Any:
    handle = ctypes.CDLL(str(library)) if library.exists() else None

    @cache
    def exported(name: str) -> bool:
        return handle is not None and hasattr(handle, name)

    return exported


def target_of(name: str) -> Target:
    """A processor that `compile_kernels` generates for: "native" is this one, the others are in LEVELS."""
    return _machine(name=name).target


def host_target() -> Target:
    """This processor."""
    return target_of("native")


def compile_kernels(
    kernels: Sequence[Kernel],
    without: frozenset[str] = frozenset(),
    target: str = "native",
    checks: Mapping[str, Checks] = MappingProxyType({}),
    tell: Callable[[int, int], None] = lambda number, total: None,
    vector_functions: bool = True,
) -> CompiledModule:
    """Compiles `kernels`; equal ones share one function. `target`: this processor, or one of LEVELS; `without`:
    features of this one not to use; `checks`: by name, the kernels whose accesses are checked; `tell`: is told the
    number of each kernel before its code is written, and how many there are; `vector_functions`: SLEEF's, which
    PyTorch's library has, may be called, else only the C library's.

    Raises ValueError for an operation that `capabilities.supports` denies, WithoutCode for kernels that LLVM refuses.
    """
    machine = _machine(without, target)
    processor = machine.target if vector_functions else replace(machine.target, has_symbol=lambda name: False)
    declarations: dict[str, str] = {}
    functions: dict[str, str] = {}
    codes: dict[str, KernelCode] = {}
    texts: dict[Hashable, tuple[KernelText, Kernel]] = {}
    for number, kernel in enumerate(kernels, 1):
        tell(number, len(kernels))
        check = checks.get(kernel.name)
        structure = signature(kernel, by_place=True), check and check.told
        if structure not in texts:
            made = _emit(kernel, processor, declarations)
            if check is not None:
                made = replace(made, body=with_checks(made.body, kernel, check.told, declarations))
            texts[structure] = made, kernel
        text, first = texts[structure]
        text = replace(text, extent=substitute(text.extent, dict(zip(first.sizes, kernel.sizes, strict=True))))
        key = hashlib.sha256(text.body.encode()).hexdigest()
        symbol = symbol_of(key)
        functions.setdefault(symbol, f"define void @{symbol}{text.body}")
        rooms = () if check is None else check.rooms
        codes[kernel.name] = replace(_code(kernel, text, key, symbol, functions[symbol]), sizes=(*kernel.sizes, *rooms))
    ir = _text(machine, declarations, functions.values())
    try:
        return CompiledModule(codes, _compile(machine, ir) if functions else b"", ir)
    except RuntimeError as error:
        refused: dict[str, str] = {}
        for symbol, function in functions.items():
            try:
                _compile(machine, _text(machine, declarations, [function]))
            except RuntimeError as why:
                refused[symbol] = str(why)
        if not refused:  # each alone is taken
            raise
        raise WithoutCode(
            {name: refused[code.symbol] for name, code in codes.items() if code.symbol in refused}
        ) from error


def _text(machine: _Machine, declarations: Mapping[str, str], functions: Iterable[str]) -> str:
    return "\n".join([f'target triple = "{machine.target.triple}"', *declarations.values(), *functions]) + "\n"


def _emit(kernel: Kernel, target: Target, declarations: dict[str, str]) -> KernelText:
    if kernel.product is not None:
        return emit_product(kernel, target, declarations)
    if kernel.attention is not None:
        emit = emit_attention_block if kernel.attention.many else emit_attention
        return emit(kernel, target, declarations)
    return emit_kernel(kernel, target, declarations, torch.get_num_threads())


def _code(kernel: Kernel, text: KernelText, key: str, symbol: str, function: str) -> KernelCode:
    return KernelCode(
        name=kernel.name,
        key=key,
        symbol=symbol,
        source="\n".join([*_comments(kernel), function]),
        buffers=kernel.buffers,
        sizes=kernel.sizes,
        extent=text.extent,
        grain=text.grain,
        locations=kernel.locations,
        origins=kernel.origins,
    )


def _comments(kernel: Kernel) -> list[str]:
    """The kernel's loops and the user's lines. Expressions print as trees, so a kernel that shares much is left out."""
    views = [tree_size(value) for stage in kernel.stages for value in values_of(stage)]
    if sum(views) <= PRINTABLE_NODES:
        return [f"; {line}" for line in kernel_text(kernel).splitlines()]
    return [f"; kernel {kernel.name}", *(f";   {location}" for location in kernel.locations)]


def _compile(machine: _Machine, ir: str) -> bytes:
    """The object file. Calls LLVM's functions themselves: an exception that comes between two lines of llvmlite's
    objects (an interrupt, memory that is short) makes them free memory twice, or leaves their lock taken, for which
    other threads then wait for ever. Here it leaves memory that is not freed."""
    call, error = machine.functions, ctypes.c_char_p()
    with machine.lock:
        context = call.LLVMPY_ContextCreate()
        module = call.LLVMPY_ParseAssembly(context, ir.encode(), ctypes.byref(error))
        if error.value is not None:
            raise RuntimeError(f"LLVM does not take its text: {error.value.decode()}")
        call.LLVMPY_RunNewModulePassManager(machine.passes, module, machine.pass_builder)
        buffer = call.LLVMPY_TargetMachineEmitToMemory(machine.target_machine, module, True, ctypes.byref(error))
        if not buffer:
            raise RuntimeError(f"LLVM makes no object file: {(error.value or b'').decode()}")
        data = ctypes.string_at(call.LLVMPY_GetBufferStart(buffer), call.LLVMPY_GetBufferSize(buffer))
        call.LLVMPY_DisposeMemoryBuffer(buffer)
        call.LLVMPY_DisposeModule(module)
        call.LLVMPY_ContextDispose(context)
    return data


def load_object(data: bytes, symbols: Iterable[str]) -> dict[str, int]:
    """Addresses of `symbols` in an object file made by `compile_kernels`, loaded by LLVM: for platforms that
    runtime/machine_code.py has no loader for. The code stays loaded until the process ends. Raises RuntimeError if the
    file is not loadable.
    """
    machine = _machine()
    names = list(symbols)
    builder = machine.binding.JITLibraryBuilder().add_object_img(data).add_current_process()
    for name in names:
        builder.export_symbol(name)
    tracker = builder.link(_jit(), f"fusewright{next(_library_names)}")
    _resident.append(tracker)
    return {name: tracker[name] for name in names}
