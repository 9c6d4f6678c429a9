"""Programs of NumPy that users write: what has an operator of PyTorch's, and what the graph asks NumPy itself for."""

import numpy as np
import torch

from tests.capture.call.python_programs import program


def waves():
    return (np.sin(np.arange(12.0)).reshape(3, 4),)


def two_views():
    base = np.arange(8.0)
    return base[:4], base[2:6]


@program(waves)
def np_order(a):
    return np.sort(a), np.argsort(a, axis=0), np.partition(a, 2), np.sort(a.T, axis=None)


@program(waves)
def np_quantiles(a):
    return np.percentile(a, [10, 90], axis=0), np.quantile(a, 0.3), np.nanmedian(a), np.nanpercentile(a, 5)


@program(waves)
def np_factors(a):
    u, s, _ = np.linalg.svd(a)
    return np.abs(u), s, np.linalg.qr(a).R, np.linalg.cond(a), np.linalg.matrix_rank(np.ones((2, 2)))


@program(lambda: (np.ones((3, 3)),))
def np_cholesky_fails(a):
    return np.linalg.cholesky(a - 2)


@program(waves)
def np_mask_store(a):
    a[a > 0] = 0
    a[[0, 2], 1:] *= 2
    return a * 2


@program(waves)
def np_fancy_index(a):
    chosen = np.argsort(a[0])
    return a[:, chosen] % 0.3, a[[0, 2]], a[np.array([1, 0]), np.array([2, 3])], a[..., None]


@program(waves)
def np_out(a):
    np.add(a, 1, out=a)
    b = np.zeros(4)
    np.sum(a, axis=0, out=b)
    np.multiply(b, b, out=b)
    return b


@program(waves)
def np_sorted_in_place(a):
    a.sort(axis=0)
    a[0] += a[1]
    return a


@program(two_views)
def np_write_beside_a_view(a, b):
    a += 1
    return a + b


@program(waves)
def np_integers(a):
    n = (a * 10).astype(int)
    return n // 3, n % 4, np.power(n, 2), n**2, ~n, n << 1, np.clip(n, 0, 5), n.sum(axis=1), n.mean(), -n


@program(waves)
def np_masked_means(a):
    kept = np.where(a > 0, a, np.nan)
    return np.nanmean(kept), np.nansum(kept, axis=1), np.nanmax(kept), np.isnan(kept).any(), np.nan_to_num(kept)


@program(waves)
def np_errors_ignored(a):
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.floor_divide((a * 0).astype(int), (a * 0).astype(int)), np.log(a * 0)


@program(waves)
def np_numbers_read(a):
    return float(a.mean()), a.item(3) + 1, a.max().item() * 2


@program(waves)
def np_questions(a):
    return np.ndim(a), np.shape(a), np.size(a), a.itemsize, a.nbytes, a.strides, np.float64(3) * a, np.float32(a[0, 0])


@program(waves)
def np_shapes(a):
    parts = np.split(a, 2, axis=1)
    return a.flatten(), a[None].squeeze(), np.expand_dims(a, 0), np.moveaxis(a, 0, 1), np.atleast_2d(a[0]), parts


@program(waves)
def np_write_through_view(a):
    b = a.reshape(-1)
    b[0] = 5
    left, _ = np.split(a, 2, axis=1)
    left[1] = 9
    return a


@program(waves)
def np_spectrum(a):
    s = np.fft.fft(a)
    return s.real, np.abs(np.fft.rfft(a, axis=0)), np.exp(1j * a).imag, s


@program(waves)
def np_signal(a):
    ordered = np.sort(a[0])
    return np.convolve(a[0], a[1]), np.interp([0.5], ordered, a[1]), np.searchsorted(ordered, 0.1), np.diff(a)


@program(waves)
def np_rearranged(a):
    return np.pad(a, 1), np.roll(a, 1), np.tile(a, 2), np.repeat(a, 2), np.triu(a), np.trace(a), np.vstack([a, a])


@program(waves)
def np_statistics(a):
    return a.std(), np.mean(a, axis=(0, 1)), np.average(a, weights=np.abs(a)), np.cov(a), np.max(a, initial=3)


@program(waves)
def np_reduced_to_another_type(a):
    return a.mean(0, dtype=np.float32), np.sum(a.astype(np.float32)), a.astype(np.int8).sum(), np.cumprod(a)


@program(waves)
def np_truths(a):
    return np.isclose(a, a), (a == a).all(), np.any(np.isnan(a)), np.logical_and(a > 0, a < 1), np.sign(a)


@program(waves)
def np_of_constants_and_arrays(a):
    return np.sort([3.0, 1.0, 2.0, 0.0]) + a, np.histogram(a, bins=3)[0], np.unique([1, 1, 2]), np.take(a, [0, 2])


@program(lambda: (torch.arange(6.0).reshape(2, 3),))
def np_of_tensor(x):
    a = (x * 2).numpy()
    return torch.from_numpy(np.sort(a)[:, [0, 1]]) + x[:, :2], np.percentile(a, 50)


@program(waves)
def np_scalar_of_array(a):
    total = a.sum()
    return total / np.sqrt(a.size), np.round(total, 2), total % 2


@program(waves)
def np_einsum(a):
    return np.einsum("ij->i", a), np.tensordot(a, a, 2), np.inner(a, a), np.kron(a[0], a[1]), np.cross(a[:, :3], a[:, 1:])


@program(lambda: (torch.arange(12.0).reshape(3, 4), np.array([2, 0])))
def np_index_of_tensor(x, chosen):
    x[chosen, 1:3] = 5
    return x[chosen], x[:, chosen], x[..., np.array([0, 3])]


@program(waves)
def np_array_of_results(a):
    return np.array([a.sum(), a.max(), 2.0]), np.array([a[0], a[1]])


@program(lambda: (torch.arange(6.0).reshape(2, 3),))
def np_sizes_of_constants(x):
    sizes = np.array([3, 2])
    return x.reshape(tuple(sizes)), x * float(np.prod(x.shape)), x.reshape(sizes[0], -1), sizes.max() + 1


@program(lambda: (torch.arange(6.0).reshape(2, 3),))
def np_arrays_of_tensors(x):
    y = x + 1
    shared = np.asarray(y)
    shared[0] = 7
    return y, np.asarray(x, dtype=np.float64), x.numpy().copy() * 2


@program(lambda: (torch.arange(3), np.float64(2.0), np.int32(3), np.bool_(True)))
def np_numbers_into_tensors(x, real, whole, truth):
    made = torch.tensor(real), torch.as_tensor(whole), torch.asarray(np.float16(2)), torch.tensor([real, 1])
    return made, torch.tensor(data=truth, dtype=None), torch.full((2,), truth), x * real, x + whole, x * truth
