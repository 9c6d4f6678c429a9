"""Every row of the table of library operators, called through its C function, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from fusewright.codegen.call_plan_types import CCall
from fusewright.codegen.extern_calls import _FREES_SIZES
from fusewright.loops.externs import EXTERNS, placement
from fusewright.loops.ir import Buffer
from fusewright.runtime import launch
from tests.runtime.plans import Schedule, whole

aten, mkldnn, mkl = torch.ops.aten, torch.ops.mkldnn, torch.ops.mkl


def operator(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def f(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def symmetric(n: int) -> torch.Tensor:
    a = f(n, n)
    return a @ a.T + n * torch.eye(n)


def pooled(op: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    return op(x, *args)[1]


def packed_conv() -> torch.Tensor:
    return torch._C._nn.mkldnn_reorder_conv2d_weight(f(4, 3, 3, 3).to_mkldnn(), [1, 1], [1, 1], [1, 1], 1, [2, 3, 8, 8])


def attention() -> tuple[torch.Tensor, ...]:
    return f(2, 4, 8, 16), f(2, 4, 8, 16), f(2, 4, 8, 16)


def attention_backward() -> tuple[Any, ...]:
    q, k, v = attention()
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return f(*out.shape), q, k, v, out, lse, 0.0, True


def geqrf_of(n: int) -> tuple[torch.Tensor, ...]:
    return aten.geqrf(f(n, n))


SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "aten::randint.low": lambda: (-(2**63), 2**63 - 1, [], {"dtype": torch.int64, "device": torch.device("cpu")}),
    "aten::mm": lambda: (f(5, 7), f(7, 3)),
    "aten::addmm": lambda: (f(3), f(5, 7), f(7, 3), {"beta": 0.5, "alpha": 2}),
    "aten::bmm": lambda: (f(2, 5, 7), f(2, 7, 3)),
    "aten::baddbmm": lambda: (f(2, 5, 3), f(2, 5, 7), f(2, 7, 3)),
    "aten::convolution": lambda: (f(2, 3, 8, 8), f(4, 3, 3, 3), f(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "aten::convolution_backward": lambda: (
        f(2, 4, 8, 8), f(2, 3, 8, 8), f(4, 3, 3, 3), [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True],
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda: (*attention(), 0.0, True),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "aten::addmv": lambda: (f(5), f(5, 7), f(7), {"beta": 2, "alpha": 0.5}),
    "aten::addbmm": lambda: (f(5, 3), f(2, 5, 7), f(2, 7, 3)),
    "aten::_cdist_forward": lambda: (f(5, 4), f(6, 4), 2.0, None),
    "aten::_cdist_backward": lambda: (f(5, 6), f(5, 4), f(6, 4), 2.0, torch.rand(5, 6) + 1),
    "aten::_trilinear": lambda: (f(3, 4, 2), f(3, 4, 2), f(3, 4, 2), [], [], [], [2]),
    "aten::max_pool2d_with_indices": lambda: (f(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False),
    "aten::max_pool2d_with_indices_backward": lambda: (
        lambda x: (f(2, 3, 4, 4), x, [2, 2], [2, 2], [0, 0], [1, 1], False, pooled(aten.max_pool2d_with_indices, x, [2, 2]))
    )(f(2, 3, 8, 8)),
    "aten::max_pool3d_with_indices": lambda: (f(1, 2, 4, 4, 4), [2, 2, 2]),
    "aten::max_pool3d_with_indices_backward": lambda: (
        lambda x: (
            f(1, 2, 2, 2, 2), x, [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False, pooled(aten.max_pool3d_with_indices, x, [2, 2, 2])
        )
    )(f(1, 2, 4, 4, 4)),
    "aten::avg_pool2d": lambda: (f(2, 3, 8, 8), [3, 3], [2, 2], [1, 1], True, False, 7),
    "aten::avg_pool2d_backward": lambda: (f(2, 3, 4, 4), f(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], False, True, None),
    "aten::avg_pool3d": lambda: (f(1, 2, 4, 4, 4), [2, 2, 2]),
    "aten::avg_pool3d_backward": lambda: (f(1, 2, 2, 2, 2), f(1, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
    "aten::_adaptive_avg_pool2d": lambda: (f(2, 3, 8, 8), [3, 3]),
    "aten::_adaptive_avg_pool2d_backward": lambda: (f(2, 3, 3, 3), f(2, 3, 8, 8)),
    "aten::_adaptive_avg_pool3d": lambda: (f(2, 3, 8, 8, 8), [3, 3, 3]),
    "aten::_adaptive_avg_pool3d_backward": lambda: (f(2, 3, 3, 3, 3), f(2, 3, 8, 8, 8)),
    "aten::adaptive_max_pool2d": lambda: (f(2, 3, 8, 8), [3, 3]),
    "aten::adaptive_max_pool2d_backward": lambda: (
        lambda x: (f(2, 3, 3, 3), x, pooled(aten.adaptive_max_pool2d, x, [3, 3]))
    )(f(2, 3, 8, 8)),
    "aten::fractional_max_pool2d": lambda: (f(2, 3, 8, 8), [2, 2], [3, 3], torch.rand(2, 3, 2)),
    "aten::fractional_max_pool2d_backward": lambda: (
        lambda x, s: (f(2, 3, 3, 3), x, [2, 2], [3, 3], pooled(aten.fractional_max_pool2d, x, [2, 2], [3, 3], s))
    )(f(2, 3, 8, 8), torch.rand(2, 3, 2)),
    "aten::max_unpool2d": lambda: (lambda o, i: (o, i, [8, 8]))(*aten.max_pool2d_with_indices(f(2, 3, 8, 8), [2, 2])),
    "aten::grid_sampler_2d_backward": lambda: (f(2, 3, 5, 5), f(2, 3, 8, 8), torch.rand(2, 5, 5, 2) - 0.5, 0, 0, False, [True, True]),
    "aten::grid_sampler_3d": lambda: (f(1, 2, 4, 4, 4), torch.rand(1, 3, 3, 3, 3) - 0.5, 0, 0, False),
    "aten::grid_sampler_3d_backward": lambda: (
        f(1, 2, 3, 3, 3), f(1, 2, 4, 4, 4), torch.rand(1, 3, 3, 3, 3) - 0.5, 0, 0, False, [True, True]
    ),
    "aten::upsample_linear1d_backward": lambda: (f(2, 3, 8), [8], [2, 3, 4], False, None),
    "aten::upsample_bicubic2d_backward": lambda: (f(2, 3, 8, 8), [8, 8], [2, 3, 4, 4], True, 2.0, None),
    "aten::upsample_trilinear3d_backward": lambda: (f(1, 2, 4, 4, 4), [4, 4, 4], [1, 2, 2, 2, 2], False, None, None, None),
    "aten::replication_pad1d_backward": lambda: (f(2, 3, 10), f(2, 3, 8), [1, 1]),
    "aten::replication_pad2d_backward": lambda: (f(2, 3, 10, 10), f(2, 3, 8, 8), [1, 1, 1, 1]),
    "aten::_embedding_bag": lambda: (f(10, 4), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2]), False, 0, False, None, False, -1),
    "aten::_embedding_bag_forward_only": lambda: (f(10, 4), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2]), False, 0, False, f(4)),
    "aten::cat": lambda: ([f(2, 3), f(4, 3), f(1, 3)], 0),
    "aten::cumsum": lambda: (f(4, 5), 1),
    "aten::cumprod": lambda: (f(4, 5), -1),
    "aten::cummax": lambda: (f(4, 5), 1),
    "aten::cummin": lambda: (f(4, 5), 0),
    "aten::logcumsumexp": lambda: (f(4, 5), 0),
    "aten::topk": lambda: (f(4, 9), 3, -1, True, True),
    "aten::sort": lambda: (f(4, 9), 1, True),
    "aten::sort.stable": lambda: (f(4, 9), {"stable": True, "dim": 1, "descending": True}),
    "aten::kthvalue": lambda: (f(4, 9), 3, 1, True),
    "aten::mode": lambda: (torch.randint(0, 3, (4, 9)), 1, False),
    "aten::median": lambda: (f(4, 9),),
    "aten::nanmedian": lambda: (f(4, 9),),
    "aten::histc": lambda: (f(40), 10, -1, 1),
    "aten::masked_scatter": lambda: (f(4, 5), torch.rand(4, 5) > 0.5, f(20)),
    "aten::searchsorted.Tensor": lambda: (f(10).sort()[0], f(4), {"out_int32": True, "side": "right"}),
    "aten::bucketize.Tensor": lambda: (f(10), f(4).sort()[0], {"right": True}),
    "aten::cholesky_inverse": lambda: (torch.linalg.cholesky(symmetric(4)), False),
    "aten::cholesky_solve": lambda: (f(4, 2), torch.linalg.cholesky(symmetric(4)), False),
    "aten::triangular_solve": lambda: (f(4, 2), symmetric(4).triu().contiguous(), True, False, False),
    "aten::geqrf": lambda: (f(4, 4),),
    "aten::ormqr": lambda: (*geqrf_of(4), f(4, 3), True, True),
    "aten::lu_unpack": lambda: (*torch.linalg.lu_factor(f(4, 4)), True, True),
    "aten::_fft_r2c": lambda: (f(4, 8), [1], 0, True),
    "aten::_fft_c2c": lambda: (torch.randn(4, 8, dtype=torch.complex64), [0, 1], 1, False),
    "aten::polar": lambda: (torch.rand(4), f(4)),
    "aten::native_dropout": lambda: (f(40), 0.5, True),
    "mkldnn::_convolution_pointwise": lambda: (
        f(2, 3, 8, 8), packed_conv(), f(4), [1, 1], [1, 1], [1, 1], 1, "relu", [], ""
    ),
    "mkldnn::_convolution_pointwise.binary": lambda: (
        f(2, 3, 8, 8), f(2, 4, 8, 8).contiguous(memory_format=torch.channels_last), packed_conv(), f(4),
        [1, 1], [1, 1], [1, 1], 1, "add", 1.0, "relu", [], None,
    ),
    "mkldnn::_convolution_transpose_pointwise": lambda: (
        f(2, 3, 8, 8), f(3, 4, 3, 3), f(4), [1, 1], [0, 0], [1, 1], [1, 1], 1, "none", [], "",
    ),
    "mkldnn::_linear_pointwise": lambda: (
        f(4, 8), torch.ops.mkldnn._reorder_linear_weight(f(6, 8), 4), f(6), "gelu", [], "tanh"
    ),
    "mkldnn::_linear_pointwise.binary": lambda: (
        f(4, 8), f(4, 6), torch.ops.mkldnn._reorder_linear_weight(f(6, 8), 4), None, "add"
    ),
    "mkl::_mkl_linear": lambda: (lambda w: (f(4, 8), torch.ops.mkl._mkl_reorder_linear_weight(w, 4), w, f(6), 4))(f(6, 8)),
}  # fmt: skip


def split(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample's positional arguments, and the keyword arguments that it may end with."""
    return (args[:-1], args[-1]) if isinstance(args[-1], dict) else (args, {})


