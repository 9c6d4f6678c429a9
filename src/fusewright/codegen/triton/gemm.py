"""A product kernel as Triton text: blocks of a matrix product, then the kernel's pointwise stage on the block that
stays in registers.

Takes a `Kernel` with a `product` and a `ProductTile`; gives `KernelText`. An operand may be an expression over several
buffers, which is computed on the blocks that were loaded, each time that a block of the result needs them. Always
holds: sums are float32; what lies outside of an operand counts as 0, whatever an expression gives there; a block of the
result is computed by one program, and programs near each other in number share rows and columns, so that what they read
is still in the cache.
"""

from __future__ import annotations

import itertools

import torch

from fusewright.base.records import dataclass, replace
from fusewright.base.thresholds import SKINNY
from fusewright.codegen.analysis import Shape, StageView
from fusewright.codegen.device_kernel import Unsupported
from fusewright.codegen.triton import indices
from fusewright.codegen.triton.gemm_tiles import ProductTile
from fusewright.codegen.triton.kernel import Emitter, KernelText
from fusewright.codegen.triton.operations import HALVES, Style, language_type
from fusewright.codegen.triton.values import Value
from fusewright.loops.ir import Expression
from fusewright.schedule.plan import Kernel, Operand, Product
from fusewright.sizes import expressions as sizes
from fusewright.sizes.expressions import Dim, Expr

_STEP = "step"
_ALONG = {"left": frozenset("yk"), "right": frozenset("kx")}
"""The block dimensions of operands."""
FETCHED = 64 * 1024
"""Bytes of weights that a program asks for before it waits for the kernels before it: what a multiprocessor reads in
the time between two kernels."""
LINE = 128
"""Bytes of the cache's lines."""
DESCRIPTION = 128
"""Bytes of a tensor's description for the copy engine."""
COPIED = 16
"""Bytes that addresses and strides of its tensors are multiples of."""


def emit_product(kernel: Kernel, wide: bool, tile: ProductTile, weights: frozenset[str]) -> KernelText:
    """weights: buffers that are there before any kernel runs. Raises Unsupported."""
    (stage,) = kernel.stages
    aliases = {name: name for name in kernel.written}
    shape = Shape(kernel, list(kernel.outer), [StageView(stage, [], aliases)], aliases)
    if not tile.programs:
        return ProductEmitter(kernel, shape, tile, frozenset(), wide, (), weights=weights).run()
    emitter = BulkEmitter(kernel, shape, tile, frozenset(), wide, ())
    made = emitter.run()
    before, each = made.body[: emitter.start], made.body[emitter.start :]
    body = (*before, emitter.loop(), *(f"    {line}" for line in each))
    return replace(made, body=body, scratch=DESCRIPTION * 2, early=0)


