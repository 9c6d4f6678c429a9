"""Random programs of several operators over tensors of awkward kinds, each with the arguments that it is run on.

Takes a source of random choices; gives a `Program`: Python source text and arguments. Inputs are 0-dimensional, empty, of sizes of 1,
transposed, sliced, expanded, offset into their memory, with negative values, NaN and infinities. Always holds: each step was tried eagerly
when it was chosen, so that a program fails, if at all, in its last step only; an operator that jumps (a comparison, rounding, argmax) is
applied to exact values only, so that a difference between compiled and eager is a defect and never rounding.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.ops.cases import Case, Differentiated
from tests.ops.compare import copy_tree

INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int16)
LARGEST = 4096
"""Elements of a value: a program is about kinds of tensors, not about amounts."""


@dataclass(slots=True)
class Value:
    """One variable: its tensor in the trial run, and whether its elements are exactly what they should be."""

    name: str
    tensor: torch.Tensor
    exact: bool


@dataclass(slots=True)
class Program:
    """`source` defines `program(*inputs)`; `inputs` are its arguments. `gradients`: floating point inputs want one."""

    source: str
    inputs: list[torch.Tensor]
    gradients: bool

    def function(self) -> Callable[..., Any]:
        namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(self.source, "<program>", "exec"), namespace)  # text that this file has just written
        return namespace["program"]


def text_of(program: Program) -> str:
    """The program with the kinds of its inputs, for a report."""
    kinds = [
        f"#   {t.dtype} {tuple(t.shape)} strides {t.stride()} offset {t.storage_offset()}: {t.flatten()[:6].tolist()}"
        for t in program.inputs
    ]
    return "\n".join([program.source, *kinds])


# --- inputs --------------------------------------------------------------------------------------------------------------


def _shape(choose: random.Random) -> list[int]:
    sizes = [1, 2, 3, 4, 5, 7, 8, 16, 17, 33]
    weights = [3, 3, 3, 3, 2, 1, 2, 1, 1, 1]
    shape = [
        0 if choose.random() < 0.03 else choose.choices(sizes, weights)[0]
        for _ in range(choose.choices([0, 1, 2, 3, 4], [1, 3, 5, 3, 2])[0])
    ]
    return shape if math.prod(shape) <= LARGEST else shape[:2]


def _filled(choose: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(choose.randrange(1 << 30))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator) > 0
    if not dtype.is_floating_point:
        return torch.randint(0 if dtype == torch.uint8 else -9, 10, shape, generator=generator).to(dtype)
    made = torch.randint(-24, 25, shape, generator=generator).to(dtype) / 4
    if choose.random() < 0.15:
        special = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=dtype)
        places = torch.rand(shape, generator=generator) < 0.2
        made = torch.where(places, special[torch.randint(0, 4, shape, generator=generator)], made)
    return made


def _laid_out(choose: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another layout."""
    kind = choose.choice(("plain", "plain", "plain", "transposed", "sliced", "offset", "expanded", "channels last"))
    if kind == "transposed" and tensor.ndim >= 2:
        a, b = choose.sample(range(tensor.ndim), 2)
        return tensor.transpose(a, b).contiguous().transpose(a, b)
    if kind == "sliced" and tensor.ndim:
        room = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] * 2 + 1))
        view = room[..., 1::2]
        return view.copy_(tensor)
    if kind == "offset":
        room = tensor.new_zeros(tensor.numel() + 3)
        return room[3:].view(tensor.shape).copy_(tensor)
    if kind == "expanded" and tensor.ndim and tensor.numel():
        axis = choose.randrange(tensor.ndim)
        return tensor.select(axis, 0).unsqueeze(axis).expand(tensor.shape)
    if kind == "channels last" and tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _inputs(choose: random.Random) -> list[torch.Tensor]:
    base = _shape(choose)
    made = []
    for index in range(choose.randint(1, 3)):
        shape = list(base)
        if index and choose.random() < 0.7:  # something that broadcasts with the first
            shape = [1 if choose.random() < 0.3 else size for size in shape][
                choose.randint(0, max(0, len(shape) - 1)) :
            ]
        elif index:
            shape = _shape(choose)
        dtype = choose.choices([torch.float32, torch.float64, torch.bool, *INTEGERS], [10, 2, 2, 3, 2, 1, 1])[0]
        tensor = _laid_out(choose, _filled(choose, shape, dtype))
        made.append(tensor)
    return made


