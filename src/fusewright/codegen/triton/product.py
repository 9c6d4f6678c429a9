"""A product kernel as Triton text: blocks of a matrix product, then the kernel's pointwise stage on the block that stays in registers.

Takes a `Kernel` with a `product` and a `ProductTile`; gives `KernelText`. Always holds: sums are float32; what lies outside of an operand
counts as 0; a block of the result is computed by one program, and programs near each other in number share rows and columns, so that
what they read is still in the cache.
"""

from __future__ import annotations

import torch

from fusewright.codegen.device_kernel import Unsupported
from fusewright.codegen.llvm.analysis import Shape, StageView
from fusewright.codegen.triton import indices
from fusewright.codegen.triton.kernel import Emitter, KernelText
from fusewright.codegen.triton.product_tiles import ProductTile
from fusewright.codegen.triton.values import Value
from fusewright.graph import sizes
from fusewright.graph.sizes import Dim, Expr
from fusewright.records import dataclass
from fusewright.schedule.plan import Kernel, Operand, Product

_STEP = "step"


def emit_product(kernel: Kernel, wide: bool, tile: ProductTile) -> KernelText:
    """Raises Unsupported."""
    (stage,) = kernel.stages
    aliases = {name: name for name in kernel.written}
    shape = Shape(kernel, list(kernel.outer), [StageView(stage, [], aliases)], aliases)
    return ProductEmitter(kernel, shape, tile, frozenset(), wide, ()).run()


@dataclass(slots=True)
class ProductEmitter(Emitter):
    def _grid(self) -> Dim:
        batch, down, across = self._extents()
        return batch * -(-down // self._tile.y) * -(-across // self._tile.x)

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
        self._sums()

    def _positions(self) -> None:
        tile, out = self._tile, self.lines[0]
        batch, rows, columns = self._extents()
        down, across = -(-rows // tile.y), -(-columns // tile.x)
        out += [f"X: tl.constexpr = {tile.x}", f"Y: tl.constexpr = {tile.y}", f"K: tl.constexpr = {tile.k}"]
        out.append("program = tl.program_id(0)")
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
        wide = ".to(tl.int64)" if self.wide else ""
        out = self.lines[0]
        out.append(f"k_left = tl.arange(0, K)[None, :]{wide}")
        out.append(f"k_right = tl.arange(0, K)[:, None]{wide}")
        out.append(f"{product.local} = tl.zeros([Y, X], tl.float32)")
        step = sizes.loop_symbol(_STEP, steps)
        self.bound[step] = Value(_STEP, indices.NOTHING, 1)
        self.lines[1] = []
        self.level = 1
        left = self._operand(product.left, "left", "y", step)
        right = self._operand(product.right, "right", "x", step)
        precision = "" if product.left.dtype is not torch.float32 else f', input_precision="{"ieee" if product.full else "tf32"}"'
        self.lines[1].append(f"{product.local} = tl.dot({left}, {right}, {product.local}{precision})")
        self.level = 0
        out.append(f"for {_STEP} in range(0, {steps}):")
        out.extend(f"    {line}" for line in self.lines[1])
        self.lines[1] = []
        self.known[1].clear()
        self.locals[product.local] = Value(product.local, frozenset("xy"))

    def _operand(self, operand: Operand, name: str, along: str, step: Expr) -> str:
        """Loads a block of an operand, in the loop; its name. `along`: the block dimension beside k."""
        product, tile = self._product, self._tile
        inner_name = f"k_{name}"
        inner_symbol = sizes.loop_symbol(inner_name, tile.k)
        self.bound[inner_symbol] = Value(inner_name, frozenset("k"))
        whole = product.length % tile.k == 0
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
