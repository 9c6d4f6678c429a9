"""Generated GPU kernels run on the CPU under Triton's interpreter (tests/conftest.py asks for it where there is no GPU).

Without Triton, or where it compiles for a GPU, the files that need the interpreter are left out.
"""

import importlib.util
import os

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = ["test_kernels.py", "test_products.py", "test_candidates.py", "test_operands.py", "test_prologues.py"]
