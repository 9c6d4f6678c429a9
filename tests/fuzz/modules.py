"""Random programs around modules: trees of them, training steps, functions of functions over parameters, with modules,
parameters, hooks, optimizers and inputs that change between calls.

Takes a seed; gives the text of a program for `session.examine`. What a program is made of is in the tables of
`module_layers.py`. Always holds: the same seed gives the same text, in which most steps do not raise.
"""

from __future__ import annotations

import random
import re

# By the first optimizer otherwise: a draft that is stopped there leaves half of it.
import torch._dynamo  # noqa: F401

from fusewright.base.records import dataclass, field
from tests.fuzz import module_layers as tables
from tests.fuzz.session import AUTOCAST, errors_of
from tests.fuzz.state import indent

MOST = 4  # parts of a module
IMAGES = {"o": 1, "i": 4, "e": 8}  # channels


def rows(text: str) -> list[str]:
    return [row.strip() for line in text.strip().splitlines() for row in line.split(" | ") if row.strip()]


def _layers() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in tables.LAYERS.strip().splitlines():
        kinds, _, constructors = line.partition(": ")
        for kind in kinds.split():
            found.setdefault(kind, []).extend(f"nn.{row}" for row in rows(constructors))
    return found


LAYERS = _layers()
PARTS: dict[str, list[tables.Part]] = {}
for _part in tables.PARTS:
    PARTS.setdefault(_part.kinds[0], []).append(_part)
BETWEEN, BETWEEN_IMAGES, RETURNS, CHANGES, AROUND, LOSSES, OPTIMIZERS, SCHEDULERS, OPTIMIZER_CHANGES, GRADIENTS, AFTER, FUNCTIONAL = (
    rows(getattr(tables, name))
    for name in "BETWEEN BETWEEN_IMAGES RETURNS CHANGES AROUND LOSSES OPTIMIZERS SCHEDULERS OPTIMIZER_CHANGES GRADIENTS AFTER FUNCTIONAL".split()
)
INPUTS = {kind: rows(text) for kind, text in tables.INPUTS.items()}
KINDS = "vvvvvssssttccpppwjiiioe"
SIZES = (0, 1, 1, 2, 2, 3, 3, 5)
SIDES = (1, 1, 2, 3, 4, 5, 6, 7, 8)  # of images
BACKENDS = ("eager", "native", "aot_eager")
HOW_OFTEN, HOW_OFTEN_OF_IMAGES = (5, 6, 2), (1, 6, 2)
SETTINGS = (("", 7), ("'dynamic': True", 2), ("'dynamic': False", 1), ("'options': {'checked': True}", 1))
NUMBERS = ("0", "0.5", "2.0", "-1", "True", "3", "1.0")
# What is compiled of a module: the statements that prepare it, and the call. `compiled(...)` compiles a part.
WAYS = (
    ("program = m", "program(x)"),
    ("program = m", "program(x)"),
    ("program = m", "program(x, flag=$V)"),
    ("def program(x): return m(x)", "program(x)"),
    ("def program(x, m): return m(x, 2.0)", "program(x, m)"),
    ("def program(*args, **kwargs): return m(*args, **kwargs)", "program(x, flag=$V)"),
    ("program = m.forward", "program(x)"),
    ("program = Net.forward", "program(m, x)"),
    ("program = lambda x: (m(x), m.training, [*m.state_dict()])", "program(x)"),
    ("def program(x): return m(x), other(x)", "program(x)"),
    ("def program(x): return [m(x) for _ in range(2)]", "program(x)"),
    ("program = nn.Sequential(m, nn.Identity())", "program(x)"),
    ("program = swa_utils.AveragedModel(m)", "program(x)"),
    ("program = functools.partial(m, flag=$V)", "program(x)"),
    ("table = {m: 2.0}\ndef program(x): return {one: (one(x), by) for one, by in table.items()}", "program(x)"),
    ("program = copy.deepcopy(m)", "program(x)"),
    ("def program(x):\n    with torch.autocast('cpu', torch.bfloat16): return m(x)", "program(x)"),
    ("def program(x):\n    with torch.no_grad(): return m(x)", "program(x)"),
    ("compiled_(m)", "m(x)"),
    ("compiled_($M)", "m(x)"),
    ("$M = compiled($M)", "m(x)"),
    ("Net.forward = compiled(Net.forward)", "m(x)"),
    ("m.forward = compiled(m.forward)", "m(x)"),
    ("run = compiled(m)", "run(x)"),
    ("run = compiled(copy.deepcopy(m))", "run(x)"),
    ("run = copy.deepcopy(compiled(m))", "run(x)"),
    ("run = nn.Sequential(compiled(m), nn.Identity())", "run(x)"),
    ("run = compiled(m); H.append(run.register_forward_hook(lambda k, a, r: LOG.append(k is m)))", "run(x)"),
    *((f"def program(x):\n{indent(body, 4)}", "program(x)") for body in tables.BODIES),
    ("program = torch.no_grad()(m)", "program(x)"),
    ("@torch.inference_mode()\ndef program(x): return m(x)", "program(x)"),
    ("program = torch.autocast('cpu', torch.bfloat16)(m.forward)", "program(x)"),
    ("program = torch.enable_grad()(lambda x: m(x))", "program(x)"),
    ("program = functools.lru_cache(1)(lambda flag: functools.partial(m, flag=flag))($V)", "program(x)"),
    ("class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n        object.__setattr__(self, 'held', m)\n    def forward(self, *a, **k): return self.held(*a, **k)\nrun = compiled(Model())", "run(x)"),
    ("run = nn.ModuleDict({'a': compiled(m), 'b': nn.Identity()})", "run['a'](x)"),
    ("run = compiled(m).eval()", "run(x)"),
    ("run = compiled(compiled(m))", "run(x)"),
)
# What a training step compiles: itself, or a part. $F: the forward, $S: the whole step.
TRAINING = (
    ("program = train", "program(x, y)"),
    ("program = train", "program(x, y)"),
    ("program = train", "program(x, y)"),
    ("program = forward", "train(x, y)"),
    ("run = compiled(m)", "train(x, y)"),
    ("forward = compiled(forward)", "train(x, y)"),
    ("forward = compiled(forward); update = compiled(update)", "train(x, y)"),
    ("update = compiled(update)", "train(x, y)"),
    ("gradients = compiled(gradients)", "train(x, y)"),
    ("opt.step = compiled(opt.step)", "train(x, y)"),
    ("criterion = compiled(criterion)", "train(x, y)"),
    ("compiled_(m)", "train(x, y)"),
    ("class Trainer:\n    def __init__(self): self.m, self.opt, self.count = m, opt, 0\n    def step(self, x, y):\n        self.count += 1\n        return train(x, y), self.count\ntrainer = Trainer(); program = trainer.step", "program(x, y)"),
)  # fmt: skip


