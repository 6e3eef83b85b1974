"""A flight controller with a proved gain: trained, exported, verified, shipped as plain ONNX, verified again.

    python examples/controller.py [--steps 1500] [--out runs/controller]

An LBDN 12 -> 64 -> 64 -> 4 learns the nonlinear state feedback of a quadrotor. Its gain from the scaled state to the
scaled command is at most 2, whatever training does. docs/lbdn.md explains each step.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import lipkit
from lipkit.certificates import lipsdp
from lipkit.layers import Normalize, Rescale

# State: position (m), velocity (m/s), roll, pitch, yaw (rad), body rates (rad/s). Command: thrust (N), torques (N m).
COMMANDS = [("thrust", "N"), ("roll torque", "N m"), ("pitch torque", "N m"), ("yaw torque", "N m")]
STATE_SCALE = [2.0] * 3 + [2.0] * 3 + [0.5] * 3 + [2.0] * 3
COMMAND_SCALE = [4.0, 0.1, 0.1, 0.1]
MASS, INERTIA, GRAVITY = 1.0, np.array([0.01, 0.01, 0.02]), 9.81
HOVER = [MASS * GRAVITY, 0.0, 0.0, 0.0]
GAMMA = 2.0


def law(x: np.ndarray) -> np.ndarray:
    """The feedback to imitate, (N, 12) -> (N, 4): saturated position loop, attitude loop, saturated torques."""
    position, velocity, attitude, rates = np.split(x, 4, axis=1)
    wanted = 3 * np.tanh(-(0.8 * position + 1.2 * velocity) / 3)
    roll, pitch, yaw = attitude.T
    thrust = MASS * (GRAVITY + wanted[:, 2]) / (np.cos(roll) * np.cos(pitch))
    forward = wanted[:, 0] * np.cos(yaw) + wanted[:, 1] * np.sin(yaw)
    left = wanted[:, 1] * np.cos(yaw) - wanted[:, 0] * np.sin(yaw)
    tilt = np.column_stack((-left, forward, np.zeros(len(x))))
    limit = np.array([0.3, 0.3, 0.1])
    stiffness, damping = np.array([16.0, 16.0, 4.0]), np.array([7.0, 7.0, 3.0])
    torque = INERTIA * (stiffness * (tilt / GRAVITY - attitude) - damping * rates)
    return np.column_stack((thrust, limit * np.tanh(torque / limit)))


def plant(x: np.ndarray, u: np.ndarray) -> np.ndarray:
    """A rigid body in Euler angles: time derivative of a state (12,) under a command (4,)."""
    velocity, (roll, pitch, yaw), rates = x[3:6], x[6:9], x[9:12]
    (sr, sp, sy), (cr, cp, cy) = np.sin((roll, pitch, yaw)), np.cos((roll, pitch, yaw))
    up = np.array([cy * sp * cr + sy * sr, sy * sp * cr - cy * sr, cp * cr])
    acceleration = u[0] / MASS * up - np.array([0, 0, GRAVITY])
    turning = np.array([[1, sr * sp / cp, cr * sp / cp], [0, cr, -sr], [0, sr / cp, cr / cp]]) @ rates
    return np.concatenate((velocity, acceleration, turning, (u[1:] - np.cross(rates, INERTIA * rates)) / INERTIA))


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
        if not np.abs(x).max() < 1e3:
            break  # diverged: too little training
    return np.array(states)


def samples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """States within one scale of hover, denser near it, and the law's commands."""
    x = (2 * torch.rand(count, 12, generator=generator, dtype=torch.float64) - 1) * torch.tensor(STATE_SCALE)
    x = x * torch.rand(count, 1, generator=generator, dtype=torch.float64)
    return x.float(), torch.from_numpy(law(x.numpy())).float()


def train(steps: int, seed: int = 0) -> nn.Sequential:
    """Train scaling, LBDN, scaling with an ordinary optimiser; the gain holds before, during and after training."""
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
    # Trim: at hover, command what hovers. A bias does not change the gain.
    with torch.no_grad():
        network.output.bias -= network(torch.zeros(12))
    return model


def write_onnx(plain: lipkit.modules.Network, gamma: float, path: Path) -> None:
    """Write plain ONNX of any batch size; its metadata hold the gain and the multipliers that prove it."""
    model = onnx.load(lipkit.interop.write_onnx(plain, path))
    multipliers = [m.tolist() for m in plain.multipliers().values()]
    model.metadata_props.add(key="lipkit.gamma", value=repr(gamma))
    model.metadata_props.add(key="lipkit.multipliers", value=json.dumps(multipliers))
    onnx.save(model, path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="of the optimiser")
    parser.add_argument("--out", type=Path, default=Path("runs/controller"), help="folder for controller.onnx")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    model = train(options.steps)
    print(f"trained: {options.steps} steps in {time.perf_counter() - start:.1f} s")

    # What lipkit proves, from the stored float32 numbers.
    plain, inner = lipkit.export(model, (12,)), lipkit.export(model[1:], (12,))
    multipliers = plain.multipliers()
    whole = GAMMA * max(COMMAND_SCALE) / min(STATE_SCALE)
    proved = "proved" if lipsdp.verify(plain, whole, multipliers) else "NOT proved"
    print(f"lipkit: gain {whole:g} from input to output, with the network's own multipliers: {proved}")
    x, u = samples(4096, torch.Generator().manual_seed(1))
    scale = torch.tensor(STATE_SCALE)
    # delta is the l2 norm of an error of the scaled state; so this certificate leaves out the first scaling.
    certificate = lipkit.certificates.certify_regression(inner, x / scale, u, delta=0.01)
    # The gain that gamma bounds: from below by a search, from above by the best multipliers.
    core = lipkit.export(model[1], (12,))
    lower = lipkit.analysis.lipschitz_lower_bound(core, start=x[:64] / scale).lower
    print(f"lipkit: between the scalings {lower:.3f} (found) <= gain <= {lipsdp.solve(core).gain:.3f} <= {GAMMA:g}")
    rows = zip(COMMANDS, certificate.error.square().mean(0).sqrt(), certificate.output_deviation, strict=True)
    for (name, unit), error, deviation in rows:
        print(f"  {name}: rms error {error:.2g} {unit}; state off by 1 % of its scales: at most {deviation:.2g} {unit}")

    # What anyone can check: another process, with numpy, onnx and onnxruntime only.
    path = options.out / "controller.onnx"
    write_onnx(plain, GAMMA, path)
    with torch.no_grad():
        np.savez(options.out / "samples.npz", x=x.numpy(), y=plain(x).numpy())
    checker = [sys.executable, str(Path(__file__).with_name("verify_onnx.py")), str(path)]
    checked = subprocess.run([*checker, str(options.out / "samples.npz")], check=True, capture_output=True, text=True)
    print(checked.stdout, end="")

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    flown = simulate(lambda state: session.run(None, {name: state.astype(np.float32)})[0].astype(np.float64))
    for title, states in (("network", flown), ("law", simulate(law))):
        distance = np.linalg.norm(states[:, :3], axis=1)
        end, tilt = distance[-1], np.abs(states[:, 6:8]).max()
        print(f"closed loop, {title}: from {distance[0]:.2f} m to {end:.3f} m in 8 s, tilt at most {tilt:.2f} rad")


if __name__ == "__main__":
    main()
