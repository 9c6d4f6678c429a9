"""Checks of the entry and of the frame hook that need no torch: run by test_entry.py and test_hook.py, and by hand on every CPython.

By hand: build the extension for that CPython into a folder, then `python -m tests.native.native_checks FOLDER`.
"""

from __future__ import annotations

import sys

from tests.native import native_entry_checks, native_hook_checks, native_neighbour_checks  # noqa: F401  (their checks)
from tests.native.native_support import CHECKS

__all__ = ["CHECKS"]

if __name__ == "__main__":
    for part, checks in CHECKS.items():
        for name, fn in checks.items():
            fn()
            sys.stdout.write(f"{part}: {name}\n")
