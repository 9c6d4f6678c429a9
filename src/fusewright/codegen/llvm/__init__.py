"""Code generation for CPU kernels: from `Kernel` (schedule/plan.py) to machine code through LLVM.

Takes kernels; gives functions with the signature of codegen/kernel_code.py. Start reading at module.py (the driver),
then kernel.py (one function), strategy.py (what is vectorised), evaluate.py (expressions) and expressions.py (the table
of operations). `capabilities` is pure data for lowering.
"""

from fusewright.codegen.llvm.capabilities import supports
from fusewright.codegen.llvm.module import CompiledModule, compile_kernels, load_object, target_of

__all__ = ["CompiledModule", "compile_kernels", "load_object", "supports", "target_of"]
