"""Library operators that native code calls through PyTorch's C functions, one operator a row.

Takes an operator; gives its row: the exported function, and who allocates the result. What has no row is called through
its Python operator object, which handles every operator (about 1.5 microseconds more a call).
Always holds: a row's C function takes the operator's arguments in the order of its schema, encoded by `CLASSES`; a new
row therefore needs no code, only a test against eager (tests/loops/test_externs.py runs each).

Source: torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h and c/shim_cpu.h of PyTorch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch

from fusewright.base.records import dataclass
from fusewright.graph.nodes import leaves
from fusewright.loops.ir import BufferRef, Extern
from fusewright.operators.schema import facts

Placement = Literal["out", "returned"]


@dataclass(frozen=True, slots=True)
class ExternRow:
    """symbol: exported C function. placement "out": it writes into a given tensor (its first argument), with the
    strides that has."""

    symbol: str
    placement: Placement


_OUT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")

_RETURNED = (
    "aten::convolution", "aten::convolution_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::addmv", "aten::addbmm", "aten::_cdist_forward", "aten::_cdist_backward", "aten::_trilinear",
    "aten::max_pool2d_with_indices", "aten::max_pool2d_with_indices_backward",
    "aten::max_pool3d_with_indices", "aten::max_pool3d_with_indices_backward",
    "aten::avg_pool2d", "aten::avg_pool2d_backward", "aten::avg_pool3d", "aten::avg_pool3d_backward",
    "aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d",
    "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_max_pool2d", "aten::adaptive_max_pool2d_backward",
    "aten::fractional_max_pool2d", "aten::fractional_max_pool2d_backward", "aten::max_unpool2d",
    "aten::grid_sampler_2d_backward", "aten::grid_sampler_3d", "aten::grid_sampler_3d_backward",
    "aten::upsample_linear1d_backward", "aten::upsample_bicubic2d_backward", "aten::upsample_trilinear3d_backward",
    "aten::replication_pad1d_backward", "aten::replication_pad2d_backward",
    "aten::_embedding_bag", "aten::_embedding_bag_forward_only",
    "aten::cat", "aten::cumsum", "aten::cumprod", "aten::cummax", "aten::cummin", "aten::logcumsumexp",
    "aten::topk", "aten::sort", "aten::kthvalue", "aten::mode", "aten::median", "aten::nanmedian", "aten::histc",
    "aten::masked_scatter",
    "aten::cholesky_inverse", "aten::cholesky_solve", "aten::triangular_solve", "aten::geqrf", "aten::ormqr",
    "aten::lu_unpack",
    "aten::_fft_r2c", "aten::_fft_c2c", "aten::polar", "aten::native_dropout",
    "mkldnn::_convolution_pointwise", "mkldnn::_convolution_transpose_pointwise", "mkldnn::_linear_pointwise",
    "mkl::_mkl_linear",
)  # fmt: skip

_OVERLOADS = {
    # overloads other than `default`, and operators whose C function is named otherwise
    "aten::randint.low": ExternRow("aoti_torch_cpu_randint_low_out", "out"),
    "aten::sort.stable": ExternRow("aoti_torch_cpu_sort_stable", "returned"),
    "aten::searchsorted.Tensor": ExternRow("aoti_torch_cpu_searchsorted_Tensor", "returned"),
    "aten::bucketize.Tensor": ExternRow("aoti_torch_cpu_bucketize_Tensor", "returned"),
    "mkldnn::_convolution_pointwise.binary": ExternRow(
        "aoti_torch_cpu_mkldnn__convolution_pointwise_binary", "returned"
    ),
    "mkldnn::_linear_pointwise": ExternRow("aoti_torch_cpu__linear_pointwise", "returned"),
    "mkldnn::_linear_pointwise.binary": ExternRow("aoti_torch_cpu__linear_pointwise_binary", "returned"),
    "mkl::_mkl_linear": ExternRow("aoti_torch_cpu__mkl_linear", "returned"),
}


def _symbol(name: str) -> str:
    namespace, _, operator = name.partition("::")
    return f"aoti_torch_cpu_{'' if namespace == 'aten' else namespace + '_'}{operator}"


EXTERNS: dict[str, ExternRow] = {
    **{name: ExternRow(_symbol(name) + "_out", "out") for name in _OUT},
    **{name: ExternRow(_symbol(name), "returned") for name in _RETURNED},
    **_OVERLOADS,
}
"""By schema name: "aten::mm", "aten::sort.stable" (an overload other than the default one is named)."""

CUDA_EXTERNS: dict[str, ExternRow] = {
    f"aten::{name}": ExternRow(f"aoti_torch_cuda_{name}", "returned")
    for kind in ("cudnn", "flash", "efficient")
    for name in (f"_scaled_dot_product_{kind}_attention", f"_scaled_dot_product_{kind}_attention_backward")
}
"""Operators that only a GPU has (c_shim_cuda.h). A version of PyTorch that lacks a function calls the operator through
Python."""

OF_A_NEW_TENSOR = frozenset({"dtype", "layout", "device", "pin_memory"})
"""Arguments that an operator's out= form lacks: the given tensor says them."""