@dataclass(slots=True)
class ProductEmitter(Emitter):
    computed: str = ""  # the operand whose element is being written
    inside: Value | None = None  # where its k is one of the product's
    weights: frozenset[str] = frozenset()

    def _grid(self) -> Dim:
        down, across = self._blocks()
        return self._extents()[0] * down * across

    def _blocks(self) -> tuple[int, int]:
        """Blocks of rows, blocks of columns."""
        _, rows, columns = self._extents()
        return -(-rows // self._tile.y), -(-columns // self._tile.x)

    def _begin(self) -> None:
        self.lines[0].append("program = tl.program_id(0)")

    @property
    def _tile(self) -> ProductTile:
        assert isinstance(self.tile, ProductTile)
        return self.tile

    @property
    def _product(self) -> Product:
        assert self.kernel.product is not None
        return self.kernel.product

    def _extents(self) -> tuple[int, int, int]:
        extents = tuple(axis.extent for axis in self.kernel.outer)
        if len(extents) != 3 or not all(isinstance(extent, int) for extent in extents):
            raise Unsupported("a product of symbolic size")
        return extents  # type: ignore[return-value]

    def _programs(self) -> None:
        """The block of this program: its positions and its sums."""
        self._positions()
        self.view = self.shape.views[0]
        self.mapping = dict(self.outer_mapping)
        self._fetch()
        self.early = len(self.lines[0])
        self._sums()

    def _fetch(self) -> None:
        """Asks the cache for the first of the weights that a product of few rows reads, while the kernels before it
        still run."""
        product = self._product
        for one in (product, *product.besides):
            self._fetch_operand(one.right, FETCHED // (1 + len(product.besides)))

    def _fetch_operand(self, operand: Operand, most: int) -> None:
        product, tile = self._product, self._tile
        buffers = dict(product.chosen).get(operand.buffer, (operand.buffer,))
        _, rows, columns = self._extents()
        start = operand.outer + sizes.substitute(operand.inner, {product.k: 0})
        width = operand.dtype.itemsize
        if rows > SKINNY or operand.value is not None or operand.checks or not self.weights.issuperset(buffers):
            return
        if sizes.coefficient(operand.inner, product.k) != 1 or not sizes.is_multiple(start, LINE // width):
            return
        parts = max(1, 32 * tile.warps // tile.x)
        size = min(product.length * width, most // tile.x) // parts // LINE * LINE
        if not size:
            return
        place = self.index(self.flat(start)).text
        if columns % tile.x:
            place = f"tl.where(x_mask, {place}, 0)"
        wide = ".to(tl.int64)" if self.wide else ""
        within = f"tl.arange(0, {parts})[:, None]{wide} * {size // width}"
        self.lines[0].append(f"lib.fetch({self.names[operand.buffer]} + ({place}) + {within}, {size})")

    def _positions(self) -> None:
        tile, out = self._tile, self.lines[0]
        batch, rows, columns = self._extents()
        down, across = self._blocks()
        out += [f"X: tl.constexpr = {tile.x}", f"Y: tl.constexpr = {tile.y}", f"K: tl.constexpr = {tile.k}"]
        self._begin()
        if batch > 1:
            out.append(f"batch = program // {down * across}")
            out.append(f"program = program % {down * across}")
        group = min(tile.group, down)
        if group > 1:
            out.append(f"first = program // {group * across} * {group}")
            out.append(f"high = tl.minimum({down} - first, {group})")
            out.append(f"down = first + program % {group * across} % high")
            out.append(f"across = program % {group * across} // high")
        else:
            out.append(f"down = program // {across}")
            out.append(f"across = program % {across}")
        wide = ".to(tl.int64)" if self.wide else ""
        if batch > 1 and wide:
            out.append("batch = batch.to(tl.int64)")
        out.append(f"y = (down * Y + tl.arange(0, Y)[:, None]){wide}")
        out.append(f"x = (across * X + tl.arange(0, X)[None, :]){wide}")
        for number, (name, buffers) in enumerate(self._product.chosen):
            self.names[name] = place = f"chosen{number}"
            out.append(f"{place} = {self.names[buffers[0]]}")
            for position, (before, buffer) in enumerate(itertools.pairwise(buffers), 1):
                if buffer != before:
                    out += [f"if batch >= {position}:", f"    {place} = {self.names[buffer]}"]
        b, y, x = (axis.symbol for axis in self.kernel.outer)
        self.outer_mapping = {
            b: sizes.loop_symbol("batch", batch) if batch > 1 else 0,
            y: sizes.loop_symbol("y", rows),
            x: sizes.loop_symbol("x", columns),
        }
        for name, extent, block in (("y", rows, tile.y), ("x", columns, tile.x)):
            if extent % block:
                out.append(f"{name}_mask = {name} < {extent}")
                self.locals[f"{name}_mask"] = Value(f"{name}_mask", frozenset(name))

    def _sums(self) -> None:
        product, tile = self._product, self._tile
        steps = -(-product.length // tile.k)
        out = self.lines[0]
        sums = [one.local for one in (product, *product.besides)]
        out += [f"{local} = tl.zeros([Y, X], tl.float32)" for local in sums]
        self.lines[1] = []
        self.level = 1
        left, *rights = self._operands(steps)
        precision = (
            ""
            if product.left.dtype is not torch.float32
            else f', input_precision="{"ieee" if product.full else "tf32"}"'
        )
        self.lines[1] += [
            f"{local} = tl.dot({left}, {right}, {local}{precision})" for local, right in zip(sums, rights, strict=True)
        ]
        self.level = 0
        out.append(f"for {_STEP} in range(0, {steps}):")
        out.extend(f"    {line}" for line in self.lines[1])
        self.lines[1] = []
        self.known[1].clear()
        self.locals.update((local, Value(local, frozenset("xy"))) for local in sums)

    def _operands(self, steps: int) -> tuple[str, ...]:
        """The texts of a step's blocks: of the left operand, and of the right ones."""
        wide = ".to(tl.int64)" if self.wide else ""
        self.lines[0].append(f"k_left = tl.arange(0, K)[None, :]{wide}")
        self.lines[0].append(f"k_right = tl.arange(0, K)[:, None]{wide}")
        step = sizes.loop_symbol(_STEP, steps)
        self.bound[step] = Value(_STEP, indices.NOTHING, 1)
        left = self._operand(self._product.left, "left", ("y", "k_left"), step)
        rights = [self._operand(self._product.right, "right", ("x", "k_right"), step)]
        for number, one in enumerate(self._product.besides, 1):
            rights.append(self._operand(one.right, f"right{number}", ("x", "k_right"), step))
        return left, *rights

    def _operand(self, operand: Operand, name: str, dims: tuple[str, str], step: Expr) -> str:
        """Loads a block of an operand, in the loop; its name. `dims`: the block dimension beside k, and what k is
        called."""
        product, tile = self._product, self._tile
        along, inner_name = dims
        inner_symbol = sizes.loop_symbol(inner_name, tile.k)
        self.bound[inner_symbol] = Value(inner_name, frozenset("k"))
        whole = product.length % tile.k == 0
        if operand.value is not None:
            return self._compute_operand(operand, operand.value, name, {product.k: step * tile.k + inner_symbol}, whole)
        # Where the length is no multiple, the last step's k reaches beyond it: the symbol's range is that of all steps.
        k: dict[Expr, Dim] = {product.k: step * tile.k + inner_symbol}
        outer = self.index(self.flat(operand.outer))
        start = f"{name}_start"
        self.lines[0].append(f"{start} = {self.names[operand.buffer]} + ({outer.text})")
        inner = self.index(sizes.substitute(operand.inner, k))
        masks = [f"{along}_mask"] if f"{along}_mask" in self.locals else []
        if not whole:
            masks.append(f"({_STEP} * K + {inner_name} < {product.length})")
        for at, within, extent in operand.checks:
            place = self.index(self.flat(at))
            moved = self.index(sizes.substitute(within, k))
            text = self.bind(f"({place.text}) + ({moved.text})", frozenset("k"), 1).text
            masks += [f"({text} >= 0)", f"({text} < {extent})"]
        mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        self.lines[1].append(f"{name} = tl.load({start} + ({inner.text}){mask})")
        return name

    # --- computed operands -------------------------------------------------------------------------------------------

    def _compute_operand(self, operand: Operand, value: Expression, name: str, k: dict[Expr, Dim], whole: bool) -> str:
        """Computes a block of an operand, in the loop; its name."""
        self.computed = name
        self.inside = None if whole else Value(f"({_STEP} * K + k_{name} < {self._product.length})", frozenset("k"), 1)
        style, self.style = self.style, Style(fast=operand.dtype in HALVES)
        self.mapping = self.outer_mapping | k
        self.memo.clear()  # an expression may stand on both sides
        found = self.filled(self.evaluate(value))
        if self.inside is not None:
            zeros = f"tl.zeros({self.shape_text(self._full())}, {language_type(operand.dtype)})"
            found = self.bind(f"tl.where({self.inside.text}, {found.text}, {zeros})", self._full(), 1)
        self.memo.clear()
        self.mapping = dict(self.outer_mapping)
        self.style, self.computed, self.inside = style, "", None
        return found.text

    def _full(self) -> frozenset[str]:
        return _ALONG[self.computed] if self.computed else Emitter._full(self)

    def shape_text(self, dims: frozenset[str]) -> str:
        if not self.computed:
            return Emitter.shape_text(self, dims)
        extents = [name.upper() if name in dims else "1" for name in ("yk" if self.computed == "left" else "kx")]
        return f"[{', '.join(extents)}]"

    def mask_text(self, dims: frozenset[str], guarded: bool = True) -> tuple[str, frozenset[str], int]:
        text, found, level = Emitter.mask_text(self, dims, guarded)
        if self.inside is None or "k" not in dims:
            return text, found, level
        return (
            f"{text} & {self.inside.text}" if text else self.inside.text,
            found | self.inside.dims,
            max(level, self.inside.level),
        )


# --- the copy engine --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand as the copy engine may know it: rows of `stride` elements from `offset` on; across: k runs along a
    row."""

    offset: int
    stride: int
    across: bool


def as_matrix(operand: Operand, along: Expr, k: Expr) -> Matrix | None:
    """The operand over its row or column `along` and `k`; None where the copy engine cannot bring it."""
    step, inner = sizes.coefficient(operand.outer, along), sizes.coefficient(operand.inner, k)
    offset = sizes.substitute(operand.outer, {along: 0})
    rest = sizes.substitute(operand.inner, {k: 0})
    if operand.value is not None or operand.checks or rest != 0:
        return None
    if not all(isinstance(d, int) for d in (step, inner, offset)) or 1 not in (step, inner):
        return None
    across = inner == 1
    stride = step if across else inner
    assert isinstance(stride, int) and isinstance(offset, int)
    width = operand.dtype.itemsize
    return (
        Matrix(offset, stride, across)
        if stride > 0 and stride * width % COPIED == 0 and offset * width % COPIED == 0
        else None
    )


def takes_copies(kernel: Kernel) -> bool:
    """Whether the copy engine can bring both operands of a product in half precision."""
    product = kernel.product
    if product is None or product.besides or kernel.outer[0].extent != 1 or product.left.dtype is torch.float32:
        return False
    _, row, column = (axis.symbol for axis in kernel.outer)
    return (
        as_matrix(product.left, row, product.k) is not None and as_matrix(product.right, column, product.k) is not None
    )


@dataclass(slots=True)
class BulkEmitter(ProductEmitter):
    """Programs that stay for several blocks, whose operands the copy engine brings: what is outside of a matrix comes
    as zeros."""

    start: int = 0  # lines before the loop over blocks

    def _grid(self) -> Dim:
        down, across = self._blocks()
        return min(self._tile.programs, down * across)

    def loop(self) -> str:
        down, across = self._blocks()
        return f"for block in tl.range(tl.program_id(0), {down * across}, {self._grid()}, flatten=True):"

    def _begin(self) -> None:
        _, rows, columns = self._extents()
        product = self._product
        for name, operand, axis, extent, block in (
            ("left", product.left, self.kernel.outer[1], rows, "Y"),
            ("right", product.right, self.kernel.outer[2], columns, "X"),
        ):
            matrix = as_matrix(operand, axis.symbol, product.k)
            if matrix is None:
                raise Unsupported("a product whose operands the copy engine cannot bring")
            memory = self.names[operand.buffer] + (f" + {matrix.offset}" if matrix.offset else "")
            shape, blocks = (
                ((extent, product.length), (block, "K")) if matrix.across else ((product.length, extent), ("K", block))
            )
            made = f"[{shape[0]}, {shape[1]}], [{matrix.stride}, 1], [{blocks[0]}, {blocks[1]}]"
            self.lines[0].append(f"{name}_matrix = tl.make_tensor_descriptor({memory}, {made})")
        self.start = len(self.lines[0])
        self.lines[0].append("program = block")

    def _operands(self, steps: int) -> tuple[str, ...]:
        product = self._product
        texts = []
        for name, operand, axis, place in (
            ("left", product.left, self.kernel.outer[1], "down * Y"),
            ("right", product.right, self.kernel.outer[2], "across * X"),
        ):
            matrix = as_matrix(operand, axis.symbol, product.k)
            assert matrix is not None
            at = f"[{place}, {_STEP} * K]" if matrix.across else f"[{_STEP} * K, {place}]"
            self.lines[1].append(f"{name} = {name}_matrix.load({at})")
            texts.append(f"{name}.T" if matrix.across != (name == "left") else name)
        return tuple(texts)
