"""A backend of your own: it gets the captured graph, prints its operators, and runs it."""

import torch

import fusewright


@fusewright.register_backend
def counting(gm, example_inputs):
    """Called once for each graph; returns what runs in its place."""
    operators = [node.target.__name__ for node in gm.graph.nodes if node.op == "call_function"]
    print("operators:", ", ".join(operators))
    return gm.forward


@fusewright.compile(backend="counting")
def f(x, y):
    return torch.relu(x + y) * 2


x, y = torch.randn(4), torch.randn(4)
assert torch.equal(f(x, y), torch.relu(x + y) * 2)
print("backends:", ", ".join(fusewright.list_backends()))
