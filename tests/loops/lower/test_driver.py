"""What the walk decides: realisation, aliasing, updates of inputs, library calls, symbolic sizes."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph

import fusewright
from fusewright.base.events import STREAM, KernelMade
from fusewright.loops.ir import Extern, Pointwise, Reduction
from fusewright.loops.lower import lower
from tests.loops import reference, tracing
from tests.loops.lower.checking import called, check, compare

X = torch.randn(4, 6)


def kinds(program) -> list[type]:  # type: ignore[no-untyped-def]
    return [type(op) for op in program.operations]


def test_single_use_chains_become_one_loop() -> None:
    assert kinds(check(lambda x: ((x * 2).exp() + x).sigmoid().t() - 1, X)) == [Pointwise]


def test_dear_values_with_two_readers_are_stored_once() -> None:
    program = check(lambda x: [x.exp() + 1, x.exp().t() * 2][0] + (lambda e: e.sum() + e)(x.exp()), X)
    assert sum(isinstance(op, Reduction) for op in program.operations) == 1

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        e = x.exp()
        return [e.sum(0), e * 2]

    assert kinds(check(function, X)) == [Pointwise, Reduction, Pointwise]


def test_cheap_values_are_recomputed() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.float()
        return [y.sum(0), y * 2]

    assert kinds(check(function, X.bfloat16())) == [Reduction, Pointwise]


def test_dear_values_are_not_recomputed_by_broadcasting() -> None:
    program = check(lambda x, g: x * torch.sigmoid(g), X, torch.randn(6))
    assert kinds(program) == [Pointwise, Pointwise]
    assert kinds(check(lambda x, g: x * (g + 1), X, torch.randn(6))) == [Pointwise]


def test_long_chains_are_cut() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        for k in range(200):
            x = x * 1.01 + k
        return x

    assert 1 < len(check(function, X).operations) < 8


def test_outputs_that_are_inputs_views_constants_or_repeated() -> None:
    constant = torch.tensor([1.0, 2.0])

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x + 1
        return [x, x.t(), y, y, y[1:], y.clone(), constant, x.clone()]

    program = check(function, X)
    assert [output.kind for output in program.outputs] == [
        "buffer",
        "view",
        "buffer",
        "buffer",
        "view",
        "buffer",
        "view",
        "buffer",
    ]
    names = [output.buffer for output in program.outputs]
    assert names[2] == names[3] == names[4] and names[5] != names[2] and names[7] not in names[:7]


def test_expanded_output_has_stride_zero() -> None:
    program = check(lambda x: (x.exp())[:, :1].expand(4, 5), X)
    assert program.outputs[0].ref is not None and program.outputs[0].ref.stride[1] == 0


def test_empty_tensors() -> None:
    check(
        lambda x: [x * 2, x.sum(), x.sum(0), torch.cat([x, torch.ones(2, 3)])],
        torch.empty(0, 3),
        externs=["sum.default", "sum.dim_IntList", "cat.default", "mul.Tensor"],
    )


def test_complex_tensors_are_left_to_the_library() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    program = check(lambda z: [z * 2, z.exp()], z, externs=["mul.Tensor", "exp.default"])
    assert kinds(program) == [Extern, Extern]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.bool, torch.uint16], ids=str)
def test_views_of_nothing_in_every_dtype(dtype: torch.dtype) -> None:
    check(lambda x: [x.ravel(), x.t().unsqueeze(0), x.expand(2, 0, 3), x.contiguous()], torch.empty(0, 3, dtype=dtype))


def test_every_row_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no rows at all every operator is a library call, and the numbers are the same."""
    from fusewright.loops.lower import registry

    monkeypatch.setattr(registry, "_ROWS", {})
    program = tracing.lowered(lambda x: (x.t() * 2).softmax(-1).sum(0), [X])
    assert all(isinstance(op, Extern) for op in program.operations)
    torch.testing.assert_close(reference.run(program, [X])[0], (X.t() * 2).softmax(-1).sum(0))


def test_several_results_and_lists() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        values, order = x.sort(1)
        top = x.topk(2, 1)
        return [values * 2, order + 1, *top, torch.block_diag(x, x)]

    check(function, X, externs=["sort.default", "topk.default", "block_diag.default"])


def test_unread_results_are_dropped() -> None:
    program = check(lambda x: F.layer_norm(x, (6,)), X)
    assert len(program.buffers) == 4  # the input, mean, 1 / deviation, result
    assert check(lambda x: [x.max(1)[0]], X).operations[0].kind == "max"  # type: ignore[union-attr]


# --- updates ---------------------------------------------------------------------------------------------------------


def test_input_update() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sum(0)
        x.mul_(2).add_(1)
        return y

    check(function, X, mutating=True)


def test_swap_reads_before_it_writes() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        return old + 1

    check(function, X, torch.randn(4, 6), mutating=True)


def test_lazy_outputs_are_read_before_the_update() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 3
        x.zero_()
        return [y, x.t()]

    check(function, X, mutating=True)


