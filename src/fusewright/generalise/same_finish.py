"""Whether two frames end in the same way, where sizes that are symbolic in one of them are numbers in the other.

Takes the texts of two `finish` functions and the general graph's results; gives which of those results are plain
numbers in the special frame. Always holds: the texts are compared as syntax trees, so what stands in a user's string is
no part of the program.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from fusewright.capture.breaks.finish import OUTPUTS

LOCAL = "__v"
"""How `finish` names what it makes."""


class _Written(ast.NodeTransformer):
    """Results that are numbers written as such, locals that only hold a constant too; the others numbered in order."""

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self.numbers = numbers
        self.constants: dict[str, ast.Constant] = {}
        self.names: dict[str, str] = {}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        place = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if not (isinstance(node.value, ast.Name) and node.value.id == OUTPUTS and isinstance(place, int)):
            return node
        if place in self.numbers:
            return ast.Constant(self.numbers[place])
        return ast.Subscript(node.value, ast.Constant(place - sum(number < place for number in self.numbers)), node.ctx)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        node.value = self.visit(node.value)
        target = node.targets[0]
        if (
            len(node.targets) == 1
            and isinstance(target, ast.Name)
            and target.id.startswith(LOCAL)
            and isinstance(node.value, ast.Constant)
        ):
            self.constants[target.id] = node.value
            return None
        node.targets = [self.visit(one) for one in node.targets]
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not node.id.startswith(LOCAL):
            return node
        if node.id in self.constants:
            return self.constants[node.id]
        return ast.Name(self.names.setdefault(node.id, f"{LOCAL}{len(self.names)}"), node.ctx)


def numbers_in(general: str, special: str, sizes: Sequence[int | None]) -> dict[int, int] | None:
    """`sizes`: for each result of the general graph the number that it is in the special frame, None for other results.
    Gives result → number where the two texts say the same; None where they do not."""
    if general == special:
        return {}
    numbers = {place: size for place, size in enumerate(sizes) if size is not None}
    if not numbers:
        return None
    texts = [ast.dump(_Written(found).visit(ast.parse(text))) for text, found in ((general, numbers), (special, {}))]
    return numbers if texts[0] == texts[1] else None
