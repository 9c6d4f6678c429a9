"""Which candidate a linear layer takes, of the library's and a kernel of our own: measured once for a machine, dtype
and shape, and remembered on disk.

Takes what `graph/passes/parameters/pack.py` asks (a `Linear` and the candidates that it may take); gives one of the
candidates. The candidates are tried in turn on made-up numbers, the least time of each counts, and the default keeps
its place unless another is clearly quicker. Always holds: a compile spends at most its budget on measuring; beyond it,
and where one try would take long (so that all candidates are about as quick), the default is taken. Entries of the disk
cache hold a candidate's name; one that is not among the candidates is ignored.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence

from fusewright.base.pytorch import torch
from fusewright.base.records import replace
from fusewright.base.thresholds import (
    BUDGET,
    CLEARLY,
    FAR,
    LARGEST_MEASURED,
    LEAST_MEASURED_WORK,
    LONGEST,
    MUCH,
    MULTIPLICATIONS_A_SECOND,
)
from fusewright.codegen.llvm.emit.target import Target
from fusewright.graph.passes.library.linear_paths import (
    CONVOLUTION,
    MKL,
    ONEDNN,
    OWN,
    PLAIN,
    TURNED,
    Linear,
    candidates_for,
    likely,
)
from fusewright.runtime import host
from fusewright.schedule.plan import UNBOUNDED
from fusewright.select import generated_gemm

ROUNDS = 3

PROBE = Linear(torch.float32, 128, 512, 512, False, True)
"""A product that shows which library multiplies quicker on this processor: 0.4 ms where eager's library is slow."""

_quick_onednn: dict[int, bool] = {}
"""By number of threads."""

_known: dict[tuple[Linear, int, tuple[str, ...]], str] = {}

_winners: dict[tuple[object, ...], str] = {}
"""Of the measurements in which a kernel of ours took part, by `_product`."""


class Chooser:
    """The choices of one compile. `store`: whether the disk may be used; `budget`: seconds; `autotunes`: whether a
    kernel of ours must win against the library's candidates (else a rule says for which shapes it is taken); `target`:
    the processor that is compiled for, None for this one; `library`: whether the library may be chosen at all."""

    def __init__(
        self,
        store: bool = True,
        budget: float = BUDGET,
        longest: float = LONGEST,
        autotunes: bool = False,
        *,
        target: Target | None = None,
        library: bool = True,
    ) -> None:
        self.store = store
        self.left = budget
        self.longest = longest
        self.autotunes = autotunes
        self.target = target
        self.library = library

    def takes_generated(self, linear: Linear) -> bool:
        """Whether a kernel of ours is to compute a product of the plan: because it won, or by the rule where there was
        nothing measured. Where there is no library it is, if there is one."""
        if not self.library:
            return generated_gemm.has_kernel(linear, self.target)
        winner = _winners.get(_product(linear)) if self.autotunes else None
        return generated_gemm.is_likely_quick(linear, self.target) if winner is None else winner == OWN

    def has_quick_onednn(self) -> bool:
        """Whether oneDNN's products in float32 are much quicker than those of eager's library here. Measured once for a
        machine."""
        if not self.library:
            return False
        threads = torch.get_num_threads()
        if threads not in _quick_onednn:
            _quick_onednn[threads] = self.measured_onednn()
        return _quick_onednn[threads]

    def measured_onednn(self) -> bool:
        candidates = (PLAIN, ONEDNN)
        if ONEDNN not in candidates_for(PROBE):
            return False
        quickest = self.remembered(PROBE, candidates)
        if quickest is None:
            best = times(PROBE, candidates)
            quickest = ONEDNN if best[ONEDNN] < MUCH * best[PLAIN] else PLAIN
            if self.store:
                host.store().put(key(PROBE, candidates), "linear layer", quickest.encode())
        return quickest == ONEDNN

    def skinny_rows(self, linear: Linear) -> int:
        """For how many rows a kernel of ours is to be beside the candidate that is chosen, where any number may
        come."""
        if not self.library:
            return UNBOUNDED if generated_gemm.has_kernel(linear, self.target) else 0
        return generated_gemm.most_rows(linear, self.target)

    def __call__(self, linear: Linear, candidates: Sequence[str]) -> str:
        if not self.library:
            return OWN if generated_gemm.has_kernel(linear, self.target) else PLAIN
        own = generated_gemm.is_possible_for(linear, self.target)
        if own and not self.autotunes and generated_gemm.is_likely_quick(linear, self.target):
            return OWN
        in_float = ONEDNN in candidates and linear.dtype is torch.float32
        default = likely(linear, candidates, in_float and self.has_quick_onednn())
        if linear.rows is None or (len(candidates) < 2 and not (own and self.autotunes)):
            return default
        if linear.work < LEAST_MEASURED_WORK:
            return OWN if own and generated_gemm.is_likely_quick(linear, self.target) else PLAIN
        if own and self.autotunes:
            candidates = (*candidates, OWN)
        name = (linear, torch.get_num_threads(), tuple(candidates))
        found = _known.get(name) or self.remembered(linear, candidates)
        if found is None and self.left > 0 and self.is_worth_it(linear):
            started = time.perf_counter()
            found = measured(linear, candidates, default)
            self.left -= time.perf_counter() - started
            if self.store:
                host.store().put(key(linear, candidates), "linear layer", found.encode())
        if found is None:
            return default
        _known[name] = found
        if OWN in candidates:
            _winners[_product(linear)] = found
        return found

    def is_worth_it(self, linear: Linear) -> bool:
        quick = linear.work / MULTIPLICATIONS_A_SECOND[linear.dtype] <= self.longest
        return quick and (
            linear.inner * linear.columns * linear.dtype.itemsize <= LARGEST_MEASURED or self.longest > LONGEST
        )

    def remembered(self, linear: Linear, candidates: Sequence[str]) -> str | None:
        body = host.store().get(key(linear, candidates)) if self.store else None
        candidate = None if body is None else body.decode("ascii", "replace")
        return candidate if candidate in candidates else None


