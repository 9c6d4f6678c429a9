# ruff: noqa
"""nn.Module features: hooks, containers, buffers and attributes assigned in forward, lazy modules, parametrizations."""

from __future__ import annotations

import collections

import torch
from torch import nn

from tests.capture.interpret.language.support import program, x


def small(*sizes, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(*sizes)


def inference(f):
    def run(*a):
        with torch.no_grad():
            return f(*a)

    return run


@program
def buffers_and_counters_in_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(3))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            self.steps += 1
            self.mean = self.mean * 0.5 + x.mean(0)
            self.last = x * self.calls
            return x - self.mean

    m = M()
    return m.forward, [(x(),), (x() + 1,), (x(),)], lambda: (m, m.state_dict())


@program
def tensor_attribute_is_set_in_forward():
    class M(nn.Module):
        def forward(self, x):
            self.cache = x + 1
            if not hasattr(self, "first"):
                self.first = x
            return self.cache * 2

    m = M()
    return m.forward, [(x(),), (x() + 1,), (x(),)], lambda: m


@program
def register_in_forward():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.ready = False

        def forward(self, x):
            if not self.ready:
                self.register_buffer("scale", x.mean(0))
                self.register_buffer("temp", None, persistent=False)
                self.ready = True
            return x * self.scale

    m = M()
    return m.forward, [(x(),), (x() + 1,), (x(),)], lambda: (m, m.state_dict())


@program(
    "tensor-address", "tensor-construction", "untraceable-call", "opaque-object", "cannot-rebuild", "class-creation",
    "training-eager",
)  # fmt: skip
def module_and_parameter_added_in_forward():
    class M(nn.Module):
        def forward(self, x):
            if not hasattr(self, "w"):
                self.w = nn.Parameter(torch.ones(3))
                self.add_module("act", nn.ReLU())
            return self.act(x * self.w)

    m = M()
    return m.forward, [(x(),), (x() + 1,), (x(),)], lambda: [m.state_dict(), sorted(m._modules)]


@program
def training_flag_and_modes():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.bn(x)
            return y + 1 if self.training else y - 1

    m = M()

    def f(x, train):
        m.train(train)
        return m(x)

    return f, [(x(), True), (x(), False), (x(), True)], lambda: (m.training, m.state_dict())


@program
def forward_hooks():
    log = []
    m = nn.Sequential(small(3, 3), nn.ReLU())

    def pre(mod, args):
        log.append(("pre", type(mod).__name__, args[0].shape))
        return (args[0] + 1,)

    def post(mod, args, out):
        log.append(("post", type(mod).__name__))
        return out * 2

    m[0].register_forward_pre_hook(pre)
    m[0].register_forward_hook(post)
    m[1].register_forward_hook(lambda mod, args, out: None)

    def f(x):
        return m(x)

    return f, [(x(),), (x(),)], lambda: log


@program
def forward_hooks_with_kwargs():
    log = []

    class M(nn.Module):
        def forward(self, x, *, scale=1):
            return x * scale

    m = M()
    m.register_forward_pre_hook(
        lambda mod, args, kwargs: (args, {**kwargs, "scale": kwargs["scale"] + 1}), with_kwargs=True
    )
    m.register_forward_hook(lambda mod, args, kwargs, out: log.append(sorted(kwargs)) or out + 1, with_kwargs=True)

    def f(x, s):
        return m(x, scale=s)

    return f, [(x(), 2), (x(), 3), (x(), 2)], lambda: log


