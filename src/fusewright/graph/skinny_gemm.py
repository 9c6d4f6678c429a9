"""A note on a matrix product over any number of rows: with few rows it may as well be made of other operands.

`skinny_gemm(product, x, weight, bias, most)` is `product`; for 1 to `most` rows it may be computed as x @ weight (+
bias) instead, which is the same but for rounding. The lowering joins it with the operator that made the product. Always
holds: leaving the note out changes nothing.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("fusewright", "FRAGMENT")
_LIBRARY.define("skinny_gemm(Tensor product, Tensor x, Tensor weight, Tensor? bias, int most) -> Tensor")
SKINNY_GEMM = torch.ops.fusewright.skinny_gemm.default


def _product(
    product: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, most: int
) -> torch.Tensor:
    return product.clone()


_LIBRARY.impl("skinny_gemm", _product, "CPU")
_LIBRARY.impl("skinny_gemm", _product, "Meta")
