"""Code generation for GPU kernels: from `Kernel` (schedule/plan.py) to Triton source, a launch grid and a list of
arguments.

Takes kernels; gives `DeviceKernel`s (codegen/device_kernel.py). Start reading at kernel.py (one kernel), then tiles.py
(block sizes from a cost model), operations.py (the table of operations) and library.py (what generated code calls).
Generating needs no Triton: only compiling the text does (compiler.py), in another process, and only where the disk
cache has no machine code for it.
"""

from fusewright.codegen.device_kernel import DeviceKernel, Processor, Unsupported
from fusewright.codegen.triton.module import generate

__all__ = ["DeviceKernel", "Processor", "Unsupported", "generate"]