@dataclass(slots=True)
class Draft:
    """A program that is being put together. parts: (the part's name, the row); kind: of the input; sides: of images, where
    all have the same."""

    rng: random.Random
    kind: str
    sides: tuple[int, int] | None = None
    parts: list[tuple[str, tables.Part]] = field(default_factory=list)
    only: tables.Part | None = None  # what the module begins with; all its changes are made, one after the other

    def fill(self, text: str, name: str = "", kind: str = "") -> str:
        rng = self.rng
        if not name and self.parts:
            name = rng.choice(self.parts)[0]
        text = re.sub(r"\$L", lambda _: self.layer(kind or "v"), text).replace("$C", str(IMAGES.get(kind, 4)))
        text = text.replace("$M", f"m.{name}").replace("$N", name)
        text = re.sub(r"\$V", lambda _: rng.choice(NUMBERS), text)
        return re.sub(r"\$k", lambda _: str(rng.randrange(6)), text)

    def layer(self, kind: str) -> str:
        made = self.rng.choice(LAYERS.get(kind) or LAYERS["v"])
        if self.rng.random() < 0.1:
            return f"Residual({made})"
        return self.rng.choice(("Scale()", "Counting()", "Lazily()")) if self.rng.random() < 0.05 else made

    def net(self, last: str | None) -> list[str]:
        """The class of the module; the kind of its result is `last`, if given."""
        rng, kind = self.rng, self.kind
        init, body = ["super().__init__()", "self.calls = 0"], ["hidden = []"]
        wanted = rng.randrange(1, MOST + 1) if self.only is None else 1
        end = last or ("v" if kind in IMAGES and rng.random() < 0.5 else None)
        for _ in range(12):
            possible = PARTS[kind]
            if len(self.parts) >= wanted:
                if end in (None, kind):
                    break
                possible = [part for part in possible if part.kinds[2] != kind]
            elif kind in IMAGES:
                possible = [part for part in possible if part.kinds[2] in IMAGES]
            name = f"l{len(self.parts)}"
            part = rng.choice(possible) if self.only is None or self.parts else self.only
            self.parts.append((name, part))
            init += self.fill(part.init, name, kind).split("\n")
            body += self.fill(part.call, name, kind).split("\n")
            kind = part.kinds[2]
            if kind in "vs" and rng.random() < 0.3:
                body.append(self.fill(rng.choice(BETWEEN)))
            while kind in IMAGES and rng.random() < 0.5:
                body.append(self.fill(rng.choice(BETWEEN_IMAGES), kind=kind))
        body.append(f"return {'x' if last else rng.choice(RETURNS)}")
        lines = ["class Net(nn.Module):", "    factor = 2.0", "    def __init__(self):", indent("\n".join(init), 8)]
        return [*lines, "    def forward(self, x, flag=None):", indent("\n".join(body), 8)]

    def change(self, training: bool) -> str:
        """A statement that changes something between calls."""
        rng = self.rng
        name, part = rng.choice(self.parts)
        draw = rng.random()
        if part.changes and draw < 0.45:
            return self.fill(rng.choice(part.changes), name, part.kinds[0])
        if training and draw < 0.65:
            return self.fill(rng.choice(OPTIMIZER_CHANGES))
        if draw < 0.75:
            return self.fill(rng.choice(tables.MODULE_HOOKS))
        return self.fill(rng.choice(CHANGES))

    def statement(self, training: bool, change: str = "") -> str:
        """A change, after which it goes on if it raises; `p` is a parameter."""
        change = self.fill(change, "l0", self.kind) if change else self.change(training)
        prefix = f"p = parameter(m, {self.rng.randrange(6)})\n" if re.search(r"\bp\b", change) else ""
        return f"with contextlib.suppress(Exception):\n{indent(prefix + _in_no_grad(change), 4)}"

    def inside(self) -> list[str]:
        """A program that changes things itself, around the calls of the module."""
        rng = self.rng
        body = [self.statement(False) for _ in range(rng.choice((0, 1, 1, 2)))] + ["r = m(x)"]
        for _ in range(rng.choice((0, 1, 1, 2))):
            body.append(rng.choice((self.statement(False), self.statement(False), "backward(r)", "r = m(x), r", "m.zero_grad()")))
            if rng.random() < 0.1:
                body[-1] = f"{rng.choice(AROUND)}:\n{indent(body[-1], 4)}"
        return [_step("program", [*body, "return r"]).replace("program()", "program(x)", 1)]

    def input(self, size: int, plain: bool) -> str:
        made = INPUTS[self.kind][0] if plain else self.rng.choice(INPUTS[self.kind])
        for name, side in zip(("$h", "$w"), self.sides or self.rng.choices(SIDES, k=2)):
            made = made.replace(name, str(side))
        return made.replace("$b", str(size)).replace("$s", str(self.rng.randrange(50)))


