"""One step: it cuts its batch into pieces, adds their gradients, and changes the parameters once.

Recorded as a CUDA graph it is one launch instead of a thousand, so that small networks do not wait for Python.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipkit.errors import DataError, LipkitError, OptionError, lacks_memory, rewording
from lipkit.training.losses import LOSSES
from lipkit.training.session import Session

# Words in errors of torch, and what to say instead.
_SENTENCES = {
    "find_unused_parameters": "expected every parameter in the loss, or strategy='ddp_find_unused_parameters_true', "
    "got parameters without a gradient",
    "more than 1 value per": "expected 2 samples or more for batch norm, got 1: change batch_size or accumulate",
}

Step = Callable[..., Tensor]  # `take_step`, or a `CapturedStep` of it


def take_step(session: Session, x: Tensor, y: Tensor, *, size: int, counted: int, attack: torch.Generator) -> Tensor:
    r"""Change the parameters once, by the gradient of the mean loss of the whole batch.

    .. math:: \frac{1}{n} \sum_i \ell(x_i, y_i) = \frac{1}{R} \sum_r \sum_p \frac{R \, n_{rp}}{n} \,
              \text{mean}_{i \in (r, p)} \ell(x_i, y_i)

    over the pieces p of the R processes r, whose gradients are averaged over r. So the step equals that of one process
    with the batch in one piece, up to rounding, even if R does not divide the batch size.

    x, y are this process' part of the batch of n = ``size`` samples, on its device. ``counted`` is the number of them
    that belong to the batch: all, or 0 if this process only keeps step with the others. ``attack`` generates the
    adversary's random numbers. Returns (2,) float32, still on the device: sum of the losses and number of correct
    predictions of this process.
    """
    fabric, model, options, loss = session.fabric, session.model, session.options, session.loss
    pieces = min(options.accumulate, max(1, size // fabric.world_size))  # equal in all processes
    parts = [(x, y)] if pieces == 1 else zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)
    sums = []
    for number, (part, targets) in enumerate(parts, 1):
        last, rows = number == pieces, len(part)
        own = rows if counted else 0  # adversarial examples do not count
        if options.adversary is not None:
            model.eval()  # during the attack only
            with fabric.autocast():
                attacked = options.adversary(model, part, targets, attack).detach()
            model.train()
            beside = getattr(options.adversary, "beside", False)
            part = torch.cat((part, attacked)) if beside else attacked
            targets = torch.cat((targets, targets)) if beside else targets
        with fabric.no_backward_sync(session.wrapped, enabled=not last):
            outputs = None
            try:
                outputs = session.wrapped(part)
                value = loss(outputs, targets)
            except (RuntimeError, IndexError, ValueError) as error:
                for sign, sentence in _SENTENCES.items():
                    if sign in str(error):
                        raise OptionError(sentence) from error
                clear = lacks_memory(error) or (isinstance(error, LipkitError) and outputs is not None)
                if clear or not (found := _mistake(part, outputs, targets, loss)):
                    raise
                raise DataError(found) from error
            several = not isinstance(outputs, Tensor) and not targets.is_floating_point()  # which of them predicts?
            if several or not isinstance(value, Tensor) or value.ndim:
                got = " and ".join(str(getattr(each, "shape", type(each).__name__)) for each in (outputs, value))
                raise OptionError(f"expected a tensor of outputs and one number from the loss, a mean, got {got}")
            if len(targets) > rows:  # the samples come first, their adversarial examples last
                outputs, targets = outputs[-rows:], targets[-rows:]
            sums.append(_sums(value, outputs, targets, own))
            weight = own * fabric.world_size / size  # R n_rp / n
            if weight != 1:
                value = value * weight
            if last and options.penalty is not None:
                extra = options.penalty(model).to(value)  # once a step, not for each piece
                sums[-1] = sums[-1] + _sums(extra, None, None, counted)
                value = value + extra
            fabric.backward(value)  # adds to the gradients of earlier pieces
    if options.grad_clip is not None:
        fabric.clip_gradients(session.wrapped, session.optimizer, max_norm=options.grad_clip, error_if_nonfinite=False)
    session.optimizer.step()
    for p in session.parameters.values():
        p.grad = None  # cheaper than writing zeros
    return sums[0] if pieces == 1 else torch.stack(sums).sum(0)


@torch.no_grad()
def _sums(loss: Tensor, outputs: Tensor | None, y: Tensor | None, count: int) -> Tensor:
    """(loss summed over ``count`` samples, number of them predicted correctly)."""
    total = loss.float() * count
    if outputs is None or y is None or y.is_floating_point():
        return torch.stack([total, torch.zeros_like(total)])
    logits = outputs[:, None] if outputs.ndim == y.ndim else outputs  # perhaps without an axis of classes
    predicted = logits.argmax(dim=1) if logits.shape[1] > 1 else logits[:, 0] > 0  # one logit: of 1 against 0
    if predicted.shape != y.shape:
        got = f"outputs {tuple(outputs.shape)} and labels {tuple(y.shape)}"
        raise DataError(f"expected outputs (n, K, ...) for labels (n, ...), got {got}")
    right = (predicted == y).sum() / y[:1].numel()  # of several labels a sample, the fraction
    return torch.stack([total, right if count else torch.zeros_like(total)])


def _mistake(x: Tensor, outputs: Any, y: Tensor, loss: Any) -> str:
    """The likely cause of an error in the network (``outputs`` is None) or the loss, in words; empty if unknown."""
    if outputs is None:
        last = x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3)
        return f"expected (N, C, H, W), got {tuple(x.shape)} (channels last: x.permute(0, 3, 1, 2))" if last else ""
    ours = getattr(loss, "func", loss) in LOSSES.values()
    if y.is_floating_point():
        got = f"got {tuple(y.shape)} floating point (one-hot: y.argmax(1); a regression: loss='mse')"
        return f"expected labels (int64), {got}" if ours else ""
    if outputs.ndim != 2:
        return f"expected outputs of shape ({len(x)}, K), got {tuple(outputs.shape)}" if ours else ""
    if y.ndim != 1:
        return f"expected labels of shape ({len(x)},), got {tuple(y.shape)} (one-hot: y.argmax(1))" if ours else ""
    low, high, classes = int(y.min()), int(y.max()), outputs.shape[1]
    if low < 0:
        return f"expected labels >= 0, got {low}"
    return f"expected labels below the number of outputs {classes}, got {high}" if high >= classes else ""


# Ordinary steps of each kind before the recorded one: they create the optimiser's state and choose algorithms.
WARM = 3


class CapturedStep:
    """A step, such as `take_step`, recorded once and replayed on new batches.

    A graph is a fixed list of kernels at fixed addresses. So each batch is copied to the address of the recorded one,
    learning rates are tensors on the device, and each shape of a batch has its own graph, as has each phase of
    `SpectralDescent`, which moves large matrices every second step. A replay runs no Python: if an attribute of the
    network, loss or penalty has changed since the last step, steps are recorded anew. Changes in closures and globals
    are not noticed.

    The network of ``session`` is on a CUDA device; the groups of its optimiser are changed in place.

    Raises:
        OptionError: when called, if a step waits for numbers from the device, or changes attributes.
    """

    def __init__(self, step: Step, session: Session) -> None:
        self.step, self.parts = step, getattr(session.optimizer, "parts", [session.optimizer])
        for group in session.optimizer.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(session.fabric.device)
            group["capturable"] = True  # Adam then counts its steps on the device
        self.warmed: dict[Any, int] = {}  # number of ordinary steps of each kind
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self.holders = {"network": session.model, "loss": session.loss, "penalty": session.options.penalty}
        self._look()

    def __call__(self, session: Session, x: Tensor, y: Tensor, **more: Any) -> Tensor:
        """Take a step, as `take_step` does."""
        if _read(self.places) != self.seen:  # a callback changed them between two steps
            self.graphs.clear()
            self.warmed.clear()
            self._look()
        counters = [s for part in self.parts for s in part.state.values() if isinstance(s.get("step"), int)]
        every = max(group.get("every", 1) for part in self.parts for group in part.param_groups)
        phases = tuple(state["step"] % every for state in counters)  # whether large matrices move in this step
        key = (x.shape, x.dtype, y.shape, y.dtype, more["size"], more["counted"], phases)
        if key not in self.graphs:
            self.warmed[key] = self.warmed.get(key, 0) + 1
            if self.warmed[key] <= WARM:
                sums = self._beside(session, x, y, more)
                if self.warmed[key] == WARM:
                    self._check_attributes()  # the first steps may change some, as lazy modules do
                self._look()
                return sums
            held = x.clone(), y.clone()  # where later batches are copied to
            self.graphs[key] = (*_recorded(lambda: self.step(session, *held, **more)), *held)
            self._check_attributes()
        else:
            for state in counters:  # Python does not run in a replay
                state["step"] += 1
        graph, sums, held_x, held_y = self.graphs[key]
        held_x.copy_(x)
        held_y.copy_(y)
        graph.replay()
        return sums.clone()  # the next replay overwrites them

    def _look(self) -> None:
        """Remember the attributes that must not change while a recorded step is replayed."""
        self.places = _places(self.holders)
        self.seen = _read(self.places)

    def _check_attributes(self) -> None:
        for (name, _, _), before, now in zip(self.places, self.seen, _read(self.places), strict=True):
            if now != before:
                raise OptionError(f"cuda_graph: expected steps that change tensors in place, got a new value of {name}")

    def _beside(self, session: Session, x: Tensor, y: Tensor, more: dict[str, Any]) -> Tensor:
        """A step on a separate stream, which torch requires before a backward pass is recorded."""
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            sums = self.step(session, x, y, **more)
        main.wait_stream(stream)
        return sums


def _recorded(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record ``run()`` without executing its kernels: the graph, and the tensor that will hold the result."""
    graph = torch.cuda.CUDAGraph()
    start = "cuda_graph: expected steps that do not wait for numbers from the device, got "
    with rewording(OptionError, start, RuntimeError), torch.cuda.graph(graph):
        result = run()
    return graph, result


def _places(holders: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], str]]:
    """The place (name, mapping, key) of each tensor, number, text or module in an attribute, also of submodules."""
    found = []
    for root, holder in holders.items():
        for name, part in holder.named_modules() if isinstance(holder, nn.Module) else [("", holder)]:
            own = getattr(part, "__dict__", {})  # a module keeps tensors and submodules in three dicts in it
            for values in (own, *(own[key] for key in ("_parameters", "_buffers", "_modules") if key in own)):
                for key, value in values.items():
                    if value is None or isinstance(value, bool | int | float | str | Tensor | nn.Module):
                        found.append((".".join(filter(None, (root, name, key))), values, key))
    return found


def _read(places: Sequence[tuple[str, Mapping[str, Any], str]]) -> list[Any]:
    """The present state of each attribute, for comparison: a tensor by address and requires_grad, objects by id."""
    found: list[Any] = []
    for _, values, key in places:
        value = values.get(key)
        if isinstance(value, Tensor):
            found.append((value.data_ptr(), value.requires_grad))
        else:
            found.append(value if isinstance(value, bool | int | float | str | nn.Module) else id(value))
    return found
