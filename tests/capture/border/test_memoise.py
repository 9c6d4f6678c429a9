"""Layers that repeat are replayed, and nothing else is: each way in which a layer may differ from the first, or change afterwards."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright import compiler as driver
from fusewright.capture.border.memoise import Repeats
from fusewright.capture.frame import CapturedFrame

LAYERS = 6
Change = Callable[["Stack"], object]


class Block(nn.Module):
    """A layer; subclasses and attributes make it differ."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.dropout = nn.Dropout(0.0)
        self.index = index
        self.names = ["a", "b"]
        self.factors = (1.0, 2.0)
        self.table = {"gain": torch.full((8,), 1.5)}
        self.config = CONFIG

    def forward(self, x: torch.Tensor) -> Any:
        gain = self.table["gain"] * self.factors[1]
        return x + self.dropout(self.inner(self.norm(x))) * gain * self.config.scale


class Config:
    scale = 0.5


CONFIG = Config()


class Stack(nn.Module):
    def __init__(self, kind: type[Block] = Block, count: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind(index) for index in range(count)])
        self.layer: Any = list(self.layers)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[CapturedFrame]:
    """The frames that are captured."""
    found: list[CapturedFrame] = []
    capture = driver.capture_frame

    def noting(*args: Any) -> CapturedFrame:
        found.append(capture(*args))
        return found[-1]

    monkeypatch.setattr(driver, "capture_frame", noting)
    return found


