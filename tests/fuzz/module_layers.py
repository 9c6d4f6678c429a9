"""Tables of modules.py: layers, what a module does in its `forward` with what it holds, and how that changes between calls.

In the texts $N is the name of a part of the module (`self.$N` inside, `$M` from outside), $L the constructor of any layer of
the part's kind, $C the kind's number of channels, $V a number, $g whether an input has a gradient. Kinds of values: v (batch, 4),
s (batch, 3, 4), c (batch, 4, 6), p (batch, 4, 6, 6), w (batch, 4, 3, 4, 4), t token numbers (batch, 3), j a jagged nested tensor of
rows of 4; o i e images (batch, 1 | 4 | 8, $h, $w) of any size.
"""

from __future__ import annotations

from typing import NamedTuple

# What programs of this kind begin with, after the names of state.py.
PRELUDE = '''
import io, pickle
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.utils import parametrize, prune, stateless, rnn, parametrizations
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
nn = torch.nn
torch.set_num_threads(1)  # on a busy machine threads wait for one another

def fixed(module):
    # parameters that float32 holds exactly
    for number, held in enumerate(module.parameters()):
        if not isinstance(held, nn.parameter.UninitializedParameter):
            held.data = ((torch.arange(held.numel()) * 7 + number) % 9 / 4 - 1).reshape(held.shape).to(held.dtype)
    return module
def first(result):
    # the first tensor that has a gradient, or the first
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return next((leaf for leaf in leaves if leaf.is_floating_point()), None)
def parameter(module, number):
    held = list(module.parameters())
    return held[number % len(held)]
def owner(module, number):
    # the module that holds a parameter, and its name
    held = [(one, name) for one in module.modules() for name, value in one._parameters.items() if value is not None]
    return held[number % len(held)]
def saved(module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)
class Scale(nn.Module):
    def __init__(self, by=2.0):
        super().__init__()
        self.by = by
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.full((4,), 0.5), persistent=False)
    def extra_repr(self): return f"by={self.by}"
    def forward(self, x):
        if self.training: self.calls += 1
        return x * self.weight * self.by + self.shift
class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x, *args, **kwargs): return x + self.inner(x, *args, **kwargs)
class Counting(nn.Module):
    seen = 0
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.last = None
    def forward(self, x):
        self.steps += 1
        self.last = x.detach()
        return x * self.steps
class Lazily(nn.Module):
    def forward(self, x):
        if not hasattr(self, "weight"): self.weight = nn.Parameter(torch.ones(x.shape[-1]) * 0.5)
        return x * self.weight
class Proxy(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def __getattr__(self, name):
        try: return super().__getattr__(name)
        except AttributeError: return getattr(super().__getattr__("inner"), name)
    @property
    def scale(self): return self.__dict__.get("_scale", 1.0)
    @scale.setter
    def scale(self, value): self.__dict__["_scale"] = value
    def forward(self, x): return self.inner(x) * self.scale
class Typed(nn.Module):
    dispatch = {nn.Linear: 2.0, nn.ReLU: 3.0}
    def __init__(self, *layers):
        super().__init__()
        for number, layer in enumerate(layers): self.add_module(f"l{number}", layer)
        self.by = {layer: number + 1.0 for number, layer in enumerate(layers)}
    def forward(self, x):
        for name, layer in self.named_children():
            if isinstance(layer, nn.Linear) and layer.bias is not None: x = x - layer.bias
            elif isinstance(layer, (nn.Dropout, nn.Identity)): continue
            x = layer(x) * self.by.get(layer, 0.5) + self.dispatch.get(type(layer), 1.0)
        return x
class Cache(nn.Module):
    def __init__(self, most=4):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.keys = self.values = None
        self.most = most
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.keys is not None and self.keys.shape[0] == x.shape[0]:
            k, v = torch.cat([self.keys, k], 1)[:, -self.most:], torch.cat([self.values, v], 1)[:, -self.most:]
        self.keys, self.values = k.detach(), v.detach()
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
class Static(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 4), persistent=False)
        self.place = 0
    def forward(self, x):
        with torch.no_grad():
            self.cache[self.place : self.place + x.shape[0]] = x.flatten(1)[:, :4].mean(0)
        self.place = (self.place + x.shape[0]) % 8
        return x + self.cache.mean(0)
class Symmetric(nn.Module):
    def forward(self, w): return w.triu() + w.triu(1).transpose(-1, -2)
class Positive(nn.Module):
    def __init__(self, least=0.5):
        super().__init__()
        self.least = least
    def forward(self, w): return w.clamp(min=self.least)
    def right_inverse(self, w): return w + 0.25
@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    hidden: object = None
    def __getitem__(self, key): return getattr(self, key)
class Named(typing.NamedTuple):
    logits: torch.Tensor
    hidden: object = None
class Output(collections.OrderedDict):
    def __init__(self, **values):
        super().__init__(**values)
        self.__dict__.update(values)
    def __getitem__(self, key): return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]
    def to_tuple(self): return tuple(self.values())
class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.round() * weight
    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x.round()).sum(0) if ctx.needs_input_grad[1] else None
@contextlib.contextmanager
def hooked(handle):
    # of all modules of the process: gone at the end
    try: yield
    finally: handle.remove()
def logged(name):
    def hook(module, args, result=None): LOG.append((name, type(module).__name__, len(args)))
    return hook
'''

# Constructors; each line is of the kinds before the colon.
LAYERS = """
v s: Linear(4, 4) | Linear(4, 4, bias=False) | Linear(4, 4) | LayerNorm(4) | RMSNorm(4) | LayerNorm(4, elementwise_affine=False)
v s: Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) | LazyLinear(4) | Sequential(nn.Linear(4, 8), nn.GLU())
v s c p: ReLU() | ReLU(inplace=True) | GELU() | GELU('tanh') | SiLU() | Tanh() | Softmax(-1) | LogSoftmax(1) | Identity() | ELU(inplace=True) | Hardswish() | LeakyReLU(0.25) | PReLU() | RReLU(0.25, 0.5) | Softplus() | Threshold(0.5, 0.25) | Mish()
v s c p w: Dropout(0.5) | Dropout(0.25, inplace=True) | AlphaDropout(0.5) | PReLU() | Sigmoid()
v c: BatchNorm1d(4) | BatchNorm1d(4, momentum=None) | BatchNorm1d(4, affine=False) | BatchNorm1d(4, track_running_stats=False) | BatchNorm1d(4, eps=0.5, momentum=0.5) | LazyBatchNorm1d() | SyncBatchNorm(4)
v c p: GroupNorm(2, 4) | GroupNorm(4, 4, affine=False) | PReLU(4) | ChannelShuffle(2)
v: Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten()) | Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) | Softmin(1)
s: LayerNorm((3, 4)) | BatchNorm1d(3) | TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) | TransformerEncoderLayer(4, 1, 4, dropout=0.5, activation='gelu', norm_first=True)
c: Conv1d(4, 4, 3, padding=1) | Conv1d(4, 4, 1, groups=2) | Conv1d(4, 4, 3, padding='same', padding_mode='circular') | Conv1d(4, 4, 3, dilation=2, padding=2, bias=False) | ConvTranspose1d(4, 4, 3, padding=1) | LazyConv1d(4, 1)
c: InstanceNorm1d(4, affine=True, track_running_stats=True) | InstanceNorm1d(4) | MaxPool1d(3, 1, 1) | AvgPool1d(3, 1, 1) | Dropout1d(0.5) | AdaptiveMaxPool1d(6) | LPPool1d(2, 1) | Sequential(nn.ReflectionPad1d(1), nn.Conv1d(4, 4, 3))
p: Conv2d(4, 4, 3, padding=1) | Conv2d(4, 4, 1) | Conv2d(4, 4, 3, padding=1, groups=4) | Conv2d(4, 4, 3, padding='same', padding_mode='reflect') | ConvTranspose2d(4, 4, 3, padding=1) | LazyConv2d(4, 1)
p: BatchNorm2d(4) | BatchNorm2d(4, momentum=None) | InstanceNorm2d(4, track_running_stats=True) | MaxPool2d(3, 1, 1) | AvgPool2d(3, 1, 1, count_include_pad=False) | Dropout2d(0.5) | AdaptiveAvgPool2d(6) | LocalResponseNorm(2)
p: Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2)) | Sequential(nn.Upsample(scale_factor=2), nn.AvgPool2d(2)) | Sequential(nn.Upsample(size=(8, 8), mode='bilinear'), nn.MaxPool2d(3, 1)) | Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
o i e: Conv2d($C, $C, 3, padding=1) | Conv2d($C, $C, 1) | Conv2d($C, $C, 3, padding=1, groups=$C) | Conv2d($C, $C, 3, 2, 1) | Conv2d($C, $C, 3, dilation=2, padding=2, bias=False) | Conv2d($C, $C, (1, 3), padding=(0, 1)) | Conv2d($C, $C, 2, padding=1) | Conv2d($C, $C, 3, padding='same', padding_mode='circular') | Conv2d($C, $C, (3, 1), (2, 1), padding=1, padding_mode='replicate')
o i e: ConvTranspose2d($C, $C, 3, padding=1) | ConvTranspose2d($C, $C, 2, 2) | ConvTranspose2d($C, $C, 3, 2, 1, 1, groups=$C, bias=False) | Sequential(nn.Conv2d($C, $C, 3, 1, 1), nn.BatchNorm2d($C), nn.ReLU(inplace=True)) | Sequential(nn.BatchNorm2d($C), nn.SiLU(), nn.Conv2d($C, $C, 1)) | Sequential(nn.Conv2d($C, $C, 3, 1, 1), nn.GroupNorm(1, $C), nn.GELU())
o i e: BatchNorm2d($C) | BatchNorm2d($C) | BatchNorm2d($C, affine=False) | BatchNorm2d($C, momentum=None) | BatchNorm2d($C, track_running_stats=False) | InstanceNorm2d($C) | InstanceNorm2d($C, affine=True) | InstanceNorm2d($C, affine=True, track_running_stats=True) | GroupNorm(1, $C) | GroupNorm(1, $C) | GroupNorm($C, $C) | GroupNorm($C, $C, affine=False)
o i e: MaxPool2d(3, 1, 1) | MaxPool2d(2, ceil_mode=True) | MaxPool2d(3, 2, 1) | AvgPool2d(3, 1, 1) | AvgPool2d(2, ceil_mode=True) | AvgPool2d((1, 2), ceil_mode=True, divisor_override=3) | AvgPool2d(3, 2, 1, count_include_pad=False) | AdaptiveAvgPool2d((3, 2)) | AdaptiveAvgPool2d(1) | AdaptiveAvgPool2d((None, 4)) | AdaptiveMaxPool2d((2, None)) | LPPool2d(2, 2, ceil_mode=True)
o i e: Upsample(scale_factor=2) | Upsample(scale_factor=2, mode='bilinear') | Upsample(size=(3, 5), mode='bicubic') | Upsample(scale_factor=1.5, mode='bilinear', align_corners=True) | Upsample(size=(4, 3), mode='nearest-exact') | ReplicationPad2d(1) | ReflectionPad2d((1, 0, 0, 1)) | CircularPad2d((0, 1, 1, 0)) | ZeroPad2d((1, 0, -1, 2)) | ConstantPad2d(1, 0.5) | Dropout2d(0.5) | Dropout(0.25) | FeatureAlphaDropout(0.5)
o i e: ReLU() | ReLU(inplace=True) | SiLU() | GELU() | Hardswish() | Softmax(1) | LogSoftmax(1) | PReLU($C) | LocalResponseNorm(2) | Tanh() | Sequential(nn.AdaptiveAvgPool2d((2, 3)), nn.LayerNorm(($C, 2, 3))) | Sequential(nn.AdaptiveMaxPool2d((3, 1)), nn.LayerNorm((3, 1)))
i e: GroupNorm(2, $C) | GroupNorm(2, $C) | ChannelShuffle(2) | Conv2d($C, $C, 3, padding=1, groups=2) | ConvTranspose2d($C, $C, 3, 1, 1, groups=2) | Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2))
w: Conv3d(4, 4, 3, padding=1) | Conv3d(4, 4, 1, groups=2) | BatchNorm3d(4) | MaxPool3d(3, 1, 1) | AvgPool3d(3, 1, 1) | Dropout3d(0.5) | InstanceNorm3d(4) | ConvTranspose3d(4, 4, 1) | ReLU()
"""


