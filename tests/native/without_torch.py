"""Lets the torch-free half of capture be imported where there is no torch: CPython 3.12 and 3.13 in development.

Imported first; does nothing where torch is installed.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types

if importlib.util.find_spec("torch") is None:
    stand_in = types.ModuleType("torch")
    stand_in.dtype = stand_in.device = object  # named in annotations of sizes/tensor_type.py
    sys.modules["torch"] = stand_in
    source = pathlib.Path(__file__).parents[2] / "src" / "fusewright"
    for name in ("fusewright", "fusewright.base", "fusewright.sizes", "fusewright.capture"):
        package = types.ModuleType(name)
        package.__path__ = [str(source.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
