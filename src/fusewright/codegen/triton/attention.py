"""A product whose left operand is made of other products, as Triton text: one block of their columns after the other,
and beside them the sums of the product itself. With a softmax between them, that is attention.

Takes a `Kernel` whose product has a `Softmax` or a `Chain`; gives `KernelText`. Always holds: what the operand is made
of is emitted as a product's computed operand is, on a block of rows (`y`) and places (`k`); places that do not exist
score negative infinity, or count as 0; a block of rows meets the places in order, in one program.
"""

from __future__ import annotations

import torch

from fusewright.base.records import dataclass
from fusewright.codegen.analysis import Shape, StageView
from fusewright.codegen.device_kernel import Unsupported
from fusewright.codegen.triton import indices
from fusewright.codegen.triton.gemm import ProductEmitter
from fusewright.codegen.triton.gemm_tiles import ProductTile, power_of_two
from fusewright.codegen.triton.kernel import KernelText
from fusewright.codegen.triton.operations import HALVES, Style, language_type
from fusewright.codegen.triton.values import Value
from fusewright.schedule.plan import Kernel, Operand, Places, Product, Softmax
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

_LEAST = 16
"""Of a block's dimensions, for the tensor cores."""
_LOG2_E = 1.4426950408889634
_BLOCK = frozenset("yk")


def _block(length: int) -> int:
    return max(power_of_two(length), _LEAST)


def is_blockwise(kernel: Kernel) -> bool:
    """Whether the kernel is one that this file is for."""
    product = kernel.product
    return product is not None and (product.softmax is not None or product.chain is not None)


def _parts(product: Product) -> tuple[Product, ...]:
    if product.softmax is not None:
        return (product.softmax.scores,)
    assert product.chain is not None
    return product.chain.parts


def tile_of(kernel: Kernel) -> ProductTile:
    """The blocks by rule: y rows, k columns of the scores in a step, x features."""
    product = kernel.product
    assert product is not None
    _, rows, features = (axis.extent for axis in kernel.outer)
    parts = _parts(product)
    if not all(isinstance(extent, int) for extent in (rows, features)):
        raise Unsupported("attention of symbolic size")
    assert isinstance(rows, int) and isinstance(features, int)
    widest = max(features, *(part.length for part in parts))
    halves = all(
        side.dtype in HALVES for side in (product.right, *(side for one in parts for side in (one.left, one.right)))
    )
    wide = power_of_two(widest) > (128 if halves else 64)
    y, k, warps, stages = (128, 64, 8 if widest > 64 else 4, 3) if halves else (64, 32, 4, 2)
    if product.chain is not None and halves:  # blocks of several products stay in registers, of several programs
        y, k, warps, stages = 64, 64 if widest <= 64 else 32, 4, 2 if wide else 3
    elif wide:
        y, k, stages = y // 2, k // 2 if not halves else k, 2
    y = min(y, _block(rows))
    k = min(k if y > _LEAST else 2 * k, _block(product.length))
    return ProductTile(_block(features), y, k, warps if y > 32 else 4, stages, 1)


def emit_attention(kernel: Kernel, scalars: frozenset[str], wide: bool, tile: ProductTile) -> KernelText:
    """scalars: buffers in CPU memory, whose one element is the parameter. Raises Unsupported."""
    (stage,) = kernel.stages
    aliases = {name: name for name in kernel.written}
    shape = Shape(kernel, list(kernel.outer), [StageView(stage, [], aliases)], aliases)
    assert kernel.product is not None
    emitter = AttentionEmitter if kernel.product.softmax is not None else ChainEmitter
    return emitter(kernel, shape, tile, scalars, wide, ()).run()


