"""Names of kernels: what a reader of a profile or a printed plan should see.

Takes the names of the fused operations; gives a name of at most about 50 characters. Always holds: names in one plan
are different.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LONGEST = 44
_SUFFIX = re.compile(r"(_\d+)+$")


def base_name(name: str) -> str:
    """`add_12` and `aten.add.Tensor` are both `add`."""
    name = name.removeprefix("aten.").split(".")[0].strip("_")
    return _SUFFIX.sub("", name) or name


def kernel_name(operations: Iterable[str], number: int) -> str:
    """`fused_mean_sub_layer_norm_3`: the distinct operation names in order, shortened in the middle where there are too
    many."""
    words = list(dict.fromkeys(base_name(name) for name in operations))
    text = "_".join(words)
    if len(text) > LONGEST - 6:
        head: list[str] = []
        tail: list[str] = [words.pop()]
        while words and len("_".join(head + tail)) + len(words[0]) + 1 <= LONGEST - 10:
            head.append(words.pop(0))
        text = "_".join([*head, "etc" if words else "", *tail]).replace("__", "_").strip("_")[: LONGEST - 4]
    prefix = "fused_" if "_" in text or len(words) > 1 else ""
    return f"{prefix}{text}_{number}"
