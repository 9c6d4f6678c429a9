"""More rows of tensors.py: PyTorch's libraries (linear algebra, Fourier transforms, distributions, quantisation, sparse
tensors), complex numbers, random states, subclasses and operators of users; and what these rows name.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from fusewright.base.records import dataclass


class Marked(torch.Tensor):
    """A subclass without a rule of its own."""


class Doubles(torch.Tensor):
    """A subclass that changes one function, and gives plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.Tensor.add, torch.Tensor.__add__) else result


@dataclass(slots=True)
class Held:
    """A node of pytrees."""

    one: Any
    two: Any = None


torch.utils._pytree.register_pytree_node(Held, lambda held: ([held.one, held.two], None), lambda held, _: Held(*held))


@torch.library.custom_op("fuzz::plus", mutates_args=())
def plus(one: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return one * 1 + by


@torch.library.custom_op("fuzz::write", mutates_args=("one",))
def write(one: torch.Tensor, other: torch.Tensor) -> None:
    one.copy_(one + other.sum().to(one.dtype))


plus.register_fake(lambda one, by=1.0: (one * 1) + by)
write.register_fake(lambda one, other: None)
plus.register_autograd(lambda ctx, gradient: (gradient * 3, None), setup_context=lambda ctx, inputs, output: None)
plus.register_vmap(lambda info, in_dims, one, by=1.0: (plus(one, by), in_dims[0]))


def square(one: torch.Tensor) -> torch.Tensor:
    """A positive definite matrix."""
    return one @ one.mT / 8 + torch.eye(one.shape[-2], dtype=one.dtype) * 64


def drawn(function: Any) -> Any:
    """What is drawn after a seed; the random state is as it was."""
    state = torch.get_rng_state()
    torch.manual_seed(3)
    result = function(), torch.rand(2)
    torch.set_rng_state(state)
    return result


NAMES = {one.__name__: one for one in (Marked, Doubles, Held, square, drawn)}
NAMES |= {"plus": plus, "write": write, "D": torch.distributions, "copy_of": copy.deepcopy}

# Of rounded values.
LIBRARIES = """
torch.linalg.inv(square({f})) | torch.linalg.solve(square({f}), {f}) | torch.linalg.det(square({f}) / 64) | torch.linalg.slogdet(square({f})) | torch.linalg.cholesky(square({f})) | torch.linalg.qr(square({f}))[1].abs() | torch.linalg.svdvals(square({f}))
torch.linalg.eigvalsh(square({f})) | torch.linalg.pinv(square({f})) | torch.linalg.matrix_norm({f}) | torch.linalg.matrix_norm({f}, 1) | torch.linalg.matrix_power(square({f}) / 64, {k}) | torch.linalg.lstsq(square({f}), {f}).solution | torch.linalg.multi_dot([{f}, {f}.mT, {f}])
torch.linalg.solve_triangular(square({f}), {f}, upper=False) | torch.linalg.matrix_exp(square({f}) / 64) | torch.linalg.lu_factor(square({f}))[0] | torch.linalg.vecdot({f}, {f}) | torch.linalg.inv_ex(square({f})) | torch.cholesky_solve({f}, torch.linalg.cholesky(square({f})))
torch.linalg.norm({f}) | torch.linalg.norm({f}, dim={d}, ord=1) | torch.linalg.cross({f}, {g}) | torch.linalg.vander({f}[..., :2]) | torch.logdet(square({f})) | torch.linalg.tensorsolve(square({f}), {f}[..., 0]) | torch.linalg.matrix_rank(square({f})) | torch.trace({f})
torch.fft.fft2({f}).abs() | torch.fft.ifft({f}).imag * 1 | torch.fft.rfft2({f}) | torch.fft.irfft(torch.fft.rfft({f}), n={f}.shape[-1]) | torch.fft.fftshift({f}, {d}) | torch.fft.fftn({f}, dim=({d},)).real | torch.fft.hfft({f}) | torch.fft.rfftfreq({n}) | torch.fft.fft({f}, norm="ortho")
torch.stft({f}.flatten(), 4, window=torch.ones(4), return_complex=True).abs() | torch.hann_window({n}) | torch.einsum("ij,jk->ik", {f}, {f}.t()) | torch.einsum("ij->ji", {a}) | torch.einsum("i...,i...->...", {f}, {f}) | torch.einsum("...ij,...kj->...ik", {f}, {f}) | torch.einsum({f}, [0, 1], {f}, [0, 1], [1])
torch.einsum("ii->i", square({f})) | torch.einsum("i,j->ij", {f}.flatten()[:9], {g}.flatten()[:9]) | torch.einsum("bij,bjk,bkl->bil", square({f}) / 64, {f}, {f}.mT) | torch.linalg.eigh(square({f}))[0] | torch.linalg.eigvals(square({f})).abs().sort()[0] | torch.linalg.cond(square({f}))
{a}.to(torch.complex64) * 1j | ({f} + 1j * {g}).abs() | torch.complex({f}, {f}).conj() + 1 | torch.complex({f}, {f}).conj().imag * 1 | torch.view_as_real(torch.complex({f}, {g})) | torch.view_as_complex(torch.stack([{f}, {f}], -1)) | (1j * {f}).exp().real | torch.complex({f}, {g}) @ torch.complex({f}, {g}).mH
torch.complex({f}, {g}).conj().mul(2).resolve_conj() | torch.complex({f}, {g}).sum({d}) | torch.complex({f}, {g}).angle() | torch.complex({f}, {g}).real.add_(1) | torch.complex({f}, {f}).sqrt().abs() | {a}.to(torch.complex128).mean() | torch.complex({f}, {g}).square().sum().abs() | 2j + {a}
D.Normal({f}, 1.5).log_prob({g}) | D.Normal({f}, {g}.abs() + 1).rsample() | D.Categorical(logits={f}).entropy() | D.Categorical(logits={f}).sample() | D.kl_divergence(D.Normal({f}, 1.0), D.Normal(0.0, 2.0)) | D.Bernoulli(logits={f}).log_prob(torch.ones_like({f})) | D.Uniform({f}, {f} + 1).sample()
D.Independent(D.Normal({f}, 1.0), 1).log_prob({f}) | D.Gamma({f}.abs() + 1, 1.0).rsample() | D.Beta({f}.abs() + 1, 2.0).log_prob(torch.full_like({f}, 0.5)) | D.Dirichlet({f}.abs() + 1).sample() | D.TransformedDistribution(D.Normal({f}, 1.0), [D.SigmoidTransform()]).rsample() | D.Poisson({f}.abs()).sample()
D.MultivariateNormal({f}, torch.eye({f}.shape[-1], dtype={f}.dtype)).log_prob({f}) | D.Laplace({f}, 1.0).cdf({f} + 1) | D.Normal({f}, 1.0, validate_args=False).icdf(torch.full_like({f}, 0.25)) | D.Exponential({f}.abs() + 1).mean | D.OneHotCategorical(logits={f}.double()).sample() | D.Normal({f}, -1.0).mean
drawn(lambda: F.dropout({f}, 0.5)) | drawn(lambda: {f}.sigmoid().bernoulli()) | torch.rand(2, generator=torch.Generator().manual_seed(1)) | torch.randperm({n}) | torch.multinomial({f}.abs() + 1, 1) | torch.empty({n}).exponential_() | torch.empty({n}).geometric_(0.5) | torch.normal({f}, {f}.abs() + 1) | torch.poisson({f}.abs())
(torch.manual_seed({k}), torch.rand({n}))[1] | torch.get_rng_state()[:{k}] | torch.initial_seed() | (torch.seed(), torch.manual_seed(5), torch.rand(1))[2] | torch.randn_like({f}, dtype=torch.float64) | torch.empty_like({f}).log_normal_() | torch.empty_like({f}).uniform_(-1, 1) | torch.rand({f}.shape).to({f}.dtype)
torch.fake_quantize_per_tensor_affine({f}, 0.5, 0, -8, 7) | torch.fake_quantize_per_channel_affine({f}, torch.full(({f}.shape[0],), 0.5), torch.zeros({f}.shape[0], dtype=torch.int32), 0, -8, 7) | torch.quantize_per_tensor({f}.detach().float(), 0.5, 0, torch.qint8).dequantize()
torch.quantize_per_tensor({f}.detach().float(), 0.5, 2, torch.quint8).int_repr() | torch._weight_norm({f}, {f}[:, :1]) | torch._int_mm({i}.to(torch.int8), {i}.to(torch.int8).t()) | ({f} * 2).to(torch.float8_e4m3fn).float() | ({f} / 2).round().clamp(-128, 127).to(torch.int8) | {f}.view(torch.int8).shape
torch.sparse.mm({a}.to_sparse(), {b}) | {a}.to_sparse() @ {a}.mT | ({a} * 0 + 1).to_sparse().coalesce().values() | torch.sparse_coo_tensor(torch.tensor([[0, 1]]), {a}.flatten()[:2], (3,)).to_dense() | {a}.to_sparse_csr().to_dense() | torch.sparse.sum({a}.to_sparse(), {d}) | ({a} * 0 + 1).to_sparse() | ({a}.to_sparse() * 2).to_dense()
"""
# Levels as of products.
OWN = """
{a}.as_subclass(Marked) + {b} | {a}.as_subclass(Marked)[{k}] | {a}.as_subclass(Doubles) + 1 | {a}.as_subclass(Doubles).add({b}) | torch.cat([{a}.as_subclass(Marked), {b}]) | {a}.as_subclass(Marked).as_subclass(torch.Tensor) | type({a}.as_subclass(Marked).sum()).__name__ | torch.nn.Parameter({f}.detach()) * 2
plus({a}) | plus({f}, 2.0) | plus({f}, by={s}).sum() | torch.ops.fuzz.plus({a}, 2) | torch.func.vmap(plus)({a}) | (write({a}, {b}), {a} * 1)[1] | torch.ops.fuzz.write.default({a}.clone(), {b}) | torch.utils._pytree.tree_map(lambda one: one + 1, Held({a}, [{b}])).two[0] | torch.utils._pytree.tree_leaves(Held({a}, ({b}, 1)))
{a}.to(torch.complex128) | {a}.type(torch.DoubleTensor) | {a}.type_as({b}) | torch.asarray({a}) | torch.from_numpy({a}.detach().numpy()) * 1 | torch.empty({n}, 0).sum() | {a}.new_tensor([1, {k}]) | {a}.new_empty(({n}, 0))
torch.mul({a}, {b}, out=torch.empty(0)) | torch.mm({a}, {b}, out={a}.new_empty(0)) | torch.cumsum({a}, {d}, out={a}.new_empty(0)) | torch.cat([{a}, {b}], out={a}.new_empty(0)) | torch.arange({n}, out=torch.empty(0))
torch.amax({a}, {d}, out={a}.new_empty(1)) | torch.clamp({a}, -1, 1, out={a}) | torch.where({m}, {a}, {b}, out={a}) | torch.gather({a}, {d}, torch.zeros_like({a}, dtype=torch.int64), out={a}.new_empty(0)) | torch.stack([{a}, {a}], out={a}.new_empty(2, *{a}.shape)) | torch.abs({a}, out={a}[...])
torch.nested.nested_tensor([{f}.detach(), {f}.detach()]).to_padded_tensor(0.0) | torch.nested.as_nested_tensor([{f}, {f}], layout=torch.jagged).values() | torch.empty({a}.shape, device="meta").shape | {a}.to("meta").t().stride() | torch.nn.utils.rnn.pad_sequence([{a}, {a}[:1]]) | torch.nn.utils.parameters_to_vector([{a}, {b}])
copy_of({a}) | copy_of([{a}, {a}])[1].add_(1) | torch.cartesian_prod({a}.flatten()[:3], {b}.flatten()[:3]) | torch.tensor_split({a}, [1], {d})[1] | torch.dsplit({a}, 1)[0] | torch.column_stack([{a}, {b}]) | {a}.index_put((None, torch.tensor([{k}])), {b})
{a}[..., None, :] | {a}[[0, {k}]] | {a}[:, [0]] | {a}[torch.tensor([True])] | {a}[None, ..., None] | {a}[{i}.flatten()[:2].abs() % 2] | {a}[slice(None), {k}] | {a}[()] | {a}[torch.tensor([[0], [{k}]]), torch.tensor([0])] | {a}[-1:, ...] | {a}[{k} : {n}] | {a}.narrow_copy({d}, 0, 1)
torch.broadcast_to({a}, (2, *{a}.shape)) | torch.swapdims({a}, 0, -1) | torch.moveaxis({a}, {d}, 0) | {a}.sum(dtype=torch.float64) | {a}.sum_to_size({a}.shape) | torch.nansum({a}) | torch.gcd({i}, {i}) | torch.bitwise_left_shift({i}, {k}) | {i} >> 1 | {i} & {i} | torch.ldexp({f}, {i} % 3) | torch.nextafter({f}, {g}) | {i} ** 2
torch.func.vmap(lambda r: torch.func.grad(lambda q: (q * q).sum())(r))({f}) | torch.func.jacrev(lambda r: (r * {s}, r.sum()))({f}.flatten()[:5])[0] | torch.func.vmap(lambda r: r.item() if r.dim() == 9 else r + 1, chunk_size=2)({a}) | torch.func.vmap(lambda r: {{"a": r, "b": (r * 2,)}})({a})["b"][0] | torch.func.vjp(lambda r: (r * r, {{"a": r}}), {f})[0][1]["a"]
torch.func.grad(lambda r: (r["a"] * r["b"]).sum())({{"a": {f}, "b": {f}}})["a"] | torch.func.grad(lambda r, q: (r * q).sum(), argnums=(0, 1))({f}, {f})[1] | torch.func.grad(lambda r: ((r * 2).sum(), r), has_aux=True)({f})[1] | torch.func.linearize(lambda r: r * r, {f})[1]({f}) | torch.func.jacfwd(lambda r: r * {s}, randomness="same")({f}.flatten()[:4])
"""
# Of exact ones, which jump.
JUMPS = """
{i}.to(torch.uint16) | {i}.to(torch.uint16).to(torch.int32) + 1 | {i}.to(torch.uint64) | {i}.view(torch.uint8) | torch.unique_consecutive({a}) | torch.unique({a}, return_inverse=True, return_counts=True) | torch.frexp({f})[1]
torch.logical_xor({a}, {b}) | {a}.nanmedian() | torch.sort({a}, stable=True, out=({a}.new_empty(0), torch.empty(0, dtype=torch.int64))) | torch.max({a}, {d}, out=({a}.new_empty(0), torch.empty(0, dtype=torch.int64))) | {a}[{m}.nonzero(as_tuple=True)] | {a}.take_along_dim({a}.argsort(dim={d}, stable=True), {d})
"""
