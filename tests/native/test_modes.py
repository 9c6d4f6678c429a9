"""Tracers, transforms and modes around compiled calls: what compiled code is not made for runs eagerly, and sees eager's operators."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fusewright
from fusewright import _native
from fusewright.capture.guards import torch_state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.a(x)).sin() * 2 + self.b(x)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 1).cos()


def function(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * 2 + x.cos()).relu()


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.log.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.log.append(func.__name__)
        return func(*args, **(kwargs or {}))


torch.manual_seed(0)
X = torch.randn(3, 4)
Function = Callable[[torch.Tensor], torch.Tensor]
PROGRAMS: dict[str, Callable[[Function, nn.Module], Any]] = {}


def program(run: Callable[[Function, nn.Module], Any]) -> Callable[[Function, nn.Module], Any]:
    PROGRAMS[run.__name__] = run
    return run


def leaf() -> torch.Tensor:
    return X.clone().requires_grad_()


def kinds(graph: torch.fx.Graph) -> list[str]:
    return [f"{node.op} {node.target}" for node in graph.nodes]


def under(context: Callable[[], Any]) -> Callable[[Function, nn.Module], Any]:
    """Calls without and with gradients, and the backward, in a context."""

    def run(f: Function, net: nn.Module) -> Any:
        x, y = leaf(), leaf()
        with context():
            with torch.no_grad():
                plain = f(X), net(X)
            results = f(x), net(y)
            sum(result.sum() for result in results).backward()
        return plain, results, x.grad, y.grad

    return run


CONTEXTS: dict[str, Callable[[], Any]] = {
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "hooks on saved tensors forbidden": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "one thread in the backward": lambda: torch.autograd.set_multithreading_enabled(False),
    "anomaly detection": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "a default device": lambda: torch.device("cpu"),
    "profiler": torch.profiler.profile,
    "forked generators": torch.random.fork_rng,
    "no functions of subclasses": torch._C.DisableTorchFunctionSubclass,
    "no torch functions": torch._C.DisableTorchFunction,
    "no dispatch to Python": torch._C._DisableTorchDispatch,
    "kernels in Python": enable_python_dispatcher,
    "tracked views": lambda: torch.autograd.grad_mode._force_original_view_tracking(True),
    "FLOPs": lambda: FlopCounterMode(display=False),
}
PROGRAMS.update((name, under(context)) for name, context in CONTEXTS.items())


@program
def dispatch_mode(f: Function, net: nn.Module) -> Any:
    with Dispatched() as mode:
        results = f(X), net(X), f(leaf())
    return results, mode.log


@program
def function_mode(f: Function, net: nn.Module) -> Any:
    with torch.device("cpu"), Called() as mode:
        results = f(X), net(X), f(leaf())
    return results, mode.log


@program
def function_mode_below_a_device(f: Function, net: nn.Module) -> Any:
    with Called() as mode, torch.device("cpu"):
        results = f(X), net(X), f(leaf())
    return results, mode.log


@program
def dispatch_mode_that_calls(f: Function, net: nn.Module) -> Any:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return f(result) if func is torch.ops.aten.neg.default else result

    with Mode():
        return X.neg()


@program
def below_autograd(f: Function, net: nn.Module) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        result = f(leaf())
    return result, result.grad_fn


@program
def flops(f: Function, net: nn.Module) -> Any:
    with FlopCounterMode(display=False) as counter:
        result = net(X)
    return result, counter.get_total_flops()


@program
def functional_tensors(f: Function, net: nn.Module) -> Any:
    with FunctionalTensorMode():
        return torch._from_functional_tensor(f(FunctionalTensor.to_functional(X)).elem)


@program
def functionalized(f: Function, net: nn.Module) -> Any:
    return torch.func.functionalize(lambda x: f(x).add_(1))(X)


@program
def fake_tensors(f: Function, net: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inside, of_module, made = f(torch.empty(3, 4)), net(X), mode.from_tensor(X)
    results = inside, of_module, f(made)
    return [(type(result), result.shape, result.dtype, result.device) for result in results]


@program
def on_meta(f: Function, net: nn.Module) -> Any:
    with torch.device("meta"):
        made = f(torch.ones(3, 4))
        return f(X), made.device, made.shape


@program
def inference_mode(f: Function, net: nn.Module) -> Any:
    with torch.inference_mode():
        results = f(X), net(X)
        return results, [result.is_inference() for result in results]


@program
def vmap(f: Function, net: nn.Module) -> Any:
    rows = torch.ones(4)
    return torch.vmap(f)(X), torch.vmap(net)(X), torch.vmap(lambda row: row + f(rows))(X)


@program
def gradients(f: Function, net: nn.Module) -> Any:
    parts = torch.func.vjp(f, X)
    return (
        torch.func.grad(lambda x: net(f(x)).sum())(X),
        parts[0],
        parts[1](X),
        torch.func.jvp(net, (X,), (X,)),
        torch.func.hessian(f)(X[0]),
    )


@program
def functional_call(f: Function, net: nn.Module) -> Any:
    parameters = {name: parameter.detach() * 2 for name, parameter in net.named_parameters()}
    return (
        torch.func.functional_call(net, parameters, (X,)),
        torch.func.jacrev(lambda values: torch.func.functional_call(net, values, (X,)))(parameters),
        net(X),
    )


@program
def dual_numbers(f: Function, net: nn.Module) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        return tuple(forward_ad.unpack_dual(f(dual))), tuple(forward_ad.unpack_dual(net(dual))), f(X)


@program
def jacobians(f: Function, net: nn.Module) -> Any:
    functional = torch.autograd.functional
    return (
        functional.jacobian(f, X),
        functional.jacobian(f, X, vectorize=True),
        functional.jacobian(f, X, vectorize=True, strategy="forward-mode"),
        functional.hessian(lambda x: f(x).sum(), X),
        functional.vhp(lambda x: net(x).sum(), X, X),
    )


@program
def batched_backward(f: Function, net: nn.Module) -> Any:
    x = leaf()
    return torch.autograd.grad(f(x), x, torch.eye(12).reshape(12, 3, 4), is_grads_batched=True)


@program
def gradcheck(f: Function, net: nn.Module) -> Any:
    x = X.double().requires_grad_()
    return torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=True), torch.autograd.gradgradcheck(
        f, x
    )


@program
def checkpoints(f: Function, net: nn.Module) -> Any:
    def selective() -> Any:
        return create_selective_checkpoint_contexts(
            lambda context, op, *args, **kwargs: (
                CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
            )
        )

    results = []
    for arguments in (
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": False, "context_fn": selective},
    ):
        x = leaf()
        result = checkpoint(net, x, **arguments)
        result.sum().backward()
        results += [result, x.grad]
    return results


@program
def nan_in_the_backward(f: Function, net: nn.Module) -> Any:
    def masked(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x.sqrt() * x, x)

    compiled = masked if f is function else fusewright.compile(masked)
    compiled(torch.ones(3, requires_grad=True))
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError) as error:
        compiled(torch.zeros(3, requires_grad=True)).sum().backward()
    return str(error.value)


@program
def deterministic(f: Function, net: nn.Module) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return f(X), net(X)
    finally:
        torch.use_deterministic_algorithms(False)


@program
def python_is_watched(f: Function, net: nn.Module) -> Any:
    results = []
    for setter in (sys.settrace, sys.setprofile):
        setter(lambda *event: None)
        try:
            results.append((f(X), net(X)))
        finally:
            setter(None)
    return results


@program
def symbolic_trace(f: Function, net: nn.Module) -> Any:
    graphs = [torch.fx.symbolic_trace(root) for root in (f, net, Outer(net))]
    return [(graph(X), kinds(graph.graph)) for graph in graphs]


@program
def symbolic_trace_of_a_decorated_method(f: Function, net: nn.Module) -> Any:
    forward = Net.forward if f is function else fusewright.compile(Net.forward)
    made = type("Made", (Net,), {"forward": forward})()
    made.load_state_dict(net.state_dict())
    graph = torch.fx.symbolic_trace(made)
    return graph(X), kinds(graph.graph)


def in_place(f: Function, net: nn.Module) -> nn.Module:
    """A copy that is compiled in place where `net` is compiled, and has been called."""
    made = copy.deepcopy(net)
    if f is not function:
        made = fusewright.api._original(made)
        fusewright.compile_(made)
    made(X)
    return made


@program
def compiled_in_place(f: Function, net: nn.Module) -> Any:
    inside = in_place(f, net)
    graphs = [torch.fx.symbolic_trace(root) for root in (inside, Outer(inside))]
    return [(graph(X), kinds(graph.graph)) for graph in graphs], inside(X)


@program
def proxies(f: Function, net: nn.Module) -> Any:
    class Twice(torch.fx.Transformer):
        def call_function(self, target, args, kwargs):
            return f(super().call_function(target, args, kwargs))

    made = Twice(torch.fx.symbolic_trace(lambda x: torch.add(x, 1))).transform()
    return made(X), kinds(made.graph)


@program
def exported(f: Function, net: nn.Module) -> Any:
    results = []
    for root in (net, Outer(net)):
        made = torch.export.export(root, (X,), strict=False)
        results.append((made.module()(X), kinds(made.graph)))
    return results


@program
def torch_compiled(f: Function, net: nn.Module) -> Any:
    return [torch.compile(root, backend="eager")(X) for root in (f, net, Outer(net))]


@program
def scripted(f: Function, net: nn.Module) -> Any:
    return torch.jit.script(Outer(net))(X)


def of_make_fx(mode: str) -> Callable[[Function, nn.Module], Any]:
    def run(f: Function, net: nn.Module) -> Any:
        parameters = dict(net.named_parameters())
        of_function = make_fx(f, tracing_mode=mode)(X)
        of_module = make_fx(lambda values, x: torch.func.functional_call(net, values, (x,)), tracing_mode=mode)(
            parameters, X
        )
        return of_function(X), kinds(of_function.graph), of_module(parameters, X), kinds(of_module.graph)

    return run


PROGRAMS.update((f"make_fx, {mode}", of_make_fx(mode)) for mode in ("real", "fake", "symbolic"))


def traced(f: Function, net: nn.Module) -> Any:
    roots = [net, Outer(net), in_place(f, net), Outer(in_place(f, net))]
    made = [torch.jit.trace(root, (X,)) for root in roots]
    return [(one(X + 1), one.code) for one in made], torch.jit.trace(f, (X,))(X + 1), [root(X) for root in roots]


def to_onnx(f: Function, net: nn.Module) -> Any:
    pytest.importorskip("onnx")
    sizes = []
    for root in (net, Outer(net)):
        file = io.BytesIO()
        torch.onnx.export(root, (X,), file, dynamo=False)
        sizes.append(len(file.getvalue()))
    return sizes


def equal(one: Any, other: Any) -> None:
    mine, same = pytree.tree_flatten(one)
    theirs, structure = pytree.tree_flatten(other)
    assert same == structure
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, torch.Tensor):
            bounds = {"rtol": 2e-2, "atol": 2e-2} if a.dtype == torch.bfloat16 or b.dtype == torch.bfloat16 else {}
            torch.testing.assert_close(a, b, **bounds)
            assert type(a) is type(b)
        else:
            assert a == b


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A function and a module, compiled, that have been called before with and without gradients."""
    net = Net()
    compiled = fusewright.compile(function), fusewright.compile(net)
    for one in compiled:
        one(X)
        one(leaf())
        with torch.no_grad():
            one(X)
    return (function, net), compiled


