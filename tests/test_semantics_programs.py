"""The example programs of the semantics document (1 to 7, 9, 10, 11, 14 and 15), as users would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusewright
from fusewright.base.events import STREAM, Compiled, Event


def collecting_backend(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    return backend


def calls(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


def test_1_add_mul_is_two_call_function_nodes() -> None:
    graphs: list[torch.fx.GraphModule] = []

    @fusewright.compile(backend=collecting_backend(graphs))
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mul(torch.add(a, b), b)

    a, b = torch.randn(10, 10), torch.randn(10, 10)
    torch.testing.assert_close(f(a, b), (a + b) * b)
    assert [node.op for node in calls(graphs[0])] == ["call_function", "call_function"]
    assert len(graphs) == 1


def test_2_disabled_function_in_the_middle_gives_two_graphs_and_prints_every_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    @fusewright.disable
    def report(x: torch.Tensor) -> torch.Tensor:
        print("sum is", float(x.sum()))
        return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.first(x))
            x = report(x)
            return self.second(x)

    net = Net().eval()
    compiled = fusewright.compile(net, backend=collecting_backend(graphs))
    x = torch.randn(3, 4)
    for count in (1, 2, 3):
        torch.testing.assert_close(compiled(x), net.second(torch.relu(net.first(x))))
        assert capsys.readouterr().out.count("sum is") == 1, f"call {count}"
    assert len(graphs) == 2


def test_2_with_dynamic_inputs() -> None:
    """The two graphs around a disabled function serve every batch size: two compiles of each part."""
    seen: list[int] = []

    @fusewright.disable
    def report(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(report(torch.relu(self.first(x))))

    net = Net().eval()
    compiled = fusewright.compile(net)
    events: list[Event] = []
    sizes = (3, 5, 8, 1, 64)
    with torch.no_grad(), STREAM.listening(events.append):
        for size in sizes:
            x = torch.randn(size, 4)
            torch.testing.assert_close(compiled(x), net.second(torch.relu(net.first(x))))
    assert seen == list(sizes)
    assert sum(isinstance(event, Compiled) for event in events) == 4


class SimpleMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def test_3_mlp_is_one_graph_without_a_break() -> None:
    net, x = SimpleMLP().eval(), torch.randn(8, 64)
    with torch.no_grad():
        report = fusewright.explain(net)(x)
        torch.testing.assert_close(report.result, net(x))
    assert report.graph_count == 1
    assert report.graph_break_count == 0
    assert "graph breaks" in str(report)


def test_4_printing_the_input_shape_first_is_reported_and_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    class Net(SimpleMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("input shape", x.shape)
            return super().forward(x)

    net, x = Net().eval(), torch.randn(8, 64)
    with torch.no_grad():
        report = fusewright.explain(net)(x)
        assert capsys.readouterr().out == "input shape torch.Size([8, 64])\n"
        torch.testing.assert_close(report.result, net(x))
        capsys.readouterr()
        compiled = fusewright.compile(net)
        for _ in range(2):
            compiled(x)
            assert capsys.readouterr().out == "input shape torch.Size([8, 64])\n"
    assert report.graph_count == 1


def branching(x: torch.Tensor) -> torch.Tensor:
    if x.mean().item() > 0:
        return torch.relu(x) + 1
    return torch.sigmoid(x) - 1


def test_5_branch_on_data_is_one_break_and_an_error_under_fullgraph() -> None:
    graphs: list[torch.fx.GraphModule] = []
    compiled = fusewright.compile(branching, backend=collecting_backend(graphs))
    for x in (torch.ones(4), -torch.ones(4), torch.full((4,), 2.0)):
        torch.testing.assert_close(compiled(x), branching(x))
    report = fusewright.explain(branching)(torch.ones(4))
    assert report.graph_count == 2
    assert report.graph_break_count == 1
    assert report.break_reasons[0].stack[-1].file == __file__
    assert report.break_reasons[0].stack[-1].line == branching.__code__.co_firstlineno + 1
    with pytest.raises(fusewright.GraphBreakError) as error:
        fusewright.compile(branching, fullgraph=True)(torch.ones(4))
    assert "torch.where" in str(error.value)
    assert "torch.cond" in str(error.value)
    assert f"{__file__}:{branching.__code__.co_firstlineno + 1}" in str(error.value)


def test_6_loop_over_a_size_is_one_graph() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape[1])
        for i in range(x.shape[0]):
            total = total + x[i] * i
        return total

    report = fusewright.explain(f)(torch.randn(5, 3))
    assert (report.graph_count, report.graph_break_count) == (1, 0)
    compiled = fusewright.compile(f)
    for rows in (5, 6, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), f(x))


def test_7_static_bool_and_masking_are_one_graph() -> None:
    class Net(nn.Module):
        def __init__(self, flag: bool) -> None:
            super().__init__()
            self.flag = flag

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.flag:
                x = x * 2
            return x * (x > 0).float()

    net, x = Net(True), torch.randn(7, 5)
    report = fusewright.explain(net)(x)
    assert (report.graph_count, report.graph_break_count) == (1, 0)
    compiled = fusewright.compile(net)
    torch.testing.assert_close(compiled(x), net(x))
    net.flag = False
    torch.testing.assert_close(compiled(x), x * (x > 0).float())


def test_9_norm_linear_gelu_residual_is_one_gemm_between_fused_kernels() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.gelu(self.linear(self.norm(x)))

    net, x = Block().eval(), torch.randn(4, 16, 64)
    with torch.no_grad():
        report = fusewright.explain(net)(x)
        torch.testing.assert_close(report.result, net(x))
    assert report.graph_count == 1
    assert len(report.kernels) <= 2  # the norm before the GEMM, GELU and the residual after it
    assert any(location.file == __file__ for kernel in report.kernels for location in kernel.locations)


class TransformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "default"},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"fullgraph": True},
        {"dynamic": True},
        {"backend": "eager"},
        {"backend": "aot_eager"},
    ],
    ids=str,
)
def test_10_transformer_layer_under_every_mode(arguments: dict[str, Any]) -> None:
    net = TransformerLayer().eval()
    compiled = fusewright.compile(net, **arguments)
    with torch.no_grad():
        for shape in ((2, 10, 32), (3, 10, 32), (2, 10, 32)):
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), net(x))


def test_11_linear_relu_takes_two_compiles_or_one_with_dynamic() -> None:
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval()
    for dynamic, expected in ((None, 2), (True, 1)):
        fusewright.reset()
        compiled = fusewright.compile(net, dynamic=dynamic)
        events: list[Event] = []
        with torch.no_grad(), STREAM.listening(events.append):
            for batch in (32, 64, 128):
                x = torch.randn(batch, 16)
                torch.testing.assert_close(compiled(x), net(x))
        assert sum(isinstance(event, Compiled) for event in events) == expected, dynamic


def test_14_a_python_print_of_constants_follows_eager(capsys: pytest.CaptureFixture[str]) -> None:
    """Our capture replays prints, so a compiled function prints whenever eager would; only a *traced* artifact prints while tracing."""

    def f(x: torch.Tensor) -> torch.Tensor:
        print("tracing")
        return x * 2

    graphs: list[torch.fx.GraphModule] = []
    compiled = fusewright.compile(f, backend=collecting_backend(graphs))
    for _ in range(3):
        compiled(torch.ones(2))
    assert capsys.readouterr().out == "tracing\n" * 3
    graphs[0](torch.ones(2))  # the captured graph alone holds no print
    assert capsys.readouterr().out == ""


def test_15_benchmark_helper_warms_up_and_compares() -> None:
    from fusewright.tools.bench import benchmark

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.sin(x) + x * 0.5
        return x

    result = benchmark(chain, torch.randn(64, 64), seconds=0.2)
    assert result.correct
    assert result.eager_ms > 0 and result.compiled_ms > 0
    assert 0 < result.speedup < float("inf")  # how large is for benchmarks: a busy machine gives any figure
    assert "speed-up" in str(result)
