"""The state of a run, from one step to the next, and its checkpoints, from which it continues bit for bit."""

import copy
import math
import time
import typing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lipkit.data import Split
from lipkit.errors import OptionError, RunError
from lipkit.layers import after_step
from lipkit.layers.projections import after_step_layers
from lipkit.training import checkpoints, losses, optim, schedules
from lipkit.training.devices import check_recordable, on_first
from lipkit.training.options import Precision, TrainOptions
from lipkit.training.progress import Divergence, Totals, tensorboard
from lipkit.training.schedules import Clock
from lipkit.training.sources import Source, own_random_state, random_state


class Session:
    """All state of a training: network, optimiser, place in the run. The network is changed within `opened` only.

    Args:
        fabric: a launched Fabric.
        model, data, options: as for `fit`.

    Attributes:
        wrapped: ``model`` with Fabric's wrapper, perhaps compiled; for forward passes.
        optimizer: with Fabric's wrapper; peaks: the peak learning rate of each of its groups.
        parameters: the trained ones, by name; average: their moving averages, None without ``ema``.
        loss, rate: functions of (outputs, targets), and of the fraction of training done.
        clock: the budget, and when to save or stop. steps: of one epoch.
        input_shape: of one augmented input, if `after_step` needs it, else None.
        folder: of the run; None writes nothing. events: its logger of TensorBoard events, or None.
        epoch, step: epochs done, and steps done of the next one; number: steps done in all.
        history: one row for each epoch done.
        totals, generators: sums and random numbers of the epoch in progress, which `train` makes.
        resumed: the state of the checkpoint that the run continues from; emptied when its epoch begins.

    Raises:
        OptionError: whatever `fit` refuses, except a wrong folder or wrong data.
    """

    wrapped: Any
    totals: Totals
    generators: dict[str, torch.Generator]

    def __init__(self, fabric: Any, model: nn.Module, options: TrainOptions, data: Source) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise OptionError(f"expected a model with parameters to train, got {type(model).__name__} without any")
        if options.tensorboard:
            tensorboard(Path())  # is it installed? It writes nothing yet
        precision, known = str(fabric.strategy.precision.precision), typing.get_args(Precision)
        if precision not in known:
            raise OptionError(f"expected a Fabric of precision {', '.join(known)}, got {precision!r}")
        if precision != "64-true" and all(p.dtype == torch.float64 for p in model.parameters()):
            raise OptionError(f"expected precision='64-true' for a network of float64 parameters, got {precision!r}")
        if low := {p.dtype for p in model.parameters()} & {torch.float16, torch.bfloat16}:
            raise OptionError(f"expected parameters in float32 or float64 (network.float()), got {low.pop()}")
        if options.batch_size < (world := fabric.world_size):
            raise OptionError(f"expected batch_size >= the number of devices {world}, got {options.batch_size}")
        strategy = type(fabric.strategy).__name__
        if strategy in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):  # constraints need whole weights
            raise OptionError(f"expected strategy ddp or another that leaves parameters whole, got Fabric's {strategy}")
        if options.cuda_graph:
            check_recordable(fabric, options)
        free = torch.cuda.mem_get_info(fabric.device)[0] if fabric.device.type == "cuda" else 0
        if isinstance(data, Split) and isinstance(data.x, Tensor) and 4 * data.x.nbytes < free:
            data = data.to(fabric.device)  # so that the GPU gathers the batches
        self.fabric, self.model, self.options, self.data = fabric, model, options, data
        self.optimizer: Any = optim.build(options, model, fabric.device)
        self.peaks = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        self.average: dict[str, Tensor] | None = None
        self.loss = losses.LOSSES[options.loss] if isinstance(options.loss, str) else options.loss
        self.rate = schedules.SCHEDULES[options.schedule] if isinstance(options.schedule, str) else options.schedule
        self.clock = Clock(fabric, options.budget, options.max_minutes, options.checkpoint_seconds)
        self.steps = math.ceil(len(data) / options.batch_size)
        self.input_shape: tuple[int, ...] | None = None
        self.folder: Path | None = None
        self.events: Any = None
        self.epoch, self.step, self.number = 0, 0, 0
        self.history: list[dict[str, Any]] = []
        self.resumed: dict[str, Any] = {}

    @contextmanager
    def opened(self, folder: Path | None, resume: bool = False, **new: Any) -> Iterator[None]:
        """Put the network on its device, and hold the run's ``folder``: a new run, or with ``resume`` the one there.

        ``new`` goes to `checkpoints.opened`, which may name the folder. All processes must call this method and `save`.

        Raises:
            RunError: see `checkpoints`; if the first process fails, all raise it, before the network changes. A
                `Divergence` within the block ends in a RunError, too.
        """
        fabric, options, model = self.fabric, self.options, self.model
        with ExitStack() as held:
            found = None
            if folder is not None:
                settings = options.settings(len(self.data))
                opened = checkpoints.opened(folder, settings, resume, **new)
                self.folder = folder = on_first(fabric, lambda: held.enter_context(opened))
                found = on_first(fabric, lambda: checkpoints.load_checkpoint(folder)) if resume else None
                if found is not None:
                    checkpoints.check_weights(model, found[1], folder)
                    before = set(found[2].get("trained", self.parameters))  # older checkpoints do not have it
                    if odd := sorted(before ^ self.parameters.keys()):
                        sides = ("trained", "frozen") if odd[0] in before else ("frozen", "trained")
                        raise RunError(f"expected {odd[0]} {sides[0]}, as in the run in {folder}, got it {sides[1]}")
            if options.channels_last:  # first: the optimiser's state copies the layout of the parameters
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.wrapped = fabric.setup_module(torch.compile(model) if options.compile else model)
            self.optimizer = fabric.setup_optimizers(self.optimizer)
            if options.ema is not None:
                self.average = {name: p.detach().clone() for name, p in self.parameters.items()}
            if after_step_layers(model):
                with own_random_state(fabric.device):
                    x, _ = self.batch(torch.zeros(1, dtype=torch.int64), torch.Generator().manual_seed(0))
                self.input_shape = tuple(x.shape[1:])
            if found is not None:
                self._restore(*found)
            if folder is not None and resume:
                self.history = on_first(fabric, lambda: checkpoints.truncate_metrics(folder, self.epoch))
            if folder is not None and options.tensorboard:
                self.events = tensorboard(folder, self.epoch)
                held.callback(self.events.finalize, "")
            try:
                yield
            except Divergence as error:
                newest = None if folder is None else checkpoints.newest_checkpoint(folder)
                kept = (
                    "no checkpoint was written" if newest is None else f"the last good checkpoint is kept in {newest}"
                )
                raise RunError(f"{error}: training stopped, {kept}; a smaller lr may help") from None

    def _restore(self, epoch: int, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Continue from a checkpoint; one of a finished run or of an older version lacks some of the state."""
        self.model.load_state_dict(weights)
        self.epoch, self.step, self.clock.used = epoch, int(state.get("step", 0)), state.get("used", 0.0)
        self.number, self.resumed = self.epoch * self.steps + self.step, state
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        if state.get("precision"):
            self.fabric.strategy.precision.load_state_dict(state["precision"])
        if "average" in state and self.average is not None:
            for name, value in self.average.items():
                value.copy_(state["average"][name])

    def save(self, final: bool = False) -> None:
        """Write a checkpoint (``final``: without the optimiser's state); Divergence if a weight is not finite."""
        if (folder := self.folder) is not None:
            self.check_finite(f"before the checkpoint after epoch {self.epoch} and {self.step} steps")
            within = self.step > 0  # totals and generators belong to an unfinished epoch
            state = {"step": self.step, "totals": self.totals.state() if within else {}, "used": self.clock.used}
            state["trained"] = [*self.parameters]  # the optimiser's state is in this order
            if self.average is not None:
                state["average"] = {name: value.cpu() for name, value in self.average.items()}
            if not final:
                state["optimizer"] = dict(self.optimizer.state_dict())
                state["precision"] = self.fabric.strategy.precision.state_dict()
                state["random"] = random_state(self.fabric, self.generators if within else {})
            place = {"step": self.step, "keep": 1 if final else 2}  # a finished run is not continued
            on_first(self.fabric, lambda: checkpoints.save_checkpoint(folder, self.epoch, self.model, state, **place))
        self.clock.saved, self.clock.since = time.monotonic(), self.clock.now()  # a checkpoint is free

    def batch(self, index: Tensor, augment: torch.Generator) -> tuple[Tensor, Tensor]:
        """The samples at ``index`` on the device, augmented."""
        device, options = self.fabric.device, self.options
        held = getattr(self.data, "x", None)  # a Split may be on the device already
        x, y = self.data.batch(index.to(held.device) if isinstance(held, Tensor) else index)
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        if options.augment is not None:
            x = options.augment(x, augment)
        last = options.channels_last and x.ndim == 4
        return (x.contiguous(memory_format=torch.channels_last) if last else x), y

    def fraction(self, size: int = 0) -> float:
        """Fraction of training done, the larger of steps and budget; ``size`` adds a step of that many samples.

        A budget of time ignores ``size``: what a step takes is unknown before it.
        """
        clock, epochs = self.clock, self.options.epochs
        by_steps = 0.0 if epochs is None else (self.number + (size > 0 and not clock.timed)) / (epochs * self.steps)
        used = clock.used + (size if clock.unit == "samples" else 0)
        return max(by_steps, min(1.0, used / clock.amount))

    def finish_step(self, model: nn.Module, last: bool) -> None:
        """Call `after_step` and the user's ``post_step`` after a step; ``last``: it ends the epoch."""
        if self.input_shape is not None:
            after_step(model, self.input_shape, None if last else self.number)
        if self.options.post_step is not None:
            with torch.no_grad():
                self.options.post_step(model, self.number, last)

    def measured(self) -> nn.Module:
        """The module to evaluate: the network, or with ``ema`` a copy with the averages, after `finish_step`."""
        if self.average is None:
            return self.model
        twin = copy.deepcopy(self.model).eval()  # its buffers are those of the network
        parameters = dict(twin.named_parameters())
        with torch.no_grad():
            for name, value in self.average.items():
                parameters[name].copy_(value)
        self.finish_step(twin, last=True)
        return twin

    def check_finite(self, when: str) -> None:
        """Raise Divergence if a parameter has NaN or infinity. All processes must call it."""
        nonfinite = torch.stack([~torch.isfinite(p.detach()).all() for p in self.parameters.values()]).float()
        if self.fabric.world_size > 1:
            nonfinite = self.fabric.all_reduce(nonfinite, reduce_op="sum")
        if found := nonfinite.nonzero().flatten().tolist():  # one wait for the device
            name = list(self.parameters)[found[0]]
            raise Divergence(f"expected finite weights, got NaN or infinity in {name} {when}")


def update(average: Sequence[Tensor], parameters: Sequence[Tensor], decay: float, step: int) -> None:
    r"""One step of the average, in place.

    .. math:: a_s = d_s \, a_{s-1} + (1 - d_s) \, \theta_s, \qquad d_s = \min(d, (1 + s) / (10 + s))

    :math:`d_s` reaches d = ``decay`` at about step s = 9 / (1 - d); until then the average forgets its start faster.
    Steps count from 1.
    """
    get_ema_multi_avg_fn(min(decay, (1 + step) / (10 + step)))(list(average), list(parameters), step)
