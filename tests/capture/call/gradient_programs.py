"""Programs whose torch functions have no nodes of their own in a graph of torch functions: transforms, custom
gradients, the engine called inside, checks of values, optimizers, sizes and numbers that depend on data."""

import functools

import numpy as np
import torch
import torch._decomp.decompositions_for_jvp  # its import warns, once
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.capture.call.python_programs import PROGRAMS, made, program  # noqa: F401
from tests.capture.call.torch_programs import stepping

OPTIONS: dict[str, dict] = {}
"""What a program is compiled with."""


def with_options(make, **options):
    """A row whose program is compiled with `options`."""

    def add(function):
        OPTIONS[function.__name__] = options
        return program(make)(function)

    return add


def leaf(*shape):
    torch.manual_seed(1)
    return torch.randn(*shape or (2, 3), requires_grad=True)


def plain():
    return (leaf().detach(),)


def trained():
    return (leaf(),)


# Transforms.


@program(plain)
def vmap_of_function(x):
    return vmap(lambda row: row.sin() * row.sum())(x)


@program(trained)
def vmap_trained(x):
    return vmap(lambda row: (row * row).sum())(x).sum()


@program(plain)
def vmap_dimensions(x):
    return vmap(torch.dot, in_dims=(1, None))(x, x[:, 0]), vmap(lambda a: a + 1, in_dims=1, out_dims=1)(x)


@program(plain)
def vmap_nested(x):
    return vmap(vmap(lambda a, b: a * b, (0, None)), (None, 0))(x[0], x[1])


@program(plain)
def grad_of_function(x):
    return grad(lambda a: (a.sin() * a).sum())(x)


@program(trained)
def grad_trained(x):
    return grad(lambda a: (a**3).sum())(x).sum()


@program(plain)
def grad_and_value_of(x):
    return grad_and_value(lambda a: a.exp().sum())(x)


@program(plain)
def grad_of_vmap(x):
    return grad(lambda a: vmap(lambda row: row.prod())(a).sum())(x)


def made_and_rows():
    return made(), torch.arange(6.0).reshape(2, 3)


@program(made_and_rows)
def vmap_of_grad_of_module(m, x):
    weights = {name: p.detach() for name, p in m.named_parameters()}
    return vmap(grad(lambda w, row: functional_call(m, w, (row,)).sum()), (None, 0))(weights, x)


@program(plain)
def jvp_of_function(x):
    return jvp(lambda a: a.sin() * 2, (x,), (torch.ones_like(x),))


@program(plain)
def vjp_of_function(x):
    out, pull = vjp(lambda a: a.sin() * 2, x)
    return out, pull(torch.ones_like(out))


@program(plain)
def jacrev_of_function(x):
    return jacrev(lambda a: (a * a).sum(1))(x)


@program(plain)
def jacfwd_of_function(x):
    return jacfwd(lambda a: (a * a).sum(1))(x)


@program(plain)
def hessian_of_function(x):
    return hessian(lambda a: (a**3).sum())(x[0])


@program(trained)
def jacrev_trained(x):
    return jacrev(lambda a: (a**3).sum(1))(x).sum()


@program(plain)
def transform_then_print(x):
    y = vmap(torch.sin)(x)
    print("done")
    return y


@program(plain)
def transform_raises(x):
    return vmap(lambda a, b: a + b)(x, x[0])


# Custom gradients.


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 5 + x


class Apart(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x.exp() * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0] * 3, None


@program(trained)
def function_applied(x):
    return Doubled.apply(x).sum()


@program(plain)
def function_without_gradients(x):
    return Doubled.apply(x) + 1


@program(trained)
def function_with_context_apart(x):
    return Apart.apply(x, 0.5).sum()


@program(trained)
def function_twice(x):
    return Doubled.apply(Doubled.apply(x) + 1).sum()


class Counted(torch.autograd.Function):
    calls = []

    @staticmethod
    def forward(ctx, x):
        Counted.calls.append(1)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@program(trained)
def function_with_effect(x):
    Counted.calls.clear()
    y = Counted.apply(x).sum()
    return y, len(Counted.calls)


# Checkpoints.


@program(lambda: (made(), leaf()))
def checkpoint_of_module(m, x):
    return checkpoint(lambda a: m(a).relu() * 2, x, use_reentrant=False).sum()