class Part(NamedTuple):
    """kinds: of what it takes and gives; init: statements of `__init__`; call: of `forward`, which change `x`; changes:
    statements outside."""

    kinds: str
    init: str
    call: str = "x = self.$N(x)"
    changes: tuple[str, ...] = ()


OF_LINEAR = (
    "$M.weight = nn.Parameter(torch.ones(4, 4))", "$M.bias = None", "$M.requires_grad_(False)", "$M.weight.data.mul_(0.5)", "$M = nn.Identity()", "del $M; m.$N = fixed(nn.Linear(4, 4))",
    "$M.weight.requires_grad_(not $M.weight.requires_grad)", "$M.to(torch.bfloat16)", "$M.weight.data = $M.weight.data.t()", "$M.weight = m.weight if hasattr(m, 'weight') else $M.weight",
)  # fmt: skip
OF_NORM = ("$M.eval()", "$M.train()", "$M.reset_running_stats()", "$M.track_running_stats = False", "$M.momentum = 0.25", "$M.running_mean.fill_(0.5)", "$M.eps = 0.5", "$M.weight = None; $M.bias = None", "$M.running_var = torch.full((4,), 2.0)")
OF_HOOKS = (
    "H.append($M.register_forward_hook(lambda m, a, r: r * 2))", "H.append($M.register_forward_pre_hook(lambda m, a: (a[0] + 1, *a[1:])))", "H and H.pop().remove()", "H and H.pop(0).remove()",
    "H.append($M.register_forward_hook(lambda m, a, k, r: r + len(k), with_kwargs=True))", "H.append($M.register_forward_pre_hook(lambda m, a, k: ((a[0] * 0.5, *a[1:]), k), with_kwargs=True, prepend=True))",
    "H.append($M.register_forward_hook(logged('always'), always_call=True))", "H.append($M.register_full_backward_hook(lambda m, i, o: tuple(None if g is None else g * 2 for g in i)))",
    "H.append($M.register_full_backward_hook(lambda m, i, o: LOG.append(('backward', len(i), o[0].clone()))))", "H.append($M.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,)))",
    "H.append($M.register_full_backward_pre_hook(lambda m, o: LOG.append(len(o)), prepend=True))", "H.append($M.register_forward_hook(lambda m, a, r: KEPT.append(r.detach())))", "H.append($M.register_forward_hook(logged('forward')))",
    "H.append($M.register_forward_pre_hook(logged('before')))", "$M._forward_hooks.clear()", "$M._forward_pre_hooks.clear()", "H.append($M.register_forward_hook(lambda m, a, r: r.register_hook(lambda g: g * 2) and None if r.requires_grad else None))",
    "H.append($M.register_state_dict_post_hook(lambda m, s, p, l: LOG.append(len(s))))", "H.append($M.register_forward_hook(lambda m, a, r: setattr(m, 'seen', r.shape)))",
    "H.append($M.register_load_state_dict_post_hook(lambda m, k: LOG.append(len(k.missing_keys))))",
)  # fmt: skip
LIST = ("$M[0] = fixed($L)", "$M.append(fixed($L))", "del $M[0]", "$M.insert(1, fixed($L))", "$M.extend([fixed($L)])", "$M.pop(-1)", "$M[1] = $M[0]", "$M[-1].requires_grad_(False)", "$M[0] = Counting()")

