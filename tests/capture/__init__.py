"""Tests of capture. The torch-free half of them runs under versions of CPython for which there is no torch."""

from tests.native import without_torch  # noqa: F401  (before anything of fusewright)
