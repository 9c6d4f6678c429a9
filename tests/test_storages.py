"""Tensors whose memory is not what their sizes say, wherever they enter native code: eager's result, or eager's error.

A program here begins with a view of the tensor, or multiplies matrices: eager refuses that where the storage is too small.
PyTorch's pointwise operators do not look, and read or write outside.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright import _native
from fusewright.base import events
from fusewright.base.errors import RuntimeFallback
from fusewright.capture.guards import torch_state
from fusewright.runtime import launch

Change = Callable[[torch.Tensor], torch.Tensor]


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(tensor.nbytes - 4)
    return tensor


def grown(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(1 << 16)
    return tensor


def freed_and_back(tensor: torch.Tensor) -> torch.Tensor:
    content = tensor.detach().clone()
    freed(tensor)
    others = [torch.full((4, 4), 99.0) for _ in range(8)]  # one of them takes the place
    tensor.untyped_storage().resize_(others[0].nbytes)
    tensor.data.copy_(content * 2)
    return tensor


def other_data(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = tensor.detach() * 3
    return tensor


def freed_other_data(tensor: torch.Tensor) -> torch.Tensor:
    tensor.data = freed(tensor.detach() * 3)
    return tensor


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    other = type(tensor)(tensor.detach() * 4).requires_grad_(tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)
    return tensor


def window(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(40.0)[5:21].reshape(4, 4)


def window_past_the_end(tensor: torch.Tensor) -> torch.Tensor:
    made = window(tensor)
    made.untyped_storage().resize_(80)
    return made


def mapped(tensor: torch.Tensor) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "content"
        path.write_bytes(tensor.detach().numpy().tobytes())
        return torch.from_file(str(path), shared=False, size=16, dtype=torch.float32).reshape(4, 4)


def read_only(tensor: torch.Tensor) -> torch.Tensor:
    array = tensor.detach().numpy().copy()
    array.setflags(write=False)
    return torch.from_numpy(array)


CHANGES: list[Change] = [
    freed,
    shrunk,
    grown,
    freed_and_back,
    other_data,
    freed_other_data,
    swapped,
    window,
    window_past_the_end,
    mapped,
    read_only,
    lambda tensor: tensor.detach().share_memory_(),
    lambda tensor: torch._lazy_clone(tensor.detach()),
    lambda tensor: torch.complex(tensor.detach(), tensor.detach() + 1).conj(),
    lambda tensor: torch.complex(tensor.detach(), tensor.detach() + 1).conj().imag,
    lambda tensor: torch._efficientzerotensor(4, 4),  # type: ignore[attr-defined]
    lambda tensor: tensor.detach().to_sparse(),
    lambda tensor: tensor.detach().to_mkldnn(),
    lambda tensor: torch.quantize_per_tensor(tensor.detach(), 0.1, 0, torch.quint8),
    lambda tensor: torch.empty(0, 4),
]
NAMES = """freed shrunk grown back data freed-data swapped window past-the-end mapped read-only shared lazy conjugate
negative zero sparse mkldnn quantised empty""".split()


def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * weight.t()).relu() + 1


class Box:
    """Holds the tensor at one place of a program; `call(run, x)` gives the program's result."""

    def __init__(self, place: str, training: bool) -> None:
        tensor = torch.arange(16.0).reshape(4, 4) - 5
        self.place, self.training, self.module = place, training, nn.Module()
        if place == "parameter":
            self.module.weight = nn.Parameter(tensor, requires_grad=training)
        elif place == "buffer":
            self.module.register_buffer("weight", tensor)
        else:
            self.tensor = weight = tensor.requires_grad_(training)

        def enclose(new: torch.Tensor) -> None:
            nonlocal weight
            weight = new

        self.enclose = enclose
        self.module.forward = lambda x: compute(x, self.module.weight)  # type: ignore[arg-type]
        programs: dict[str, Callable[..., Any]] = {
            "argument": lambda x, w: compute(x, w),
            "closure": lambda x: compute(x, weight),
            "attribute": lambda x: compute(x, self.tensor),
        }
        self.program = programs.get(place, self.module)

    def change(self, how: Change) -> None:
        if self.place not in ("parameter", "buffer"):
            self.tensor = how(self.tensor)
            self.enclose(self.tensor)
            return
        new = how(self.module.weight)  # type: ignore[arg-type]
        if self.place == "parameter" and not isinstance(new, nn.Parameter):
            new = nn.Parameter(new, requires_grad=self.training and new.is_floating_point() and not new.is_mkldnn)
        self.module.weight = new

    def call(self, run: Callable[..., Any], x: torch.Tensor) -> Any:
        return run(x, self.tensor) if self.place == "argument" else run(x)


