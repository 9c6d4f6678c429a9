"""The border between inside and outside: reads are guarded, writes are held back, and nothing shows a difference to eager."""

from __future__ import annotations

import pickle
import types
from typing import Any

import pytest
import torch

from fusewright.base.signals import GraphBreak, SkipFrame
from tests.capture.border.border import capture, check, guarded, holds, run, same
from tests.capture.border.border_programs import PROGRAMS, numbers


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("level", ["aten", "torch"])
def test_a_program_is_as_eager(program: Any, level: str) -> None:
    function, make_args = program()
    check(function, make_args, level)


UNUSED = object()


class Config:
    """A plain user object."""

    scale = 2

    def __init__(self) -> None:
        self.size = 3
        self.names = ["a"]
        self.table = {"k": 1, "unused": UNUSED}


def test_nothing_outside_changes_during_capture() -> None:
    def f(config: Config, items: list[Any], x: torch.Tensor) -> Any:
        config.size += 1
        config.fresh = x
        config.names.append("b")
        config.table["k"] = 5
        items.clear()
        return x + config.size

    config, items = Config(), [1, 2]
    before = (dict(vars(config)), list(config.names), dict(config.table))
    capture(f, (config, items, numbers()))
    assert (vars(config), config.names, config.table, items) == (*before, [1, 2])


def test_guards_follow_what_was_read() -> None:
    def f(config: Config, x: torch.Tensor) -> Any:
        return x * config.scale + config.size + config.table["k"] + len(config.names)

    frame = check(f, lambda: (Config(), numbers()))
    same_again = Config()
    same_again.table["unused"] = 7  # was not read
    assert holds(frame, f, (same_again, numbers()))
    for change in (
        lambda config: setattr(config, "size", 4),
        lambda config: setattr(config, "scale", 9),  # an instance attribute now hides the class's
        lambda config: config.table.update(k=2),
        lambda config: config.names.append("c"),
    ):
        other = Config()
        change(other)
        assert not holds(frame, f, (other, numbers()))


def test_a_class_attribute_is_guarded() -> None:
    def f(config: Config, x: torch.Tensor) -> Any:
        return x * config.scale

    frame = capture(f, (Config(), numbers()))
    Config.scale = 3
    try:
        assert not holds(frame, f, (Config(), numbers()))
    finally:
        Config.scale = 2
    assert holds(frame, f, (Config(), numbers()))


def test_an_attribute_that_was_absent_is_guarded() -> None:
    def f(config: Config, x: torch.Tensor) -> Any:
        return x + 1 if not hasattr(config, "extra") else x

    frame = check(f, lambda: (Config(), numbers()))
    other = Config()
    other.extra = 1  # type: ignore[attr-defined]
    assert not holds(frame, f, (other, numbers()))


@pytest.mark.parametrize("bad", [2, 3.5, True, "3", None])
def test_a_number_is_specialised_by_value_and_type(bad: object) -> None:
    def f(x: torch.Tensor, n: object) -> Any:
        return x * 1 if n == 1 else x

    frame = capture(f, (numbers(), 1))
    assert holds(frame, f, (numbers(), 1))
    assert not holds(frame, f, (numbers(), bad))


def test_aliasing_of_arguments_is_guarded_both_ways() -> None:
    def f(first: list[Any], second: list[Any]) -> Any:
        first.append(1)
        return len(second), first is second

    shared: list[Any] = []
    apart = capture(f, ([], []))
    assert holds(apart, f, ([], [])) and not holds(apart, f, (shared, shared))
    one: list[Any] = []
    together = capture(f, (one, one))
    assert holds(together, f, (shared, shared)) and not holds(together, f, ([], []))
    assert run(together, f, (one, one)) == (1, True)