# --- steps ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Writer:
    """A program under construction."""

    choose: random.Random
    values: list[Value] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failed: str = ""  # the variable of the step that failed, the last one

    def pick(self, wanted: Callable[[Value], bool] = lambda v: True) -> Value | None:
        """One of the values, the latest the likeliest."""
        found = [value for value in self.values if wanted(value)]
        if not found:
            return None
        return self.choose.choices(found, [index + 1 for index in range(len(found))])[0]

    def attempt(self, expression: str, exact: bool) -> bool:
        """Runs one expression on the trial values; a result becomes a new variable, a failure ends the program."""
        namespace: dict[str, Any] = {
            "torch": torch,
            "F": torch.nn.functional,
            **{v.name: v.tensor for v in self.values},
        }
        name = f"v{len(self.values)}"
        line = f"    {name} = {expression}"
        versions = [v.tensor._version for v in self.values]
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = eval(expression, namespace)
        except Exception:
            if self.choose.random() < 0.9 or any(
                v.tensor._version != version for v, version in zip(self.values, versions, strict=True)
            ):
                return False  # most failures are left out: one ends the program
            self.lines.append(line)
            self.failed = name
            return True
        if not isinstance(result, torch.Tensor) or result.numel() > LARGEST:
            return False
        self.lines.append(line)
        self.values.append(Value(name, result, exact and is_exact(result)))
        if not self.values[-1].exact:
            for value in self.values:  # whoever shares the memory that was written to
                if value.tensor.untyped_storage()._cdata == result.untyped_storage()._cdata:
                    value.exact = False
        return True


def is_exact(tensor: torch.Tensor) -> bool:
    """Whether every way to compute these elements gives the same: integers, and floats with few bits."""
    if not tensor.dtype.is_floating_point:
        return True
    finite = tensor[torch.isfinite(tensor)].double() * 64
    return bool(((finite == finite.round()) & (finite.abs() < 1 << 20)).all())


def is_float(value: Value) -> bool:
    return value.tensor.dtype.is_floating_point


def is_moderate(value: Value) -> bool:
    finite = value.tensor[torch.isfinite(value.tensor)] if is_float(value) else value.tensor
    return not finite.numel() or bool(finite.double().abs().max() <= 30)


def _number(choose: random.Random) -> str:
    return choose.choice(("2", "(-1)", "3", "0.5", "(-1.5)", "0", "1", "True"))


def _operand(writer: Writer, exact: bool) -> Value | None:
    return writer.pick((lambda v: v.exact) if exact else (lambda v: True))


