"""Programs whose every step is a generated kernel: what `package(standalone=True)` writes out, as loops or as
products that there are kernels for, and what it refuses.

Takes an exported program, and call plans; gives the program with products, convolutions and attention as sums of
products, and errors. Always holds: a plan that passes `check` needs neither Python nor PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import OpOverload

from fusewright.base.errors import ExportError
from fusewright.base.pytorch import functional, torch
from fusewright.codegen.call_plan_types import (
    WRITES_INPUT,
    CCall,
    Guarded,
    KernelCall,
    KernelGroup,
    PythonCall,
    SlotStep,
)
from fusewright.codegen.llvm import target_of
from fusewright.codegen.llvm.emit.target import Target
from fusewright.exporting.program import ExportedProgram
from fusewright.exporting.text import call_text, line_text
from fusewright.graph.passes.library.linear_paths import Linear
from fusewright.runtime.artifact import CompiledGraph
from fusewright.select import generated_gemm
from fusewright.sizes.tensor_type import TensorType

Tensor = torch.Tensor
Node = torch.fx.Node
aten = torch.ops.aten
MEMORY = ("allocate", "release")


def _mm(x: Tensor, y: Tensor) -> Tensor:
    # The inner dimension last: weights of linear layers lie so in memory.
    return (x.unsqueeze(-2) * y.transpose(-1, -2).unsqueeze(-3)).sum(-1)


def _addmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product = _mm(x, y) if alpha == 1 else _mm(x, y) * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    # Caches of transformers begin as a tensor of one dimension without elements, which fits together with any.
    rank = max(one.dim() for one in tensors)
    kept = [one for one in tensors if one.dim() == rank]
    return aten.cat.default(kept, dim) if len(kept) > 1 else kept[0].clone()


def _mv(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> Tensor:
    transposed, _, groups = rest
    dims = weight.dim() - 2
    if transposed:
        return aten.convolution.default(x, weight, bias, stride, padding, dilation, *rest)
    x = _windows(x, weight, stride, padding, dilation)
    # windows: batch, groups, outputs of a group, channels of a group, places, places in the window
    windows = x.unflatten(1, (groups, -1)).unsqueeze(2)
    filters = weight.unflatten(0, (groups, -1)).unsqueeze(0)
    filters = filters[(...,) + (None,) * dims + (slice(None),) * dims]
    summed = (windows * filters).sum([3, *range(4 + dims, 4 + 2 * dims)]).flatten(1, 2)
    return summed if bias is None else summed + bias.reshape(-1, *(1,) * dims)


def _windows(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """What each place of a convolution's result reads: batch, channels, places, places in the window."""
    dims = weight.dim() - 2
    stride, padding, dilation = (list(one) * dims if len(one) == 1 else one for one in (stride, padding, dilation))
    x = functional.pad(x, [one for pad in reversed(padding) for one in (pad, pad)])
    for dim in range(dims):
        x = x.unfold(2 + dim, (weight.shape[2 + dim] - 1) * dilation[dim] + 1, stride[dim])
    for dim in range(dims):
        x = aten.slice.Tensor(x, 2 + dims + dim, 0, None, dilation[dim])
    return x


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **more: Any
) -> tuple[Tensor, Tensor]:
    scale, mask = more.get("scale"), more.get("attn_mask")
    scores = _mm(query, key.transpose(-1, -2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        rows, columns = (torch.arange(size, device=query.device) for size in scores.shape[-2:])
        scores = scores.masked_fill(columns > rows.unsqueeze(-1), -math.inf)
    if mask is not None:
        scores = scores + mask
    # The operator's result has the heads beside the features in memory.
    result = _mm(torch.softmax(scores, -1), value).transpose(1, 2).contiguous().transpose(1, 2)
    return result, torch.logsumexp(scores, -1)


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
COPYING: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Operators that want their operand to lie as the program had it, where it may lie otherwise now."""
BY_MEMORY = (aten.as_strided.default, aten.view.dtype)
"""Operators whose result depends on how their operand lies in memory: programs with these stay as they are."""

WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.mv.default: _mv,
    aten.dot.default: _mv,
    aten.convolution.default: _convolution,
    ATTENTION: _attention,
    aten.cat.default: _cat,
}
"""Operators that a plan would leave to a library, as those that loops are made of."""


def in_loops(node: Node) -> Callable[..., Any]:
    """What computes the node, products as loops."""
    target: Any = node.target
    function: Callable[..., Any] = WRITTEN_OUT.get(target, target)
    return function


def by_kernels(processor_name: str, attention: bool) -> Callable[[Node], Callable[..., Any]]:
    """The same, but products (and `attention`) are left as they are that generated kernels compute on `target`, and
    convolutions become products; their operands are copied where they do not lie as those read them."""
    processor = target_of(processor_name)

    def function_of(node: Node) -> Callable[..., Any]:
        target: Any = node.target
        if target is ATTENTION and attention:
            return _attention_of_rows
        if target is aten.convolution.default:
            return _convolution_by_product if _is_product(node, processor) else in_loops(node)
        if target in COPYING:
            return COPYING[target]  # type: ignore[no-any-return]
        make = PRODUCTS.get(target)
        if make is None:
            return in_loops(node)
        left, right = (operand.meta["type"] for operand in node.args[-2:] if isinstance(operand, Node))
        inner, columns = right.shape
        if not isinstance(inner, int) or not isinstance(columns, int):
            return in_loops(node)
        product = Linear(left.dtype, None, inner, columns, False, True)
        if not generated_gemm.has_kernel(product, processor):
            return in_loops(node)
        return make(_rows_of(left), _columns_of(right))

    return function_of


def _is_product(node: Node, processor: Target) -> bool:
    """Whether the convolution is a product of its windows by its weights, for which there is a kernel."""
    weight, transposed, groups = node.args[1], node.args[6], node.args[8]
    if transposed or groups != 1 or not isinstance(weight, Node):
        return False
    columns, *inner = weight.meta["type"].shape
    if not isinstance(columns, int) or not all(isinstance(size, int) for size in inner):
        return False
    product = Linear(weight.meta["type"].dtype, None, math.prod(inner), columns, False, True)
    return generated_gemm.has_kernel(product, processor)


def _convolution_by_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> Tensor:
    dims = weight.dim() - 2
    places = list(range(2, 2 + dims))
    windows = _windows(x, weight, stride, padding, dilation)
    # The channels lie side by side, in windows and weights (`channels_last_weights`), and in the result.
    windows = windows.permute(0, *places, *(place + dims for place in places), 1)
    product = windows.flatten(1 + dims).flatten(0, dims) @ weight.permute(0, *places, 1).flatten(1).t()
    if bias is not None:
        product = product + bias
    return product.unflatten(0, windows.shape[: 1 + dims]).movedim(-1, 1)


def _attention_of_rows(query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
    rows = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
    made: tuple[Tensor, Tensor] = ATTENTION(*rows, *args, **more)
    return made


def channels_last_weights(programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """The same programs, weights that only convolutions read as their products read them in memory."""
    memory: dict[int, set[int]] = {}  # which tensors share a memory
    others: set[int] = set()  # tensors that something else reads
    for program in programs.values():
        for value in program.state.values():
            memory.setdefault(value.untyped_storage().data_ptr(), set()).add(id(value))
        for node, record in zip(program.graph.find_nodes(op="placeholder"), program.graph_signature.inputs):
            if record["kind"] == "parameter" and not all(
                user.target is aten.convolution.default and user.args[0] is not node and not user.args[6]
                for user in node.users
            ):
                others.add(id(program.state[record["target"]]))
    moved: dict[int, Tensor] = {}

    def of(value: Tensor) -> Tensor:
        if not isinstance(value, torch.nn.Parameter) or value.dim() < 3 or id(value) in others:
            return value
        if len(memory[value.untyped_storage().data_ptr()]) > 1 or not value.is_contiguous():
            return value
        if id(value) not in moved:
            made = value.detach().movedim(1, -1).contiguous().movedim(-1, 1)
            moved[id(value)] = torch.nn.Parameter(made, value.requires_grad)
        return moved[id(value)]

    return {name: program.with_state(of) for name, program in programs.items()}


Operand = Callable[[Tensor], Tensor]


def _product(left: Operand, right: Operand) -> Callable[..., Tensor]:
    return lambda x, y: aten.mm.default(left(x), right(y))


def _product_and_bias(left: Operand, right: Operand) -> Callable[..., Tensor]:
    return lambda bias, x, y, **factors: aten.addmm.default(bias, left(x), right(y), **factors)


PRODUCTS: dict[Any, Callable[[Operand, Operand], Callable[..., Tensor]]] = {
    aten.mm.default: _product,
    aten.addmm.default: _product_and_bias,
}
"""Operators that generated kernels compute, from what lays out their operands."""


def _rows_of(kind: TensorType) -> Operand:
    """Gives the left operand with the elements of a row side by side."""
    return (lambda x: x) if kind.stride[1] == 1 else (lambda x: x.contiguous())


def _columns_of(kind: TensorType) -> Operand:
    """Gives the right operand with the elements of a column side by side."""
    return (lambda y: y) if kind.stride[0] == 1 else (lambda y: y.t().contiguous().t())


def check(name: str, made: CompiledGraph, program: torch.fx.Graph) -> None:
    """Raises ExportError, which names operator and line, unless each step is a kernel or moves no data. program: what
    was compiled, as it was before anything was written out."""
    steps = [inner for step in made.plan.steps for inner in (step.steps if isinstance(step, Guarded) else (step,))]
    for step in steps:
        if isinstance(step, (CCall, PythonCall)):
            what = step.symbol if isinstance(step, CCall) else step.target
            origin = step.origin or step.name
            called = _called(program, origin)
            what = next((call_text(node) for node in called if node.target.namespace == "fusewright"), what)
            lines = "".join(dict.fromkeys(line_text(node) for node in called))
            raise ExportError(f"{name} cannot stand alone: there is no generated kernel for {what} ({origin}){lines}")
    for step in steps:
        if isinstance(step, SlotStep) and step.kind in WRITES_INPUT:
            raise ExportError(f"{name} cannot stand alone: it writes to an argument or a buffer")
        if not isinstance(step, (KernelCall, KernelGroup)) and not (isinstance(step, SlotStep) and step.kind in MEMORY):
            raise ExportError(f"{name} cannot stand alone: its plan has a step {step!r:.80}")


def _called(program: torch.fx.Graph, origin: str) -> list[Any]:
    """The program's operators that a library call is named after."""
    return [
        node
        for node in program.nodes
        if isinstance(node.target, OpOverload)
        and origin.startswith(node.target._schema.name.partition("::")[2].lower())
    ]
