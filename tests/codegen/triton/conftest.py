"""Generated GPU kernels run on the CPU under Triton's interpreter (tests/conftest.py asks for it where there is no GPU).

Without Triton, or where it compiles for a GPU, the files that need the interpreter are left out.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from fusewright.runtime import cuda_code

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    names = ("kernels", "products", "candidates", "operands", "prologues", "symbolic")
    collect_ignore = [f"test_{name}.py" for name in names]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda_code.Compiler]:
    """A compiler process that makes machine code, where the tests' own interprets."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    made = cuda_code.Compiler()
    yield made
    made.stop()
