"""Packing: linear layers and convolutions by parameters go to the library's quickest operators, with weights in the
layout those like best.

Takes and gives a functional inference graph whose parameter inputs carry meta["stable"]. Also folds a BatchNorm in
evaluation into the convolution before it, and an activation behind it into the operator. The new nodes that depend on
parameters alone (packed weights, folded statistics) are computed once: see graph/passes/parameters/freeze.py.
Always holds: values equal those before within rounding, NaN and infinities included (oneDNN's ReLU and GELU lose them,
so those stay loops).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.base.thresholds import LARGEST_DEPTHWISE_WINDOW, LEAST_DEPTHWISE_CHANNELS
from fusewright.graph.builder import Builder
from fusewright.graph.passes.context import PassContext
from fusewright.graph.passes.library.linear_paths import (
    CONVOLUTION,
    LARGEST_TWICE,
    MKL,
    ONEDNN,
    OWN,
    PLAIN,
    SKINNY_ROWS as PLAIN_ROWS,
    TURNED,
    Linear,
    candidates_for,
)
from fusewright.graph.passes.parameters.freeze import may_be_kept
from fusewright.graph.passes.parameters.stable import stable_nodes
from fusewright.graph.passes.parameters.usual_sizes import UsualSizes
from fusewright.graph.skinny_gemm import SKINNY_GEMM
from fusewright.operators.rules.common import channels_last_strides
from fusewright.operators.schema import facts
from fusewright.sizes.estimate import estimate
from fusewright.sizes.expressions import Dim, maximum
from fusewright.sizes.shape_env import examples_of
from fusewright.sizes.tensor_type import TensorType, contiguous_strides, symbols_in

aten = torch.ops.aten
Node = torch.fx.Node

CONVOLUTIONS = (torch.float32, torch.bfloat16)
"""Dtypes whose convolutions are packed."""

_IN_FLOAT = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that BatchNorm computes in float32."""

BIAS_FIRST = (PLAIN, TURNED, MKL)
"""Candidates that write the bias to each row of the result before they compute."""

ACTIVATIONS: dict[Any, str] = {aten.silu.default: "swish", aten.hardswish.default: "hardswish"}
"""Activations that the library fuses exactly, and their names there."""


