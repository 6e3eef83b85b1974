"""The textbook layers compute what lipkit's do: from the same parameters, or from the same matrices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from benchmarks.speed import checks, textbook
from benchmarks.speed.shapes import Shape
from benchmarks.speed.work import accepts, contenders, conv, forward_pass, make, tensors, train_step
from torch import nn

from lipkit.errors import RunError
from lipkit.layers.families import FAMILIES, get
from lipkit.lowering import export
from lipkit.testing.reference import dense_matrix

SIZES = [(4, 4, 3, 1, 7), (3, 6, 3, 1, 6), (6, 3, 3, 1, 5), (2, 6, 1, 2, 8), (4, 5, 2, 1, 6)]


@pytest.mark.parametrize(("cin", "cout", "kernel", "stride", "side"), SIZES)
@pytest.mark.parametrize("family", ["cayley", "sandwich"])
def test_the_same_function_as_lipkit_with_the_same_parameters(family, cin, cout, kernel, stride, side):
    torch.manual_seed(0)
    layer = get(family).conv(cin, cout, kernel, stride=stride, dtype=torch.float64)
    book = textbook.build(family, cin, cout, kernel, stride).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    book.load_state_dict(layer.state_dict())
    x = torch.randn(2, cin, side, side, dtype=torch.float64, requires_grad=True)
    y, expected = book(x), layer(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    weight = torch.randn_like(y)
    got, wanted = (torch.autograd.grad((out * weight).sum(), x)[0] for out in (y, expected))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def test_soc_is_the_exponential_of_the_same_skew_kernel():
    torch.manual_seed(0)
    book = textbook.Soc(3, 4, 3).double().eval()
    kernel = textbook.skew_kernel(book.free.detach())
    norms = [np.linalg.norm(m.numpy(), 2) for m in textbook.four_reshapings(kernel)]
    estimates = [float(norm(m)) for norm, m in zip(book.norms, textbook.four_reshapings(kernel), strict=True)]
    assert np.all(np.array(estimates) <= np.array(norms) * (1 + 1e-6))
    np.testing.assert_allclose(estimates, norms, rtol=0.02)
    matrix = dense_matrix(book, (3, 6, 6))
    np.testing.assert_allclose(np.linalg.svd(matrix, compute_uv=False), 1, atol=1e-7)
    scaled = kernel / (3 * min(estimates))
    square = dense_matrix(lambda x: torch.nn.functional.conv2d(
        torch.nn.functional.pad(x, (1, 1, 1, 1), mode="circular"), scaled), (4, 6, 6))  # fmt: skip
    np.testing.assert_allclose(square, -square.T, atol=1e-14)
    exact = torch.linalg.matrix_exp(torch.from_numpy(square)).numpy()
    np.testing.assert_allclose(matrix, exact[:, : 3 * 36], atol=1e-8)


def test_eco_has_the_same_kernel_from_the_same_matrices():
    torch.manual_seed(0)
    layer = get("eco").conv(4, 4, 3, dtype=torch.float64, orthogonalize="exponential")
    symbol = layer.symbol()
    matrices = torch.cat((symbol.real, symbol.pair[:, 0]))
    torch.testing.assert_close(textbook.eco_kernel(matrices, 3), layer.kernel(), rtol=0, atol=1e-14)
    book = textbook.Eco(4, 4, 3).double().eval()
    np.testing.assert_allclose(np.linalg.svd(dense_matrix(book, (4, 6, 9)), compute_uv=False), 1, atol=1e-6)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    stored = textbook.evaluated(book, 6).double()
    torch.testing.assert_close(stored(x), book(x), rtol=0, atol=1e-6)  # the stored kernel is float32


def test_frequency_matrices_are_those_of_the_convolution():
    torch.manual_seed(0)
    kernel = torch.randn(3, 2, 3, 3, dtype=torch.float64)
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    y = textbook.from_fourier(textbook.fourier_weight(kernel, 5, 6) @ textbook.to_fourier(x), 5, 6)
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), mode="circular")
    torch.testing.assert_close(y, torch.nn.functional.conv2d(padded, kernel), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(textbook.LAYERS))
def test_textbook_layers_pass_their_gate(name):
    assert checks.check_textbook(name) <= checks.TOLERANCE


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_layers_pass_their_gate(name):
    assert checks.check_small(get(name)) <= checks.TOLERANCE


def test_a_layer_that_is_not_orthogonal_is_not_timed():
    with pytest.raises(RunError, match=r"^aol: expected singular values of the layer within 1e-05 in float32, got"):
        checks.check_small(dataclasses.replace(get("aol"), claim="orthogonal"))


def test_a_layer_that_expands_is_not_timed():
    def twice(*sizes, **named):
        layer = nn.Conv2d(*sizes, padding="same", padding_mode="circular", **named)
        nn.init.dirac_(layer.weight)
        return layer.requires_grad_(False)

    assert checks.check_small(dataclasses.replace(get("aol"), conv=twice)) < 1e-6  # the identity

    def expanding(*sizes, **named):
        layer = twice(*sizes, **named)
        layer.weight.mul_(1.001)
        return layer

    with pytest.raises(RunError, match=r"distances of outputs over those of inputs within 1e-05.*error of 1.00e-03"):
        checks.check_small(dataclasses.replace(get("aol"), conv=expanding))


def test_a_wrong_export_is_not_timed():
    family, shape = get("cayley"), Shape(4, 4, 6)
    layer, other = make(family, shape), make(family, shape)
    x, _ = tensors(shape, 2, "cpu")
    assert checks.check_timed(family, shape, layer, export(layer, shape.input_shape), x) <= checks.TOLERANCE
    assert layer.training
    with pytest.raises(RunError, match="cayley 4@6: expected outputs of the export"):
        checks.check_timed(family, shape, layer, export(other, shape.input_shape), x)


def test_a_training_step_reaches_every_parameter_and_the_input():
    torch.manual_seed(0)
    shape = Shape(3, 4, 6)
    layer = conv(shape)
    x, gradient = tensors(shape, 2, "cpu")
    step = train_step(layer, x, gradient)
    step()
    once = [p.grad.clone() for p in layer.parameters()]
    step()
    assert all(torch.equal(a, p.grad) for a, p in zip(once, layer.parameters(), strict=True))  # not accumulated
    assert x.grad is None  # the caller's tensor is left alone
    assert torch.equal(forward_pass(layer, x)(), layer(x))


@pytest.mark.thorough
def test_contenders_of_a_shape():
    families = [get(name) for name in ("cayley", "eco", "rko", "sandwich")]
    found = contenders(families, Shape(4, 4, 6), 2, "train", makers=("lipkit", "textbook"))
    assert list(found) == [
        "conv", "zero", "conv channels last", "cayley:lipkit", "cayley:textbook", "eco:lipkit", "eco:channels last",
        "eco:textbook", "rko:lipkit", "sandwich:lipkit", "sandwich:textbook",
    ]  # fmt: skip
    for run in found.values():
        run()
    assert not accepts(get("eco"), Shape(4, 4, 8))
    assert list(contenders(families, Shape(4, 6, 4, 2), 2, "forward", makers=("lipkit",))) == [
        "conv", "zero", "conv channels last", "cayley:lipkit", "eco:lipkit", "eco:channels last", "rko:lipkit",
        "sandwich:lipkit",
    ]  # fmt: skip


def test_other_libraries_that_fail_are_named(monkeypatch):
    from benchmarks.speed import others

    monkeypatch.setattr(others, "installed", lambda: {"orthogonium": "0"})
    monkeypatch.setitem(others.LAYERS, ("orthogonium", "cayley"), ("lipkit.no_such_module", "Cayley"))
    absent: dict[str, str] = {}
    found = contenders([get("cayley")], Shape(4, 4, 6), 2, "train", makers=("orthogonium",), absent=absent)
    assert list(found) == ["conv", "zero"]
    assert "ModuleNotFoundError" in absent["cayley:orthogonium"]
