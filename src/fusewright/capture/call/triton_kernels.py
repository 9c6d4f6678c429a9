"""Launches of the program's own Triton kernels: one operator each, between the operators around it.

Takes `kernel.run` of a kernel, plain, autotuned or with heuristics, which is where `kernel[grid](...)` leads; records
`fusewright::launch` and copies what the kernel has written to where the program sees it. Always holds: a grid is
computed by the program's own function, for each configuration that may be chosen; a tensor that the kernel writes
shares no memory with another argument.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fusewright._native import isinstance
from fusewright.base.signals import GraphBreak
from fusewright.capture.border.values.symbolic import concrete
from fusewright.operators import user_kernels
from fusewright.operators.rules.common import Undecided, is_dense
from fusewright.operators.user_kernels import Launch, Number, Tensor
from fusewright.record.special_operators import UNINITIALISED
from fusewright.record.traced_tensor import TracedTensor, memory_root
from fusewright.sizes.strides import shares_elements
from fusewright.sizes.symint import dim_of
from fusewright.sizes.tensor_type import TensorType

if TYPE_CHECKING:
    from fusewright.capture.border.interfaces import Tracer

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_MOST_CONFIGURATIONS = 16
"""The IR of more is not looked at: all tensors then count as written."""
_DTYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


def _refuse(reason: str) -> GraphBreak:
    return GraphBreak("untraceable-call", f"a Triton kernel {reason}")


def run(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`kernel.run(*args, grid=..., warmup=False, **kwargs)`."""
    kernel, *positional = args
    named = dict(kwargs)
    grid, warmup = named.pop("grid"), named.pop("warmup", False)
    outside = tracer.world.outside(kernel)
    if warmup or tracer.recorder.level != "aten" or outside is None:
        raise _refuse("that is warmed up, made inside, or met by another backend")
    tracer.world.guard_identity(kernel)
    _Launching(tracer, outside.real, positional, named).record(grid)


class _Launching:
    """One launch, while it is recorded."""

    def __init__(self, tracer: Tracer, kernel: Any, positional: list[Any], named: Kwargs) -> None:
        self.tracer, self.kernel, self.named = tracer, kernel, named
        self.positional = positional
        self.base = kernel
        while type(self.base).__name__ in ("Autotuner", "Heuristics"):
            self.base = self.base.fn
        self.parameters = inspect.signature(self.base.fn).parameters
        names = list(self.parameters)
        if len(positional) > len(names):
            raise _refuse("with too many arguments")
        self.given = dict(zip(names, positional)) | named
        self.tensors: list[TracedTensor] = []
        self.numbers: list[Any] = []

    def record(self, grid: Any) -> None:
        for value in self.given.values():
            if isinstance(value, torch.Tensor):
                if type(value) is not TracedTensor or value.recorder is not self.tracer.recorder:
                    raise _refuse("over a tensor that is not traced")
                if not any(value is known for known in self.tensors):
                    self.tensors.append(value)
        for value in self.tensors:
            self.numbers += [*value.tensor_type.shape, *value.tensor_type.stride]
        configurations = list(self._configurations(self.kernel, {}))
        written = self._written(configurations)
        self._check(written)
        positional = tuple(map(self._argument, self.positional))
        named = tuple((name, self._argument(value)) for name, value in self.named.items())
        grids = tuple(self._grid(grid, meta) for meta in configurations)
        fresh = [index in written and self._is_fresh(value) for index, value in enumerate(self.tensors)]
        layouts = tuple((one.ndim, one.dtype, one.device, new) for one, new in zip(self.tensors, fresh))
        laid_out = frozenset(index for index in written if _is_laid_out(self.tensors[index].tensor_type))
        key = user_kernels.register(Launch(self.kernel, positional, named, layouts, tuple(written), laid_out, grids))
        operands = [value for value, new in zip(self.tensors, fresh) if not new]
        targets = tuple(self.tensors[index] for index in written)
        # autograd knows nothing of what a kernel does
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(targets):
            kinds = user_kernels.result_types(key, self.numbers, ())
            results = self.tracer.recorder.record(user_kernels.LAUNCH, (key, self.numbers, operands), kinds)
            for target, result in zip(targets, results, strict=True):
                self.tracer.world.torch_call(torch._C.TensorBase.copy_, (target, result), {})

    def _argument(self, value: Any) -> Any:
        """As the operator is to find it."""
        if isinstance(value, torch.Tensor):
            return Tensor(next(index for index, known in enumerate(self.tensors) if known is value))
        if isinstance(value, torch.SymInt) or type(value) is int:
            self.numbers.append(dim_of(value))
            return Number(len(self.numbers) - 1)
        value = concrete(value)
        outside = self.tracer.world.outside(value)
        if outside is not None and type(value).__module__.startswith("triton.language"):  # a dtype, a constexpr
            self.tracer.world.guard_identity(value)
            return outside.real
        if not isinstance(value, (bool, float, str, torch.dtype, type(None))):
            raise _refuse(f"with a {type(value).__qualname__}")
        return value

    def _configurations(self, kernel: Any, chosen: Kwargs) -> Iterator[Kwargs]:
        """What autotuning and heuristics add to the arguments, for each configuration."""
        kind = type(kernel).__name__
        if kind == "Autotuner":
            for configuration in kernel.configs:
                yield from self._configurations(kernel.fn, chosen | configuration.kwargs)
        elif kind == "Heuristics":
            for name, heuristic in kernel.values.items():
                loaded = self.tracer.world.load(heuristic, self.tracer.world.constant(heuristic, "heuristic"))
                chosen = chosen | {name: concrete(self.tracer.call(loaded, ({**self.given, **chosen},)))}
            yield from self._configurations(kernel.fn, chosen)
        else:
            yield chosen

    def _meta(self, chosen: Kwargs) -> Kwargs:
        defaults = {
            name: one.default for name, one in self.parameters.items() if one.default is not inspect.Parameter.empty
        }
        values = defaults | self.given | chosen
        return {name: values[name] for name in self.parameters if name in values}

    def _grid(self, grid: Any, chosen: Kwargs) -> tuple[Kwargs, int]:
        found = self.tracer.call(grid, (self._meta(chosen),)) if callable(grid) else grid
        sizes = list(found)
        if not all(isinstance(size, (int, torch.SymInt)) for size in sizes) or not 1 <= len(sizes) <= 3:
            raise _refuse("over a grid that is not of numbers")
        self.numbers += [*map(dim_of, sizes), *(1 for _ in range(3 - len(sizes)))]
        return chosen, len(self.numbers) - 3

    def _written(self, configurations: list[Kwargs]) -> list[int]:
        """The tensors that the kernel may write."""
        everything = list(range(len(self.tensors)))
        names: set[str] = set()
        layer = self.kernel
        while layer is not self.base:
            if type(layer).__name__ == "Autotuner":
                if any(one.pre_hook is not None for one in layer.configs):
                    return everything
                names.update(layer.reset_to_zero)
            layer = layer.fn
        if getattr(self.base, "pre_run_hooks", None) or len(configurations) > _MOST_CONFIGURATIONS:
            return everything
        for chosen in configurations:
            found = user_kernels.written(self.base, *self._signature(self._meta(chosen)))
            if found is None:
                return everything
            names |= found
        values = [value for name, value in self.given.items() if name in names]
        return [index for index, known in enumerate(self.tensors) if any(known is value for value in values)]

    def _signature(self, meta: Kwargs) -> tuple[dict[str, str], dict[str, Any]]:
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            value = meta.get(name)
            if isinstance(value, torch.Tensor) and value.dtype in _DTYPES:
                signature[name] = "*" + _DTYPES[value.dtype]
            elif "constexpr" in str(parameter.annotation) or not isinstance(value, (int, float, torch.SymInt)):
                signature[name] = "constexpr"
                constants[name] = concrete(value)
            else:
                signature[name] = "i1" if isinstance(value, bool) else "fp32" if isinstance(value, float) else "i64"
        return signature, constants

    def _check(self, written: list[int]) -> None:
        for index in written:
            value = self.tensors[index]
            if shares_elements(value.tensor_type):
                raise _refuse("that writes into a tensor whose elements share memory")
            for other in self.tensors:
                if other is not value and memory_root(other) is memory_root(value):
                    raise _refuse("that writes into memory which another argument shares")

    def _is_fresh(self, value: TracedTensor) -> bool:
        """Whether nobody has written to it, nor read it."""
        node = value.node
        return node.target in UNINITIALISED and not node.users and value.tensor_type.offset == 0


