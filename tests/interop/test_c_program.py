"""The C program: the bits of its twin in torch with every flag, the radii of the certificate, attacks inside them."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lipkit
from lipkit import interop, layers, modules
from lipkit.attacks import pgd
from lipkit.data import load
from lipkit.errors import CertificateViolation, OptionError, RunError
from lipkit.integer import c_source
from lipkit.interop import integer_program, write_c
from lipkit.modules.storage import float64_copy

COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
STRICT = ["-Wall", "-Wextra", "-Werror", "-pedantic"]
FLAGS = {
    "O0": ["-O0"],
    "O3": ["-O3", "-Wconversion", "-Wshadow"],
    "sanitize": ["-O1", "-fsanitize=undefined,address", "-fno-sanitize-recover=all"],
    "other": ["-O2", "-ftrapv", "-funsigned-char"],
}
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="expected gcc or clang, found neither")


def everything() -> modules.Network:
    """A small network that uses every function of the C file."""
    torch.manual_seed(0)
    parts = [
        modules.Affine(torch.tensor([0.7, -1.3]), torch.tensor([0.1, 0.2])),
        nn.Conv2d(2, 6, 3, padding=1, padding_mode="circular", groups=2),
        modules.GroupSort(3),
        layers.SllConv2d(6, 6, 3, padding=1, padding_mode="circular"),
        modules.HalfAbs(),
        nn.Conv2d(6, 8, 2, stride=2, bias=False),
        modules.MaxMin(),
        modules.Shift2d(8, 1),
        nn.Flatten(),
        nn.Linear(8 * 35, 16),
        nn.LeakyReLU(0.25),
        nn.Linear(16, 5),
    ]
    network = lipkit.export(nn.Sequential(*parts).eval(), (2, 10, 14))
    network.input_range = (-0.5, 1.0)
    return network


class Branching(nn.Module):
    """Values that are added, blended, put beside each other and compared, some of them read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.blend = layers.Residual(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blend(torch.relu(self.first(x)))
        left, right = y.chunk(2, 1)
        z = torch.cat((torch.maximum(left, right), x - left, 3 * right[:, :1]), 1)
        return z[:, :4] + y - self.first(self.second(y))


def branching() -> modules.Network:
    """A network with every join that an integer program can compute."""
    torch.manual_seed(2)
    network = lipkit.export(nn.Sequential(Branching(), nn.Flatten(), nn.Linear(4 * 35, 5)).eval(), (2, 5, 7))
    network.input_range = (-0.5, 1.0)
    return network


NETWORKS = {"everything": everything, "branching": branching, "digits": lambda: lipkit.load("digits-cayley")}


def images(network: modules.Network, count: int) -> Tensor:
    low, high = network.input_range or (0.0, 1.0)
    x = torch.rand(count, *network.input_shape, dtype=torch.float64)
    x[::3] = x[::3].round()
    return low + (high - low) * x


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> modules.Network:
    return NETWORKS[request.param]()


@pytest.fixture(scope="module")
def source(network: modules.Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_c(network, tmp_path_factory.mktemp("c") / "network.c")


@pytest.fixture(scope="module")
def expected(network: modules.Network) -> tuple[Tensor, Tensor, float, lipkit.certificates.Certificate]:
    """Quantised images, their logits in torch, the unit of those, and the certificate."""
    program, _ = integer_program(network)
    x = images(network, 60)
    logits = program.run(program.quantise(x))
    certificate = lipkit.certify(network, x, logits.argmax(1), evaluator="integer")
    return program.quantise(x), logits, 2.0**-program.fraction, certificate


@pytest.mark.thorough
@needs_compiler
@pytest.mark.usual(8 * max(len(COMPILERS), 1))
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("cc", COMPILERS)
def test_the_bits_are_the_same_with_every_compiler_and_the_radii_those_of_the_certificate(
    expected: tuple[Tensor, Tensor, float, lipkit.certificates.Certificate],
    source: Path,
    cc: str,
    flags: str,
    tmp_path: Path,
) -> None:
    q, logits, last, certificate = expected
    compiled = c_source.compile_c(source, tmp_path / "network", [*STRICT, *FLAGS[flags]], cc)
    answers = c_source.run_c(compiled, q)
    assert torch.equal(answers.logits, logits)
    assert torch.equal(answers.label, answers.logits.argmax(1))
    assert bool((certificate.radius > 0).any())
    assert bool((answers.radius <= certificate.radius).all())
    # Errors are rounded up to whole logits there, and radii to nine digits.
    unit = last / float(certificate.constant) * 4
    torch.testing.assert_close(answers.radius, certificate.radius, rtol=1e-6, atol=2e-9 + unit)


@pytest.mark.thorough
@needs_compiler
def test_ties_equal_rows_and_unmovable_margins(tmp_path: Path) -> None:
    network = modules.Network([nn.Linear(2, 3)], (2,))
    network.input_range = (0.0, 1.0)
    with torch.no_grad():
        network[0].weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]))
        network[0].bias.copy_(torch.tensor([0.0, 0.5, 0.5]))
    program, _ = integer_program(network)
    compiled = c_source.compile_c(write_c(network, tmp_path / "a.c"), tmp_path / "a")
    tie = c_source.run_c(compiled, program.quantise(torch.rand(4, 2)))
    assert tie.label.tolist() == [1] * 4
    assert tie.radius.tolist() == [0.0] * 4
    with torch.no_grad():
        network[0].bias.copy_(torch.tensor([0.0, 0.5, 0.25]))
    compiled = c_source.compile_c(write_c(network, tmp_path / "b.c"), tmp_path / "b")
    apart = c_source.run_c(compiled, program.quantise(torch.rand(4, 2)))
    assert apart.radius.tolist() == [torch.inf] * 4
    assert lipkit.certify(network, torch.rand(4, 2), torch.ones(4).long(), evaluator="integer").radius.isinf().all()


