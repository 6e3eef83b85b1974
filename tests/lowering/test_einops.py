"""Forward passes that are written with einops: what is exported computes the same, for every size of the batch."""

from collections.abc import Callable

import pytest
import torch
from einops import einsum, pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import EinMix, Rearrange, Reduce
from torch import Tensor, nn

from lipkit.errors import NoRuleError
from lipkit.lowering import export, lipschitz


class Own(nn.Module):
    """A dense layer of 6 channels, then a function of it."""

    def __init__(self, function: Callable[["Own", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.token, self.function = nn.Linear(6, 6), nn.Parameter(torch.randn(1, 1, 6)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def with_token(net: Own, x: Tensor) -> Tensor:
    tokens = repeat(net.token, "1 1 d -> b 1 d", b=x.shape[0])
    packed, sizes = pack([tokens, x], "b * d")
    first, rest = unpack(net.linear(packed), sizes, "b * d")
    return rearrange(first, "b 1 d -> b d") + reduce(rest, "b n d -> b d", "mean")


FUNCTIONS: dict[str, Callable[[Own, Tensor], Tensor]] = {
    "split": lambda net, x: rearrange(x, "b n (h d) -> b h n d", h=2),
    "batch and heads": lambda net, x: rearrange(
        net.linear(rearrange(x, "b (n two) d -> (b two) n d", two=2)), "(b two) n d -> b (n two) d", two=2
    ),
    "batch by its name": lambda net, x: rearrange(
        rearrange(x, "b n d -> (b n) d"), "(b n) d -> b (n d)", b=x.shape[0], n=4
    ),
    "ellipsis": lambda net, x: rearrange(x, "b ... (h d) -> b h ... d", h=3),
    "token": with_token,
    "largest": lambda net, x: reduce(x, "b (n two) d -> b n d", "max", two=2),
    "sum and axes of one": lambda net, x: x - reduce(x, "b n d -> b 1 d", "sum"),
    "repeated": lambda net, x: repeat(x, "b n d -> b (n two) d", two=2),
    "product": lambda net, x: einsum(x, net.linear.weight, "b n d, e d -> b e n"),
    "list": lambda net, x: rearrange([x, 2 * x], "two b n d -> b n (two d)"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_einops_are_exported(name: str) -> None:
    network, x = Own(FUNCTIONS[name]).eval(), torch.randn(5, 4, 6)
    exported = export(network, (4, 6))
    with torch.no_grad():
        for batch in (1, 2, 5):
            torch.testing.assert_close(exported(x[:batch]), network(x[:batch]))
        jacobian = torch.autograd.functional.jacobian(lambda v: network(v[None]).flatten(), x[0]).flatten(1)
    assert torch.linalg.matrix_norm(jacobian.double(), 2) <= float(lipschitz(exported)) * (1 + 1e-6)


def test_layers_of_einops_are_exported_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2),
        nn.Linear(12, 8),
        EinMix("b n c -> b m c", weight_shape="n m", bias_shape="m", n=4, m=3),
        nn.Dropout(),
        Reduce("b m (g c) -> b m c", "mean", g=2),
    ).eval()
    x = torch.randn(3, 3, 4, 4)
    exported = export(network, (3, 4, 4))  # a copy of a layer of einops is in training mode
    with torch.no_grad():
        torch.testing.assert_close(exported(x), network(x))
    with pytest.raises(NoRuleError, match="training mode"):
        export(network.train(), (3, 4, 4))


def test_layers_of_einops_merge_samples_for_the_layers_between() -> None:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    network = nn.Sequential(
        Rearrange("b t c h w -> (b t) c h w"), middle, Rearrange("(b t) c h w -> b (t c h w)", t=3), nn.Linear(48, 2)
    ).eval()
    x = torch.randn(5, 3, 2, 4, 4)
    exported = export(network, (3, 2, 4, 4))
    with torch.no_grad():
        torch.testing.assert_close(exported(x), network(x))
    jacobian = torch.autograd.functional.jacobian(lambda v: network(v[None])[0], x[0]).flatten(1)
    slope = float(torch.linalg.matrix_norm(jacobian.double(), 2))
    for bound in (lipschitz(exported), lipschitz(network, (3, 2, 4, 4))):
        assert slope * (1 - 1e-6) <= float(bound.detach()) <= 20 * slope


MIXED: dict[str, Callable[[Own, Tensor], Tensor]] = {
    "batch last": lambda net, x: rearrange(x, "b n d -> n d b"),
    "mean over the batch": lambda net, x: x - reduce(x, "b n d -> 1 n d", "mean"),
    "halves of the batch": lambda net, x: rearrange(torch.cat((x, x)), "(b two) n d -> b (two n) d", two=2),
}


@pytest.mark.parametrize("name", MIXED)
def test_patterns_that_mix_samples_are_refused(name: str) -> None:
    with pytest.raises(NoRuleError):
        export(Own(MIXED[name]).eval(), (4, 6))


def test_sizes_that_do_not_fit_are_refused_as_einops_does() -> None:
    fits = Own(lambda net, x: rearrange(x, "b n (h d) -> b h n d", h=4))
    with pytest.raises(Exception, match=r"pattern \"b n \(h d\)"):
        export(fits.eval(), (4, 6))
