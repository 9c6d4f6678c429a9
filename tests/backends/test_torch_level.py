"""Backends that take torch-level graphs: the contract of the graph, training through them, errors, registration."""

from __future__ import annotations

import copy
import enum
import importlib.metadata
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

import fusewright
from fusewright.backends import registry
from fusewright.capture.border.values import context
from fusewright.sizes.tensor_type import TensorType


class Net(nn.Module):
    """Parameters, buffers that are written to, views, sizes, a constant, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.steps += 1
        y = self.norm(self.linear(x))
        y = y.view(-1, x.shape[0], 2)[0]
        z = y.clone()
        z[0].add_(torch.tensor([1.0, 2.0]))
        return {"y": y, "z": (z, x.shape[0]), "s": torch.split(z, 1, dim=1)}


@pytest.fixture
def graphs() -> list[tuple[torch.fx.GraphModule, list[Any]]]:
    return []


def collecting(graphs: list[tuple[torch.fx.GraphModule, list[Any]]]) -> Callable[..., Any]:
    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append((gm, example_inputs))
        return gm.forward

    return backend


def test_the_graph_keeps_its_contract(graphs: list[tuple[torch.fx.GraphModule, list[Any]]]) -> None:
    net = Net()
    reference = copy.deepcopy(net)
    compiled = fusewright.compile(net, backend=collecting(graphs), fullgraph=True)
    for rows in (6, 5, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), reference(x))
        torch.testing.assert_close(net.state_dict(), reference.state_dict())
    assert len(graphs) == 2  # static, then with a symbolic size
    for (gm, inputs), sizes in zip(graphs, (0, 1)):
        assert type(gm).__bases__[0] is torch.fx.GraphModule or isinstance(gm, torch.fx.GraphModule)
        gm.graph.lint()
        assert {node.op for node in gm.graph.nodes} == {"placeholder", "call_function", "call_method", "output"}
        placeholders = list(gm.graph.find_nodes(op="placeholder"))
        assert len(placeholders) == len(inputs)
        assert [type(value) for value in inputs].count(int) == sizes
        names = {node.target for node in placeholders}
        assert {"self_linear_weight", "self_norm_bias", "self_steps"} <= names
        for node, value in zip(placeholders, inputs):
            example = node.meta["example_value"]
            if isinstance(value, torch.Tensor):
                assert (example.dtype, example.device, example.dim()) == (value.dtype, value.device, value.dim())
        for node in gm.graph.nodes:
            if node.op.startswith("call_") and isinstance(node.meta.get("type"), TensorType):
                assert isinstance(node.meta["example_value"], torch.Tensor), node
        (output,) = gm.graph.find_nodes(op="output")
        assert isinstance(output.args[0], tuple)
        assert any(node.target in ("view", "add_") for node in gm.graph.find_nodes(op="call_method", target="view"))
        again = copy.deepcopy(gm)
        for run in (gm, again, torch.fx.Interpreter(gm).run):
            torch.manual_seed(0)
            values = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]
            result = run(*values)
            assert isinstance(result, tuple)
        namespace: dict[str, Any] = {}
        exec(gm.graph.python_code("self").src, {**gm.graph.python_code("self").globals}, namespace)
        assert gm.code.strip().startswith("def forward(self")


@pytest.mark.parametrize("backend", ["callable", "eager", "aot_eager", "cudagraphs"])
def test_training_gives_eagers_gradients(backend: str, graphs: list[Any]) -> None:
    net = Net()
    reference = copy.deepcopy(net)
    compiled = fusewright.compile(net, backend=collecting(graphs) if backend == "callable" else backend)
    for rows in (6, 5, 7) if backend in ("callable", "eager") else (6, 6):
        x = torch.randn(rows, 4)
        for model, current in ((compiled, net), (reference, reference)):
            out = model(x)
            (out["y"].square().sum() + out["z"][0].sum()).backward()
            with torch.no_grad():
                for parameter in current.parameters():
                    parameter.sub_(0.01 * parameter.grad)  # type: ignore[arg-type]
                    parameter.grad = None
        torch.testing.assert_close(net.state_dict(), reference.state_dict())


@pytest.mark.sweep  # it calls a C++ compiler
def test_inductor_runs_our_graph() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    reference = copy.deepcopy(net)
    compiled = fusewright.compile(net, backend="inductor")
    for rows in (2, 5, 7):
        x = torch.randn(rows, 4)
        compiled(x).sum().backward()
        reference(x).sum().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], [p.grad for p in reference.parameters()])


def f(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def test_what_a_backend_raises_names_it() -> None:
    def moody(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        raise KeyError("not today")

    with pytest.raises(
        fusewright.BackendError, match=r"backend 'moody' failed on the graph of f .*KeyError: 'not today'"
    ) as error:
        fusewright.compile(f, backend=moody)(torch.ones(2))
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(fusewright.BackendError, match=r"returned int for f .*must return a callable"):
        fusewright.compile(f, backend=lambda gm, inputs: 3)(torch.ones(2))
    with pytest.raises(fusewright.OptionError, match="takes no options"):
        fusewright.compile(f, backend=lambda gm, inputs: gm, options={"a": 1})(torch.ones(2))


def test_what_a_failed_graph_has_written_to_is_given_back() -> None:
    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x[0].mul_(2)
        return x.index_select(0, index)

    given: dict[str, Callable[[], torch.Tensor]] = {
        "dense": lambda: torch.arange(6.0).reshape(2, 3), "columns": lambda: torch.arange(6.0).reshape(3, 2).t(),
        "rows that share memory": lambda: torch.arange(3.0).expand(2, 3), "of an inference": lambda: torch.ones(2, 3),
        "elements that share memory": lambda: torch.arange(4.0).as_strided((2, 3), (1, 1)),
    }  # fmt: skip
    for name, make in given.items():
        compiled = fusewright.compile(program, backend="eager")
        with torch.inference_mode(name == "of an inference"):
            for index in (torch.tensor([0]), torch.tensor([-5])):
                ours, theirs = make(), make()
                outcomes = []
                for run, x in ((compiled, ours), (program, theirs)):
                    try:
                        outcomes.append(run(x, index).tolist())
                    except Exception as error:
                        outcomes.append(type(error))
                assert outcomes[0] == outcomes[1], name
                assert torch.equal(ours, theirs), name


@torch.library.custom_op("fusewright_torch_level::triple", mutates_args=("x",))
def triple(x: torch.Tensor) -> None:
    x.mul_(3)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda x: x.data.mul_(2), "a part of data": lambda x: x.data[1].fill_(3.0),
    "an item of data": lambda x: x.data.__setitem__(0, x.data[0] + 5), "zeros": lambda x: x.data.neg_(),
    "other bits": lambda x: x.data.view(torch.int32).add_(1), "out": lambda x: torch.add(x.data, 1, out=x.data),
    "a list": lambda x: torch._foreach_add_([x.data], 1),
    "by position": lambda x: torch.nn.functional.dropout(x.data, 1.0, True, True),
    "a special method": lambda x: x.detach().__imul__(3),
    "an overload": lambda x: torch.ops.aten.add_.Tensor(x.detach(), torch.ones(())),
    "an operator of the program's": lambda x: triple(x.detach()), "its overload": lambda x: triple(x.data),
    "running means": lambda x: torch.nn.functional.batch_norm(torch.eye(3), x.data[0], x.data[1].abs(), training=True),
    "running means of the operator": lambda x: torch.native_batch_norm(
        torch.eye(3), None, None, x.detach()[0], x.detach()[1], True, 0.1, 1e-5
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["tensor", "parameter", "of NaN", "beside steps", "beside a lone step"])
@pytest.mark.parametrize("name", WRITES)
def test_a_failed_graph_gives_back_whatever_it_has_written_to(name: str, kind: str) -> None:
    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        WRITES[name](x)
        return torch.arange(4)[index]

    def outcomes(run: Callable[..., torch.Tensor]) -> str:
        x = torch.arange(6.0).reshape(2, 3)
        x = torch.nn.Parameter(x) if kind == "parameter" else x
        x = x.index_fill(1, torch.tensor([0]), torch.nan) if kind == "of NaN" else x
        found: list[Any] = []
        for index in (9, 1, 9):
            whole = torch.tensor([[index, 0, 0], [index, 0, 0]])
            indices = {"beside steps": whole[:, 0], "beside a lone step": whole[:1, 0]}.get(kind, whole[0])
            try:
                found.append(run(x, indices).tolist())
            except IndexError as error:
                found.append(type(error))
            found.append(x.tolist())
        return str(found)  # in which NaN equals itself, and the zeros differ

    assert outcomes(fusewright.compile(program, backend="eager")) == outcomes(program)


@pytest.mark.parametrize("shape", [(3,), (1, 3)])
@pytest.mark.parametrize("inference", [True, False])
def test_a_write_beside_an_argument_without_a_version_counter(inference: bool, shape: tuple[int, ...]) -> None:
    """What was an inference tensor until `.data =` gave it another's data is none, but counts no writes as they do."""
    with torch.inference_mode():
        uncounted = torch.ones(3)
    uncounted.data = torch.arange(3.0).reshape(shape)
    assert not uncounted.is_inference()

    def program(x: torch.Tensor, one: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x.detach().mul_(2)
        return x.index_select(0, index) * one

    compiled = fusewright.compile(program, backend="eager")
    ours, theirs = torch.ones(3), torch.ones(3)
    with torch.inference_mode(inference):
        for index in (torch.tensor([0, 1, 2]), torch.tensor([0, 1, -5])):
            outcomes: list[Any] = []
            for run, x in ((compiled, ours), (program, theirs)):
                try:
                    outcomes.append(run(x, uncounted, index).tolist())
                except IndexError as error:
                    outcomes.append(type(error))
            assert outcomes[0] == outcomes[1]
            assert torch.equal(ours, theirs)


def test_what_a_graph_raises_when_it_runs_is_eagers() -> None:
    def look_up(index: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(index, torch.ones(3, 2))

    with pytest.raises(IndexError, match="index out of range"):
        fusewright.compile(look_up, backend="eager")(torch.tensor([5]))


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], object]]] = {
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
    "its dtype": (lambda: torch.autocast("cpu", torch.float16, enabled=False), lambda: torch.get_autocast_dtype("cpu")),
    "nesting": (lambda: torch.autocast("cpu"), context.snapshot),
    "attention": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native", lambda graph, inputs: graph.forward])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_graph_raises_leaves_no_setting_changed(name: str, backend: Any) -> None:
    setting, read = SETTINGS[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        with setting():
            return x.bernoulli()

    compiled, before = fusewright.compile(function, backend=backend), read()
    for likely in (0.5, 7.0, 0.25, 7.0):
        try:
            compiled(torch.full((3,), likely))
        except RuntimeError:
            assert likely > 1
        assert read() == before


@pytest.mark.parametrize("shape", [list, tuple, lambda outputs: outputs[0]], ids=["list", "tuple", "bare"])
def test_backends_may_return_lists_and_bare_values(shape: Any) -> None:
    compiled = fusewright.compile(f, backend=lambda gm, inputs: lambda *args: shape(gm(*args)))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))


