"""Programs that read clocks, draw from generators or call NumPy: what each form of a program does at every call, and
what is refused, with the user's line."""

from __future__ import annotations

import io
import random
import time
from pathlib import Path

import numpy as np
import numpy.random
import pytest
import torch

import fusewright
from fusewright import Dim
from tests.export.test_export import assert_same

OWN_RANDOM = random.Random(3)
OWN_GENERATOR = torch.Generator().manual_seed(3)
OWN_ITERATOR = iter([1.0, 2.0, 3.0])
WEIGHT = torch.ones(4, requires_grad=True)


def timed(x):
    start = time.perf_counter()
    y = x * 2
    return y, torch.ones(()) * (time.perf_counter() - start)


def of_python(x):
    return x + random.random() * np.random.rand()


def of_numpy(x):
    return x + torch.from_numpy(np.random.rand(4)), torch.from_numpy(np.median(np.sort(np.eye(4)), 0))


def kept_state(x):
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return x + first - torch.rand(4)


def seeded(x):
    return x + torch.rand(4, generator=torch.Generator().manual_seed(4)), torch.rand(2)


def asks_for_one(x):
    x = x + random.random()
    return (x * 2 if x.shape[0] == 1 else x + x), torch.ones(()) * time.time()


def hooked(x):
    WEIGHT.register_hook(lambda gradient: gradient * 2)
    return x * WEIGHT


PROGRAMS = [of_python, of_numpy, kept_state, seeded]


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def loaded(program):
    file = io.BytesIO()
    fusewright.save(program, file)
    return fusewright.load(file.getvalue()).module()


def packaged(program):
    file = io.BytesIO()
    fusewright.package(program, file)
    return fusewright.load_package(file.getvalue())


FORMS = {
    "torch": lambda program: program.to_torch().module(),
    "from torch": lambda program: fusewright.export(program.to_torch(), None).module(),
    "loaded": loaded,
    "package": packaged,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", PROGRAMS, ids=lambda model: model.__name__)
def test_each_form_draws_what_eager_draws(model, form):
    program = fusewright.export(model, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("batch", min=2, max=64)},))
    run = FORMS[form](program)
    for size in (5, 2):
        x = torch.randn(size, 4)
        seed()
        want = [model(x), model(x)]
        seed()
        assert_same([run(x), run(x)], want)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_reads_the_clock(form):
    run = FORMS[form](fusewright.export(timed, (torch.randn(3, 4),)))
    x = torch.randn(3, 4)
    readings = []
    for _ in range(2):
        doubled, took = run(x)
        assert_same(doubled, x * 2)
        readings.append(float(took))
    assert all(0 < one < 60 for one in readings) and readings[0] != readings[1]


def test_a_batch_of_one_is_compared_by_equal_draws():
    before = random.getstate()
    program = fusewright.export(asks_for_one, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("batch")},))
    assert random.getstate() == before
    assert program.range_constraints == {"batch": (1, None)}
    x = torch.zeros(1, 4)
    seed()
    want, _ = asks_for_one(x)
    seed()
    found, read = program.module()(x)
    assert_same(found, want)
    assert abs(float(read) - time.time()) < 600


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda x: x + OWN_RANDOM.random(), "random.Random of its own"),
        (lambda x: x + torch.rand(4, generator=OWN_GENERATOR), "changes a torch.Generator"),
        (lambda x: x * next(OWN_ITERATOR), "changes an iterator"),
        (hooked, "changes the hooks of a tensor"),
        (lambda x: x[:, random.randrange(4)], "known only when the program runs"),
    ],
)
def test_what_no_file_can_hold_is_refused(model, message):
    with pytest.raises(fusewright.ExportError, match=message) as found:
        fusewright.export(model, (torch.randn(3, 4),))
    assert "changes" in message or Path(__file__).name in str(found.value)


@pytest.mark.parametrize(
    ("model", "named"), [(timed, "time.perf_counter"), (of_python, "random.random"), (of_numpy, "numpy.random.rand")]
)
def test_a_package_without_pytorch_says_what_it_cannot_call(model, named):
    program = fusewright.export(model, (torch.randn(3, 4),), dynamic_shapes=({0: Dim("batch")},))
    with pytest.raises(fusewright.ExportError, match=named) as found:
        fusewright.package(program, io.BytesIO(), standalone=True)
    assert Path(__file__).name in str(found.value)


@torch.library.custom_op("fusewright_tests::refused", mutates_args=())
def refused(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@refused.register_fake
def _(x):
    if type(x) is not torch.Tensor and "Fake" in type(x).__name__:
        raise RuntimeError("no such thing\nwith details")
    return torch.empty_like(x)


def test_what_pytorchs_exporter_refuses_is_said_with_the_line():
    program = fusewright.export(lambda x: refused(x), (torch.randn(3, 4),))
    with pytest.raises(fusewright.ExportError, match=r"fusewright_tests\.refused\.default") as found:
        program.to_torch()
    assert Path(__file__).name in str(found.value) and "no such thing" in str(found.value)
    assert isinstance(found.value.__cause__, RuntimeError)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shapes", [None, {0: Dim("batch", max=64)}])
def test_a_recurrent_layer_is_packaged_in_training_too(training, shapes):
    layer = torch.nn.LSTM(4, 5, batch_first=True).train(training)
    with torch.no_grad():
        program = fusewright.export(layer, (torch.randn(3, 6, 4),), dynamic_shapes=(shapes,))
        x = torch.randn(3, 6, 4)
        torch.testing.assert_close(packaged(program)(x), layer(x))