def outcome(box: Box, run: Callable[..., Any], training: bool) -> tuple[Any, ...]:
    """What a call gives: result and the gradient, or the class of its error."""
    x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_(training)
    try:
        with torch.set_grad_enabled(training):
            result = box.call(run, x)
            if training and result.requires_grad:
                result.abs().sum().backward()
    except RuntimeError as error:
        return (type(error),)
    return result.detach(), x.grad


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert len(actual) == len(expected), (actual, expected)
    for mine, eager in zip(actual, expected, strict=True):
        if isinstance(eager, torch.Tensor):
            assert mine.layout is eager.layout
            assert mine.dtype is eager.dtype
            torch.testing.assert_close(mine.to_dense(), eager.to_dense())
        else:
            assert mine is eager


@pytest.mark.filterwarnings("ignore:.*(not writable|quantize_per_tensor)")
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("place", ["argument", "parameter", "buffer", "closure", "attribute"])
@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
@pytest.mark.parametrize("compiled_before", [True, False], ids=["later", "at-once"])
def test_as_eager(change: Change, place: str, training: bool, compiled_before: bool) -> None:
    def outcomes(compiled: bool) -> list[tuple[Any, ...]]:
        box = Box(place, training)
        run = fusewright.compile(box.program) if compiled else box.program
        found = [outcome(box, run, training) for _ in range(2 * compiled_before)]
        box.change(change)
        return found + [outcome(box, run, training) for _ in range(3)]

    for actual, expected in zip(outcomes(True), outcomes(False), strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("change", [freed, shrunk, freed_other_data, window_past_the_end])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("native", [True, False])
def test_writes(change: Change, dynamic: bool, native: bool, request: pytest.FixtureRequest) -> None:
    def program(tensor: torch.Tensor) -> torch.Tensor:
        tensor.t().mul_(2)
        return tensor.t() + 1

    compiled = fusewright.compile(program, dynamic=dynamic)
    with torch.no_grad():
        compiled(torch.ones(4, 4))
        if not native:
            request.getfixturevalue("layout_unknown")
        assert torch.equal(compiled(torch.ones(4, 4)), torch.full((4, 4), 3.0))
        with pytest.raises(RuntimeError, match="setStorage"):
            compiled(change(torch.ones(4, 4)))


@pytest.fixture
def layout_unknown() -> Iterator[None]:
    """As with a PyTorch whose tensors native code cannot read."""
    _native.probe_tensors(torch_state._C10, torch_state._TORCH_CPU, torch._C.TensorBase, [])
    yield
    torch_state._probe()


@pytest.mark.parametrize("written", [0, 1])
def test_a_lazy_clone_is_a_tensor_of_its_own(written: int) -> None:
    @fusewright.compile
    def program(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)

    with torch.no_grad():
        program(torch.ones(4, 4))
        pair = [base := torch.ones(4, 4), torch._lazy_clone(base)]
        program(pair[written])
        assert torch.equal(pair[written], torch.full((4, 4), 2.0))
        assert torch.equal(pair[1 - written], torch.ones(4, 4))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("which", ["0.weight", "0.bias", "2.weight"])
def test_prepared_parameters(which: str, early: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval().requires_grad_(False)
    compiled, x = fusewright.compile(model), torch.randn(8, 64)
    parameter = model.get_parameter(which)
    content = parameter.clone()
    with torch.no_grad():
        for _ in range(0 if early else 3):
            compiled(x)
        for factor in (3, 5):
            freed(parameter)
            for run in (model, compiled):
                if which.endswith("weight"):
                    with pytest.raises(RuntimeError, match=r"storage|allocated"):
                        run(x)
            parameter.untyped_storage().resize_(content.nbytes)
            parameter.copy_(content * factor)
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x))