def compare(run: Callable[[Function, nn.Module], Any], eager: Any, compiled: Any) -> None:
    wanted = run(*eager)
    for _ in range(2):
        equal(run(*compiled), wanted)
    fresh = fusewright.compile(function), fusewright.compile(eager[1])
    equal(run(*fresh), wanted)
    for one, other in zip((*compiled, *fresh), (*eager, *eager), strict=True):
        equal(one(X), other(X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name: str, pair: tuple[Any, Any]) -> None:
    compare(PROGRAMS[name], *pair)


@pytest.mark.parametrize("name", ["traced", "to_onnx"])
def test_torchscript_tracers(name: str) -> None:
    """In a process of their own: they follow tensors by their addresses, and crash where operators are kept from them."""
    text = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from tests.native import test_modes as m\n"
        f"m.compare(m.{name}, *m.pair.__wrapped__())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0 or "Skipped" in done.stderr, done.stderr[-2000:]


def test_the_compiler_is_imported_out_of_sight_of_modes() -> None:
    """What a program has on while it calls compile() for the first time sees nothing of the compiler's import."""
    text = (
        "import sys, fusewright; from tests.native import test_modes as m\n"
        "assert 'fusewright.compiler' not in sys.modules\n"
        "with m.Dispatched() as dispatched, m.Called() as called:\n"
        "    fusewright.compile(m.function)\n"
        "assert dispatched.log == called.log == [], (dispatched.log, called.log)\n"
    )
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_known_states() -> None:
    """What is known natively is what Python says, in every state; and only settings that guards tell apart are."""
    known = [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.device("meta"),
        torch.random.fork_rng,
    ]
    unknown = [
        Dispatched,
        Called,
        torch.autograd.detect_anomaly,
        enable_python_dispatcher,
        torch._C._DisableTorchDispatch,
    ]
    assert torch_state.MODES.native
    for outer in (torch.no_grad, *known):
        with outer():
            for context in (*known, *unknown):
                with context():
                    assert _native.modes_known() == torch_state.MODES.known() == (context in known), context
            assert _native.modes_known()
    with forward_ad.dual_level():
        assert not _native.modes_known()
    seen = []
    torch.vmap(lambda row: seen.append(_native.modes_known()) or row)(X)
    torch.fx.symbolic_trace(lambda x: seen.append(_native.modes_known()) or x)
    torch.jit.trace(lambda x: seen.append(_native.modes_known()) or x + 1, X, check_trace=False)
    assert seen == [False] * 3 and _native.modes_known()


def test_what_pytorchs_engine_calls_may_be_compiled() -> None:
    """A checkpoint computes again in a backward, where PyTorch's engine has dispatch keys of its own switched off: what
    ran compiled in the forward must there, too, or it saves other tensors."""
    known: dict[str, bool] = {}

    def look(place: str, value: object = None) -> object:
        known[place] = _native.modes_known() and torch_state.MODES.known()
        return value

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return look("forward", x * 1)

        @staticmethod
        def backward(ctx, gradient):
            return look("backward", gradient * 1)

    x = torch.ones(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: look("accumulated"))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: look("packed", one), lambda one: look("unpacked", one)):
        y = Looks.apply(x) * x
    y.register_hook(lambda _: look("hook of a tensor"))
    y.grad_fn.register_hook(lambda *_: look("hook of a node"))
    y.sum().backward()
    for reentrant in (True, False):
        checkpoint(lambda one: look(f"recomputed, {reentrant=}", one.sin()), x, use_reentrant=reentrant).sum().backward()
    assert len(known) == 9 and all(known.values()), known


def test_a_checkpoint_around_a_compiled_layer() -> None:
    ours, theirs = (torch.manual_seed(0) and Net() for _ in "12")
    compiled = fusewright.compile(ours)
    for _ in range(3):
        for call in (compiled, theirs):
            checkpoint(call, X.clone().requires_grad_(), use_reentrant=False).square().sum().backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