def test_the_same_tensor_twice_is_one_input() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x + y

    x = numbers()
    frame = capture(f, (x, x))
    assert len(frame.inputs) == 1 and not holds(frame, f, (numbers(), numbers()))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[:2],
        lambda x: x.t(),
        lambda x: x.requires_grad_(),
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["dtype", "shape", "strides", "requires_grad", "class"],
)
def test_a_tensor_is_guarded(change: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return x.relu()

    frame = capture(f, (torch.ones(3, 3),))
    assert holds(frame, f, (torch.zeros(3, 3),)) and not holds(frame, f, (change(torch.ones(3, 3)),))


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, device="meta")],
    ids=["sparse", "conj", "meta"],
)
def test_tensors_that_a_graph_cannot_hold_break(tensor: torch.Tensor) -> None:
    def f(x: torch.Tensor) -> Any:
        return x + x

    with pytest.raises(GraphBreak) as caught:
        capture(f, (tensor,))
    assert caught.value.code == "unsupported-tensor"


COUNTER = 0


def test_globals_are_read_written_and_guarded() -> None:
    def f(x: torch.Tensor) -> Any:
        global COUNTER
        COUNTER += 1
        return x * COUNTER

    global COUNTER
    COUNTER = 4
    frame = capture(f, (numbers(),))
    assert COUNTER == 4
    same(numbers() * 5, run(frame, f, (numbers(),)))
    assert COUNTER == 5 and not holds(frame, f, (numbers(),))


def test_cells_of_the_enclosing_function_are_written() -> None:
    total = 1

    def f(x: torch.Tensor) -> Any:
        nonlocal total
        total += 2
        return x + total

    frame = capture(f, (numbers(),))
    assert total == 1
    same(numbers() + 3, run(frame, f, (numbers(),)))
    assert total == 3


class Net(torch.nn.Module):
    """Parameters, a buffer, a submodule, and a store in forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.calls += 1
        self.last = x.shape[0]
        return self.norm(self.linear(x)) * self.steps


def apply(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("level", ["aten", "torch"])
def test_a_module_with_buffers_and_stores(training: bool, level: str) -> None:
    frame = check(apply, lambda: (Net().train(training), numbers()), level)
    assert len(frame.inputs) == (9 if training else 8)  # num_batches_tracked is read in training alone


def test_a_module_is_guarded_by_what_was_read() -> None:
    module = Net().eval()
    frame = capture(apply, (module, numbers()))
    assert holds(frame, apply, (module, numbers()))
    assert not holds(frame, apply, (module.train(), numbers()))
    module.eval()
    handle = module.linear.register_forward_hook(lambda *_: None)
    assert not holds(frame, apply, (module, numbers()))
    handle.remove()
    assert holds(frame, apply, (module, numbers()))
    module.linear = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert not holds(frame, apply, (module, numbers()))


def test_hooks_run() -> None:
    module = Net().eval()
    module.linear.register_forward_hook(lambda module, args, output: output * 2)
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    frame = capture(apply, (module, numbers()))
    ours = run(frame, apply, (module, numbers()))
    module.steps.zero_()
    same(module(numbers()), ours)


def test_a_dict_is_read_key_by_key() -> None:
    def f(table: dict[str, Any], x: torch.Tensor) -> Any:
        table["out"] = x * table["a"]
        return table.get("missing", 2), "a" in table, table.pop("b", None)

    frame = check(f, lambda: ({"a": 3, "b": 4, "rest": object()} | {"rest": 1}, numbers()))
    assert not guarded(frame, "KEYS")
    assert holds(frame, f, ({"a": 3, "b": 4, "other": 5}, numbers()))


def test_a_missing_name_is_the_users_exception() -> None:
    def f(x: torch.Tensor, config: Config) -> Any:
        try:
            return config.nowhere  # type: ignore[attr-defined]
        except AttributeError as error:
            return x + 1, str(error)

    check(f, lambda: (numbers(), Config()))


def test_settings_are_put_back_after_a_capture() -> None:
    def f(x: torch.Tensor) -> Any:
        torch.set_grad_enabled(False)
        return x + 1

    frame = capture(f, (numbers(),))
    assert torch.is_grad_enabled()
    try:
        run(frame, f, (numbers(),))
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize("level", ["aten", "torch"])
def test_what_an_operator_sets_is_no_effect_of_the_program(level: str) -> None:
    """PyTorch chooses the order of attention's kernels at the first attention on a GPU, for good."""
    usual = torch._C._get_sdp_priority_order()
    other = usual[::-1]

    def shape(x: torch.Tensor) -> torch.Tensor:
        torch._C._set_sdp_priority_order(other)
        return torch.empty_like(x)

    def f(x: torch.Tensor) -> Any:
        return operator(x) + 1

    with torch.library._scoped_library("fusewright_test_border", "DEF") as library:
        library.define("chooses(Tensor x) -> Tensor")
        library.impl("chooses", torch.clone, "CPU")
        library.impl("chooses", shape, "Meta")
        operator = torch.ops.fusewright_test_border.chooses
        try:
            frame = capture(f, (numbers(),), level=level)
            assert torch._C._get_sdp_priority_order() == other
            assert not frame.effects
            torch._C._set_sdp_priority_order(usual)
            run(frame, f, (numbers(),))
            assert torch._C._get_sdp_priority_order() == usual
        finally:
            torch._C._set_sdp_priority_order(usual)