def test_prepared_for_what_has_changed_meanwhile() -> None:
    """A parameter that is written to while values are prepared from it: they serve that call alone."""
    weight, seen = torch.ones(8), []

    def prepare(given: torch.Tensor) -> Any:
        values = (given * 2,)
        if not seen:
            given.add_(1)
        seen.append(True)
        return values, (given,), ((0,),)

    plan = _native.PreparedPlan(lambda given, value: value, prepare, 1, (0,))
    assert torch.equal(plan(weight), torch.full((8,), 2.0))
    assert torch.equal(plan(weight), torch.full((8,), 4.0))
    assert torch.equal(plan(weight), torch.full((8,), 4.0))
    assert len(seen) == 2


@pytest.mark.parametrize("offsets", [(-4,), (29,), (1 << 40,)])
def test_a_sample_outside_of_its_parameter_is_refused(offsets: tuple[int, ...]) -> None:
    plan = _native.PreparedPlan(lambda given: given, lambda given: ((), (), (offsets,)), 1, (0,))
    with pytest.raises(ValueError, match="outside"):
        plan(torch.ones(8))


def test_values_that_are_lost_while_old_ones_die() -> None:
    """The end of old values runs code that makes the plan prepare anew, and at last fail: each call has the values that it prepared."""
    weight, rounds = torch.ones(8), itertools.count()

    class Old:
        def __init__(self, ends: Callable[[], None]) -> None:
            self.ends = ends

        def __del__(self) -> None:
            self.ends()

    def again() -> None:
        assert plan(weight) in (1, 2)

    def again_in_vain() -> None:
        weight.add_(1)
        with pytest.raises(TypeError):
            plan(weight)

    def prepare(given: torch.Tensor) -> Any:
        number = next(rounds)
        ends = {0: again, 2: again_in_vain}.get(number)
        offsets = ("no number",) if number == 3 else ()
        return (number, ends and Old(ends)), (), (offsets,)

    plan = _native.PreparedPlan(lambda given, number, old: number, prepare, 1, (0,))
    assert plan(weight) == 0
    weight.add_(1)
    assert plan(weight) == 1


RESULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda x: x.clone(),
    "strided": lambda x: x.t().contiguous().t(),
    "window": lambda x: torch.arange(40.0)[5:21].reshape(4, 4),
    "freed": lambda x: freed(x.clone()),
    "negative": lambda x: torch.complex(x, x).conj().imag,
    "zero": lambda x: torch._efficientzerotensor(x.shape),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_operators(kind: str) -> None:
    """What a library's operator gives is no more than it says it is."""
    with torch.library._scoped_library("fusewright_storages", "FRAGMENT") as library:
        library.define(f"{kind}(Tensor x) -> Tensor")
        library.impl(kind, RESULTS[kind], "CPU")
        library.impl(kind, torch.empty_like, "Meta")
        operator = getattr(torch.ops.fusewright_storages, kind).default

        def program(x: torch.Tensor) -> torch.Tensor:
            return (operator(x).t().relu() * 2).t() + 1  # type: ignore[no-any-return]

        found = []
        for run in (program, fusewright.compile(program)):
            try:
                with torch.no_grad():
                    found.append(run(torch.arange(16.0).reshape(4, 4)))
            except RuntimeError:
                found.append(None)
        torch.testing.assert_close(found[1], found[0])


