"""Canonicalise, constant folding, common subexpressions, dead code, and the runner: goldens, and equality with eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusewright
from fusewright.base.rewrites import Rewrites
from fusewright.graph import passes
from fusewright.graph.passes.clean.canonicalise import canonicalise
from fusewright.graph.passes.clean.constant_fold import constant_fold
from fusewright.graph.passes.clean.cse import cse
from fusewright.graph.passes.clean.dce import dce
from fusewright.graph.passes.context import PassContext
from fusewright.graph.printer import print_graph
from fusewright.graph.verify import GraphError, verify
from fusewright.record.recorder import Recorder
from tests.graph.texts import graph_of
from tests.listening import kernel_names, stage_texts


def recorded(program, *inputs: torch.Tensor) -> torch.fx.Graph:
    recorder = Recorder("aten")
    traced = [recorder.input(tensor, f"x{i}") for i, tensor in enumerate(inputs)]
    return recorder.finish(program(recorder.call, *traced))


def text(graph: torch.fx.Graph) -> str:
    return print_graph(graph, locations=False)


def operators(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in graph.nodes if node.op == "call_function"]


def check(program, *inputs: torch.Tensor) -> torch.fx.Graph:
    graph = passes.run(recorded(program, *inputs))
    verify(graph, functional=True, rederive=True)
    got = torch.fx.GraphModule(torch.nn.Module(), graph)(*inputs)
    for a, b in zip(got, program(lambda fn, args=(), kwargs=None: fn(*args, **(kwargs or {})), *inputs), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype, text(graph)
    return graph


def test_view_chains() -> None:
    def program(c, x):
        y = c(torch.Tensor.t, (c(torch.Tensor.t, (x,)),))
        y = c(
            torch.Tensor.transpose, (c(torch.Tensor.permute, (c(torch.Tensor.view, (y, (2, 3, 4))), (2, 0, 1))), 0, 1)
        )
        y = c(torch.Tensor.transpose, (y, 1, 2))
        y = c(torch.Tensor.view, (c(torch.Tensor.view, (y, (24,))), (4, 6)))
        return [c(torch.sin, (c(torch.Tensor.expand, (y, (4, 6))),))]

    graph = check(program, torch.randn(6, 4))
    assert text(graph) == (
        "%x0: float32[6, 4] = input\n%1: float32[4, 6] = aten.view(%x0, [4, 6])\n%2: float32[4, 6] = aten.sin(%1)\nreturn [%2]\n"
    )


def test_no_ops_only_where_exact() -> None:
    def program(c, x):
        kept = c(torch.add, (x, 0))  # -0.0 + 0 is 0.0
        gone = c(torch.mul, (c(torch.sub, (c(torch.div, (x, 1)), 0)), 1))
        cast = c(torch.Tensor.to, (c(torch.Tensor.to, (x, torch.float64)), torch.float32))
        lossy = c(torch.Tensor.to, (c(torch.Tensor.to, (x, torch.bfloat16)), torch.float32))
        return [c(torch.sin, (t,)) for t in (kept, gone, cast, lossy)]

    x = torch.tensor([-0.0, 1.0, 1.2345678])
    graph = check(program, x)
    assert operators(graph) == ["add.Tensor", "_to_copy.default", "_to_copy.default", *["sin.default"] * 4]


def test_padding_by_nothing() -> None:
    pad = torch.nn.functional.pad
    graph = check(
        lambda c, x: [c(torch.sin, (c(pad, (x, amounts)),)) for amounts in ((0, 0), (1, 0), (-1, 1))], torch.randn(3, 4)
    )
    assert operators(graph).count("constant_pad_nd.default") == 2


def test_pieces_of_no_elements_are_left_out() -> None:
    def program(c, x):
        def cat(pieces, dim):
            return c(torch.cat, (pieces, dim))

        none = c(torch.narrow, (x, 1, 4, 0))
        columns = c(torch.narrow, (x, 1, 0, 2))
        old = c(torch.narrow, (c(torch.Tensor.reshape, (x, (-1,))), 0, 0, 0))
        pairs = [([x, none], 1), ([none, columns, none, x], -1), ([old, x], 0), ([none, none], 1), ([columns, x], 1)]
        return [c(torch.sin, (cat(*pair),)) for pair in pairs] + [cat([none, x], 1), cat([x.to(torch.half), none], 1)]

    x = torch.randn(3, 4)
    graph = check(program, x)
    assert [len(node.args[0]) for node in graph.nodes if node.target is torch.ops.aten.cat.default] == [2, 2, 2, 2]
    images = torch.randn(2, 3, 4, 5)
    for other in (torch.randn(4, 3).t(), images.to(memory_format=torch.channels_last), images.transpose(1, 2)):
        graph = check(lambda c, x: [c(torch.cat, ([x, c(torch.narrow, (x, 1, 0, 0))], 1))], other)
        assert operators(graph) == ["clone.default"]
    result = fusewright.compile(lambda x: torch.cat([x, x[:, 4:]], 1))(x)
    assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()


PARTS_OF_MEMORY = {
    "hardtanh": F.hardtanh, "relu6": F.relu6, "elu": F.elu, "clamp": lambda t: t.clamp(-1, 1), "times 1": lambda t: t * 1,
    "minus 0": lambda t: t - 0, "clone": torch.clone, "flip": lambda t: t.flip(0), "nan_to_num": torch.nan_to_num,
    "threshold": lambda t: F.threshold(t, 0.5, 0.0), "pow": lambda t: t**2, "logit": lambda t: t.logit(0.1),
    "where": lambda t: torch.where(t > 0, t, 0.0), "dropout": lambda t: F.dropout(t, 0.0), "to": lambda t: t.to(t.dtype, copy=True),
    "cat": lambda t: torch.cat([t, t[:0]]), "pad": lambda t: F.pad(t, (0, 0)), "contiguous": lambda t: t.contiguous() + 0.0,
}  # fmt: skip


@pytest.mark.parametrize("backend", ["native", "aot_eager"])
@pytest.mark.parametrize("name", PARTS_OF_MEMORY)
def test_places_in_memory_are_counted_from_where_the_result_begins(name: str, backend: str) -> None:
    """`fill_diagonal_` and `as_strided` say where they write, counted from the beginning of the memory: what stands for a
    result must begin where it did."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, z = PARTS_OF_MEMORY[name](x[1:]), PARTS_OF_MEMORY[name](x[2:])
        y.fill_diagonal_(0.25)
        return y, z.as_strided((3,), (6,)) * 2, z.view(-1).as_strided((2,), (3,), 1) + 1

    x = torch.arange(40.0).view(8, 5) / 8 - 2
    for mine, theirs in zip(fusewright.compile(program, backend=backend)(x), program(x.clone()), strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_promotion_is_no_no_op() -> None:
    graph = check(lambda c, x: [c(torch.neg, (c(torch.mul, (x, 1.0)),))], torch.arange(3))
    assert operators(graph) == ["mul.Tensor", "neg.default"]


def test_results_stay_objects_of_their_own() -> None:
    """A clone that is returned, a view that is returned, the same value twice: each is a tensor of its own in eager."""

    def program(c, x):
        twice = [c(torch.sin, (x,)), c(torch.sin, (x,))]
        return [c(torch.clone, (x,)), c(torch.Tensor.detach, (x,)), *twice, c(torch.Tensor.view, (x, (-1,)))]

    graph = check(program, torch.randn(4))
    results = next(iter(reversed(graph.nodes))).args[0]
    assert len(set(results)) == 5 and not any(node.op == "placeholder" for node in results)


def test_cse() -> None:
    def program(c, x):
        a = c(torch.mul, (c(torch.sin, (x,)), 1.5))
        b = c(torch.mul, (c(torch.sin, (x,)), 1.5))
        different = c(torch.mul, (c(torch.sin, (x,)), 2))
        drawn = [c(F.dropout, (x, 0.5)) for _ in range(2)]
        return [c(torch.add, (a, b)), c(torch.sub, (different, a)), *drawn]

    graph = recorded(program, torch.randn(3))
    before = operators(graph)
    graph = passes.run(graph)
    after = operators(graph)
    assert after.count("sin.default") == 1 and after.count("mul.Tensor") == before.count("mul.Tensor") - 1
    assert sum("bernoulli" in name for name in after) == 2


def test_keys_tell_numbers_apart() -> None:
    def program(c, x):
        return [c(torch.add, (c(torch.mul, (x, value)), 1)) for value in (1.0, 2, 2.0, True, 0.0, -0.0)]

    check(program, torch.arange(3))
    check(program, torch.tensor([-1.0, 0.0, 2.0]))


def test_constant_fold() -> None:
    def program(c, x):
        ones = c(torch.ones, (3,))
        mask = c(torch.rsub, (ones, 1.0))
        bias = c(torch.mul, (mask, torch.finfo(torch.float32).min))
        flag = c(torch.Tensor.logical_not, (c(torch.gt, (ones, 0)),))
        count = c(torch.Tensor.to, (c(torch.add, (ones, 2)), torch.int64))
        return [c(torch.add, (x, bias)), c(torch.where, (flag, x, 0.0)), c(torch.add, (x, count))]

    graph = check(program, torch.randn(3))
    assert (
        "mul.Tensor" not in operators(graph)
        and "gt.Scalar" not in operators(graph)
        and "rsub.Scalar" not in operators(graph)
    )
    assert "aten.full([3], -0.0" in text(graph)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_on_a_cpu_a_number_out_of_range_is_cut_to_an_integer(device: str) -> None:
    """Each device has a conversion of its own; what is in range is the same on all."""
    for number, known in (("3.7", True), ("3e9", device == "cpu"), ("-inf", device == "cpu")):
        graph = graph_of(
            f"%x: float32[3]@{device} = input\n%a = aten.full_like(%x, {number.replace('inf', '1e999')})\n"
            "%b = aten._to_copy(%a, dtype=int32)\n%c = aten.add.Tensor(%b, 1)\n%y = aten.mul.Tensor(%x, %c)\nreturn [%y]"
        )
        constant_fold(graph, PassContext())
        assert ("_to_copy.default" not in operators(graph)) is ("add.Tensor" not in operators(graph)) is known


def test_pieces_of_one_number_side_by_side_are_one() -> None:
    """The gradient of a split of which one part is used."""

    def program(c, x):
        zeros, minus, ones = (c(torch.full, ((2, 1), number)) for number in (0.0, -0.0, 1.0))
        doubles, columns = c(torch.zeros, ((2, 1),), {"dtype": torch.float64}), c(torch.zeros, ((2, 2),))
        lists = [zeros, zeros, x, columns, zeros, ones], [zeros, minus, minus], [zeros, zeros, doubles], [ones, ones]
        results = [c(torch.cat, (pieces, dim)) for pieces, dim in zip(lists, (1, -1, 1, 0), strict=True)]
        flat = c(torch.cat, ([c(torch.ones, (0,)), c(torch.ones, (2,)), c(torch.ones, (0,))],))
        return [*(c(torch.reciprocal, (result,)) for result in results), flat]

    graph = check(program, torch.randn(2, 3))
    assert [len(node.args[0]) for node in graph.nodes if node.target is torch.ops.aten.cat.default] == [4, 2, 3, 1]  # the third list's are promoted

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.split(2)[3] * 2

    for dynamic in (False, True):
        compiled = fusewright.compile(step, dynamic=dynamic)
        for size in (200, 300):
            x = torch.randn(size, requires_grad=True)
            with kernel_names() as names:
                (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
            assert torch.equal(gradient, torch.autograd.grad(step(x).sum(), x)[0])
            assert 0 < len(names) < 8


def test_dce_keeps_random_draws() -> None:
    def program(c, x):
        c(torch.sin, (x,))
        c(torch.rand, (3,))
        return [c(torch.cos, (x,))]

    assert operators(passes.run(recorded(program, torch.randn(3)))) == ["rand.default", "cos.default"]


def test_stop_after_bisects() -> None:
    def program(c, x):
        y = c(torch.mul, (x, 1))
        c(torch.sin, (x,))
        return [c(torch.add, (c(torch.cos, (y,)), c(torch.cos, (y,))))]

    reports = []
    passes.run(recorded(program, torch.randn(3)), passes.PassContext(observer=reports.append))
    total = sum(report.rewrites for report in reports)
    assert total == 3 and [r.name for r in reports] == [function.__name__ for function, _ in passes.PIPELINE]
    dead = next(report for report in reports if report.name == "dce")
    assert "sin" in dead.before and "sin" not in dead.after and dead.seconds > 0 and "sin" in dead.last
    counts = [
        len(operators(passes.run(recorded(program, torch.randn(3)), passes.PassContext(Rewrites(n)))))
        for n in range(total + 1)
    ]
    assert counts == [5, 4, 3, 2]


@pytest.mark.parametrize("function", [canonicalise, constant_fold, cse, dce])
def test_passes_change_nothing_without_leave(function) -> None:
    def program(c, x):
        y = c(torch.mul, (c(torch.mul, (x, 1)), c(torch.neg, (c(torch.ones, (3,)),))))
        c(torch.sin, (x,))
        return [c(torch.add, (c(torch.cos, (y,)), c(torch.cos, (y,))))]

    graph = recorded(program, torch.randn(3))
    before = text(graph)
    assert text(function(graph, passes.PassContext(Rewrites(0)))) == before
    assert text(function(graph, passes.PassContext())) != before


def test_verifier_sees_defects() -> None:
    def graph() -> torch.fx.Graph:
        return recorded(lambda c, x: [c(torch.Tensor.add_, (c(torch.sin, (x,)), 1))], torch.randn(3))

    verify(graph())
    with pytest.raises(GraphError, match="writes to"):
        verify(graph(), functional=True)
    for change, message in [
        (lambda node: node.meta.pop("type"), "no type"),
        (lambda node: setattr(node, "target", torch.ops.aten.sum.default), "derived as"),
    ]:
        broken = graph()
        change(next(node for node in broken.nodes if node.op == "call_function"))
        with pytest.raises(GraphError, match=message):
            verify(broken, rederive=True)


def test_numbers_that_the_program_makes_tensors_of_are_folded() -> None:
    """As DeBERTa's scale: a tensor in CPU memory would keep a GPU's graph from being recorded."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * 3).to(x.dtype)

    def written(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = torch.tensor(2.0)
        before = count * 3
        count.add_(x.sum())
        return before * x, count.sqrt()

    def bucketed(x: torch.Tensor) -> torch.Tensor:
        return torch.ceil(torch.log(x.abs() + 1) / torch.log(torch.tensor((x.size(-1) - 1) / 4)) * 3)

    for function in (scaled, bucketed, written):
        x = torch.rand(4, 64)
        compiled = fusewright.compile(function, fullgraph=True, options={"disk_cache": False})
        with stage_texts("passes") as texts:
            for _ in range(2):
                torch.testing.assert_close(compiled(x), function(x))
        assert ("= constant" in texts[0]) == (function is written)