def test_options_reach_the_backend_and_names_are_registered() -> None:
    seen: list[Any] = []

    @fusewright.register_backend
    def doubling(gm: torch.fx.GraphModule, example_inputs: list[Any], options: dict[str, Any] | None = None) -> Any:
        seen.append(options)
        return gm.forward

    try:
        assert "doubling" in fusewright.list_backends()
        fusewright.compile(f, backend="doubling", options={"level": 3})(torch.ones(2))
        fusewright.compile(f, backend="doubling")(torch.ones(2))
        assert seen == [{"level": 3}, None]
        for wrong in (
            lambda: fusewright.register_backend(doubling, name="eager"),
            lambda: fusewright.register_backend(3),
        ):
            with pytest.raises(fusewright.OptionError):
                wrong()
    finally:
        del registry._backends["doubling"]


def entry_point_backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    return gm.forward


def test_entry_points_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint("theirs", f"{__name__}:entry_point_backend", registry.ENTRY_POINT_GROUP),
        importlib.metadata.EntryPoint("broken", "no_such_module:backend", registry.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.ENTRY_POINT_GROUP else [])
    assert {"theirs", "broken"} <= set(fusewright.list_backends())
    try:
        assert torch.equal(fusewright.compile(f, backend="theirs")(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        registry._backends.pop("theirs", None)
    with pytest.raises(fusewright.OptionError, match="'broken' cannot be loaded from no_such_module:backend"):
        fusewright.compile(f, backend="broken")


@pytest.mark.parametrize(("name", "word"), [(name, "retired") for name in registry.RETIRED])
def test_retired_names_say_what_became_of_them(name: str, word: str) -> None:
    with pytest.raises(fusewright.OptionError, match=f"{name}.*{word}"):
        fusewright.compile(f, backend=name)


@pytest.mark.parametrize(("name", "package"), [("onnxrt", "onnxruntime"), ("xla", "jax")])
def test_backends_without_their_packages_say_what_to_install(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda module: None)
    registry._backends.pop(name, None)
    for module in [key for key in sys.modules if key.startswith(f"fusewright.backends.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(fusewright.OptionError, match=f"'{name}' needs .*pip install .*{package}"):
        fusewright.compile(f, backend=name)


def test_onnxrt_agrees_with_eager_where_it_is_installed() -> None:
    for module in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(module)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    compiled = fusewright.compile(net, backend="onnxrt")
    with torch.no_grad():
        for rows in (2, 5):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), net(x))
    with pytest.raises(fusewright.BackendError, match="no gradients"):
        compiled(torch.randn(2, 4))


class Colour(enum.Enum):
    RED = 1


@fusewright.allow_in_graph
def takes_anything(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    assert list(kwargs) in ([], ["class", "from"])
    return x + len(args) + len(kwargs)


ARGUMENTS: dict[str, Any] = {
    "type": int, "class": Net, "tensor type": torch.HalfTensor, "function": copy.deepcopy, "lambda": lambda y: y, "builtin": len,
    "operator": torch.ops.aten.add.Tensor, "operators": torch.ops.aten.add, "torch's": torch.add, "enum": Colour.RED,
    "finfo": torch.finfo(torch.float32), "generator": torch.Generator(), "range": range(3), "ellipsis": ..., "text": "a'b\"\n",
    "infinity": float("inf"), "complex": 1j, "bytes": b"a", "dtype": torch.float32, "device": torch.device("cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_have_no_text(name: str, graphs: list[tuple[torch.fx.GraphModule, list[Any]]]) -> None:
    one = ARGUMENTS[name]

    def function(x: torch.Tensor) -> torch.Tensor:
        return takes_anything(x, one) * takes_anything(x, **{"class": 1, "from": x})

    x = torch.ones(3)
    assert torch.equal(fusewright.compile(function, backend=collecting(graphs), fullgraph=True)(x), function(x))
    assert len(graphs) == 1


def test_dtypes_by_pythons_types(graphs: list[tuple[torch.fx.GraphModule, list[Any]]]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.to(float), x.to(int), x.type(torch.HalfTensor), x.clone().random_(**{"from": 1, "to": 2})

    x = torch.ones(3)
    found = fusewright.compile(function, backend=collecting(graphs), fullgraph=True)(x)
    torch.testing.assert_close(found, function(x), rtol=0, atol=0)


def test_a_graph_becomes_a_module_more_than_once() -> None:
    def backend(to_compile: Any) -> Callable[..., Any]:
        first, second = to_compile.module(), to_compile.module()
        return lambda *inputs: (first(*inputs), second(*inputs))[1]

    def function(x: torch.Tensor) -> torch.Tensor:
        return takes_anything(x, copy.deepcopy, torch.HalfTensor)

    compiled = fusewright.compile(function, backend=registry.Backend("twice", "torch", backend), fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), function(torch.ones(2)))


@pytest.mark.parametrize("run", [lambda gm: gm.forward, lambda gm: torch.fx.Interpreter(gm).run])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.func.vmap(lambda row: row.sin() * row.shape[0])(x).sum(),
        lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].sum() + x.shape[0],
        lambda x: torch.utils.checkpoint.checkpoint(lambda a: a.tanh().view(-1, 3) * 2, x, use_reentrant=False).sum(),
    ],
)
def test_calls_without_a_form_at_torch_level(function: Any, run: Any) -> None:
    """The backend gets ATen operators, once for all sizes; gradients pass through what it compiled."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        graphs.append(gm)
        assert len(example_inputs) == len(list(gm.graph.find_nodes(op="placeholder")))
        return run(gm)

    compiled = fusewright.compile(function, backend=backend, fullgraph=True)
    for rows in (2, 4, 5, 6):
        x, y = (torch.arange(3.0 * rows).reshape(rows, 3).requires_grad_() for _ in range(2))
        got, expected = compiled(x), function(y)
        torch.testing.assert_close(got, expected)
        got.backward(), expected.backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert len(graphs) == 2
    nodes = [node for gm in graphs for node in gm.graph.nodes]
    assert "call_method" not in {node.op for node in nodes}
    assert any(isinstance(node.target, torch._ops.OpOverload) for node in nodes)


def test_a_call_that_breaks_at_both_levels_leaves_the_graph_at_torch_level(
    graphs: list[tuple[torch.fx.GraphModule, list[Any]]],
) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        return torch.func.vmap(lambda a: a * float(y.sum()))(y) + 1

    compiled = fusewright.compile(f, backend=collecting(graphs))
    torch.testing.assert_close(compiled(torch.ones(3)), f(torch.ones(3)))
    assert graphs and list(graphs[0][0].graph.find_nodes(op="call_method", target="relu"))


@pytest.mark.parametrize("values", [(1.0, 2.0), (float("nan"), 1.0)])
def test_a_check_that_fails_has_the_call_repeated(
    values: tuple[float, ...], graphs: list[tuple[torch.fx.GraphModule, list[Any]]]
) -> None:
    """With inputs and the random generator as they were."""

    def f(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen += 1
        noise = torch.rand(2)
        if torch.isnan(x).any():
            raise ValueError("nan")
        return x + noise

    outcomes = []
    for function in (f, fusewright.compile(f, backend=collecting(graphs), fullgraph=True)):
        torch.manual_seed(0)
        seen, found = torch.zeros(2), None
        try:
            found = function(torch.tensor(values), seen)
        except ValueError as error:
            found = str(error)
        outcomes.append((found, seen, torch.rand(2)))
    torch.testing.assert_close(outcomes[0][1:], outcomes[1][1:])
    assert str(outcomes[0][0]) == str(outcomes[1][0])
    assert len(graphs) == 1


def test_what_the_backend_raises_at_run_time_is_no_check() -> None:
    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        def run(*inputs: Any) -> Any:
            raise RuntimeError("mine")

        return run

    def f(x: torch.Tensor) -> torch.Tensor:
        assert (x > 0).all()
        return x + 1

    with pytest.raises(RuntimeError, match="mine"):
        fusewright.compile(f, backend=backend)(torch.ones(2))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x * n + 1,
        lambda x, n: x.new_zeros(n) + n,
        lambda x, n: torch.nn.functional.pad(x, (n, 0)),
        lambda x, n: (x + 1, n, n * 2 + n // 3),
        lambda x, n: x.repeat(n, 1).sum(0),
        lambda x, n: torch.full((2,), n) + x.sum(),
    ],
)
def test_an_int_that_varies_compiles_twice(function: Any, graphs: list[tuple[torch.fx.GraphModule, list[Any]]]) -> None:
    compiled = fusewright.compile(function, backend=collecting(graphs), fullgraph=True)
    for n in (2, 3, 4, 9, 17, 5):
        torch.testing.assert_close(compiled(torch.arange(8.0), n), function(torch.arange(8.0), n))
    assert len(graphs) == 2


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("backend", ["native", "eager"])
def test_gradients_through_a_size_that_depends_on_data(backend: str, fullgraph: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x[x > 0] ** 2).sum()

    compiled = fusewright.compile(
        f, backend=backend, fullgraph=fullgraph, options={"capture_dynamic_output_shape_ops": True}
    )
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(20).sub_(seed - 1.5).requires_grad_()
        y = x.detach().clone().requires_grad_()
        compiled(x).backward(), f(y).backward()
        torch.testing.assert_close(x.grad, y.grad)
    x = torch.randn(20, requires_grad=True)
    reasons = fusewright.explain(compiled)(x).break_reasons
    expected = [] if backend == "eager" else ["data-dependent-gradient"]
    assert [reason.code for reason in reasons] == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda x, net: net(x).sum(),
        lambda x, net: torch.func.vmap(net)(x).sum(),
        lambda x, net: (x.mul_(2) * net(x).sum()).sum(),
        lambda x, net: torch._check_tensor_all(x < 9) or (net(x) * torch.rand(4)).sum(),
    ],
)
def test_a_backend_that_asks_is_called_as_torch_compile_calls_it(function: Any) -> None:
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        context = torch._guards.TracingContext.try_get()
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                fake = node.meta["val"]
                assert fake is node.meta["example_value"] and fake.fake_mode is context.fake_mode
            if node.op.startswith("call_"):
                assert __file__ in node.stack_trace and "lambda" in node.stack_trace
        assert not any(isinstance(value, torch._subclasses.FakeTensor) for value in example_inputs)
        seen.append(context)
        return gm.forward

    fusewright.register_backend(backend, "asking", tracing_context=True)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    compiled = fusewright.compile(function, backend="asking", fullgraph=True)
    for rows in (2, 3, 5):
        outcomes = []
        for call in (function, compiled):
            torch.manual_seed(rows)
            x = torch.randn(rows, 3)
            net.zero_grad()
            result = call(x, net)
            result.backward()
            outcomes.append((result, x, net[0].weight.grad.clone(), torch.rand(2)))
        torch.testing.assert_close(*outcomes)
    assert len(seen) == 3 and all(seen)
    assert torch._guards.TracingContext.try_get() is None


def test_stacks_and_options_reach_a_plain_backend() -> None:
    traces: list[str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        traces.extend(node.stack_trace for node in gm.graph.nodes if node.op.startswith("call_"))
        return gm.forward

    options = {"capture_scalar_outputs": True}
    compiled = fusewright.compile(lambda n: torch.ones(n.item()) * 2, backend=backend, fullgraph=True, options=options)
    assert compiled(torch.tensor(3)).tolist() == [2.0, 2.0, 2.0] and compiled(torch.tensor(1)).tolist() == [2.0]
    assert traces and all("backend=backend, fullgraph=True, options=options" in trace for trace in traces)


def written(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    x.mul_(2)
    return x.sum()


def written_in_lists(x: torch.Tensor) -> torch.Tensor:
    torch._foreach_add_([x, x], 1.0)
    return x * 2


def without_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ x


def without_gradients(x: torch.Tensor, weight: torch.Tensor = torch.ones(3, 3, requires_grad=True)) -> torch.Tensor:
    with torch.no_grad():
        return x @ weight


def handled(x: torch.Tensor) -> torch.Tensor:
    try:
        return F.embedding(x[0].long() + 9, x)
    except IndexError:
        return x * 2


def normalised(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x * 1, x[0], x[1], training=True)


def shared(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    return x[1:], y, y[0]


BACKENDS = [
    "eager", "aot_eager", "cudagraphs", pytest.param("xla", marks=pytest.mark.skipif(not find_spec("jax"), reason="no jax")),
    fusewright.aot(lambda gm, inputs: gm), lambda gm, inputs: gm,
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function", [written, written_in_lists, without_autocast, without_gradients, handled, normalised, shared]
)
def test_operators_that_a_backend_runs_leave_what_eager_leaves(function: Any, backend: Any) -> None:
    """Values, versions, and whether results have a history and share memory; under autocast, and with an error that the
    program handles."""
    if function is handled and not isinstance(backend, str):
        pytest.skip("what a backend of the user's raises is an error")
    found = []
    for called in (function, fusewright.compile(function, backend=backend)):
        x = torch.arange(9.0).reshape(3, 3).sin()
        with torch.autocast("cpu", torch.bfloat16):
            results = [called(x), called(x)]
        leaves = pytree.tree_leaves(results)
        memory = [one.untyped_storage().data_ptr() for one in (x, *leaves)]
        found.append((leaves, x, x._version, [one.requires_grad for one in leaves], [*map(memory.index, memory)]))
    torch.testing.assert_close(found[1], found[0])