def through_plan(target: Any, args: tuple[Any, ...], expected: Any, **options: Any) -> tuple[list[Any], Any]:
    """The results of `target` called by a plan, and the call plan itself. Opaque tensors travel as constants."""
    s = Schedule()
    inputs: list[torch.Tensor] = []

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = f"a{len(s.plan.buffers)}"
            if value.layout is not torch.strided:
                s.plan.constants += (value,)
                number = len(s.plan.constants) - 1
                made = Buffer(
                    name, tuple(value.shape), (1,) * value.dim(), value.dtype, value.device, "constant", number
                )
                s.plan.buffers[name] = made
                return whole(made)
            inputs.append(value)
            return whole(s.input(name, *value.shape, dtype=value.dtype, stride=value.stride()))
        if isinstance(value, (list, tuple)):
            return tuple(convert(item) for item in value)
        return value

    args, keywords = split(args)
    converted = tuple(convert(value) for value in args)
    results = expected if isinstance(expected, (tuple, list)) else (expected,)
    out = [
        s.output(f"r{i}", *result.shape, dtype=result.dtype, stride=result.stride())
        if isinstance(result, torch.Tensor)
        else None
        for i, result in enumerate(results)
    ]
    s.call(target, *converted, out=out, **keywords)
    plan = s.build(**options)
    native = launch.load(plan, {})
    torch.manual_seed(1)
    first = native(*inputs)
    torch.manual_seed(1)
    again = native(*inputs)
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(first, again))
    return list(first), plan


