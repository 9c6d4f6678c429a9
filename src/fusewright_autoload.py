"""Honours FUSEWRIGHT_REPLACE_TORCH_COMPILE in programs that do not import fusewright.

PyTorch calls the entry points of the group `torch.backends` at the end of its own import. This one stands outside of
the package, and reads the variable itself: a program that does not ask for fusewright shall not import it.
"""

import os


def autoload() -> None:
    """Imports fusewright, which looks at the variable, if it is set at all."""
    if os.environ.get("FUSEWRIGHT_REPLACE_TORCH_COMPILE"):
        __import__("fusewright")