HOOKS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "same": (lambda t: t, lambda t: t),
    "contiguous": (lambda t: t.contiguous(), lambda t: t),
    "strided": (lambda t: t, lambda t: t.t().contiguous().t()),
    "double": (lambda t: t.double(), lambda t: t),
    "list": (lambda t: t.tolist(), lambda t: torch.tensor(t)),
    "sparse": (lambda t: t.to_sparse(), lambda t: t.to_dense()),
    "negative": (lambda t: t, lambda t: torch.complex(t, -t).conj().imag),
    "window": (lambda t: torch.cat([t.flatten(), t.flatten()]), lambda t: t[t.numel() // 2 :].reshape(8, 6)),
}


@pytest.mark.parametrize("how", ["context", "tensor"])
@pytest.mark.parametrize("hook", HOOKS)
def test_saved_tensors_that_hooks_replace(hook: str, how: str) -> None:
    """The backward gets what a hook gives back: of the same elements, but in any layout, dtype and memory."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).exp() * w

    gradients = []
    for run in (program, fusewright.compile(program)):
        torch.manual_seed(0)
        x, w = (torch.randn(6, 8).t().requires_grad_() for _ in range(2))
        if how == "context":
            with torch.autograd.graph.saved_tensors_hooks(*HOOKS[hook]):
                result = run(x, w)
        else:
            result = run(x, w)
            node = result.grad_fn
            for saved in getattr(node, "_raw_saved_tensors", ()):
                saved.register_hooks(*HOOKS[hook])
        result.sum().backward()
        gradients.append((x.grad, w.grad))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("kind", ["zero", "negative", "sparse"])
def test_gradients_that_are_no_plain_tensors(kind: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp()

    given = {
        "zero": torch._efficientzerotensor(4, 4),  # type: ignore[attr-defined]
        "negative": torch.complex(torch.ones(4, 4), torch.ones(4, 4)).conj().imag,
        "sparse": torch.eye(4).to_sparse(),
    }[kind]
    gradients = []
    for run in (program, fusewright.compile(program)):
        x = torch.ones(4, 4, requires_grad=True)
        run(x).backward(given)
        assert x.grad is not None
        gradients.append(x.grad.to_dense())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_the_call_is_repeated_eagerly_with_a_reason() -> None:
    heard: list[events.Event] = []
    compiled = fusewright.compile(lambda x: x.t() * 2)
    with torch.no_grad():
        compiled(torch.ones(4, 4))
        with events.STREAM.listening(heard.append), pytest.raises(RuntimeError, match="setStorage"):
            compiled(freed(torch.ones(4, 4)))
    assert any("storage" in str(event) for event in heard)


def plan(slots: list[tuple[Any, ...]], inputs: str = "t", **other: Any) -> Any:
    """A plan of these slots that does nothing."""
    fixed = {"values": (0, 4, 1), "symbols": (), "instructions": (), "steps": (), "outputs": (), "constants": ()}
    return _native.Plan(
        name="p", inputs=inputs, slots=tuple(slots), arena=0, single=False, arena_limit=0, **fixed | other
    )


def slot(kind: str, pointer: bool = True, where: int = 0) -> tuple[Any, ...]:
    float32, cpu = launch.torch_c.DTYPE_CODES[torch.float32], launch.torch_c.DEVICE_CODES["cpu"]
    return (launch.SLOT_KINDS.index(kind), int(pointer), where, float32, 4, cpu, -1, 1, 1, 2, 0)


@pytest.mark.parametrize(
    ("slots", "inputs"),
    [
        ([slot("input"), slot("input")], "t"),
        ([slot("input")], "i"),
        ([slot("input")], "x"),
        ([slot("input", pointer=False), slot("window")], "t"),
    ],
)
def test_plans_that_do_not_fit_together_are_refused(slots: list[tuple[Any, ...]], inputs: str) -> None:
    with pytest.raises(ValueError, match=r"plan|memory"):
        plan(slots, inputs)


def test_a_plan_looks_at_the_storages_of_all_inputs() -> None:
    """Of those that operators read too: which operators these are is the compiler's choice, not the program's."""
    for pointer in (True, False):
        made = plan([slot("input", pointer)])
        assert made(torch.ones(4)) == ()
        with pytest.raises(RuntimeFallback, match="storage"):
            made(freed(torch.ones(4)))
        with pytest.raises(RuntimeFallback, match="storage"):
            made(shrunk(torch.ones(4)))


@pytest.mark.parametrize(
    ("operation", "size", "other"),
    [(0, 1 << 62, 1 << 62), (1, 1 << 62, 4), (2, -(1 << 63), -1), (3, -(1 << 63), -1), (2, 5, 0)],
)
def test_sizes_that_int64_cannot_hold(operation: int, size: int, other: int) -> None:
    """Instructions: 0 adds, 1 multiplies, 2 divides, 3 gives the rest."""
    made = plan([], "i", values=(0, other, 0), symbols=((0, 0, -1),), instructions=((operation, 2, 0, 1),))
    if other:
        assert made(8) == ()
    with pytest.raises(RuntimeFallback, match="too large"):
        made(size)