PARTS: tuple[Part, ...] = (
    # one layer, its parameters and hooks
    *(Part(f"{kind}>{kind}", "self.$N = $L", changes=OF_HOOKS) for kind in "vscpw"),
    *(Part(f"{kind}>{kind}", "self.$N = $L") for kind in "vscp"),
    Part("v>v", "self.$N = nn.Linear(4, 4)", changes=OF_LINEAR),
    Part("v>v", "self.$N = nn.BatchNorm1d(4)", changes=OF_NORM),
    Part("p>p", "self.$N = nn.BatchNorm2d(4)", changes=OF_NORM),
    Part("v>v", "self.$N = Scale()", changes=("$M.by = $V", "$M.calls.zero_()", "$M.shift.add_(1)", "$M.register_buffer('shift', torch.ones(4))", "$M.shift = torch.zeros(4)", "$M.calls = torch.zeros((), dtype=torch.int64)", "del $M.shift; $M.shift = 1.0", "$M.weight = nn.Parameter(torch.ones(1))", "$M.shift = nn.Parameter(torch.zeros(4))")),
    Part("v>v", "self.$N = Counting()", changes=("$M.steps = 0", "Counting.seen = 5", "$M.last = None", "$M.steps = 2.5")),
    Part("v>v", "self.$N = Lazily()", changes=("del $M.weight", "$M.weight = None", "$M.weight.data.fill_(2)")),
    Part("v>v", "self.$N = Proxy(nn.Linear(4, 4))", "x = self.$N(x) + self.$N.weight.sum(0)", ("$M.scale = $V", "$M.inner = nn.Identity(); $M.inner.weight = torch.ones(4, 4)", "$M.inner.weight.data.fill_(0.5)", "$M.weight = nn.Parameter(torch.zeros(4, 4))")),
    Part("v>v", "self.$N = Typed(nn.Linear(4, 4), nn.Dropout(), nn.ReLU())", changes=("$M.l1 = nn.Tanh()", "$M.by[$M.l1] = 4.0", "$M.by.clear()", "Typed.dispatch[nn.Tanh] = 5.0", "Typed.dispatch.pop(nn.ReLU, 0)", "$M.l0.bias = None", "$M.add_module('l3', nn.Linear(4, 4, bias=False))", "del $M.l2", "$M.l0, $M.l2 = $M.l2, $M.l0")),
    Part("v>v", "self.$N = Residual($L)", changes=("$M.inner = fixed($L)", "$M.inner = Residual($M.inner)", "$M.forward = $M.inner.forward", "vars($M).pop('forward', 0)", "$M.inner = None", "Residual.forward.__defaults__ = None")),
    Part("v>v", "self.$N = Static()", changes=("$M.place = 0", "$M.cache = torch.zeros(8, 4)", "$M.cache.zero_()", "$M.cache = $M.cache.double()", "$M.place = 7")),
    Part("s>s", "self.$N = Cache()", changes=("$M.keys = $M.values = None", "$M.most = 3", "$M.most = 9", "$M.keys = $M.keys[:, 1:]; $M.values = $M.values[:, 1:]", "$M.keys.zero_()", "$M.keys = $M.keys.to(torch.float64)")),
    # containers
    Part("v>v", "self.$N = nn.Sequential($L, $L, $L)", changes=LIST),
    Part("s>s", "self.$N = nn.Sequential($L, $L)", changes=LIST),
    Part("p>p", "self.$N = nn.Sequential($L, $L)", changes=LIST),
    Part("v>v", "self.$N = nn.Sequential(collections.OrderedDict(a=$L, b=$L))", "x = self.$N(x)\nx = self.$N.b(x)", ("$M.b = fixed($L)", "$M.add_module('c', $L)", "del $M.a", "$M._modules.move_to_end('a')")),
    Part("v>v", "self.$N = nn.Sequential($L, $L, $L)", "x = self.$N[1:](x)\nx = self.$N[-1](x)", LIST),
    Part("v>v", "self.$N = nn.ModuleList([$L, $L, $L])", "for layer in self.$N: x = layer(x)", LIST),
    Part("s>s", "self.$N = nn.ModuleList([$L, $L])", "for number, layer in enumerate(self.$N): x = layer(x) * (number + 1)", LIST),
    Part("v>v", "self.$N = nn.ModuleList([$L, $L, $L])", "for layer in self.$N[1:]: x = x + layer(x)", LIST),
    Part("v>v", "self.$N = nn.ModuleList([$L, $L, $L])", "for layer in reversed(self.$N): x = layer(x)\nx = x * len(self.$N)", LIST),
    Part("v>v", "self.$N = nn.ModuleList($L for _ in range(2))", "x = torch.stack([layer(x) for layer in self.$N]).sum(0)", LIST),
    Part("v>v", "self.$N = nn.ModuleList([nn.Linear(4, 4)] * 2)", "for one, other in zip(self.$N, self.$N[1:]): x = other(one(x))", LIST),
    Part("v>v", "self.$N = nn.ModuleDict({'a': $L, 'b': $L})", "for name, layer in self.$N.items(): x = layer(x) if name != 'b' or self.training else x", ("$M['a'] = fixed($L)", "$M.pop('b')", "$M['c'] = $L", "$M.update({'b': $L})", "del $M['a']", "$M.clear()", "$M['b'] = $M['a']")),
    Part("v>v", "self.$N = nn.ModuleDict([['a', $L], ['b', $L]]); self.choice = 'a'", "x = self.$N[self.choice](x) if self.choice in self.$N else x", ("m.choice = 'b'", "m.choice = 'c'", "$M['c'] = $L", "m.choice = 'a'")),
    Part("v>v", "self.$N = nn.ParameterList([torch.ones(4), torch.full((4,), 0.5)])", "for one in self.$N: x = x * one", ("$M.append(torch.zeros(4))", "$M[0] = nn.Parameter(torch.full((4,), 3.0))", "$M[1].data.add_(1)", "$M.extend([torch.ones(4)])", "$M[1].requires_grad_(False)", "$M[0] = $M[1]")),
    Part("v>v", "self.$N = nn.ParameterDict({'a': torch.ones(4), 'b': torch.ones(())})", "x = x * self.$N['a'] + self.$N.b * len(self.$N)", ("$M['a'] = nn.Parameter(torch.zeros(4))", "$M['c'] = torch.ones(1)", "$M.pop('c')", "$M['a'].data = torch.full((4,), 2.0)", "$M.b.requires_grad_(False)", "$M.update({'b': torch.ones(1)})")),
    # parameters and buffers of its own
    Part("v>v", "self.weight = nn.Parameter(torch.ones(4, 4)); self.register_buffer('mask', torch.eye(4))", "x = x @ (self.weight * self.mask)", ("m.weight = nn.Parameter(torch.full((4, 4), 0.5))", "m.mask = torch.ones(4, 4)", "m.mask.zero_()", "m.mask = None", "m.register_buffer('mask', torch.ones(4, 4), persistent=False)", "m.weight.data.t_()", "m.weight.data = torch.eye(4)")),
    Part("v>v", "self.register_parameter('extra$N', None); self.register_buffer('empty$N', None)", "if self.extra$N is not None: x = x * self.extra$N\nif self.empty$N is None: x = x + 1", ("m.extra$N = nn.Parameter(torch.full((4,), 2.0))", "m.empty$N = torch.ones(4)", "m.extra$N = None", "m.empty$N = None", "m.register_parameter('extra$N', nn.Parameter(torch.zeros(4)))")),
    Part("v>v", "self.$N = nn.Linear(4, 4); self.tied$N = nn.Linear(4, 4); self.tied$N.weight = self.$N.weight", "x = self.tied$N(self.$N(x)) @ self.$N.weight", ("m.tied$N.weight = nn.Parameter($M.weight.detach().clone())", "m.tied$N.weight = $M.weight", "m.tied$N = $M", "m.tied$N.bias = $M.bias", "$M.weight.data = m.tied$N.weight.data * 2", *OF_LINEAR)),
    Part("v>v", "self.$N = nn.Linear(4, 4); self.__dict__['secret'] = [nn.Linear(4, 4)]", "x = self.secret[0](self.$N(x))", ("m.secret[0].weight.data.mul_(0.5)", "m.secret[0] = $M", "m.secret.append(0)", "$M = m.secret[0]")),
    Part("v>v", "self.average$N = nn.Buffer(torch.zeros(4)); self.count$N = nn.Buffer(torch.tensor(0))", "if self.training:\n    with torch.no_grad():\n        self.average$N.lerp_(x.sum(0), 0.5)\n        self.count$N += 1\nx = x - self.average$N", ("m.average$N.zero_()", "m.average$N = nn.Buffer(torch.ones(4), persistent=False)", "m.count$N = 0", "del m.average$N; m.average$N = 0.5", "m.average$N = m.average$N.expand(4).clone()")),
    Part("v>v", "self.average$N = torch.zeros(4)", "self.average$N = self.average$N * 0.5 + x.detach().sum(0)\nx = x + self.average$N", ("m.average$N = torch.ones(4)", "m.average$N.fill_(1)", "m.average$N = 1.0")),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "for name, one in self.named_parameters():\n    if 'bias' in name and one.shape == (4,): x = x + one", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = x * sum(one.square().mean() for one in self.parameters() if one.requires_grad)", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "for one in self.modules():\n    if type(one) is nn.Linear: x = F.linear(x, one.weight)", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = self.$N.forward(x)\nself.depth$N = getattr(self, 'depth$N', 0) + 1", (*OF_LINEAR, "del m.depth$N")),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = self.get_submodule('$N')(x) + self.get_parameter('$N.bias') * len(self._modules)", OF_LINEAR),
    Part("v>v", "self.$N = {'layer': nn.Linear(4, 4), 'n': 0}", "self.$N['n'] += 1\nx = self.$N['layer'](x) * self.$N['n']", ("$M['n'] = 0", "$M['layer'] = nn.Identity()", "$M['layer'].weight.data.mul_(2)")),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "with torch.no_grad():\n    side = self.$N(x)\nx = x + side * self.$N(x)", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4).requires_grad_(False)", "with torch.inference_mode(not self.training):\n    side = self.$N(x)\nx = side * 2", OF_LINEAR),
    # functions of autograd
    Part("v>v", "self.$N = nn.Parameter(torch.ones(4))", "x = Straight.apply(x, self.$N)", ("$M.requires_grad_(False)", "$M.data.mul_(2)", "$M = nn.Parameter(torch.zeros(4))")),
    Part("v>v", "self.$N = $L", "x = Scaled.apply(self.$N(x), 0.5)\nx, sign = Parted.apply(x)"),
    Part("v>v", "self.$N = $L", "x = Squared.apply(self.$N(x))"),
    *(Part("v>v", f"self.$N = {made}", f"x = checkpoint({how})", changes=OF_HOOKS[:6])  # what writes would write once
      for made in ("nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))", "nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())", "Residual(nn.Linear(4, 4))")
      for how in ("self.$N, x, use_reentrant=False", "self.$N, x, use_reentrant=True", "lambda y: checkpoint(self.$N, y, use_reentrant=False) * y, x, use_reentrant=False", "self.$N, x * 2, use_reentrant=False, determinism_check='none'")),
    Part("v>v", "self.$N = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))", "x = checkpoint_sequential(self.$N, 2, x, use_reentrant=False)", ("$M[1] = nn.Tanh()", "$M.append(fixed(nn.Linear(4, 4)))", "$M[0].weight.data.mul_(2)")),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = self.$N(x)\nif x.requires_grad: x.register_hook(lambda g: g * 0.5)", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = self.$N(x)\nself.kept$N = x\nif x.requires_grad: x.retain_grad()\nx = x * 1", OF_LINEAR),
    # reparametrised
    *(Part("v>v", f"self.$N = {made}", changes=(*OF_LINEAR[:4], *changes)) for made, changes in (
        ("nn.Linear(4, 4); parametrize.register_parametrization(self.$N, 'weight', Symmetric())", ("parametrize.remove_parametrizations($M, 'weight')", "parametrize.register_parametrization($M, 'weight', Positive(), unsafe=True)", "$M.parametrizations.weight.original.data.fill_(0.5)", "$M.parametrizations.weight[0] = Positive()", "parametrize.remove_parametrizations($M, 'weight', leave_parametrized=False)")),
        ("nn.Linear(4, 4); parametrize.register_parametrization(self.$N, 'bias', Positive())", ("$M.bias = torch.full((4,), 2.0)", "$M.parametrizations.bias[0].least = 0.75")),
        ("parametrizations.weight_norm(nn.Linear(4, 4))", ("$M.parametrizations.weight.original0.data.fill_(2)", "$M.weight = torch.ones(4, 4)", "parametrize.remove_parametrizations($M, 'weight')")),
        ("nn.utils.weight_norm(nn.Linear(4, 4))", ("$M.weight_g.data.mul_(2)", "nn.utils.remove_weight_norm($M)")),
        ("parametrizations.spectral_norm(nn.Linear(4, 4))", ("$M.eval()", "$M.train()", "$M.parametrizations.weight[0]._u.fill_(0.5)")),
        ("nn.utils.spectral_norm(nn.Linear(4, 4))", ("$M.eval()", "$M.weight_u.fill_(0.5)", "nn.utils.remove_spectral_norm($M)")),
        ("parametrizations.orthogonal(nn.Linear(4, 4))", ()),
        ("nn.Linear(4, 4); prune.l1_unstructured(self.$N, 'weight', 6)", ("prune.remove($M, 'weight')", "prune.l1_unstructured($M, 'weight', 3)", "prune.ln_structured($M, 'weight', 1, 2, 0)", "$M.weight_mask.fill_(1)", "$M.weight_orig.data.mul_(2)")),
        ("nn.Linear(4, 4); prune.random_unstructured(self.$N, 'bias', 0.5)", ("prune.remove($M, 'bias')", "prune.identity($M, 'weight')")),
    )),
    Part("v>v", "self.$N = nn.Linear(4, 4)\nparametrize.register_parametrization(self.$N, 'weight', Symmetric())", "with parametrize.cached():\n    x = self.$N(x) + self.$N(x * 2)", ("$M.parametrizations.weight.original.data.mul_(2)",)),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = functional_call(self.$N, {'weight': self.$N.weight * 2}, (x,))", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = functional_call(self.$N, {name: one.detach() + 1 for name, one in self.$N.named_parameters()}, x)", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "with stateless._reparametrize_module(self.$N, {'bias': x.mean(0)}):\n    x = self.$N(x)", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = vmap(self.$N)(x)", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = jvp(self.$N, (x,), (torch.ones_like(x),))[1]", OF_LINEAR),
    Part("v>v", "self.$N = nn.Linear(4, 4)", "x = vmap(grad(lambda row: self.$N(row).square().sum()))(x)", OF_LINEAR),
    Part("v>v", "self.$N = $L", "x = vmap(self.$N, randomness='different')(x[:, None])[:, 0]"),
    # recurrence, attention, tables
    *(Part("s>s", f"self.$N = {made}", call, ("$M.flatten_parameters()", "$M.requires_grad_(False)", "$M.weight_hh_l0.data.mul_(0.5)", "$M.eval()", "$M.batch_first = False", "$M.weight_ih_l0 = nn.Parameter(torch.ones_like($M.weight_ih_l0))"))
      for made in ("nn.LSTM(4, 4, batch_first=True)", "nn.GRU(4, 4, batch_first=True)", "nn.RNN(4, 4, batch_first=True)", "nn.RNN(4, 4, nonlinearity='relu', batch_first=True)", "nn.GRU(4, 2, batch_first=True, bidirectional=True)", "nn.LSTM(4, 4, 2, batch_first=True, dropout=0.5)", "nn.LSTM(4, 8, batch_first=True, proj_size=4)", "nn.GRU(4, 4, bias=False)")
      for call in ("x, state = self.$N(x)", "x = self.$N(x)[0] + x")),
    Part("s>s", "self.$N = nn.LSTM(4, 4, batch_first=True)\nself.state$N = None", "x, state = self.$N(x, self.state$N)\nself.state$N = tuple(one.detach() for one in state)", ("m.state$N = None", "m.state$N = tuple(one * 0 for one in m.state$N)")),
    Part("s>s", "self.$N = nn.GRU(4, 4, batch_first=True)", "packed = rnn.pack_padded_sequence(x, [3, 2, 1, 1, 1, 1, 1, 1][: x.shape[0]], batch_first=True)\nout, state = self.$N(packed)\nx, lengths = rnn.pad_packed_sequence(out, batch_first=True)"),
    Part("s>s", "self.$N = nn.LSTM(4, 4, batch_first=True)", "packed = rnn.pack_sequence(list(x), enforce_sorted=False)\nx = rnn.pad_packed_sequence(self.$N(packed)[0], batch_first=True)[0]"),
    Part("v>v", "self.$N = nn.LSTMCell(4, 4)", "h = c = torch.zeros_like(x)\nfor _ in range(2): h, c = self.$N(x, (h, c))\nx = h + c"),
    Part("v>v", "self.$N = nn.GRUCell(4, 4)", "h = x\nfor _ in range(3): h = self.$N(x, h)\nx = h", ("$M.bias_hh.data.fill_(1)", "$M.requires_grad_(False)")),
    *(Part("s>s", f"self.$N = nn.MultiheadAttention({made})", call, ("$M.eval()", "$M.train()", "$M.dropout = 0.5", "$M.in_proj_bias.data.fill_(0.5)", "$M.requires_grad_(False)", "$M.out_proj = fixed(nn.Linear(4, 4))", "$M.add_zero_attn = True"))
      for made in ("4, 2, batch_first=True", "4, 1, bias=False", "4, 2, dropout=0.5, batch_first=True", "4, 2, add_bias_kv=True, batch_first=True", "4, 2, kdim=4, vdim=4, batch_first=True")
      for call in ("x, weights = self.$N(x, x, x)", "x = self.$N(x, x, x, need_weights=False)[0]", "x = self.$N(x, x, x, average_attn_weights=False)[0]", "mask = torch.ones(x.shape[1] if self.$N.batch_first else x.shape[0], x.shape[1] if self.$N.batch_first else x.shape[0], dtype=torch.bool).triu(1)\nx = self.$N(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]")),
    *(Part("s>s", f"self.$N = {made}", "x = self.$N(x)", ("$M.eval()", "$M.train()", "$M.layers[0].linear1.weight.data.mul_(0.5)", "$M.norm = None", "$M.layers[0].activation = torch.tanh", "$M.enable_nested_tensor = False"))
      for made in ("nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2)", "nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4, dropout=0.5), 1, nn.LayerNorm(4))")),
    Part("s>s", "self.$N = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)", "x = self.$N(x, x * 0.5)", ("$M.eval()", "$M.norm_first = True")),
    Part("s>s", "self.$N = nn.Transformer(4, 1, 1, 1, 4, dropout=0.0, batch_first=True)", "x = self.$N(x, x)", ("$M.eval()",)),
    *(Part("s>s", "self.$N = nn.Linear(4, 12)", f"q, k, v = self.$N(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4).unbind()\nx = F.scaled_dot_product_attention(q, k, v{how}).transpose(1, 2).flatten(2)", OF_HOOKS) for how in ("", ", is_causal=True", ", dropout_p=0.5 if self.training else 0.0", ", scale=0.5", ", attn_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()")),
    *(Part("t>s", f"self.$N = nn.Embedding({made})", changes=("$M.weight.data[1] = 0.5", "$M.padding_idx = 2", "$M.max_norm = 1.0", "$M.max_norm = None", "$M.scale_grad_by_freq = True", "$M.weight.requires_grad_(False)", "$M.weight = nn.Parameter(torch.ones(9, 4))", "$M = nn.Embedding.from_pretrained(torch.ones(9, 4))", "$M.sparse = True", *OF_HOOKS[:6]))
      for made in ("9, 4", "9, 4, padding_idx=0", "9, 4, max_norm=1.0", "9, 4, sparse=True", "9, 4, scale_grad_by_freq=True", "9, 4")),
    *(Part("t>v", f"self.$N = nn.EmbeddingBag(9, 4, mode={made})", call, ("$M.mode = 'sum'", "$M.padding_idx = 1", "$M.weight.data.mul_(2)", "$M.requires_grad_(False)"))
      for made in ("'mean'", "'sum'", "'max'", "'sum', sparse=True", "'mean', padding_idx=0", "'sum', include_last_offset=True")
      for call in ("x = self.$N(x)", "x = self.$N(x.flatten(), torch.arange(0, x.numel() + (1 if self.$N.include_last_offset else 0), 3))", "x = self.$N(x, per_sample_weights=torch.ones(x.shape) if self.$N.mode == 'sum' else None)")),
    Part("t>s", "self.$N = nn.Embedding(9, 4)\nself.head$N = nn.Linear(4, 9, bias=False)\nself.head$N.weight = self.$N.weight", "x = self.$N(x)\nx = self.head$N(x) @ self.$N.weight", ("m.head$N.weight = nn.Parameter(torch.ones(9, 4))", "$M.weight = m.head$N.weight", "$M.weight.data.mul_(0.5)")),
    Part("t>s", "pass", "x = F.one_hot(x.clamp(0, 3), 4).float()"),
    # between kinds
    Part("v>s", "pass", "x = x[:, None].expand(-1, 3, -1)"),
    Part("v>s", "self.$N = nn.Linear(4, 12)", "x = self.$N(x).unflatten(1, (3, 4))"),
    Part("s>v", "pass", "x = x.mean(1)"),
    Part("s>v", "pass", "x = x[:, -1]"),
    Part("s>v", "self.$N = nn.Linear(12, 4)", "x = self.$N(x.flatten(1))"),
    Part("s>c", "self.$N = nn.Conv1d(4, 4, 1)", "x = F.pad(self.$N(x.transpose(1, 2)), (0, 3))"),
    Part("c>v", "pass", "x = x.mean(-1)"),
    Part("c>v", "self.$N = nn.AdaptiveAvgPool1d(1)", "x = self.$N(x).squeeze(-1)"),
    Part("c>v", "self.$N = nn.MaxPool1d(2, return_indices=True); self.un$N = nn.MaxUnpool1d(2)", "x, where = self.$N(x)\nx = self.un$N(x, where).mean(-1)"),
    Part("p>v", "self.$N = nn.AdaptiveAvgPool2d(1)", "x = self.$N(x).flatten(1)"),
    Part("p>v", "self.$N = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))"),
    Part("p>v", "self.$N = nn.FractionalMaxPool2d(2, output_size=(2, 2))", "x = self.$N(x).mean((2, 3))"),
    Part("p>p", "self.$N = nn.Conv2d(4, 4, 3, padding=1)", "x = self.$N(x.contiguous(memory_format=torch.channels_last))", ("$M.to(memory_format=torch.channels_last)", "$M.weight.data.mul_(0.5)", "$M.padding = (1, 1); $M.padding_mode = 'circular'", "$M.groups = 2", "$M.bias = None")),
    Part("p>p", "self.$N = nn.Conv2d(4, 4, 3, padding=1); self.norm$N = nn.BatchNorm2d(4)", "x = F.relu_(self.norm$N(self.$N(x)))", ("torch.nn.utils.fusion.fuse_conv_bn_eval($M.eval(), m.norm$N.eval())", "m.eval(); $M = torch.nn.utils.fuse_conv_bn_eval($M, m.norm$N); m.norm$N = nn.Identity()", "m.norm$N.running_var.fill_(2)")),
    Part("w>v", "self.$N = nn.AdaptiveMaxPool3d(1)", "x = self.$N(x).flatten(1)"),
    # images of any size
    *(Part(f"{kind}>{kind}", made, changes=changes) for kind in "oie" for made, changes in (
        *[("self.$N = $L", OF_HOOKS[:6])] * 6,
        ("self.$N = Residual($L)", ()),
        ("self.$N = nn.Sequential($L, $L)", LIST),
        ("self.$N = nn.Sequential($L, $L, $L)", ()),
        ("self.$N = nn.BatchNorm2d($C)", OF_NORM[:7]),
        ("self.$N = nn.Conv2d($C, $C, 3, padding=1)", ("$M.to(memory_format=torch.channels_last)", "$M.weight.data = $M.weight.data.transpose(2, 3)", "$M.padding = (0, 2)", "$M.stride = (2, 1)", "$M.bias = None", "$M.requires_grad_(False)")),
    )),
    *(Part(f"{kind}>{kind}", init, call) for kind in "oie" for init, call in (
        ("self.$N = nn.Linear($C, $C)", "x = self.$N(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"),
        ("self.$N = nn.LayerNorm($C)", "x = self.$N(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"),
        ("self.$N = nn.Sequential(nn.LayerNorm($C), nn.Linear($C, 8), nn.GELU(), nn.Linear(8, $C))", "x = x + self.$N(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)"),
        ("self.$N = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d($C, 2, 1), nn.ReLU(), nn.Conv2d(2, $C, 1), nn.Sigmoid())", "x = x * self.$N(x)"),
        ("self.$N = nn.Conv2d(2, 1, 3, padding=1)", "x = x * self.$N(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)).sigmoid()"),
        ("self.$N = $L; self.gain$N = nn.Parameter(torch.full(($C, 1, 1), 0.5))", "x = x + self.gain$N * self.$N(x)"),
        ("self.$N = nn.MultiheadAttention($C, 1, batch_first=True)", "q = x.flatten(2).mT\nx = self.$N(q, q, q, need_weights=False)[0].mT.reshape(x.shape)"),
    )),
    *(Part(kinds, "pass" if made is None else f"self.$N = {made}", call) for kinds, made, call in (
        ("o>i", "nn.Conv2d(1, 4, 3, padding=1)", "x = self.$N(x)"),
        ("o>i", None, "x = x.expand(-1, 4, -1, -1)"),
        ("o>i", None, "x = F.pixel_unshuffle(F.pad(x, (0, x.shape[3] % 2, x.shape[2] % 2, 0)), 2)"),
        ("o>e", "nn.Conv2d(1, 8, 2, 2, 1, bias=False)", "x = self.$N(x)"),
        ("i>o", "nn.Conv2d(4, 1, 1)", "x = self.$N(x)"),
        ("i>o", None, "x = x.mean(1, keepdim=True)"),
        ("i>o", None, "x = F.pixel_shuffle(x, 2)"),
        ("i>o", None, "x = x.reshape(x.shape[0], 1, -1, x.shape[3])"),
        ("i>e", "nn.Conv2d(4, 8, 3, 2, 1)", "x = self.$N(x)"),
        ("i>e", None, "x = torch.cat([x, x.flip(3)], 1)"),
        ("i>e", None, "x = torch.stack([x, x.relu()], 2).flatten(1, 2)"),
        ("e>i", "nn.ConvTranspose2d(8, 4, 2, 2)", "x = self.$N(x)"),
        ("e>i", "nn.Conv2d(8, 4, 1, groups=4)", "x = self.$N(x)"),
        ("e>i", None, "x = F.glu(x, 1)"),
        ("e>i", None, "x = x[:, ::2]"),
        ("e>i", None, "a, b = x.chunk(2, 1)\nx = a * b.sigmoid()"),
        ("e>o", None, "x = x.amax(1, keepdim=True)"),
        ("e>o", None, "x = torch.logsumexp(x, 1, keepdim=True)"),
        ("i>p", None, "x = F.interpolate(x, (6, 6), mode='bilinear')"),
        ("p>i", None, "x = x[:, :, 1:, ::2]"),
        ("i>s", "nn.Conv2d(4, 4, 2, 2, 1)", "x = self.$N(x).flatten(2).transpose(1, 2)"),
    )),
    *(Part(f"{kind}>v", "pass" if made is None else f"self.$N = {made}", call) for kind in "oie" for made, call in (
        ("nn.Linear($C, 4)", "x = self.$N(x.permute(0, 2, 3, 1)).sum((1, 2))"),
        ("nn.Parameter(torch.ones($C, 4))", "n = x.shape[0]\nx = (x.permute(0, 2, 3, 1).reshape(-1, $C) @ self.$N).reshape(n, -1, 4).mean(1)"),
        ("nn.Linear($C, 4)", "x = self.$N(x.reshape(x.shape[0], $C, -1).sum(-1))"),
        ("nn.Linear($C, 4)", "x = self.$N(x.amax((2, 3)))"),
        ("nn.Linear($C, 4)", "x = self.$N(x.mean(3).transpose(1, 2)).mean(1)"),
        ("nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear($C, 4))", "x = self.$N(x)"),
        ("nn.Sequential(nn.AdaptiveMaxPool2d((2, 1)), nn.Flatten(), nn.Linear(2 * $C, 4))", "x = self.$N(x)"),
        ("nn.Sequential(nn.BatchNorm2d($C), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(2 * $C, 4))", "x = self.$N(x)"),
        ("nn.Sequential(nn.Flatten(), nn.LazyLinear(4))", "x = self.$N(x)"),
        (None, "x = x.flatten(2).sum(2)[:, :1] * torch.arange(4)"),
        (None, "x = x.transpose(1, 3).flatten(1).cumsum(1)[:, -1:].expand(-1, 4)"),
    )),
    Part("j>j", "self.$N = nn.Linear(4, 4)", changes=OF_LINEAR[:4]),
    Part("j>j", "self.$N = nn.LayerNorm(4)", "x = F.relu(self.$N(x)) * 2"),
    Part("j>j", "self.$N = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.0))"),
    Part("j>s", "pass", "x = x.to_padded_tensor(0.0)"),
    Part("j>v", "pass", "x = x.sum(1)"),
    Part("j>v", "pass", "x = x.values()"),
)  # fmt: skip