def _product(linear: Linear) -> tuple[object, ...]:
    """What is known of a layer where it is but a product."""
    return (linear.dtype, linear.rows, linear.inner, linear.columns, linear.bias, torch.get_num_threads())


def key(linear: Linear, candidates: Sequence[str]) -> str:
    """Where the disk cache has the choice."""
    facts = f"{host.host_text()}|{torch.get_num_threads()} threads|{linear}|{' '.join(candidates)}"
    return hashlib.sha256(facts.encode()).hexdigest()


def measured(linear: Linear, candidates: Sequence[str], default: str) -> str:
    """The quickest candidate, tried here and now; where the number of rows varies, over a range of them."""
    tried = [times(replace(linear, rows=rows), candidates) for rows in _numbers_of_rows(linear)]
    # The product of the shares of the default's time: each number of rows counts as much as another.
    cost = {one: math.prod(best[one] / best[default] for best in tried) ** (1 / len(tried)) for one in candidates}
    quickest = min(cost, key=lambda candidate: cost[candidate])
    if cost[quickest] < (FAR if _is_far(linear, quickest) else CLEARLY):
        return quickest
    rest = [candidate for candidate in candidates if not _is_far(linear, candidate)]
    other = min(rest, key=lambda candidate: cost[candidate], default=default)
    return other if cost[other] < CLEARLY else default


def _is_far(linear: Linear, candidate: str) -> bool:
    return candidate == ONEDNN and linear.varies and linear.dtype is torch.float32 and not linear.pixels


def _numbers_of_rows(linear: Linear) -> tuple[int | None, ...]:
    """What is tried: where any number may come, a quarter of the example's too."""
    return (max(1, linear.rows // 4), linear.rows) if linear.varies and linear.rows is not None else (linear.rows,)


def times(linear: Linear, candidates: Sequence[str]) -> dict[str, float]:
    """The least seconds of each candidate."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch._C.DisableTorchFunction(),
    ):
        calls = {candidate: _TRIES[candidate](linear, *_numbers(linear)) for candidate in candidates}
        for call in calls.values():
            call()
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(ROUNDS):
            for candidate, call in calls.items():
                begin = time.perf_counter()
                call()
                best[candidate] = min(best[candidate], time.perf_counter() - begin)
    return best


def _numbers(linear: Linear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Input, weight (inner x columns, laid out as the layer's), bias."""
    x = torch.full((linear.rows or 1, linear.inner), 0.5, dtype=linear.dtype, device="cpu")
    shape = (linear.columns, linear.inner) if linear.by_rows else (linear.inner, linear.columns)
    weight = torch.full(shape, 0.25, dtype=linear.dtype, device="cpu")
    bias = torch.full((linear.columns,), 0.125, dtype=linear.dtype, device="cpu") if linear.bias else None
    return x, weight.t() if linear.by_rows else weight, bias


Try = Callable[[], object]


def _plain(linear: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Try:
    out = torch.empty((linear.rows or 1, linear.columns), dtype=linear.dtype, device="cpu")
    if bias is None:
        return lambda: torch.ops.aten.mm.out(x, weight, out=out)
    return lambda: torch.ops.aten.addmm.out(bias, x, weight, out=out)


def _turned(linear: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Try:
    return _plain(linear, x, weight.contiguous(), bias)


def _mkl(linear: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Try:
    dense, run = weight.t().contiguous(), torch.ops.mkl._mkl_linear.default
    packed = torch.ops.mkl._mkl_reorder_linear_weight.default(dense, linear.rows)
    return lambda: run(x, packed, dense, bias, linear.rows)


def _onednn(linear: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Try:
    run = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.t().contiguous(), linear.rows)
    return lambda: run(x, packed, bias, "none", [], "")


def _convolution(linear: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Try:
    assert linear.image is not None
    batch, height, width = linear.image
    images = x.view(batch, height, width, linear.inner).permute(0, 3, 1, 2)
    run = torch.ops.mkldnn._convolution_pointwise.default
    filters = weight.t()[:, :, None, None]
    packed = torch.ops.mkldnn._reorder_convolution_weight.default(
        filters, [0, 0], [1, 1], [1, 1], 1, list(images.shape)
    )
    return lambda: run(images, packed, bias, [0, 0], [1, 1], [1, 1], 1, "none", [], "")


def _own(linear: Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Try:
    return generated_gemm.trial(linear, x, weight.t().contiguous(), bias)


_TRIES: dict[str, Callable[[Linear, torch.Tensor, torch.Tensor, torch.Tensor | None], Try]] = {
    PLAIN: _plain,
    TURNED: _turned,
    MKL: _mkl,
    ONEDNN: _onednn,
    CONVOLUTION: _convolution,
    OWN: _own,
}
