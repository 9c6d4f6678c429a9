"""What the checks of the native entry and of the frame hook share: the extension, small guard programs, and the table of checks."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

if os.path.basename(sys.argv[0]) == "native_checks.py":  # by hand
    folder = sys.argv[1]
    path = next(
        os.path.join(folder, name)
        for name in sorted(os.listdir(folder))
        if name.startswith("_native") and name.endswith(".so")
    )
    spec = importlib.util.spec_from_file_location("fusewright._native", path)
    assert spec is not None and spec.loader is not None
    N: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(N)
else:
    from fusewright import _native as N

OP = {name: code for code, name in enumerate(N.OPCODES)}
CHECKS: dict[str, dict[str, Callable[[], None]]] = {"entry": {}, "hook": {}}


def check(part: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(fn: Callable[[], None]) -> Callable[[], None]:
        CHECKS[part][fn.__name__] = fn
        return fn

    return register


def type_program(*types_: type, inputs: int | None = None) -> Any:
    """A guard program: argument i has the type types_[i]; the first `inputs` arguments are the graph's inputs."""
    code: list[tuple[object, ...]] = []
    for i, cls in enumerate(types_):
        code.append((OP["LOCAL"], i, 0, i, 0, False, None, None))
        code.append((OP["TYPE"], i, i, 0, 0, False, cls, None))
    n = len(types_) if inputs is None else inputs
    return N.GuardProgram(len(types_), 0, code, [(False, i) for i in range(n)])


def always(n_locals: int = 0) -> Any:
    return N.GuardProgram(n_locals, 0, [(OP["LOCAL"], i, 0, i, 0, False, None, None) for i in range(n_locals)], [])


def raises(kind: type[BaseException], fn: Callable[..., object], *args: object, **kwargs: object) -> BaseException:
    try:
        fn(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"{fn} did not raise {kind.__name__}")
