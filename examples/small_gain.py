"""A feedback loop that cannot become unstable: a nonlinear plant, an R2DN as controller, and the small-gain theorem.

    python examples/small_gain.py [--steps 40]

The plant is a mass on a spring that softens. An LMI proves its gain g from force to position, for every spring force
whose nonlinear part has a slope in [0, 1]. The controller is trained to damp disturbances, and its gain k stays below
0.9 / g, whatever training does. Both gains are proved from the stored numbers, and their product is below 1. So the
position y satisfies, for every disturbance d over any time,

    |y| <= g / (1 - g k) |d|.

If a gain is not proved, or the product is 1 or more, the program stops with an error and closes no loop.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lipkit
from lipkit.bounds.dissipation import System, least_gain
from lipkit.layers import R2dn
from lipkit.layers.recurrent import Parts
from lipkit.modules import Network, Recurrent

DT, STIFFNESS, SOFT, DAMPING = 0.1, 1.0, 0.5, 0.5
FRACTION = 0.9  # of the largest gain that the small-gain theorem allows
STATES = 4  # of the controller


def plant() -> Network:
    """x+ = x + DT v+, v+ = v + DT (u - STIFFNESS x - SOFT tanh x - DAMPING v), y = x, with the proof of its gain."""
    force = torch.tensor([-SOFT, -STIFFNESS, -DAMPING, 1.0], dtype=torch.float64)  # of tanh x, x, v and u
    speed = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64) + DT * force
    place = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    matrix = torch.stack((place, place + DT * speed, speed, place))
    found = least_gain(System(matrix, 2, (1, 1), 1))
    bias = torch.zeros(4, dtype=torch.float64)
    made = Recurrent(matrix, bias, found.metric, found.multiplier, nn.Tanh(), 2, (1, 1), 1, found.gain, found.rate)
    return Network([made], (1, 1))


def closed_loop_bound(one: Network, other: nn.Module) -> float:
    """The gain from disturbance to output of two systems in feedback; an error if it is not proved."""
    first, second = float(lipkit.lipschitz(one)), float(lipkit.lipschitz(other))
    if not first * second < 1:
        raise SystemExit(
            f"small gain: expected proved gains with a product below 1, got {first:.6g} and {second:.6g}: the loop "
            "may be unstable, and is not closed"
        )
    return first / (1 - first * second) * (1 + 1e-12)


def step(system: Recurrent | Parts, phi: nn.Module, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The next states and the outputs of a system, differentiable: w = phi(v), (v, x+, y) = M (w, x, u) + b."""
    nv, m, b = system.units[0], system.matrix, system.bias
    known = torch.cat((x, u), 1)
    w = phi(F.linear(known, m[:nv, nv:], b[:nv]))
    after = F.linear(torch.cat((w, known), 1), m[nv:], b[nv:])
    return after[:, : x.shape[1]], after[:, x.shape[1] :]


def closed(plant: Recurrent, controller: Recurrent | Parts, phi: nn.Module, disturbance: Tensor) -> Tensor:
    """Positions (B, T) of the closed loop under forces (B, T), from rest; the controller reads the position."""
    x, z = (disturbance.new_zeros(len(disturbance), states) for states in (plant.states, STATES))
    places = []
    for force in disturbance.split(1, 1):
        z, command = step(controller, phi, z, x[:, :1])
        x, y = step(plant, plant.phi, x, force + command)
        places.append(y)
    return torch.cat(places, 1)


def train(plant: Recurrent, gamma: float, steps: int) -> R2dn:
    """Train a controller by Adam through the closed loop, for as little motion as its gain allows."""
    torch.manual_seed(0)
    layer = R2dn(1, 1, STATES, 8, gamma=gamma, rate=0.98, dtype=torch.float64)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(steps):
        noise = torch.randn(16, 60, dtype=torch.float64)
        loss = closed(plant, layer.parts(), layer.phi, noise).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return layer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="of the optimiser")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    mass = plant()
    g = float(lipkit.lipschitz(mass))
    print(f"plant: gain <= {g:.4f} (proved)")
    layer = train(mass[0], FRACTION / g, options.steps)
    controller = lipkit.export(layer, (1, 1))
    k = float(lipkit.lipschitz(controller))
    bound = closed_loop_bound(mass, controller)
    print(f"controller: gain <= {k:.4f} (proved), product {g * k:.4f}: the loop is stable, |y| <= {bound:.3f} |d|")

    disturbance = torch.randn(64, 400, dtype=torch.float64)
    swing = torch.sin(1.1 * DT * torch.arange(400, dtype=torch.float64)).expand(1, -1)
    for name, d in (("noise", disturbance), ("resonance", swing)):
        free = mass[0](d[..., None])[..., 0].norm(dim=1) / d.norm(dim=1)
        held = closed(mass[0], controller[0], controller[0].phi, d).norm(dim=1) / d.norm(dim=1)
        assert float(held.max()) <= bound
        print(f"{name}: |y| / |d| {float(free.max()):.3f} without and {float(held.max()):.3f} with the controller")

    # What the theorem does not cover is refused: a controller of twice the gain, and one with gates.
    for refused in (lipkit.export(R2dn(1, 1, STATES, 8, gamma=2 / g), (1, 1)), nn.LSTM(1, 1)):
        try:
            closed_loop_bound(mass, refused)
        except (SystemExit, lipkit.errors.NoRuleError) as error:
            print(f"refused: {error}")
        else:
            raise AssertionError("a loop was closed without proof")


if __name__ == "__main__":
    main()
