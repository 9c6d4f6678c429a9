"""Programs of NumPy and PyTorch that users write: arrays, legacy tensors, parameters, hooks, settings, samples,
optimizers."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn.modules.utils import _ntuple, _pair

from tests.capture.call.python_programs import PROGRAMS, made, program  # noqa: F401


def array():
    return (np.arange(6.0).reshape(2, 3),)


@program()
def np_array_of_list(x):
    return x + torch.from_numpy(np.array([1.0, 2.0, 3.0]))


@program(array)
def np_array_of_array(a):
    return np.array(a) + np.asarray(a, dtype=np.float32)


@program(array)
def np_dtype(a):
    return a.astype(np.dtype("float32")), np.dtype(np.int64).itemsize, a.dtype == np.dtype("float64")


@program()
def np_iinfo(x):
    return x.clamp(max=float(np.iinfo(np.int16).max)), np.iinfo("int8").min


@program()
def np_finfo(x):
    return x + np.finfo(np.float32).eps


@program()
def pair_of_sizes(x):
    return x.repeat(_ntuple(2)(3)) + _pair(2)[1]


@program(array)
def np_linalg_norm(a):
    return np.linalg.norm(a), np.linalg.norm(a, axis=1)


@program(array)
def np_meshgrid(a):
    u, v = np.meshgrid(a[0], a[1])
    return u + v


@program(array)
def np_meshgrid_ij(a):
    u, v = np.meshgrid(np.arange(3), np.arange(2), indexing="ij")
    return u * v + a.T


@program()
def np_tolist_constant(x):
    return x + sum(np.arange(3).tolist())


@program(array)
def np_any_all(a):
    return np.any(a > 2), np.all(a >= 0, axis=0), a.any()


@program(array)
def np_power(a):
    return np.power(a, 2), np.power(2.0, a), np.power(a, a)


@program(lambda: (torch.ones(3), np.float32(2.5), np.int64(3)))
def np_scalars(x, a, b):
    return x * a + b, x * np.float64(2), a * 2


@program(array)
def np_scalar_functions(a):
    return a * np.sqrt(2) + np.float32(1.5) * np.pi, np.prod([2, 3]), np.log(10.0)


@program(array)
def np_stack_where(a):
    return np.concatenate([a, a]), np.stack([a, a]), np.where(a > 2, a, 0), np.clip(a, 1, 2), np.maximum(a, 2)


@program(array)
def np_linear_algebra(a):
    return a @ a.T + np.eye(2), np.outer(a[0], a[1]), np.dot(a, a.T)


@program(array)
def np_reductions(a):
    return a.mean(), np.std(a, axis=0), np.cumsum(a), np.argmax(a, 1)


@program(array)
def np_order_statistics(a):
    return np.median(a), np.percentile(a, 30)


@program(array)
def np_median(a):
    return np.median(a), np.median(a, axis=0), np.median(np.where(a > 4, np.float64("nan"), a), axis=1)


@program(array)
def np_inverse(a):
    return np.linalg.inv(a @ a.T), np.einsum("ij,kj->ik", a, a)


@program(array)
def np_solve(a):
    m = a @ a.T
    return np.linalg.solve(m, a), np.linalg.solve(m, a[:, 0]), np.linalg.det(m)


@program(lambda: (np.ones((3, 3)),))
def np_inverse_of_singular(a):
    return np.linalg.inv(a)


@program(lambda: (np.arange(6.0).reshape(2, 3),))
def np_writes(a):
    a[0] = 7
    a += 1
    return a.sum()


@program()
def tensor_of_list(x):
    return x + torch.Tensor([1.0, 2.0, 3.0]), torch.Tensor(2, 3).shape


@program()
def long_tensor(x):
    return x[torch.LongTensor([1, 0])], torch.FloatTensor([1.5]), torch.BoolTensor([True, False])


@program()
def tensor_of_sizes_zero(x):
    return torch.Tensor(), torch.Tensor(x), torch.FloatTensor(2, 3).zero_()


@program()
def parameter_inside(x):
    p = nn.Parameter(x * 2)
    return (p + 1).detach(), p.requires_grad, isinstance(p, nn.Parameter)


@program()
def parameter_returned(x):
    return nn.Parameter(x * 2, requires_grad=False), nn.Parameter(torch.ones(3))


@program(lambda: (made(),))
def data_store(m):
    m.weight.data = m.weight.data * 0.5
    return m.weight.sum().detach()


@program()
def data_store_input(x):
    x.data = x + 1
    return x * 2


@program()
def data_store_written(x):
    v = x[0]
    x.data = x + 1
    x.add_(1)
    v.mul_(3)
    return x * 2, v


@program(lambda: (torch.ones(3), torch.arange(3.0)))
def data_store_of_argument(x, y):
    x.add_(y)
    x.data = y
    return x + 1, x


@program(lambda: (torch.ones(3, requires_grad=True),))
def data_store_trained(x):
    y = x * x
    x.data = x + 1
    return (y * x).sum()


@program()
def data_store_inside(x):
    y = x + 1
    y.data = x * 3
    return y + 1


@program(lambda: (made(), torch.ones(2, 3)))
def data_store_each(m, x):
    with torch.no_grad():
        for p in m.parameters():
            p.data = p.data.clamp(-0.1, 0.1)
        return m(x)


@program(lambda: (made(),))
def data_store_of_another_type(m):
    m.weight.data = m.weight.data.double()
    return m.weight.sum().detach()


@program(lambda: (made(),))
def data_copy(m):
    m.weight.data.copy_(torch.ones(3, 3))
    m.bias.data[0] = 4
    m.weight.data.mul_(2)
    return m.weight.sum().detach()


@program(lambda: (made(),))
def grad_store(m):
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    return m.weight.grad.sum()


@program(lambda: (made(),))
def grad_none(m):
    m.weight.grad = None
    m.zero_grad()
    return m.weight.detach() + 1


def accumulated():
    m = made()
    m(torch.ones(2, 3)).sum().backward()
    return (m,)


@program(accumulated)
def grad_clip(m):
    norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    m.bias.grad.zero_()
    return norm


@program(accumulated)
def grad_scaled(m):
    for p in m.parameters():
        p.grad = p.grad * 2
        p.grad.data.div_(3)
    return m.weight.grad.sum()


@program(lambda: (torch.ones(3, requires_grad=True),))
def register_hook_on_input(x):
    x.register_hook(lambda g: g * 2)
    y = (x * 3).sum()
    return y


@program(lambda: (torch.ones(3, requires_grad=True),))
def register_hook_of_values(x):
    scale = x.sum().detach()
    x.register_hook(lambda g: g * scale)
    x.register_hook(lambda g: g + 1)
    return (x * 3).sum()


@program(lambda: (torch.ones(3),))
def register_hook_refused(x):
    x.register_hook(lambda g: g)
    return x * 2


@program(lambda: (torch.ones(3, requires_grad=True) * 2,))
def register_hook_then_write(x):
    x.register_hook(lambda g: g * 2)
    x.mul_(2)
    return (x * 3).sum()


def doubling(p):
    p.grad.mul_(2)


@program(lambda: (torch.ones(3, requires_grad=True),))
def register_accumulate_hook(x):
    x.register_post_accumulate_grad_hook(doubling)
    return (x * 3).sum()


@program(lambda: (torch.ones(3, requires_grad=True),))
def register_hook_inside(x):
    y = x * 3
    y.register_hook(lambda g: g * 2)
    return y.sum()


@program(lambda: (torch.ones(3, requires_grad=True),))
def retain_grad(x):
    y = x * 3
    y.retain_grad()
    return y.sum(), y


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(3, 3)
        self.l.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))

    def forward(self, x):
        return self.l(x).sum()


@program(lambda: (Hooked(), torch.ones(2, 3, requires_grad=True)))
def module_backward_hook(m, x):
    return m(x)


@program(lambda: (torch.ones(3, requires_grad=True),))
def saved_tensors_hooks(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return (x * x).sum()


@program()
def seeded(x):
    torch.manual_seed(3)
    return x + torch.randn(2, 3)


@program()
def fork_rng(x):
    with torch.random.fork_rng(devices=()):  # the state of a GPU's generator is asked of the GPU
        torch.manual_seed(7)
        y = torch.rand(3)
    return x + y, torch.rand(3)


@program()
def rng_state(x):
    state = torch.get_rng_state()
    y = torch.rand(3)
    torch.set_rng_state(state)
    return x + y - torch.rand(3)


@program()
def default_dtype(x):
    torch.set_default_dtype(torch.float64)
    y = torch.ones(3)
    torch.set_default_dtype(torch.float32)
    return y, torch.ones(3) + x


@program()
def default_device_context(x):
    with torch.device("cpu"):
        y = torch.ones(3)
    return x + y


@program()
def default_device(x):
    torch.set_default_device("cpu")
    y = torch.ones(3)
    torch.set_default_device(None)
    return x + y


@program()
def storage_questions(x):
    return x + 1, x.untyped_storage().nbytes(), x.storage_offset()


@program()
def same_storage(x):
    y = x.t()
    return x + 1, x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@program()
def storage_resize(x):
    y = x + 1
    return y, y.untyped_storage().size()


@program()
def storage_of_views(x):
    y = x + 1
    sizes = y.untyped_storage().nbytes(), y[1].untyped_storage().nbytes(), x.untyped_storage().nbytes()
    return y, sizes, type(x.data_ptr()) is int, isinstance(x.untyped_storage(), torch.UntypedStorage)


@program()
def data_ptr_of_views(x):
    y, z = x.t(), x + 1
    starts = [one.data_ptr() == other.data_ptr() for one, other in ((x, y), (x, z), (z, z[0]), (z, z[1]), (x, x))]
    return z, starts, y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@program(lambda: (torch.ones(2), torch.ones(2)))
def data_ptr_of_two(x, y):
    return x + y, x.data_ptr() == y.data_ptr(), x.data_ptr() != y.data_ptr()


@program(lambda: (lambda w: (w, w.view(1, 2)))(torch.ones(2)))
def data_ptr_of_tied(x, y):
    return x + y, x.data_ptr() == y.data_ptr()


@program(lambda: (torch.ones(2), torch.ones(2), torch.ones(2)))
def data_ptr_of_three(x, y, z):
    return x + y, x.data_ptr() == y.data_ptr(), x.data_ptr() == z.data_ptr()


@program(lambda: (torch.ones(2), torch.ones(2), [torch.ones(3)]))
def deep_copy_of_several(x, y, z):
    a, b, (c, d) = copy.deepcopy((x, x + y, [z, y]))
    a.add_(1), b.add_(2), c[0].add_(3), d.add_(4)
    return x, y, z, a, b, c, d


@program()
def data_ptr_as_number(x):
    return x + 1, x.data_ptr() % 4


@program(lambda: (torch.arange(8.0),))
def view_dtype_beside_base(x):
    y = x + 1
    return y, y.view(torch.int32)[2:], torch.view_as_complex(y.view(2, 2, 2)), x[4:].view(torch.uint8)


@program(lambda: (torch.arange(8.0),))
def view_dtype_written(x):
    x.view(torch.int32).zero_()
    return x.view(torch.int32)


@program()
def view_dtype(x):
    return x.view(torch.int32), (x + 1).view(torch.int16)


@program()
def copy_of_number(x):
    y = torch.empty(2, 3)
    y.copy_(3)
    x.copy_(2.5)
    return y + x


@program()
def generator_none(x):
    return x + torch.randn(2, 3, generator=None) + torch.rand(3, generator=None)


@program(lambda: (torch.ones(3), torch.Generator().manual_seed(2)))
def generator_given(x, g):
    return x + torch.randn(3, generator=g)


@program(lambda: (torch.ones(3), torch.Generator().manual_seed(2)))
def generator_of_many_draws(x, g):
    y = torch.empty(3).normal_(generator=g) + torch.rand(3)
    nn.init.uniform_(y, generator=g)
    return x + y, torch.randperm(4, generator=g), torch.rand(2)


@program()
def generator_made(x):
    g = torch.Generator().manual_seed(5)
    return x + torch.rand(3, generator=g) + torch.rand(3), torch.randperm(4, generator=g)


@program(lambda: (torch.ones(3), torch.Generator().manual_seed(2)))
def generator_state(x, g):
    state = g.get_state()
    y = torch.rand(3, generator=g)
    g.set_state(state)
    g2 = torch.Generator()
    g2.set_state(state)
    return x + y - torch.rand(3, generator=g), torch.rand(3, generator=g2)


@program(lambda: (torch.ones(3), torch.Generator().manual_seed(2)))
def generator_seeded(x, g):
    g.manual_seed(11)
    return x + torch.rand(3, generator=g), torch.rand(2, generator=torch.default_generator)


@program(lambda: (torch.ones(3), torch.Generator().manual_seed(2), torch.tensor([7])))
def generator_and_failure(x, g, i):
    y = torch.rand(3, generator=g)
    torch.manual_seed(3)
    return x + y[i] + torch.rand(1)


@program(lambda: (torch.ones(3, requires_grad=True),))
def seeded_training(x):
    torch.manual_seed(1)
    return (x * torch.rand(3)).sum()


@program(lambda: (torch.arange(6.0).reshape(2, 3), torch.tensor([[0], [1]])))
def gather_sparse_grad(x, i):
    return torch.gather(x, 1, i, sparse_grad=False), x.gather(1, i, sparse_grad=True)


@program(lambda: (torch.tensor([0.5, 1.5, 2.0]),))
def dirichlet_sample(x):
    return torch.distributions.Dirichlet(x).sample()


@program(lambda: (torch.tensor([0.5, 1.5, 2.0]),))
def beta_sample(x):
    return torch.distributions.Beta(x, x + 1).sample(), torch.distributions.Gamma(x, x).sample()


@program()
def functorch_active(x):
    return x + 1, torch._C._are_functorch_transforms_active()


def stepping(kind, **options):
    def make():
        m = made()
        m(torch.ones(2, 3)).sum().backward()
        return m, kind(m.parameters(), **options)

    return make


def step(m, optimizer):
    optimizer.step()
    return m.weight.detach() + 0


for kind in (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Adafactor, torch.optim.Adam, torch.optim.NAdam):
    program(stepping(kind, lr=0.1), f"step_{kind.__name__.lower()}")(step)
program(stepping(torch.optim.RAdam, lr=0.1, foreach=False), "step_radam_loop")(step)


@program()
def error_on_graph_break(x):
    with torch._dynamo.error_on_graph_break(False):
        y = x + 1
    return y * 2


@program()
def patch_dynamo_config(x):
    with torch._dynamo.patch_dynamo_config(verbose=True):
        y = x + 1
    return y * 2


@torch.compiler.disable
def disabled(x):
    return x * 2


@torch._dynamo.forbid_in_graph
def forbidden(x):
    return x * 2


@program()
def data_ptr_of_input(x):
    return x + 1, x.data_ptr() == x.data_ptr()


@program()
def set_num_threads(x):
    return x + 1, torch.get_num_threads()


def parts():
    whole = torch.tensor([3, 2**53 + 1, -5])
    return torch.arange(6.0).reshape(2, 3) / 7 - 0.3, whole, torch.tensor([True, False]), torch.ones(2).half() / 3


@program(parts)
def tensor_of_elements(x, whole, bits, halves):
    a, b, n = x.sum(), x.max(), whole[0]
    return [
        torch.tensor([a, b]),
        torch.tensor((a, 2, True)),
        torch.tensor([[a, -b, 0.0], [b, a, 0], [0, 0, 1]]) @ x[0],
        torch.tensor([[[x[:1, :1]]], [[b]]]),
        torch.as_tensor([a, x.shape[1], 0.5]),
        x.new_tensor([n, b]),
        whole.new_tensor([n, 1.5]),
        x.new_tensor([a], dtype=torch.float16),
        torch.tensor(list(x[0])),
        torch.tensor([row.mean() for row in x]) + 1,
    ]


@program(parts)
def tensor_of_elements_of_several_dtypes(x, whole, bits, halves):
    a, big, bit, half = x[0, 1], whole[1], bits[0], halves[0]
    return [
        torch.tensor([half, 1]),
        torch.tensor([half, 1.0]),
        torch.tensor([half, True]),
        torch.tensor([half, a.double()]),
        torch.tensor([half, half.bfloat16()]),
        torch.tensor([bit, 1]),
        torch.tensor([bit, bit]),
        torch.tensor([big, bit]),
        torch.tensor([big, 2.5]),
        torch.tensor([big, 2.5], dtype=torch.float64),
        torch.tensor([whole.to(torch.uint8)[2], True]),
        torch.tensor([whole.to(torch.uint8)[2], 1]),
        torch.tensor([(a * 1e300).double() * 1e300, 1e300], dtype=torch.float32),
        torch.tensor([a, 1e300, -7e4], dtype=torch.float16),
        torch.tensor([a.to(torch.complex64), a]),
        torch.tensor([big, 1.9], dtype=torch.int64),
        torch.FloatTensor([a, whole[0], 1]),
        torch.LongTensor([big, whole.shape[0]]),
        torch.Tensor([[a], [big]]),
    ]


@program(parts)
def tensor_of_elements_is_detached(x, whole, bits, halves):
    x = x.detach().requires_grad_()
    made = torch.tensor([(x * 2).sum().detach(), 1.0])
    return (x * made[0]).sum() + made[1], made, made.requires_grad


@program(parts)
def tensor_of_elements_under_a_dtype(x, whole, bits, halves):
    torch.set_default_dtype(torch.float64)
    try:
        return torch.tensor([x[0, 0], 1.0]), torch.tensor([whole[0], 2]), torch.Tensor([x[0, 0]])
    finally:
        torch.set_default_dtype(torch.float32)


for _name, _make in {
    "many": lambda x, n: torch.tensor([x[0], x[1]]),
    "lengths": lambda x, n: torch.tensor([[x[0, 0]], [1, 2]]),
    "depths": lambda x, n: torch.tensor([x[0, 0], [1]]),
    "floats_as_integers": lambda x, n: torch.tensor([x[0, 0]], dtype=torch.int64),
    "floats_as_integers_new": lambda x, n: n.new_tensor([x[0, 0]]),
    "floats_as_bits": lambda x, n: torch.tensor([x[0, 0]], dtype=torch.bool),
    "overflow": lambda x, n: torch.tensor([n[1]], dtype=torch.uint8),
    "complex_as_floats": lambda x, n: torch.tensor([x[0, 0] + 1j], dtype=torch.float32),
    "mapped": lambda x, n: torch.vmap(lambda row: torch.tensor([row.sum(), 1.0]))(x),
}.items():

    def _refused(x, whole, bits, halves, make=_make):
        try:
            return make(x, whole)
        except (TypeError, ValueError, RuntimeError) as error:
            return type(error).__name__, str(error).split("\n")[0]

    program(parts, f"tensor_of_elements_{_name}")(_refused)
