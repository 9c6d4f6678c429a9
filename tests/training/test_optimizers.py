"""Compiled optimizer steps: parameters, state and losses equal eager's; rates and step counts change without a recompile."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusewright
from fusewright.base.events import STREAM, Broken, Compiled, Skipped, StageDone

O = torch.optim
STEPS = 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Lion(O.Optimizer):
    """An optimizer as users write them: signs, a step count that is a Python int, state made at the first step."""

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        decay: float = 0.01,
        **ignored: Any,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                    state["count"] = 0
                state["count"] += 1
                beta1, beta2 = group["betas"]
                warm = 1 - 0.5 ** state["count"]
                update = state["average"].mul(beta1).add(parameter.grad, alpha=1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(update, alpha=-group["lr"] * warm)
                state["average"].mul_(beta2).add_(parameter.grad, alpha=1 - beta2)
        return loss


@contextmanager
def counted(*kinds: type) -> Iterator[list[Any]]:
    events: list[Any] = []

    def listen(event: object) -> None:
        if isinstance(event, kinds):
            events.append(event)

    with STREAM.listening(listen):
        yield events


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-4, path: str = "") -> None:
    if isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, path
        error = (ours.double() - theirs.double()).norm() / (theirs.double().norm() + 1e-6)
        assert error < tolerance, f"{path}: relative error {error:.2e}"
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key, value in theirs.items():
            assert_same(ours[key], value, tolerance, f"{path}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), path
        for index, value in enumerate(theirs):
            assert_same(ours[index], value, tolerance, f"{path}[{index}]")
    elif isinstance(theirs, float):
        assert type(ours) is float and abs(ours - theirs) <= 1e-12 + 1e-9 * abs(theirs), path
    else:
        assert type(ours) is type(theirs) and ours == theirs, path


def updates(make: Callable[[nn.Module], O.Optimizer], compiled: bool) -> Any:
    """Twenty updates from eager gradients, the rate changing at each; the state goes through a state_dict half-way."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model)
    scheduler = O.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    step = fusewright.compile(optimizer.step) if compiled else optimizer.step
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(5, 8, generator=generator)).square().mean().backward()
        step()
        scheduler.step()
        if number == STEPS // 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [parameter.detach() for parameter in model.parameters()], optimizer.state_dict()