BUILTIN_NAMESPACES = frozenset({"aten", "prims", "mkldnn", "mkl", "onednn", "quantized", "_quantized", "rngprims"})

WHOLE_MEMORY = frozenset(
    """aten::convolution mkldnn::_convolution_pointwise mkldnn::_convolution_transpose_pointwise
    mkldnn::_linear_pointwise mkl::_mkl_linear""".split()
)
"""Operators that always return a tensor that was allocated for this call, of the result's size, and keep no hold on
it."""

CLASSES: dict[str, str] = {
    # type in the schema: how its C function takes it (see codegen/extern_calls.py)
    "Tensor": "tensor",
    "Optional[Tensor]": "optional tensor",
    "List[Tensor]": "tensor list",
    "int": "int",
    "SymInt": "int",
    "Optional[int]": "optional int",
    "Optional[SymInt]": "optional int",
    "List[int]": "int list",
    "List[SymInt]": "int list",
    "Optional[List[int]]": "optional int list",
    "Optional[List[SymInt]]": "optional int list",
    "bool": "bool",
    "Optional[bool]": "optional bool",
    "List[bool]": "bool list",
    "float": "float",
    "Optional[float]": "optional float",
    "number": "scalar",
    "Optional[number]": "optional float",
    "List[Optional[number]]": "empty list",
    "str": "string",
    "Optional[str]": "optional string",
    "Optional[ScalarType]": "none",
    "Optional[Generator]": "none",
}


def may_keep_arguments(target: Any) -> bool:
    """Whether the operator may hold a tensor that it was given after the call: PyTorch's own never do. Others get
    copies of memory that will be used again."""
    return not isinstance(target, torch._ops.OpOverload) or target.namespace not in BUILTIN_NAMESPACES


def is_check(operation: object) -> bool:
    """Whether the operation is a call that gives and writes nothing: all that it does is to fail."""
    return isinstance(operation, Extern) and not any(operation.outputs) and not operation.mutates


def may_raise(target: Any) -> bool:
    """Whether a call that capture has accepted may still fail: for the values it is given, or as the program's own
    operators like."""
    return may_keep_arguments(target) or facts(target).may_fail


def gives_whole_memory(target: Any) -> bool:
    """Whether the operator's result is memory of its own that nobody else has."""
    return schema_name(target) in WHOLE_MEMORY


def schema_name(target: Any) -> str | None:
    """`namespace::name` or `namespace::name.overload` of an operator; None of anything else."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    schema = target._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def row_of(target: Any) -> ExternRow | None:
    """The operator's row, or None."""
    name = schema_name(target)
    return None if name is None else EXTERNS.get(name) or CUDA_EXTERNS.get(name)


def placement(target: Any, args: Any) -> Placement:
    """Whether `target`, called with these arguments (nested tuples with BufferRefs or anything else that has a
    `dtype`), writes into memory that the plan places ("out") or allocates its results itself ("returned")."""
    row = row_of(target)
    if row is None or row.placement == "returned":
        return "returned"
    dtypes = {leaf.dtype for leaf in leaves(args) if isinstance(getattr(leaf, "dtype", None), torch.dtype)}
    return "out" if len(dtypes) <= 1 else "returned"


def references(args: Iterable[Any]) -> list[BufferRef]:
    """Every BufferRef among the arguments."""
    return [leaf for leaf in leaves(tuple(args)) if isinstance(leaf, BufferRef)]