@dataclass(slots=True)
class BlockwiseEmitter(ProductEmitter):
    """What kernels of this file have in common."""

    @property
    def _places(self) -> Places:
        raise NotImplementedError

    def _positions_of(self, part: Product, number: str) -> None:
        """Along the dimension that a part sums over."""
        wide = ".to(tl.int64)" if self.wide else ""
        self.lines[0] += [
            f"D{number}: tl.constexpr = {_block(part.length)}",
            f"d_left{number} = tl.arange(0, D{number})[None, :]{wide}",
            f"d_right{number} = tl.arange(0, D{number})[:, None]{wide}",
        ]

    def _loop_over_places(self) -> None:
        """The loop whose step `_steps` writes."""
        out, wide = self.lines[0], ".to(tl.int64)" if self.wide else ""
        least, end = self._range()
        self._steps()
        body, self.lines[1] = self.lines[1], []
        self.known[1].clear()
        step = "tl.range" if self._tile.stages > 1 else "range"
        out.append(f"for base in {step}({least}, {end}, K):")
        out.append(f"    k_left = base + tl.arange(0, K)[None, :]{wide}")
        out.append(f"    k_right = base + tl.arange(0, K)[:, None]{wide}")
        out.extend(f"    {line}" for line in body)

    def _range(self) -> tuple[str, str]:
        """The texts of the first place, a multiple of the block, and of the one after the last."""
        places, tile = self._places, self._tile
        _, rows, _ = self._extents()
        self.lines[0].append("first_row = down * Y")
        self.lines[0].append(f"last_row = tl.minimum(first_row + Y, {rows}) - 1")
        self.bound[places.first] = Value("first_row", indices.NOTHING)
        self.bound[places.last] = Value("last_row", indices.NOTHING)
        least, end = (self.index(dim).text for dim in (places.least, places.end))
        return (least if least == "0" else f"({least}) // {tile.k} * {tile.k}"), end

    def _steps(self) -> None:
        """A step of the loop."""
        product, places, tile, out = self._product, self._places, self._tile, self.lines[1]
        self.level = 1
        whole = product.length % tile.k == 0
        for side in ("left", "right"):
            self.bound[sizes.loop_symbol(f"k_{side}", product.length)] = Value(f"k_{side}", frozenset("k"), 1)
            if not whole:
                out.append(f"k_{side}_mask = k_{side} < {product.length}")
        self.inside = None if whole else Value("k_left_mask", frozenset("k"), 1)
        left = sizes.loop_symbol("k_left", product.length)
        self.computed, style = "left", self.style
        self.style = Style(fast=product.right.dtype in HALVES)
        self.mapping = self.outer_mapping | {product.k: left}
        self.memo.clear()
        start = 0
        if places.seen is not None:
            seen = self.filled(self.evaluate(places.seen)).text
            seen = seen if whole else f"{seen} & k_left_mask"
            out.append(f"if tl.max(({seen}).to(tl.int32)) > 0:")
            start = len(out)
        self._step(whole)
        if start:
            out[start:] = [f"    {line}" for line in out[start:]]
        self.mapping = dict(self.outer_mapping)
        self.style, self.computed, self.inside, self.level = style, "", None, 0
        self.memo.clear()

    def _step(self, whole: bool) -> None:
        """What a step adds. whole: no place of a block lies behind the last."""
        raise NotImplementedError

    def _part(self, part: Product, number: str) -> None:
        """A block of a part's elements."""
        dtype = part.left.dtype if part.left.dtype is part.right.dtype else torch.float32
        mapping: dict[Expr, Dim] = {part.k: self._depth(part, f"left{number}")}
        left_text = self._load_operand(part.left, (f"d_left{number}", "y", 0), mapping, dtype)
        # the places lie across: a block of the right operand is [D, K]
        across = sizes.loop_symbol("k_across", self._product.length)
        self.bound[across] = Value("k_left", frozenset("k"), 1)
        mapping = {self._product.k: across, part.k: self._depth(part, f"right{number}")}
        right_text = self._load_operand(part.right, (f"d_right{number}", "k_left", 1), mapping, dtype)
        text = f"tl.dot({left_text}, {right_text}{self._precision(dtype)})"
        self.lines[1].append(f"{part.local} = {text}")
        self.locals[part.local] = Value(part.local, _BLOCK, 1)

    def _depth(self, part: Product, side: str) -> Expr:
        symbol = sizes.loop_symbol(f"d_{side}", part.length)
        self.bound[symbol] = Value(f"d_{side}", frozenset("d"), 0)
        return symbol

    def _load_operand(
        self, operand: Operand, block: tuple[str, str, int], mapping: dict[Expr, Dim], dtype: torch.dtype
    ) -> str:
        """A name of a block of an operand. block: the dimension that the product sums over, the other one, the
        level."""
        summed, other, level = block
        outer = self.index(sizes.substitute(operand.outer, self.outer_mapping | mapping))
        inner = self.index(sizes.substitute(operand.inner, self.outer_mapping | mapping))
        masks = []
        depth = summed.removeprefix("d_left").removeprefix("d_right")
        if summed.startswith("d_"):
            length = _parts(self._product)[int(depth or 0)].length
            if length != _block(length):
                masks.append(f"({summed} < {length})")
        for name in (summed, other):
            if f"{name}_mask" in self.locals or (self.inside is not None and name.startswith("k_")):
                masks.append(f"{name}_mask")
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        shape = {"y": f"[Y, D{depth}]", "k_left": f"[D{depth}, K]", "x": "[K, X]"}[other]
        text = f"tl.load({self.names[operand.buffer]} + tl.broadcast_to({outer.text} + {inner.text}, {shape}){mask})"
        if operand.dtype is not dtype:
            text = f"{text}.to({language_type(dtype)})"
        return self.bind(text, frozenset(), level).text

    def _right(self, dtype: torch.dtype) -> str:
        """A block of the product's right operand."""
        product = self._product
        right = sizes.loop_symbol("k_right", product.length)
        return self._load_operand(product.right, ("k_right", "x", 1), {product.k: right}, dtype)

    def _precision(self, dtype: torch.dtype) -> str:
        if dtype is not torch.float32:
            return ""
        return f', input_precision="{"ieee" if self._product.full else "tf32"}"'