def outcome(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What a call gives, and the gradients of the parameters and of `x` where there are any."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    result = net(x)
    found = [
        part for part in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(part, torch.Tensor)
    ]
    loss = sum(part.float().sin().sum() for part in found)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        parameters = [one for one in net.parameters() if one.requires_grad]
        gradients = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
        found += [torch.zeros(()) if one is None else one for one in gradients]
    return [one.detach().clone() for one in found]


def check(net: nn.Module, compiled: nn.Module, x: torch.Tensor | None = None) -> None:
    x = torch.linspace(-1, 1, 24).view(3, 8) if x is None else x
    wanted, got = outcome(net, x), outcome(compiled, x)
    assert len(wanted) == len(got)
    for one, other in zip(wanted, got):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["native", "eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_equal_layers_are_replayed(frames: list[CapturedFrame], grad: bool, backend: str, dynamic: bool | None) -> None:
    net = Stack()
    compiled = fusewright.compile(net, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        check(net, compiled)
        assert frames[0].repeats >= LAYERS - 2  # the first has the input of the model
        check(net, compiled, torch.randn(3, 8))
    assert len(frames) == 1


class Rearranging(Block):
    """Its functions take slices, tuples and keywords, give several results, and one gives its argument back."""

    def forward(self, x: torch.Tensor) -> Any:
        first, second = torch.split(x, (3, 5), dim=1)
        y = torch.cat((first[:, 1:], x[..., None].squeeze(-1), second), dim=1)[:, 1:-1]
        largest = y.topk(3, dim=1, sorted=True)
        y = super().forward(y[:, :8]) + largest.values.sum(1, keepdim=True) * (largest.indices > 2).any()
        return (nn.functional.dropout(y, 0.5, training=False) + y).view(-1, 8)


class Writing(Rearranging):
    """It writes to a part of what it has made."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        z = y.clone()
        z[:, 1].mul_(2.0)
        return z + y


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["native", "eager"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("kind", [Block, Rearranging, Writing])
def test_the_graph_is_what_interpreting_gives(
    kind: type[Block],
    dynamic: bool | None,
    backend: str,
    grad: bool,
    frames: list[CapturedFrame],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Operators, types, lines, inputs and guards."""

    def interpreted(
        self: Repeats, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        return self.world.tracer.call(forward, args, kwargs)

    net, seen = Stack(kind), []
    options = {"disk_cache": False} if backend == "native" else None
    x = torch.randn(3, 8)
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            compiled = fusewright.compile(net, fullgraph=True, backend=backend, dynamic=dynamic, options=options)
            torch.testing.assert_close(compiled(x), net(x))
        frame = frames[-1]
        assert frame.graph is not None
        order = {
            source.text(): place for place, source in enumerate(sorted(frame.inputs, key=lambda source: source.text()))
        }
        inputs = (node for node in frame.graph.nodes if node.op == "placeholder")
        names: dict[Any, str] = {node: f"input {order[source.text()]}" for node, source in zip(inputs, frame.inputs)}
        rows = []
        for node in frame.graph.nodes:
            if node.op.startswith("call_"):
                names[node] = f"value {len(names)}"
                arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda one: names.get(one, one.name))
                rows.append(
                    (names[node], str(node.target), str(arguments), node.meta.get("type"), node.meta.get("location"))
                )
        guards = sorted(
            (guard.kind, guard.source.text(), str(guard.value)) for guard in frame.guards if guard.kind != "DIFFERENT"
        )
        seen.append((rows, guards, [guard.kind for guard in frame.guards].count("DIFFERENT")))
        monkeypatch.setattr(Repeats, "call", interpreted)
    assert frames[0].repeats >= LAYERS - 2 and not frames[1].repeats
    assert seen[0] == seen[1]


# --- layers that differ from the start ------------------------------------------------------------------------------------


def wrapped(layer: Block, factor: float) -> None:
    original = type(layer).forward
    layer.forward = types.MethodType(lambda self, x: original(self, x) * factor, layer)  # type: ignore[method-assign]


def narrow(layer: Block) -> None:
    layer.inner = nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 8))


def share_weight(net: Stack) -> None:
    net.layer[3].inner[0].weight = net.layer[0].inner[0].weight


def set_up(index: int, **attributes: Any) -> Change:
    def change(net: Stack) -> None:
        for name, value in attributes.items():
            setattr(net.layer[index], name, value)

    return change


def other_config() -> Config:
    made = Config()
    made.scale = 3.0
    return made


# Each is applied before the first call in one test, and after it in another.
CHANGES: dict[str, Change] = {
    "a number": set_up(3, factors=(1.0, 5.0)),
    "the last layer's number": set_up(LAYERS - 1, factors=(1.0, 5.0)),
    "another object": set_up(4, config=other_config()),
    "the shared object": lambda net: setattr(net.layer[0], "config", other_config()),
    "an attribute of a submodule": lambda net: setattr(net.layer[3].norm, "eps", 0.1),
    "a dropout": lambda net: setattr(net.layer[2].dropout, "p", 1.0),
    "a layer in eval mode": lambda net: net.layer[3].eval(),
    "a forward hook": lambda net: net.layer[3].register_forward_hook(lambda module, args, result: result * 2),
    "a forward hook of a submodule": lambda net: net.layer[3].inner[1].register_forward_hook(lambda m, args, result: result + 1),
    "a pre-hook": lambda net: net.layer[5].register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
    "a patched forward": lambda net: wrapped(net.layer[3], 2.0),
    "another activation": lambda net: net.layer[3].inner.__setitem__(1, nn.ReLU()),
    "one part more": lambda net: net.layer[3].inner.append(nn.Tanh()),
    "another width": lambda net: narrow(net.layer[3]),
    "another dtype": lambda net: net.layer[3].double(),
    "a frozen weight": lambda net: net.layer[3].inner[0].weight.requires_grad_(False),
    "no bias": lambda net: setattr(net.layer[3].inner[0], "bias", None),
    "a tied weight": share_weight,
    "a layer twice": lambda net: net.layers.__setitem__(3, net.layer[0]),
    "a shared part": lambda net: setattr(net.layer[3], "inner", net.layer[1].inner),
    "another class": lambda net: setattr(net.layer[3], "__class__", Doubling),
    "a tensor of another shape": lambda net: net.layer[3].table.update(gain=torch.tensor(4.0)),
    "an entry more": lambda net: net.layer[3].table.update(more=torch.tensor(4.0)),
    "an instance attribute over the class's": lambda net: setattr(net.layer[3], "_call_impl", lambda x: x * 7),
    "a strided weight": lambda net: setattr(net.layer[3].inner[0], "weight", nn.Parameter(torch.randn(8, 16).t())),
}  # fmt: skip


class Doubling(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * 2


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CHANGES)
def test_layers_that_differ(name: str, backend: str, grad: bool) -> None:
    class Casting(Block):  # a layer in double precision gets its input as its own
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x.to(self.norm.weight.dtype)).to(x.dtype)

    net = Stack(Casting if name == "another dtype" else Block)
    compiled = fusewright.compile(net, backend=backend)
    CHANGES[name](net)
    with torch.set_grad_enabled(grad):
        check(net, compiled)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CHANGES)
def test_layers_that_change(name: str, backend: str, grad: bool, frames: list[CapturedFrame]) -> None:
    class Casting(Block):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x.to(self.norm.weight.dtype)).to(x.dtype)

    net = Stack(Casting if name == "another dtype" else Block)
    compiled = fusewright.compile(net, backend=backend)
    with torch.set_grad_enabled(grad):
        check(net, compiled)
        assert frames[0].repeats >= LAYERS - 2
        CHANGES[name](net)
        check(net, compiled)


# --- layers that see or do more than replaying allows ---------------------------------------------------------------------

COUNTS = {"calls": 0}
SPECIAL: list[nn.Module] = []
BY_MODULE: dict[nn.Module, float] = {}
SEEN: list[int] = []


