"""Programs of Python that users write around tensors: inference mode, attention kernels, random numbers, the standard
library."""

import collections
import functools
import pickle
import random
import threading
import time
import warnings
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

PROGRAMS: dict = {}


def numbers():
    return (torch.arange(6.0).reshape(2, 3),)


def program(make=numbers, name=None):
    """A row: the function, and what makes its arguments."""

    def add(function):
        PROGRAMS[name or function.__name__] = (function, make)
        return function

    return add


def made():
    torch.manual_seed(0)
    return nn.Linear(3, 3)


@program(lambda: (made(), torch.ones(2, 3)))
def inference_view_of_parameter(m, x):
    with torch.inference_mode():
        return x @ m.weight.t() + m.weight[0]


@program()
def inference_view_of_input(x):
    with torch.inference_mode():
        y = x.view(3, 2)
        return (y + 1).sum(0), x[0] * 2, x.t() @ x


@program()
def inference_view_returned(x):
    with torch.inference_mode():
        y = x.view(3, 2)
    return y, y.is_inference(), x.is_inference()


@program()
def inference_inside_then_grad(x):
    with torch.inference_mode():
        y = x * 2
    return y + 1, y.is_inference()


@program()
@torch.inference_mode()
def inference_decorated(x):
    return x.t().relu() + 1


@program(lambda: (torch.zeros(2, 3),))
def inference_write_to_input(x):
    with torch.inference_mode():
        x[0].add_(1)
        x.mul_(3)
        return x.sum()


@program(lambda: (made(), torch.ones(2, 3)), "inference_around")
def inference_around(m, x):
    return x @ m.weight.t() + m.bias[0]


@program(lambda: (torch.ones(1, 2, 4, 8),))
def sdpa_kernel_math(q):
    with sdpa_kernel(SDPBackend.MATH):
        return nn.functional.scaled_dot_product_attention(q, q, q)


@program(lambda: (torch.ones(1, 2, 4, 8),))
def sdpa_kernel_list(q):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        y = nn.functional.scaled_dot_product_attention(q, q, q)
    return y + 1, torch.backends.cuda.flash_sdp_enabled()


@program(lambda: (torch.ones(1, 2, 4, 8),))
def sdpa_kernel_priority(q):
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return nn.functional.scaled_dot_product_attention(q, q, q)


@program()
def random_random(x):
    return x * random.random() + random.random()


@program()
def random_randint(x):
    return x + random.randint(0, 1000) + random.randrange(50)


@program()
def random_uniform(x):
    return x * random.uniform(2.0, 5.0)


@program()
def random_returned(x):
    return x + 1, random.random(), random.randint(1, 9)


@program()
def random_branch(x):
    if random.random() < 0.5:
        return x + 1
    return x - 1


@program()
def random_choice(x):
    return x * random.choice([1.5, 2.5, 3.5, 4.5])


@program(lambda: (torch.ones(2), random.Random(3)))
def random_instance(x, generator):
    return x * generator.random()


@program(lambda: (torch.ones(2), random.Random(3)))
def random_instance_ints(x, generator):
    return x * generator.randint(1, 6) + generator.gauss(0, 1), generator.randrange(5, 50, 5)


private = random.Random()


def with_private():
    private.seed(5)
    return (torch.ones(2),)


@program(with_private)
def random_instance_global(x):
    return x * private.uniform(1, 2) + private.randint(0, 100)


@program()
def random_distributions(x):
    return x * random.gauss(1, 2) + random.normalvariate(0.5, 1) + random.triangular(0, 3), random.lognormvariate(0, 1)


@program()
def random_as_slice(x):
    n = random.randint(2, 3)
    return x[:, :n] * 2 + 1, x.sum() * n


@program(lambda: (torch.ones(3, requires_grad=True),))
def random_int_trained(x):
    return (x * random.randint(2, 9)).sum()


@program()
def random_range_of_nothing(x):
    return x * random.randint(9, 2)


@program()
def np_random_rand(x):
    return x * np.random.rand()


@program()
def np_random_randint(x):
    return x + np.random.randint(0, 100)


@program()
def np_random_randn_array(x):
    return x + torch.from_numpy(np.random.randn(2, 3))


@functools.lru_cache(None)
def cached_tensor(n):
    return torch.arange(float(n))


@functools.lru_cache
def cached_of_tensor(x):
    return x * 2


class WithCache:
    @functools.lru_cache
    def of(self, n):
        return torch.full((n,), 2.0)


with_cache = WithCache()


@program()
def lru_cache_constant(x):
    return x + cached_tensor(3)


@program()
def lru_cache_of_tensor(x):
    return cached_of_tensor(x) + cached_of_tensor(x)


@program()
def lru_cache_method(x):
    return x + with_cache.of(3)


@program()
def lru_cache_inside(x):
    @functools.lru_cache
    def g(n):
        return x * n

    return g(2) + g(2) + g(3)


@program()
def namedtuple_inside(x):
    Point = collections.namedtuple("Point", "a b")
    p = Point(x, x + 1)
    return p.a * p.b + p[0]


@program()
def namedtuple_class_of_names(x):
    Point = collections.namedtuple("Point", ["a", "b"], defaults=(2,))
    p = Point(x)._replace(b=3)
    return p.a * p.b, p._fields, len(p)


