"""torch.distributions inside compiled functions: no break, eager's values. They use subclasses of property, lazily made attributes and
constraints that are objects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions as D, nn

import fusewright

DISTRIBUTIONS: dict[str, Callable[[Tensor], D.Distribution]] = {
    "categorical": lambda x: D.Categorical(logits=x),
    "bernoulli": lambda x: D.Bernoulli(logits=x),
    "beta": lambda x: D.Beta(x.exp(), x.square() + 1),
    "normal": lambda x: D.Normal(x, x.exp()),
    "independent": lambda x: D.Independent(D.Laplace(x, x.exp()), 1),
    "mixture": lambda x: D.MixtureSameFamily(D.Categorical(logits=x), D.Normal(x, x.exp())),
    "transformed": lambda x: D.TransformedDistribution(D.Normal(x, x.exp()), [D.SigmoidTransform()]),
}
VALUES = {"categorical": torch.tensor([0, 2, 1, 1]), "bernoulli": torch.ones(4, 3), "mixture": torch.full((4,), 0.3)}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_density_and_its_gradient_equal_eager(name: str) -> None:
    value = VALUES.get(name, torch.full((4, 3), 0.3))

    def density(x: Tensor) -> Tensor:
        return DISTRIBUTIONS[name](x).log_prob(value)

    x = torch.randn(4, 3, requires_grad=True)
    got, expected = fusewright.compile(density, fullgraph=True)(x), density(x)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_a_policy_gradient_is_one_graph() -> None:
    net = nn.Linear(4, 3)

    def loss(observations: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        policy = D.Categorical(logits=net(observations))
        return -(policy.log_prob(actions) * returns).mean() - 0.01 * policy.entropy().mean()

    inputs = torch.randn(8, 4), torch.randint(0, 3, (8,)), torch.randn(8)
    torch.testing.assert_close(fusewright.compile(loss, fullgraph=True)(*inputs), loss(*inputs))


def test_a_value_outside_of_the_support_raises_eagers_error() -> None:
    def density(x: Tensor) -> Tensor:
        return D.Beta(torch.ones(3), torch.ones(3), validate_args=True).log_prob(
            x
        )  # importing torch._dynamo turns it off

    with pytest.raises(ValueError, match="within the support"):
        density(torch.full((3,), 2.0))
    with pytest.raises(ValueError, match="within the support"):
        fusewright.compile(density)(torch.full((3,), 2.0))
    compiled = fusewright.compile(density)
    compiled(torch.full((3,), 0.5))
    with pytest.raises(ValueError, match="within the support"):
        compiled(torch.full((3,), 2.0))


class Doubled(property):
    """A descriptor of a user's own that leaves `__get__` as it is."""

    factor = 2


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    @Doubled
    def value(self) -> Tensor:
        return self.x * type(self).value.factor  # type: ignore[attr-defined]


def test_a_subclass_of_property() -> None:
    x = torch.randn(3)
    torch.testing.assert_close(fusewright.compile(lambda x: Holder(x).value, fullgraph=True)(x), 2 * x)