def test_an_outside_iterator_is_not_advanced() -> None:
    def f(iterator: Any, x: torch.Tensor) -> Any:
        return x + next(iterator)

    iterator = (number for number in (1, 2))
    with pytest.raises(GraphBreak) as caught:
        capture(f, (iterator, numbers()))
    assert caught.value.code == "outside-iterator" and next(iterator) == 1


def test_a_lazy_module_is_not_touched() -> None:
    touched = []
    module = types.ModuleType("lazy")
    module.__getattr__ = lambda name: touched.append(name) or 5  # type: ignore[method-assign]
    module.present = 2  # type: ignore[attr-defined]

    def f(x: torch.Tensor) -> Any:
        return x * module.present

    same(numbers() * 2, run(capture(f, (numbers(),)), f, (numbers(),)))
    assert not touched


def test_memory_of_written_inputs_stays_apart() -> None:
    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        x[0].mul_(2)
        return y + z

    base = numbers()
    shared = capture(f, (numbers(), base[0], base[1]))  # y and z may share memory: nothing writes to them
    assert holds(shared, f, (numbers(), base[0], base[1])) and not holds(shared, f, (base, base[0], numbers()[1]))
    with pytest.raises((GraphBreak, SkipFrame)) as caught:
        capture(f, (base, base[0], base[1]))
    assert caught.value.code == "overlapping-inputs"

    def fresh(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.clone().add_(1) + y

    assert holds(capture(fresh, (base[0], base[1])), fresh, (base[0], base[1]))  # writes to its own memory only


def test_batch_norm_in_training_writes_to_its_buffers() -> None:
    module = torch.nn.BatchNorm1d(4)
    frame = capture(apply, (module, numbers()))
    assert guarded(frame, "NO_OVERLAP") and holds(frame, apply, (module, numbers()))
    assert not guarded(capture(apply, (module.eval(), numbers())), "NO_OVERLAP")


@pytest.mark.parametrize("level", ["aten", "torch"])
def test_two_views_of_one_tensor(level: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.relu() + y

    def make() -> tuple[Any, ...]:
        base = numbers()
        return base[0], base[1]

    check(f, make, level)


@pytest.mark.parametrize("value", [("a", "b", "a"), {1, 2}, ({}, print), [["x"], ["x"]]], ids=repr)
def test_pickled_bytes_that_identity_or_order_decides_break(value: Any) -> None:
    def f(x: torch.Tensor) -> Any:
        return pickle.dumps(value), x + 1

    with pytest.raises(GraphBreak):
        capture(f, (numbers(),))


class Posing:
    """Says that it is of another class, as a mock does."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.cls


@pytest.mark.parametrize("cls", [dict, list, tuple, type, torch.Tensor])
def test_an_object_that_poses_as_another(cls: type) -> None:
    posing = Posing(cls)

    def f(x: torch.Tensor) -> Any:
        held = {posing: x}
        return held[posing] + 1, posing in held, (posing, 1) == (posing, 1), isinstance(posing, cls), hash(posing)

    check(f, lambda: (numbers(),))