def test_a_box_wider_than_float16_is_written_and_checked(tmp_path: Path) -> None:
    network = modules.Network([nn.ReLU(), nn.Linear(2, 1, dtype=torch.float16)], (2,))
    network.input_range = (-1e30, 1.0)
    assert write_c(network, tmp_path / "a.c").exists()


@pytest.mark.thorough
@needs_compiler
def test_main_refuses_what_is_no_input(tmp_path: Path) -> None:
    network = branching()
    compiled = c_source.compile_c(write_c(network, tmp_path / "network.c"), tmp_path / "network", ["-O0"])
    low, high = integer_program(network)[0].ends
    n = len(integer_program(network)[0].quantise(images(network, 1))[0])
    for q, message in (
        (torch.full((1, n), high + 1), f"status 3: expected numbers from {low} to {high}"),
        (torch.full((1, n), low - 1), "status 3"),
        (torch.full((1, n - 1), high), f"status 4: expected whole inputs of {n} numbers"),
    ):
        with pytest.raises(RunError, match=message):
            c_source.run_c(compiled, q)
    assert len(c_source.run_c(compiled, torch.tensor([[low] * n, [high] * n])).label) == 2


@needs_compiler
@pytest.mark.skipif(not shutil.which("c++"), reason="expected c++, found none")
def test_the_header_serves_a_program_in_cpp(tmp_path: Path) -> None:
    network = modules.Network([nn.Linear(2, 3)], (2,))
    network.input_range = (0.0, 1.0)
    source = write_c(network, tmp_path / "network.c", prefix="net")
    (tmp_path / "main.cpp").write_text("""#include "network.h"
    int main() { int32_t x[2] = {1, 1}, y[3], work[NET_WORK]; return net_classify(x, y, work) < 0 || net_radius(y, 3); }
    """)
    for command in (
        ["cc", "-std=c99", *STRICT, "-c", source, "-o", tmp_path / "network.o"],
        ["c++", *STRICT, tmp_path / "main.cpp", tmp_path / "network.o", "-o", tmp_path / "main"],
        [tmp_path / "main"],
    ):
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_controller_of_any_number_of_outputs_stays_within_the_error_that_its_header_states(
    outputs: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    scales = layers.Rescale([-20.0, 0.5][:outputs], [3.0, 0.0][:outputs])
    net = nn.Sequential(layers.Normalize([1.0, 0.0], [0.5, 2.0]), lipkit.models.lbdn([2, 8, 8, outputs], 3.0), scales)
    for network in (lipkit.export(net, (2,)), lipkit.export(net[1], (2,))):  # behind the last dense layer, or at it
        network.input_range = (-1.0, 3.0)
        path = write_c(network, tmp_path / "network.c")
        compiled = c_source.compile_c(path, tmp_path / "network", [*STRICT, "-Wconversion"])
        stated, fraction = (
            int(re.findall(rf"{name} (\d+)", path.with_suffix(".h").read_text())[0])
            for name in ("LOGIT_ERROR", "LOGIT_FRACTION")
        )
        x = images(network, 2000)
        answers = c_source.run_c(compiled, integer_program(network)[0].quantise(x))
        found = (answers.logits - float64_copy(network)(x) * 2.0**fraction).abs().max()
        assert stated / 50 < found <= stated < 2.0**fraction * 1e-5
        y = torch.zeros(len(x), outputs)
        regression = lipkit.certificates.certify_regression(network, x, y, delta=0.0, evaluator="integer")
        assert stated - 1 < float(regression.rounding_error.max()) * 2**fraction <= stated
        assert outputs > 1 or answers.radius.isinf().all()


@pytest.mark.thorough
@needs_compiler
def test_pixels_become_the_nearest_numbers_and_no_label_has_no_radius(source: Path, tmp_path: Path) -> None:
    main = tmp_path / "main.c"
    main.write_text(
        f'#include <stdio.h>\n#include "{source}"\nint main(void) {{ int i; for (i = 0; i < 256; i++)'
        ' printf("%ld\\n", (long)lipkit_input(i, 255)); {\n'
        "    static int32_t logits[LIPKIT_CLASSES]; logits[0] = 1 << 20; if (lipkit_radius(logits, 0) > 0)\n"
        "    return lipkit_radius(logits, -1) || lipkit_radius(logits, LIPKIT_CLASSES); return 1; } }\n"
    )
    fraction = int(re.findall(r"INPUT_FRACTION (\d+)", source.with_suffix(".h").read_text())[0])
    subprocess.run([COMPILERS[0], "-std=c99", str(main), "-o", str(tmp_path / "main")], check=True)
    out = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True).stdout
    assert list(map(int, out.split())) == [(2 * i * 2**fraction + 255) // 510 for i in range(256)]


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("box", [(0, 0.9), (0, 0.001), (-1, -0.5), (0, 1e-12), (0, 255), (0, 2**31), (-1e12, 1e30)])
def test_pixels_above_the_box_become_numbers_above_it(box: tuple[float, float], tmp_path: Path) -> None:
    network = modules.Network([nn.Linear(1, 2)], (1,))
    network.input_range = box
    source, main = write_c(network, tmp_path / "network.c"), tmp_path / "main.c"
    main.write_text(
        f'#include <stdio.h>\n#include "{source}"\nint main(void) {{ int i; for (i = 0; i <= 10; i++)'
        ' printf("%ld %ld\\n", (long)lipkit_input(i, 10), (long)lipkit_input(INT32_MAX / 10 * i, INT32_MAX));'
        " return 0; }\n"
    )
    flags = ["-std=c99", *STRICT, "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    subprocess.run([COMPILERS[0], *flags, str(main), "-o", str(tmp_path / "main")], check=True)
    out = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True).stdout
    program, _ = integer_program(network)
    for i, row in enumerate(out.splitlines()):
        values = Fraction(i, 10), Fraction((2**31 - 1) // 10 * i, 2**31 - 1)
        for number, value in zip(map(int, row.split()), values, strict=True):
            exact = math.floor(value * 2**program.input_fraction + Fraction(1, 2))
            above = program.ends[1] + 1
            assert min(number, above) == min(exact, above)


@pytest.mark.thorough
@needs_compiler
def test_it_is_checked_like_any_runtime(tmp_path: Path) -> None:
    network = everything()
    path = write_c(network, tmp_path / "network.c")
    runtime = interop.c_runtime(path, network, tmp_path)
    x, y = images(network, 20), torch.arange(20) % 5
    check = interop.check_runtime(network, runtime, x, y, eps=(0.0, 0.01), batch_size=8)
    assert check.same == 20
    assert check.difference < 1e-6
    other = everything()
    with torch.no_grad():
        other[-1].bias[0] += 0.01
    with pytest.raises(CertificateViolation, match="outputs of the runtime within"):
        interop.check_runtime(other, runtime, x, y)


@pytest.mark.thorough
def test_without_a_compiler_torch_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = everything()
    path = write_c(network, tmp_path / "network.c")
    monkeypatch.setattr(c_source, "compiler", lambda: None)
    x = images(network, 3)
    assert torch.equal(interop.c_runtime(path, network, tmp_path)(x), integer_program(network)[0](x))
    with pytest.raises(OptionError, match="expected a C compiler called cc, gcc or clang, found none"):
        c_source.compile_c(path, tmp_path / "network")


@pytest.mark.thorough
def test_the_file_has_no_floating_point_and_needs_nothing(network: modules.Network, source: Path) -> None:
    text = source.read_text().split("#ifdef LIPKIT_MAIN")[0]
    assert not re.search(r"\b(float|double|malloc|math\.h|stdlib)\b", text)
    assert set(re.findall(r"#include (\S+)", text)) == {'"network.h"'}
    assert re.findall(r"#include (\S+)", source.with_suffix(".h").read_text()) == ["<stdint.h>"]
    assert max(map(len, text.splitlines())) < 509  # what every C compiler must read
    assert text == write_c(network, source.parent / "again" / "network.c").read_text().split("#ifdef LIPKIT_MAIN")[0]


@pytest.mark.thorough
def test_wrong_options_are_refused(tmp_path: Path) -> None:
    network = everything()
    with pytest.raises(OptionError, match=r"ends in .c, got 'network.h'"):
        write_c(network, tmp_path / "network.h")
    with pytest.raises(OptionError, match=r"letters, digits and -_. that ends in .c"):
        write_c(network, tmp_path / 'a"b.c')
    with pytest.raises(OptionError, match="prefix: expected a name of C, got '2b'"):
        write_c(network, tmp_path / "a.c", prefix="2b")
    vast = modules.Network([nn.Linear(2, 2, dtype=torch.float64)], (2,))
    vast.input_range = (0.0, 1.0)
    vast[0].weight.fill_(1e300)
    with pytest.raises(OptionError, match="outputs whose proved error is finite, got inf: the weights are too large"):
        write_c(vast, tmp_path / "a.c")
    nothing = modules.Network([nn.Identity()], (2,))
    nothing.input_range = (0.0, 1.0)
    with pytest.raises(OptionError, match="expected a network that computes something, got one that returns its input"):
        write_c(nothing, tmp_path / "a.c")
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 20), st.floats(-1, 1))
def test_the_radius_of_a_linear_network_is_the_distance_and_holds(seed: int, scale: float, bias: float) -> None:
    # The nearest input of the other class lies along the difference of the rows: just before it nothing changes,
    # just behind it everything does.
    torch.manual_seed(seed)
    network = modules.Network([nn.Linear(6, 2)], (6,))
    network.input_range = (-10.0, 10.0)
    with torch.no_grad():
        network[0].weight.mul_(scale)
        network[0].bias.copy_(torch.tensor([bias, 0.0]))
    program, _ = integer_program(network)
    x = 2 * torch.rand(1, 6, dtype=torch.float64) - 1
    label = int(program(x).argmax())
    certificate = lipkit.certify(network, x, torch.tensor([label]), evaluator="integer")
    rows = network[0].weight.double()
    apart = rows[label] - rows[1 - label]
    direction = -apart / apart.norm()
    radius = float(certificate.radius)
    own = float(program.own_error.sum()) if program.own_error is not None else torch.inf
    room = 3 * (own + 2 * program.body_error * float(apart.norm())) / float(apart.norm()) + 1e-9
    assert float(program(x + direction * radius * (1 - 1e-12)).diff()[0, 0]) * (1 if label else -1) > 0 or radius == 0
    if radius + room < 8:
        assert int(program(x + direction * (radius + room)).argmax()) != label


