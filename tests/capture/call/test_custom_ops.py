"""Operators of the user's own: torch.library.custom_op and torch.library.Library, captured whole."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fusewright
from fusewright.base import events
from fusewright.base.events import STREAM, Broken

BACKENDS = pytest.mark.parametrize("backend", ["native", "aot_eager", "eager"])


@torch.library.custom_op("fusewright_tests::np_sin", mutates_args=())
def np_sin(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sin(x.detach().numpy()))


@np_sin.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


np_sin.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0].cos(), setup_context=_setup)


@torch.library.custom_op("fusewright_tests::add_in_place", mutates_args=("x",))
def add_in_place(x: torch.Tensor, n: int) -> None:
    x.add_(n)


@torch.library.custom_op("fusewright_tests::scaled", mutates_args=())
def scaled(xs: list[torch.Tensor], s: float, flag: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return xs[0] * s, xs[1] + s


@scaled.register_fake
def _(xs: list[torch.Tensor], s: float, flag: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(xs[0]), torch.empty_like(xs[1])


@torch.library.custom_op("fusewright_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@torch.library.custom_op("fusewright_tests::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


@product.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


product.register_autocast("cpu", torch.bfloat16)

LIBRARY = torch.library.Library("fusewright_tests_library", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("fusewright_tests_library::twice", lambda x: torch.empty_like(x))
LIBRARY.define("composite(Tensor x) -> Tensor")
LIBRARY.impl("composite", lambda x: x.sin() * 2, "CompositeImplicitAutograd")


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return product(x, x)


def writes_to_its_own(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    add_in_place(y, 3)
    return y + 1


PROGRAMS = {
    "object": lambda x: np_sin(x) * 2 + 1,
    "packet": lambda x: torch.ops.fusewright_tests.np_sin(x) * 2,
    "overload": lambda x: torch.ops.fusewright_tests.np_sin.default(x) * 2,
    "several results": lambda x: scaled([x, x + 1], 2.0)[1] * 2,
    "in place": writes_to_its_own,
    "library": lambda x: torch.ops.fusewright_tests_library.twice(x) + 1,
    "composite": lambda x: torch.ops.fusewright_tests_library.composite(x) + 1,
    "autocast": autocast,
}


@BACKENDS
@pytest.mark.parametrize("name", PROGRAMS)
def test_captured_whole(name: str, backend: str) -> None:
    x, function = torch.randn(4, 4), PROGRAMS[name]
    compiled = fusewright.compile(function, fullgraph=True, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), function(x))


@BACKENDS
def test_inputs_are_written(backend: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        add_in_place(x, 3)
        return x * 2

    mine, theirs = torch.ones(3), torch.ones(3)
    torch.testing.assert_close(fusewright.compile(f, fullgraph=True, backend=backend)(mine), f(theirs))
    torch.testing.assert_close(mine, theirs)


@BACKENDS
def test_registered_gradients_are_used(backend: str) -> None:
    x = torch.randn(4, requires_grad=True)
    (grad,) = torch.autograd.grad((fusewright.compile(lambda x: np_sin(x * 2) * 3, backend=backend)(x)).sum(), x)
    torch.testing.assert_close(grad, 6 * (2 * x).cos())


def test_the_graph_has_the_operator_as_one_node() -> None:
    graphs: list[torch.fx.GraphModule] = []
    fusewright.compile(PROGRAMS["object"], backend=lambda gm, inputs: graphs.append(gm) or gm.forward)(torch.ones(2))
    assert graphs[0].graph.find_nodes(op="call_function", target=torch.ops.fusewright_tests.np_sin.default)
    assert "fusewright_tests.np_sin" in graphs[0].code


def test_without_a_fake_implementation_it_runs_between_graphs() -> None:
    report = fusewright.explain(lambda x: without_fake(x + 1) * 2)(torch.ones(2))
    assert torch.equal(report.result, torch.full((2,), 4.0))
    assert (report.graph_count, report.graph_break_count) == (2, 1)
    assert "no fake impl" in report.break_reasons[0].reason


def test_a_module_imported_inside_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import at a graph break runs the module's code as it is, however odd (this one counts its own subclasses)."""
    (tmp_path / "imported_inside.py").write_text(
        textwrap.dedent("""
        import torch
        SEEN = []
        class Base:
            def __init_subclass__(cls):
                super().__init_subclass__()
                SEEN.append((cls.__name__, torch.compiler.is_compiling()))
        def helper(x):
            SEEN.append(("helper", torch.compiler.is_compiling()))
            return x + 1
        class Derived(Base):
            value = helper(torch.ones(1))
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        fusewright.graph_break()
        import imported_inside  # type: ignore[import-not-found]

        return y + imported_inside.Derived.value

    try:
        assert torch.equal(fusewright.compile(f)(torch.ones(1)), torch.full((1,), 4.0))
        assert sys.modules["imported_inside"].SEEN == [("helper", False), ("Derived", False)]
    finally:
        sys.modules.pop("imported_inside", None)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_first_import_in_a_called_function_cuts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fullgraph: bool
) -> None:
    """As einops imports a part of itself at its first call: that call runs eagerly, with all that it calls."""
    (tmp_path / "imported_below.py").write_text("SEEN = ['once']\nvalue = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def lazy(x: torch.Tensor) -> torch.Tensor:
        import imported_below  # type: ignore[import-not-found]

        return x * imported_below.value

    def outer(x: torch.Tensor) -> torch.Tensor:
        return lazy(x + 1) - 1

    def f(x: torch.Tensor) -> torch.Tensor:
        return outer(outer(x)) + 1

    compiled, seen, x = fusewright.compile(f, fullgraph=fullgraph), list[events.Event](), torch.ones(2)
    try:
        with events.STREAM.listening(seen.append):
            results = [compiled(x)]
            assert not any(isinstance(event, (events.Compiled, events.Broken)) for event in seen)
            results += [compiled(x), compiled(x)]
        assert all(torch.equal(result, f(x)) for result in results) and compiled.hooked  # type: ignore[attr-defined]
        assert [event.report.code for event in seen if isinstance(event, events.Skipped)] == ["first-import"]
        assert sum(isinstance(event, events.Compiled) for event in seen) == 1
        assert not any(isinstance(event, events.Broken) for event in seen)
        assert sys.modules["imported_below"].SEEN == ["once"]
    finally:
        sys.modules.pop("imported_below", None)


def test_an_import_in_a_called_function_that_fails_is_a_graph_break_from_the_second_call_on() -> None:
    def lazy(x: torch.Tensor) -> torch.Tensor:
        try:
            import no_such_module_below  # type: ignore[import-not-found]
        except ImportError as error:
            return x * len(str(error))
        return x * no_such_module_below.value

    def f(x: torch.Tensor) -> torch.Tensor:
        return lazy(x + 1) - 1

    compiled, seen, x = fusewright.compile(f), list[events.Event](), torch.ones(2)
    with events.STREAM.listening(seen.append):
        assert all(torch.equal(compiled(x), f(x)) for _ in range(3))
    assert sum(isinstance(event, events.Skipped) and event.report.code == "first-import" for event in seen) == 1
    assert any(isinstance(event, events.Broken) for event in seen)


def test_super_on_a_class_finds_the_next_one() -> None:
    made: list[str] = []

    class Base:
        def __init_subclass__(cls) -> None:
            super().__init_subclass__()
            made.append(cls.__name__)

    @fusewright.disable(recursive=False)
    def define() -> type:
        return type("Derived", (Base,), {})

    def f(x: torch.Tensor) -> torch.Tensor:
        define()
        return x + 1

    assert torch.equal(fusewright.compile(f)(torch.ones(1)), torch.full((1,), 2.0))
    assert made == ["Derived"]


torch.library.define("fusewright_tests::chosen", "(Tensor x, float least) -> (Tensor, Tensor)")


@torch.library.impl("fusewright_tests::chosen", "CPU")
def _chosen(x: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    places = (x > least).nonzero().flatten()
    return places, x[places]


@torch.library.register_fake("fusewright_tests::chosen")
def _chosen_sizes(x: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(count, dtype=torch.int64), x.new_empty(count)


def suppressed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the detection models of torchvision use `nms`."""
    places, values = torch.ops.fusewright_tests.chosen(x * 2, 1.0)
    return x[places] + values, values.sum() * places.shape[0]


@pytest.mark.parametrize("backend", ["native", "eager"])
def test_operators_whose_shape_function_asks_for_a_size_are_captured(backend: str) -> None:
    options = {"capture_dynamic_output_shape_ops": True}
    compiled = fusewright.compile(suppressed, backend=backend, fullgraph=True, options=options)
    for values in ([1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 4.0, 5.0], [0.0, 0.0, 9.0]):
        for found, wanted in zip(compiled(torch.tensor(values)), suppressed(torch.tensor(values)), strict=True):
            torch.testing.assert_close(found, wanted)


def test_where_such_sizes_are_not_captured_the_option_is_named() -> None:
    with pytest.raises(fusewright.GraphBreakError, match="capture_dynamic_output_shape_ops") as caught:
        fusewright.compile(suppressed, fullgraph=True)(torch.ones(3))
    assert caught.value.code == "data-dependent-shape"
    torch.testing.assert_close(fusewright.compile(suppressed)(torch.ones(3)), suppressed(torch.ones(3)))


@torch.library.custom_op("fusewright_tests::places", mutates_args=())
def places(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()


@places.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.dim(), dtype=torch.long)


def test_a_size_that_depends_on_data_is_what_breaks() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.fusewright_tests.places(x * 2) + 1

    x = torch.tensor([1.0, 0.0, 2.0])
    heard: list[Any] = []
    with STREAM.listening(heard.append):
        assert torch.equal(fusewright.compile(f, options={"speculate": False})(x), f(x))
    assert [event.report.code for event in heard if isinstance(event, Broken)] == ["data-dependent-shape"]