UNARY_EXACT = (
    "torch.neg({})", "torch.abs({})", "torch.relu({})", "torch.square({})", "{}.clone()", "{}.contiguous()", "torch.clamp({}, -1, 2)",
    "torch.clamp({}, min=0.5)", "F.hardtanh({}, -2.0, 2.0)", "F.relu6({})", "F.leaky_relu({}, 0.5)", "torch.nan_to_num({}, 1.0)", "torch.positive({})",
    "{}.detach()", "torch.zeros_like({})", "torch.full_like({}, 3)", "{}.masked_fill({} == 2, 1)", "torch.tril({})", "torch.triu({}, 1)",
    "{} ** 2", "-{}", "{}.new_ones(2, 3)", "{}.abs() + 1",
)  # fmt: skip
UNARY_JUMPS = (
    "torch.sign({})", "torch.floor({})", "torch.ceil({})", "torch.trunc({})", "torch.round({})", "torch.logical_not({})", "torch.isnan({})",
    "torch.isinf({})", "torch.signbit({})", "{}.bool()", "{}.to(torch.int32)", "{}.long()", "{}.float()", "{}.double()", "torch.bitwise_not({})", "~{}",
    "torch.frac({})", "{}.argmax()", "{}.argmin(dim=-1)", "{}.argmax(0, keepdim=True)", "torch.sort({}, dim=-1, stable=True)[1]",
    "torch.argsort({}, dim=0, stable=True)", "torch.count_nonzero({})", "{}.any()", "{}.all(dim=-1)", "{}.max(dim=-1)[0]", "torch.sgn({})",
    "torch.heaviside({}, torch.tensor(0.5, dtype={}.dtype))", "torch.nonzero_static({}, size=4)", "torch.isclose({}, {})", "{}.to(torch.uint8)",
    "torch.cummax({}, 0)[1]", "{}.to(torch.int8)",
)  # fmt: skip
UNARY_SMOOTH = (
    "torch.exp({})", "torch.sin({})", "torch.cos({})", "torch.tanh({})", "torch.sigmoid({})", "torch.erf({})", "torch.expm1({})", "torch.atan({})",
    "torch.exp2({})", "F.silu({})", "F.softplus({})", "F.elu({})", "F.mish({})", "F.hardswish({})", "torch.asinh({})",
    "F.hardsigmoid({})", "F.logsigmoid({})", "F.selu({})", "F.celu({}, 0.7)", "torch.erfc({})", "torch.sinh({})", "F.softsign({})", "F.tanhshrink({})",
    "torch.softmax({}, -1)", "torch.log_softmax({}, 0)", "torch.logsumexp({}, -1)", "{}.mean()", "{}.mean(-1, keepdim=True)", "{}.sum(0) / 3",
    "torch.var({}, -1)", "torch.std({}, 0, correction=0)", "F.layer_norm({}, {}.shape[-1:])", "torch.linalg.vector_norm({}, dim=-1)", "F.normalize({}, dim=-1)",
    "{} / 3", "torch.lerp({}, {} * 2, 0.3)", "F.rms_norm({}, {}.shape[-1:])", "torch.sinc({})", "torch.logcumsumexp({}, -1)", "torch.cosh({})",
)  # fmt: skip
# oneDNN's GELU, which eager takes for some layouts, makes NaN of infinities: compiled code does not.
UNARY_FINITE = ("F.gelu({})", "F.gelu({}, approximate='tanh')")
UNARY_SINGULAR = (
    "torch.log({})", "torch.sqrt({})", "torch.rsqrt({})", "torch.reciprocal({})", "torch.log1p({})", "torch.log2({})", "{} ** 0.5", "1 / {}", "torch.tan({})",
    "{} ** -1", "torch.pow({}, 3)", "2 ** {}", "torch.acosh({})", "torch.atanh({})", "torch.asin({})", "torch.lgamma({})", "torch.digamma({})", "torch.logit({}, 0.1)",
    "torch.xlogy({}, {})", "torch.special.i0({})", "torch.prod({}, -1)", "torch.cumprod({}, -1)",
)  # fmt: skip
BINARY_EXACT = (
    "{} + {}", "{} - {}", "{} * {}", "torch.maximum({}, {})", "torch.minimum({}, {})", "torch.add({}, {}, alpha=2)", "torch.rsub({}, {})", "torch.fmax({}, {})",
    "torch.where({} > 1, {}, 0)", "torch.addcmul({a}, {b}, {a}, value=2)", "torch.fmin({}, {})", "{}.expand_as({})", "torch.where({a} > {b}, {a}, {b})",
    "torch.cat([{}, {}], -1)", "torch.cat([{}, {}], 0)", "torch.stack([{}, {}])", "torch.outer({}, {})", "{} @ {}", "{a} @ {b}.transpose(-1, -2)",
    "torch.einsum('...i,...i->...', {}, {})", "F.linear({}, {})", "torch.broadcast_tensors({}, {})[0]", "torch.kron({}, {})", "{}.view_as({})",
    "torch.hstack([{}, {}])", "torch.dot({}, {})", "torch.mv({}, {})", "F.mse_loss({}, {}, reduction='sum')", "{}.reshape_as({})", "torch.block_diag({}, {})",
)  # fmt: skip
BINARY_JUMPS = (
    "{} == {}", "{} != {}", "{} < {}", "{} >= {}", "torch.logical_and({}, {})", "torch.logical_xor({}, {})", "{} & {}", "{} | {}", "{} ^ {}",
    "torch.floor_divide({}, {})", "torch.remainder({}, {})", "torch.fmod({}, {})", "{} // {}", "{} % {}", "torch.div({}, {}, rounding_mode='trunc')",
    "torch.copysign({}, {})", "torch.bitwise_left_shift({}, {}.clamp(0, 3))", "{} >> 1 | {}", "torch.gcd({}, {})", "torch.bucketize({}, {}.flatten().sort()[0])",
    "torch.isin({}, {})", "torch.nextafter({}, {})",
)  # fmt: skip
BINARY_SMOOTH = (
    "torch.atan2({}, {})", "torch.hypot({}, {})", "torch.logaddexp({}, {})", "{a} / ({b}.abs() + 1)", "F.smooth_l1_loss({}, {})", "torch.addcdiv({a}, {b}, {a}.abs() + 1)",
    "F.cosine_similarity({}, {}, dim=-1)", "torch.cdist({}, {})", "F.binary_cross_entropy_with_logits({}, {}.sigmoid())", "F.huber_loss({}, {}, reduction='none')",
    "torch.baddbmm({a}, {b}, {a})", "F.kl_div({}, {}.softmax(-1), reduction='sum')", "torch.ldexp({}, {})",
)  # fmt: skip
INDEXED = (
    "{a}[{i}]", "torch.index_select({a}, {d}, {i}.flatten())", "torch.gather({a}, {d}, {i})", "{a}.index_add({d}, {i}.flatten(), {a}.index_select({d}, {i}.flatten()))",
    "{a}.scatter({d}, {i}, 2)", "{a}.scatter_add({d}, {i}, {a})", "{a}[..., {i}]", "torch.take({a}, {i})", "{a}.index_fill({d}, {i}.flatten(), 3)",
    "torch.take_along_dim({a}, {i}, {d})", "F.embedding({i}, {a})", "F.one_hot({i}, 40)", "{a}[{i}, {i}]", "{a}.index_put(({i},), {a}.sum(), accumulate=True)",
    "{a}.scatter_reduce({d}, {i}, {a}, 'amax')", "{a}[{i}, None]", "{a}[:, {i}]",
)  # fmt: skip
WRITES = (
    "{a}.add_(2)", "{a}.mul_(-1)", "{a}.zero_()", "{a}.fill_(3)", "{a}.copy_({b})", "{a}.add_({b})", "{a}.sub_({b}, alpha=2)", "{a}.clamp_(-1, 1)", "{a}.relu_()",
    "{a}.masked_fill_({b} > 0, 1)", "{a}.index_fill_(0, torch.tensor([0]), 2)", "{a}.neg_()", "torch.add({a}, 1, out=torch.empty_like({a}))", "{a}.squeeze_()",
    "{a}.t_()", "{a}.unsqueeze_(0)", "{a}.index_copy_(0, torch.tensor([0]), {b}[:1])", "{a}.transpose_(0, -1)",
)  # fmt: skip
ASSIGNED = ("[0]", "[..., 0]", "[::2]", "[..., -1:]", "[1:]", "[:, 1]", "[...]")