@pytest.mark.thorough
@needs_compiler
def test_the_radius_behind_an_average_is_below_the_distance(tmp_path: Path) -> None:
    network = modules.Network([nn.AvgPool2d((1, 5)), nn.Flatten(), nn.Linear(1, 2)], (1, 1, 5))
    network.input_range = (0.0, 1.0)
    with torch.no_grad():
        network[2].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        network[2].bias.copy_(torch.tensor([-0.4, 0.4]))
    program, _ = integer_program(network)
    compiled = c_source.compile_c(write_c(network, tmp_path / "network.c"), tmp_path / "network", ["-O0"])
    answers = c_source.run_c(compiled, program.quantise(torch.full((1, 1, 1, 5), 0.9375)))
    distance = (0.9375 - float(network[2].bias.detach()[1])) * 5**0.5
    assert distance - 1e-7 < float(answers.radius) < distance


@pytest.mark.thorough
@needs_compiler
def test_no_attack_inside_a_radius_changes_the_class(tmp_path: Path) -> None:
    network = lipkit.load("digits-cayley")
    x = load("digits").test.batch(torch.arange(30))[0].double()
    program, _ = integer_program(network)
    labels = program(x).argmax(1)
    radius = lipkit.certify(network, x, labels, evaluator="integer").radius
    assert bool((radius > 0).all())
    compiled = c_source.compile_c(write_c(network, tmp_path / "network.c"), tmp_path / "network", ["-O0"])
    exact = float64_copy(network)
    for box in ((0.0, 1.0), (-2.0, 3.0)):  # numbers outside of the box are clamped by the program
        found = pgd(exact, x, labels, eps=radius * (1 - 1e-9), steps=10, restarts=1, box=box, stop_early=False)
        assert torch.equal(c_source.run_c(compiled, program.quantise(found)).label, labels)
    # The same attack finds other classes not far outside: what was certified is no empty claim.
    found = pgd(exact, x, labels, eps=2.5 * radius, steps=10, restarts=1, box=(0.0, 1.0))
    assert int((c_source.run_c(compiled, program.quantise(found)).label != labels).sum()) >= 5
