"""What is said of an operator's results (rule, else meta kernel with the CPU's corrections) against the real results.

Watches every operator that PyTorch's samples dispatch, forward and backward: of each entry that a row of `rules/cpu.py` or `rules/corrections.py` was written for,
and of a spread of the others; `pytest -m sweep` watches all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusewright
from fusewright.operators.derive import derive
from fusewright.operators.meta_kernels import type_of
from fusewright.operators.rules.corrections import CORRECTIONS
from fusewright.operators.rules.cpu import RULES
from fusewright.sizes.tensor_type import TensorType
from tests.ops.cases import Case, operator_cases, operator_name, supports
from tests.ops.opinfo import op_db

_UNTYPED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
aten = torch.ops.aten
_SKIPPED = {
    aten.set_.source_Storage_storage_offset,
    aten.set_.source_Tensor,
    aten._local_scalar_dense.default,
    aten.detach.default,
}

NAMES = """
native_batch_norm _native_batch_norm_legit _batch_norm_with_update nn.functional.embedding_bag linalg.svd svd linalg.eig
nn.functional.max_unpool2d.grad nonzero_static fft.rfftn fft.irfft2 fft.hfft2 fft.ihfftn fft.fftn geqrf nn.functional.multi_margin_loss
nn.functional.multilabel_margin_loss nn.functional.fractional_max_pool3d histogram histogramdd nn.functional.ctc_loss index_add
""".split()


class Watch(TorchDispatchMode):
    """Runs each operator and notes where the said types are not the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.seen: Counter[object] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        plain = not any(
            t.layout != torch.strided or t.is_nested or t.is_quantized or t.is_conj() or t.is_neg() for t in tensors
        )
        untyped = (
            func in _SKIPPED
            or kwargs.get("generator") is not None
            or (_UNTYPED & set(func.tags) and func is not aten._ctc_loss.default)
        )
        said: object = None
        if plain and not untyped:
            lowered = pytree.tree_map(
                lambda t: type_of(t) if isinstance(t, torch.Tensor) else t, (list(args), dict(kwargs))
            )
            try:
                said = derive(func, *lowered)
            except NotImplementedError:  # no meta kernel: the recorder breaks the graph
                untyped = True
        result = func(*args, **kwargs)
        if plain and not untyped:
            self.seen[func] += 1
            self.compare(func, said, result)
        return result

    def compare(self, func: object, said: object, real: object) -> None:
        if isinstance(real, (list, tuple)):
            assert isinstance(said, (list, tuple)) and len(said) == len(real), func
            for a, b in zip(said, real, strict=True):
                self.compare(func, a, b)
        elif isinstance(real, torch.Tensor):
            want = type_of(real)
            same = isinstance(said, TensorType) and (said.shape, said.dtype, said.device) == (
                want.shape,
                want.dtype,
                want.device,
            )
            if not same or (said.stride != want.stride and real.numel()):
                self.wrong.append(f"{func}: said {said} with strides {said and said.stride}, is {want} with {want.stride}")