def _axis(choose: random.Random, tensor: torch.Tensor) -> int:
    return choose.randrange(-tensor.ndim, tensor.ndim) if tensor.ndim else choose.choice((0, -1))


def _views(choose: random.Random, value: Value) -> str:
    """A view, or something that moves elements about."""
    t, name = value.tensor, value.name
    a, b = _axis(choose, t), _axis(choose, t)
    order = list(range(t.ndim))
    choose.shuffle(order)
    size = t.shape[a] if t.ndim else 1
    start = choose.randint(-size, size)
    step = choose.randint(1, 3)
    padding = [choose.choice((0, 1, 2, -1)) for _ in range(2 * choose.randint(1, max(1, min(2, t.ndim))))]
    return choose.choice(
        (
            f"{name}.transpose({a}, {b})", f"{name}.permute({order})", f"{name}.unsqueeze({a})", f"{name}.squeeze()", f"{name}.squeeze({a})",
            f"{name}.flatten()", f"{name}.reshape(-1)", f"{name}.reshape(-1, {max(1, size)})", f"{name}.narrow({a}, 0, {choose.randint(0, size)})",
            f"{name}.select({a}, {choose.randrange(-1, max(1, size))})", f"{name}[..., {start}:]", f"{name}[::{step}]", f"{name}[..., None]", f"{name}[..., ::{step}]",
            f"{name}.movedim({a}, {b})", f"{name}.flip({a})", f"{name}.roll({start}, {a})", f"{name}.repeat({[choose.randint(1, 2) for _ in range(max(1, t.ndim))]})",
            f"{name}.expand({choose.randint(1, 3)}, {', '.join(['-1'] * t.ndim)})", f"{name}.unfold({a}, {min(2, size)}, {step})", f"{name}.diagonal()", f"torch.diag_embed({name})",
            f"{name}.chunk(2, {a})[-1]", f"{name}.split({max(1, size // 2)}, {a})[0]", f"{name}.unbind({a})[-1]", f"F.pad({name}, {padding})", f"F.pad({name}, {padding}, value=2)",
            f"{name}.tile({choose.randint(1, 2)})", f"torch.rot90({name})", f"{name}.swapaxes({a}, {b})", f"{name}.view({name}.shape + (1,))", f"{name}.mT", f"{name}.broadcast_to((2,) + {name}.shape)",
            f"{name}.repeat_interleave(2, {a})", f"torch.atleast_2d({name})", f"{name}.unflatten({a}, (-1, 1))", f"{name}.ravel()[{start}:]", f"torch.fliplr({name})", f"{name}.contiguous().view(-1)",
            f"F.pad({name}, {[abs(p) for p in padding]}, mode='replicate')", f"F.pad({name}, {[min(1, abs(p)) for p in padding]}, mode='reflect')", f"{name}.as_strided(({min(2, size)},), (1,))",
            f"torch.tensor_split({name}, 3, {a})[1]", f"{name}[{min(0, start)}:, ...]",
        )
    )  # fmt: skip


