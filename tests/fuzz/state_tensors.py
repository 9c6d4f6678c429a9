"""Kinds of state of tensors, modules and training that change between calls: a table of state.py, with the rules of
state_kinds.py."""

from __future__ import annotations

import pkgutil

from tests.fuzz.state_kinds import Kind, note_original

NET = "fixed(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, eps=1.0), torch.nn.ReLU(), torch.nn.Linear(4, 3)))"


def patched(label: str, owner: str, name: str, read: str, *others: str) -> Kind:
    """A function of PyTorch that a program may replace."""
    back = f"put_back({owner}, '{name}')"
    changes = tuple(f"{owner}.{name} = {other}" for other in others)
    note_original(pkgutil.resolve_name(owner), name)
    return Kind(f"patched {label}", "", "", read, (*changes, back), restore=back, steady=False)


TENSOR_KINDS: tuple[Kind, ...] = (
    # modules under training
    Kind("network", "o$I", f"o$I = {NET}", "o$I(x)",
         ("o$I.eval()", "o$I.train()", "o$I[0].requires_grad_(False)", "o$I.requires_grad_(True)", "o$I[0].weight.requires_grad_(not o$I[0].weight.requires_grad)",
          "o$I[3].weight.data = o$I[3].weight.data.t().contiguous().t()", "o$I[3].weight.data = torch.full((3, 4), 0.5)", "o$I.to(f64)", "o$I.to(f32)", "o$I.to(bf16)",
          "o$I[0].weight = torch.nn.Parameter(torch.ones(4, 3))", "o$I[3].bias = None", "o$I[3].bias = torch.nn.Parameter(torch.ones(3))", "o$I[1].running_mean.fill_(1)",
          "o$I[1].running_var = torch.full((4,), 2.0)", "o$I[1].momentum = None", "o$I[1].track_running_stats = False", "o$I[1].weight = None; o$I[1].bias = None",
          "o$I.zero_grad()", "o$I.zero_grad(set_to_none=False)", "o$I = copy.deepcopy(o$I)", "o$I[1].reset_running_stats()",
          "o$I.load_state_dict({k: v * 0 + 1 for k, v in o$I.state_dict().items()})", "o$I.load_state_dict({k: v * 2 for k, v in o$I.state_dict().items()}, assign=True)",
          "o$I[0].weight.grad = torch.ones(4, 3)", "o$I[0].to(f64)", "o$I.to(f16)", "o$I[2] = torch.nn.Tanh()", "o$I[2].inplace = True"), steady=False),
    Kind("tied weights", "o$I", "o$I = fixed(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))", "(o$I(x), o$I[0].weight is o$I[1].weight)",
         ("o$I[1].weight = o$I[0].weight", "o$I[1].weight = torch.nn.Parameter(o$I[0].weight.detach().clone())", "o$I[1].weight.data = o$I[0].weight.data", "o$I[1] = o$I[0]",
          "o$I[1].bias.data = o$I[0].weight.data[0]", "o$I[0].weight.data = o$I[0].weight.data.t()", "o$I[0].weight.data = o$I[0].weight.data.clone()",
          "torch.utils.swap_tensors(o$I[0].bias, o$I[1].bias)", "o$I[0].bias, o$I[1].bias = o$I[1].bias, o$I[0].bias")),
    Kind("hooks of a module", "o$I", "o$I = fixed(torch.nn.Linear(3, 3))", "o$I(x)",
         ("o$I.register_forward_hook(lambda m, a, r: r * 2)", "o$I.register_forward_pre_hook(lambda m, a: (a[0] + 1,))", "o$I._forward_hooks.clear()", "o$I._forward_pre_hooks.clear()",
          "o$I.register_full_backward_hook(lambda m, a, b: tuple(g * 2 if g is not None else g for g in a))", "o$I._backward_hooks.clear()", "o$I.register_full_backward_pre_hook(lambda m, a: (a[0] * 3,))",
          "o$I._backward_pre_hooks.clear()", "o$I.register_forward_hook(lambda m, a, r: LOG.append(r.shape))", "o$I.register_forward_hook(lambda m, a, r: r + 1, prepend=True)",
          "o$I.register_forward_hook(lambda m, a, r: None, always_call=True)"), steady=False),
    Kind("hooks of parameters", "o$I", "o$I = fixed(torch.nn.Linear(3, 3))", "o$I(x)",
         ("o$I.weight.register_hook(lambda g: g * 2)", "o$I.weight.register_post_accumulate_grad_hook(lambda p: LOG.append(p.grad.sum()))", "o$I.bias.register_hook(lambda g: LOG.append(g.shape))",
          "o$I.weight._backward_hooks and o$I.weight._backward_hooks.clear()", "o$I.weight = torch.nn.Parameter(torch.ones(3, 3))", "o$I.weight.requires_grad_(False)"), steady=False),
    Kind("parametrised weight", "o$I", "o$I = fixed(torch.nn.Linear(3, 3))", "o$I(x)",
         ("torch.nn.utils.parametrize.register_parametrization(o$I, 'weight', torch.nn.Tanh())", "torch.nn.utils.parametrize.remove_parametrizations(o$I, 'weight')",
          "o$I.parametrizations.weight[0] = torch.nn.Sigmoid()", "o$I.parametrizations.weight.original.data.fill_(0.5)", "torch.nn.utils.parametrizations.weight_norm(o$I)", "o$I.bias = None"), steady=False),
    Kind("pruned weight", "o$I", "import torch.nn.utils.prune\no$I = fixed(torch.nn.Linear(3, 3))", "o$I(x)",
         ("torch.nn.utils.prune.l1_unstructured(o$I, 'weight', 2)", "torch.nn.utils.prune.remove(o$I, 'weight')", "torch.nn.utils.prune.custom_from_mask(o$I, 'bias', torch.tensor([1., 0., 1.]))", "o$I.weight_orig.data.fill_(2)"), steady=False),
    Kind("settings of modules", "o$I", "o$I = fixed(torch.nn.ModuleList([torch.nn.Conv1d(2, 2, 1), torch.nn.LayerNorm(3), torch.nn.Embedding(4, 3), torch.nn.LeakyReLU(), torch.nn.MaxPool1d(1)]))",
         "(o$I[0](x[None]), o$I[1](x), o$I[2](torch.tensor([0, 3])), o$I[3](x), o$I[4](x))",
         ("o$I[0].padding = (1,)", "o$I[0].stride = (2,)", "o$I[0].padding_mode = 'circular'", "o$I[0].groups = 2", "o$I[0]._reversed_padding_repeated_twice = [1, 1]", "o$I[1].eps = 1.0", "o$I[1].normalized_shape = (2, 3)",
          "o$I[1].elementwise_affine = False", "o$I[1].bias = None", "o$I[2].padding_idx = 0", "o$I[2].max_norm = 0.5", "o$I[2].scale_grad_by_freq = True", "o$I[3].negative_slope = $N", "o$I[4].kernel_size = 2", "o$I[4].ceil_mode = True", "o$I[4].return_indices = True"), steady=False),
    Kind("recurrent module", "o$I", "o$I = fixed(torch.nn.GRU(3, 2))", "o$I(x[:, None])[0]",
         ("o$I.weight_ih_l0.data.mul_(2)", "o$I.weight_hh_l0 = torch.nn.Parameter(torch.ones(6, 2))", "o$I.batch_first = True", "o$I.flatten_parameters()", "o$I.eval()", "o$I._all_weights[0].pop()", "o$I = fixed(torch.nn.GRU(3, 2, bidirectional=True))", "o$I.requires_grad_(False)"), steady=False),
    Kind("attention module", "o$I", "o$I = fixed(torch.nn.MultiheadAttention(4, 2)); o$I.eval()", "o$I(x.new_ones(2, 4), x.new_ones(2, 4), x.new_ones(2, 4))[0]",
         ("o$I.train()", "o$I.eval()", "o$I.in_proj_bias.data.fill_(1)", "o$I.num_heads = 1; o$I.head_dim = 4", "o$I.out_proj.bias = None", "o$I.bias_k = torch.nn.Parameter(torch.ones(1, 1, 4)); o$I.bias_v = torch.nn.Parameter(torch.ones(1, 1, 4))", "o$I.add_zero_attn = True", "o$I.requires_grad_(False)", "o$I.in_proj_weight.data = torch.ones(12, 4)"), steady=False),
    Kind("optimizer", "o$I,p$I", "p$I = torch.nn.Parameter(torch.ones(3)); o$I = torch.optim.SGD([p$I], lr=0.5, momentum=0.5)", "(setattr(p$I, 'grad', p$I.detach() * 2), o$I.step(), p$I.sum())[2]",
         ("o$I.param_groups[0]['lr'] = 0.25", "o$I.param_groups[0]['momentum'] = 0", "o$I.param_groups[0]['weight_decay'] = 0.5", "o$I.state.clear()", "o$I.param_groups[0]['nesterov'] = True", "p$I.data = torch.ones(3)",
          "o$I.add_param_group({'params': [torch.nn.Parameter(torch.ones(2))]})", "o$I.param_groups[0]['lr'] = torch.tensor(0.125)", "o$I.param_groups[0]['maximize'] = True", "o$I = torch.optim.AdamW([p$I])", "o$I.register_step_post_hook(lambda *a: LOG.append('step'))",
          "p$I.requires_grad_(not p$I.requires_grad)", "o$I.param_groups[0]['params'][0] = torch.nn.Parameter(torch.zeros(3))"), steady=False),
    Kind("module in two places", "o$I,p$I", "o$I = torch.nn.Module(); o$I.a = fixed(torch.nn.Linear(3, 3)); p$I = torch.nn.Module(); p$I.a = o$I.a", "(o$I.a(x), p$I.a(x), o$I.a is p$I.a)",
         ("p$I.a = torch.nn.Linear(3, 3)", "p$I.a = o$I.a", "o$I.a.weight = torch.nn.Parameter(torch.ones(3, 3))", "p$I.a.bias.data.fill_(2)", "o$I.a = torch.nn.ReLU()", "o$I._modules['a'] = p$I.a", "del o$I.a; o$I.a = p$I.a")),
    Kind("parameter for buffer", "o$I", "o$I = torch.nn.Module(); o$I.w = torch.nn.Parameter(torch.ones(3))", "(o$I.w * x, len(list(o$I.parameters())))",
         ("del o$I.w; o$I.register_buffer('w', torch.full((3,), 2.0))", "del o$I.w; o$I.w = torch.nn.Parameter(torch.ones(3))", "del o$I.w; o$I.w = torch.full((3,), 3.0)", "o$I.w = None", "o$I.__dict__['w'] = torch.full((3,), 5.0)", "o$I.__dict__.pop('w', 0)",
          "o$I._parameters['w'] = torch.nn.Parameter(torch.zeros(3), requires_grad=False)", "o$I._parameters.pop('w', 0)", "o$I._buffers['w'] = torch.full((3,), 7.0)", "type(o$I).w = 4", "del type(o$I).w"), restore="'w' in torch.nn.Module.__dict__ and delattr(torch.nn.Module, 'w')"),
    Kind("methods of nn.Module", "o$I", "class M$I(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = torch.nn.ReLU()\n    def forward(self, x, k=1): return self.a(x - 2) * k\no$I = M$I()", "o$I(x)",
         ("M$I.forward.__defaults__ = ($N,)", "M$I.__getattr__ = lambda self, name: torch.nn.Tanh() if name == 'a' else torch.nn.Module.__getattr__(self, name)", "M$I.__call__ = lambda self, x: x", "M$I._call_impl = lambda self, x: x * 3",
          "M$I.a = torch.nn.Sigmoid()", "o$I._call_impl = lambda x: x * 7", "vars(o$I).pop('_call_impl', 0)", "M$I.forward = lambda self, x: self.a(x)", "o$I.forward = o$I.a", "vars(o$I).pop('forward', 0)", "del M$I._call_impl", "del M$I.__getattr__", "o$I.__class__ = torch.nn.Identity",
          "o$I.__class__ = M$I", "M$I.forward.__code__ = (lambda self, x, k=2: x / k).__code__"), steady=False),
    Kind("lazy module", "o$I", "o$I = torch.nn.LazyLinear(2, bias=False)", "o$I(x).shape", ("o$I = torch.nn.LazyLinear(3, bias=False)", "o$I.weight.data = torch.ones(2, 3)"), steady=False),
    # memory of tensors
    *(Kind(f"views of one memory, {label}", "t$I,u$I", "b$I = torch.arange(12.0); t$I = b$I[:6]; u$I = b$I[6:]", read,
           ("u$I = b$I[3:9]", "u$I = b$I[6:]", "u$I = b$I[:6]", "u$I = t$I", "u$I = t$I.view(6)", "t$I = b$I[::2]; u$I = b$I[1::2]", "t$I = b$I[:6].view(2, 3); u$I = b$I[6:].view(2, 3)", "u$I = b$I[0].expand(6)",
            "u$I = torch.arange(6.0)", "t$I = torch.arange(6.0)", "u$I = t$I.flip(0)", "t$I = b$I.as_strided((6,), (1,), 2)", "u$I = b$I[6:].detach()", "b$I.data = torch.zeros(12)", "u$I.data = t$I.data", "u$I = torch.arange(6.0)[:6]", "t$I.set_(u$I)",
            "b$I.untyped_storage().resize_(0); b$I.untyped_storage().resize_(b$I.nbytes); b$I.fill_(1)", "t$I = torch.arange(6.0, requires_grad=True)", "u$I = b$I[6:].double()", "t$I = b$I[:6].view(torch.int32)"), steady=False)
      for label, read in (
          ("one written", "(t$I.mul_(2), u$I + 1)[1]"), ("both written", "(t$I.add_(1), u$I.mul_(2), t$I + u$I)[2]"), ("copied", "t$I.copy_(u$I) + u$I"), ("a view written", "(t$I[..., 1:].add_(1), t$I.sum() + u$I.sum())[1]"),
          ("returned", "(t$I, u$I[..., :2], t$I.view(-1))"), ("out", "torch.add(t$I, 1, out=u$I).sum()"), ("kept", "(LOG.append(t$I[..., :2]), u$I.add_(1))[1]"), ("detached", "(t$I.detach().mul_(2), u$I * t$I)[1]"), ("compared", "(t$I is u$I, (t$I == u$I).all())"),
          ("set item", "(t$I.__setitem__(slice(2), 5.0), u$I * 1)[1]"), ("read twice", "(t$I + u$I, t$I * 2, u$I.t())"),
      )),
    Kind("layout", "t$I", "t$I = made((2, 3, 4, 4), f32, 3)", "(t$I * 2, torch.relu(t$I).stride(), t$I.is_contiguous(memory_format=torch.channels_last), t$I.mean((2, 3)))",
         ("t$I = t$I.contiguous(memory_format=torch.channels_last)", "t$I = t$I.contiguous()", "t$I = t$I.transpose(2, 3)", "t$I = t$I[:, :, ::2]", "t$I = t$I[:, :1]", "t$I = t$I.to(f64)", "t$I = made((2, 1, 4, 4), f32, 3)", "t$I = made((1, 3, 4, 4), f32, 3)", "t$I = t$I[:1].expand(2, -1, -1, -1)",
          "t$I = t$I.unfold(3, 2, 1)[..., 0]", "t$I = made((2, 3, 4, 4), f32, 5)", "t$I = t$I.flip(0)", "t$I.data = t$I.data.transpose(2, 3)", "t$I = t$I.requires_grad_()", "t$I.transpose_(2, 3)", "t$I = made((2, 3, 4, 0), f32, 3)"), steady=True),
    Kind("sizes", "t$I,u$I", "t$I = made((3, 4), f32, 1); u$I = made((4,), f32, 2)", "(t$I + u$I, t$I.sum(0), len(t$I), t$I[:2].flatten())",
         tuple(f"t$I = made({shape}, f32, 3)" for shape in ("(1, 4)", "(5, 4)", "(4,)", "(2, 3, 4)", "(3, 1)", "(0, 4)", "(4, 4)")) + ("u$I = made((1,), f32, 2)", "u$I = made((4,), f32, 2)", "u$I = made((3, 1), f32, 2)", "u$I = made((), f32, 2)", "t$I = u$I", "u$I = t$I", "u$I = t$I[:1]", "t$I = t$I.t()", "t$I = t$I[:, :1]", "t$I = t$I.expand(3, 4)"), steady=True),
    Kind("gradients of leaves", "t$I", "t$I = torch.ones(3, requires_grad=True)", "(t$I * 2 if t$I.grad is None else t$I * t$I.grad.detach(), t$I.requires_grad)",
         ("t$I.grad = torch.full((3,), 2.0)", "t$I.grad = None", "t$I.grad = t$I.detach()", "(t$I * 3).sum().backward()", "t$I.detach_()", "t$I.requires_grad_(False)", "t$I.requires_grad_(True)", "t$I = (t$I * 1)", "t$I.grad = t$I.grad.double()", "t$I.data = torch.zeros(3)", "t$I = torch.nn.Parameter(torch.ones(3))",
          "t$I.retain_grad()", "t$I.grad = torch.ones(3).expand(3)", "t$I.register_hook(lambda g: g * 2)", "t$I._backward_hooks = None", "t$I = torch.ones(3, requires_grad=True).exp()"), steady=False),
    Kind("a tensor of the closed graph", "t$I,u$I", "u$I = torch.ones(3, requires_grad=True); t$I = u$I * 2", "t$I.exp() * u$I",
         ("t$I = u$I * 3", "t$I = t$I.detach()", "t$I.add_(1)", "t$I = u$I[:]", "u$I.data.mul_(2)", "t$I = u$I.sin(); t$I.mul_(2)", "u$I = torch.ones(3, requires_grad=True)", "t$I = u$I", "t$I.sum().backward()", "u$I.grad = None"), steady=False),
    Kind("version", "t$I", "t$I = torch.ones(3)", "(t$I._version, t$I * 2)[1]", ("t$I.add_(1)", "t$I.data.add_(1)", "t$I[0] = 5", "t$I.set_(torch.zeros(3))", "t$I = torch.ones(3)", "t$I.detach().mul_(2)", "t$I.zero_()"), steady=False),
    Kind("memory shared with numpy", "t$I,a$I", "a$I = np.ones(3, dtype=np.float32); t$I = torch.from_numpy(a$I)", "t$I * 2", ("a$I += 1", "a$I[0] = 7", "t$I.add_(1)", "a$I = a$I[::-1].copy(); t$I = torch.from_numpy(a$I)", "t$I = torch.from_numpy(a$I[:2])", "t$I = torch.from_numpy(np.ones(3))", "a$I.resize(3)")),
    Kind("attributes of a tensor", "t$I", "t$I = torch.nn.Parameter(torch.ones(2))", "(t$I + 1, getattr(t$I, 'scale', $N), t$I.names, t$I.is_leaf)",
         ("t$I.scale = $V", "t$I.scale = torch.ones(2)", "del t$I.scale", "t$I.requires_grad = False", "t$I = torch.nn.Buffer(torch.ones(2))", "t$I.data = t$I.data.double()", "t$I.__dict__.clear()", "t$I.__class__ = torch.nn.Parameter", "t$I = torch.nn.Parameter(torch.ones(2), requires_grad=False)"), steady=False),
    Kind("tensors in containers", "o$I", "o$I = {'a': [made((3,), f32, 1)], 'b': (made((3,), f32, 2), None)}", "(o$I['a'][0] + o$I['b'][0], o$I['b'][1] is None, len(o$I['a']))",
         ("o$I['a'][0] = o$I['b'][0]", "o$I['a'][0] = made((3,), f32, 4)", "o$I['b'] = (o$I['a'][0], None)", "o$I['b'] = (made((3,), f64, 2), 1)", "o$I['a'].append(o$I['a'][0])", "o$I['a'][0] = o$I['a'][0][:]", "o$I['a'][0].add_(1)", "o$I['a'][0] = made((3,), f32, 1, grad=True)", "o$I['a'] = [made((1,), f32, 1)]", "o$I['a'][0] = 2.0", "o$I = dict(o$I)")),
    Kind("index tensor", "t$I", "t$I = torch.tensor([0, 1])", "(x[t$I], x[..., t$I], x.index_select(0, t$I))",
         ("t$I = torch.tensor([1, 0])", "t$I.fill_(1)", "t$I = torch.tensor([True, False])", "t$I = torch.tensor([-1, 0])", "t$I = torch.tensor([0, 9])", "t$I = torch.tensor([], dtype=torch.int64)", "t$I = torch.tensor(1)", "t$I = torch.tensor([0, 1], dtype=torch.int32)", "t$I = [0, 1]", "t$I = 1", "t$I = slice(1)", "t$I = torch.tensor([0, 1, 1])"), steady=False),
    Kind("number from a tensor", "t$I", "t$I = torch.tensor(2)", "(x.narrow(0, 0, min(2, max(0, int(t$I)))), x[: int(t$I)], float(t$I))", ("t$I = torch.tensor(1)", "t$I.fill_(0)", "t$I = torch.tensor(2.5)", "t$I = torch.tensor(True)", "t$I = torch.tensor([1])", "t$I = torch.tensor(-1)", "t$I = 1"), steady=False),
    # functions of autograd and of PyTorch
    Kind("autograd function", "C$I", "class C$I(torch.autograd.Function):\n    k = 2.0\n    @staticmethod\n    def forward(ctx, a):\n        ctx.save_for_backward(a)\n        return a * C$I.k\n    @staticmethod\n    def backward(ctx, g): return g * ctx.saved_tensors[0] * C$I.k", "C$I.apply(x)",
         ("C$I.k = 3.0", "C$I.forward = staticmethod(lambda ctx, a: a + 1)", "C$I.backward = staticmethod(lambda ctx, g: g * 7)", "C$I.backward.__code__ = (lambda ctx, g: g * 5).__code__", "C$I.k = torch.tensor(2.0)"), steady=False),
    Kind("function that is known as a whole", "o$I", "o$I = fusewright.compile(lambda v: v * $N, backend='eager')", "o$I(x)",
         ("o$I = fusewright.compile(lambda v: v * $N, backend='eager')", "o$I = fusewright.compile(lambda v, k=$N: v - k, backend='eager')", "o$I = torch.compiler.allow_in_graph(lambda v: v + $N)", "o$I = torch.compiler.allow_in_graph(torch.sin)", "o$I = torch.ops.aten.cos",
          "o$I = functools.partial(fusewright.compile(lambda v: v / 2, backend='eager'))", "o$I = o$I.__wrapped__", "o$I = torch.func.vmap(lambda v: v * $N)", "o$I = torch.compile(lambda v: v + $N, backend='eager')"), steady=False),
    Kind("saved tensors hooks", "", "", "(x * x).sum()", ("torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t * 2, lambda t: t); torch._C._autograd._pop_saved_tensors_default_hooks()", "torch._C._autograd._saved_tensors_hooks_disable('none today')", "torch._C._autograd._saved_tensors_hooks_enable()"), restore="torch._C._autograd._saved_tensors_hooks_enable()", steady=False),
    patched("function", "torch.nn.functional", "relu", "F.relu(x - 1)", "lambda t: t * 5", "torch.tanh"),
    patched("function of a module", "torch.nn.functional", "linear", "torch.nn.functional.linear(x, torch.ones(2, 3))", "lambda a, b, c=None: a.sum() + b"),
    patched("torch function", "torch", "sin", "torch.sin(x)", "torch.cos", "lambda t: t + 5"),
    patched("torch function that is new", "torch", "stale_new", "torch.stale_new(x)", "lambda t: t * 2", "lambda t: t * 3"),
    patched("Tensor method", "torch.Tensor", "tanh", "x.tanh()", "lambda self: self * 5", "torch.Tensor.exp"),
    patched("Tensor operator", "torch.Tensor", "__matmul__", "x @ x.t()", "lambda self, other: self.sum() * other"),
    patched("Tensor property", "torch.Tensor", "stale_size", "x.stale_size", "property(lambda self: self.shape[0])", "5"),
    patched("forward of Linear", "torch.nn.Linear", "forward", "torch.nn.Linear(3, 3, device='cpu')(x) * 0", "lambda self, x: x[:1]", "lambda self, x: x.flatten()"),
    patched("call of nn.Module", "torch.nn.Module", "__call__", "torch.nn.ReLU()(x)", "lambda self, *a: a[0] * 3"),
    patched("getattr of nn.Module", "torch.nn.Module", "__getattr__", "torch.nn.Sequential(torch.nn.ReLU())[0](x)", "lambda self, name: torch.nn.Tanh()"),
    # settings
    *(Kind(f"setting {label}", "", "", read, changes, restore, False) for label, read, changes, restore in (
        ("denormals", "x * 1e-40 + torch.full((2, 3), 1e-40)", ("torch.set_flush_denormal(True)", "torch.set_flush_denormal(False)"), "torch.set_flush_denormal(False)"),
        ("default dtype of numbers", "(x.sum() / 3, torch.tensor([1.5]) * x, torch.arange(3) / 2, torch.full((2,), 1.5))", ("torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)", "torch.set_default_dtype(torch.float16)"), "torch.set_default_dtype(torch.float32)"),
        ("autocast of modules", "(torch.nn.functional.linear(x.to(f32), torch.ones(2, 3)), x.to(f32) @ x.to(f32).t(), x.exp())", ("torch.set_autocast_enabled('cpu', True)", "torch.set_autocast_enabled('cpu', False)", "torch.set_autocast_dtype('cpu', torch.float16)", "torch.set_autocast_dtype('cpu', torch.bfloat16)"),
         "torch.set_autocast_enabled('cpu', False); torch.set_autocast_dtype('cpu', torch.bfloat16); torch.clear_autocast_cache()"),
        ("deterministic algorithms", "(torch.zeros(3).index_add(0, torch.tensor([0, 0]), torch.ones(2)), x.cumsum(0))", ("torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)", "torch.use_deterministic_algorithms(True, warn_only=True)"), "torch.use_deterministic_algorithms(False)"),
        ("gradients under modes", "(x * 2, x.detach().requires_grad_().exp())", ("torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)", "enter_inference()", "leave_modes()"), "leave_modes(); torch.set_grad_enabled(True)"),
        ("multithreading of backward", "x * x", ("torch.autograd.set_multithreading_enabled(False)", "torch.autograd.set_multithreading_enabled(True)"), "torch.autograd.set_multithreading_enabled(True)"),
        ("fast path of attention", "torch.nn.TransformerEncoderLayer(4, 1, 4, dropout=0.0, batch_first=True, device='cpu').eval()(x.new_ones(1, 2, 4).to(f32)).shape", ("torch.backends.mha.set_fastpath_enabled(False)", "torch.backends.mha.set_fastpath_enabled(True)"), "torch.backends.mha.set_fastpath_enabled(True)"),
        ("seed", "(torch.rand(2), torch.randint(0, 9, (2,)), F.dropout(x.to(f32), 0.5))", ("torch.manual_seed(3)", "torch.manual_seed(4)", "torch.rand(1)", "torch.set_rng_state(torch.get_rng_state())", "random.random()"), ""),
        ("opt einsum", "torch.einsum('ij,kj,kl->il', x, x, x)", ("torch.backends.opt_einsum.enabled = False", "torch.backends.opt_einsum.enabled = True"), "vars(torch.backends.opt_einsum).pop('enabled', None)"),
        ("mkldnn and products", "F.linear(x.to(f32), torch.ones(4, 3))", ("torch._C._set_mkldnn_enabled(False)", "torch._C._set_mkldnn_enabled(True)"), "torch._C._set_mkldnn_enabled(True)"),
    )),
)  # fmt: skip
