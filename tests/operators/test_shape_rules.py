"""Every shape rule against eager: the operators that PyTorch's own samples dispatch, in several layouts and dtypes."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusewright
from fusewright.base.records import replace
from fusewright.operators.meta_kernels import infer, type_of
from fusewright.operators.rules.common import channels_last_strides
from fusewright.operators.schema import facts
from fusewright.operators.shape_rules import RULES, by_rule
from fusewright.sizes.expressions import evaluate
from fusewright.sizes.shape_env import ShapeEnv
from fusewright.sizes.tensor_type import TensorType, contiguous_strides
from tests.ops.opinfo import op_db

SEEN: Counter[object] = Counter()


class CheckRules(TorchDispatchMode):
    """Runs each operator for real and compares what its rule says."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        said = NotImplemented
        if func in RULES:
            plain = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if not any(t.is_conj() or t.is_neg() or t.layout != torch.strided or t.is_nested for t in plain):
                lower = lambda t: type_of(t) if isinstance(t, torch.Tensor) else t
                said = by_rule(func, *pytree.tree_map(lower, (args, kwargs)))
        result = func(*args, **kwargs)
        if said is not NotImplemented:
            SEEN[func] += 1
            compare(func, said, result, args)
        return result


def compare(func: object, said: object, real: object, args: object) -> None:
    if isinstance(real, (list, tuple)):
        assert isinstance(said, tuple) and len(said) == len(real), (func, said)
        for a, b in zip(said, real, strict=True):
            compare(func, a, b, args)
        return
    if not isinstance(real, torch.Tensor):
        assert said == real, func
        return
    want = type_of(real)
    shapes = [(tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args]
    assert isinstance(said, TensorType), (func, said, shapes)
    assert (said.shape, said.dtype, said.device) == (want.shape, want.dtype, want.device), (func, said, want, shapes)
    assert said.stride == want.stride or not real.numel(), (func, said.stride, want.stride, shapes)
    if facts(func).is_view:
        assert said.offset == want.offset, (func, said, want, shapes)


# The entries of op_db whose operators have rules.
NAMES = """
abs add sub mul div neg exp log sin tanh sigmoid sqrt rsqrt reciprocal pow maximum minimum where clamp eq lt logical_and
logical_not bitwise_and addcmul addcdiv lerp masked_fill nn.functional.relu nn.functional.gelu nn.functional.silu
nn.functional.leaky_relu nn.functional.hardswish nn.functional.hardtanh nn.functional.relu6 nn.functional.batch_norm remainder floor_divide isnan round atan2 rsub view reshape permute transpose t
expand unsqueeze squeeze select narrow split split_with_sizes unbind chunk as_strided diagonal movedim flatten select_scatter
slice_scatter cat stack gather index_select tril triu sum mean amax amin max.reduction_with_dim argmax any all var std var_mean
cumsum softmax log_softmax nn.functional.layer_norm nn.functional.group_norm nn.functional.nll_loss nn.functional.cross_entropy
nn.functional.mse_loss mm addmm bmm baddbmm mv dot matmul nn.functional.linear nn.functional.conv1d nn.functional.conv2d
nn.functional.conv_transpose2d nn.functional.max_pool2d nn.functional.avg_pool2d nn.functional.adaptive_avg_pool2d
nn.functional.scaled_dot_product_attention nn.functional.embedding nn.functional.pad empty_like zeros_like ones_like full_like
new_zeros new_full full zeros arange clone to copysign bernoulli empty_strided nn.functional.prelu nn.functional.hardshrink
nn.functional.softshrink diag_embed constant_pad_nd
""".split()

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def layouts(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values, laid out otherwise now and then."""
    kind = rng.random()
    if tensor.requires_grad or kind < 0.4 or tensor.dim() < 2:
        return tensor
    if kind < 0.7:
        order = list(range(tensor.dim()))
        rng.shuffle(order)
        back = [order.index(axis) for axis in range(tensor.dim())]
        return tensor.permute(order).contiguous().permute(back)
    if kind < 0.85:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if tensor.dim() == 4:
        return tensor.to(memory_format=torch.channels_last)
    return tensor[:1].expand(tensor.shape)


def run_samples(op, dtype: torch.dtype, limit: int) -> int:
    rng = random.Random(0)
    count = 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        count += 1
        if count > limit:
            break
        for change in (False, True, True, True):
            arguments = (sample.input, sample.args, sample.kwargs)
            if change:
                arguments = pytree.tree_map(lambda t: layouts(t, rng) if isinstance(t, torch.Tensor) else t, arguments)
            first, args, kwargs = arguments
            with torch.no_grad(), CheckRules():
                try:
                    op(first, *args, **kwargs)
                except (
                    RuntimeError,
                    IndexError,
                    ValueError,
                ):  # a view of a changed layout may not exist: eager's own error
                    if not change:
                        raise
    return count


BY_NAME = {}
for entry in op_db:
    BY_NAME.setdefault(entry.name if not entry.variant_test_name else f"{entry.name}.{entry.variant_test_name}", entry)
    BY_NAME.setdefault(entry.name, entry)


@pytest.mark.parametrize("name", [name for name in NAMES if name in BY_NAME])
def test_rule(name: str) -> None:
    op = BY_NAME[name]
    for dtype in DTYPES:
        if dtype in op.supported_dtypes("cpu"):
            assert run_samples(op, dtype, limit=8)


F = torch.nn.functional
IMAGE_PROGRAMS = {
    "softmax": lambda x: (torch.softmax(x, 1), torch.log_softmax(x, -1), torch.ops.aten._safe_softmax(x, 2)),
    "reductions": lambda x: (
        x.sum(1),
        x.mean((2, 3), True),
        x.amax(1),
        x.max(1),
        x.var(1),
        torch.var_mean(x, (0, 2)),
        x.argmax(1),
    ),
    "scans": lambda x: (x.cumsum(1), x.tril(), x.triu()),
    "pools": lambda x: (F.avg_pool2d(x, 2, 1, 1), F.max_pool2d(x, 2, 1, 1), F.adaptive_avg_pool2d(x, 2)),
    "norms": lambda x: (F.layer_norm(x, x.shape[2:]), F.group_norm(x, 1), F.layer_norm(x, x.shape[3:])),
    "copies": lambda x: (x.clone(), x.to(torch.float16), x.contiguous(), x.to(memory_format=torch.channels_last)),
    "like": lambda x: (
        torch.empty_like(x),
        torch.zeros_like(x),
        torch.full_like(x, 2),
        torch.rand_like(x),
        x.bernoulli(0.5),
    ),
    "pointwise": lambda x: (
        x + x,
        x * 2,
        x + x[:1],
        x + x[:, :, :1],
        x * x.contiguous(),
        torch.where(x > 0, x, x.contiguous()),
    ),
    "pointwise_one": lambda x: (x.exp(), F.gelu(x), x.clamp(-1, 1), x.masked_fill(x > 0, 1.0), x.lerp(x, 0.5)),
    "channel": lambda x: (
        x + x.new_ones(x.shape[1], 1, 1),
        x.new_ones(x.shape[1], 1, 1) * x,
        x + x.new_ones(x.shape[-1]),
    ),
    "joins": lambda x: (torch.cat([x, x], 1), torch.stack([x, x], 1), torch.cat([x, x.contiguous()], 2)),
    "picks": lambda x: (
        x.index_select(1, torch.tensor([0])),
        x[torch.tensor([0])],
        x.gather(1, torch.zeros_like(x, dtype=torch.long)),
    ),
    "products": lambda x: (x @ x.transpose(-1, -2), F.linear(x, x.new_ones(3, x.shape[-1]))),
    "writes": lambda x: (x.clone().add_(x), x.clone().mul_(x[:1]), x.clone().relu_(), x.clone().copy_(x[:1])),
    "dropout": lambda x: (
        torch.native_dropout(x, 0.5, True),
        torch.native_dropout(x, 0.0, True),
        torch.native_dropout(x, 0.5, False),
    ),
    "pad": lambda x: F.pad(x, (1, 1)),
    "attention": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x),
    "views": lambda x: (
        x.permute(3, 1, 0, 2),
        x.unsqueeze(2),
        x.squeeze(),
        x[:, :, ::2],
        x.expand(2, *x.shape),
        x.flatten(1),
    ),
    "parts": lambda x: (x.split(2, 2), x.unbind(1), x.chunk(2, -1)),
    "convolution": lambda x: (
        F.conv2d(x, x.new_ones(4, x.shape[1], 1, 1)),
        F.conv2d(x.contiguous(), x[:, :, :1, :1].contiguous()),
    ),
}
IMAGE_LAYOUTS = {
    "row_major": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "reversed": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "gaps": lambda x: torch.cat([x, x], -1)[..., ::2],
    "gaps_channels_last": lambda x: torch.cat([x, x], 2).to(memory_format=torch.channels_last)[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("program", IMAGE_PROGRAMS)
@pytest.mark.parametrize("layout", IMAGE_LAYOUTS)
def test_layouts_of_images(program: str, layout: str) -> None:
    for shape in [(2, 3, 4, 5), (2, 1, 4, 5), (1, 3, 4, 5), (2, 3, 2, 2), (1, 1, 2, 2), (2, 4, 4, 2)]:
        with torch.no_grad(), CheckRules():
            IMAGE_PROGRAMS[program](IMAGE_LAYOUTS[layout](torch.randn(shape)))


def test_many_rules_were_checked() -> None:
    """Runs the backward of a small network too; then most rules must have been compared at least once."""
    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.GroupNorm(2, 4),
        torch.nn.SiLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(36, 5),
    )
    table = torch.nn.Embedding(7, 5)
    normal = torch.nn.LayerNorm(5)
    with CheckRules():
        logits = torch.nn.functional.gelu(normal(torch.tanh(network(image)) + table(torch.tensor([1, 2]))))
        probabilities = torch.softmax(logits, 1) + torch.sigmoid(logits) + torch.relu(logits)
        torch.nn.functional.nll_loss(torch.log_softmax(probabilities, 1), torch.tensor([0, 3])).backward()
        for write in (torch.Tensor.zero_, torch.Tensor.relu_, torch.Tensor.exp_):
            write(logits.detach())
        logits.detach().add_(1).mul_(logits.detach()).copy_(logits.detach()).fill_(2).bernoulli_(0.5)
    missing = [str(op) for op in RULES if not SEEN[op]]
    assert len(SEEN) > 130, f"{len(SEEN)} rules compared; not {missing}"


def any_layout(shape: list[int], rng: random.Random) -> torch.Tensor:
    """Zeros: dense in any order of the dimensions, with gaps, expanded, or with strides of no consequence."""
    order = rng.sample(range(len(shape)), len(shape))
    turned = torch.zeros([shape[axis] for axis in order], dtype=torch.int64)
    turned = turned.permute([order.index(axis) for axis in range(len(shape))])
    if not shape:
        return turned
    strange = [7 if size == 1 else step for size, step in zip(shape, turned.stride())]
    gaps = torch.zeros([size + 1 for size in shape], dtype=torch.int64)[tuple(slice(0, size) for size in shape)]
    expanded = torch.zeros([1] * len(shape), dtype=torch.int64).expand(shape)
    return rng.choice((torch.zeros(shape, dtype=torch.int64), turned, turned.as_strided(shape, strange), gaps, expanded))


def test_indexing() -> None:
    """Index tensors anywhere, broadcast, of no elements, of any layout: the rule is eager's, stride by stride."""
    rng = random.Random(0)
    compared = 0
    for _ in range(3000):
        shape = [rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(rng.randint(1, 4))]
        common = [rng.choice((0, 1, 2, 3)) for _ in range(rng.randint(0, 3))]
        x, places = any_layout(shape, rng), []
        for _ in range(rng.randint(1, len(shape))):
            own = [1 if rng.random() < 0.2 else size for size in common][rng.choice((0, 0, 0, 1)) :]
            made = any_layout(own, rng).to(rng.choice((torch.int64, torch.int64, torch.int32)))
            places.append(None if rng.random() < 0.3 else made)
        if all(place is None for place in places):
            continue
        try:
            found = torch.ops.aten.index.Tensor(x, places)
        except IndexError:  # nothing is there
            continue
        compared += 1
        types = [None if place is None else type_of(place) for place in places]
        said = by_rule(torch.ops.aten.index.Tensor, [type_of(x), types], {})
        assert isinstance(said, TensorType), (x.shape, types)
        assert (said.shape, said.stride) == (tuple(found.shape), found.stride()), (type_of(x), types)
    assert compared > 1500


@pytest.mark.parametrize("dynamic", [None, True])
def test_filters_that_no_convolution_takes_are_refused_where_nothing_reads_the_result(dynamic: bool | None) -> None:
    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch.nn.functional.conv1d(x, weight)
        return x + 1

    compiled = fusewright.compile(program, dynamic=dynamic)
    x = torch.randn(2, 2, 9)
    for filters in (2, 0, 4, 0):
        if filters:
            torch.testing.assert_close(compiled(x, torch.randn(filters, 2, 3)), x + 1)
            continue
        with pytest.raises(RuntimeError, match="expected weight to be at least 1"):
            compiled(x, torch.randn(filters, 2, 3))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["conv1d", "conv_transpose1d"])
def test_a_bias_for_other_filters_is_refused_where_nothing_reads_the_result(name: str, dynamic: bool | None) -> None:
    """On a GPU a pass adds it, which no bias of another size is given to."""

    def program(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        getattr(F, name)(x, weight, bias)
        return x + 1

    compiled = fusewright.compile(program, dynamic=dynamic)
    x = torch.randn(2, 2, 9)
    for filters, *shape in ((1, 1), (4, 4), (4, 1), (1, 4), (4, 4, 1), (2, 2)):
        arguments = x, torch.randn(filters, 2, 3).transpose(0, int(name != "conv1d")), torch.randn(shape)
        if shape == [filters]:
            torch.testing.assert_close(compiled(*arguments), x + 1)
            continue
        with pytest.raises(RuntimeError, match="expected bias to be 1-dimensional"):
            compiled(*arguments)


NO_CONVOLUTION: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "a window without a place": (lambda x: F.conv1d(x, x.new_ones(3, 2, 7), padding=1), (2, 2, 4)),
    "a spread window without a place": (lambda x: F.conv2d(x, x.new_ones(3, 2, 1, 3), dilation=2), (2, 2, 4, 4)),
    "a window over no images": (lambda x: F.conv1d(x, x.new_ones(3, 2, 6)), (0, 2, 4)),
    "other channels of no images": (lambda x: F.conv_transpose1d(x, x.new_ones(3, 0, 2)), (0, 2, 2)),
    "channels where there are none": (lambda x: F.conv_transpose1d(x, x.new_ones(3, 0, 2)), (1, 0, 2)),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", NO_CONVOLUTION)
def test_what_no_convolution_takes_is_refused_where_its_result_has_no_elements(name: str, dynamic: bool | None) -> None:
    function, shape = NO_CONVOLUTION[name]
    for run in (function, fusewright.compile(lambda x: function(x) + 1, dynamic=dynamic)):
        with pytest.raises(RuntimeError):
            run(torch.ones(shape))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])  # types, no tensors
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_convolution_of_symbolic_sizes_lies_as_one_of_fixed_sizes(rank: int, last: bool, device: str) -> None:
    place = torch.device(device)
    window = ([1] * rank, [0] * rank, [1] * rank, False, [0] * rank, 1)
    x = torch.ones(2, *[16] * rank, 3).movedim(-1, 1) if last else torch.ones(2, 3, *[16] * rank)
    fixed = [type_of(one, place) for one in (x, torch.ones(8, 3, *[3] * rank))]
    env, known = ShapeEnv(), {}

    def symbolic(one: TensorType) -> TensorType:
        shape = tuple(env.create(f"s{len(known) + k}", size, None) for k, size in enumerate(one.shape))
        known.update(zip(shape, one.shape))
        strides = channels_last_strides if last and rank == 2 and one is fixed[0] else contiguous_strides
        return replace(one, shape=shape, stride=strides(shape))

    varying = [symbolic(one) for one in fixed]
    found, wanted = (
        infer(torch.ops.aten.convolution.default, (*types, None, *window), {}, place, sizes)
        if sizes
        else by_rule(torch.ops.aten.convolution.default, (*types, None, *window), {})
        for types, sizes in ((varying, env), (fixed, None))
    )
    assert [evaluate(step, known) for step in found.stride] == [*wanted.stride]
    assert [evaluate(size, known) for size in found.shape] == [*wanted.shape]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["row-major", "channels-last", "transposed", "with gaps"])