def _reduction(choose: random.Random, value: Value) -> str:
    t, name = value.tensor, value.name
    axis = _axis(choose, t)
    dims = sorted(choose.sample(range(t.ndim), choose.randint(1, t.ndim))) if t.ndim else [0]
    keep = choose.choice(("", ", keepdim=True"))
    return choose.choice(
        (
            f"{name}.sum()", f"{name}.sum({axis}{keep})", f"{name}.sum({dims}{keep})", f"{name}.amax({dims}{keep})", f"{name}.amin({axis}{keep})", f"{name}.cumsum({axis})",
            f"{name}.max()", f"{name}.min()", f"torch.cummax({name}, {axis})[0]", f"torch.sort({name}, {axis})[0]", f"torch.topk({name}, 1, {axis})[0]", f"{name}.nansum({axis}{keep})",
            f"torch.aminmax({name}, dim={axis})[1]", f"{name}.sum({axis}, dtype=torch.float64)", f"{name}.median({axis})[0]", f"torch.diff({name}, dim={axis})",
            f"torch.kthvalue({name}, 1, {axis})[0]", f"{name}.trace()", f"{name}.sum_to_size({[1] * t.ndim})", f"{name}.logsumexp({dims}{keep})" if is_float(value) else f"{name}.sum()",
        )
    )  # fmt: skip