def _is_laid_out(kind: TensorType) -> bool:
    """Whether a tensor of this type is known to fill its memory."""
    try:
        return is_dense(kind)
    except Undecided:
        return False


def wrap(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """`torch.library.wrap_triton`: the kernel itself, whose launches are recorded anyway."""
    return (*args, *kwargs.values())[0]


def call_operator(tracer: Tracer, args: Args, kwargs: Kwargs) -> Any:
    """torch.library.custom_op: the operator behind the Python object, so that it is one node that prints and runs. One
    that launches Triton kernels (triton_op) is what its function records."""
    tracer.world.guard_identity(args[0])
    inside = _inside_operator(args[0]) if tracer.recorder.level == "aten" else None
    if inside is not None:
        return tracer.call(tracer.world.load(inside, tracer.world.constant(inside, "operator")), args[1:], kwargs)
    return tracer.world.torch_call(args[0]._opoverload, args[1:], kwargs)


def _inside_operator(operator: Any) -> Any:
    """The Python function of an operator that torch.library.triton_op has made, if it needs no gradient of its own."""
    made: Any = getattr(operator, "_init_fn", None)
    code = getattr(made, "__code__", None)
    if code is None or code.co_qualname != "triton_op.<locals>.dec.<locals>.backend_fn":
        return None
    if getattr(operator, "_backward_fn", None) is not None:
        return None
    return inspect.getclosurevars(made).nonlocals["fn"]


NAMED_ROWS: dict[tuple[str, str], Any] = {
    ("torch._library.custom_ops", "CustomOpDef.__call__"): call_operator,
    ("torch._library.triton", "wrap_triton"): wrap,
    ("triton.runtime.jit", "JITFunction.run"): run,
    ("triton.runtime.interpreter", "InterpretedFunction.run"): run,
    ("triton.runtime.autotuner", "Autotuner.run"): run,
    ("triton.runtime.autotuner", "Heuristics.run"): run,
}
