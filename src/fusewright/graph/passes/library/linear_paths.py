"""The library's candidates to compute a linear layer by parameters, and which one is likely the quickest for a shape.

Takes a `Linear` (dtype and sizes of one matrix product by a constant matrix); `candidates_for` gives the names of the
candidates that exist for it, and `likely` the one that measurements on several shapes favour.
`graph/passes/parameters/pack.py` builds graphs of a candidate, `select/linear.py` measures them. Always holds: every
candidate computes the same sums in the same precision (NaN and infinities included); the order differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusewright.base.pytorch import torch
from fusewright.base.records import dataclass
from fusewright.base.thresholds import CACHED, FEW_CHANNELS, FEWER_ROWS, LARGEST_TWICE, SKINNY_ROWS, SMALLEST


@dataclass(frozen=True, slots=True)
class Linear:
    """rows x inner times inner x columns. rows: None when it is not known. varies: any number of rows may come, `rows`
    is an example. by_rows: each output's weights lie side by side, as in
    nn.Linear; else each input's do. image: (batch, height, width), whose product is `rows`, of a convolution by 1x1
    over channels-last images, which is such a product too; pixels: of such a convolution over images of any size."""

    dtype: torch.dtype
    rows: int | None
    inner: int
    columns: int
    bias: bool
    by_rows: bool
    image: tuple[int, int, int] | None = None
    varies: bool = False
    pixels: bool = False

    @property
    def work(self) -> int:
        """Multiplications, those of one row when the rows are not known."""
        return (self.rows or 1) * self.inner * self.columns

    @property
    def least_packed(self) -> int:
        """Rows from which MKL's packed matrix is likely quicker than the operator as it is."""
        return SKINNY_ROWS if self.inner * self.columns < CACHED else FEWER_ROWS + 1


Choose = Callable[[Linear, Sequence[str]], str]

SkinnyRows = Callable[[Linear], int]
"""For how many rows a kernel of ours is beside the library's candidate, where any number may come."""


def no_rows(linear: Linear) -> int:
    return 0


PLAIN, TURNED, MKL, ONEDNN, CONVOLUTION, OWN = "plain", "turned", "mkl", "onednn", "convolution", "own"
"""The operator as it is; the same with each input's weights side by side; MKL's packed matrix, which is made for one
number of rows (where the rows vary, for the one that usually comes; any other takes the weights turned); oneDNN's;
oneDNN's convolution; a kernel of ours, which reads each output's weights side by side (select/generated_gemm.py)."""


def _onednn_takes(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32 or (dtype is torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()))


def candidates_for(linear: Linear) -> tuple[str, ...]:
    """The candidates that this PyTorch has for it on a CPU; the first is `plain`, or `convolution` for images."""
    found = [PLAIN] if linear.image is None else [CONVOLUTION, PLAIN]
    if min(linear.columns, linear.inner) >= SMALLEST:
        if linear.by_rows and linear.dtype is torch.float32:
            found.append(TURNED)
        if linear.dtype is torch.float32 and linear.rows is not None and torch.backends.mkl.is_available():
            large = linear.inner * linear.columns * linear.dtype.itemsize > LARGEST_TWICE
            if not linear.varies or not (large or linear.rows < linear.least_packed):
                found.append(MKL)
        if _onednn_takes(linear.dtype):
            found.append(ONEDNN)
    return tuple(found)


def likely(linear: Linear, candidates: Sequence[str], quick_onednn: bool = False) -> str:
    """The candidate to take without measuring. quick_onednn: whether oneDNN's products in float32 are much quicker than
    eager's on this processor."""
    if quick_onednn and linear.dtype is torch.float32 and ONEDNN in candidates:
        return CONVOLUTION if linear.image is not None and min(linear.inner, linear.columns) < FEW_CHANNELS else ONEDNN
    if linear.image is not None:
        if linear.rows is not None and linear.rows < SKINNY_ROWS:
            return (
                PLAIN  # a call of oneDNN's convolution takes 75 to 100 microseconds beside its work, a product 5 to 10
            )
        if min(linear.inner, linear.columns) < FEW_CHANNELS:
            return TURNED if TURNED in candidates and not linear.bias else CONVOLUTION
        return MKL if MKL in candidates else CONVOLUTION
    if linear.pixels and min(linear.inner, linear.columns) >= FEW_CHANNELS and MKL in candidates:
        # ResNet-50 where one size stays: 0.97 and 0.90 of static code's speed, with oneDNN's products 0.92 and 0.84
        return MKL
    if linear.pixels and ONEDNN in candidates:
        return ONEDNN
    if linear.varies and linear.dtype is torch.float32 and TURNED in candidates:
        return PLAIN if linear.rows is not None and linear.rows < SKINNY_ROWS else MKL if MKL in candidates else TURNED
    if linear.dtype is torch.float32:
        if linear.rows is not None and linear.rows < linear.least_packed:
            return PLAIN
        return MKL if MKL in candidates else ONEDNN if ONEDNN in candidates else PLAIN
    return ONEDNN if ONEDNN in candidates else PLAIN