def _images(choose: random.Random, value: Value) -> str:
    """Operators over (N, C, H, W), for any value that can be shaped so."""
    x = f"torch.atleast_3d({value.name}).unsqueeze(0)"
    return choose.choice(
        (
            f"F.max_pool2d({x}, 2, 1, 1)", f"F.avg_pool2d({x}, 2, 1)", f"F.adaptive_avg_pool2d({x}, (2, 1))", f"F.interpolate({x}, scale_factor=2)", f"F.max_pool2d({x}, (1, 2), ceil_mode=True)",
            f"F.interpolate({x}, size=(3, 4), mode='bilinear')", f"F.pixel_unshuffle({x}, 1)", f"F.avg_pool2d({x}, 3, 2, 1, count_include_pad=False)", f"F.unfold({x}, 1)",
            f"F.conv2d({x}, {x}[:, :, :1, :1].transpose(0, 1))", f"F.adaptive_max_pool2d({x}, 1)", f"F.batch_norm({x}, None, None, training=True)", f"F.group_norm({x}, 1)", f"F.instance_norm({x})",
            f"F.local_response_norm({x}, 2)", f"F.lp_pool2d({x}, 2, 1)", f"F.glu({x}, -1)",
        )
    )  # fmt: skip


def _fill(pattern: str, **named: str) -> str:
    """The pattern with its holes filled: `{}` alternates between a and b, or is a alone."""
    a, b = named["a"], named.get("b", named["a"])
    count = pattern.count("{}")
    return pattern.format(*[a if index % 2 == 0 else b for index in range(count)], **named)


def _unary(writer: Writer, patterns: tuple[str, ...], jumps: bool, exact: bool, moderate: bool = False) -> bool:
    value = writer.pick(lambda v: (v.exact or not jumps) and (not moderate or is_moderate(v)))
    if value is None:
        return False
    return writer.attempt(_fill(writer.choose.choice(patterns), a=value.name), exact and value.exact)


def _finite(writer: Writer) -> bool:
    value = writer.pick(lambda v: is_moderate(v) and bool(torch.isfinite(v.tensor).all()))
    return value is not None and writer.attempt(_fill(writer.choose.choice(UNARY_FINITE), a=value.name), exact=False)


def _binary(writer: Writer, patterns: tuple[str, ...], jumps: bool, exact: bool, moderate: bool = False) -> bool:
    def suits(v: Value) -> bool:
        return (v.exact or not jumps) and (not moderate or is_moderate(v))

    a, b = writer.pick(suits), writer.pick(suits)
    if a is None or b is None:
        return False
    names, certain = [a.name, b.name], a.exact and b.exact
    pattern = writer.choose.choice(patterns)
    if writer.choose.random() < 0.2 and patterns is not BINARY_SMOOTH:
        names[1], certain = _number(writer.choose), a.exact
        if "}." in pattern:
            return False  # a number has no methods
    if writer.choose.random() < 0.2:
        names.reverse()
    if "> " in pattern and not certain:
        return False
    return writer.attempt(_fill(pattern, a=names[0], b=names[1]), exact and certain)


def _indexed(writer: Writer) -> bool:
    a = writer.pick(lambda v: v.tensor.ndim > 0 and v.tensor.numel() > 0)
    if a is None:
        return False
    choose = writer.choose
    low = min(size for size in a.tensor.shape)
    shape = choose.choice(([2], [3], [2, 2], [1], [], [low] * a.tensor.ndim))
    values = torch.randint(
        -low if choose.random() < 0.3 else 0, low, shape, generator=torch.Generator().manual_seed(choose.randrange(999))
    ).tolist()
    pattern = choose.choice(INDEXED)
    if "amax" in pattern and not a.exact:
        return False
    return writer.attempt(
        _fill(pattern, a=a.name, i=f"torch.tensor({values}, dtype=torch.long)", d=str(_axis(choose, a.tensor))), a.exact
    )