# What else stands between the parts of a `forward`; of v and s.
BETWEEN = """
x = x * 2 + 1 | x = x / (1 + x.abs().sum(-1, keepdim=True)) | x = x if self.training else x * 0.5 | x = F.dropout(x, 0.5, self.training) | x = F.layer_norm(x, (4,)) | x = F.normalize(x, dim=-1)
hidden.append(x) | hidden.append(x.detach()) | x = x + hidden[-1] if hidden and hidden[-1].shape == x.shape else x | LOG.append(x.shape) | self.calls += 1 | x = x.clone().add_(1) | KEPT.append(x.detach()) | COUNT[0] += 1
x = x * flag if flag is not None else x | x = x.float() if x.dtype is f64 else x | x = x.relu() if len(hidden) % 2 else x.tanh() | self.last = x | self.last = x.detach() | torch.nn.init.ones_(x.detach().clone())
x = x + torch.rand_like(x) * 0.25 | x = x[torch.arange(x.shape[0])] | x = x * self.factor | x = F.gelu(x) * torch.is_grad_enabled() | x = torch.where(x > 0, x, x * 0.25) | fusewright.graph_break() | x = x * (x.detach().mean() > 0)
assert x.shape[-1] == 4, f'{x.shape}' | x = x.to(next(self.parameters()).dtype) if list(self.parameters()) else x | x = x * 3 if x.shape[0] > 2 else x | print(x.shape) | x = x.requires_grad_() if x.is_leaf else x
"""
# Between parts of images.
BETWEEN_IMAGES = """
x = x.transpose(2, 3) | x = x.transpose(2, 3).contiguous() | x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) | x = x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, $C).transpose(1, 2).reshape(x.shape) | x = x.contiguous() | x = x.contiguous(memory_format=torch.channels_last)
x = x.to(memory_format=torch.channels_last) | x = x.clone(memory_format=torch.channels_last) | x = x.flatten(2).transpose(1, 2).unflatten(1, x.shape[2:]).movedim(3, 1) | x = x.reshape(x.shape[0], $C, -1).transpose(1, 2).contiguous().view(x.shape) | x = x.transpose(0, 1).reshape(x.shape) | x = x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
x = F.layer_norm(x, x.shape[1:]) | x = F.layer_norm(x, x.shape[-1:]) | x = F.layer_norm(x.permute(0, 2, 3, 1), ($C,)).permute(0, 3, 1, 2) | x = F.group_norm(x, 1) | x = F.instance_norm(x) | x = F.normalize(x, dim=1) | x = x / (x.std((1, 2, 3), keepdim=True, correction=0) + 1) | x = x.flatten(2).softmax(-1).reshape(x.shape) | x = x.softmax(1)
x = x * x.mean((2, 3), keepdim=True) | x = x + x.amax(1, keepdim=True) | x = x - x.amin((2, 3), keepdim=True) | x = x * x.mean((2, 3), keepdim=True).sigmoid() | x = x + x.sum(3, keepdim=True) * 0.25 | x = x + x.flip(3) | x = torch.roll(x, (1, 1), (2, 3)) | x = x.cumsum(3) * 0.25 | x = x.mul_(0.5) | x = torch.cat([x, x * 0.5], 3) | x = x + x.mean((0, 2, 3), keepdim=True)
x = F.pad(x, (1, 0, 0, 1)) | x = F.pad(x, (1, 1, 1, 1), mode='replicate') | x = F.pad(x, (1, 1, 0, 0), mode='circular') | x = F.pad(x, (1, 0, 1, 0), mode='reflect') | x = x[:, :, ::2] | x = x[..., :1] | x = x[:, :, -1:] | x = x[:1] | x = x[..., None].expand(-1, -1, -1, -1, 2).flatten(3) | x = x.narrow(3, 0, 1).expand(x.shape) | x = x.repeat(1, 1, 1, 2)
x = F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1) * 0.125 | x = x.unfold(2, 2, 1).amax(-1) | x = x.unfold(3, 1, 2).flatten(3) | x = F.grid_sample(x, F.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3).to(x) * 0.5, x.shape, align_corners=False), align_corners=False) | x = F.interpolate(x, scale_factor=0.5, recompute_scale_factor=True) | x = F.interpolate(x, (4, 5), mode='area')
x = F.interpolate(x, size=[n + 1 for n in x.shape[2:]], mode='bilinear') | x = F.max_pool2d(x, x.shape[2:]) | x = F.avg_pool2d(x, (1, x.shape[3])) | x = x @ x.mT.softmax(-1) | x = torch.einsum('nchw,nchv->ncwv', x, x).softmax(-1) | x = F.scaled_dot_product_attention(x, x, x) | q = x.flatten(2).mT; x = F.scaled_dot_product_attention(q, q, q).mT.reshape(x.shape)
hidden.append(x) | x = x + hidden[-1] if hidden and hidden[-1].shape == x.shape else x | x = x + F.interpolate(hidden[0], x.shape[2:]) if hidden and hidden[0].shape[:2] == x.shape[:2] else x | x = x.relu() | x = x.tanh() | x = F.gelu(x) * 0.5 | x = F.dropout(x, 0.5, self.training) | x = F.dropout2d(x, 0.25, self.training) | x = torch.empty_like(x).copy_(x) | x = torch.where(x > 0, x, x * 0.25) | fusewright.graph_break()
"""
RETURNS = """
x | x | x | x | x, hidden | {'logits': x, 'hidden': hidden} | Result(x, hidden) | Result(x) | Named(x, hidden) | Output(logits=x, hidden=tuple(hidden)) | Output(logits=x) | (x, self.calls) | [x, None, *hidden] | Plain(x=x)
{'x': x, 'n': x.shape[0], 'self': self} | x, x.detach(), x.sum() | types.SimpleNamespace(x=x, dtype=x.dtype)
"""
INPUTS = {
    "v": "made(($b, 4), f32, $s) | made(($b, 4), f32, $s) | made(($b, 4), f32, $s, grad=True) | made((4, $b), f32, $s).t() | made(($b, 8), f32, $s)[:, ::2] | made((1, 4), f32, $s).expand($b, 4) | made(($b, 4), f64, $s) | made(($b, 4), bf16, $s) | made((4,), f32, $s)",
    "s": "made(($b, 3, 4), f32, $s) | made(($b, 3, 4), f32, $s) | made(($b, 3, 4), f32, $s, grad=True) | made((3, $b, 4), f32, $s).transpose(0, 1) | made(($b, 5, 4), f32, $s) | made(($b, 3, 4), bf16, $s)",
    "c": "made(($b, 4, 6), f32, $s) | made(($b, 4, 6), f32, $s, grad=True) | made(($b, 6, 4), f32, $s).transpose(1, 2)",
    "p": "made(($b, 4, 6, 6), f32, $s) | made(($b, 4, 6, 6), f32, $s, grad=True) | made(($b, 4, 6, 6), f32, $s$g).contiguous(memory_format=torch.channels_last) | made(($b, 6, 6, 4), f32, $s$g).permute(0, 3, 1, 2)",
    **{kind: f"made(($b, {n}, $h, $w), f32, $s$g) | made(($b, {n}, $h, $w), f32, $s$g).contiguous(memory_format=torch.channels_last) | made(($b, $h, $w, {n}), f32, $s$g).permute(0, 3, 1, 2) | made(($b, {n}, $w, $h), f32, $s$g).mT | made(($b, {n}, $h, 2 * $w), f32, $s$g)[..., ::2] | made(({n}, $b, $h, $w), f32, $s$g).transpose(0, 1)"
       f" | made(($b, {n + 3}, $h, $w), f32, $s$g)[:, 1:-2] | made(($b, $h, 2 * $w, {n}), f32, $s$g).permute(0, 3, 1, 2)[..., 1::2] | made((1, {n}, $h, $w), f32, $s$g).expand($b, -1, -1, -1) | made(($b, {n}, $h, 1), f32, $s$g).expand(-1, -1, -1, $w) | made(($b, {n}, $h, $w), f64, $s$g) | made(($b, {n}, $h, $w), bf16, $s$g)"
       for kind, n in (("o", 1), ("i", 4), ("e", 8))},
    "w": "made(($b, 4, 3, 4, 4), f32, $s) | made(($b, 4, 3, 4, 4), f32, $s, grad=True)",
    "t": "made(($b, 3), i64, $s).abs().clamp(max=8) | made(($b, 3), i64, $s).abs().clamp(max=8) | made(($b, 3), i32, $s).abs().clamp(max=8) | made(($b, 3), i64, $s).abs()",
    "j": "torch.nested.as_nested_tensor([made((n + 1, 4), f32, $s + n) for n in range(1 + $b)], layout=torch.jagged)",
}

