"""Calls of compiled modules: `forward` at once while there is nothing else, and everything else as soon as there is."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import fusewright
from fusewright import _native
from fusewright.base.events import STREAM, Captured

T = TypeVar("T")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *more: Any, scale: float = 1.0, **named: Any) -> torch.Tensor:
        for value in (*more, *named.values()):
            x = x + value
        return self.linear(x) * scale


class Calling(Net):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 5


class Watched(Net):
    def __getattribute__(self, name: str) -> Any:
        if name == "forward":
            return lambda x: x * 9
        return super().__getattribute__(name)


class Meta(type):
    pass


class WithMeta(Net, metaclass=Meta):
    pass


X = torch.linspace(-1, 1, 8).view(2, 4)


def same(net: nn.Module, compiled: nn.Module, *args: Any, **kwargs: Any) -> None:
    torch.testing.assert_close(compiled(*args, **kwargs), net(*args, **kwargs))


def replaced(self: Net, x: torch.Tensor, *more: Any) -> torch.Tensor:
    return x * 3


def global_hook(register: Callable[..., Any]) -> Callable[[Net], Any]:
    return lambda net: register(lambda module, args, *rest: (args[0] * 2,) if not rest else rest[-1] * 2)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "forward hook": lambda net: net.register_forward_hook(lambda module, args, result: result * 2),
    "forward pre-hook": lambda net: net.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "hook with keywords": lambda net: net.register_forward_hook(lambda module, args, kwargs, result: result + 1, with_kwargs=True),
    "backward hook": lambda net: net.register_full_backward_hook(lambda module, given, taken: (given[0] * 2,)),
    "backward pre-hook": lambda net: net.register_full_backward_pre_hook(lambda module, taken: (taken[0] * 2,)),
    "global forward hook": global_hook(torch_module.register_module_forward_hook),
    "global forward pre-hook": global_hook(torch_module.register_module_forward_pre_hook),
    "forward of the instance": lambda net: setattr(net, "forward", types.MethodType(replaced, net)),
    "plain function as forward": lambda net: setattr(net, "forward", lambda x: x * 4),
    "another class": lambda net: setattr(net, "__class__", Calling),
    "no hooks table": lambda net: net.__dict__.__setitem__("_forward_hooks", None),
    "not initialised": lambda net: net.__dict__.clear(),
}  # fmt: skip


@pytest.mark.parametrize("kind", [Net, Calling, Watched, WithMeta])
def test_kinds_of_modules(kind: type[Net]) -> None:
    net = kind()
    compiled = fusewright.compile(net, backend="eager")
    for _ in range(3):
        same(net, compiled, X)


class Noted(abc.ABCMeta):
    made: list[str] = []

    def __new__(cls, name: str, *args: Any, **settings: Any) -> Any:
        cls.made.append(name)
        return super().__new__(cls, name, *args, **settings)

    def __init__(cls, *args: Any, **settings: Any) -> None:
        cls.made.append(f"{cls.__name__} again")


class Registered(Net, metaclass=Noted):
    table: dict[str, type] = {}
    scale = 1.0

    def __init_subclass__(cls, scale: float) -> None:
        cls.table[cls.__name__], cls.scale = cls, scale


class Fast(Registered, Generic[T], scale=2.0):
    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize("how", [lambda net: fusewright.compile(net, backend="eager"), fusewright.disable])
def test_a_class_is_told_of_no_class_of_ours(how: Callable[[nn.Module], nn.Module]) -> None:
    net, before, table = Fast(), list(Noted.made), dict(Registered.table)
    made: Any = how(net)
    assert Noted.made == before and Registered.table == table and table["Fast"] is Fast and made.scale == 2.0
    same(net, made, X)
    assert isinstance(made, Registered) and isinstance(made, Net) and not isinstance(net, type(made))
    other = type(made)()
    assert type(other) is Fast and other(X).shape == X.shape
    with pytest.raises(TypeError, match="not from its __class__"):
        types.new_class("Mine", (type(made),), {"scale": 3.0})()


@pytest.mark.parametrize("kind", [Net, Calling, Watched, WithMeta])
def test_kinds_of_modules_in_place(kind: type[Net], monkeypatch: pytest.MonkeyPatch) -> None:
    net = kind()
    one, call = copy.deepcopy(net), nn.Module.__call__
    fusewright.compile_(one, backend="eager")
    events: list[Any] = []
    with STREAM.listening(events.append):
        for _ in range(3):
            same(net, one, X)
    assert any(isinstance(event, Captured) for event in events)
    monkeypatch.setattr(nn.Module, "__call__", lambda self, *args: call(self, *args) * 3)
    same(net, one, X)
    assert not torch.equal(one(X), one.forward(X))


@pytest.mark.parametrize("count", [0, 1, 14, 15, 16, 17, 40])
def test_any_number_of_arguments(count: int) -> None:
    net = Net()
    compiled = fusewright.compile(net, backend="eager")
    for _ in range(2):
        same(net, compiled, X, *range(count), scale=2.0)
        same(net, compiled, X, **{f"value{index}": index for index in range(count)})
        same(net, compiled, x=X)


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_later_is_seen(name: str) -> None:
    net = Net()
    compiled = fusewright.compile(net, backend="eager")
    for _ in range(2):
        same(net, compiled, X)
    handle = CHANGES[name](net)
    try:
        for _ in range(3):
            gradients, results = [], []
            for module in (net, compiled):
                x = X.clone().requires_grad_()
                result: Any
                try:
                    result = module(x)
                    (gradient,) = torch.autograd.grad(result.sum(), x)
                except (TypeError, AttributeError) as error:
                    result = gradient = str(error)
                gradients.append(gradient)
                results.append(result)
            for pair in (results, gradients):
                if isinstance(pair[0], str):
                    assert pair[0] == pair[1]
                else:
                    torch.testing.assert_close(*reversed(pair))
    finally:
        if handle is not None:
            handle.remove()
    if handle is not None:
        same(net, compiled, X)


def test_forward_of_the_class_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    compiled = fusewright.compile(net, backend="eager")
    same(net, compiled, X)
    monkeypatch.setattr(Net, "forward", replaced)
    for _ in range(2):
        same(net, compiled, X)
    assert torch.equal(compiled(X), X * 3)


def test_forward_becomes_that_of_another_module_of_the_class() -> None:
    net, other = Net(), Net()
    compiled = fusewright.compile(net, backend="eager")
    same(net, compiled, X)
    net.forward = other.forward  # type: ignore[method-assign]
    for _ in range(2):
        same(net, compiled, X)
    assert torch.equal(compiled(X), other(X))


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.dropout(self.linear(x))


def test_training_flag_and_errors() -> None:
    net = Dropping()
    compiled = fusewright.compile(net, backend="eager")
    for training in (True, False, True):
        compiled.train(training)
        same(net, compiled, X)
    for arguments in ((), (X, X, X), ("x",)):
        messages = []
        for module in (net, compiled):
            with pytest.raises(TypeError) as error:
                module(*arguments)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


def test_compiled_modules_inside_compiled_code() -> None:
    net = Net()
    inner = fusewright.compile(net, backend="eager")

    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + inner.forward(x)

    compiled = fusewright.compile(program, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), program(X))
    net.register_forward_hook(lambda module, args, result: result * 2)
    torch.testing.assert_close(compiled(X), net(X) * 1.5)


def test_it_looks_like_a_method() -> None:
    net = Net()
    compiled = fusewright.compile(net, backend="eager")
    entry = type(compiled).__call__
    assert isinstance(entry, _native.ModuleCall) and inspect.isfunction(entry.__wrapped__)
    assert inspect.signature(compiled) == inspect.signature(net)
    torch.testing.assert_close(compiled.__call__(X), net(X))
    torch.testing.assert_close(type(compiled).__call__(compiled, X), net(X))
    for twin in (copy.deepcopy(compiled), copy.copy(compiled), pickle.loads(pickle.dumps(compiled))):
        torch.testing.assert_close(twin(X), net(X))
    with pytest.raises(TypeError):
        _native.ModuleCall.__new__(_native.ModuleCall)(X)
    with pytest.raises(TypeError):
        _native.ModuleCall(len, len, len, [])  # type: ignore[arg-type]


def test_copies_of_data_parallel_run_eagerly_and_say_so() -> None:
    """What nn.DataParallel does on several GPUs: a copy without parameters, which then gets tensors under their names."""
    net = nn.Sequential(Net(), fusewright.compile(Net()))
    compiled = fusewright.compile(net)
    for whole in (net, compiled):
        with pytest.warns(UserWarning, match=r"DataParallel copies \w+ at every call, and the copies run eagerly"):
            copies = [module._replicate_for_data_parallel() for module in whole.modules()]
        for module, replica in zip(whole.modules(), copies):
            for name, child in module._modules.items():
                replica._modules[name] = copies[list(whole.modules()).index(child)]
            for name, parameter in module._parameters.items():
                setattr(replica, name, parameter.detach() * 2)
        x = torch.randn(3, 4)
        expected = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in expected.parameters():
                parameter *= 2
        torch.testing.assert_close(copies[0](x), expected(x))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


@pytest.mark.parametrize("on", ["original", "compiled"])
def test_a_parametrization_that_comes_later_is_seen(on: str) -> None:
    """It gives the original another class, whose properties stand for parameters."""
    net, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(net.state_dict())
    compiled = fusewright.compile(net)
    same(plain, compiled, X)
    parametrize, given = nn.utils.parametrize, net if on == "original" else compiled
    for module in (given, plain):
        parametrize.register_parametrization(module, "weight", Doubled())
    assert torch.equal(compiled.weight, plain.weight) and compiled.parametrizations is net.parametrizations
    assert (
        parametrize.is_parametrized(compiled)
        and type(net).__name__ == compiled.__class__.__name__ == "ParametrizedLinear"
    )
    assert isinstance(compiled, nn.Linear) and not hasattr(compiled, "no_such_thing")
    same(plain, compiled, X)
    with parametrize.cached():
        same(plain, compiled, X)
    entries = dict(compiled.state_dict())
    assert (
        entries.keys()
        == net.state_dict().keys()
        == plain.state_dict().keys()
        == {"bias", "parametrizations.weight.original"}
    )
    compiled.load_state_dict({name: value + 1 for name, value in entries.items()})
    plain.load_state_dict({name: value + 1 for name, value in plain.state_dict().items()})
    same(plain, compiled, X)
    for module in (compiled, plain):
        with torch.no_grad():
            module.weight = torch.arange(16.0).view(4, 4)  # by the property: `right_inverse` halves it
    assert "weight" not in vars(net) and torch.equal(
        net.parametrizations.weight.original, torch.arange(16.0).view(4, 4) / 2
    )
    same(plain, compiled, X)
    compiled.note = 5
    assert net.note == 5
    del compiled.note
    assert not hasattr(net, "note")
    same(plain, copy.deepcopy(compiled), X)
    for module in (given, plain):
        parametrize.remove_parametrizations(module, "weight")
    assert type(net) is nn.Linear and compiled.weight is net.weight and isinstance(net.weight, nn.Parameter)
    same(plain, compiled, X)
    with pytest.raises(AttributeError, match="no_such_thing"):
        compiled.no_such_thing


@pytest.mark.parametrize("how", [fusewright.compile, fusewright.disable])
def test_a_lazy_module_takes_another_class_at_its_first_call(how: Callable[..., Any]) -> None:
    plain, compiled = nn.LazyLinear(2), how(nn.LazyLinear(2))
    plain(X), compiled(X)
    assert isinstance(compiled, nn.Linear) and not isinstance(compiled, nn.LazyLinear)
    cls = type(compiled)
    names = cls.__name__, cls.__qualname__, cls.__module__, cls.__doc__
    assert names == (nn.Linear.__name__, nn.Linear.__qualname__, nn.Linear.__module__, nn.Linear.__doc__)
    assert type(cls(3, 5)) is nn.Linear and cls not in nn.LazyLinear.__subclasses__()
    compiled.load_state_dict(plain.state_dict())
    same(plain, compiled, X)


def test_compiled_code_sees_a_parametrization_of_a_compiled_module() -> None:
    net = nn.Linear(4, 4)
    inner = fusewright.compile(net)

    def outer(x: torch.Tensor) -> torch.Tensor:
        inner.calls = 7
        return inner(x) @ inner.weight

    compiled = fusewright.compile(outer, fullgraph=True)
    torch.testing.assert_close(compiled(X), outer(X))
    nn.utils.parametrize.register_parametrization(net, "weight", Doubled())
    torch.testing.assert_close(compiled(X), outer(X))
    nn.utils.parametrize.remove_parametrizations(net, "weight")
    torch.testing.assert_close(compiled(X), outer(X))
    assert net.calls == 7


def test_a_disabled_module_sees_a_parametrization() -> None:
    net = nn.Linear(4, 4)
    disabled = fusewright.disable(net)
    nn.utils.parametrize.register_parametrization(net, "weight", Doubled())
    assert torch.equal(disabled.weight, net.weight)
    same(net, disabled, X)


@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_what_a_program_puts_in_the_place_of_pytorchs_call_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.ReLU()
    compiled, x = fusewright.compile(model), torch.ones(3)
    assert torch.equal(compiled(x), x)
    for factor in (3, 4):
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Module, name, lambda self, x, factor=factor: x * factor)
            assert torch.equal(compiled(x), x * factor)
        assert torch.equal(compiled(x), x)
    if name == "_call_impl":
        monkeypatch.setitem(model.__dict__, name, lambda x: x * 5)
        assert torch.equal(compiled(x), x * 5)
