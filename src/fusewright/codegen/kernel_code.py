"""A generated kernel as the runtime sees it: a key, a text, and how to call it.

The machine function's C signature is
    void kernel(void *const *buffers, const int64_t *sizes, int64_t begin, int64_t end, int64_t *status)
It performs iterations begin..end-1 of the kernel's parallel domain, whose extent is `extent` (a Dim over `sizes`).
`buffers` are data pointers in the order of `buffers`; `sizes` the values of `sizes`, in order; `*status` is set
non-zero when an index was out of range, or, in a kernel with checks, an access outside its buffer. Different ranges of
one kernel may run at the same time on different threads.
"""

from __future__ import annotations

from fusewright.base.location import Location
from fusewright.base.records import dataclass
from fusewright.sizes.expressions import Dim


def symbol_of(key: str) -> str:
    """The name of the machine function of a kernel with this key."""
    return f"fw_{key[:16]}"


@dataclass(frozen=True, slots=True)
class KernelCode:
    """key: content hash of what decides the machine code (two kernels with one key share it). symbol: function name in
    the module.

    grain: fewest iterations of the parallel domain that are worth a thread (from a cost model of bytes and operations).
    """

    name: str
    key: str
    symbol: str
    source: str
    buffers: tuple[str, ...]
    sizes: tuple[Dim, ...]
    extent: Dim
    grain: int
    locations: tuple[Location, ...] = ()
    origins: tuple[str, ...] = ()