class ByIndex(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (2.0 if self.index == 3 else 1.0)


class Counting(Block):
    def forward(self, x: torch.Tensor) -> Any:
        COUNTS["calls"] += 1
        return super().forward(x) * COUNTS["calls"]


class ReadsCount(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * COUNTS["calls"]


class CountsItself(Block):
    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(x) * self.calls


class CountsInClass(Block):
    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        type(self).calls = type(self).calls % 3 + 1
        return super().forward(x) * type(self).calls


class IsSpecial(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (3.0 if self is SPECIAL[-1] else 1.0)


class InSpecial(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (3.0 if self in SPECIAL else 1.0)


class Keyed(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * BY_MODULE[self]


class ReadsSibling(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * SPECIAL[(self.index + 1) % LAYERS].factors[1]  # type: ignore[operator]


class Remembers(Block):
    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        self.last = x
        return x


class WritesBuffer(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.total += x.sum(0)
        return super().forward(x) + self.total.clone()


class Normalising(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]


class WritesInput(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y.mul_(1.5).add_(x)


class ReturnsView(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).t().t()


class WithoutGradient(Block):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            shift = super().forward(x)
        return super().forward(x) + shift


class LowerPrecision(Block):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = super().forward(x)
        return y.float()


class Prints(Block):
    def forward(self, x: torch.Tensor) -> Any:
        SEEN.append(self.index)
        return super().forward(x)


class Catches(Block):
    def forward(self, x: torch.Tensor) -> Any:
        try:
            return super().forward(x) * self.absent  # type: ignore[operator]
        except AttributeError as error:
            return super().forward(x) * len(error.args)


class Raises(Block):
    def forward(self, x: torch.Tensor) -> Any:
        if self.index == 4:
            raise ValueError("layer 4")
        return super().forward(x)


class Nested(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.below = nn.ModuleList([Nested(index - 1)] if index else [])

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.below:
            x = layer(x)
        return super().forward(x)


class Closure(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.function = lambda x: x * (index + 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(super().forward(x))


class Parameters(Block):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.scales = nn.ParameterList([torch.rand(8) for _ in range(2)])
        self.plain = [torch.rand(8), torch.rand(8)]
        self.named = nn.ParameterDict({"a": torch.rand(8)})

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.scales[0] + self.scales[1] + self.plain[1] * self.named["a"]


class Constants(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * torch.tensor([1.0, 2.0] * 4) + torch.arange(8) * self.index


class Breaks(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        if self.index == 2:
            fusewright.graph_break()
        return y * 2


class Branches(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y - 1


KINDS = [
    ByIndex, Counting, ReadsCount, CountsItself, CountsInClass, IsSpecial, InSpecial, Keyed, ReadsSibling, Remembers, WritesBuffer,
    Normalising, WritesInput, ReturnsView, WithoutGradient, LowerPrecision, Prints, Catches, Raises, Nested, Closure, Parameters, Constants,
    Breaks, Branches,
]  # fmt: skip
REPLAYED = {ReadsCount: 5, Parameters: 5, Catches: 5, ReturnsView: 5, WithoutGradient: 5, LowerPrecision: 5}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_layers_see_and_do(kind: type[Block], backend: str, grad: bool, frames: list[CapturedFrame]) -> None:
    traces: list[Any] = []
    for engine in ("eager", "compiled"):
        net = Stack(kind)
        COUNTS["calls"], CountsInClass.calls = 0, 0
        SPECIAL[:], SEEN[:] = net.layer[3:5] if kind is not ReadsSibling else net.layer, []
        net.layer[2].factors = (1.0, 1.0) if kind is ReadsSibling else net.layer[2].factors
        BY_MODULE.clear()
        BY_MODULE.update((layer, float(index)) for index, layer in enumerate(net.layer))
        run: Any = fusewright.compile(net, backend=backend) if engine == "compiled" else net
        trace: list[Any] = []
        with torch.set_grad_enabled(grad):
            for call in range(3):
                try:
                    trace.append(outcome(run, torch.linspace(-1, 1, 24).view(3, 8) + call))
                except ValueError as error:
                    trace.append(str(error))
                COUNTS["calls"] += kind is ReadsCount
                trace += [
                    dict(COUNTS),
                    CountsInClass.calls,
                    list(SEEN),
                    [layer.__dict__.get("calls") for layer in net.layer],
                ]
                trace.append([buffer.clone() for buffer in net.buffers()])
                trace.append([layer.last.detach().clone() for layer in net.layer if hasattr(layer, "last")])
                if call == 1 and kind in (IsSpecial, InSpecial):
                    SPECIAL[:] = net.layer[1:2]
        traces.append(trace)
    for one, other in zip(*traces, strict=True):
        if isinstance(one, list) and one and isinstance(one[0], torch.Tensor):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
        else:
            assert one == other
    if kind in REPLAYED:
        assert (
            frames[0].repeats
            >= REPLAYED[kind] - (kind is LowerPrecision and grad) * 5 - (kind is WithoutGradient and grad) * 5
        )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_arguments_that_differ(backend: str, frames: list[CapturedFrame]) -> None:
    """Numbers, masks, kinds of tensors and containers given to layers of one class."""

    class Taking(Block):
        def forward(
            self, x: torch.Tensor, scale: Any = None, mask: Any = None, out: Any = None, other: Any = None
        ) -> Any:
            y = super().forward(x)
            y = y if scale is None else y * scale
            y = y if mask is None else y + mask.float().sum(0)
            if other is not None:
                y = y * (2 if other is self else 3)
            if out is not None:
                out.append(y)
            return (y, out) if self.index == 9 else y

    class Giving(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            first, second, *rest = self.layer
            outs: list[torch.Tensor] = []
            y = first(x, scale=0.0)
            y = second(y, scale=-0.0) + second(y, 1) + second(y, 1.0) + second(y, True)
            y = rest[0](y, mask=x > 0) + rest[1](y, mask=x) + rest[1](y, mask=y)
            y = rest[2](y, out=outs) + rest[3](y, out=outs)
            y = y + first(y, other=first) + second(y, other=first) + first(y, other=second)
            return y, y / first(x * 0, scale=-0.0), *outs

    net = Giving(Taking)
    with torch.no_grad():
        check(net, fusewright.compile(net, backend=backend, fullgraph=True))
    assert frames[0].repeats


@pytest.mark.parametrize("index", range(LAYERS))
def test_stores_of_the_model_are_seen(index: int) -> None:
    """The model gives one layer another attribute, in the compiled code itself."""

    class Storing(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            self.layer[index].factors = (1.0, 7.0)
            x = super().forward(x)
            self.layer[index].factors = (1.0, 2.0)
            return super().forward(x)

    net = Storing()
    with torch.no_grad():
        check(net, fusewright.compile(net, backend="eager"))


def test_numbers_that_change_in_one_layer() -> None:
    """A number that keeps changing becomes an input, also in a layer that was replayed."""
    net = Stack()
    compiled = fusewright.compile(net)
    with torch.no_grad():
        for step in range(12):
            net.layer[4].factors = (1.0, 2.0 + step)
            check(net, compiled)


class Counting(nn.Module):
    """What it gives depends on how often it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return (x.sin() + 1).exp() * self.count


class Holding(nn.Module):
    """Calls what it holds, in containers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = nn.Sequential(nn.Identity(), nn.ReLU())
        self.named = nn.ModuleDict({"a": nn.Identity()})
        self.plain: list[Any] = []
        self.elements: set[Any] = set()
        self.ordered: OrderedDict[str, Any] = OrderedDict()
        self.lists: defaultdict[str, list[Any]] = defaultdict(list)
        self.value: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sequence(x)
        for inner in (*self.named.values(), *self.plain, *self.elements, *self.ordered.values(), *self.lists["a"]):
            x = inner(x)
        if isinstance(self.value, slice):
            x = self.value.start(x)
        return self.value.fget(x) if isinstance(self.value, property) else x


def join(net: Holding, inner: nn.Module) -> None:
    net.plain += [inner]


HOLD: dict[str, Callable[[Holding, nn.Module], object]] = {
    "an item of a sequence": lambda net, inner: net.sequence.__setitem__(0, inner),
    "a module that is appended": lambda net, inner: net.sequence.append(inner),
    "a module that is inserted": lambda net, inner: net.sequence.insert(0, inner),
    "an item of a module dict": lambda net, inner: net.named.update({"a": inner}),
    "an attribute": lambda net, inner: setattr(net, "sequence", inner),
    "an attribute of what was read in whole": lambda net, inner: (list(vars(net)), setattr(net, "sequence", inner)),
    "an entry of a namespace": lambda net, inner: net._modules.update(sequence=inner),
    "a list": lambda net, inner: net.plain.append(inner),
    "a list that is added to": join,
    "a set": lambda net, inner: net.elements.add(inner),
    "an ordered dict": lambda net, inner: net.ordered.update(a=inner),
    "a list in a default dict": lambda net, inner: net.lists["a"].append(inner),
    "a slice": lambda net, inner: setattr(net, "value", slice(inner, None)),
    "a property": lambda net, inner: setattr(net, "value", property(lambda x: inner(x))),
}


@pytest.mark.parametrize("how", HOLD)
def test_what_the_program_has_made_may_change_with_each_call(how: str) -> None:
    def program(net: Holding, x: torch.Tensor) -> list[torch.Tensor]:
        HOLD[how](net, Counting())
        return [net(x), net(x), net(x)]

    found = []
    for run in (program, fusewright.compile(program, backend="eager")):
        net = Holding()
        with torch.no_grad():
            found.append([one.tolist() for one in run(net, torch.ones(2))])
    assert found[1] == found[0]
    assert found[0][0] != found[0][1]
