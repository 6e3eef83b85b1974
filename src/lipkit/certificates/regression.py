r"""Certificates of a regression: how far the outputs can move when the input moves by delta.

For an L-Lipschitz network ``||f(x + d) - f(x)|| <= L ||d||``; output j alone moves by at most ``K_j ||d||`` with a
constant ``K_j <= L`` of its own. Both hold at every input, not only at the samples.
"""

import contextlib
import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from lipkit.bounds import spectral_norm
from lipkit.bounds.lmi import gain_bound
from lipkit.bounds.lmi_solver import balance
from lipkit.certificates.evaluators import Evaluator
from lipkit.certificates.gains import box_ends, gain_matrix
from lipkit.certificates.margins import grown
from lipkit.certificates.measurement import Proof, Samples, as_tensor, check_inputs, dtype_name, measure
from lipkit.errors import NoRuleError, OptionError, ShapeError, finite
from lipkit.files import write_atomic
from lipkit.modules import Affine, Network
from lipkit.modules.slope_runs import SlopeRun, slope_runs
from lipkit.proof.roundoff import grow, known, product, size, up
from lipkit.shown import Shown, upper
from lipkit.text import csv_text

# An output's own constant by the LMI takes a few factorisations of the size of the network for each output.
_MOST_LMI_OUTPUTS = 64


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class RegressionCertificate(Shown):
    r"""Proved deviations of a regression network at N samples. All tensors are on the CPU, in float64.

    Attributes:
        delta: l2 norm of the input deviation, in units of the input.
        sensors: (*input_shape) the most that each input moves, or None where only the norm is known.
        moved: (d,) bounds how far each output moves, without rounding: ``K_j delta``, or with `sensors` the smaller of
            that and ``(G sensors)_j``, where G is `lipkit.certificates.gain_matrix`.
        constant: proved upper bound L of the network's l2 Lipschitz constant, rounded up.
        output_constants: (d,) proved upper bounds ``K_j`` for each output alone, rounded up.
        prediction: (N, d) outputs at the samples.
        target: (N, d).
        method: what gave the constants: ``"outputs"`` (each output bounded by itself) or ``"global"`` (all by L).
        dtype, input_shape, network_sha256: as in `Certificate`.
        rounding: ``"sound"``: deviations and worst errors are those of the machine; ``"ignore"``: of real arithmetic.
        evaluator: the evaluation they hold for, and the settings they were made under.
        prediction_error: (N, d) bounds the rounding error of `prediction`; 0 where rounding is ignored.
        rounding_error: (N, d) bounds the rounding error of the evaluator within delta of each sample; 0 if ignored.
    """

    delta: float
    constant: float
    output_constants: Tensor
    prediction: Tensor
    target: Tensor
    method: str
    dtype: str
    input_shape: tuple[int, ...]
    network_sha256: str
    rounding: str
    evaluator: Evaluator
    prediction_error: Tensor
    rounding_error: Tensor
    moved: Tensor
    sensors: Tensor | None = None

    def __len__(self) -> int:
        return len(self.target)

    @property
    def deviation(self) -> float:
        """l2 bound of the output deviation: ``L delta``, or ``|moved|`` if smaller, plus twice the rounding error."""
        worst = float(size(self.rounding_error).amax()) if self.rounding == "sound" else 0.0
        most = product(self.constant, self.delta)
        return grow((most if self.sensors is None else min(most, float(size(self.moved[None])))) + 2 * worst)

    @property
    def output_deviation(self) -> Tensor:
        """(d,) largest deviation of each output alone, in its units: `moved` plus twice the rounding error."""
        return grown(self.moved + 2 * self.rounding_error.amax(dim=0))

    @property
    def error(self) -> Tensor:
        """(N, d) distance of prediction and target."""
        return (self.prediction - self.target).abs()

    @property
    def worst_error(self) -> Tensor:
        """(N, d) largest distance from the target for any input within delta of the sample, rounded up."""
        return grow(self.error + self.moved + self.prediction_error + self.rounding_error)

    @property
    def mse(self) -> float:
        """Mean of the squared errors over samples and outputs."""
        return float(self.error.square().mean())

    def describe(self) -> str:
        """Error, the proved constant and the largest deviation, in three lines."""
        included = "included" if self.rounding == "sound" else "ignored"
        several = "" if self.target.shape[1] == 1 else "s"
        moving = f"an input that moves by {self.delta:g} (l2)"
        if self.sensors is not None:
            moving = f"an input whose entries move by {float(self.sensors.amin()):g} to {float(self.sensors.amax()):g}"
        return (
            f"{len(self)} samples, {self.target.shape[1]} output{several}: mean squared error {self.mse:.6g}, "
            f"L <= {upper(self.constant)}, rounding {included}\n"
            f"{moving} moves the outputs by at most {upper(self.deviation)}\n"
            f"L proved from the stored numbers ({self.method}), for {self.evaluator.name} evaluation"
        )

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write ``index``, then ``target_j,prediction_j,worst_error_j`` for each output j, one row per sample."""
        names = ("target", "prediction", "worst_error")
        header = ["index", *(f"{name}_{j}" for j in range(self.target.shape[1]) for name in names)]
        columns = torch.stack((self.target, self.prediction, self.worst_error), dim=2).flatten(1)
        rows = [[i, *row] for i, row in enumerate(columns.tolist())]
        write_atomic(Path(path), csv_text([header, *rows]).encode())


def certify_regression(
    network: Network,
    x: Samples,
    y: Samples,
    *,
    delta: float | Samples | Sequence[float],
    rounding: str = "sound",
    evaluator: str = "float64",
    batch_size: int = 128,
    device: str | torch.device = "cpu",
    proof: Proof | None = None,
) -> RegressionCertificate:
    r"""Certified output deviations of an exported network, of all outputs together and of each.

    .. math:: \|f(x + d) - f(x)\|_2 \le L \delta, \qquad |f_j(x + d) - f_j(x)| \le K_j \delta
              \qquad\text{for all } x \text{ and } \|d\|_2 \le \delta

    **Guarantee.** Upper bounds for the stored numbers. Constants hold at every input, in real arithmetic, and are
    rounded up (`output_constants`). Deviations and `RegressionCertificate.worst_error` hold for what the evaluator
    computes at the samples and at inputs within delta of them: the rounding errors there are bounded a priori and added
    (`docs/rounding.md`), unless ``rounding="ignore"``. delta is in the input's units, deviations are in the outputs'.

    Args:
        network, x, rounding, evaluator, batch_size, device, proof: as in `lipkit.certify`.
        y: (N, d) floating-point targets, a tensor or numpy array; or (N,) for one output.
        delta: l2 norm of the input deviation, >= 0 and finite; or the most that each input moves, a list or array of
            ``input_shape`` or ``(C,)`` for the channels of ``(C, ...)``, which tightens `RegressionCertificate.moved`.

    Raises:
        NoRuleError, ShapeError, OptionError: as in `lipkit.certify`; targets that are not floating point or finite; a
            delta that is negative or of another shape.

    >>> net = Network([nn.Linear(2, 2, bias=False)], (2,))
    >>> _ = net[0].weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    >>> found = certify_regression(net, torch.zeros(1, 2), torch.zeros(1, 2), delta=0.1)
    >>> [round(value, 6) for value in found.output_deviation.tolist()]  # 5 delta and 1 delta
    [0.5, 0.1]
    """
    x, y = as_tensor(x), as_tensor(y)
    check_inputs(network, x)
    sensors = None
    if isinstance(delta, list | tuple) or (isinstance(delta, Tensor | np.ndarray) and delta.ndim):
        try:
            sensors = box_ends((0.0, delta), network.input_shape, "delta")[1].clone()
        except OptionError:
            wanted = "numbers >= 0, one for each input or channel"
            raise OptionError(f"expected delta as {wanted}, got {delta}") from None
        delta = float(size(sensors[None]))  # the ball around the box that the sensors reach
    delta = finite("delta", delta, least=0)
    _check_targets(x, y)
    measured = measure(
        network, x, rounding=rounding, evaluator=evaluator, batch_size=batch_size, device=device, proof=proof
    )
    prediction, target = with_targets(measured.outputs, y)
    if not bool(prediction.isfinite().all()):
        raise OptionError("expected finite outputs, got NaN or infinity")
    chain = measured.proof.chain
    constants, method = output_constants(measured.proof, target.shape[1])
    moved = reach(constants, delta)
    if sensors is not None:
        with contextlib.suppress(NoRuleError):  # gain_matrix takes only chains of dense layers
            terms = known(grow(gain_matrix(measured.proof.network) * sensors.flatten() * chain.slack))
            moved = torch.minimum(moved, up(terms.sum(1), terms.shape[1]))  # a sum of that many terms, in any order
    centre, machine = (error.expand_as(prediction) for error in measured.errors(delta))
    return RegressionCertificate(
        delta=delta,
        # The root of the sum of squares bounds the whole network, too.
        constant=min(chain.constant * chain.slack, float(size(constants[None]))),
        output_constants=constants,
        prediction=prediction,
        target=target,
        method=method,
        dtype="float64",
        input_shape=tuple(network.input_shape),
        network_sha256=measured.proof.network_sha256,
        rounding=rounding,
        evaluator=measured.evaluator,
        prediction_error=centre,
        rounding_error=machine,
        moved=moved,
        sensors=sensors,
    )


def output_constants(proved: Proof, outputs: int) -> tuple[Tensor, str]:
    """A Lipschitz constant of each output (d,), and the method: ``"outputs"``, or ``"global"`` for the network's.

    ``"outputs"`` needs a network that ends in ``nn.Linear``, perhaps with an output scaling. Output j is the network
    with only row j of that layer; its constant is ``L_body ||w_j||``, or the gain that the LMI proves if it is smaller,
    times the output's scale, and at most the network's.
    """
    network, proof = proved.network, proved.chain
    modules = list(network)
    tail = modules[-1] if modules else None
    scaling = tail if type(tail) is Affine else None
    position = len(modules) - (1 if scaling is None else 2)  # of the last layer; a scaling may follow it
    last = modules[position] if position >= 0 else None
    if type(last) is not nn.Linear or len(last.weight) != outputs:
        return torch.full((outputs,), proof.constant, dtype=torch.float64) * proof.slack, "global"
    scales = [1.0] * outputs if scaling is None else scaling.scale.detach().abs().expand(outputs).tolist()
    runs = slope_runs(network) if outputs <= _MOST_LMI_OUTPUTS else []
    run = next((run for run in runs if run.stop == position + 1), None)
    # Everything before the last layer.
    body, found = proof.prefixes[position], []
    for i, (row, scale) in enumerate(zip(last.weight.detach(), scales, strict=True)):
        best = product(body, float(spectral_norm(row[None]))) if math.isfinite(body) else math.inf
        if run:
            best = min(best, product(proof.prefixes[run.start], _by_multipliers(run, i)))
        found.append(min(proof.constant, product(best, scale)))
    return torch.tensor(found, dtype=torch.float64) * proof.slack, "outputs"


def reach(constants: Tensor, distance: float) -> Tensor:
    """The most (d,) that outputs with these constants move if the input moves by ``distance``, rounded up."""
    return torch.tensor([product(k, distance) for k in constants.tolist()], dtype=torch.float64)


def _by_multipliers(run: SlopeRun, row: int) -> float:
    """Gain from the run's input to one output, as its multipliers or a multiple of them prove: the smaller one."""
    weights, errors = ([*each[:-1], each[-1][row, None]] for each in (run.weights, run.errors))
    factor = balance(weights, run.multipliers)
    return min(gain_bound(weights, [m * t for m in run.multipliers], errors) for t in (1.0, factor))


def columns(values: Tensor) -> Tensor:
    """Outputs or targets as (N, d); those of shape (N,) become (N, 1)."""
    return values[:, None] if values.ndim == 1 else values


def with_targets(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets, both (N, d) float64; ``ShapeError`` if their shapes differ."""
    outputs, target = columns(outputs), columns(y.detach().cpu().double())
    if outputs.ndim != 2:
        raise ShapeError(f"expected outputs of shape (N,) or (N, d), got {tuple(outputs.shape)}")
    if outputs.shape != target.shape:
        raise ShapeError(f"expected targets of shape {tuple(outputs.shape)} as the outputs, got {tuple(y.shape)}")
    return outputs, target


def _check_targets(x: Tensor, y: Tensor) -> None:
    if not y.is_floating_point():
        raise OptionError(
            f"expected floating-point targets for an output deviation, got {dtype_name(y)}: class labels are "
            "certified by lipkit.certify"
        )
    if y.ndim not in (1, 2) or len(y) != len(x):
        raise ShapeError(f"expected targets of shape ({len(x)}, d), got {tuple(y.shape)}")
    if not bool(y.isfinite().all()):
        raise OptionError("expected finite targets, got NaN or infinity")