@program
def module_containers():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([small(3, 3, seed=i) for i in range(3)])
            self.heads = nn.ModuleDict({"a": small(3, 1), "b": small(3, 2)})
            self.ps = nn.ParameterList([torch.ones(3), torch.zeros(3)])
            self.pd = nn.ParameterDict({"w": torch.full((3,), 2.0)})
            self.seq = nn.Sequential(collections.OrderedDict(one=nn.ReLU(), two=nn.Tanh()))

        def forward(self, x, head):
            for i, layer in enumerate(self.layers):
                x = layer(x) * (i + 1)
            for p in self.ps:
                x = x + p
            x = x * self.pd["w"]
            names = [n for n, _ in self.heads.items()]
            first = self.layers[0](x) + self.layers[-1](x) + sum(l(x) for l in self.layers[1:])
            return (
                self.heads[head](self.seq(x)),
                names,
                len(self.layers),
                "a" in self.heads,
                first,
                list(self.pd.keys()),
            )

    m = M()

    def f(x, head):
        with torch.no_grad():
            return m(x, head)

    return f, [(x(), "a"), (x(), "b"), (x(), "a")]


@program
def iteration_over_module_trees():
    m = nn.Sequential(small(3, 3), nn.Sequential(small(3, 2), nn.ReLU()))

    def f(x):
        names = [n for n, _ in m.named_parameters()]
        kinds = [type(c).__name__ for c in m.modules()]
        total = sum(p.numel() for p in m.parameters())
        norm = sum(p.detach().abs().sum() for p in m.parameters())
        return x + total, names, kinds, norm, [n for n, _ in m.named_children()], len(list(m.buffers()))

    return f, [(x(),), (x(),)]


@program
def shared_parameters():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = small(3, 3)
            self.b = small(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x)), self.a.weight is self.b.weight

    m = M()
    return m.forward, [(x(),), (x(),)]


@program
def getattr_fallback_on_a_module():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

        def forward(self, x):
            return self.inner(x) + self.weight.sum()

    m = Wrapper(small(3, 2))

    def f(x):
        with torch.no_grad():
            return m(x), m.in_features, hasattr(m, "nothing")

    return f, [(x(),), (x(),)]


@program
def missing_attribute_of_a_module():
    m = small(3, 2)

    def f(x):
        try:
            return m.nothing
        except AttributeError as error:
            return x + 1, str(error)

    return f, [(x(),), (x(),)]


@program(
    "unsupported-tensor",
    "untraceable-call",
    "opaque-object",
    "class-mutation",
    "tensor-construction",
    "inplace-metadata",
    "tensor-attribute",
    "frame-access",
    "cannot-rebuild",
    "function-mutation",
    "uninitialised-parameter",
)
def lazy_modules():
    m = nn.Sequential(nn.LazyLinear(2), nn.ReLU())

    def f(x):
        with torch.no_grad():
            out = m(x)
        return out.shape, type(m[0]).__name__

    return f, [(x(),), (x(),), (x(),)]


@program
def parametrizations():
    import torch.nn.utils.parametrize as P

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

    m = small(3, 3)
    P.register_parametrization(m, "weight", Symmetric())

    def f(x):
        with torch.no_grad():
            return m(x), P.is_parametrized(m)

    return f, [(x(),), (x(),)]


@program
def weight_norm():
    m = nn.utils.parametrizations.weight_norm(small(3, 2))

    def f(x):
        with torch.no_grad():
            return m(x)

    return f, [(x(),), (x(),)]


@program
def old_weight_norm():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = nn.utils.weight_norm(small(3, 2))

    def f(x):
        with torch.no_grad():
            return m(x)

    return f, [(x(),), (x(),)], lambda: m.weight.shape


@program
def spectral_norm():
    torch.manual_seed(1)
    m = nn.utils.parametrizations.spectral_norm(small(3, 2)).eval()

    def f(x):
        with torch.no_grad():
            return m(x)

    return f, [(x(),), (x(),)]


@program
def spectral_norm_in_training():
    torch.manual_seed(1)
    m = nn.utils.parametrizations.spectral_norm(small(3, 2))

    def f(x):
        with torch.no_grad():
            return m(x)

    return f, [(x(),), (x(),), (x(),)], lambda: m.state_dict()