@pytest.fixture(autouse=True)
def quick_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own seeding also notes a stack trace for each kind of device that is absent: most of the time that samples take."""
    monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)


def watch(op: object, dtype: torch.dtype, limit: int, into: Watch) -> None:
    for form in ("function", "gradient"):
        if supports(op, dtype, form):
            for case in operator_cases(op, dtype, form, limit):
                run(case, into)


def run(case: Case, into: Watch) -> None:
    with warnings.catch_warnings(), into:
        warnings.simplefilter("ignore")
        case.make(lambda function: function)(*case.args, **case.kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_corrected_operators(name: str) -> None:
    seen = Watch()
    for op in op_db:
        if name in (op.name, operator_name(op)):
            for dtype in (torch.float32, torch.bfloat16, torch.complex64):
                watch(op, dtype, 8, seen)
    assert not seen.wrong
    assert any(op in CORRECTIONS or op in RULES for op in seen.seen) or name == "histogram"


def relaid(value: object, how: str) -> object:
    """A tensor of the same shape in another layout."""
    if not isinstance(value, torch.Tensor) or not value.ndim or value.layout != torch.strided or value.is_quantized:
        return value
    plain = value.detach()
    if how == "reversed":
        made = plain.permute(*reversed(range(plain.ndim))).contiguous().permute(*reversed(range(plain.ndim)))
    elif how == "last first":
        made = plain.movedim(0, -1).contiguous().movedim(-1, 0)
    elif how == "first last":  # (channels last, where there is no batch)
        made = plain.movedim(min(1, plain.ndim - 1), -1).contiguous().movedim(-1, min(1, plain.ndim - 1))
    elif how == "gaps":
        made = plain.repeat_interleave(2, -1)[..., ::2]
    else:
        made = plain.narrow(0, 0, min(1, plain.shape[0])).expand(plain.shape)
    return made.requires_grad_(value.requires_grad)


def watch_relaid(op: object, dtype: torch.dtype, limit: int, into: Watch) -> None:
    for form, how in itertools.product(("function", "gradient"), ("reversed", "last first", "first last", "gaps", "expanded")):
        for case in operator_cases(op, dtype, form, limit) if supports(op, dtype, form) else ():
            args, kwargs = pytree.tree_map(lambda value: relaid(value, how), (case.args, case.kwargs))
            with contextlib.suppress(*REFUSED):  # eager's own: not every layout will do
                run(replace(case, args=args, kwargs=kwargs), into)


REFUSED = (RuntimeError, ValueError, NotImplementedError)
RELAID = """
angle pow ldexp normal nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.mse_loss nn.functional.pad.reflect
nn.functional.pad.replicate nn.functional.max_pool3d nn.functional.binary_cross_entropy nn.functional.soft_margin_loss
nn.functional.pixel_shuffle nn.functional.channel_shuffle nn.functional.nll_loss nn.functional.conv3d nn.functional.conv_transpose3d
quantile mvlgamma
""".split()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", RELAID)
def test_operators_over_other_layouts(name: str) -> None:
    seen = Watch()
    for op in op_db:
        if name in (op.name, operator_name(op)):
            for dtype in (torch.float32, torch.bfloat16, torch.complex64):
                watch_relaid(op, dtype, 3, seen)
    assert not seen.wrong
    assert seen.seen


@pytest.mark.sweep
@pytest.mark.parametrize("op", op_db, ids=operator_name)
def test_every_operator_over_other_layouts(op: object) -> None:
    seen = Watch()
    for dtype in (torch.float32, torch.int64, torch.complex64):
        watch_relaid(op, dtype, 6, seen)
    assert not seen.wrong


LAYOUTS = {
    "dense": lambda: torch.rand(4, 3),
    "transposed": lambda: torch.rand(3, 4).t(),
    "row": lambda: torch.rand(3),
    "column": lambda: torch.rand(4, 1),
    "gaps": lambda: torch.rand(4, 6)[:, ::2],
    "expanded": lambda: torch.rand(1, 3).expand(4, 3),
    "turned row": lambda: torch.rand(1, 1, 3, 1).permute(0, 3, 1, 2),
}
BACKWARD = (
    aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.leaky_relu_backward.default,
    aten.mish_backward.default, aten.rrelu_with_noise_backward.default, aten.softplus_backward.default, aten.threshold_backward.default,
)  # fmt: skip
ARGUMENTS = {
    aten.elu_backward.default: lambda a, b: (a, 1, 1, 1, False, b), aten.softplus_backward.default: lambda a, b: (a, b, 1, 20),
    aten.leaky_relu_backward.default: lambda a, b: (a, b, 0.5, False), aten.threshold_backward.default: lambda a, b: (a, b, 0),
    aten.rrelu_with_noise_backward.default: lambda a, b: (a, b, b, 0.1, 0.3, False, False),
}  # fmt: skip
ITERATED = (
    aten.copysign.Tensor, aten.heaviside.default, aten.logaddexp.default, aten.logical_and.default, aten.xlogy.Tensor,
    aten.special_xlog1py.default, aten.logit_backward.default, aten.native_dropout_backward.default, aten.pow.Scalar,
    aten.polar.default, aten.rsub.Tensor, aten.clamp_min.Tensor, aten.igamma.default, aten._add_relu.Tensor, *BACKWARD,
)  # fmt: skip
OF_ONE_DTYPE = (aten.heaviside.default, aten.logaddexp.default, aten.logit_backward.default, aten.polar.default, *BACKWARD)


@pytest.mark.parametrize("op", ITERATED, ids=str)
def test_operands_laid_out_otherwise(op: torch._ops.OpOverload) -> None:
    seen = Watch()
    for first, second in itertools.product(LAYOUTS.values(), repeat=2):
        a, b = first(), second()
        with seen:
            if op is aten.pow.Scalar:
                op(2.0, b)
            elif op is aten.native_dropout_backward.default:
                op(a, b > 0.5, 2.0)
            else:
                op(*ARGUMENTS.get(op, lambda *given: given)(a, b))
                if op not in OF_ONE_DTYPE:
                    op(a, b.long())
    assert not seen.wrong
    assert seen.seen[op]


OF_ONE_TENSOR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "angle": torch.angle, "integers angle": lambda x: torch.angle(x.long()), "abs": lambda x: aten.abs.default(x.to(torch.complex64)),
    "conj": lambda x: aten._conj_physical.default(x.to(torch.complex64)), "isinf": lambda x: aten.isinf.default(x.long()),
    "polygamma": lambda x: torch.polygamma(2, x), "celu": lambda x: aten.celu.default(x, 2.0), "decimals": lambda x: x.round(decimals=1),
    "bools at most": lambda x: aten.clamp_max.default(x > 0, 2), "integers hardtanh": lambda x: aten.hardtanh.default(x.long()),
    "complex pow": lambda x: x.to(torch.complex64) ** 2, "masked_fill": lambda x: x.to(torch.complex64).masked_fill(x > 0.5, 1j),
    "shift": lambda x: aten.bitwise_left_shift.Tensor_Scalar(x.long(), 2), "copysign": lambda x: aten.copysign.Scalar(x, 2.0),
    "normal of deviations": lambda x: torch.normal(1.0, x.abs()), "normal of means": lambda x: torch.normal(x, 1.0), "poisson": lambda x: torch.poisson(x.abs()),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 1), "dirichlet": lambda x: torch._sample_dirichlet(x.abs() + 1), "binomial": lambda x: torch.binomial(x.abs().ceil(), x * 0),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ONE_TENSOR)
def test_one_operand_laid_out_otherwise(name: str) -> None:
    seen = Watch()
    for make in LAYOUTS.values():
        x = make()
        with seen:
            OF_ONE_TENSOR[name](x)
    assert not seen.wrong
    assert seen.seen


OF_OTHERS: dict[str, Callable[[], Any]] = {
    "addr": lambda: torch.addr(torch.tensor(1.0).double(), torch.rand(3), torch.rand(4)),
    "normal": lambda: (torch.normal(torch.rand(3), torch.rand(3).double()), torch.normal(torch.rand(4, 3).double(), torch.rand(3))),
    "rrelu_with_noise_backward": lambda: [
        aten.rrelu_with_noise_backward.default(a, b, c, 0.1, upper, training, False)
        for a, b, c in itertools.product((torch.rand(4, 3), torch.rand(3, 4).double().t()), repeat=3)
        for upper, training in ((0.1, True), (0.3, True), (0.3, False))
    ],
    "convolution_backward": lambda: aten.convolution_backward.default(
        torch.rand(2, 4, 4), torch.rand(2, 4, 6), torch.rand(4, 1, 3).half(), [4], [1], [0], [1], False, [0], 4, [True] * 3
    ),
    "soft_margin_loss_backward": lambda: [
        aten.soft_margin_loss_backward.default(a, b, c, 0)
        for sizes in ((4, 3), (1, 3), (2, 1))
        for a, b, c in itertools.product((torch.rand(sizes), torch.rand(sizes[::-1]).t(), torch.rand(1, sizes[1]).expand(sizes)), repeat=3)
    ],
    "embedding_bag": lambda: [
        torch.embedding_bag(torch.rand(5, 4), torch.tensor([1, 2]).to(one), torch.tensor([0]).to(other), False, mode)
        for one, other in itertools.permutations((torch.int64, torch.int32)) for mode in range(3)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OTHERS)
def test_results_over_operands_of_other_dtypes_and_layouts(name: str) -> None:
    seen = Watch()
    with seen:
        OF_OTHERS[name]()
    assert not seen.wrong
    assert seen.seen


OF_ONE_FORMAT: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], Any]]] = {
    "a volume without a batch": ((3, 2, 4, 1), lambda x: F.max_pool3d(x, 1)),
    "group norm's own operator": ((2, 4, 3), lambda x: aten.native_group_norm(x, None, None, 2, 4, 3, 2, 1e-5)),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OF_ONE_FORMAT)
def test_refused_for_how_it_lies_in_memory(name: str, dynamic: bool) -> None:
    shape, function = OF_ONE_FORMAT[name]
    compiled, refused = fusewright.compile(function, dynamic=dynamic, recompile_limit=99), set()
    for order in itertools.permutations(range(len(shape))):
        x = torch.rand([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(shape))])
        try:
            expected = function(x)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                compiled(x)
            refused.add(True)
        else:
            torch.testing.assert_close(compiled(x), expected, check_stride=True)
            refused.add(False)
    assert len(refused) == 2


def test_gradients_of_batch_norm_laid_out_otherwise() -> None:
    """Also where single channels or positions leave the memory format open."""
    seen = Watch()
    for shape in ((4, 3), (4, 3, 5), (4, 3, 2, 5), (4, 1, 3, 4), (1, 4, 3, 1), (2, 3, 1, 1), (2, 3, 2, 1, 3)):
        plain = torch.rand(shape)
        last, first = plain.movedim(1, -1).contiguous().movedim(-1, 1), plain.movedim(0, -1).contiguous().movedim(-1, 0)
        gaps, expanded = plain.repeat_interleave(2, -1)[..., ::2], plain[:1].expand(shape)
        for gradient, x in itertools.product((plain, last, first, gaps, expanded, expanded.contiguous()), repeat=2):
            mean = torch.rand(shape[1])
            for training in (True, False):
                with seen:
                    aten.native_batch_norm_backward.default(
                        gradient, x, mean, mean, mean, mean, mean, training, 1e-5, [True] * 3
                    )
    assert not seen.wrong
    assert seen.seen


@pytest.mark.parametrize("op", [torch.logaddexp, torch.heaviside, torch.copysign, torch.xlogy, torch.isin], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dynamic", [True, None])
def test_corrections_hold_over_symbolic_sizes(op: Callable[..., torch.Tensor], dynamic: bool | None) -> None:
    """A number beside a tensor that is laid out otherwise: where symbols leave the order open, sizes of 2 and more
    decide."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return op(y, x.flatten()) if op is torch.isin else op(x.max(), y)

    compiled = fusewright.compile(function, dynamic=dynamic)
    overlapping = torch.rand(12).as_strided((3, 8), (1, 1))
    for y in (torch.rand(3, 3), torch.rand(5, 8).t(), torch.rand(9, 4)[::2], torch.rand(4, 1).expand(4, 3), overlapping):
        x = torch.rand(3)
        torch.testing.assert_close(compiled(x, y), function(x, y), check_stride=True)


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_quotients_of_other_layouts_over_symbolic_sizes(mode: str | None) -> None:
    compiled = fusewright.compile(lambda x, y: (torch.div(x, y, rounding_mode=mode), x // y), dynamic=True)
    for x, y in ((torch.rand(33, 16), torch.rand(16, 33).t()), (torch.rand(16, 33).t(), torch.rand(33, 16)), (torch.rand(4, 1), torch.rand(9, 4).t())):
        expected = torch.div(x, y, rounding_mode=mode), x // y
        torch.testing.assert_close(compiled(x, y), expected, check_stride=True)


def test_a_spread_of_operators() -> None:
    seen = Watch()
    for op in op_db[::25]:
        if op.name.startswith("jiterator"):  # for GPUs alone
            continue
        watch(op, torch.float32, 2, seen)
    assert not seen.wrong
    assert len(seen.seen) > 60


@pytest.mark.sweep
@pytest.mark.parametrize("op", op_db, ids=operator_name)
def test_every_operator(op: object) -> None:
    seen = Watch()
    for dtype in (torch.float32, torch.int64, torch.complex64):
        watch(op, dtype, 20, seen)
    assert not seen.wrong


OF_ONE = {
    "a column": lambda: torch.rand(1, 33).t(),
    "a line of a batch": lambda: torch.rand(4, 1, 5, 6)[:1],
    "its last dimension is one": lambda: torch.rand(2, 1, 3).transpose(1, 2),
    "gaps": lambda: torch.rand(1, 3, 2).transpose(0, 1)[:, :, :1],
    "gaps in turned images": lambda: torch.rand(2, 3, 3, 4).permute(2, 3, 1, 0)[:1, :3, :1],
    "no elements": lambda: torch.rand(1, 0).t(),
}
BY_ELEMENTS = {
    "of integers": lambda x: x.long().exp(), "of bools": lambda x: torch.sigmoid(x > 0.5), "cast first": lambda x: aten.exp.default(x.int()),
    "clamp": lambda x: x.clamp(-1, 1), "hardtanh": torch.nn.functional.hardtanh, "relu6": torch.nn.functional.relu6, "exp": torch.exp,
    "a number added": lambda x: x + 0, "a number divided": lambda x: 3 / x, "itself added": lambda x: x + x, "compared": lambda x: x > 0,
    "pow": lambda x: x**2, "where": lambda x: torch.where(x > 0, x, 0.0), "float64": lambda x: x.double(), "tril": torch.tril, "clone": torch.clone,
    "zeros_like": torch.zeros_like, "threshold": lambda x: torch.nn.functional.threshold(x, 0, 1), "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0), "masked_fill": lambda x: x.masked_fill(x > 0, 1), "remainder": lambda x: x % 3, "sign": torch.sign,
    "nan_to_num": torch.nan_to_num, "lerp": lambda x: torch.lerp(x, x, 0.5), "logit": lambda x: x.logit(0.1), "elu": torch.nn.functional.elu,
    "gelu": torch.nn.functional.gelu, "softmax": lambda x: x.softmax(0), "index_fill": lambda x: x.index_fill(-1, torch.tensor([0]), 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_ELEMENTS)
def test_steps_along_dimensions_of_one(name: str) -> None:
    """They show where another operand leaves the order of dimensions open."""
    for make in OF_ONE.values():
        x, function = make(), BY_ELEMENTS[name]
        for dynamic in (False, True):
            compiled = fusewright.compile(lambda x: (y := function(x), y * 2), dynamic=dynamic)
            mine, theirs = compiled(x), (function(x), function(x) * 2)
            assert [one.stride() for one in mine] == [one.stride() for one in theirs], dynamic


def test_layouts_of_operands_whose_sizes_turn_out_to_be_equal() -> None:
    compiled = fusewright.compile(lambda x, y: x + y, dynamic=True)
    for x, y in (
        (torch.rand(33, 1, 8, 8).bfloat16(), torch.ones(16, 8, dtype=torch.int64)[::2]),
        (torch.rand(1, 1, 1, 1).bfloat16().expand(2, 1, 33, 8), torch.ones(8, 33, dtype=torch.int64).t()),
    ):
        torch.testing.assert_close(compiled(x, y), x + y, check_stride=True)


@pytest.mark.parametrize("op", [torch.add, torch.fmax, torch.copysign])
def test_layouts_along_dimensions_of_one_where_the_kernel_asks_for_equal_sizes(op: Callable[..., torch.Tensor]) -> None:
    compiled = fusewright.compile(op, dynamic=True, recompile_limit=99)
    for steps in itertools.product(((1, 1), (1, 3), (2, 2), (1, 0)), repeat=2):
        x, y = (torch.rand(9).as_strided((3, 1), step) for step in steps)
        torch.testing.assert_close(compiled(x, y), op(x, y), check_stride=True)


def test_a_loss_over_images_that_eager_refuses() -> None:
    """Its backward writes into what is like the input, and asks for that to be contiguous: ours is that of a copy."""
    target, images = torch.randint(0, 3, (2, 5, 4)), torch.rand(2, 3, 4, 5).mT
    with pytest.raises(RuntimeError, match="contiguous"):
        torch.nn.functional.nll_loss(images.requires_grad_(), target).backward()
    found = []
    for call in (fusewright.compile(torch.nn.functional.nll_loss), torch.nn.functional.nll_loss):
        leaf = (images.detach() if not found else images.detach().contiguous()).requires_grad_()
        found.append(torch.autograd.grad(call(leaf, target), leaf)[0])
    torch.testing.assert_close(found[0], found[1])


OF_TWO = [
    op
    for packet in map(functools.partial(getattr, aten), dir(aten))
    if isinstance(packet, torch._ops.OpOverloadPacket)
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if torch.Tag.pointwise in op.tags and not op._schema.is_mutable and str(op._schema.returns[0].type) == "Tensor"
    and [str(one.type) for one in op._schema.arguments if not one.has_default_value()] == ["Tensor", "Tensor"]
]  # fmt: skip


@pytest.mark.parametrize("op", OF_TWO, ids=str)
def test_two_operands_of_other_dtypes_and_layouts(op: torch._ops.OpOverload) -> None:
    shown = (lambda x: x[0, 0], lambda x: x[:, :1], lambda x: x, lambda x: x.reshape(2, 3).t())
    dtypes = (torch.bool, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex64)
    given = [show(torch.arange(1, 7).view(3, 2)).to(dtype) for show in shown for dtype in dtypes]
    seen = Watch()
    for one, other in itertools.product(given, repeat=2):
        with contextlib.suppress(*REFUSED, TypeError), seen:
            op(one, other)
    assert seen.seen and not seen.wrong
