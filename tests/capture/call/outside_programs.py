"""Programs that ask the world around them: draws that decide what happens, iterators from outside, weak references,
clocks."""

import logging
import pathlib
import random
import threading
import time
import warnings
import weakref

import numpy as np
import torch

from tests.capture.call.python_programs import made, program


@program(lambda: (torch.ones(2), torch.nn.ReLU(), torch.nn.Tanh()))
def random_choice_of_modules(x, a, b):
    chosen = random.choice([a, b])
    return chosen(x - 0.5) * random.random(), random.random()


@program()
def random_shuffle(x):
    order = [1.0, 2.0, 3.0]
    random.shuffle(order)
    return x * order[0] + order[1] - order[2], order


@program()
def random_layers_dropped(x):
    for _ in range(3):
        if random.random() > 0.4:
            x = x * 2 + random.uniform(0, 1)
    return x


@program()
def random_many_ways(x):
    for _ in range(6):
        if random.random() > 0.4:
            x = x * 2
    return x


@program(lambda: (torch.ones(2), random.Random(4)))
def random_instance_branch(x, generator):
    if generator.random() > 0.5 or random.random() > 0.5:
        return x * generator.choice([3, 5])
    return x - np.random.rand() * (2 if np.random.rand() < 0.3 else 1)


@program()
def random_empty_choice(x):
    return x * random.choice([])


@program()
def np_random_permutation(x):
    return x[:, torch.from_numpy(np.random.permutation(3))]


class Held:
    pass


@program()
def weakref_returned(x):
    thing, other = Held(), Held()
    thing.x = x + 1
    r = weakref.ref(thing)
    return thing, r, r().x * 2, weakref.ref(other)


@program()
def weakref_to_what_is_dropped(x):
    thing = Held()
    r = weakref.ref(thing)
    del thing
    return x + (1 if r() is None else 2)


def owner_and_child(x):
    parent, child = Held(), Held()
    parent.children, parent.scale = [child], x * 2
    child.parent = weakref.ref(parent)
    return parent


@program()
def weakref_to_parent(x):
    parent = owner_and_child(x)
    return parent.children[0].parent().scale + 1


@program(lambda: (torch.ones(2), enumerate(zip([1.0, 2.0], iter({"a": 3.0, "b": 4.0, "c": 5.0}.values())), 2)))
def iterators_in_iterators(x, it):
    for i, (a, b) in it:
        x = x * a + b * i
    return x, next(it, None)


@program(lambda: (torch.ones(2), iter([torch.ones(2), torch.zeros(2), 3])))
def iterator_of_tensors(x, it):
    return x + next(it) * 2 - next(it)


@program(lambda: (lambda it: (torch.ones(2), zip(it, it)))(iter(range(5))))
def iterator_of_pairs(x, it):
    return [x + a * b for a, b in it], list(it)


@program(lambda: (torch.ones(2), reversed([1.0, 2.0]), iter("ab"), iter((7, 8))))
def iterators_gathered(x, r, s, t):
    return x + sum(r), "".join(s), next(t), tuple(t), next(t, "none")


position = iter(range(1, 100))


@program()
def iterator_advanced_by_each_call(x):
    return x + next(position)


@program(lambda: (lambda held: (torch.ones(2), held, iter(held)))([1.0, 2.0]))
def iterator_over_a_list_that_grows(x, held, it):
    held.append(3.0)
    for v in it:
        x = x * v
    return x


@program(lambda: (torch.ones(2), map(abs, [-1.0, -2.0])))
def map_argument(x, it):
    for v in it:
        x = x + v
    return x


@program(lambda: (torch.ones(200, 200),))
def time_elapsed(x):
    first = time.monotonic()
    start = time.perf_counter()
    y = x @ x
    elapsed = time.perf_counter() - start
    return y, type(elapsed), type(first + 1)


@program(lambda: (made(), torch.ones(2, 3)))
def time_of_training(m, x):
    start = time.time()
    loss = m(x).sum()
    took = time.time() - start
    return loss, [type(took)]


@program()
def warnings_recorded_and_returned(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="un")
        warnings.warn("unseen")
        warnings.warn("seen", DeprecationWarning)
    return x * len(seen), [(str(one.message), one.category.__name__) for one in seen], seen


@program()
def warnings_as_errors(x):
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("error")
        try:
            warnings.warn("raised")
        except UserWarning as error:
            return x + len(str(error))


@program()
def warnings_recorded_once(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("once")
        warnings.warn("once")
    return x * len(seen)


@program()
def logger_inside(x):
    logging.getLogger("programs").debug("not shown %s", 3)
    return x + 1, logging.getLogger("programs").name


@program()
def threading_local_made(x):
    made_here = threading.local()
    made_here.x = x
    return made_here.x + 1, hasattr(made_here, "y")


@program()
def path_made(x):
    return x + 1, str(pathlib.Path("a") / "b.py"), pathlib.PurePosixPath("a/b.py").suffix


@program(lambda: (torch.ones(2, 3, 4),))
def warning_of_pytorch_recorded(x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        y = torch.nn.functional.mse_loss(x, x[:1])
    return y, len(seen)