@program
def utilities():
    m = small(3, 2)

    def f(x):
        with torch.no_grad():
            flat = nn.utils.parameters_to_vector(m.parameters())
            fused = nn.functional.linear(x, m.weight, m.bias)
        packed = nn.utils.rnn.pad_sequence([x[0], x[1, :2]], batch_first=True)
        return flat, fused, packed

    return f, [(x(),), (x(),)]


@program
def state_dict_inside():
    m = small(3, 2)

    def f(x):
        sd = m.state_dict()
        return x.sum() + sd["bias"].sum(), list(sd)

    return f, [(x(),), (x(),)]


@program
def apply_and_requires_grad():
    m = nn.Sequential(small(3, 3), nn.ReLU())
    for p in m.parameters():
        p.requires_grad_(False)

    def f(x):
        seen = []
        m.apply(lambda mod: seen.append(type(mod).__name__))
        return m(x), seen, any(p.requires_grad for p in m.parameters())

    return f, [(x(),), (x(),)]


@program
def module_called_with_itself_as_attribute():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = small(3, 3)
            self.depth = 0

        def forward(self, x, n):
            self.depth = n
            y = torch.relu(self.lin(x))
            return y if n == 0 else self(y, n - 1)

    m = M()

    def f(x, n):
        with torch.no_grad():
            return m(x, n)

    return f, [(x(), 0), (x(), 2), (x(), 0)], lambda: m.depth


@program
def forward_with_many_kinds_of_arguments():
    class M(nn.Module):
        def forward(self, x, *rest, scale: float = 1.0, mask=None, **extra):
            y = x * scale
            for r in rest:
                y = y + r
            if mask is not None:
                y = y.masked_fill(mask, 0)
            return {"out": y, "extra": sorted(extra)}

    m = M()

    def f(x, mask):
        return m(x), m(x, 1, x, scale=2.0), m(x, mask=mask, k=1, j=2)

    return f, [(x(), x() > 0), (x(), None), (x(), x() > 1)]


@program
def outputs_as_dataclass_like_dict():
    class Output(collections.OrderedDict):
        def __getattr__(self, name):
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None

        def to_tuple(self):
            return tuple(self[k] for k in self)

    class M(nn.Module):
        def forward(self, x):
            return Output(logits=x * 2, hidden=(x, x + 1))

    m = M()

    def f(x):
        out = m(x)
        return out, out.logits + 1, out["hidden"][1], out.to_tuple()[0]

    return f, [(x(),), (x(),)]


@program
def module_attributes_are_replaced_between_calls():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()
            self.swap = 0

        def forward(self, x):
            y = self.act(x)
            self.swap += 1
            if self.swap % 2:
                self.act = nn.Tanh() if False else self.other
            return y

    m = M()
    m.other = nn.Sigmoid()
    return m.forward, [(x(),), (x(),), (x(),)], lambda: (m.swap, type(m.act).__name__)


@program
def weights_are_updated_in_place_between_calls():
    w = torch.ones(3)

    def f(x):
        w.add_(1)
        w.mul_(2)
        return x * w

    return f, [(x(),), (x(),), (x(),)], lambda: w


@program
def rnn_cell_loop():
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 4)

    def f(xs):
        h = torch.zeros(2, 4)
        out = []
        with torch.no_grad():
            for t in range(xs.shape[0]):
                h = cell(xs[t], h)
                out.append(h)
        return torch.stack(out), h

    return f, [(torch.ones(3, 2, 3),), (torch.ones(3, 2, 3) * 2,)]


@program
def module_as_argument():
    def f(x, m):
        return m(x), type(m).__name__

    return f, [(x(), nn.ReLU()), (x(), nn.Tanh()), (x(), nn.ReLU())]


@program
def extra_repr_and_names():
    m = small(3, 2)

    def f(x):
        return (
            x + 1,
            m.extra_repr(),
            m._get_name(),
            m.training,
            isinstance(m, nn.Linear),
            "weight" in dict(m.named_parameters()),
        )

    return f, [(x(),), (x(),)]
