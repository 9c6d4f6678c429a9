"""PyTorch's operators, modules and foreach functions, compiled and compared with eager on PyTorch's own samples.

The default run takes a slice that is the same every time: one sample of every eighth entry in forward, gradient, in-place and `out=` form,
spread over all families, and less of PyTorch's other databases. `pytest -m sweep tests/ops` takes a few samples of everything; `python -m tests.ops.sweep` takes what it is told.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
import torch

from tests.ops import optimizers
from tests.ops.opinfo import DATABASES
from tests.ops.running import GOOD, run_case_apart
from tests.ops.sweep import ALL_FORMS, Unit, cases_of, defects_of, entries, run, table_of, units

TABLE = entries()
STRIDE = 8
ORDINARY = ("op", "foreach", "module", "optimizer")
OTHERS = ("reference", "custom operator", "autograd function", "higher-order operator")


def every(form: str, dtype: str, stride: int, first: int, databases: tuple[str, ...] = ORDINARY) -> Iterator[Unit]:
    options = {"form": [form], "dtype": [dtype], "database": databases, "only": None, "slice": "0/1", "device": "cpu"}
    yield from units(argparse.Namespace(**options), TABLE)[first::stride]


SLICE = [
    *every("function", "float32", STRIDE, 0), *every("gradient", "float32", STRIDE, 1), *every("inplace", "float32", STRIDE, 2),
    *every("out", "float32", STRIDE, 3), *every("function", "int64", 4 * STRIDE, 4), *every("function", "bool", 4 * STRIDE, 5),
    *every("function", "bfloat16", 4 * STRIDE, 6), *every("function", "complex64", 4 * STRIDE, 7), *every("gradgrad", "float32", 6 * STRIDE, 8),
    *every("errors", "float32", 3 * STRIDE, 9), *every("train", "float32", STRIDE, 0), *every("eval", "float32", STRIDE, 1),
    *every("foreach", "float32", STRIDE, 2), *every("wrapped", "float32", 2 * STRIDE, 4),
    *every("function", "float32", 6 * STRIDE, 5, ("jagged",)), *every("function", "float32", STRIDE, 5, OTHERS), *every("out", "int64", 2 * STRIDE, 6, OTHERS),
    *every("gradient", "float32", STRIDE, 7, OTHERS), *every("step", "float32", 2, 0), *every("groups", "float32", 4, 1),
    *every("training", "float32", 2, 1), *every("inside", "float32", 4, 0), *every("closure", "float64", 4, 0),
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own seeding also notes a stack trace for each kind of device that is absent: most of the time that samples take."""
    monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)


@pytest.mark.parametrize("form", list(dict.fromkeys(form for form, _, _ in SLICE)))
def test_a_slice_equals_eager(form: str) -> None:
    """Every case of the slice gives what eager gives, in one graph or by a catalogued break; few break."""
    outcomes = []
    for unit in SLICE:
        if unit[0] == form:
            outcomes += [(case.name, run_case_apart(case)) for case in cases_of(unit, TABLE, 1)]
    defects = [(name, outcome) for name, outcome in outcomes if outcome.kind not in GOOD]
    assert not defects
    broke = [(name, outcome.code) for name, outcome in outcomes if outcome.kind == "broke"]
    least = 3 if form in optimizers.FORMS else 8  # there are few optimizers
    assert len(outcomes) >= least and len(broke) <= 0.25 * len(outcomes), broke


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("form", ALL_FORMS)
def test_every_entry_equals_eager(form: str, dtype: str, how: str) -> None:
    if how == "xla":
        pytest.importorskip("jax")
    options = argparse.Namespace(
        form=[form],
        dtype=[dtype],
        database=list(DATABASES),
        only=None,
        slice="0/1",
        limit=4,
        out=None,
        quiet=True,
        cache=False,
        seconds=0,
        how=how,
        device="cpu",
    )
    outcomes = run(options)
    print(table_of(outcomes))
    assert not defects_of(outcomes)