@program(lambda: (made(), leaf()))
def checkpoint_reentrant(m, x):
    return checkpoint(m, x, use_reentrant=True).sum()


@program(lambda: (nn.Sequential(made(), nn.ReLU(), made()), leaf()))
def checkpoint_of_sequence(m, x):
    return checkpoint_sequential(m, 2, x, use_reentrant=False).sum()


@program(plain)
def checkpoint_without_gradients(x):
    return checkpoint(torch.sin, x, use_reentrant=False)


# The engine inside.


@program(trained)
def autograd_grad_inside(x):
    return torch.autograd.grad((x**3).sum(), x)[0]


@program(trained)
def autograd_grad_created(x):
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return (g * g).sum()


@program(made_and_rows)
def autograd_grad_of_parameters(m, x):
    return torch.autograd.grad(m(x).sum(), list(m.parameters()))


@program(plain)
def autograd_grad_of_inner(x):
    y = x.clone().requires_grad_()
    return torch.autograd.grad((y.sin()).sum(), y)[0]


@program(trained)
def autograd_grad_hooked(x):
    y = x * 2
    y.register_hook(lambda g: g * 10)
    return torch.autograd.grad(y.sum(), x)[0]


@program(made_and_rows)
def backward_inside(m, x):
    loss = m(x).square().mean()
    loss.backward()
    return loss.detach(), m.weight.grad + 0


@program(made_and_rows)
def backward_function_inside(m, x):
    torch.autograd.backward([m(x).sum()])
    return m.bias.grad * 2


@program(trained)
def backward_of_argument(x):
    (x * x).sum().backward()
    return x.grad.sum()


@program(made_and_rows)
def train_step(m, x):
    m.zero_grad()
    loss = F.mse_loss(m(x), x)
    loss.backward()
    with torch.no_grad():
        for p in m.parameters():
            p -= 0.1 * p.grad
    return loss.detach()


@program(trained)
def gradient_penalty(x):
    y = x.tanh().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return y + (g.norm(2) - 1) ** 2


@program(trained)
def hook_inside(x):
    y = x * 3
    y.register_hook(lambda g: g * 2)
    return y.sum()


@program(plain)
def requires_grad_inside(x):
    y = (x * 2).requires_grad_()
    return (y * y).sum()


@program(trained)
def detached_inside(x):
    y = x.detach() * 2
    with torch.no_grad():
        z = x * 3
    return (x * y + z).sum()


# Checks of values.


@program(plain)
def assert_that_holds(x):
    assert (x < 100).all()
    return x + 1


@program(plain)
def assert_that_fails(x):
    assert (x > 100).all(), "too small"
    return x + 1


@program(plain)
def raise_if(x):
    if torch.isnan(x).any():
        raise ValueError("nan")
    return x + 1


@program(lambda: (torch.tensor([float("nan"), 1.0]),))
def raise_if_raises(x):
    x.mul_(2)
    if torch.isnan(x).any():
        raise ValueError("nan")
    return x + 1


@program(plain)
def torch_check_all(x):
    torch._check_tensor_all(x < 100)
    return x * 2


@program(plain)
def assert_async(x):
    torch._assert_async((x < 100).all())
    return x * 2


@program(trained)
def normal_validated(x):
    return torch.distributions.Normal(x, x.exp()).log_prob(x * 2).sum()


@program(lambda: (torch.tensor([[0.2, 0.8], [0.5, 0.5]]),))
def categorical_validated(p):
    d = torch.distributions.Categorical(probs=p)
    return d.log_prob(torch.tensor([0, 1])), d.entropy()


@program(lambda: (torch.tensor([0.2, 2.0]),))
def bernoulli_invalid(p):
    return torch.distributions.Bernoulli(probs=p).mean + 1


@program(lambda: (torch.eye(3) * 2, torch.ones(3)))
def multivariate_normal(c, x):
    return torch.distributions.MultivariateNormal(torch.zeros(3), c).log_prob(x)


@program(plain)
def kl_of_normals(x):
    n = torch.distributions.Normal
    return torch.distributions.kl_divergence(n(x, torch.ones_like(x)), n(0.0, 1.0))


# NumPy's scalars, operators by name.


@program(lambda: (leaf().detach(), np.float32(0.5)))
def numpy_scalar_operand(x, s):
    return x * s, torch.add(x, s), x + np.int64(3)


