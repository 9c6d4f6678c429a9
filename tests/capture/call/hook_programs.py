"""Programs that hook into gradients, make parameters, and step optimizers."""

import torch
from torch import nn

import fusewright
from tests.capture.call.gradient_programs import leaf, plain, trained
from tests.capture.call.python_programs import made, program
from tests.capture.call.torch_programs import step, stepping

# Gradients that a tensor keeps.


@program(trained)
def retain_grad_of_hidden(x):
    y = x * 3
    y.retain_grad()
    return (y * y).sum()


@program(trained)
def retain_grad_inside_backward(x):
    y = x * 3
    y.retain_grad()
    (y * y).sum().backward()
    return y.grad + 1


@program(lambda: ((lambda x: (x, x * 2))(leaf())))
def retain_grad_of_argument(x, y):
    x.retain_grad()
    y.retain_grad()
    return (x * y).sum()


@program(plain)
def retain_grad_without_gradient(x):
    x.retain_grad()
    return x + 1


@program(plain)
def gradient_of_returned_leaf(x):
    y = x.clone().requires_grad_()
    (y * y).sum().backward()
    return y


@program(plain)
def gradient_stored_to_made_leaf(x):
    y = x.clone().requires_grad_()
    y.grad = torch.ones_like(x)
    (y * y).sum().backward()
    return y, y.grad is None


@program(plain)
def requires_grad_stored(x):
    y = x * 1
    y.requires_grad = True
    return (y * 2).sum()


@program(trained)
def requires_grad_stored_to_a_result(x):
    y, errors = x * 2, []
    for one in (y, y.detach()):
        try:
            one.requires_grad = True
        except RuntimeError as error:
            errors.append(str(error))
    return (y * y).sum(), errors


# Hooks.


@program(trained)
def hooks_on_one_tensor(x):
    y = x * 2
    y.register_hook(lambda g: g * 10)
    y.register_hook(lambda g: g + 1)
    return (y * y).sum()


@program(trained)
def hook_removed(x):
    y = x * 2
    y.register_hook(lambda g: g * 10).remove()
    return (y * y).sum()


def hooked(*factors):
    """A leaf that has hooks already, and their handles."""
    x = leaf()
    return x, [x.register_hook(lambda g, factor=factor: g * factor) for factor in factors]


@program(trained)
def hook_of_argument_removed(x):
    handle = x.register_hook(lambda g: g * 10)
    handle.remove()
    handle.remove()
    other = x.register_hook(lambda g: g + 1)
    return (x * x).sum(), handle, other is handle


@program(trained)
def hook_of_argument_in_with(x):
    with x.register_hook(lambda g: g * 10) as handle:
        y = x * x
    x.register_hook(lambda g: g + 1)
    return y.sum(), handle


@program(lambda: hooked(2, 3))
def older_hook_removed(x, handles):
    handles[0].remove()
    return (x * x).sum(), len(handles)


@program(lambda: hooked(2, 3))
def older_hook_removed_after_another(x, handles):
    x.register_hook(lambda g: g * 5)
    handles[0].remove()
    return (x * x).sum()


@program(lambda: hooked(2, 3))
def older_hook_removed_before_another(x, handles):
    handles[0].remove()
    x.register_hook(lambda g: g * 5)
    return (x * x).sum()


@program(trained)
def hook_removed_behind_a_break(x):
    handle = x.register_hook(lambda g: g * 10)
    y = x * x
    fusewright.graph_break()
    handle.remove()
    x.register_hook(lambda g: g + 1)
    return y.sum()


@program(trained)
def hook_then_write_to_made(x):
    y = x * 2
    y.register_hook(lambda g: g * 10)
    y.mul_(3)
    return (y * y).sum()


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.l, self.factor = nn.Linear(3, 3), factor

    def forward(self, x):
        y, factor = self.l(x).relu(), self.factor
        y.register_hook(lambda g: g * factor)
        return x + y


@program(lambda: (nn.Sequential(*[Scaled(2.0) for _ in range(5)]), leaf()))
def hook_in_each_layer(m, x):
    return m(x).sum()


@program(trained)
def node_hooked(x):
    y = (x * 2).exp()
    y.grad_fn.register_hook(lambda given, taken: (given[0] * 3,))
    y.grad_fn.register_prehook(lambda taken: (taken[0] + 1,))
    return y.sum(), y.grad_fn.name(), y.grad_fn is y.grad_fn, y.grad_fn.next_functions[0][0].name()


@program(plain)
def node_of_nothing(x):
    return (x * 2).grad_fn is None, x.grad_fn is None


class Hooked(nn.Module):
    def __init__(self, kind, hook):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        for one in (self.a, self.b):
            getattr(one, kind)(hook)

    def forward(self, x):
        return self.b(self.a(x).relu()).sum()


def call(m, x):
    return m(x)