def test_update_through_a_view_and_of_a_strided_input() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x[1:, ::2] += 5
        x.t()[0].fill_(2)
        return x * 1

    check(function, X, mutating=True)
    check(function, torch.randn(6, 8).t()[1:5, :], mutating=True)


def test_cache_update() -> None:
    def function(cache: torch.Tensor, position: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(1, position, new)
        return cache.sum(1)

    check(function, torch.randn(2, 8, 3), torch.tensor([4, 5]), torch.randn(2, 2, 3), mutating=True)


def test_batch_norm_training_updates_running_statistics() -> None:
    def function(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(F.batch_norm(x, m, v, w, b, training=True, momentum=0.2))

    inputs = torch.randn(4, 6, 5, 3), torch.randn(6), torch.rand(6), torch.randn(6), torch.randn(6)
    check(function, *inputs, mutating=True)


# --- randomness and order --------------------------------------------------------------------------------------------


def test_random_calls_keep_their_order_and_numbers() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        a = torch.rand(3)
        return [F.dropout(x, 0.5), a, torch.bernoulli(x.sigmoid())]

    program = tracing.lowered(function, [X])
    assert all(op.ordered for op in program.operations if isinstance(op, Extern)) and len(called(program)) >= 3
    torch.manual_seed(3)
    wanted = function(X)
    torch.manual_seed(3)
    for found, expected in zip(reference.run(program, [X]), wanted):
        compare(found, expected)


def test_attention_without_dropout_is_not_ordered() -> None:
    q = torch.randn(1, 2, 4, 8)
    program = tracing.lowered(lambda q: F.scaled_dot_product_attention(q, q, q), [q])
    (call,) = [op for op in program.operations if isinstance(op, Extern)]
    assert not call.ordered


def test_a_hand_made_node_that_is_no_tensor_operator_is_refused() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["type"] = tracing.type_of(X)
    graph.output((graph.call_method("exp", (x,)),))
    with pytest.raises(TypeError, match="not a node of an ATen graph"):
        lower(graph, {})


# --- symbolic sizes --------------------------------------------------------------------------------------------------


def model(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    h = F.layer_norm(x, (6,)) * w
    b, n, c = x.shape
    heads = h.view(b, n, 2, c // 2).transpose(1, 2)
    pooled = torch.cat([heads.mean(2), heads.amax(2)], -1).reshape(b, -1)
    mask = torch.arange(n)[:, None] >= torch.arange(n)
    scores = (heads @ heads.transpose(-1, -2)).masked_fill(~mask, float("-inf")).softmax(-1)
    return [pooled, scores, h.flatten(0, 1)[1:], h.sum() / n]


@pytest.mark.parametrize("sizes", [(3, 5), (2, 9)])
def test_symbolic_sizes(sizes: tuple[int, int]) -> None:
    graph, constants = tracing.record(model, [torch.randn(3, 5, 6), torch.randn(6)], {0: {0: "s0", 1: "s1"}})
    program = lower(graph, constants)
    assert sorted(str(symbol) for symbol in program.size_symbols) == ["s0", "s1"]
    inputs = [torch.randn(*sizes, 6), torch.randn(6)]
    for found, wanted in zip(reference.run(program, inputs), model(*inputs)):
        compare(found, wanted)


def test_sizes_as_results() -> None:
    graph, constants = tracing.record(lambda x: [x * 2, x.shape[0] * 2], [X], {0: {0: "s0"}})
    found = reference.run(lower(graph, constants), [torch.ones(7, 6)])
    assert found[1] == 14 and found[0].shape == (7, 6)


def test_getitem_on_views_of_parts() -> None:
    program = check(lambda x: [x.split(3, 1)[1] + 1, torch.unbind(x)[2].exp()], X)
    assert all(node is not operator.getitem for node in called(program))


@pytest.mark.parametrize("pool", [nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d])
@pytest.mark.parametrize("bins", [0, 2])
def test_a_result_without_elements(pool: Any, bins: int) -> None:
    module, x = pool(bins), torch.randn(1, 2, *[4] * int(pool.__name__[-2]))
    compiled = fusewright.compile(module, fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_casts_there_and_back(narrow: torch.dtype, wide: torch.dtype) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to(narrow).to(wide) * 2, x.to(wide).to(narrow).to(torch.float32)

    x = torch.randn(64)
    torch.testing.assert_close(fusewright.compile(function, fullgraph=True)(x), function(x), rtol=0, atol=0)


def test_without_fusion_each_operator_is_a_kernel() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).exp().t() + 1
        return (y.sigmoid() - y.softmax(0)).sum(0)

    x, kernels = torch.randn(5, 7), {}
    for fusion in (True, False):
        made: list[str] = []
        with STREAM.listening(lambda event: made.append(event.name) if isinstance(event, KernelMade) else None):
            compiled = fusewright.compile(function, options={"fusion": fusion, "disk_cache": False})
            torch.testing.assert_close(compiled(x), function(x))
        kernels[fusion] = len(made)
    assert kernels[True] <= 3 < 7 <= kernels[False]
