"""Where PyTorch's libraries lie.

Takes the PyTorch that is imported and the platform; gives paths. Always holds: a library may be absent (a build without
CUDA has no torch_cuda), and who loads it does without it then.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def library_path(name: str) -> Path:
    """The file of a library of PyTorch: "c10", "torch_cpu"."""
    return Path(torch.__file__).parent / "lib" / f"lib{name}{SUFFIX}"
