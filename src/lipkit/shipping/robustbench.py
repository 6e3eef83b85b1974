"""Exported classifiers in the form that RobustBench's evaluations take: a module on images in [0, 1], and its facts."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lipkit import plain
from lipkit.certificates import format_radius
from lipkit.errors import OptionError, ShapeError
from lipkit.report import Record


class RobustBenchModel(nn.Module):
    """Logits (B, K) of images (B, C, H, W) in [0, 1]; the normalisation is inside, the mode is evaluation.

    Gradients flow to the images, as attacks need; the weights are constants.

    Args:
        network: the exported network of a classifier of images.

    Raises:
        OptionError: not an exported network. ShapeError: one that does not take images.

    >>> import torch
    >>> net = plain.Network([nn.Flatten(), nn.Linear(4, 3)], (1, 2, 2))
    >>> RobustBenchModel(net)(torch.rand(5, 1, 2, 2)).shape
    torch.Size([5, 3])
    """

    def __init__(self, network: plain.Network) -> None:
        super().__init__()
        if not isinstance(network, plain.Network):
            raise OptionError(f"expected an exported network (lipkit.plain.Network), got {type(network).__name__}")
        if len(network.input_shape) != 3:
            raise ShapeError(f"expected a network of images (C, H, W), got input shape {network.input_shape}")
        self.network = network
        self.eval()

    def train(self, mode: bool = True) -> RobustBenchModel:
        """Stay in evaluation mode: an exported network has no other."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x)
        return out


def robustbench_info(
    record: Record, *, authors: str = "", link: str = "", venue: str = "Unpublished"
) -> dict[str, Any]:
    """The facts of a run under the names of RobustBench's model descriptions, in per cent, threat model l2.

    ``autoattack_acc``, ``reported`` and ``eps`` are None: those figures exist only after AutoAttack ran. The
    leaderboard has no column for certified accuracies: they stand in ``footnote``. ``additional_data`` says whether
    data beyond the named set were trained on, and is False.
    """
    certified = ", ".join(f"{100 * row.share.value:.2f} at {format_radius(row.eps)}" for row in record.certified)
    recipe = record.recipe if isinstance(record.recipe, dict) else {}
    return {
        "link": link,
        "name": record.name,
        "authors": authors,
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": record.data.name,
        "venue": venue,
        "architecture": str((recipe.get("model") or {}).get("name", "")),
        "eps": None,
        "clean_acc": f"{100 * record.clean.value:.2f}",
        "reported": None,
        "autoattack_acc": None,
        "footnote": f"Certified l2 accuracy in per cent: {certified}. Constant {record.lipschitz.computed:.6g}.",
    }
