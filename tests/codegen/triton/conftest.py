"""Generated GPU kernels run on the CPU under Triton's interpreter, which must be chosen before anything imports Triton.

Without Triton, or where something imported it first, the files that need it are left out.
"""

import importlib.util
import os
import sys

if importlib.util.find_spec("triton") is None or ("triton" in sys.modules and not os.environ.get("TRITON_INTERPRET")):
    collect_ignore = ["test_kernels.py"]
else:
    os.environ["TRITON_INTERPRET"] = "1"
