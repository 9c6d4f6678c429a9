"""Asynchronous tensor parallelism: a product and the collective beside it, cut into pieces of rows, so that the
communication of one piece runs beside the product of another.

Takes and gives a functional graph; option `cut_collectives` says how many pieces. Always holds: the pieces' collectives
follow each other in the place of the one; the values are those of the whole (each row's product is one sum either way).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from fusewright.graph.builder import Builder, building_for
from fusewright.graph.collectives import is_wait
from fusewright.graph.passes.context import PassContext
from fusewright.operators.rules.collectives import NAMESPACE
from fusewright.sizes.tensor_type import TensorType

aten = torch.ops.aten
Node = torch.fx.Node
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default)


def _again(build: Builder, node: Node, *args: object) -> Node:
    """The node's operator, of other arguments."""
    target: Any = node.target
    return build.call(target, *args, **node.kwargs)


def cut_products(graph: torch.fx.Graph, context: PassContext) -> torch.fx.Graph:
    for node in list(graph.nodes):
        name = str(node.target).partition(".")[2].removesuffix(".default")
        row = _ROWS.get(name) if str(node.target).startswith(f"{NAMESPACE}.") else None
        (wait, *more) = node.users or (None,)
        if row is not None and wait is not None and is_wait(wait) and not more:
            row(graph, node, wait, context)
    return graph


def _reduced(graph: torch.fx.Graph, collective: Node, wait: Node, context: PassContext) -> None:
    """all_reduce(product): each piece of rows is multiplied, and then summed."""
    product = _product_below(collective.args[0])
    rows = None if product is None else _rows(product, context.pieces)
    if product is None or rows is None or not context.allow(f"{collective.name} in {context.pieces} pieces"):
        return
    with graph.inserting_before(collective):
        build = building_for(graph, collective)
        parts = [
            _again(build, collective, _multiplied(build, product, at, rows), *collective.args[1:])
            for at in range(0, rows * context.pieces, rows)
        ]
    _put_together(graph, wait, parts, lambda build, found: _viewed(build, build.call(aten.cat.default, found), wait))


def _scattered(graph: torch.fx.Graph, collective: Node, wait: Node, context: PassContext) -> None:
    """reduce_scatter(product): piece i has those rows of each process's part that are its own piece i."""
    product, pieces = collective.args[0], context.pieces
    size: int = collective.args[2]  # type: ignore[assignment]
    if not isinstance(product, Node) or not _is_product(product) or _rows(product, size * pieces) is None:
        return
    if not context.allow(f"{collective.name} in {pieces} pieces"):
        return
    given, place = _left(product)
    rows = given.meta["type"].shape[0] // size
    step, width = rows // pieces, given.meta["type"].shape[1]
    with graph.inserting_before(collective):
        build = building_for(graph, collective)
        by_process = build.call(aten.reshape.default, given, [size, rows, width])
        parts = []
        for at in range(0, rows, step):
            piece = build.call(aten.slice.Tensor, by_process, 1, at, at + step)
            copy = build.call(aten.clone.default, piece, memory_format=torch.contiguous_format)
            operand = build.call(aten.view.default, copy, [size * step, width])
            args = [*product.args[:place], operand, *product.args[place + 1 :]]
            made = _again(build, product, *args)
            parts.append(_again(build, collective, made, *collective.args[1:]))
    _put_together(graph, wait, parts, lambda build, found: build.call(aten.cat.default, found))


def _gathered(graph: torch.fx.Graph, collective: Node, wait: Node, context: PassContext) -> None:
    """Products of what is gathered: each begins with the piece that has arrived."""
    given, pieces = collective.args[0], context.pieces
    size: int = collective.args[1]  # type: ignore[assignment]
    products = list(wait.users)
    if not isinstance(given, Node) or given.meta["type"].ndim != 2 or not products:
        return
    for product in products:
        if not _is_product(product) or _left(product)[0] is not wait or product.args.count(wait) != 1:
            return
        if product.target is aten.addmm.default and product.args[0].meta["type"].ndim != 1:  # type: ignore[union-attr]
            return
    rows = given.meta["type"].shape[0]
    if not isinstance(rows, int) or rows % pieces or not rows:
        return
    if not context.allow(f"{collective.name} in {pieces} pieces"):
        return
    step = rows // pieces
    with graph.inserting_before(collective):
        build = building_for(graph, collective)
        begun = [
            _again(build, collective, build.call(aten.slice.Tensor, given, 0, at, at + step), *collective.args[1:])
            for at in range(0, rows, step)
        ]
        for one in begun:
            one.meta["piece"] = True
        arrived = [_again(build, wait, one) for one in begun]
    for product in products:
        place = _left(product)[1]
        with graph.inserting_before(product):
            build = building_for(graph, product)
            parts = []
            for piece in arrived:
                args = [*product.args[:place], piece, *product.args[place + 1 :]]
                made = _again(build, product, *args)
                parts.append(build.call(aten.view.default, made, [size, step, made.meta["type"].shape[1]]))
            whole = build.call(aten.cat.default, parts, 1)
            whole = build.call(aten.view.default, whole, [size * rows, whole.meta["type"].shape[2]])
        product.replace_all_uses_with(whole)
        graph.erase_node(product)
    graph.erase_node(wait)
    graph.erase_node(collective)


_ROWS: dict[str, Callable[[torch.fx.Graph, Node, Node, PassContext], None]] = {
    "all_reduce": _reduced,
    "reduce_scatter_tensor": _scattered,
    "all_gather_into_tensor": _gathered,
}


def _put_together(
    graph: torch.fx.Graph, wait: Node, parts: list[Node], whole: Callable[[Builder, list[Node]], Node]
) -> None:
    collective = wait.all_input_nodes[0]
    with graph.inserting_before(wait):
        build = building_for(graph, wait)
        result = whole(build, [_again(build, wait, part) for part in parts])
    wait.replace_all_uses_with(result)
    graph.erase_node(wait)
    graph.erase_node(collective)


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS


def _product_below(node: object) -> Node | None:
    """The product of which the node is a view, where nobody else reads either."""
    while isinstance(node, Node) and node.target in _VIEWS and len(node.users) == 1:
        node = node.args[0]
    return node if isinstance(node, Node) and _is_product(node) and len(node.users) == 1 else None


def _left(product: Node) -> tuple[Node, int]:
    """The operand whose rows are the result's, and its place among the arguments."""
    place = 1 if product.target is aten.addmm.default else 0
    return product.args[place], place  # type: ignore[return-value]


def _rows(product: object, pieces: int) -> int | None:
    """The rows of a piece of the product; None where it cannot be cut so."""
    if not isinstance(product, Node) or len(product.users) != 1:
        return None
    kind: TensorType = _left(product)[0].meta["type"]
    rows = kind.shape[0]
    if product.target is aten.addmm.default and product.args[0].meta["type"].ndim != 1:  # type: ignore[union-attr]
        return None
    return rows // pieces if isinstance(rows, int) and rows and rows % pieces == 0 else None


def _multiplied(build: Builder, product: Node, at: int, rows: int) -> Node:
    """The product of some rows."""
    given, place = _left(product)
    piece = build.call(aten.slice.Tensor, given, 0, at, at + rows)
    return _again(build, product, *product.args[:place], piece, *product.args[place + 1 :])


def _viewed(build: Builder, found: Node, like: Node) -> Node:
    shape = like.meta["type"].shape
    return found if found.meta["type"].shape == shape else build.call(aten.view.default, found, list(shape))