@dataclass(slots=True)
class AttentionEmitter(BlockwiseEmitter):
    @property
    def _softmax(self) -> Softmax:
        assert self._product.softmax is not None
        return self._product.softmax

    @property
    def _places(self) -> Places:
        return self._softmax.places

    def _sums(self) -> None:
        product, softmax, out = self._product, self._softmax, self.lines[0]
        self._positions_of(softmax.scores, "")
        out += [
            f"{product.local} = tl.zeros([Y, X], tl.float32)",
            f'{softmax.most} = tl.full([Y, 1], float("-inf"), tl.float32)',
            f"{softmax.total} = tl.zeros([Y, 1], tl.float32)",
        ]
        self.locals[product.local] = Value(product.local, frozenset("xy"))
        self._loop_over_places()
        row = frozenset("y")
        self.locals[softmax.most] = Value(softmax.most, row)
        infinite = f'tl.abs({softmax.most}) == float("inf")'
        text = f'tl.where({infinite}, float("nan"), {softmax.total})'
        self.locals[softmax.total] = self.bind(text, row, 0)
        self.memo.clear()

    def _step(self, whole: bool) -> None:
        softmax = self._softmax
        self._part(softmax.scores, "")
        score = self.filled(self.evaluate(softmax.score)).text
        if not whole:
            score = self.bind(f'tl.where(k_left_mask, {score}, float("-inf"))', _BLOCK, 1).text
        self._online(score)

    def _online(self, score: str) -> None:
        """A maximum of negative infinity is not subtracted: such rows add zeros."""
        product, softmax, out = self._product, self._softmax, self.lines[1]
        most, total, left = softmax.most, softmax.total, product.left
        dtype = left.dtype if left.dtype is product.right.dtype else torch.float32
        half = dtype in HALVES

        def power(text: str) -> str:
            return f"tl.exp2({text} * {_LOG2_E} - shift)" if half else f"tl.exp({text} - shift)"

        out += [
            f"{most}_now = lib.maximum({most}, tl.reduce({score}, 1, lib.maximum)[:, None])",
            f'shift = tl.where({most}_now == float("-inf"), 0.0, {most}_now{f" * {_LOG2_E}" if half else ""})',
            f"power = {power(score)}",
            f"again = {power(most)}",
            f"{total} = {total} * again + tl.sum(power, 1)[:, None]",
            f"{most} = {most}_now",
        ]
        value = self._right(dtype)
        weights = "power" if dtype is torch.float32 else f"power.to({language_type(dtype)})"
        text = f"tl.dot({weights}, {value}, {product.local} * again{self._precision(dtype)})"
        out.append(f"{product.local} = {text}")


@dataclass(slots=True)
class ChainEmitter(BlockwiseEmitter):
    @property
    def _places(self) -> Places:
        assert self._product.chain is not None
        return self._product.chain.places

    def _sums(self) -> None:
        product = self._product
        for number, part in enumerate(_parts(product)):
            self._positions_of(part, str(number))
        self.lines[0].append(f"{product.local} = tl.zeros([Y, X], tl.float32)")
        self.locals[product.local] = Value(product.local, frozenset("xy"))
        self._loop_over_places()
        self.memo.clear()

    def _step(self, whole: bool) -> None:
        product = self._product
        for number, part in enumerate(_parts(product)):
            self._part(part, str(number))
        assert product.left.value is not None
        left = self.filled(self.evaluate(product.left.value)).text
        kind = product.left.dtype
        if not whole:
            left = self.bind(f"tl.where(k_left_mask, {left}, tl.zeros([Y, K], {language_type(kind)}))", _BLOCK, 1).text
        dtype = kind if kind is product.right.dtype else torch.float32
        text = left if dtype is kind else f"{left}.to({language_type(dtype)})"
        right = self._right(dtype)
        self.lines[1].append(f"{product.local} = tl.dot({text}, {right}, {product.local}{self._precision(dtype)})")