# What a compiled function does around the module.
BODIES = tuple(body.strip("\n") for body in """
try: return m(x)
finally: LOG.append(m.training)
--
with hooked(m.register_forward_hook(lambda k, a, r: LOG.append(len(a)))): return m(x)
--
m.eval()
try: return m(x)
finally: m.train()
--
for one in m.children(): LOG.append(type(one).__name__)
return m(x), sum(q.numel() for q in m.parameters())
--
state = {k: v.clone() for k, v in m.state_dict().items()}
r = m(x)
m.load_state_dict(state)
return r
--
clone = copy.deepcopy(m)
return clone(x), [q is p for q, p in zip(clone.parameters(), m.parameters())]
--
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(1)
    r = m(x)
return r, torch.rand(2)
--
state = torch.get_rng_state()
r = m(x)
torch.set_rng_state(state)
return r, m(x)
--
torch.manual_seed(3)
return m(x)
--
with torch.autocast('cpu', torch.bfloat16):
    with torch.autocast('cpu', enabled=False): r = m(x)
    return r, m(x)
--
opt = torch.optim.SGD(m.parameters(), lr=0.125)
first(m(x)).sum().backward()
opt.step()
opt.zero_grad()
return m(x)
--
for q in m.parameters(): q.requires_grad_(not q.requires_grad)
return m(x)
--
r = m(x)
return r, [q.grad for q in m.parameters()], sum(q.sum() for q in m.parameters())
--
with torch.set_grad_enabled(not m.training): return m(x)
--
m.l0, held = nn.Identity(), m.l0
try: return m(x)
finally: m.l0 = held
--
with torch.inference_mode(): r = m(x)
return r, m(x)
--
return checkpoint(m, x, use_reentrant=False)
--
r = [m(x) for _ in range(2)]
m.calls = m.calls + 1
m.factor = m.factor * 0.5
return r, m(x)
--
with torch.no_grad():
    for q in m.parameters(): q.mul_(0.5)
return m(x)
--
held = [(n, q.detach().clone()) for n, q in m.named_parameters()]
r = m(x)
with torch.no_grad():
    for n, q in held: m.get_parameter(n).copy_(q * 0.5)
return r, m(x)
--
for n, one in [*m.named_children()]:
    if isinstance(one, nn.Linear): setattr(m, n, Residual(one))
return m(x)
--
out = {}
hooks = [one.register_forward_hook(lambda k, a, r, n=n: out.__setitem__(n, first(r))) for n, one in m.named_children()]
r = m(x)
for hook in hooks: hook.remove()
return r, out
--
r = m(x)
g = torch.autograd.grad(first(r).sum(), [q for q in m.parameters() if q.requires_grad], retain_graph=True, allow_unused=True)
return r, g
--
fusewright.graph_break()
r = m(x)
print(m.calls)
return r, m(x)
""".split("\n--\n"))