def pack(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    """See the head of this file."""
    run = _Packing(graph, context)
    for node in list(graph.nodes):
        if node.op != "call_function" or node._erased:  # a convolution has taken it in
            continue
        row = _ROWS.get(node.target)
        if row is not None:
            row(run, node)
    return graph


class _Packing:
    def __init__(self, graph: torch.fx.Graph, context: PassContext) -> None:
        self.graph = graph
        self.context = context
        self.build = Builder(graph)
        self.stable = stable_nodes(graph)
        self.usual = UsualSizes(graph, self.build.env)
        self.packed: dict[Any, Node] = {}

    def example(self, size: Dim) -> int:
        """A size as the library is told it when it chooses a layout, which any other size may then use too."""
        return estimate(size, examples_of(self.build.env))

    def near(self, size: Dim) -> int:
        """As `example`, but a power of two near it where the size is symbolic: another example then asks for the same
        choice."""
        number = self.example(size)
        return number if isinstance(size, int) or number < 2 else 1 << round(math.log2(number))

    def is_stable(self, *nodes: Any) -> bool:
        return all(node is None or node in self.stable for node in nodes)

    def new(self, target: Any, args: Sequence[Any], type_: TensorType, at: Node) -> Node:
        """A node in front of `at`, stable when all its tensors are."""
        self.build.location = at.meta.get("location", ())
        with self.graph.inserting_before(at):
            made = self.build.node(target, args, {}, type_)
        if made.all_input_nodes and self.is_stable(*made.all_input_nodes):
            self.stable.add(made)
        return made

    def call(self, target: Any, *args: Any, at: Node, **options: Any) -> Node:
        self.build.location = at.meta.get("location", ())
        with self.graph.inserting_before(at):
            made = self.build.call(target, *args, **options)
        self.stable.add(made)
        return made

    def within(self, target: Any, *args: Any, at: Node, **options: Any) -> Node:
        """As `call`, but stable only when its tensors are."""
        made = self.call(target, *args, at=at, **options)
        if not self.is_stable(*made.all_input_nodes):
            self.stable.discard(made)
        return made

    # --- linear layers -----------------------------------------------------------------------------------------------

    def mm(self, node: Node) -> None:
        x, weight = node.args
        self.linear(node, x, weight, None)  # type: ignore[arg-type]

    def addmm(self, node: Node) -> None:
        bias, x, weight = node.args
        plain = all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))
        if (
            plain
            and bias.meta["type"].ndim == 1  # type: ignore[union-attr]
            and bias.meta["type"].shape == node.meta["type"].shape[1:]  # type: ignore[union-attr]
        ):
            self.linear(node, x, weight, bias)  # type: ignore[arg-type]

    def linear(self, node: Node, x: Node, weight: Node, bias: Node | None) -> None:
        type_: TensorType = node.meta["type"]
        kind: TensorType = weight.meta["type"]
        if type_.device.type != "cpu" or {type_.dtype, x.meta["type"].dtype} != {kind.dtype}:
            return
        if not self.is_stable(weight, bias) or not may_be_kept(weight):
            return
        rows, (inner, columns) = type_.shape[0], kind.shape
        if (
            not isinstance(columns, int)
            or not isinstance(inner, int)
            or type_.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        ):
            return
        by_rows = kind.stride == (1, inner)
        varies = not isinstance(rows, int)
        apart = self.bias_apart(node, bias, rows)
        linear = Linear(
            type_.dtype, self.near(rows), inner, columns, bias is not None and not apart, by_rows, varies=varies
        )
        plain_input = _is_plain(x.meta["type"])
        candidates = tuple(one for one in self.candidates(linear, rows) if plain_input or one in (PLAIN, TURNED))
        candidate = self.context.choose(linear, candidates) if linear.rows != 0 else PLAIN
        if apart and candidate in BIAS_FIRST and self.context.allow(f"bias apart: {node.name}"):
            product = self.new(aten.mm.default, (x, weight), self.dense_result(node), node)
            self.replace(node, self.within(aten.add.Tensor, product, bias, at=node))
            node, bias = product, None
        twice = not by_rows and inner * columns * type_.dtype.itemsize > LARGEST_TWICE
        most = self.context.skinny_rows(linear) if varies and not twice else 0
        if candidate != PLAIN and self.context.allow(f"packed weight ({candidate}): {node.name}"):
            node = _CANDIDATES[candidate](self, node, x, weight, bias, linear)
            if not most:
                self.fuse_activation(node)
        elif by_rows:
            return  # for a kernel of ours the operator is as good as it is
        if most and self.context.allow(f"skinny GEMM: {node.name}"):
            self.beside(node, x, weight, bias, linear, most)

    def beside(self, product: Node, x: Node, weight: Node, bias: Node | None, linear: Linear, most: int) -> None:
        """Says of the library's product how a kernel of ours makes it for few rows: from each output's weights side by
        side."""
        if not linear.by_rows:
            weight = self.call(aten.t.default, self.by_rows(weight, product), at=product)
        noted = self.new(SKINNY_GEMM, (product, x, weight, bias, most), product.meta["type"], product.next)
        product.replace_all_uses_with(noted, delete_user_cb=lambda user: user is not noted)

    def candidates(self, linear: Linear, rows: Dim) -> tuple[str, ...]:
        """The candidates that the product may take. A matrix for the rows that usually come needs sizes that the call
        has as inputs."""
        return tuple(
            one for one in candidates_for(linear) if one != MKL or not linear.varies or self.usual.has(rows)
        )

    def bias_apart(self, node: Node, bias: Node | None, rows: Dim) -> bool:
        """Whether the one kernel that reads the product `node` shall add its bias. Products take it as what they add
        to: each row of the result is written twice, and read once more. In half precision the sum is rounded after the
        bias alone."""
        few = isinstance(rows, int) and rows < PLAIN_ROWS
        return bias is not None and not few and node.meta["type"].dtype is torch.float32 and _is_read_by_a_loop(node)

    # Each candidate gives the node of the product.

    def turned(self, node: Node, x: Node, weight: Node, bias: Node | None, linear: Linear) -> Node:
        node.replace_input_with(weight, self.by_inputs(weight, node))
        return node

    def own(self, node: Node, x: Node, weight: Node, bias: Node | None, linear: Linear) -> Node:
        """The operator as it is, which a kernel of ours replaces once the schedule is known."""
        if not linear.by_rows:
            node.replace_input_with(weight, self.call(aten.t.default, self.by_rows(weight, node), at=node))
        return node

    def by_inputs(self, weight: Node, at: Node) -> Node:
        """The weights of a product with each input's side by side: inner x columns."""
        turned = self.packed.get((weight, TURNED))
        if turned is None:
            turned = self.call(aten.clone.default, weight, memory_format=torch.contiguous_format, at=at)
            self.packed[weight, TURNED] = turned
        return turned

    def by_rows(self, weight: Node, at: Node) -> Node:
        """The weights of a product with each output's side by side: columns x inner."""
        dense = self.packed.get(weight)
        if dense is None:
            whole = self.call(aten.t.default, weight, at=at)
            dense = whole
            if not _is_plain(whole.meta["type"]):
                dense = self.call(aten.clone.default, whole, memory_format=torch.contiguous_format, at=at)
            self.packed[weight] = dense
        return dense

    def sizes_of(self, weight: Node, at: Node) -> Node:
        """What tells a product its sizes: parameters, or where they were computed something as large without their
        memory."""
        source = weight
        while isinstance(source.target, torch._ops.OpOverload) and facts(source.target).is_view:
            source = source.all_input_nodes[0]
        if source.op != "call_function":
            return weight
        whole = self.packed.get((weight, "sizes"))
        if whole is None:
            one = self.call(aten.new_zeros.default, weight, [1, 1], at=at)
            whole = self.packed[weight, "sizes"] = self.call(
                aten.expand.default, one, list(weight.meta["type"].shape), at=at
            )
        return whole

    def reordered(self, operator: Any, weight: Node, rows: Dim | None, at: Node) -> Node:
        """The weights in a library's own layout for that many rows; products that share them share it."""
        packed = self.packed.get((weight, operator, rows))
        if packed is None:
            dense = self.by_rows(weight, at)
            packed = self.packed[weight, operator, rows] = self.new(operator, (dense, rows), dense.meta["type"], at)
            self.stable.add(packed)
        return packed

    def mkl(self, node: Node, x: Node, weight: Node, bias: Node | None, linear: Linear) -> Node:
        """MKL's matrix, packed for one number of rows. The operator multiplies any other number of rows by the weights
        that give it its sizes; where the rows vary, these are turned, and the packed ones are for the rows that usually
        come."""
        rows: Dim | None = linear.rows
        plain = self.sizes_of(weight, node)
        if linear.varies:
            rows = maximum(linear.least_packed, self.usual.of(node.meta["type"].shape[0]))
            plain = self.by_inputs(weight, node) if linear.by_rows else weight
        packed = self.reordered(torch.ops.mkl._mkl_reorder_linear_weight.default, weight, rows, node)
        arguments = (x, packed, self.within(aten.t.default, plain, at=node), bias, rows)
        made = self.new(torch.ops.mkl._mkl_linear.default, arguments, self.dense_result(node), node)
        self.replace(node, made)
        return made

    def onednn(self, node: Node, x: Node, weight: Node, bias: Node | None, linear: Linear) -> Node:
        packed = self.reordered(torch.ops.mkldnn._reorder_linear_weight.default, weight, linear.rows, node)
        made = self.new(
            torch.ops.mkldnn._linear_pointwise.default, (x, packed, bias, "none", [], ""), self.dense_result(node), node
        )
        self.replace(node, made)
        return made

    def dense_result(self, node: Node) -> TensorType:
        type_: TensorType = node.meta["type"]
        return replace(type_, stride=contiguous_strides(type_.shape))

    # --- convolutions ------------------------------------------------------------------------------------------------

    def convolution(self, node: Node) -> None:
        x, weight, bias, transposed = *node.args[:3], node.args[6]
        type_, kind = node.meta["type"], weight.meta["type"]  # type: ignore[union-attr]
        if (
            transposed
            or type_.ndim != 4
            or type_.device.type != "cpu"
            or not self.is_stable(weight, bias)
            or kind.dtype != type_.dtype
        ):
            return
        if not may_be_kept(weight):  # type: ignore[arg-type]
            return
        if type_.dtype not in CONVOLUTIONS or not torch.backends.mkldnn.is_available():
            return
        if type_.dtype is torch.bfloat16 and not _has_bf16():
            return
        if not all(isinstance(size, int) for size in kind.shape):
            return
        if 0 in type_.shape or not self.context.allow(f"packed weight: {node.name}"):
            return
        norm = self.norm_after(node) if type_.dtype is torch.float32 else None
        after = node
        if norm is not None:
            weight, bias = self.folded(node, norm, weight, bias)  # type: ignore[arg-type]
            after = next(iter(norm.users))
        made = None
        if not all(isinstance(size, int) for size in (*type_.shape, *x.meta["type"].shape)):  # type: ignore[union-attr]
            if self.is_product(node):
                made = self.product_by_images(node, after, x, weight, bias)  # type: ignore[arg-type]
        elif self.is_small_depthwise(node):
            made = self.channels_side_by_side(node, after, x, weight, bias)  # type: ignore[arg-type]
        elif self.is_product(node):
            made = self.product_by_images(node, after, x, weight, bias)  # type: ignore[arg-type]
        if made is None:
            made = self.packed_convolution(node, after, x, weight, bias)  # type: ignore[arg-type]
        if norm is not None:
            self.graph.erase_node(norm)
            self.graph.erase_node(node)
        self.fuse_activation(made)
        self.as_declared(made)

    def packed_convolution(self, node: Node, after: Node, x: Node, weight: Node, bias: Node | None) -> Node:
        """oneDNN's convolution in place of `after`. `node`: the convolution in the user's program."""
        stride, padding, dilation, groups = *node.args[3:6], node.args[8]
        kind, sizes = weight.meta["type"], [self.example(size) for size in x.meta["type"].shape]
        reorder = torch.ops.mkldnn._reorder_convolution_weight.default
        packed = weight
        fixed = all(isinstance(size, int) for size in x.meta["type"].shape) or set(kind.shape[2:]) != {1}
        if fixed and not symbols_in((stride, padding, dilation, groups)):  # else it would be packed in each call
            # oneDNN has several layouts for windows of one pixel, and takes 10 to 20 times as long where an image is of
            # another size than the one that the layout was chosen for (measured: 256 to 1024 channels, 7x7 pixels); the
            # user's is as good for any.
            packed = self.new(reorder, (weight, padding, stride, dilation, groups, sizes), kind, node)
        operands: tuple[Any, ...] = (x, packed, bias, padding, stride, dilation, groups, "none", [], "")
        made = self.new(torch.ops.mkldnn._convolution_pointwise.default, operands, node.meta["type"], after)
        self.replace(after, made)
        return made

    def as_declared(self, made: Node) -> None:
        """oneDNN may give images of one channel a step of 1 along it; those that leave the graph have the program's."""
        kind = made.meta["type"]
        outside = [user for user in made.users if user.op == "output"]
        if made.target is not torch.ops.mkldnn._convolution_pointwise.default or not outside:
            return
        if kind.shape[1] == 1 and kind.stride == contiguous_strides(kind.shape):
            made.meta["type"] = replace(kind, stride=channels_last_strides(kind.shape))
            with self.graph.inserting_after(made):
                flat = self.build.call(aten.view.default, made, [kind.numel()])
            with self.graph.inserting_after(flat):
                again = self.build.call(aten.view.default, flat, list(kind.shape))
            for user in outside:
                user.replace_input_with(made, again)

    def is_small_depthwise(self, node: Node) -> bool:
        """Whether each channel has a small window of its own, over images whose channels lie side by side: loops
        compute that together with what stands before and behind it (loops/lower/convolution.py), and the library's
        passes over memory are saved."""
        arguments: Any = node.args
        x, weight, groups = arguments[0].meta["type"], arguments[1].meta["type"], arguments[8]
        channels, _, *window = weight.shape
        by_channels = (
            groups == channels == x.shape[1]
            and channels >= LEAST_DEPTHWISE_CHANNELS
            and math.prod(window) <= LARGEST_DEPTHWISE_WINDOW
        )
        return by_channels and x.stride[1] == 1 and node.meta["type"].stride[1] == 1

    def channels_side_by_side(self, node: Node, after: Node, x: Node, weight: Node, bias: Node | None) -> Node:
        """The same convolution in place of `after`, its weights laid out as (window, 1, channels)."""
        turned = self.call(aten.permute.default, weight, [2, 3, 1, 0], at=node)
        dense = self.call(aten.clone.default, turned, at=node, memory_format=torch.contiguous_format)
        back = self.call(aten.permute.default, dense, [3, 2, 0, 1], at=node)
        made = self.new(aten.convolution.default, (x, back, bias, *node.args[3:]), node.meta["type"], after)
        self.replace(after, made)
        return made

    def is_product(self, node: Node) -> bool:
        """Whether a convolution multiplies each pixel's channels by one matrix, and the pixels lie one behind the
        other."""
        arguments: Any = node.args
        x, weight, _, stride, padding, _, _, _, groups = arguments
        by_one = (
            groups == 1
            and tuple(weight.meta["type"].shape[2:]) == (1, 1)
            and set(stride) == {1}
            and set(padding) == {0}
        )
        return by_one and _is_plain_images(x.meta["type"]) and _is_plain_images(node.meta["type"])

    def product_by_images(self, node: Node, after: Node, x: Node, weight: Node, bias: Node | None) -> Node | None:
        """The convolution as a matrix product in place of `after`, or None where oneDNN's convolution is the quicker
        one."""
        (batch, inner, height, width), columns = x.meta["type"].shape, weight.meta["type"].shape[0]
        rows, dtype = batch * height * width, weight.meta["type"].dtype
        apart = self.bias_apart(after, bias, rows)
        with_bias = bias is not None and not apart
        if isinstance(rows, int):
            linear = Linear(dtype, rows, inner, columns, with_bias, True, (batch, height, width))
        else:
            linear = Linear(dtype, self.near(rows), inner, columns, with_bias, True, varies=True, pixels=True)
        candidate = self.context.choose(linear, self.candidates(linear, rows))
        if candidate == CONVOLUTION:
            return None
        later = bias if apart and candidate in BIAS_FIRST else None
        bias = bias if later is None else None
        pixels = self.within(aten.permute.default, x, [0, 2, 3, 1], at=after)
        flat = self.within(aten.view.default, pixels, [rows, inner], at=after)
        matrix = self.within(aten.reshape.default, weight, [columns, inner], at=after)
        turned = self.within(aten.t.default, matrix, at=after)
        target, operands = (
            (aten.mm.default, (flat, turned)) if bias is None else (aten.addmm.default, (bias, flat, turned))
        )
        product = self.within(target, *operands, at=after)
        whole = product if later is None else self.within(aten.add.Tensor, product, later, at=after)
        back = self.within(aten.view.default, whole, [batch, height, width, columns], at=after)
        made = self.within(aten.permute.default, back, [0, 3, 1, 2], at=after)
        self.replace(after, made)
        if candidate != PLAIN:
            self.fuse_activation(_CANDIDATES[candidate](self, product, flat, turned, bias, linear))
        return made

    def norm_after(self, node: Node) -> Node | None:
        """The BatchNorm in evaluation, by parameters, that alone reads a convolution's result and whose first result
        alone is read."""
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        if (
            reader is None
            or reader.target is not aten.native_batch_norm.default
            or reader.args[0] is not node
            or reader.args[5]
        ):
            return None
        results = list(reader.users)
        whole = len(results) == 1 and results[0].target is operator.getitem and results[0].args[1] == 0
        return reader if whole and None not in reader.args[3:5] and self.is_stable(*reader.args[1:5]) else None

    def folded(self, node: Node, norm: Node, weight: Node, bias: Node | None) -> tuple[Node, Node]:
        """Weight and bias of the one convolution that does what the convolution and the normalisation did."""
        _, gamma, beta, mean, variance, _, _, epsilon = norm.args
        scale = self.call(aten.rsqrt.default, self.call(aten.add.Scalar, variance, epsilon, at=node), at=node)
        if gamma is not None:
            scale = self.call(aten.mul.Tensor, scale, gamma, at=node)
        shape = [weight.meta["type"].shape[0], 1, 1, 1]
        scaled = self.call(aten.mul.Tensor, weight, self.call(aten.reshape.default, scale, shape, at=node), at=node)
        shift = (
            self.call(aten.neg.default, mean, at=node)
            if bias is None
            else self.call(aten.sub.Tensor, bias, mean, at=node)
        )
        shift = self.call(aten.mul.Tensor, shift, scale, at=node)
        return scaled, shift if beta is None else self.call(aten.add.Tensor, shift, beta, at=node)

    def norm(self, node: Node) -> None:
        """A BatchNorm in evaluation that no convolution has taken in: one factor and one summand a channel, made
        beforehand in float32."""
        x, gamma, beta, mean, variance, training, _, epsilon = node.args
        results = list(node.users)
        alone = len(results) == 1 and results[0].target is operator.getitem and results[0].args[1] == 0
        kind: TensorType = x.meta["type"]  # type: ignore[union-attr]
        if training or not alone or mean is None or variance is None or not self.is_stable(gamma, beta, mean, variance):
            return
        if (
            kind.device.type != "cpu"
            or kind.dtype not in _IN_FLOAT
            or kind.ndim < 2
            or not self.context.allow(f"prepared: {node.name}")
        ):
            return
        gamma, beta, mean, variance = (
            self.in_float(one, node) for one in (gamma, beta, mean, variance)  # type: ignore[arg-type]
        )
        scale = self.call(aten.rsqrt.default, self.call(aten.add.Scalar, variance, epsilon, at=node), at=node)
        if gamma is not None:
            scale = self.call(aten.mul.Tensor, scale, gamma, at=node)
        shift = self.call(aten.neg.default, self.call(aten.mul.Tensor, mean, scale, at=node), at=node)
        if beta is not None:
            shift = self.call(aten.add.Tensor, shift, beta, at=node)
        channel = [-1] + [1] * (kind.ndim - 2)
        scale, shift = (self.call(aten.reshape.default, one, channel, at=node) for one in (scale, shift))
        result = results[0]
        value = self.in_float(x, result)  # type: ignore[arg-type]
        value = self.within(aten.mul.Tensor, value, scale, at=result)
        value = self.within(aten.add.Tensor, value, shift, at=result)
        if kind.dtype is not torch.float32:
            value = self.within(aten._to_copy.default, value, at=result, dtype=kind.dtype)
        if value.meta["type"] == result.meta["type"]:
            self.replace(result, value)
            self.graph.erase_node(node)

    def in_float(self, value: Node | None, at: Node) -> Node | None:
        if value is None or value.meta["type"].dtype is torch.float32:
            return value
        return self.within(aten._to_copy.default, value, at=at, dtype=torch.float32)

    # --- both --------------------------------------------------------------------------------------------------------

    def replace(self, node: Node, made: Node) -> None:
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def fuse_activation(self, node: Node) -> None:
        """Gives an operator that takes one the activation that alone reads its result."""
        position = _ACTIVATION_AT.get(node.target)
        if position is None:
            return
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        name = None if reader is None else ACTIVATIONS.get(reader.target)
        if (
            name is None
            or reader is None
            or reader.meta["type"] != node.meta["type"]
            or not self.context.allow(f"fused: {name}")
        ):
            return
        node.update_arg(position, name)
        self.replace(reader, node)