for name, kind, hook in (
    ("full", "register_full_backward_hook", lambda m, given, taken: (given[0] * 2 + taken[0],)),
    ("full_none", "register_full_backward_hook", lambda m, given, taken: None),
    ("pre", "register_full_backward_pre_hook", lambda m, taken: (taken[0] * 2,)),
    ("old", "register_backward_hook", lambda m, given, taken: None),
):
    program(lambda kind=kind, hook=hook: (Hooked(kind, hook), leaf()), f"module_hook_{name}")(call)


@program(lambda: (Hooked("register_full_backward_hook", lambda m, given, taken: (given[0] * 2,)), leaf()))
def module_hook_without_gradients(m, x):
    with torch.no_grad():
        return m(x)


# Saved tensors.


@program(trained)
def saved_tensors_changed(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t + 1):
        y = (x * x).sin()
    return (y * y).sum()


@program(trained)
def saved_tensors_in_half(x):
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.dtype, t.to(torch.bfloat16)), lambda pair: pair[1].to(pair[0])
    ):
        y = (x * x).sin()
    return (y * y).sum()


@program(trained)
def saved_tensors_nested(x):
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: t + 1, lambda t: t * 2):
        y = x.exp()
        with hooks(lambda t: t, lambda t: t * 3):
            z = y * x
        return (z * y).sum()


@program(trained)
def saved_on_cpu(x):
    with torch.autograd.graph.save_on_cpu():
        return (x * x).sin().sum()


@program(trained)
def saved_hooks_forbidden(x):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        y = (x * x).sum()
        with torch.autograd.graph.disable_saved_tensors_hooks("nor here"):
            return y + x.sum()


@program(trained)
def saved_hooks_while_forbidden(x):
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        with torch.autograd.graph.save_on_cpu():
            return (x * x).sum()


# Parameters.


@program(plain)
def parameter_of_argument(x):
    return nn.Parameter(x)


@program(plain)
def parameter_facts(x):
    w = nn.Parameter(torch.ones(3), requires_grad=False)
    v = nn.Parameter(torch.ones(3))
    return w, isinstance(w, nn.Parameter), type(v) is nn.Parameter, w.requires_grad, v.requires_grad, v.is_leaf, x * w


@program(plain)
def parameter_trained_inside(x):
    w = nn.Parameter(torch.ones(3))
    (x * w).sum().backward()
    return w


@program(plain)
def parameter_used_and_returned(x):
    w = nn.Parameter(torch.ones(3))
    return (x * w).sum(), w


@program(lambda: (made(), *plain()))
def parameter_assigned(m, x):
    m.weight = nn.Parameter(x[:1].expand(3, 3).clone())
    return m(x)


@program(plain)
def module_made_inside(x):
    linear = nn.Linear(3, 2, bias=False)
    nn.init.constant_(linear.weight, 0.5)
    return linear(x).detach()


@program(plain)
def buffer_made_inside(x):
    b = nn.Buffer(torch.ones(3))
    return x + b, type(b).__name__, isinstance(b, nn.Buffer)


@program(plain)
def subclass_made_to_require(x):
    return torch.Tensor._make_subclass(nn.Parameter, x + 1, True), torch.Tensor._make_subclass(torch.Tensor, x, True)


# Lazy modules and settings that change nothing.


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LazyLinear(4), nn.LazyBatchNorm1d()

    def forward(self, x):
        return self.b(self.a(x)).shape


@program(lambda: (Lazy(), torch.ones(2, 3)))
def lazy_called_twice(m, x):
    return m(x), m(x)


@program(trained)
def anomaly_as_before(x):
    with torch.autograd.set_detect_anomaly(False):
        return (x * x).sum()


@torch._dynamo.patch_dynamo_config(verbose=True)
def patched(x):
    return x * 2


@program(plain)
def patched_function(x):
    return patched(x)


# Optimizers that choose by what a tensor holds.

for kind, options in (
    (torch.optim.RAdam, {"foreach": False}),
    (torch.optim.RAdam, {"foreach": True, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.ASGD, {"foreach": False, "t0": 1}),
    (torch.optim.ASGD, {"foreach": True, "t0": 1}),
    (torch.optim.Adafactor, {"foreach": False}),
    (torch.optim.Adafactor, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"foreach": True}),
    (torch.optim.Adamax, {"foreach": True}),
):
    label = f"step_{kind.__name__.lower()}_{'_'.join(map(str, options.values()))}".replace(".", "").lower()
    program(stepping(kind, lr=0.1, **options), label)(step)


def steps(m, optimizer):
    for _ in range(8):
        optimizer.step()
    return m.weight.detach() + 0


program(stepping(torch.optim.RAdam, lr=0.1), "steps_of_radam")(steps)
program(stepping(torch.optim.ASGD, lr=0.1, t0=3), "steps_of_asgd")(steps)
