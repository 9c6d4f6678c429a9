"""The text of loop programs."""

from __future__ import annotations

import torch

from fusewright.loops import ir
from fusewright.loops.lower import expressions as ex
from fusewright.loops.printer import print_expression, print_program
from fusewright.sizes.expressions import loop_symbol
from tests.loops import tracing

I0 = loop_symbol("i0", 8)
A = ir.load("a", I0, torch.float32)


def test_precedence() -> None:
    assert print_expression(ex.mul(ex.add(A, 1.0), ex.sub(A, 2.0))) == "(a[i0] + 1.0) * (a[i0] - 2.0)"
    assert print_expression(ex.sub(A, ex.sub(A, 1.0))) == "a[i0] - (a[i0] - 1.0)"
    assert print_expression(ex.neg(ex.add(A, -1.5))) == "-(a[i0] + -1.5)"
    condition = ex.either(ex.lt(A, 0), ex.both(ex.gt(A, 1), ex.invert(ex.eq(A, 2))))
    assert print_expression(condition) == "a[i0] < 0.0 or a[i0] > 1.0 and not a[i0] == 2.0"
    assert print_expression(ir.masked(ex.lt(A, 0), A, ir.constant(0, torch.float32))) == "a[i0] if a[i0] < 0.0 else 0.0"


def test_shared_values_are_named_once() -> None:
    e = ex.exp(A)
    assert print_expression(ex.div(e, ex.add(e, 1.0))) == "t0 = exp(a[i0]); t0 / (t0 + 1.0)"


def test_program() -> None:
    x, w = torch.randn(4, 6), torch.randn(5, 6)
    program = tracing.lowered(lambda x, w: torch.nn.functional.linear(x, w).softmax(-1), [x, w])
    assert print_program(program) == EXPECTED


EXPECTED = """\
input in0: f32[4x6 by 6x1] cpu
input in1: f32[5x6 by 6x1] cpu
temporary buf2: f32[4x5 by 5x1] cpu
temporary buf3: f32[4x1 by 1x1] cpu
temporary buf4: f32[4x5 by 5x1] cpu
temporary buf5: f32[4x1 by 1x1] cpu
output buf6: f32[4x5 by 5x1] cpu

buf2 = aten.mm.default(in0(4x6 by 6x1), in1(6x5 by 1x6))    [out]

for i0 < 4:
    for i1 < 5:
        acc = max(acc, buf2[i0*5 + i1])
    buf3[i0] = acc

for i0 < 4, i1 < 5:
    buf4[i0*5 + i1] = exp(buf2[i0*5 + i1] - buf3[i0])

for i0 < 4:
    for i1 < 5:
        acc = sum(acc, buf4[i0*5 + i1])
    buf5[i0] = reciprocal(acc)

for i0 < 4, i1 < 5:
    buf6[i0*5 + i1] = buf4[i0*5 + i1] * buf5[i0]

return buf6
"""


def test_indirect_masked_and_scan() -> None:
    program = tracing.lowered(
        lambda w, i: torch.nn.functional.embedding(i, w).cumsum(0), [torch.randn(9, 2), torch.tensor([1, 2])]
    )
    text = print_program(program)
    assert "in0[i1 + j0*2]{j0: check(in1[i0] < 9)}" in text and "scan i0 < 2:" in text
