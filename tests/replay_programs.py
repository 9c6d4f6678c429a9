"""The golden set of tests/replay.py: small programs over all kinds of operators, each compiled and called.

Takes a function that compiles, as `fusewright.compile` does; what the compiles say on the event stream is what counts.
Always holds: needs PyTorch, and of fusewright its public names only, so that the same text runs against trees whose
modules lie elsewhere; the caller seeds PyTorch's random numbers before each program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.autograd import programs_custom, programs_engine, programs_modes, programs_outputs  # noqa: F401
from tests.autograd.programs import PROGRAMS as AUTOGRAD
from tests.generalise.size_block_programs import program as block_program
from tests.generalise.size_programs import program as size_program

Compile = Callable[..., Any]
Program = Callable[[Compile], object]
Arguments = Callable[[], Sequence[Any]]

PROGRAMS: dict[str, Program] = {}
BF16, F16 = torch.bfloat16, torch.float16
r = torch.randn


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape)


def inference(*arguments: Arguments, **settings: Any) -> Callable[[Callable[..., Any]], None]:
    """Adds a function that is compiled and called with each of these arguments in turn, without gradients."""

    def add(function: Callable[..., Any]) -> None:
        def program(compile: Compile) -> None:
            compiled = compile(function, **settings)
            with torch.no_grad():
                for made in arguments:
                    compiled(*made())

        PROGRAMS[function.__name__] = program

    return add


def modules(make: Callable[[], nn.Module], *arguments: Arguments, train: bool = False, **settings: Any) -> Program:
    """Compiles a module and calls it, for a training step with the backward."""

    def program(compile: Compile) -> None:
        module = make().train(train)
        compiled = compile(module, **settings)
        for made in arguments:
            with torch.set_grad_enabled(train):
                result = compiled(*made())
            if train:
                result.float().square().mean().backward()

    return program


def gradients(*arguments: Arguments, **settings: Any) -> Callable[[Callable[..., Any]], None]:
    """Adds a function of tensors that want gradients, forward and backward."""

    def add(function: Callable[..., Any]) -> None:
        def program(compile: Compile) -> None:
            compiled = compile(function, **settings)
            for made in arguments:
                tensors = [t.requires_grad_(t.dtype.is_floating_point) if isinstance(t, Tensor) else t for t in made()]
                compiled(*tensors).float().sum().backward()

        PROGRAMS[function.__name__] = program

    return add


# --- pointwise --------------------------------------------------------------------------------------------------------


@inference(lambda: (r(64, 48), r(48)))
def pointwise_chain(x, y):
    return torch.abs(torch.sigmoid(x) * torch.tanh(y) + x) - F.gelu(y) * 0.5, F.silu(x), F.softplus(y)


@inference(lambda: (r(33, 17), r(33, 1)))
def comparisons(x, y):
    return torch.where(x > y, x, -y), x.clamp(-1, y.max()), (x == y) | ~(x < 0), torch.maximum(x, y).sign(), x.isnan()


@inference(lambda: (integers(90, 40), integers(9, 40) + 1))
def whole_numbers(x, y):
    return (
        x // y,
        x % y,
        (x << 2) ^ y,
        x & 7,
        torch.div(x, y, rounding_mode="trunc"),
        x / y,
        x.to(torch.uint8),
        x.bool(),
    )


@inference(lambda: (r(30), r(30).double(), integers(5, 30), r(30).to(BF16)))
def mixed_types(x, d, n, h):
    return x + n, x * d, h + x, h * 2, (x * 3).to(torch.int32), d.to(F16) + 1, n.float().sqrt()


@inference(lambda: (r(200).abs() + 0.5,))
def special_functions(x):
    return (
        x.erf(),
        x.lgamma(),
        x.expm1().log1p(),
        x.digamma(),
        x.atan2(x + 1),
        x.pow(2.5),
        torch.polygamma(1, x),
        x.sin().acos(),
    )


@inference(lambda: (r(20, 10), r(20, 10)))
def written_inputs(x, y):
    x.mul_(2).add_(y)
    y[:, ::2] = x[:, ::2].relu()
    return x.sum(1)


@inference(lambda: (r(12, dtype=torch.complex64), r(12)))
def complex_numbers(z, x):
    return (z * x).abs(), torch.view_as_real(z.conj() + 1), torch.polar(x.abs(), x)


# --- reductions, scans, norms -----------------------------------------------------------------------------------------


@inference(lambda: (r(16, 12, 40),))
def sums(x):
    return (
        x.sum(),
        x.sum(0),
        x.mean((0, 2)),
        x.sum(1, keepdim=True) * x,
        x.double().sum(-1),
        (x > 0).sum(2),
        x.nansum(0),
    )


@inference(lambda: (r(512, 3000),))
def long_reductions(x):
    return x.std(), x.var(1), x.amax(), x.sum(0), x.square().mean().sqrt()


@inference(lambda: (r(16, 50),))
def extremes(x):
    return x.max(1), x.argmin(0), x.amin((0, 1)), torch.aminmax(x), (x > 2).any(), (x > 2).all(1), x.prod(1)


@inference(lambda: (r(8, 20, 30),))
def distances(x):
    return (
        x.norm(dim=1),
        torch.logsumexp(x, (1, 2)),
        F.normalize(x, dim=-1),
        torch.cdist(x, x),
        F.cosine_similarity(x, x + 1, 1),
    )


@inference(lambda: (r(10, 64),))
def scans(x):
    return x.cumsum(1), x.cumprod(0), x.cummax(1), x.logcumsumexp(1), x.diff()


@inference(lambda: (r(8, 12, 40, 40), torch.ones(40, 40).tril()))
def softmaxes(x, mask):
    scores = (x / 8).masked_fill(mask == 0, float("-inf"))
    return scores.softmax(-1), x.log_softmax(1), x.softmax(2).to(BF16)


@inference(lambda: (r(32, 1000), integers(1000, 32)))
def losses(x, labels):
    return (
        F.cross_entropy(x, labels),
        F.cross_entropy(x, labels, label_smoothing=0.1),
        F.nll_loss(x, labels),
        F.smooth_l1_loss(x, x * 2),
    )


@inference(lambda: (r(6, 32, 48), r(48), r(48)))
def norms(x, weight, bias):
    residual = F.layer_norm(x + x.flip(0), (48,), weight, bias)
    return (
        residual,
        F.rms_norm(residual, (48,), weight),
        F.group_norm(x, 8),
        F.instance_norm(x),
        F.local_response_norm(x, 3),
    )


# --- views, indices, order --------------------------------------------------------------------------------------------


@inference(lambda: (r(4, 6, 8),))
def views(x):
    return (
        x.transpose(1, 2).reshape(4, -1),
        x[:, ::2, 1:],
        x.permute(2, 0, 1).contiguous(),
        x.unfold(2, 3, 2),
        x[0],
        x.expand(2, 4, 6, 8).sum(0),
    )


@inference(lambda: (r(4, 6), r(3, 6)))
def joined(x, y):
    whole = torch.cat((x * 2, y.relu()))
    return (
        whole,
        torch.stack((x, x + 1), 1),
        F.silu(torch.cat((x, x), 1)),
        whole.chunk(2)[1] + 1,
        x.repeat(2, 2),
        x.repeat_interleave(2, 0),
    )


@inference(lambda: (r(3, 5, 7, 6),))
def moved(x):
    return (
        x.flip(1, 2),
        x.roll((1, 2), (0, 3)),
        F.pad(x, (1, 2, 0, 1)),
        F.pad(x, (2, 1, 1, 1), "reflect"),
        F.pad(x, (1, 1, 0, 2), "replicate"),
        x.tril(),
    )


@inference(lambda: (r(20, 16), integers(20, 9), integers(16, 20, 4)))
def gathers(x, rows, places):
    return (
        x[rows],
        x.gather(1, places),
        x.index_select(0, rows) * 2,
        x[rows, rows % 16],
        x.take(places),
        x[:, None][rows, 0],
    )


@inference(lambda: (r(20, 16), integers(20, 9), integers(16, 20, 4), r(9, 16)))
def scatters(x, rows, places, values):
    added = x.index_add(0, rows, values).index_put((rows,), values, accumulate=True)
    return (
        added,
        x.scatter_add(1, places, x),
        x.scatter(1, places, 2.0),
        x.index_fill(0, rows, 0),
        x.scatter_reduce(1, places, x, "amax"),
    )


@inference(lambda: (integers(50, 4, 10), r(50, 24)))
def embeddings(ids, table):
    return (
        F.embedding(ids, table, 0) * 2 + 1,
        F.embedding_bag(ids, table, mode="mean"),
        F.one_hot(ids, 50),
        table[ids].sum(1),
    )


@inference(lambda: (r(12, 30),), options={"capture_dynamic_output_shape_ops": True})
def sizes_from_data(x):
    return x[x > 0] * 2, x.nonzero(), (x > 1).int().unique()


@inference(lambda: (r(12, 300), r(12, 5)))
def ordered(x, y):
    values, places = x.sort(1, descending=True)
    return (
        values,
        places,
        x.topk(4, 1),
        x.argsort(0),
        x.kthvalue(3, 1),
        x.median(1),
        torch.searchsorted(values.flip(1), y),
        x.msort(),
    )


# --- images -----------------------------------------------------------------------------------------------------------


def conv_chain(width: int) -> nn.Module:
    layers = [
        nn.Conv2d(3, width, 3, 2, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 1, 1, groups=width),
    ]
    return nn.Sequential(
        *layers, nn.Hardswish(), nn.Conv2d(width, 2 * width, 1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


PROGRAMS["convolutions"] = modules(lambda: conv_chain(32), lambda: (r(2, 3, 32, 32),))
PROGRAMS["convolutions_bfloat16"] = modules(lambda: conv_chain(32).to(BF16), lambda: (r(2, 3, 32, 32).to(BF16),))
PROGRAMS["convolutions_as_laid_out"] = modules(
    lambda: conv_chain(8), lambda: (r(2, 3, 32, 32),), options={"layout": False, "pack_weights": False}
)
PROGRAMS["convolutions_training"] = modules(lambda: conv_chain(16), lambda: (r(2, 3, 32, 32),), train=True)
PROGRAMS["convolutions_any_size"] = modules(
    lambda: conv_chain(16), *(lambda n=n: (r(2, 3, n, n),) for n in (32, 48, 40))
)


@inference(lambda: (r(2, 4, 20), r(6, 4, 3), r(1, 4, 8, 8), r(4, 2, 3, 3), r(1, 2, 6, 6, 6), r(3, 2, 2, 2, 2)))
def other_convolutions(x1, w1, x2, w2, x3, w3):
    return (
        F.conv1d(x1, w1, padding=1).relu(),
        F.conv_transpose2d(x2, w2, stride=2),
        F.conv3d(x3, w3) + 1,
        F.conv2d(x2, w2, groups=2, dilation=2),
    )


@inference(lambda: (r(2, 6, 17, 13),))
def pools(x):
    pooled = F.max_pool2d(x, 3, 2, 1)
    return (
        pooled + 1,
        F.avg_pool2d(x, 2, 1),
        F.adaptive_avg_pool2d(x, (4, 3)),
        F.adaptive_max_pool2d(x, 5),
        F.max_pool2d(x, 2, return_indices=True),
    )


@inference(lambda: (r(2, 4, 9, 7), r(2, 5, 6, 2).tanh()))
def resampled(x, grid):
    wide = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    return (
        wide,
        F.interpolate(x, size=(5, 12)),
        F.interpolate(x, size=(11, 6), mode="bicubic"),
        F.grid_sample(x, grid),
        F.pixel_shuffle(x, 2),
    )


# --- products and attention -------------------------------------------------------------------------------------------


def block(width: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).to(
        dtype
    )


PROGRAMS["products"] = modules(lambda: block(128), lambda: (r(64, 128),))
PROGRAMS["products_of_one_row"] = modules(lambda: block(128), lambda: (r(1, 128),))
PROGRAMS["skinny_products"] = modules(lambda: block(256), lambda: (r(7, 256),))
PROGRAMS["products_bfloat16"] = modules(lambda: block(128, BF16), lambda: (r(64, 128).to(BF16),))
PROGRAMS["skinny_products_bfloat16"] = modules(lambda: block(256, BF16), lambda: (r(3, 256).to(BF16),))
PROGRAMS["products_float16"] = modules(lambda: block(128, F16), lambda: (r(40, 128).to(F16),))
PROGRAMS["products_of_any_rows"] = modules(lambda: block(128), *(lambda n=n: (r(n, 128),) for n in (40, 64, 1)))
PROGRAMS["products_dynamic"] = modules(lambda: block(128), lambda: (r(12, 128),), dynamic=True)
PROGRAMS["products_unpacked"] = modules(lambda: block(128), lambda: (r(64, 128),), options={"pack_weights": False})
PROGRAMS["products_unfused"] = modules(lambda: block(64), lambda: (r(32, 64),), options={"fusion": False})
PROGRAMS["products_training"] = modules(lambda: block(128), lambda: (r(64, 128),), train=True)
PROGRAMS["products_autotuned"] = modules(lambda: block(128), lambda: (r(4, 128),), options={"max_autotune": True})


@inference(lambda: (r(6, 20, 16), r(6, 16, 24), r(20, 24), r(24)))
def batched_products(x, y, bias, row):
    scores = torch.baddbmm(bias, x, y) * 0.5
    return (
        scores.softmax(-1),
        torch.einsum("bij,bjk->bik", x, y) + row,
        x[0] @ y[0] @ row,
        torch.addmm(bias, x[1], y[1]).relu(),
    )


@inference(lambda: (r(2, 4, 40, 16), torch.ones(40, 40, dtype=torch.bool).tril()))
def attention(x, mask):
    attend = F.scaled_dot_product_attention
    return (
        attend(x, x, x, is_causal=True),
        attend(x, x, x, attn_mask=mask),
        attend(x[:, :, :1], x, x),
        attend(x.to(BF16), x.to(BF16), x.to(BF16)),
    )


@inference(lambda: (r(1, 8, 300, 64),))
def attention_of_many(x):
    return F.scaled_dot_product_attention(x, x, x, scale=0.1).transpose(1, 2).reshape(1, 300, -1) + 1


@inference(*(lambda n=n: (r(2, 4, 1, 16), r(2, 4, n, 16), r(2, 4, n, 16)) for n in (10, 11, 12)))
def attention_to_a_growing_cache(query, keys, values):
    return F.scaled_dot_product_attention(
        query, torch.cat((keys, query), 2), torch.cat((values, query), 2)
    ), keys.shape[2] + 1


def encoder(**settings: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, **settings)


PROGRAMS["encoder_layer"] = modules(lambda: encoder(), lambda: (r(2, 10, 32),))
PROGRAMS["encoder_layers_training"] = modules(
    lambda: nn.Sequential(*(encoder(dropout=0.1) for _ in range(3))), lambda: (r(2, 10, 32),), train=True
)
PROGRAMS["encoder_layers_of_any_length"] = modules(
    lambda: nn.Sequential(*(encoder() for _ in range(4))), *(lambda n=n: (r(2, n, 32),) for n in (10, 12, 17))
)
PROGRAMS["encoder_in_buckets"] = modules(
    lambda: block(16), *(lambda n=n: (r(2, n, 16),) for n in (5, 12)), options={"bucket": {"seq": [8, 16]}}
)


class LastState(nn.Module):
    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0][:, -1]


PROGRAMS["lstm"] = modules(
    lambda: LastState(nn.LSTM(12, 16, 2, batch_first=True)), *(lambda n=n: (r(3, n, 12),) for n in (4, 6))
)
PROGRAMS["gru_training"] = modules(
    lambda: LastState(nn.GRU(12, 16, batch_first=True)), lambda: (r(3, 4, 12),), train=True
)


# --- random numbers, training, optimizers -----------------------------------------------------------------------------


@inference(lambda: (r(30, 20),))
def random_numbers(x):
    return (
        F.dropout(x, 0.3),
        torch.randn_like(x) + x,
        torch.rand(4, 5),
        torch.randint(0, 9, (6,)),
        torch.bernoulli(x.sigmoid()),
        torch.randperm(7),
    )


@gradients(lambda: (r(30, 20),), options={"fallback_random": True})
def dropout_as_eager(x):
    return F.dropout(x * 2, 0.3)


@gradients(lambda: (r(8, 12, 10), r(10), r(10, 10)))
def residual_block(x, weight, matrix):
    return x + F.gelu(F.layer_norm(x, (10,), weight) @ matrix).softmax(-1)


@gradients(lambda: (r(60, 24), integers(60, 5, 7), integers(24, 5)))
def embedding_loss(table, ids, labels):
    return F.cross_entropy(F.embedding(ids, table).mean(1), labels)


@gradients(lambda: (r(2, 3, 12, 12), r(4, 3, 3, 3)))
def image_gradients(x, weight):
    y = F.max_pool2d(F.interpolate(F.conv2d(x, weight, padding=1), scale_factor=2, mode="bilinear"), 2)
    return F.batch_norm(y, None, None, training=True).relu()


@gradients(lambda: (r(6, 40, 8), r(6, 40, 8)), lambda: (r(7, 40, 8), r(7, 40, 8)))
def attention_gradients(x, y):
    return F.scaled_dot_product_attention(x, y, y).sort(-1)[0].cumsum(1) * y[:, :1].expand(-1, 40, -1)


@gradients(lambda: (r(16, 16), r(16, 16)))
def recomputed(x, y):
    return checkpoint(lambda a, b: torch.tanh(a @ b).sin().exp(), x, y, use_reentrant=False)


@gradients(lambda: (r(64, 64), r(64, 64)), options={"activation_memory_budget": 0.3})
def little_memory(x, y):
    for _ in range(4):
        x = torch.relu(x @ y).sin()
    return x


@gradients(lambda: (r(32, 64), r(64, 64)))
def autocast(x, y):
    with torch.autocast("cpu", BF16):
        return F.layer_norm(x @ y, (64,)) @ y


def optimizer(kind: type[torch.optim.Optimizer], **settings: Any) -> Program:
    def program(compile: Compile) -> None:
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        chosen = kind(net.parameters(), **settings)
        step = compile(chosen.step)
        for _ in range(3):
            chosen.zero_grad()
            net(r(5, 8)).square().mean().backward()
            step()

    return program


PROGRAMS["adamw"] = optimizer(torch.optim.AdamW, lr=1e-3, foreach=True)
PROGRAMS["adam_fused"] = optimizer(torch.optim.Adam, lr=1e-3, fused=True)
PROGRAMS["sgd"] = optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)

# --- programs of changing sizes, Python around the graph --------------------------------------------------------------


@inference(*(lambda m=m, n=n: (r(m, n), r(m, n)) for m, n in ((4, 6), (5, 6), (7, 9), (1, 6), (0, 3))))
def sizes_of_every_kind(x, y):
    return (x - y.mean(0)).softmax(-1), torch.cat((x, y), 1).sum(1) / x.shape[0], x[: x.shape[0] // 2], x.t() @ y


@inference(lambda: (r(5, 6),), lambda: (r(9, 6),), dynamic=True)
def branch_on_a_size(x):
    return x * 2 if x.shape[0] % 3 == 0 else x[: x.shape[0] - 1].reshape(-1) + x.shape[0]


@inference(lambda: (r(4, 4), r(4, 4)))
def control_flow(x, w):
    chosen = torch.cond(x.sum() > 0, lambda a: a.sin() @ w, lambda a: a.cos() + 1, (x,))
    return torch.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 1.5 + w), (torch.tensor(0), chosen * 2))


@inference(lambda: (r(6), {"scale": 2.0, "parts": [r(6), r(1)]}), lambda: (r(6), {"scale": 3.0, "parts": [r(6), r(1)]}))
def breaks_and_effects(x, config):
    y = x * config["scale"] + sum(part.sin() for part in config["parts"])
    config["seen"] = config.get("seen", 0) + 1
    if y.sum() > 0:
        y = y - 1
    print(end="")
    config["parts"].append(y.relu())
    return {"y": y, "total": y.sum().item(), "sorted": sorted(config)}


@inference(lambda: (r(5, 4), r(4)))
def transforms(x, w):
    scores = torch.func.vmap(lambda row: torch.tanh(row @ w))(x)
    return scores, torch.func.grad(lambda v: (x @ v).sin().sum())(w), torch.func.jacrev(lambda v: v * v.sum())(w)


def stream(make: Callable[[], tuple[Callable[..., Any], list[tuple[Any, ...]]]]) -> Program:
    """A random program, called with the arguments that come with it; it may raise for some of them, as eager does."""

    def program(compile: Compile) -> None:
        function, calls = make()
        compiled = compile(function)
        with torch.no_grad():
            for arguments in calls:
                try:
                    function(*arguments)
                except (RuntimeError, IndexError):
                    continue
                compiled(*arguments)

    return program


def two_matrices(seed: int) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    function, shapes, _ = size_program(seed)
    return function, [(r(shape), r(shape)) for shape in shapes]


def three_dimensions(seed: int) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    function, calls, _ = block_program(seed)
    dtype = torch.float64 if seed % 4 < 2 else torch.float32
    return function, [(r(shape, dtype=dtype), r(shape, dtype=dtype), number) for shape, number in calls]


PROGRAMS.update({f"sizes_{seed}": stream(lambda seed=seed: two_matrices(seed)) for seed in (3, 8, 21)})
PROGRAMS.update({f"size_blocks_{seed}": stream(lambda seed=seed: three_dimensions(seed)) for seed in (2, 7)})


AUTOGRAD_CHOSEN = (
    "autograd_grad_inside_create", "backward_inside", "ckpt_dropout", "custom_function", "custom_view",
    "double_backward", "grad_break_middle", "hook_intermediate", "inplace_nonleaf_input", "mutate_and_return_views",
    "replay_bn", "train_step_inside", "view_chain_symbolic", "weight_norm_",
)  # fmt: skip
PROGRAMS.update({f"autograd_{name}": AUTOGRAD[name] for name in AUTOGRAD_CHOSEN})

# --- models -----------------------------------------------------------------------------------------------------------


def models() -> dict[str, Program]:
    """The benchmarks' models: inference in two dtypes, a training step, and both over sizes that change."""
    from benchmarks import models, train_models

    def infers(build: Callable[[torch.dtype], Any], dtype: torch.dtype, dynamic: bool | None = None) -> Program:
        def program(compile: Compile) -> None:
            function, args, kwargs = build(dtype)
            with torch.no_grad():
                compile(function, dynamic=dynamic)(*args, **kwargs)

        return program

    def trains(build: Callable[[], Any], dynamic: bool | None = None) -> Program:
        def program(compile: Compile) -> None:
            module, kwargs = build()
            compile(module.train(), dynamic=dynamic)(**kwargs).backward()

        return program

    found: dict[str, Program] = {}
    for name, build in models.MODELS.items():
        found |= {f"model_{name}": infers(build, torch.float32), f"model_{name}_bfloat16": infers(build, BF16)}
        found[f"model_{name}_dynamic"] = infers(build, torch.float32, dynamic=True)
    for name, make in train_models.MODELS.items():
        found |= {f"train_{name}": trains(make), f"train_{name}_dynamic": trains(make, dynamic=True)}
    return found


QUICK_ONEDNN = (
    "convolutions", "convolutions_any_size", "encoder_layers_training", "products", "products_of_any_rows",
    "skinny_products", "products_training", "model_bert", "model_bert_dynamic", "model_resnet50", "train_bert",
    "train_resnet50",
)  # fmt: skip
"""Recorded a second time as on a processor where oneDNN's products are much quicker than those of eager's library."""