CASES: list[tuple[Any, dict[str, Any]]] = [
    (O.SGD, {"lr": 0.1}),
    (O.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (O.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1}),
    (O.Adam, {"lr": 0.01}),
    (O.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (O.AdamW, {"lr": 0.01, "maximize": True}),
    (O.Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
    (O.RMSprop, {"lr": 0.01}),
    (O.RMSprop, {"lr": 0.001, "centered": True, "momentum": 0.9, "eps": 1e-4}),
    (O.Adadelta, {"lr": 0.1}),
    (O.Adamax, {"lr": 0.01}),
    (O.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.01}),
]


@pytest.mark.parametrize("foreach", [None, pytest.param(True, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("kind", "options"), CASES, ids=lambda value: getattr(value, "__name__", None) or ",".join(value)
)
def test_updates_equal_eager_without_recompiles(kind: Any, options: dict[str, Any], foreach: bool) -> None:
    def make(model: nn.Module) -> O.Optimizer:
        return kind(model.parameters(), foreach=foreach, **options)

    expected = updates(make, compiled=False)
    with counted(Compiled, Broken, Skipped) as events:
        found = updates(make, compiled=True)
    assert_same(found, expected)
    assert not [event for event in events if not isinstance(event, Compiled)]
    # State is made, the rate is seen to change; the loaded state has other dictionaries, whose guards are asked anew.
    assert len(events) <= 3


FUSED: list[tuple[Any, dict[str, Any]]] = [
    (O.SGD, {"lr": 0.1}),
    (O.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (O.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (O.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (O.AdamW, {"lr": 0.01, "maximize": True}),
    (O.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (O.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
]


# Eager's SGD of bfloat16 with momentum reads memory that nothing has been written to.
FUSED_CASES = [
    (*row, dtype)
    for row in FUSED
    for dtype in (torch.float32, torch.bfloat16)
    if dtype == torch.float32 or "momentum" not in row[1]
]


@pytest.mark.parametrize(("kind", "options", "dtype"), FUSED_CASES)
def test_fused_updates_equal_eager(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    def make(model: nn.Module) -> O.Optimizer:
        return kind(model.parameters(), fused=True, **options)

    def run(compiled: bool) -> Any:
        torch.manual_seed(0)
        model = Net().to(dtype)
        optimizer = make(model)
        step = fusewright.compile(optimizer.step) if compiled else optimizer.step
        for number in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.randn(
                    parameter.shape, dtype=dtype, generator=torch.Generator().manual_seed(number)
                )
            step()
            optimizer.param_groups[0]["lr"] *= 0.9
        return [parameter.detach() for parameter in model.parameters()], optimizer.state_dict()

    with counted(Compiled, Broken, Skipped) as events:
        found = run(compiled=True)
    assert_same(found, run(compiled=False), 1e-5 if dtype == torch.float32 else 5e-3)
    if kind is O.SGD and dtype == torch.bfloat16:
        assert {type(event) for event in events} & {
            Broken,
            Skipped,
        }  # eager's own numbers are wrong there, and are what the user gets
    else:
        assert len(events) <= 3 and all(isinstance(event, Compiled) for event in events)


@pytest.mark.parametrize("kind", [O.RAdam, O.ASGD, O.Rprop, pytest.param(O.LBFGS, marks=pytest.mark.sweep)])
def test_steps_that_depend_on_data_equal_eager(kind: Any) -> None:
    """What chooses by the value of a step count or of a gradient may break the graph, and is right."""

    def train(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = kind(model.parameters(), lr=0.01)
        x = torch.randn(5, 8)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        step = fusewright.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(8):
            step(closure)
        return [parameter.detach() for parameter in model.parameters()]

    assert_same(train(True), train(False), 1e-3)


def test_a_users_optimizer_with_a_python_step_count_does_not_recompile_each_step() -> None:
    expected = updates(lambda model: Lion(model.parameters()), compiled=False)
    with counted(Compiled, Broken, Skipped) as events:
        found = updates(lambda model: Lion(model.parameters()), compiled=True)
    assert_same(found, expected)
    assert len(events) <= 5 and all(isinstance(event, Compiled) for event in events)


@pytest.mark.parametrize(
    "factor",
    [
        lambda k, r: 1 - 0.9**k,
        lambda k, r: (1 - 0.9**k) ** 0.5,
        lambda k, r: 1 - math.pow(0.9, k),
        lambda k, r: math.sqrt(1 - math.pow(0.9, k)) / (1 - math.pow(0.99, k)),
        lambda k, r: k**0.25,
        lambda k, r: k**-0.5,
        lambda k, r: math.pow(k, 0.25),
        lambda k, r: k**r * 0.5,
        lambda k, r: math.pow(k, r),
    ],
)
def test_what_users_compute_from_a_python_step_count_does_not_recompile_each_step(factor: Any) -> None:
    """Bias corrections and schedules, as libraries of optimizers write them."""

    def step(x: Tensor, group: dict[str, Any]) -> Tensor:
        group["step"] += 1
        group["scheduled"] = factor(group["step"], group["r"])
        return x * group["scheduled"]

    groups, x = [{"step": 0, "r": 0.0} for _ in range(2)], torch.rand(4)
    with counted(Compiled, Broken, Skipped) as events:
        compiled = fusewright.compile(step)
        for _ in range(8):
            assert_same([compiled(x, groups[0])], [step(x, groups[1])])
            assert groups[0] == pytest.approx(groups[1], rel=1e-15)
    assert len(events) <= 3 and all(isinstance(event, Compiled) for event in events)


@pytest.mark.parametrize("power", [lambda k: k**0.5, lambda k: math.pow(k, 0.5), lambda k: math.pow(k, -1.0)])
def test_powers_of_counts_that_python_refuses_or_makes_complex(power: Any) -> None:
    def step(x: Tensor, k: int) -> Any:
        try:
            return x + 1, power(k)
        except (ValueError, ZeroDivisionError) as error:
            return x + 2, type(error)

    compiled, x = fusewright.compile(step), torch.ones(2)
    for k in (4, 5, 7, -3, -4, 0, 9):
        found, expected = compiled(x, k), step(x, k)
        assert torch.equal(found[0], expected[0]) and type(found[1]) is type(expected[1])
        assert found[1] == expected[1] or abs(found[1] - expected[1]) < 1e-15 * abs(expected[1])


def test_parameter_groups_have_their_own_rates() -> None:
    def make(model: Any) -> O.Optimizer:
        return O.AdamW(
            [
                {"params": model.first.parameters(), "lr": 0.1},
                {"params": [*model.norm.parameters(), *model.last.parameters()]},
            ],
            lr=0.01,
        )

    assert_same(updates(make, compiled=True), updates(make, compiled=False))


@pytest.mark.parametrize("kind", [O.SGD, O.Adam])
def test_the_foreach_form(kind: Any) -> None:
    def make(model: nn.Module) -> O.Optimizer:
        return kind(model.parameters(), lr=0.01, foreach=True)

    assert_same(updates(make, compiled=True), updates(make, compiled=False))


def test_a_tensor_rate() -> None:
    def train(compiled: bool) -> Any:
        torch.manual_seed(0)
        model, rate = Net(), torch.tensor(0.01)
        optimizer = O.Adam(model.parameters(), lr=rate)
        step = fusewright.compile(optimizer.step) if compiled else optimizer.step
        for number in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 8) * number).square().mean().backward()
            step()
            rate.mul_(0.9)
        return [parameter.detach() for parameter in model.parameters()]

    with counted(Compiled) as compiles:
        found = train(True)
    assert_same(found, train(False))
    assert len(compiles) <= 2


def train(kind: str, compiled: bool, steps: int = STEPS) -> Any:
    """A whole training step as one function: forward, loss, backward, update. `kind` names what is in it."""
    torch.manual_seed(0)
    model = Net()
    optimizer: Any = (
        O.AdamW(model.parameters(), lr=1e-2) if "adam" in kind else O.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in kind, init_scale=128.0)
    average = (
        O.swa_utils.AveragedModel(model, multi_avg_fn=O.swa_utils.get_ema_multi_avg_fn(0.9))
        if "average" in kind
        else None
    )
    calls: list[str] = []
    if "hooks" in kind:
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: calls.append("before"))
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: calls.append("after"))
    scheduler = O.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in kind):
            return F.cross_entropy(model(x), y)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none="zeros" not in kind)
        loss = loss_of(x, y)
        scaler.scale(loss).backward()
        if "accumulate" in kind:
            loss_of(x * 2, y).backward()
        if "unscale" in kind:
            scaler.unscale_(optimizer)
        if "norm" in kind:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if "value" in kind:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        if average is not None:
            average.update_parameters(model)
        return loss

    def step_with_closure(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    def step_with_grad(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
        return loss

    chosen = step_with_closure if "closure" in kind else step_with_grad if "autograd.grad" in kind else step
    call = fusewright.compile(chosen) if compiled else chosen
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = call(torch.randn(5, 8, generator=generator), torch.randint(0, 4, (5,), generator=generator))
        assert loss.requires_grad
        losses.append(loss.detach())
        scheduler.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    state = [] if average is None else [dict(average.state_dict())]
    return [
        losses,
        [parameter.detach() for parameter in model.parameters()],
        gradients,
        optimizer.state_dict(),
        scaler.state_dict(),
        calls,
        *state,
    ]


WHOLE = ["sgd", "adam zeros", "adam closure", "sgd norm", "adam value", "sgd accumulate norm", "sgd autograd.grad"]


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_training_step_is_one_graph(kind: str) -> None:
    expected = train(kind, compiled=False)
    with counted(Compiled, Broken, Skipped) as events:
        found = train(kind, compiled=True)
    assert_same(found, expected, 2e-4)
    assert not [event for event in events if not isinstance(event, Compiled)]
    assert len(events) <= 3


@pytest.mark.parametrize("kind", ["sgd scaler", "sgd scaler unscale norm", "sgd average", "sgd hooks"])
def test_a_training_step_with_reads_of_data_equals_eager(kind: str) -> None:
    assert_same(train(kind, compiled=True, steps=8), train(kind, compiled=False, steps=8), 2e-4)


def test_a_training_step_under_autocast_with_a_scaler_equals_eager() -> None:
    found, expected = (
        train("sgd autocast scaler", compiled=True, steps=8),
        train("sgd autocast scaler", compiled=False, steps=8),
    )
    assert_same(found[:2], expected[:2], 2e-2)
    assert_same(found[4], expected[4])


def test_the_update_of_many_parameters_is_few_parallel_regions() -> None:
    def make() -> tuple[list[nn.Parameter], O.Optimizer]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3 + index % 7, 5 + index % 3)) for index in range(60)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        return parameters, O.Adam(parameters, lr=0.01)

    (parameters, optimizer), (wanted, expected) = make(), make()
    step = fusewright.compile(optimizer.step)
    texts: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, StageDone) and event.stage == "call_plan":
            texts.append(event.text())

    with STREAM.listening(listen):
        addresses = [parameter.data_ptr() for parameter in parameters]
        for _ in range(3):
            step()
            expected.step()
    assert [parameter.data_ptr() for parameter in parameters] == addresses, "parameters are written in place"
    assert_same([parameter.detach() for parameter in parameters], [parameter.detach() for parameter in wanted])
    assert len(texts) == 2  # the first step makes the state
    for text in texts:
        lines = text.splitlines()
        kernels, regions = (sum(line.strip().startswith(word) for line in lines) for word in ("kernel ", "parallel "))
        alone = sum(line.startswith("kernel ") for line in lines)
        assert kernels >= 20 and regions + alone <= 3


def test_decay_rates_that_cycle_do_not_recompile_each_step() -> None:
    def train(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = O.Adam(model.parameters(), lr=0.01)
        scheduler = O.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.05, total_steps=12
        )  # moves the rate and the first beta
        step = fusewright.compile(optimizer.step) if compiled else optimizer.step
        for number in range(10):
            optimizer.zero_grad()
            model(torch.ones(2, 8) * number).square().mean().backward()
            step()
            scheduler.step()
        return [parameter.detach() for parameter in model.parameters()]

    with counted(Compiled, Broken, Skipped) as events:
        found = train(True)
    assert_same(found, train(False))
    assert len(events) <= 3 and all(isinstance(event, Compiled) for event in events)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_parameters_of_other_dtypes_and_layouts(dtype: torch.dtype) -> None:
    def train(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        made = [
            torch.randn(4, 5, dtype=dtype),
            torch.randn(5, 4, dtype=dtype).t(),
            torch.randn(2, 3, 4, 4, dtype=dtype),
            torch.zeros(0, 3, dtype=dtype),
        ]
        made[2] = made[2].to(memory_format=torch.channels_last)
        parameters = [nn.Parameter(value) for value in made]
        optimizer = O.AdamW(parameters, lr=0.01)
        step = fusewright.compile(optimizer.step) if compiled else optimizer.step
        for _ in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            step()
        return [parameter.detach() for parameter in parameters]

    for ours, theirs in zip(train(True), train(False), strict=True):
        rounded = 0.01 * torch.finfo(dtype).eps  # a step of that rate, however small a parameter it leaves
        torch.testing.assert_close(
            ours, theirs, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=max(1e-5, rounded)
        )


def test_gradients_that_come_and_go_and_added_groups() -> None:
    def train(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(3)) for _ in range(3)]
        optimizer = O.SGD(parameters, lr=0.1, momentum=0.9)
        step = fusewright.compile(optimizer.step) if compiled else optimizer.step
        for number in range(6):
            for index, parameter in enumerate(parameters):
                parameter.grad = None if (number + index) % 3 == 0 else torch.randn(3)
            if number == 2:
                parameters.append(nn.Parameter(torch.ones(3)))
                parameters[-1].grad = torch.randn(3)
                optimizer.add_param_group({"params": [parameters[-1]], "lr": 0.5})
            step()
        return [parameter.detach() for parameter in parameters]

    assert_same(train(True), train(False))


def test_an_error_inside_a_step_is_eagers() -> None:
    parameter = nn.Parameter(torch.randn(3))
    parameter.grad = torch.randn(3)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        fusewright.compile(O.SGD([parameter], lr=0.1, differentiable=True).step)()


def test_steps_stay_compiled_after_pytorchs_own_compiler_was_used() -> None:
    """torch.compile marks parts of every optimizer class as disabled, in the whole process."""
    program = """
import torch, fusewright
from fusewright.base.events import STREAM, Broken, Skipped
events = []
def make():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
torch.compile(make().step, backend="eager")()
with STREAM.listening(lambda event: events.append(event) if isinstance(event, (Broken, Skipped)) and 'optimizer.py' in event.function else None):
    optimizer, expected = make(), make()
    step = fusewright.compile(optimizer.step)
    for _ in range(3):
        step(); expected.step()
assert torch.allclose(optimizer.param_groups[0]["params"][0], expected.param_groups[0]["params"][0])
assert not events, events
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_fused_updates_are_captured_after_torch_compile_was_used() -> None:
    """PyTorch's own compiler marks them as disabled, for the whole process, when it is first used."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    for kind in (O.AdamW, O.SGD):
        model = Net()
        optimizer = kind(model.parameters(), fused=True)
        model(torch.ones(2, 8)).sum().backward()
        with counted(Compiled, Broken, Skipped) as events:
            fusewright.compile(optimizer.step)()
        assert events and all(isinstance(event, Compiled) for event in events)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_a_fused_update_of_different_dtypes_raises_as_eagers(name: str) -> None:
    """As after `module.double()`: the states are floats still."""
    module = nn.Linear(2, 2)
    optimizer = getattr(torch.optim, name)(module.parameters(), fused=True, **({"momentum": 0.5} if name == "SGD" else {}))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    module.double()
    for run in (optimizer.step, fusewright.compile(optimizer.step)):
        with pytest.raises(RuntimeError):
            run()


def test_clipping_without_gradients_raises_as_eagers() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    for clip in (nn.utils.clip_grad_value_, fusewright.compile(nn.utils.clip_grad_value_)):
        with pytest.raises(RuntimeError, match="empty"):
            clip(parameters, 0.1)
