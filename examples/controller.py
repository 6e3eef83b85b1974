"""A flight controller with a proved gain: trained, exported, verified, shipped as plain ONNX, verified again.

    python examples/controller.py [--steps 1500] [--out controller]

An LBDN 12 -> 64 -> 64 -> 4 learns the nonlinear state feedback of a quadrotor. Between the scaling of the state and
that of the command its gain is at most 2, whatever the training does. docs/lbdn.md tells the story.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import lipkit
from lipkit.certificates import lipsdp
from lipkit.layers import Normalize, Rescale

# State: position (m), velocity (m/s), roll, pitch, yaw (rad), body rates (rad/s). Command: thrust (N), torques (N m).
STATES = ["x", "y", "z", "vx", "vy", "vz", "roll", "pitch", "yaw", "p", "q", "r"]
COMMANDS = [("thrust", "N"), ("roll torque", "N m"), ("pitch torque", "N m"), ("yaw torque", "N m")]
STATE_SCALE = [2.0] * 3 + [2.0] * 3 + [0.5] * 3 + [2.0] * 3
COMMAND_SCALE = [4.0, 0.1, 0.1, 0.04]
MASS, INERTIA, GRAVITY = 1.0, np.array([0.01, 0.01, 0.02]), 9.81
HOVER = [MASS * GRAVITY, 0.0, 0.0, 0.0]
GAMMA = 2.0


def law(x: np.ndarray) -> np.ndarray:
    """The feedback to imitate, (N, 12) -> (N, 4): saturated position loop, attitude loop, saturated torques."""
    position, velocity, attitude, rates = np.split(x, 4, axis=1)
    wanted = 3 * np.tanh(-(0.8 * position + 1.2 * velocity) / 3)
    roll, pitch, yaw = attitude.T
    thrust = MASS * (GRAVITY + wanted[:, 2]) / (np.cos(roll) * np.cos(pitch))
    tilt = np.stack(
        (
            wanted[:, 0] * np.sin(yaw) - wanted[:, 1] * np.cos(yaw),
            wanted[:, 0] * np.cos(yaw) + wanted[:, 1] * np.sin(yaw),
            np.zeros(len(x)),
        ),
        axis=1,
    )
    limit = np.array([0.3, 0.3, 0.1])
    stiffness, damping = np.array([16.0, 16.0, 4.0]), np.array([7.0, 7.0, 3.0])
    torque = INERTIA * (stiffness * (tilt / GRAVITY - attitude) - damping * rates)
    return np.column_stack((thrust, limit * np.tanh(torque / limit)))


def plant(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Rigid body in Euler angles: time derivative of one state (12,) under one command (4,)."""
    velocity, (roll, pitch, yaw), rates = x[3:6], x[6:9], x[9:12]
    (sr, sp, sy), (cr, cp, cy) = np.sin((roll, pitch, yaw)), np.cos((roll, pitch, yaw))
    up = np.array([cy * sp * cr + sy * sr, sy * sp * cr - cy * sr, cp * cr])
    acceleration = u[0] / MASS * up - np.array([0, 0, GRAVITY])
    turning = np.array([[1, sr * sp / cp, cr * sp / cp], [0, cr, -sr], [0, sr / cp, cr / cp]]) @ rates
    return np.concatenate(
        (velocity, acceleration, turning, (u[1:] - np.cross(rates, INERTIA * rates)) / INERTIA)
    )


def simulate(controller: Callable[[np.ndarray], np.ndarray], seconds: float = 8.0, dt: float = 0.01) -> np.ndarray:
    """States (T, 12) of the closed loop at 100 Hz (Runge-Kutta, command held), from 1.5 m away and tilted."""
    x = np.zeros(12)
    x[:3], x[6:8] = (1.0, -1.0, 0.5), (0.2, -0.1)
    states = [x]
    for _ in range(round(seconds / dt)):
        u = controller(x[None])[0]
        k1 = plant(x, u)
        k2 = plant(x + dt / 2 * k1, u)
        k3 = plant(x + dt / 2 * k2, u)
        x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + plant(x + dt * k3, u))
        states.append(x)
    return np.array(states)


def samples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """States, uniform in a box of one scale about hover, and the law's commands."""
    x = (2 * torch.rand(count, 12, generator=generator, dtype=torch.float64) - 1) * torch.tensor(STATE_SCALE)
    return x.float(), torch.from_numpy(law(x.numpy())).float()


def train(steps: int, seed: int = 0) -> nn.Sequential:
    """Scaling, LBDN, scaling, by an ordinary optimiser: the gain holds before, during and after."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network = lipkit.models.lbdn([12, 64, 64, 4], gamma=GAMMA, activation="relu")
    model = nn.Sequential(Normalize([0.0] * 12, STATE_SCALE), network, Rescale(COMMAND_SCALE, HOVER))
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=5e-3, total_steps=steps)
    scale = torch.tensor(COMMAND_SCALE)
    for _ in range(steps):
        x, u = samples(512, generator)
        loss = ((model(x) - u) / scale).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model


def write_onnx(plain: lipkit.plain.Network, gamma: float, path: Path) -> None:
    """Plain ONNX of any batch size, with the gain and the multipliers that prove it among its metadata."""
    import onnx

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports that torchvision is not there
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
        batch = ({0: torch.export.Dim("batch")},)
        program = torch.onnx.export(
            plain, (torch.zeros(2, *plain.input_shape),), dynamo=True, dynamic_shapes=batch, verbose=False
        )
    model = program.model_proto
    for node in model.graph.node:
        del node.metadata_props[:]  # file names and stack traces of this computer
    onnx.helper.set_model_props(
        model,
        {
            "lipkit.gamma": repr(gamma),
            "lipkit.multipliers": json.dumps([m.tolist() for m in plain.multipliers().values()]),
        },
    )
    onnx.save(model, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="of the optimiser")
    parser.add_argument("--out", type=Path, default=Path("controller"), help="folder for controller.onnx")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    start = time.perf_counter()
    model = train(options.steps)
    print(f"trained: {options.steps} steps in {time.perf_counter() - start:.1f} s")
    x, u = samples(4096, torch.Generator().manual_seed(1))
    plain = lipkit.export(model, (12,))
    error = (plain(x) - u).square().mean(0).sqrt().tolist()
    print("error (rms) on new states: " + ", ".join(f"{e:.2g} {unit}" for e, (_, unit) in zip(error, COMMANDS)))

    # What lipkit proves, from the stored float32 numbers.
    whole = GAMMA * max(COMMAND_SCALE) / min(STATE_SCALE)
    core = lipkit.export(model[1], (12,))
    assert lipsdp.verify(core, GAMMA, core.multipliers())
    assert lipsdp.verify(plain, whole * (1 + 1e-6), plain.multipliers())
    print(f"lipkit: gain between the scalings {float(lipkit.lipschitz(core)):.9g}, of the whole {float(lipkit.lipschitz(plain)):.6g}")
    search = lipkit.attacks.lipschitz_lower_bound(core, (12,), box=None)
    print(f"lipkit: steepest secant found {float(search):.4g}")
