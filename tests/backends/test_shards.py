"""`fusewright.parallel.shard` on 4 devices: results, gradients and writes are those of the whole function, or an error."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fusewright
import fusewright.parallel
from fusewright.parallel import psum, shard

jax = pytest.importorskip("jax")

FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
on_four = pytest.mark.skipif(jax.device_count() != 4, reason="run by test_on_four_devices")


def test_on_four_devices() -> None:
    """Runs the others of this file: the number of devices is fixed when jax starts."""
    if jax.device_count() == 4:
        pytest.skip("this is that run")
    env = {**os.environ, **FOUR, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


def spec(*axes):
    return jax.sharding.PartitionSpec(*axes)


def mesh():
    return jax.make_mesh((2, 2), ("a", "b"))


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def product(w, x):
    return psum(x @ w, "b"), x.sin()


CASES = {  # whole function, the sharded one where it is another, arguments, mesh, in_specs, out_specs
    "a batch": (lambda x: (x.exp(), x * 2), None, [(8, 4)], 4, 0, 0),
    "another dimension": (lambda x: x.t().softmax(1), None, [(3, 8)], 4, 1, 0),
    "from the end": (lambda x: x.cumsum(0), None, [(3, 8)], 4, -1, -1),
    "replicated and cut": (lambda w, x: torch.tanh(x @ w), None, [(4, 4), (8, 4)], 4, (None, 0), 0),
    "a sum over all": (lambda x: (x * x).sum(), lambda x: psum((x * x).sum()), [(8, 4)], 4, 0, None),
    "alike beside different": (
        lambda w, x: (w * x).sum() + w.exp().sum(), lambda w, x: psum((w * x).sum()) + w.exp().sum(),
        [(4,), (8, 4)], 4, (None, 0), None,
    ),
    "sums of sums": (
        lambda x: x * x.sum(), lambda x: x * psum(x.sum()), [(8,)], 4, 0, 0,
    ),
    "one result twice": (lambda x: (x.sin(), x.sin()), None, [(8, 2)], 4, 0, (0, 0)),
    "nothing cut": (lambda x: x.square().sum(0), None, [(3, 2)], 4, None, None),
    "two axes": (
        lambda w, x: (x @ w, x.sin()), product, [(4, 3), (6, 4)], "2x2",
        lambda: (spec("b"), spec("a", "b")), lambda: (spec("a"), spec("a", "b")),
    ),
    "one of two axes": (lambda x: x.cos(), None, [(6, 4)], "2x2", lambda: spec("a"), lambda: spec("a")),
}  # fmt: skip


@on_four
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_whole_functions(name) -> None:
    whole, part, shapes, on, in_specs, out_specs = CASES[name]
    torch.manual_seed(0)
    on = mesh() if on == "2x2" else on
    in_specs, out_specs = (made() if callable(made) else made for made in (in_specs, out_specs))
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    run = shard(part or whole, on, in_specs, out_specs)
    made = []
    for function in (whole, run):
        with torch.no_grad():
            quiet = function(*args)
        results = function(*args)
        torch.testing.assert_close(quiet, results)
        flat = results if isinstance(results, tuple) else (results,)
        loss = sum((place + 1) * (result * torch.arange(result.numel()).view(result.shape) / result.numel()).square().sum() for place, result in enumerate(flat))
        made.append((results, torch.autograd.grad(loss + sum(one.sum() for one in flat), args)))
    torch.testing.assert_close(made[1], made[0])


@on_four
def test_a_module_trains_as_the_whole_batch_does() -> None:
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(8, 4)
    run = shard(model, None, 0, 0)
    for batch in (x, torch.cat([x, x])):
        made = []
        for function in (model, run):
            model.zero_grad()
            loss = function(batch).square().mean()
            loss.backward()
            made.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        torch.testing.assert_close(made[1], made[0])
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.1)


class Counting(nn.Module):
    """Writes what is the same on all devices, or what is not."""

    def __init__(self, alike) -> None:
        super().__init__()
        self.alike = alike
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += psum(x.sum()) if self.alike else x.sum()
        return x * 2 + self.seen.square()

    def forward_whole(self, x):
        self.seen += x.sum()
        return x * 2 + self.seen.square()


@on_four
def test_a_buffer_takes_what_is_alike_on_all_devices() -> None:
    x, model = torch.randn(8, 2), Counting(True)
    run = shard(model, 4, 0, 0)
    x.requires_grad_()
    for calls in (1, 2):
        made, total = run(x), calls * x.sum().detach()
        torch.testing.assert_close(made, x * 2 + total.square())
        torch.testing.assert_close(model.seen, total)
    made = []
    for function in (model.forward_whole, run):  # the buffer has gradients of its own
        model.seen = torch.zeros(())
        result = function(x)
        made.append(torch.autograd.grad(result.sum() + model.seen.exp(), x))
    torch.testing.assert_close(made[1], made[0])


@on_four
@pytest.mark.parametrize(
    "function, in_specs, out_specs, error, text",
    [
        (lambda x: x.sum(), 0, None, fusewright.BackendError, "not the same on all devices"),
        (Counting(False), 0, 0, fusewright.BackendError, "not the same on all devices"),
        (nn.BatchNorm1d(6), 0, 0, fusewright.BackendError, "not the same on all devices"),
        (lambda x: x.add_(1), 0, 0, fusewright.BackendError, "writes to an argument"),
        (lambda x: x.t()[0].mul_(2), 0, 0, fusewright.BackendError, "writes to an argument"),
        (lambda x: torch._foreach_add_([x], 1), 0, 0, fusewright.BackendError, "writes to an argument"),
        (lambda x: torch.dropout(x, 0.5, True), 0, 0, fusewright.BackendError, "no row for"),
        (lambda x: x + psum(x, "c"), 0, 0, fusewright.BackendError, "no axis of the mesh"),
        (lambda x: x, 1, 0, ValueError, "6 elements, which 4 devices"),
        (lambda x: x, 2, 0, ValueError, "no dimension"),
        (lambda x: x, (0, 0), 0, ValueError, "2 specs for 1"),
        (lambda x: torch.ones(4)[(x.sum() > 1e9).long() + 4 + x.long() * 0], 0, 0, fusewright.BackendError, "out of range"),
    ],
)  # fmt: skip
def test_what_has_no_such_form_is_an_error(function, in_specs, out_specs, error, text) -> None:
    with pytest.raises(error, match=text):
        shard(function, 4, in_specs, out_specs)(torch.randn(8, 6))


@on_four
def test_psum_and_meshes_elsewhere_are_errors() -> None:
    x = torch.randn(8, 2)
    for f in (psum, fusewright.compile(lambda x: psum(x), backend="xla", fullgraph=True)):
        with pytest.raises(fusewright.BackendError, match="psum"):
            f(x)
    with pytest.raises(ValueError, match="4 devices"):
        shard(psum, 5, 0, None)
    same = shard(lambda x, y: x[:2] + y[:2], 4, (0, None), 0)
    with pytest.raises(fusewright.BackendError, match="one tensor is two arguments"):
        same(x, x)