LARGEST, LARGEST_OF_HALVES = 1e4, 1e2  # numbers of a program, beyond which training diverges
SIMPLE = """
begin(state=True, modules=True)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(4, 4)
    def forward(self, x): return self.l0(x).tanh()
m = fixed(Net())
program = m
def step0():
    return program(made((2, 4), f32, $seed))
def step1():
    result = program(made((3, 4), f32, $seed, True))
    backward(result)
    return result
"""  # what there is if nothing that is drawn will do


def program(seed: int, only: tables.Part | None = None, kinds: str = KINDS) -> str:
    """The text; it is drawn again while it does not run, diverges, or more than half of its steps raise. only: the part
    that it is about; kinds: of its input, one of these."""
    for again in range(20):
        text = _drawn(random.Random(f"{seed} {again}"), only, kinds)
        errors = errors_of(text, largest=LARGEST_OF_HALVES if AUTOCAST.search(text) else LARGEST)
        if errors is not None and 2 * errors <= text.count("\ndef step"):
            return text
    return SIMPLE.replace("$seed", str(seed % 50)).lstrip()


def images(seed: int) -> str:
    return program(seed, kinds="iioe")


def _drawn(rng: random.Random, only: tables.Part | None, kinds: str = KINDS) -> str:
    kind = only.kinds[0] if only else rng.choice(kinds)
    backend = rng.choices(BACKENDS, HOW_OFTEN_OF_IMAGES if kind in IMAGES else HOW_OFTEN)[0]
    setting = rng.choices([text for text, _ in SETTINGS], [weight for _, weight in SETTINGS])[0]
    if "options" in setting and backend != "native":
        setting = ""
    sides = (rng.choice(SIDES), rng.choice(SIDES)) if rng.random() < 0.3 else None
    draft = Draft(rng, kind, sides, only=only)
    training = rng.random() < (0.3 if kind in IMAGES else 0.45)
    lines = [f"SETTINGS = {{'backend': '{backend}'{', ' + setting if setting else ''}}}", "begin(state=True, modules=True)"]
    lines += draft.net("v" if training else None)
    lines += ["m = fixed(Net())", "H, S, D, losses = [], [], [], []"]
    size = rng.choice(SIZES[3:])
    plain = rng.random() < (0.2 if kind in IMAGES else 0.5)
    if "Lazy" in "\n".join(lines) and (training or rng.random() < 0.6):
        lines.append(f"with torch.no_grad(): m({draft.input(size, True)})\nfixed(m)")
    if rng.random() < 0.3:
        lines.append(rng.choice(("m.eval()", "m.requires_grad_(False)", "m.to(torch.bfloat16)", "m.to(torch.float64)", "m.double()", "m.zero_grad()")))
    lines.append("other = copy.deepcopy(m)" if rng.random() < 0.5 else "other = m")
    if training:
        more, call = _training(draft)
    elif rng.random() < 0.3:
        more, call = draft.inside(), "program(x)"
    elif rng.random() < 0.2:
        lines.append("held = {n: q.detach() for n, q in m.named_parameters()}")
        more, call = [f"def program(x): return {draft.fill(rng.choice(FUNCTIONAL))}"], "program(x)"
    else:
        way, call = rng.choice(WAYS)
        more, call = [draft.fill(way)], draft.fill(call)
    lines += [*more, f"x = {draft.input(size, True)}", "p = parameter(m, 0) if [*m.parameters()] else None"]
    text = "\n".join([*lines, *_steps(draft, call, size, plain, training)]) + "\n"
    # In PyTorch's gradient of a group norm's weight the process dies where the input is channels_last and nobody asks for its.
    if re.search(r"inputs=|autograd\.grad\(|\bheld\b", text):
        text = re.sub(r"GroupNorm\((\d, \d)\)", r"GroupNorm(\1, affine=False)", text)
    given = (", grad=True",) if "GroupNorm" in text else ("", ", grad=True")
    return re.sub(r"\$g", lambda _: rng.choice(given), text)