# What happens to a whole module between calls.
CHANGES = """
m.eval() | m.train() | m.requires_grad_(False) | m.requires_grad_(True) | m.zero_grad() | m.zero_grad(set_to_none=False) | m.to(torch.float64) | m.to(torch.float32) | m.bfloat16() | m.float() | m.double() | m.half()
p.requires_grad_(not p.requires_grad) | p.data.mul_(0.5) | p.data = p.data * 2 | p.data = p.data.clone() | p.data.fill_(0.25) | p.grad = torch.ones_like(p) | p.grad = None | p.data = p.data.to(torch.float64) | p.scale = 2
p.grad = torch.zeros_like(p).expand_as(p) | p.grad.mul_(2) | p.grad.zero_() | torch.nn.init.constant_(p, 0.5) | torch.nn.init.uniform_(p) | p.copy_(p * 2) | p.detach_() | p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)
H.append(p.register_hook(lambda g: g * 2)) | H.append(p.register_hook(lambda g: LOG.append(g.sum()))) | H.append(p.register_post_accumulate_grad_hook(lambda q: LOG.append(q.grad.sum()))) | H.append(p.register_post_accumulate_grad_hook(lambda q: setattr(q, 'grad', None))) | H.append(p.register_post_accumulate_grad_hook(lambda q: q.grad.mul_(0.5)))
o, n = owner(m, $k); setattr(o, n, nn.Parameter(getattr(o, n).detach().clone())) | o, n = owner(m, $k); setattr(o, n, nn.Parameter(getattr(o, n).detach() * 2, requires_grad=False)) | o, n = owner(m, $k); setattr(o, n, None) | o, n = owner(m, $k); held = getattr(o, n).detach().clone(); delattr(o, n); setattr(o, n, held)
S.append(copy.deepcopy(m.state_dict())) | S.append(saved(m)) | m.load_state_dict(S[-1]) | m.load_state_dict(S.pop(0), strict=False) | m.load_state_dict(S[-1], assign=True) | m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}) | LOG.append(m.load_state_dict({'zz': torch.ones(1)}, strict=False).unexpected_keys)
m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True) | m.load_state_dict({}) | m.apply(lambda one: one.weight.data.mul_(0.5) if isinstance(one, nn.Linear) else None) | torch.nn.utils.vector_to_parameters(torch.ones(sum(q.numel() for q in m.parameters())) * 0.25, m.parameters())
m.factor = $V | m.factor = torch.full((4,), 0.5) | m.factor = nn.Parameter(torch.full((4,), 0.5)) | m.calls = 0 | m.last = None | m.extra = nn.Linear(1, 1) | m.register_buffer('late', torch.ones(1)) | del m.extra | m.to(memory_format=torch.channels_last) | m.share_memory() | m.type(torch.float64) | m.cpu()
other = copy.deepcopy(m) | m.load_state_dict(other.state_dict()) | LOG.append([*map(torch.equal, m.parameters(), other.parameters())]) | other = copy.copy(m) | LOG.append(repr(m)) | m.forward = lambda x, flag=None: x * 2 | vars(m).pop('forward', 0) | m.to_empty(device='cpu'); fixed(m) | LOG.append(str(m.state_dict().keys()))
q = [one for one in m.buffers() if one.is_floating_point()]; q and q[0].fill_(0.5) | q = [*m.buffers()]; q and q[-1].zero_() | torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 2)) | m._apply(lambda t: t.clone()) | m.train(not m.training) | [one.train(False) for one in m.children()]
next(m.children()).register_forward_hook(lambda k, a, r: None) | [one.reset_parameters() for one in m.modules() if hasattr(one, 'reset_parameters')]; fixed(m) | Net.factor = 3.0 | Net.forward.__defaults__ = (2.0,) | Net.marked = True
run = copy.deepcopy(run) | run.eval() | run.train() | run.load_state_dict(S[-1]) | LOG.append([*run.state_dict()]) | LOG.append(len([*run.named_modules()])) | run.requires_grad_(False) | run.factor = 3.0 | run.zero_grad() | run.double() | fusewright.reset() | m.set_submodule('l0', nn.Identity()) | run.l0 = nn.Identity()
m.register_parameter('late', nn.Parameter(torch.ones(1))) | m.register_module('later', nn.ReLU()) | m._parameters.clear() | m._buffers.clear() | m.half().float() | m.forward = types.MethodType(Net.forward, m) | m.__class__ = type('Net2', (Net,), {}) | H.append(m.register_load_state_dict_post_hook(lambda k, keys: LOG.append(len(keys.missing_keys))))
H.append(m.register_state_dict_post_hook(lambda k, state, prefix, meta: LOG.append(len(state)))) | o, n = owner(m, $k); setattr(o, n, p) | [setattr(one, 'training', not one.training) for one in m.modules()] | Net.__call__ = lambda self, *a, **k: nn.Module.__call__(self, *a, **k) | del Net.__call__ | Net.__getattr__ = nn.Module.__getattr__ | del Net.__getattr__
Net.forward = lambda self, x, flag=None: self.l0(x) | Net.forward = torch.no_grad()(Net.forward) | m.l0 = compiled(m.l0) | m.l0.forward = functools.partial(type(m.l0).forward, m.l0) | torch.nn.init.orthogonal_(p) | m.l0, m.l1 = m.l1, m.l0 | m._modules.move_to_end('l0') | m.requires_grad_(False); m.l0.requires_grad_(True) | vars(m)['l0'] = nn.Identity() | vars(m).pop('l0')
"""
MODULE_HOOKS = tuple(change.replace("$M", "m") for change in OF_HOOKS)
# Around a call, in a step.
AROUND = """
with torch.no_grad() | with torch.inference_mode() | with torch.autocast('cpu', torch.bfloat16) | with torch.autocast('cpu', torch.bfloat16), torch.no_grad() | with torch.enable_grad() | with hooked(nn.modules.module.register_module_forward_hook(lambda k, a, r: LOG.append(type(k).__name__)))
with hooked(nn.modules.module.register_module_forward_pre_hook(lambda k, a: (a[0] + 1, *a[1:]))) | with hooked(nn.modules.module.register_module_full_backward_hook(lambda k, i, o: None)) | with parametrize.cached() | with torch.autograd.set_detect_anomaly(False) | with torch.random.fork_rng(devices=[])
with torch.autograd.graph.save_on_cpu() | with torch.backends.mkldnn.flags(enabled=False) | with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH) | with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
"""
# `o` is the module's first result.
LOSSES = """
o.sum() | o.square().mean() | F.mse_loss(o, torch.zeros_like(o)) | F.l1_loss(o, torch.ones_like(o), reduction='sum') | F.smooth_l1_loss(o, torch.ones_like(o)) | F.huber_loss(o, torch.zeros_like(o), delta=0.5) | F.cross_entropy(o, y) | F.cross_entropy(o, y, reduction='none').sum()
F.cross_entropy(o, y, label_smoothing=0.25, reduction='sum') | F.cross_entropy(o, y, ignore_index=1) | F.cross_entropy(o, y, weight=torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=o.dtype)) | F.nll_loss(F.log_softmax(o, -1), y) | F.cross_entropy(o, F.one_hot(y, 4).to(o.dtype))
F.binary_cross_entropy_with_logits(o, F.one_hot(y, 4).to(o.dtype)) | F.binary_cross_entropy(o.sigmoid(), torch.full_like(o, 0.5)) | F.kl_div(F.log_softmax(o, -1), torch.full_like(o, 0.25), reduction='batchmean') | F.multi_margin_loss(o, y) | F.soft_margin_loss(o, torch.ones_like(o))
F.cosine_embedding_loss(o, torch.ones_like(o), torch.ones(o.shape[0])) | F.triplet_margin_loss(o, o * 0.5, o.flip(0)) | F.gaussian_nll_loss(o, torch.zeros_like(o), torch.ones_like(o)) | F.poisson_nll_loss(o * 0.125, torch.ones_like(o)) | F.hinge_embedding_loss(o, torch.ones_like(o))
nn.CrossEntropyLoss(label_smoothing=0.5)(o, y) | nn.MSELoss(reduction='sum')(o, o.detach() * 0.5) | F.margin_ranking_loss(o[:, 0], o[:, 1], torch.ones(o.shape[0])) | F.multilabel_soft_margin_loss(o, torch.ones_like(o)) | o.logsumexp(-1).mean() | (o * torch.arange(4)).mean()
"""
OPTIMIZERS = """
SGD(ps, lr=0.125) | SGD(ps, lr=0.125, momentum=0.5) | SGD(ps, lr=0.125, momentum=0.5, nesterov=True, weight_decay=0.25) | SGD(ps, lr=0.125, momentum=0.5, dampening=0.5, maximize=True) | SGD(ps, lr=0.125, foreach=True, momentum=0.25) | SGD(ps, lr=0.125, foreach=False) | SGD(ps, lr=0.125, momentum=0.5, fused=True)
SGD([{'params': ps[:1], 'lr': 0.25}, {'params': ps[1:], 'momentum': 0.5}], lr=0.125) | SGD(m.named_parameters(), lr=0.125) | SGD(ps, lr=torch.tensor(0.125)) | Adam(ps, lr=0.125, eps=0.25) | Adam(ps, lr=0.125, eps=0.25, amsgrad=True) | Adam(ps, lr=0.125, eps=0.25, weight_decay=0.25, foreach=True) | Adam(ps, lr=0.125, eps=0.25, fused=True)
Adam(ps, lr=0.125, eps=0.25, maximize=True, foreach=False) | AdamW(ps, lr=0.125, eps=0.25) | AdamW(ps, lr=0.125, eps=0.25, amsgrad=True, fused=True) | AdamW([{'params': ps[:1], 'weight_decay': 0.0}, {'params': ps[1:], 'betas': (0.5, 0.5)}], lr=0.125, eps=0.25) | AdamW(ps, lr=torch.tensor(0.125), eps=0.25, foreach=False)
NAdam(ps, lr=0.125, eps=0.25) | RAdam(ps, lr=0.125, eps=0.25) | RMSprop(ps, lr=0.125, eps=0.25) | RMSprop(ps, lr=0.125, eps=0.25, centered=True, momentum=0.5) | Adagrad(ps, lr=0.125, eps=0.25) | Adagrad(ps, lr=0.125, lr_decay=0.5, eps=0.25, initial_accumulator_value=0.5) | Adadelta(ps, eps=0.25) | Adamax(ps, lr=0.125, eps=0.25) | ASGD(ps, lr=0.125)
Adafactor(ps, lr=0.125) | LBFGS(ps, lr=0.125, max_iter=2) | LBFGS(ps, lr=0.125, max_iter=2, history_size=2, line_search_fn='strong_wolfe') | SGD(ps, lr=0.125, differentiable=True) | Adagrad(ps, lr=0.125, eps=0.25, foreach=True) | Muon([q for q in ps if q.ndim == 2], lr=0.125)
"""
SCHEDULERS = """
StepLR(opt, 1, 0.5) | ExponentialLR(opt, 0.5) | CosineAnnealingLR(opt, 4) | LambdaLR(opt, lambda n: 1 / (n + 1)) | OneCycleLR(opt, 0.5, 8) | ReduceLROnPlateau(opt, patience=0) | SequentialLR(opt, [lr_scheduler.ConstantLR(opt), lr_scheduler.StepLR(opt, 1)], [1]) | CyclicLR(opt, 0.125, 0.25, cycle_momentum=False)
LinearLR(opt, 0.5) | MultiplicativeLR(opt, lambda n: 0.5) | ChainedScheduler([lr_scheduler.StepLR(opt, 2), lr_scheduler.ExponentialLR(opt, 0.5)]) | CosineAnnealingWarmRestarts(opt, 2) | PolynomialLR(opt, 4) | MultiStepLR(opt, [1, 2])
"""
OPTIMIZER_CHANGES = """
opt.param_groups[0]['lr'] = 0.25 | opt.param_groups[0]['lr'] *= 0.5 | opt.param_groups[-1]['weight_decay'] = 0.25 | opt.state.clear() | opt.zero_grad() | opt.zero_grad(set_to_none=False) | opt.step() | D.append(copy.deepcopy(opt.state_dict())) | opt.load_state_dict(D[-1]) | opt.add_param_group({'params': [nn.Parameter(torch.ones(2))]})
opt.param_groups[0]['momentum'] = 0.25 | opt.param_groups[0]['maximize'] = True | opt.param_groups[0]['foreach'] = not opt.param_groups[0]['foreach'] | H.append(opt.register_step_post_hook(lambda *a: LOG.append('step'))) | H.append(opt.register_step_pre_hook(lambda o, a, k: LOG.append(len(a)))) | opt.param_groups[0]['lr'] = torch.tensor(0.25)
opt.param_groups[0]['params'].pop() | opt = torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) | opt = torch.optim.AdamW(m.parameters(), eps=0.5) | [s.pop('momentum_buffer', 0) for s in opt.state.values()] | [s['step'].zero_() for s in opt.state.values()] | opt = copy.deepcopy(opt) | opt.load_state_dict(opt.state_dict()) | H.append(opt.register_load_state_dict_post_hook(lambda o: LOG.append('loaded')))
opt.param_groups[0]['params'][0] = p | opt.state.pop(p, 0) | opt.defaults['lr'] = 0.5 | opt.param_groups[0]['betas'] = (0.5, 0.75) | opt.param_groups[0]['eps'] = 0.5 | opt.param_groups[0]['fused'] = None | opt.param_groups[0]['differentiable'] = False
"""
# Between the gradients and the optimizer's step; and after it.
GRADIENTS = """
nn.utils.clip_grad_norm_(m.parameters(), 1.0) | nn.utils.clip_grad_norm_(ps, 0.5, norm_type=float('inf')) | nn.utils.clip_grad_value_(m.parameters(), 0.25) | LOG.append(nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=True)) | LOG.append(nn.utils.get_total_norm([q.grad for q in m.parameters() if q.grad is not None]))
torch._foreach_div_([q.grad for q in ps if q.grad is not None], 2.0) | [q.grad.div_(2) for q in ps if q.grad is not None] | LOG.append(all(q.grad is None or bool(q.grad.isfinite().all()) for q in ps)) | nn.utils.clip_grad_norm_(m.parameters(), 1.0, error_if_nonfinite=True) | LOG.append(sum(q.grad.abs().sum() for q in ps if q.grad is not None))
setattr(ps[0], 'grad', None) | setattr(ps[-1], 'grad', torch.zeros_like(ps[-1])) | nn.utils.clip_grads_with_norm_(ps, 0.5, torch.tensor(2.0)) | [setattr(q, 'grad', q.grad * 0.5) for q in ps if q.grad is not None]
"""
AFTER = """
average.update_parameters(m) | average.update_parameters(m) | [a.mul_(0.5).add_(b.detach(), alpha=0.5) for a, b in zip(ema.values(), m.parameters())] | torch._foreach_lerp_([*ema.values()], [q.detach() for q in m.parameters()], 0.5) | ema.update((n, ema[n] * 0.5 + q.detach() * 0.5) for n, q in m.named_parameters() if n in ema)
LOG.append([g['lr'] for g in opt.param_groups]) | LOG.append(sum(q.detach().square().sum() for q in ps)) | opt.zero_grad() | m.zero_grad(set_to_none=False) | [q.data.clamp_(-1, 1) for q in ps] | LOG.append(loss.item()) | LOG.append(loss.detach()) | losses.append(float(loss)) | COUNT[0] += 1
"""
AVERAGES = "AveragedModel(m) | AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)) | AveragedModel(m, avg_fn=lambda a, b, n: a * 0.5 + b * 0.5, use_buffers=True) | AveragedModel(m, multi_avg_fn=swa_utils.get_swa_multi_avg_fn())"
# Functions of functions over the module; `o`.
FUNCTIONAL = """
functional_call(m, dict(m.named_parameters()), (x,)) | functional_call(m, {**dict(m.named_parameters()), **dict(m.named_buffers())}, x) | functional_call(m, held, (x,)) | functional_call(m, (held, dict(m.named_buffers())), (x,), strict=False)
grad(lambda w: first(functional_call(m, w, (x,))).sum())(held) | grad_and_value(lambda w: first(functional_call(m, w, (x,))).square().mean())(held) | vmap(grad(lambda w, row: first(functional_call(m, w, (row[None],))).sum()), (None, 0), randomness='different')(held, x) | jvp(lambda w: first(functional_call(m, w, (x,))), (held,), ({n: torch.ones_like(w) for n, w in held.items()},))
jacrev(lambda w: first(functional_call(m, w, (x,))).sum(0))(held) | jacfwd(lambda y: first(m(y)).sum(0))(x) | vjp(lambda y: first(m(y)), x)[0] | vjp(lambda w: first(functional_call(m, w, (x,))).sum(), held)[1](torch.ones(())) | hessian(lambda y: first(m(y)).square().sum())(x[:1]) | vmap(lambda row: first(m(row[None])), randomness='same')(x)
vmap(lambda w, b, y: first(functional_call(m, (w, b), (y,))), (0, 0, None), randomness='different')(*stack_module_state([m, copy.deepcopy(m)]), x) | grad(lambda y: grad(lambda z: first(m(z)).sum())(y).square().sum())(x) | stateless.functional_call(m, held, (x,)) | torch.autograd.functional.jacobian(lambda y: first(m(y)).sum(0), x)
torch.autograd.grad(first(m(x)).sum(), [q for q in m.parameters() if q.requires_grad], allow_unused=True) | torch.autograd.grad(first(m(x)).square().sum(), [*m.parameters()][:1], create_graph=True, allow_unused=True) | torch.func.linearize(lambda y: first(m(y)), x)[0] | torch.autograd.functional.vjp(lambda y: first(m(y)).sum(), x)[1]
"""