@pytest.mark.parametrize("name", sorted(EXTERNS))
def test_row_equals_eager(name: str) -> None:
    row, target = EXTERNS[name], operator(name)
    if not launch.is_available(row.symbol) and TorchVersion(torch.__version__) < "2.13":
        pytest.skip(f"this PyTorch lacks {row.symbol}")
    assert launch.is_available(row.symbol), f"this PyTorch lacks {row.symbol}"
    args = SAMPLES[name]()
    torch.manual_seed(1)
    with torch.no_grad():
        positional, keywords = split(args)
        expected = target(*positional, **keywords)
    results, plan = through_plan(target, args, expected)
    symbols = [] if _FREES_SIZES and "SymInt[]?" in str(target._schema) else [row.symbol]
    assert [step.symbol for step in plan.steps if isinstance(step, CCall)] == symbols
    wanted = [
        t for t in (expected if isinstance(expected, (tuple, list)) else (expected,)) if isinstance(t, torch.Tensor)
    ]
    assert len(results) == len(wanted)
    for result, want in zip(results, wanted):
        torch.testing.assert_close(result, want, rtol=0, atol=0, equal_nan=True)
        assert result.stride() == want.stride()


def test_every_row_has_a_sample() -> None:
    assert set(SAMPLES) == set(EXTERNS)