@program()
def catch_warnings(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn("unseen")
        y = x * 2
    return y


@program()
def catch_warnings_record(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("seen")
    return x * len(seen)


@program()
def catch_warnings_read(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.warn("seen")
        return x * len(seen)


@program()
def warning_filtered(x):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="un")
        warnings.warn("unseen")
        warnings.warn("seen")
    return x + 1


@program()
def weakref_made(x):
    class Thing:
        pass

    thing = Thing()
    thing.x = x
    r = weakref.ref(thing)
    return r().x + 1, r() is thing


class Hashable:
    v = 4


weak_key = Hashable()
weak_reference = weakref.ref(weak_key)


@program()
def weakref_global(x):
    return x * weak_reference().v


@program()
def weak_value_dictionary(x):
    return x @ weak_dictionary["a"].weight


weak_module = made()
weak_dictionary = weakref.WeakValueDictionary({"a": weak_module})
weak_keyed = weakref.WeakKeyDictionary({weak_key: 3})


@program()
def weak_key_dictionary(x):
    return x * weak_keyed[weak_key]


@program(lambda: (made(),))
def weakref_of_argument(m):
    return weakref.ref(m)().weight * 2


local = threading.local()
local.scale = 3.0


class Local(threading.local):
    depth = 0


depth = Local()


@program()
def threading_local_read(x):
    return x * local.scale * getattr(local, "other", 2)


@program()
def threading_local_write(x):
    depth.depth += 1
    y = x * depth.depth
    depth.depth -= 1
    return y


lock = threading.Lock()


@program()
def thread_lock(x):
    with lock:
        return x + 1


table = {"a": 1.0, "b": 2.0}
keys, values, items = table.keys(), table.values(), table.items()


@program(lambda: (torch.ones(2), table.values()))
def dict_view_argument(x, view):
    for v in view:
        x = x + v
    return x, len(view)


@program()
def dict_views_global(x):
    for k, v in items:
        x = x + v
    return x, list(keys), "a" in keys, sum(values)


@program(lambda: (torch.ones(2), iter([1.0, 2.0, 3.0])))
def iterator_argument(x, it):
    x = x + next(it)
    for v in it:
        x = x * v
    return x


@program(lambda: (torch.ones(2), zip([1.0, 2.0], [3.0, 4.0])))
def zip_argument(x, it):
    for a, b in it:
        x = x * a + b
    return x


@program(lambda: (torch.ones(2), iter({"a": 1.0, "b": 2.0}.items())))
def dict_iterator_argument(x, it):
    for _, b in it:
        x = x + b
    return x


@program(lambda: (torch.ones(2), enumerate([1.0, 2.0])))
def enumerate_argument(x, it):
    for a, b in it:
        x = x * a + b
    return x


@program(lambda: (torch.ones(2), (v * 2 for v in (1.0, 2.0))))
def generator_argument(x, it):
    for v in it:
        x = x + v
    return x


names = {"one"}


@program(lambda: (torch.ones(2), {1, 2, 3}))
def text_of_set(x, s):
    return x + 1, f"{s} {names} {type(x)}"


@program()
def text_of_set_in_raise(x):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"no {set(names)}")
    return x, f"Not one of { ({'a'}) }", f"{frozenset({1})!r}"


@program()
def pickled(x):
    text = pickle.dumps({"a": [1, 2.0, "x"]})
    return x + len(text)


@program()
def unpickled(x):
    return x + pickle.loads(pickle.dumps({"a": [1, 2.0, "x"]}))["a"][0]


@program()
def time_time(x):
    start = time.time()
    y = x + 1
    elapsed = time.time() - start
    return y, 0 <= elapsed < 60


@program()
def time_perf_counter(x):
    start = time.perf_counter()
    y = x + 1
    return y, isinstance(time.perf_counter() - start, float)


@program()
def except_star(x):
    try:
        raise ExceptionGroup("g", [ValueError(1), TypeError(2)])
    except* ValueError as group:
        x = x + len(group.exceptions)
    except* TypeError:
        x = x * 3
    return x


optimized = torch.compile(made(), backend="eager")


@program()
def optimized_module(x):
    return optimized(x) + 1


@program(lambda: (nn.LazyLinear(4), torch.ones(2, 3)))
def lazy_module(m, x):
    with torch.no_grad():
        for p in m.parameters():
            pass
    return m(x).shape


class Lazies(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LazyLinear(4), nn.LazyBatchNorm1d()

    def forward(self, x):
        return self.b(self.a(x))


@program(lambda: (Lazies(), torch.arange(6.0).reshape(2, 3)))
def lazy_modules(m, x):
    torch.manual_seed(0)
    return m(x)


@program()
def a_tensor_where_no_iterable_is_meant(x):
    """Its rows could be iterated, but these keep it as it is."""
    made = dict.fromkeys("ab", x), collections.OrderedDict.fromkeys({"c": 1}, x)
    joined = functools.reduce(lambda a, b: (*a, b), [1, 2], (x,)), sum([x, x], x), max([], default=x), next(iter([]), x)
    kept = collections.deque([1])
    kept.append(x)
    return *made, {}.fromkeys([3], x), *joined, kept, {}.setdefault("a", x), getattr(3, "missing", x), x * 2


@program()
def elements_are_made_one_by_one(x):
    """What is done with an element is seen before the next one is made, and an error leaves the rest unmade."""
    seen = []

    def made(*values):
        for value in values:
            seen.append(("made", value))
            yield value

    def told(*values):
        seen.append(("told", *values))
        return values[-1]

    found = functools.reduce(told, made(1, 2, 3)), functools.reduce(told, made(4), 3), max(made(1, 3, 2), key=told)
    found += min(made(5, 4)), sum(made(1, 2), 3), any(made(0, 1, 2)), all(made(1, 0, 2)), max(made(), default=7)
    for fold in (sum, max, lambda values: functools.reduce(lambda a, b: a + b, values)):
        try:
            fold(made(1, "a", 2))
        except TypeError as error:
            seen.append(str(error))
    return x + 1, found, seen
