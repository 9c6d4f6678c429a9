"""Random tensor programs, and streams of calls whose tensors change sizes, layouts, ranks and modes from call to call.

Takes a seed; gives the text of a program for `session.examine`. A statement is drawn from a table and kept if it runs in
eager on the first call's tensors, now and then also if it does not. Always holds: the same seed gives the same text;
what jumps (comparisons, floors, indices of extremes) is asked only of values that eager computes without rounding, so a
difference by rounding cannot grow into another answer.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch

from fusewright.base.records import dataclass, field
from tests.fuzz import tensor_libraries as libraries
from tests.fuzz.session import World

ROUNDED = 99  # the level of a value that eager has rounded; others count how many factors it has
EXACT_FACTORS = 3
LARGEST = 50_000  # elements of a value
SIZES = (0, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 17, 33)
SCALARS = ("2", "-1", "0.5", "3", "-1.5", "0", "True", "0.25")
FLOATS = ("f32", "f32", "f32", "f32", "f64", "f16", "bf16")
OTHERS = ("i64", "i64", "i32", "u8", "b8", "i8", "i16", "c64")

# {a} {b} {c}: any values; {f} {g}: floats; {i}: integers; {m}: booleans; {d}: a dimension of {a}; {s}: a number;
# {k} {l}: small whole numbers; {n}: a size as an expression; {t}: a dtype.

SAME = """
{a} + {b} | {a} - {b} | {a} + {s} | {s} - {a} | -{a} | {a}.abs() | {a}.relu() | torch.maximum({a}, {b})
torch.minimum({a}, {b}) | {a}.clamp(min={s}) | {a}.clamp(-2, 3) | {a}.clone() | {a}.contiguous() | {a}.detach()
torch.where({m}, {a}, {b}) | torch.where({m}, {a}, {s}) | {a}.masked_fill({m}, {s}) | torch.zeros_like({a}) + {b}
{a}.t() | {a}.transpose({d}, {e}) | {a}.flatten() | {a}.reshape(-1) | {a}.view(-1) | {a}.unsqueeze({d}) | {a}.squeeze({d})
{a}.squeeze() | {a}[{k}] | {a}[-1] | {a}[..., {k}] | {a}[..., :{k}] | {a}[{k}:] | {a}[::2] | {a}[..., 1:-1] | {a}[None]
{a}.select({d}, {k}) | {a}.narrow({d}, {k}, {l}) | {a}.flip({d}) | {a}.roll({k}, {d}) | {a}.permute(*range({a}.dim())[::-1])
{a}.expand(2, *{a}.shape) | {a}.expand_as({b}) | {a}.repeat(2, *[1] * {a}.dim()) | {a}.repeat_interleave(2, {d})
{a}.diagonal() | {a}.unfold({d}, 2, 1) | {a}.movedim(0, -1) | {a}.swapaxes(0, -1) | {a}.view({a}.shape) | {a}.view_as({b})
{a}.tril() | {a}.triu({k}) | {a}.diag_embed() | {a}.chunk(2, {d})[-1] | {a}.split({k}, {d})[0] | {a}.unbind({d})[-1]
{a}.tensor_split(2, {d})[0] | torch.cat([{a}, {b}], {d}) | torch.stack([{a}, {b}], {d}) | torch.cat([{a}, {a}], {d})
{a}.sum() | {a}.sum({d}) | {a}.sum({d}, keepdim=True) | {a}.sum((0, -1)) | {a}.cumsum({d}) | {a}.amax({d}) | {a}.amin({d})
{a}.max() | {a}.min({d})[0] | {a}.max({d}, keepdim=True)[0] | {a}.aminmax()[1] | {a}.cummax({d})[0]
{a}.index_select({d}, torch.tensor([0, {k}])) | {a}[torch.tensor([0, {k}, 0])] | {a}[..., torch.tensor([{k}])]
{a}.gather({d}, torch.zeros_like({a}, dtype=torch.int64)) | torch.take_along_dim({a}, {a}.argsort(dim={d}, stable=True), {d})
{a}.scatter({d}, torch.zeros_like({a}, dtype=torch.int64), {s}) | {a}.scatter_add({d}, torch.zeros_like({b}, dtype=torch.int64), {b})
{a}.index_add({d}, torch.tensor([0, {k}]), {a}.narrow({d}, 0, 2)) | {a}.index_fill({d}, torch.tensor([{k}]), {s})
{a}.index_put((torch.tensor([0, {k}]),), {b}, accumulate=True) | {a}.index_copy({d}, torch.tensor([{k}]), {a}.narrow({d}, 0, 1))
{a}.select_scatter({b}, {d}, {k}) | {a}.slice_scatter({b}, {d}) | {a}.diagonal_scatter({b}) | {a}.as_strided((2, 2), (1, 1))
F.pad({a}, (1, {k})) | F.pad({a}, (-1, 2), value={s}) | F.pad({a}, (1, 1), mode="reflect") | F.pad({a}, (1, 0), mode="replicate")
F.pad({a}, (1, 1), mode="circular") | {a}.new_zeros({n}) + {a} | {a}.new_full(({n}, 2), {s}) | {a}.to({t}) | {a}.real
{a} + torch.arange({n}) | {a}.reshape({n}, -1) | {a}.view(-1, {n}) | {a}[: {n} // 2] | torch.full_like({a}, {s})
torch.cat([{a}[:1], {a}[1:]]) | torch.atleast_2d({a}) | torch.broadcast_tensors({a}, {b})[0] | torch.hstack([{a}, {b}])
torch.block_diag({a}, {b}) | torch.combinations({a}) | torch.tril_indices({n}, {n}) | torch.ones({n}, 3).tril() | {a}.mT
torch.rot90({a}) | {a}.unflatten(-1, (-1, 2)) | {a}.take(torch.tensor([0, {k}])) | {a}.ravel() | {a}.fliplr() | {a}.T
F.max_pool2d({f}, 2) | F.max_pool1d({f}, 2, 1) | F.hardtanh({f}) | F.pixel_shuffle({f}, 2)
F.relu6({f}) | F.interpolate({f}, scale_factor=2) | F.one_hot({i}.abs() % 4, 5) | F.embedding({i}.abs() % 2, {f})
torch.nn.functional.unfold({f}, 2) | torch.meshgrid({a}.flatten(), {b}.flatten(), indexing="ij")[0] | {a}.nan_to_num()
{a}.fill_diagonal_({s}) | {a}.logical_not() | torch.empty_like({a}).copy_({b}) | torch.add({a}, {b}, alpha=2) | {a}.diff(dim={d})
"""
PRODUCTS = """
{a} * {b} | {a} * {s} | {a}.square() | {a} ** 2 | {a} @ {b} | {a} @ {a}.mT | torch.matmul({a}, {b}.transpose(-1, -2))
torch.addcmul({a}, {b}, {a}) | torch.outer({a}.flatten(), {b}.flatten()[:99]) | {a} * {n} | torch.lerp({f}, {g}, 0.5)
F.linear({f}, {g}) | torch.einsum("...i,...i->...", {a}, {b}) | torch.baddbmm({a}, {b}, {c}) | torch.addmm({a}, {b}, {c})
torch.bmm({a}, {b}) | torch.mv({a}, {b}) | {a}.dot({b}) | F.conv1d({f}, {g}) | F.conv2d({f}, {g}, padding=1) | torch.kron({a}, {b}.flatten()[:9])
torch.tensordot({a}, {b}, 1) | F.leaky_relu({f}, 0.5) | torch.cross({a}, {b}) | F.conv_transpose1d({f}, {g})
"""
ROUND = """
{f}.exp() | {f}.sin() | {f}.tanh() | {f}.sigmoid() | {f}.abs().sqrt() | {f}.abs().log1p() | {f}.rsqrt() | {f}.reciprocal()
{a} / {b} | {a} / 3 | {f}.mean() | {f}.mean({d}) | {f}.var({d}) | {f}.std() | {f}.softmax({d}) | {f}.log_softmax({d})
{f}.logsumexp({d}) | {f}.norm() | {f}.norm(dim={d}) | F.normalize({f}, dim={d}) | F.gelu({f}) | F.silu({f}) | F.softplus({f})
F.layer_norm({f}, {f}.shape[-1:]) | F.elu({f}) | F.mish({f}) | F.hardswish({f}) | torch.erf({f}) | {f}.pow(1.5) | {f}.pow(-1)
F.group_norm({f}, 1) | F.batch_norm({f}, None, None, training=True) | F.avg_pool2d({f}, 2) | F.adaptive_avg_pool1d({f}, 2)
F.mse_loss({f}, {g}) | F.smooth_l1_loss({f}, {g}, reduction="none") | F.cross_entropy({f}, {i}.abs() % 2) | F.logsigmoid({f})
F.kl_div({f}, {g}) | F.binary_cross_entropy_with_logits({f}, {g}.sigmoid()) | F.cosine_similarity({f}, {g}, dim={d})
F.scaled_dot_product_attention({f}, {f}, {f}) | F.interpolate({f}, scale_factor=2, mode="linear") | torch.cdist({f}, {g})
F.interpolate({f}, scale_factor=2, mode="bilinear") | {f}.cumprod({d}) | {f}.cosh() | {f}.atan2({g}) | torch.hypot({f}, {g})
{a}.prod({d}) | {f}.expm1() | torch.logaddexp({f}, {g}) | F.nll_loss({f}, {i}.abs() % 2) | F.rms_norm({f}, {f}.shape[-1:]) | F.glu({f}, {d})
F.instance_norm({f}) | {f}.cov() | torch.polar({f}.abs(), {g}) | torch.complex({f}, {g}) | torch.view_as_real({a}) | {a}.angle()
torch.linalg.vector_norm({f}, 1) | F.huber_loss({f}, {g}) | F.dropout({f}, 0.5) | torch.rand_like({f}) | torch.randn({n}, 2)
torch.randint(0, 5, ({n},)) | {f}.bernoulli() | {f}.logit(0.1) | F.celu({f}) | F.local_response_norm({f}, 2) | {a}.to({t}) * 0.1
F.adaptive_max_pool1d({f}, 2) * 0.3 | F.avg_pool1d({f}, 2, 1, 1) | torch.addcdiv({f}, {f}, {g}) | {f}.logcumsumexp({d}) | {f}.acos()
"""
JUMPS = """
{a} > {b} | {a} <= {s} | {a} == {b} | {a} != 0 | {a}.isnan() | {a}.isfinite() | {f}.floor() | {f}.round() | {f}.trunc() | {a}.sign()
{f}.frac() | {a} // 2 | {a} % 3 | torch.remainder({a}, {b}) | torch.floor_divide({a}, {b}) | {a}.fmod(2) | torch.heaviside({f}, {g})
{a}.argmax({d}) | {a}.argmin() | {a}.sort(dim={d}, stable=True)[0] | {a}.argsort(dim={d}, stable=True) | {a}.topk({k}, {d})[0] | {a}.kthvalue({k}, {d})[0]
{a}.max({d})[1] | {a}.median() | {a}.any({d}) | {a}.all() | {a}.count_nonzero({d}) | {a}.to(torch.int64) | {a}.to(torch.bool)
{a}.to(torch.int32) & 7 | {i} << 1 | ~{i} | {i} ^ 3 | torch.bucketize({f}, torch.tensor([-1.0, 0.0, 2.0])) | {a}.signbit()
torch.searchsorted({a}.sort(-1)[0], {a}) | {a}.isclose({b}) | torch.equal({a}, {b}) | {a}.unique() | {a}.nonzero() | {a}[{m}] | {a}.masked_select({m})
F.threshold({f}, 1, 0) | torch.isin({a}, {b}) | {m} & {m} | ~{m} | {m}.sum({d}) | {m}.cumsum({d}) | {a}.bool() | {a}.long() | {a}.byte() | {i}.bincount() | {a}.histc(3, -5, 5)
torch.eq({a}, {b}).all() | torch.logical_and({a}, {b}) | {a}.item() | {a}.tolist() | {a}.shape | {a}.stride() | {a}.numel() * 2 | {a}.dim()
int({a}.sum()) | float({a}.max()) | {a}.is_contiguous() | len({a}) | {a}.mode()[0] | {a}.argwhere() | torch.copysign({f}, {g}) | torch.fmax({a}, {b})
"""
# Functions of functions, PyTorch's and the program's; levels as of products.
NESTED = """
torch.func.vmap(lambda r: r * 2 + {s})({a}) | torch.func.vmap(lambda r: r.sum(), in_dims={d})({a}) | torch.func.vmap(torch.add)({a}, {b})
torch.func.vmap(lambda r: r.cumsum(0), out_dims=-1)({a}) | torch.func.vmap(lambda r: torch.where(r > 0, r, {b}))({a}) | torch.func.vmap(lambda r: r[{k}])({a})
torch.func.vmap(lambda r: r @ {b})({a}) | torch.func.vmap(lambda r, q: r * q, in_dims=({d}, None))({a}, {b}) | torch.func.vmap(torch.func.vmap(torch.neg))({a})
torch.func.grad(lambda r: (r * r).sum())({f}) | torch.func.grad(lambda r: (r * {b}).sum())({f}) | torch.func.grad_and_value(lambda r: r.square().sum())({f})[1]
torch.func.vmap(torch.func.grad(lambda r: (r * r).sum()))({f}) | torch.func.jvp(lambda r: r * r, ({f},), ({f},))[1] | torch.func.jvp(torch.mul, ({f}, {g}), ({f}, {g}))[1]
torch.func.vjp(lambda r: r * {s}, {f})[1]({f})[0] | torch.func.jacrev(lambda r: r.sum(0) * 2)({f}.flatten()[:9]) | torch.func.jacfwd(lambda r: r.square().sum(-1))({f}[..., :3].flatten()[:9])
torch.func.hessian(lambda r: r.square().sum())({f}.flatten()[:9]) | torch.func.functionalize(lambda r: r.clone().add_(1))({a}) | torch.func.grad(lambda r: torch.func.grad(lambda q: (q * q * r).sum())({f}).sum())({f})
torch.utils.checkpoint.checkpoint(lambda r: r * r.relu(), {f}, use_reentrant=False) | torch.utils.checkpoint.checkpoint(torch.mul, {f}, {g}, use_reentrant=False)
torch.autograd.grad(({f} * {g}).sum(), {f}, create_graph=True)[0] | torch.autograd.grad(({f} * {f}).sum(), {f})[0] | torch.autograd.grad({f}.relu(), {f}, torch.ones_like({f}), create_graph=True)[0]
torch.autograd.grad([{f} * 2, {g} * {f}], [{f}, {g}], [torch.ones_like({f}), torch.ones_like({g} * {f})], allow_unused=True)[0] | torch.autograd.functional.vjp(lambda r: r * r, {f}, {f})[1]
Squared.apply({f}) | Squared.apply({f}.t()) | Scaled.apply({a}, {s}) | Parted.apply({a})[0] | Parted.apply({a})[1] | Doubled.apply({a}.clone()) | Squared.apply(Scaled.apply({f}, 2))
sum(r for r in {a}) | torch.stack([r * 2 for r in {a}]) | [r for r in {a}][-1] | torch.stack([p + q for p, q in zip({a}, {b})]) | list({a})[{k}] | torch.cat([*{a}.split(1)])
max(({a}, {b}), key=lambda one: one.dim()) | sorted([{a}, {b}], key=torch.numel)[0] | (lambda one: one + one)({a}) | caught(lambda: {a} @ {b}) | caught(lambda: {a} + {b}) | caught(lambda: {a}.view({n}))
torch._foreach_add([{a}, {b}], {s})[1] | torch._foreach_mul([{a}, {b}], [{b}, {a}])[0] | {a}.to_sparse().to_dense() | torch.tensor({a}.tolist()) | torch.as_tensor({a}.detach().numpy()) + 1
torch.Tensor.add({a}, {b}) | getattr({a}, "mul")({b}) | torch.ops.aten.add({a}, {b}) | torch.ops.aten.mul.Tensor({a}, {b}) | {a}.__radd__({s}) | {a}.__getitem__({k}) | {a}.data * 2 | {a}.data[{k}]
torch.utils._pytree.tree_map(lambda one: one + 1, [{a}, {b}])[1] | torch.nn.functional.multilabel_margin_loss({f}, {i}) | torch.vmap(lambda r: r.expand(2, *r.shape))({a}) | {a}.__deepcopy__({{}})
torch.where({m}, {a}, {b}).sum() | torch.addmv({a}, {b}, {c}) | torch.chain_matmul({a}, {b}) | torch.trapezoid({f}) | torch.vander({a}) | torch.cumulative_trapezoid({f}) | torch.gradient({f})[0] | {a}.float().T.contiguous()
torch.nn.functional.embedding_bag({i}.abs() % 2, {f}, mode="sum") | torch.index_reduce({f}, {d}, torch.tensor([0, {k}]), {f}.narrow({d}, 0, 2), "amax") | {a}.scatter_reduce({d}, torch.zeros_like({a}, dtype=torch.int64), {a}, "sum")
torch.nn.functional.max_unpool1d(*F.max_pool1d({f}, 2, return_indices=True), 2) | torch.segment_reduce({f}, "sum", lengths=torch.tensor([1, {k}])) | {a}.as_strided({a}.shape, {a}.stride()) | {a}.resize(2, 2)
"""
OF_NESTED = """
torch.func.vmap(lambda r: r.softmax(0))({f}) | torch.func.jacrev(torch.sin)({f}.flatten()[:9]) | torch.func.grad(lambda r: r.exp().sum())({f}) | torch.func.vmap(lambda r: F.dropout(r, 0.5), randomness="different")({f})
torch.func.jvp(torch.tanh, ({f},), ({f},))[1] | torch.func.hessian(lambda r: r.sin().sum())({f}.flatten()[:9]) | torch.utils.checkpoint.checkpoint(lambda r: F.dropout(r.exp(), 0.5), {f}, use_reentrant=False)
torch.autograd.grad({f}.exp().sum(), {f}, create_graph=True)[0] | torch.fft.rfft({f}).abs() | torch.fft.fft({f}).real | torch.fft.irfft({f})
torch.special.i0({f}) | torch.special.erfcx({f}) | torch.special.xlogy({f}, {g}) | torch.sinc({f}) | torch.trapz({f}.exp()) | torch.func.vmap(torch.linalg.vector_norm)({f})
torch.autograd.functional.hessian(lambda r: r.exp().sum(), {f}.flatten()[:5]) | torch.special.log_ndtr({f}) | torch.nan_to_num({f}.log()) | torch.renorm({f}, 2, {d}, 1.0)
"""
FACTS = """
{a}.is_leaf | {a}.requires_grad | {a}.grad_fn is None | {a}.data_ptr() == {b}.data_ptr() | {a}.storage_offset() | {a}.element_size() | {a}.dtype | {a}.layout
{a} is {b} | hash({a}) == hash({b}) | any({a} is one for one in [{b}]) | {a}.is_contiguous(memory_format=torch.channels_last) | {a}.grad is None | {a}.untyped_storage().nbytes() | str({a}.shape)
type({a}).__name__ | {a}.is_inference() | {a}.retains_grad | {a}.is_complex() | {a}.ndim | {a}.nelement() | {a}.size(-1) | [*{a}.size()] | {a}.names | {a}.itemsize | {a}.is_conj() | torch.is_tensor({a}) | isinstance({a}, torch.nn.Parameter)
torch.result_type({a}, {b}) | torch.can_cast({a}.dtype, {b}.dtype) | torch.promote_types({a}.dtype, {b}.dtype) | torch.is_grad_enabled() | {a}.shape == {b}.shape | {a}.is_set_to({b}) | {a}.device.type | f"{{{a}.shape}} {{{a}.dtype}}"
"yes" if {a}.sum() > 0 else "no" | [v for v in {a}.flatten().tolist() if v] | {a}.sum().item() + 1 | bool({m}.any()) | repr({a}) | str({a}) | {a}.detach().numpy().shape
"""
# What writes; its value is the tensor written to, or nothing.
WRITES = """
{a}.add_({b}) | {a}.mul_({s}) | {a}.copy_({b}) | {a}.zero_() | {a}.fill_({s}) | {a}.relu_() | {a}.clamp_(-1, 2) | {a}.sub_({b})
{a}[{k}].add_(1) | {a}[..., 0].mul_(2) | {a}.t().add_({b}) | {a}.masked_fill_({m}, {s}) | {a}.index_fill_({d}, torch.tensor([{k}]), {s})
{a}.index_add_({d}, torch.tensor([{k}]), {a}.narrow({d}, 0, 1).clone()) | {a}.scatter_({d}, torch.zeros_like({a}, dtype=torch.int64), {s})
{a}.transpose_({d}, {e}) | {a}.squeeze_({d}) | {a}.unsqueeze_({d}) | {a}.neg_() | {a}.flatten()[:1].fill_({s}) | {a}.detach().add_(1)
{a}.set_({b}) | torch.add({b}, {c}, out={a}) | torch.maximum({b}, {c}, out={a}) | {a}.narrow({d}, 0, 1).zero_()
{a}.view(-1)[::2].add_({s}) | {a}.expand(2, *{a}.shape)[1].add_(1) | {a}.diagonal().add_(1) | {a}.index_put_((torch.tensor([{k}]),), {b}) | {a}.tril_()
{a}.requires_grad_() | {a}.random_(0, 5) | {a}.normal_() | {a}.floor_() | {a}.cumsum_({d}) | {a}.swapaxes_({d}, {e}) | {a}.addcmul_({b}, {c}) | {a}.triu_()
{a}.apply_(lambda v: v + 1) | {a}.data.mul_(2) | torch._foreach_add_([{a}], 1) | {a}.__iadd__({b}) | torch.relu_({a}) | {a}.scatter_reduce_({d}, torch.zeros_like({a}, dtype=torch.int64), {b}, "sum")
Doubled.apply({a}) | {a}.index_reduce_({d}, torch.tensor([0]), {a}.narrow({d}, 0, 1).clone(), "amin") | torch.func.vmap(lambda r: r.add_(1))({a}) | torch.nn.init.ones_({a}) | torch.nn.init.constant_({a}, {s}) | {a}.squeeze_() | {a}.t_()
{a}.masked_scatter_({m}.clone(), {b}.clone()) | {a}.put_(torch.tensor([0, {k}]), {b}.flatten()[:2]) | torch.add({b}, 1, out={a}[:1]) | torch.sum({b}, {d}, out={a}) | torch.stack([{b}, {b}], out={a}) | {a}.bernoulli_() | {a}.erfinv_()
"""
STATEMENTS = """
{a}[{k}] = {b} | {a}[..., 0] = {s} | {a}[{m}] = {s} | {a}[:1] = {b} | {a}[1:] += {s} | {a} += {b} | {a} *= {s} | {a}[{a} > 1] = {b}
STATE.add_({s}) | STATE.copy_({a}.sum()) | KEPT.append({a}) | COUNT[0] += 1 | {a}.register_hook(lambda g: g * 2) if {a}.requires_grad else None
{a}.retain_grad() if {a}.requires_grad else None | {a}.grad = None | {a}[torch.tensor([0, {k}])] = {b} | {a}[::2], {b} = {s}, {a} + 1 | {a}[0], {a}[-1] = {a}[-1], {a}[0]
{a}, {b} = {b}, {a} | KEPT[:] = [{a}] | KEPT.append(lambda one={a}: one + 1) | {a}.data = {b} | {a}.grad = torch.ones_like({a}) | {a}.backward(torch.ones_like({a}), retain_graph=True) | ({a} * 2).sum().backward()
for _ in range(2): {a} = {a} + 1 | while {a}.dim() < 3: {a} = {a}[None] | for r in {a}: r.mul_(2) | for r in {a}: STATE.add_(r.sum()) | assert {a}.dim() >= 0, "no" | print({a}.shape)
torch.autograd.backward([{a}.sum()], inputs=[{b}]) | {a} = KEPT[-1] if KEPT and isinstance(KEPT[-1], torch.Tensor) and KEPT[-1].shape == {a}.shape else {a} | {a}.requires_grad_(False) | {a}.register_hook(lambda g: KEPT.append(g)) if {a}.requires_grad else None
"""


def _rows(text: str) -> list[str]:
    return [row.strip() for line in text.strip().splitlines() for row in line.split(" | ") if row.strip()]


TABLES = [
    ("same", _rows(SAME), 10),
    ("product", _rows(PRODUCTS), 3),
    ("round", _rows(ROUND), 4),
    ("jump", _rows(JUMPS), 3),
    ("nested", _rows(NESTED), 3),
    ("round", _rows(OF_NESTED), 1),
    ("jump", _rows(FACTS), 1),
    ("write", _rows(WRITES), 2),
    ("statement", _rows(STATEMENTS), 1),
    ("round", _rows(libraries.LIBRARIES), 3),
    ("product", _rows(libraries.OWN), 3),
    ("jump", _rows(libraries.JUMPS), 1),
]


@dataclass(slots=True)
class Draft:
    """A program that grows. names: of values, with their levels; lines: of the body, which ran in `world`."""

    rng: random.Random
    world: World
    levels: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def grow(self) -> None:
        kind, rows, _ = self.rng.choices(TABLES, [weight for *_, weight in TABLES])[0]
        row = self.rng.choice(rows)
        used: list[str] = []
        text = self.fill(row, used, exact=kind == "jump")
        if text is None:
            return
        level = max([self.levels[name] for name in used], default=1)
        if kind in ("product", "nested"):
            level = sum(self.levels[name] for name in used) * (2 if len(used) == 1 else 1) + 1
        name = f"v{len(self.lines)}"
        line = text if kind == "statement" else f"{name} = {text}"
        if kind == "write" and self.rng.random() < 0.5:
            line = text
        if self.rng.random() < 0.04:
            line = self.under_a_branch(line, name, used)
        if self.rng.random() < 0.04:
            line = f"{self.rng.choice(AROUND)}: {line}"
            if "autocast" in line:
                level = ROUNDED
        known = set(self.world.names)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, self.world.names)
        except Exception:
            if self.rng.random() < 0.01:
                self.lines.append(line)  # eager's error is what is asked for
            return
        made = self.world.names.get(name)
        if isinstance(made, torch.Tensor) and made.numel() > LARGEST:
            self.world.names.pop(name)
            return
        self.lines.append(line)
        if isinstance(made, torch.Tensor) and made.dtype in (torch.float16, torch.bfloat16, torch.complex64):
            level = ROUNDED
        if kind == "round":
            level = ROUNDED
        if name in self.world.names and name not in known:
            self.levels[name] = 1 if kind == "jump" else min(level, ROUNDED)
        if kind in ("write", "statement"):  # a write may reach any view
            for other in self.levels:
                self.levels[other] = max(self.levels[other], level)

    def under_a_branch(self, line: str, name: str, used: list[str]) -> str:
        values = [value for value in used if isinstance(self.world.names[value], torch.Tensor)]
        if not values or line.startswith(("STATE", "KEPT", "COUNT")):
            return line
        value = self.rng.choice(values)
        test = self.rng.choice([f"{value}.shape[-1:] > (2,)", f"{value}.dim() > 1", f"{value}.is_contiguous()"])
        if self.levels[value] <= EXACT_FACTORS and self.rng.random() < 0.3:
            test = f"{value}.sum() > 0"
        return f"{name} = ({line.partition(' = ')[2]}) if {test} else {value}"

    def fill(self, row: str, used: list[str], exact: bool) -> str | None:
        values: dict[str, Any] = {}
        for key in "abcfgim":
            if "{" + key + "}" not in row:
                continue
            chosen = self.value(key, exact)
            if chosen is None:
                return None
            values[key] = chosen
            used.append(chosen)
        first = next((self.world.names[values[key]] for key in "afi" if key in values), None)
        rank = first.dim() if isinstance(first, torch.Tensor) else 1
        for key in "de":
            values[key] = self.rng.randrange(-rank, rank) if rank else self.rng.choice((0, -1))
        values["s"] = self.rng.choice(SCALARS)
        values["k"], values["l"] = self.rng.randrange(3), self.rng.randrange(4)
        values["t"] = self.rng.choice(FLOATS + OTHERS)
        values["n"] = self.size()
        return row.format(**values)

    def value(self, key: str, exact: bool) -> str | None:
        def fits(value: Any) -> bool:
            if not isinstance(value, torch.Tensor):
                return False
            if key in "fg":
                return value.is_floating_point()
            if key == "i":
                return not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool
            return key != "m" or value.dtype == torch.bool

        names = [
            name
            for name, level in self.levels.items()
            if fits(self.world.names.get(name)) and not (exact and level > EXACT_FACTORS)
        ]
        if not names:
            return None
        late = names[-4:]
        return self.rng.choice(late if self.rng.random() < 0.6 else names)

    def size(self) -> str:
        name = self.value("a", False)
        value = self.world.names.get(name or "")
        if not isinstance(value, torch.Tensor) or not value.dim():
            return str(self.rng.randrange(5))
        size = f"{name}.shape[{self.rng.randrange(value.dim())}]"
        return self.rng.choice((size, size, f"{size} + 1", f"len({name})", f"{name}.numel()"))


@dataclass(frozen=True, slots=True)
class Argument:
    """What one argument is in every call: its dimensions as numbers of the call's sizes (-1: a literal 1), its dtype."""

    name: str
    dimensions: tuple[int, ...]
    dtype: str
    grad: bool
    special: bool


def _argument(rng: random.Random, name: str, grads: bool) -> Argument:
    rank = rng.choice((0, 1, 2, 2, 2, 3, 3, 4))
    dimensions = tuple(number if rng.random() > 0.15 else -1 for number in range(4 - rank, 4))
    if rng.random() < 0.2:
        dimensions = tuple(rng.sample(dimensions, rank))
    dtype = rng.choice(FLOATS) if grads or rng.random() < 0.75 else rng.choice(OTHERS)
    return Argument(name, dimensions, dtype, grads and rng.random() < 0.7, rng.random() < 0.05)


def _made(rng: random.Random, argument: Argument, sizes: list[int], earlier: list[str], plain: bool) -> str:
    """The expression that makes the argument of one call."""
    shape = [sizes[number] if number >= 0 else 1 for number in argument.dimensions]
    rank, dtype, seed = len(shape), argument.dtype, rng.randrange(100)
    tail = (", grad=True" if argument.grad else "") + (", special=True" if argument.special else "")

    def make(shape: list[int]) -> str:
        return f"made({tuple(shape)}, {dtype}, {seed}{tail})"

    if earlier and rng.random() < 0.04:
        return rng.choice(earlier) + rng.choice(
            ("", "[..., None]", ".detach()", "[None]", ".reshape(-1)", ".flatten()[1:]")
        )
    if plain or not rank:
        return make(shape)
    layout = rng.randrange(10)
    if layout == 0:
        order = rng.sample(range(rank), rank)
        back = [order.index(place) for place in range(rank)]
        return f"{make([shape[place] for place in order])}.permute({tuple(back)})"
    if layout == 1:
        return f"{make([*shape[:-1], shape[-1] + 2])}[..., 1:-1]"
    if layout == 2:
        return f"{make([shape[0] * 2, *shape[1:]])}[::2]"
    if layout == 3:
        wide = [1 if rng.random() < 0.5 else size for size in shape]
        return f"{make(wide)}.expand({tuple(shape)})"
    if layout == 4:
        return f"{make([2, *shape])}[1]"
    if layout == 5 and rank == 2:
        return f"{make([sum(shape) + 1])}.as_strided({tuple(shape)}, (1, 1))"
    if layout == 6:
        return f"{make(shape)}.transpose(0, -1).contiguous().transpose(0, -1)"
    return make(shape)


SETTINGS: list[tuple[dict[str, Any], int]] = [
    ({}, 10),
    ({"dynamic": True}, 5),
    ({"dynamic": False}, 1),
    ({"options": {"checked": True}}, 2),
    ({"dynamic": True, "options": {"checked": True}}, 2),
    ({"backend": "eager"}, 2),
    ({"backend": "eager", "dynamic": True}, 1),
]
AROUND = (
    "with torch.no_grad()",
    "with torch.no_grad()",
    "with torch.enable_grad()",
    "with torch.inference_mode()",
    "with torch.autocast('cpu', torch.bfloat16)",
    "with torch.random.fork_rng()",
    "with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda one: one)",
    "with torch.autograd.graph.save_on_cpu()",
    "with torch.set_grad_enabled(STATE.dim() > 0)",
    "with torch.device('cpu')",
    "with torch.autocast('cpu', torch.float16)",
    "with torch.autocast('cpu', torch.bfloat16), torch.autocast('cpu', enabled=False)",
    "with torch.no_grad(), torch.enable_grad()",
    "with torch.autograd.set_multithreading_enabled(False)",
    "with torch.autograd.graph.disable_saved_tensors_hooks('no')",
    "with torch._C.DisableTorchFunctionSubclass()",
)
MODES = ("", "", "", "", "with torch.no_grad(): ", "with torch.inference_mode(): ")


def program(seed: int) -> str:
    rng = random.Random(seed)
    grads = rng.random() < 0.4
    arguments = [_argument(rng, name, grads) for name in "xyz"[: rng.choice((1, 2, 2, 3))]]
    steps = _steps(rng, arguments, grads, ", again=True" if seed % 5 == 3 else "")
    names = ", ".join(argument.name for argument in arguments)
    head = "STATE = made((), f32, 7)\nKEPT = []\nCOUNT = [0]\n"
    world = World(head)
    draft = Draft(rng, world)
    for line in steps[0][:-1]:
        exec(line, world.names)
    for argument in arguments:
        draft.levels[argument.name] = ROUNDED if argument.dtype in ("f16", "bf16", "c64") or argument.special else 1
    wanted = rng.randrange(1, 9)
    for _ in range(wanted * 4):
        if len(draft.lines) >= wanted:
            break
        draft.grow()
    made = [name for name in draft.levels if name.startswith("v")]
    results = rng.sample(made, min(len(made), rng.choice((1, 1, 2, 3)))) or [arguments[0].name]
    body = [*draft.lines, f"return {', '.join(results)}"]
    text = [f"SETTINGS = {rng.choices([s for s, _ in SETTINGS], [w for _, w in SETTINGS])[0]}", *head.splitlines()]
    text += [f"def program({names}):", *("    " + line for line in body)]
    for number, lines in enumerate(steps):
        text += [f"def step{number}():", *("    " + line for line in lines)]
    return "\n".join(text) + "\n"


def _steps(rng: random.Random, arguments: list[Argument], grads: bool, again: str) -> list[list[str]]:
    steps, sizes = [], [rng.choice(SIZES[2:]) for _ in range(4)]
    plain, call = rng.random() < 0.4, f"program({', '.join(argument.name for argument in arguments)})"
    for number in range(rng.choice((2, 3, 4))):
        if number and rng.random() < 0.8:
            sizes = [rng.choice(SIZES) if rng.random() < 0.6 else size for size in sizes]
        lines: list[str] = []
        for place, argument in enumerate(arguments):
            earlier = [other.name for other in arguments[:place]]
            lines.append(f"{argument.name} = {_made(rng, argument, sizes, earlier, plain and rng.random() < 0.9)}")
        if grads and rng.random() < 0.8:
            lines.append(f"result = {call}; backward(result{again}); return result")
        else:
            lines.append(f"{rng.choice(MODES)}return {call}")
        steps.append(lines)
    return steps