def test_out_rows_are_placed_only_for_one_dtype() -> None:
    class Tensorish:
        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

    half, single = Tensorish(torch.bfloat16), Tensorish(torch.float32)
    assert placement(aten.mm.default, (single, single)) == "out"
    assert placement(aten.mm.default, (half, single)) == "returned"
    assert placement(aten.convolution.default, (single, single)) == "returned"
    assert placement(aten.randint.low, (0, 2, ())) == "out"
    assert placement(len, ()) == "returned"


def test_an_out_row_whose_function_is_missing_goes_through_python() -> None:
    for target, args in (
        (aten.mm.default, (f(5, 7), f(7, 3))),
        (aten.randint.low, (3, 2**40, [4], {"dtype": torch.int64, "device": torch.device("cpu")})),
    ):
        torch.manual_seed(1)
        positional, keywords = split(args)
        expected = target(*positional, **keywords)
        results, plan = through_plan(target, args, expected, available=lambda symbol: False)
        assert not any(isinstance(step, CCall) for step in plan.steps)
        assert torch.equal(results[0], expected)


def test_integer_matmul_with_scalars_goes_through_python() -> None:
    a, b, c = (torch.randint(0, 5, shape) for shape in ((3, 4), (3, 5), (5, 4)))
    expected = torch.addmm(a, b, c, beta=2, alpha=3)
    results, plan = through_plan(aten.addmm.default, (a, b, c, {"beta": 2, "alpha": 3}), expected)
    assert not any(isinstance(step, CCall) for step in plan.steps)
    assert torch.equal(results[0], expected)