def test_fake_quantisation(layout: str, dtype: torch.dtype, dynamic: bool) -> None:
    x = (torch.randn(2, 3, 4, 6) * 10).to(dtype)
    x = {
        "row-major": x,
        "channels-last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(1, 3),
        "with gaps": x[:, :, ::2],
    }[layout]
    scale, zero = torch.full((x.shape[1],), 0.3), torch.ones(x.shape[1], dtype=torch.int32)
    for fn in (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255),
        lambda x: torch.fake_quantize_per_tensor_affine(x, scale[0], zero[0], 0, 255),
        lambda x: torch.fake_quantize_per_channel_affine(x, scale, zero, 1, 0, 255),
    ):
        whole = not dynamic or layout != "with gaps"  # whose strides tell nothing while its sizes vary
        found = fusewright.compile(fn, fullgraph=whole, dynamic=dynamic)(x)
        assert torch.equal(found, fn(x)) and found.stride() == fn(x).stride()


@pytest.mark.parametrize("same", ["all", "keys and values", "none"])
def test_attention_operator_of_several_tensors(same: str) -> None:
    """`torch._native_multi_head_attention`, which modules call with one tensor for all three."""
    q, k, v = torch.randn(3, 2, 5, 8)
    q, k, v = {"all": (q, q, q), "keys and values": (q, k, k), "none": (q, k, v)}[same]
    weights = torch.randn(24, 8), torch.randn(24), torch.randn(8, 8), torch.randn(8)

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        return torch._native_multi_head_attention(q, k, v, 8, 2, *weights, None, True)

    with torch.no_grad():
        for found, expected in zip(fusewright.compile(fn, fullgraph=True)(q, k, v), fn(q, k, v)):
            assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", ["multi_margin_loss", "multilabel_margin_loss", "nll_loss", "cross_entropy"])
def test_a_loss_of_one_sample_has_its_target_s_dimensions(name: str, reduction: str, dynamic: bool) -> None:
    """With and without a batch, in training too."""
    fn = functools.partial(getattr(torch.nn.functional, name), reduction=reduction)
    compiled = fusewright.compile(lambda x, t: fn(x, t), fullgraph=True, dynamic=dynamic, recompile_limit=99)
    for shape, target in (((6,), ()), ((6,), (1,)), ((1, 6), (1,)), ((4, 6), (4,)), ((7,), ()), ((5, 7), (5,))):
        if name == "multilabel_margin_loss":
            target = shape
        elif shape[1:] == () and target and name != "multi_margin_loss":
            continue  # eager refuses it
        (x, y), t = torch.randn(shape).expand(2, *shape).clone().requires_grad_(), torch.full(target, 2)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, t), fn(x, t))
        found, expected = compiled(x, t), fn(y, t)
        torch.testing.assert_close(found, expected)
        for one, other in zip(*(torch.autograd.grad(loss.sum(), own) for loss, own in ((found, x), (expected, y)))):
            torch.testing.assert_close(one, other)