def _write(writer: Writer) -> bool:
    a, b = writer.pick(), writer.pick()
    if a is None or b is None:
        return False
    pattern = writer.choose.choice(WRITES)
    if "> " in pattern and not b.exact:
        return False
    if writer.choose.random() < 0.3:
        place = writer.choose.choice(ASSIGNED)
        target = f"{a.name}{place}"
        return writer.attempt(
            f"{target}.copy_({b.name})" if writer.choose.random() < 0.5 else f"{target}.mul_(2)", a.exact and b.exact
        )
    # What was exact stays so only if every variable over this memory is looked at again: `attempt` does.
    return writer.attempt(_fill(pattern, a=a.name, b=b.name), a.exact and b.exact)


def _of(make: Callable[[random.Random, Value], str], exact: bool, jumps: bool) -> Callable[[Writer], bool]:
    def step(writer: Writer) -> bool:
        value = _operand(writer, jumps)
        return value is not None and writer.attempt(make(writer.choose, value), exact and value.exact)

    return step


STEPS: tuple[tuple[int, Callable[[Writer], bool]], ...] = (
    (8, _of(_views, exact=True, jumps=False)),
    (5, _of(_reduction, exact=True, jumps=True)),
    (2, _of(_images, exact=False, jumps=True)),
    (4, lambda w: _unary(w, UNARY_EXACT, jumps=False, exact=True)),
    (4, lambda w: _unary(w, UNARY_JUMPS, jumps=True, exact=True)),
    (5, lambda w: _unary(w, UNARY_SMOOTH, jumps=False, exact=False, moderate=True)),
    (1, _finite),
    (2, lambda w: _unary(w, UNARY_SINGULAR, jumps=True, exact=False, moderate=True)),
    (7, lambda w: _binary(w, BINARY_EXACT, jumps=False, exact=True)),
    (4, lambda w: _binary(w, BINARY_JUMPS, jumps=True, exact=True)),
    (2, lambda w: _binary(w, BINARY_SMOOTH, jumps=False, exact=False, moderate=True)),
    (4, _indexed),
    (4, _write),
)


def make(choose: random.Random) -> Program:
    """One program of up to eight operators."""
    gradients = choose.random() < 0.4
    inputs = _inputs(choose)
    writer = Writer(choose, [Value(f"v{index}", tensor, True) for index, tensor in enumerate(copy_tree(inputs))])
    kinds, weights = [step for _, step in STEPS], [weight for weight, _ in STEPS]
    wanted = choose.randint(1, 8)
    for _ in range(4 * wanted):
        if len(writer.lines) >= wanted or writer.failed:
            break
        choose.choices(kinds, weights)[0](writer)
    first = len(inputs)
    made = [value.name for value in writer.values[first:]] + [writer.failed] * bool(writer.failed)
    # Everything that nothing else reads is returned: eager raises the error of a dead operator, the compiler drops it.
    text = "\n".join(writer.lines)
    returned = made[-1:] + [
        name for name in made[:-1] if choose.random() < 0.4 or len(re.findall(rf"\b{name}\b", text)) == 1
    ]
    source = f"def program({', '.join(v.name for v in writer.values[:first])}):\n" + "\n".join(
        [*writer.lines, f"    return ({''.join(name + ', ' for name in returned)})"]
    )
    return Program(source + "\n", inputs, gradients)


def case_of(program: Program, name: str) -> Case:
    """The program as a case that the sweep's `run_case` takes."""
    function = program.function()
    if not program.gradients:
        return Case(name, lambda transform: transform(function), tuple(program.inputs), {})
    inputs = tuple(t.detach().requires_grad_(t.dtype.is_floating_point) for t in program.inputs)
    return Case(
        name,
        lambda transform: Differentiated(transform(function), second=False),
        inputs,
        {},
        gradients=any(t.requires_grad for t in inputs),
    )