@program(lambda: (leaf().detach(), np.float64(0.5), np.bool_(True)))
def numpy_scalar_argument(x, s, b):
    return F.leaky_relu(x, s), torch.clamp(x, min=np.float32(0.1)), x * (2 if b else 3)


@program(lambda: (leaf().detach(), np.int64(1)))
def numpy_scalar_dimension(x, d):
    return x.sum(d), torch.full((2,), np.float32(1.5)), x.reshape(np.int64(3), 2)


@program(plain)
def operator_packet(x):
    return torch.ops.aten.add(x, 1), torch.ops.aten.sum.dim_IntList(x, [0]), torch.ops.aten.relu(x)


@program(trained)
def operator_packet_trained(x):
    return torch.ops.aten.mul(x, torch.ops.aten.sin.default(x)).sum()


@program(plain)
def operator_of_prims(x):
    return torch.ops.prims.sin(x), torch.ops.aten.split(x, 1)


# Optimizers.


def step_twice(m, optimizer):
    optimizer.step()
    optimizer.step()
    return m.weight.detach() + 0


def train_with(m, optimizer):
    optimizer.zero_grad()
    loss = m(torch.ones(2, 3)).square().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


for kind, options in (
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.RMSprop, {"momentum": 0.5}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Rprop, {}),
):
    program(stepping(kind, lr=0.1, **options), f"twice_{kind.__name__.lower()}")(step_twice)
program(stepping(torch.optim.SGD, lr=0.1), "train_with_sgd")(train_with)
program(stepping(torch.optim.Adam, lr=0.1), "train_with_adam")(train_with)

# Sizes and numbers that depend on data.

shapes = functools.partial(with_options, capture_dynamic_output_shape_ops=True)
numbers = functools.partial(with_options, capture_scalar_outputs=True)


@shapes(plain)
def masked(x):
    return x[x > 0] * 2


@shapes(trained)
def masked_trained(x):
    return (x[x > 0] * 2).sum()


@shapes(trained)
def masked_select_trained(x):
    return torch.masked_select(x, x > 0).exp().sum()


@shapes(plain)
def nonzero_places(x):
    return torch.nonzero(x > 0) + 1, (x > 0).nonzero(as_tuple=True)


@shapes(trained)
def nonzero_trained(x):
    return x.index_select(0, (x.sum(1) > -100).nonzero().flatten()).sum()


@shapes(lambda: (torch.tensor([3, 1, 3, 2]),))
def unique_values(x):
    return x.unique() * 2, torch.unique(x, return_counts=True)


@shapes(lambda: (leaf(4), torch.tensor([3, 1, 3, 2])))
def unique_trained(x, i):
    return (x[i.unique()] ** 2).sum()


@shapes(lambda: (torch.tensor([3, 1, 3, 2]),))
def bincount_of(x):
    return torch.bincount(x) + 1


@shapes(lambda: (leaf(2), torch.tensor([3, 1])))
def repeat_interleave_trained(x, n):
    return (torch.repeat_interleave(x, n) ** 2).sum()


@shapes(trained)
def masked_store_trained(x):
    y = x * 2
    y[y > 0] = 0
    return y.sum()


@shapes(trained)
def masked_twice(x):
    y = x[x > -1]
    return y[y < 1].sum()


@numbers(lambda: (torch.tensor([2.5]), leaf()))
def item_of_float(a, x):
    return (x * a.item()).sum()


@numbers(lambda: (torch.tensor(2), leaf()))
def item_of_int(n, x):
    return (x * n.item()).sum(), torch.zeros(int(n.item())) + 1


@numbers(lambda: (torch.tensor([1.5, 2.5]), leaf()))
def tolist_of_floats(a, x):
    first, second = a.tolist()
    return (x * first + second).sum()


@numbers(lambda: (torch.tensor([1, 2]), leaf(3)))
def tolist_as_sizes(n, x):
    return [part * 2 for part in x.split(n.tolist())]


@numbers(lambda: (torch.tensor([1, 2]), leaf(3).detach()))
def tolist_as_sizes_plain(n, x):
    return [part * 2 for part in x.split(n.tolist())]


@numbers(lambda: (torch.tensor(3.0),))
def item_returned(a):
    return a.item() * 2, a + 1


@numbers(lambda: (torch.tensor(2), leaf().detach()))
def item_as_slice(n, x):
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= 3)
    return x[:, :k] + 1