_ACTIVATION_AT: dict[Any, int] = {
    torch.ops.mkldnn._linear_pointwise.default: 3,
    torch.ops.mkldnn._convolution_pointwise.default: 7,
}

_CANDIDATES: dict[str, Any] = {TURNED: _Packing.turned, MKL: _Packing.mkl, ONEDNN: _Packing.onednn, OWN: _Packing.own}

_ROWS: dict[Any, Any] = {
    aten.mm.default: _Packing.mm,
    aten.addmm.default: _Packing.addmm,
    aten.convolution.default: _Packing.convolution,
    aten.native_batch_norm.default: _Packing.norm,
}


def _is_read_by_a_loop(node: Node) -> bool:
    """Whether a pointwise operator alone reads a value, or views of it."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        if torch.Tag.pointwise in node.target.tags:
            return True
        if not facts(node.target).is_view:
            return False
    return False


def _is_plain(type_: TensorType) -> bool:
    return type_.stride == contiguous_strides(type_.shape)


def _is_plain_images(type_: TensorType) -> bool:
    """Whether (batch, channels, height, width) lies in memory as (batch, height, width, channels) without gaps."""
    batch, channels, height, width = type_.shape
    return type_.stride == (height * width * channels, 1, width * channels, channels) and batch * height * width != 0


def _has_bf16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