def _training(draft: Draft) -> tuple[list[str], str]:
    """The functions of a training step, and what is compiled of them; its call."""
    rng = draft.rng
    optimizer = rng.choice(OPTIMIZERS)
    lines = ["ps = list(m.parameters())", f"opt = torch.optim.{optimizer}", "run = m"]
    if scheduled := rng.random() < 0.3:
        lines.append(f"sched = lr_scheduler.{rng.choice(SCHEDULERS)}")
    after = [draft.fill(rng.choice(AFTER)) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    if any("average" in one for one in after):
        lines.append(f"average = swa_utils.{rng.choice(rows(tables.AVERAGES))}")
    if any("ema" in one for one in after):
        lines.append("ema = {n: q.detach().clone() for n, q in m.named_parameters()}")
    lines.append(f"def criterion(o, y): return {rng.choice(LOSSES)}")
    forward, scale = ["loss = criterion(first(run(x)), y)", "return loss"], rng.random()
    if scale < 0.2 and "LBFGS" not in optimizer:  # how often it asks jumps with a rounding
        forward = ["with torch.autocast('cpu', torch.bfloat16):", "    o = first(run(x))", "return criterion(o.float(), y)"]
    lines += ["def forward(x, y):", indent("\n".join(forward), 4)]
    backward = rng.choice(("loss.backward()", "loss.backward()", "(loss * 8.0).backward()", "loss.backward(torch.full_like(loss, 0.5))", "torch.autograd.backward(loss, inputs=[q for q in ps if q.requires_grad])",
        "for q, g in zip(ps, torch.autograd.grad(loss, ps, allow_unused=True)): q.grad = g", "scaler.scale(loss).backward()"))  # fmt: skip
    scaled = "scaler" in backward
    clip = [rng.choice(GRADIENTS)] if rng.random() < 0.4 else []
    unscale = "for q in ps: q.grad is not None and q.grad.div_(8.0)" if "8.0" in backward else "scaler.unscale_(opt)" if scaled and clip else ""
    if scaled:
        lines.append("scaler = torch.amp.GradScaler('cpu', init_scale=8.0, growth_interval=2)")
    zero = rng.choice(("opt.zero_grad()", "opt.zero_grad()", "opt.zero_grad(set_to_none=False)", "m.zero_grad()", "pass", "for q in ps: q.grad = None"))
    lines += ["def gradients(loss):", indent("\n".join(filter(None, [backward, unscale, *clip])), 4)]
    closure = "LBFGS" in optimizer or rng.random() < 0.1
    step = "scaler.step(opt); scaler.update()" if scaled else "opt.step()"
    lines += ["def update():", indent("\n".join([step]), 4)]
    if closure:
        inner = ["def closure():", f"    {zero}", "    loss = forward(x, y)", "    loss.backward()", "    return loss"]
        body = [*inner, "loss = opt.step(closure)"]
    elif rng.random() < 0.2:  # gradients of several batches are added up
        body = [zero, "for one in (x, x * 0.5 if x.is_floating_point() else x):", "    loss = forward(one, y) / 2", "    gradients(loss)", "update()"]
    else:
        body = [zero, "loss = forward(x, y)", "gradients(loss)", "update()"]
        if rng.random() < 0.3:
            body = [*body[1:], body[0]]
    if scheduled:
        body.append("sched.step(loss.detach())" if "Plateau" in lines[3] else "sched.step()")
    if after:
        body += ["with torch.no_grad():", indent("\n".join(after), 4)]
    body.append(rng.choice(("return loss", "return loss.detach()", "return {'loss': loss, 'lr': opt.param_groups[0]['lr']}", "pass")))
    lines += ["def train(x, y):", indent("\n".join(body), 4)]
    way, call = rng.choice(TRAINING)
    return [*lines, draft.fill(way)], draft.fill(call)


def _steps(draft: Draft, call: str, size: int, plain: bool, training: bool) -> list[str]:
    rng, steps = draft.rng, []
    made: list[str] = []
    grads, changing = (rng.random() < chance for chance in ((0.8, 0.4) if draft.kind in IMAGES else (0.6, 0.75)))
    all_of = draft.only.changes if draft.only else ()
    wanted = [draft.statement(training, change) for change in rng.sample(all_of, len(all_of))]
    often = (2, 3, 4) if draft.kind in IMAGES else (3, 4, 5, 6)  # each size of an image may be compiled anew
    for number in range(1 + len(wanted) if wanted else rng.choice(often)):
        lines: list[str] = []
        for _ in range(rng.choice((1, 1, 2)) if number and (changing or wanted) else 0):
            change = rng.choice(made) if made and rng.random() < 0.2 else draft.statement(training)
            change = wanted.pop() if wanted else change
            made.append(change)
            lines.append(change)
        if number and rng.random() < 0.4:
            size = rng.choice(SIZES)
        if not number or rng.random() < 0.6:
            lines.append(f"x = {draft.input(size, plain or (training and draft.kind not in IMAGES))}")
        if training:
            lines += ["y = torch.arange(x.shape[0]) % 4", f"return {call}"]
        elif grads and rng.random() < 0.8:
            around = f"{rng.choice(AROUND)}: " if rng.random() < 0.2 else ""
            lines += [f"{around}result = {call}", "backward(result)", "return result"]
        else:
            around = f"{rng.choice(AROUND)}: " if rng.random() < 0.3 else ""
            lines.append(f"{around}return {call}")
        steps.append(_step(f"step{number}", lines))
    return steps


def _in_no_grad(change: str) -> str:
    """Writes to leaves need it."""
    return f"with torch.no_grad(): {change}" if re.search(r"\w_\(", change) and "\n" not in change and not re.search(r"hook|requires_grad_|lambda", change) else change


NAMES = ("x", "y", "m", "p", "o", "n", "q", "opt", "other", "run")


def _step(name: str, lines: list[str]) -> str:
    """A function whose assignments are the world's."""
    text = "\n".join(lines)
    bound = [one for one in NAMES if re.search(rf"(?:^|[;:]|, | )\s*{one}(?:, \w+)* = ", text, re.MULTILINE)]
    first = [f"global {', '.join(bound)}"] if bound else []
    return f"def {name}():\n" + indent("\n".join([*first, text]), 4)
