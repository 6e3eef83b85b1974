"""Model cards: what a network is, what was proved and measured, in the form that model hubs read."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from typing import Any

import yaml
from torch import Tensor, nn

from lipkit import modules
from lipkit.certificates.measurement import check_network
from lipkit.errors import ShapeError
from lipkit.report import Record, RegressionRecord
from lipkit.shown import lower, upper
from lipkit.text import format_radius, printable, printable_lines

_LOAD = """```python
import lipkit

network = lipkit.load("{folder}/network")  # the exported network: evaluate, certify, deploy this one
model = lipkit.interop.from_pretrained("{folder}")  # the free parameters: train on from here
```"""


def model_card(
    record: Record | RegressionRecord, *, folder: str = ".", licence: str | None = None, load: str | None = None
) -> str:
    """README.md of a model folder: YAML front matter, then figures, proof method, recipe and how to load it.

    Args:
        record: of the run that made the model: it has all figures; its names are escaped.
        folder: how the loading example names the folder.
        licence: SPDX identifier of the weights' licence; left out if the owner does not name one.
        load: the loading example, Markdown, in place of the one for ``folder``.
    """
    rows = _rows(record)
    rounded = {"deviation": upper, "lower": lower, "mse": "{:.{}g}".format}  # a printed bound is a bound, too
    shown = [
        (_text(name), f"{100 * v:.2f} %" if kind.endswith("accuracy") else rounded[kind](v, 6))
        for name, kind, v in rows
    ]
    results = [
        {
            "task": {"type": "image-classification" if isinstance(record, Record) else "tabular-regression"},
            "dataset": {"name": _line(record.data.name), "type": _line(record.data.name)},
            "metrics": [{"type": kind, "name": _line(name), "value": value} for name, kind, value in rows],
        }
    ]
    front: dict[str, Any] = {
        "library_name": "lipkit",
        "tags": ["lipkit", "lipschitz", "certified-robustness"],
        "datasets": [_line(record.data.name)],
        "model-index": [{"name": _line(record.name), "results": results}],
    }
    if licence is not None:
        front = {"license": licence, **front}
    recipe, bound = _yaml(json.loads(json.dumps(record.recipe, default=str))), record.lipschitz
    lines = [
        "---",
        _yaml(front),
        "---",
        f"# {_text(record.name)}",
        "",
        f"Trained with [lipkit](https://pypi.org/project/lipkit/) on {_text(record.data.name)} "
        f"({record.data.train_samples or 'unknown'} samples), measured on {record.data.test_samples} test samples.",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in shown),
        f"| proved l2 Lipschitz constant | {upper(bound.computed, 9)} |",
        "",
        f"The constant is proved in {_text(bound.dtype)} from the stored numbers (method: {_text(bound.method)}),",
        "whatever training made of them. Radii are l2, for inputs in the units of the data (images in [0, 1]); input",
        "normalisation is part of the network. Attacked accuracy is an upper bound of the robust one, certified",
        "accuracy a lower bound.",
        f"Network sha256: {_text(record.network_sha256)}.",
        "",
        "## Load",
        _LOAD.format(folder=folder) if load is None else load,
        "",
        "## Recipe",
        "```yaml",
        printable_lines(recipe).replace("```", "` ` `"),  # it would end the block
        "```",
        "",
        f"Software: {', '.join(f'{_text(k)} {_text(v)}' for k, v in record.versions.items())}. "
        f"Machine: {_text(record.hardware.cpu)}, {record.hardware.cores} cores, "
        + ("" if record.hardware.threads is None else f"{record.hardware.threads} threads, ")
        + f"{_text(record.hardware.device)}.",
        "",
    ]
    return "\n".join(lines)


def _rows(record: Record | RegressionRecord) -> list[tuple[str, str, float]]:
    """Name, kind and value of each figure of the card."""
    if isinstance(record, RegressionRecord):
        return [
            ("mean squared error", "mse", record.mse),
            (f"proved deviation for an input deviation of {record.delta:g}", "deviation", record.deviation),
            ("steepest slope found", "lower", record.lower),
        ]
    rows = [("clean accuracy", "accuracy", record.clean.value)]
    rows += [
        (f"certified accuracy, l2 radius {format_radius(row.eps)}", "certified_accuracy", row.share.value)
        for row in record.certified
    ]
    rows += [
        (f"{record.attack.name}, radius {format_radius(row.eps)}", "attacked_accuracy", row.share.value)
        for row in record.attacked
    ]
    return rows


def _text(value: object) -> str:
    """One line of text that Markdown shows as it is.

    >>> _text("a|b <c>")
    'a\\\\|b &lt;c&gt;'
    """
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(_line(value), quote=False))


def _line(value: object) -> str:
    return printable(" ".join(str(value).split()))  # a name with line breaks could end the front matter


def _yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).rstrip()


class RobustBenchModel(nn.Module):
    """Logits (B, K) of images (B, C, H, W) in [0, 1]; the normalisation is inside, the mode is evaluation.

    Gradients flow to the images, as attacks need; the weights are constants.

    Args:
        network: the exported network of a classifier of images.

    Raises:
        NoRuleError: not an exported network. ShapeError: one that does not take images.

    >>> import torch
    >>> net = modules.Network([nn.Flatten(), nn.Linear(4, 3)], (1, 2, 2))
    >>> RobustBenchModel(net)(torch.rand(5, 1, 2, 2)).shape
    torch.Size([5, 3])
    """

    def __init__(self, network: modules.Network) -> None:
        super().__init__()
        check_network(network, "wrap")
        if len(network.input_shape) != 3:
            raise ShapeError(f"expected a network of images (C, H, W), got input shape {network.input_shape}")
        self.network = network
        self.eval()

    def train(self, mode: bool = True) -> RobustBenchModel:
        return super().train(False)  # an exported network has no other mode

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.network(x)
        return out


def robustbench_info(record: Record) -> dict[str, Any]:
    """A run in the fields of RobustBench's model descriptions; accuracies in per cent, threat model l2.

    ``autoattack_acc``, ``reported`` and ``eps`` are None: those figures exist only after AutoAttack ran. The
    leaderboard has no column for certified accuracies: they stand in ``footnote``. ``additional_data`` says whether
    data beyond the named set were trained on, and is False. ``link`` and ``authors`` are left to fill in.
    """
    certified = ", ".join(f"{100 * row.share.value:.2f} at {format_radius(row.eps)}" for row in record.certified)
    recipe = record.recipe if isinstance(record.recipe, dict) else {}
    return {
        "link": "",
        "name": record.name,
        "authors": "",
        "additional_data": False,
        "number_forward_passes": 1,
        "dataset": record.data.name,
        "venue": "Unpublished",
        "architecture": str((recipe.get("model") or {}).get("name", "")),
        "eps": None,
        "clean_acc": f"{100 * record.clean.value:.2f}",
        "reported": None,
        "autoattack_acc": None,
        "footnote": f"Certified l2 accuracy in per cent: {certified}. Constant {upper(record.lipschitz.computed, 6)}.",
    }
