"""PyTorch's exporter to ONNX: its packages, and what of its answers is an error here.

Takes a torch.export.ExportedProgram; gives PyTorch's torch.onnx.ONNXProgram. Always holds: without the packages the
caller gets an error that says what to install; nothing here is imported before it is asked for.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from fusewright.backends.registry import required

PACKAGES = {"onnx": "onnx", "onnxscript": "onnxscript"}


def onnx_program(program: Any, names: list[str] | None = None, what: str = "fusewright.to_onnx") -> Any:
    """PyTorch's ONNX program of an exported one; `names`: of the inputs. Raises OptionError without the packages."""
    required(what, PACKAGES)
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")  # warns that torchvision is not there
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter's own use of deprecated names
            made = torch.onnx.export(program, input_names=names, dynamo=True, verbose=False)
    finally:
        logger.setLevel(level)
    assert made is not None
    return made
