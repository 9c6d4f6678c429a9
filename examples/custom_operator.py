"""An operator of your own (`torch.library.custom_op`): one node of the graph, with a gradient."""

import torch

import fusewright


@torch.library.custom_op("example::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() ** 3)  # anything that PyTorch does not see into


@cube.register_fake
def _(x):
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@fusewright.compile(fullgraph=True)
def f(x):
    return cube(x.sin()).sum()


x = torch.randn(8, requires_grad=True)
f(x).backward()
expected = 3 * x.detach().sin() ** 2 * x.detach().cos()
torch.testing.assert_close(x.grad, expected)
report = fusewright.explain(f)(x)
print(f"{report.graph_count} graph, {report.graph_break_count} breaks; the gradient is right")
