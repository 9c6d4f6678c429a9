"""Every method of tensors and function of PyTorch takes traced tensors, which have no memory, without ending the process."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import fusewright
from fusewright.base.events import STREAM, Event, InternalError

OWNERS = {
    "methods": torch.Tensor,
    "functions": torch._C._VariableFunctions,
    "nn": torch._C._nn,
    "functional": torch.nn.functional,
    "linalg": torch.linalg,
    "special": torch.special,
    "fft": torch.fft,
}
ARGUMENTS = (
    lambda x: (x,),
    lambda x: (x, x),
    lambda x: (x, lambda v: v + 1),
    lambda x: (x, x, lambda v, w: v + w),
    lambda x: (x, x, x, lambda u, v, w: u + v + w),
    lambda x: (x, 1),
    lambda x: (x, 0, 1),
    lambda x: ([x, x],),
    lambda x: (x, x, x),
)


def call_all(name: str) -> None:
    """Prints what ended in an internal error."""
    warnings.simplefilter("ignore")
    heard: list[Event] = []
    with STREAM.listening(lambda event: heard.append(event) if isinstance(event, InternalError) else None):
        for method in sorted(dir(OWNERS[name])):
            function = getattr(OWNERS[name], method)
            if not callable(function) or isinstance(function, type):
                continue
            print("calls", method, file=sys.stderr, flush=True)
            for given in ARGUMENTS:
                compiled = fusewright.compile(lambda x: function(*given(x)))
                try:
                    compiled(torch.arange(6.0).reshape(2, 3))
                except Exception:  # most take other arguments
                    pass
                if heard:
                    print(method, heard.pop().trace.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "name", [*list(OWNERS)[:3], *(pytest.param(one, marks=pytest.mark.sweep) for one in list(OWNERS)[3:])]
)
def test_every_one(name: str) -> None:
    text = f"from tests.capture.call.test_every_method import call_all; call_all({name!r})"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    assert not done.stdout
