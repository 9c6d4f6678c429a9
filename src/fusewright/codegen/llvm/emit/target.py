"""The processor that code is generated for, as far as generation cares.

Takes a feature map and names (module.py asks LLVM for the host's); gives a frozen `Target`. Always holds: `vector_bits`
is the width of one register, and masked loads and stores are legal on every target (LLVM expands them where the
processor has none).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusewright.base.records import dataclass, field


@dataclass(frozen=True, slots=True)
class Target:
    """`cpu` and `features` go to LLVM as they are; the flags say which instructions may be asked for by name."""

    triple: str
    cpu: str
    features: str
    vector_bits: int
    x86: bool
    scalef: bool  # AVX-512 vscalefps: x * 2^n with correct overflow and subnormals
    masks: bool  # mask registers: a masked access costs what a plain one does
    has_symbol: Callable[[str], bool] = field(compare=False)  # whether the process exports this function

    @property
    def multiplies_adds(self) -> bool:
        """Whether a fused multiply-add is certain: with AVX2 and later, and on AArch64. Without it there are no kernels
        of products, which would be slow and round otherwise."""
        return not self.x86 or self.vector_bits >= 256

    @property
    def registers(self) -> int:
        """Of vectors."""
        return 32 if not self.x86 or self.vector_bits >= 512 else 16

    def lanes(self, size: int) -> int:
        """Elements of `size` bytes in one register."""
        return self.vector_bits // (8 * size)


@dataclass(frozen=True, slots=True)
class Level:
    """A kind of processor by name: LLVM's words for it, and its features."""

    triple: str
    cpu: str
    features: tuple[str, ...]


_V2 = ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS: dict[str, Level] = {
    "x86-64-v2": Level("x86_64-unknown-linux-gnu", "x86-64-v2", _V2),
    "x86-64-v3": Level("x86_64-unknown-linux-gnu", "x86-64-v3", _V3),
    "x86-64-v4": Level("x86_64-unknown-linux-gnu", "x86-64-v4", _V4),
    "aarch64": Level("aarch64-unknown-linux-gnu", "generic", ("neon",)),
}


def describe(triple: str, cpu: str, features: Mapping[str, bool], has_symbol: Callable[[str], bool]) -> Target:
    """The target of a host whose LLVM feature map is `features`, in a process that exports what `has_symbol` says."""
    x86 = triple.startswith(("x86_64", "i686"))
    avx512 = all(features.get(name, False) for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl"))
    if x86:
        bits = 512 if avx512 else 256 if features.get("avx2", False) and features.get("fma", False) else 128
    else:
        bits = 128
    text = ",".join(("+" if on else "-") + name for name, on in sorted(features.items()) if name)
    return Target(
        triple=triple,
        cpu=cpu,
        features=text,
        vector_bits=bits,
        x86=x86,
        scalef=avx512,
        masks=avx512,
        has_symbol=has_symbol,
    )
