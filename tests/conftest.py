"""Shared by all tests: every test starts with nothing compiled and a fixed seed."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# PyTorch's threads spin between parallel regions. Where other processes want the same cores, each small operator then waits for a thread
# that is not running: tests of tiny tensors take 15 times as long. It is read when the OpenMP library is loaded, so before PyTorch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:  # the other cores are the other workers'; two threads, as kernels are divided among them
    os.environ.setdefault("OMP_NUM_THREADS", "2")
# PyTorch imports Triton where that is installed; on a machine without a GPU its interpreter runs the generated kernels on the CPU.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

import fusewright
import fusewright.compiler  # what it registers on import, tests put back below
from fusewright import _native
from fusewright.base.errors import RuntimeFallback
from fusewright.base.events import STREAM
from fusewright.frame_policy import policy
from fusewright.select import linear as linear_choice
from fusewright.tools import served_cases


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """What was imported and made by earlier files is left out of collections: a full one takes seconds otherwise, and
    many tests ask for one."""
    gc.collect()
    gc.freeze()


TESTS = Path(__file__).parent
SPECULATING = frozenset(map(Path, ("autograd", "capture/border", "capture/call", "capture/guards")))
"""Folders whose tests run with the option `speculate` as it is by default. In the others a branch on data is what many tests break a graph
with. (What is taken for granted has tests of its own: test_speculation.py, test_speculation_streams.py.)"""
ALL_SPECULATE = bool(os.environ.get("SPECULATE"))
"""To compare: SPECULATE=1 runs any test with it. Tests that count breaks fail then; a result that differs from eager's is a defect."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "0")  # tests of the disk cache turn it on, in a folder of their own
    _native.set_fallback_error(RuntimeFallback)  # tests of the native part set their own
    _native.hook_set_policy(policy)
    # What a measurement decides differs from run to run, and with it which weights are prepared: the likely way is taken here.
    monkeypatch.setattr(linear_choice, "measured", lambda linear, ways, default: default)
    monkeypatch.setattr(linear_choice.Chooser, "has_quick_onednn", lambda self: False)
    folder = request.path.parent.relative_to(TESTS)
    monkeypatch.setattr(fusewright.config, "speculate", ALL_SPECULATE or bool({folder, *folder.parents} & SPECULATING))
    fusewright.reset()
    yield
    fusewright.set_stance("default")


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Python's threads take turns every 10 microseconds instead of 5,000: between any two steps of a call."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


LONG = frozenset(
    TESTS / name
    for name in ("test_docs.py", "test_examples.py", "native/test_short_memory.py", "distributed/test_distributed.py")
)
"""Files of few tests that take minutes."""


@pytest.hookimpl(tryfirst=True)  # before the marker `sweep` is selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One test in `n` of those marked `one_in(n)`, chosen by their names, is run by default; the others are a sweep.

    Among several processes, long files are begun first, then those of many tests: one that is begun last would keep
    one process busy while the others are done."""
    for item in items:
        for marker in item.iter_markers("one_in"):
            if zlib.crc32(item.name.encode()) % marker.args[0]:
                item.add_marker(pytest.mark.sweep)
    if "PYTEST_XDIST_WORKER" in os.environ:
        tests = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path not in LONG, -tests[item.path], item.path))


@pytest.fixture
def verified() -> Iterator[None]:
    """Each call that a compile serves because it was shown to is compared with a static capture of that call."""
    with STREAM.listening(served_cases.listen):
        yield
