"""lipkit's layers inside other packages' loops, as docs/works_with.md lists them: each trains, then the gain is proved.

``pip install -c constraints.txt -e ".[works-with]" && pytest tests/works_with`` runs all; what is not there is skipped.
Other packages' warnings are theirs, not errors here.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lipkit

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def network(inputs: int = 4, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = lipkit.layers
    return nn.Sequential(layers.CayleyLinear(inputs, 8), layers.MaxMin(), layers.CayleyLinear(8, outputs))


def assert_trained(model: nn.Module, start: nn.Module | None = None, inputs: int = 4) -> None:
    """The weights moved, and the exported network's proved constant is still 1."""
    start = network(inputs, model[-1].out_features) if start is None else start  # type: ignore[index]
    assert any((a != b).any() for a, b in zip(model.parameters(), start.parameters(), strict=True))
    assert 0.9 < lipkit.lipschitz(lipkit.export(model.cpu().eval(), (inputs,))) <= 1 + 1e-5


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(X), Y)


def test_plain_loop() -> None:
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    before = loss_of(model).item()
    for _ in range(10):
        optimiser.zero_grad()
        loss_of(model).backward()
        optimiser.step()
    assert loss_of(model).item() < before
    assert_trained(model)


def test_deepcopy_and_pickle() -> None:
    model = network()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = model(X)
        assert torch.equal(twin(X), before)
        with torch.no_grad():
            next(twin.parameters()).mul_(3.0).add_(1.0)  # a copy shares nothing with its original
        assert torch.equal(model(X), before)
        assert not torch.equal(twin(X), before)


def test_vmap_over_an_ensemble() -> None:
    models = [network() for _ in range(3)]
    with torch.no_grad():
        for k, model in enumerate(models):
            for p in model.parameters():
                p.add_(0.1 * k)
    stacked, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    one = copy.deepcopy(models[0])
    out = torch.vmap(lambda p, b, x: torch.func.functional_call(one, (p, b), (x,)), (0, 0, None))(stacked, buffers, X)
    for y, model in zip(out, models, strict=True):
        torch.testing.assert_close(y, model(X), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_torch_compile() -> None:
    model = network()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(X), model(X), rtol=1e-5, atol=1e-6)


def test_lightning_trainer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    task, data = Task(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 16)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **quiet).fit(task, data)
    assert_trained(task.model)


def test_hugging_face_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.model(x)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    task = Task()
    options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    settings = transformers.TrainingArguments(tmp_path, num_train_epochs=1, learning_rate=0.01, **options)
    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
    transformers.Trainer(task, settings, train_dataset=data).train()
    assert_trained(task.model)


def test_hugging_face_hub_mixin(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")

    class Model(nn.Module, hub.PyTorchModelHubMixin, library_name="lipkit"):  # type: ignore[misc, name-defined, call-arg]
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.layer = lipkit.layers.CayleyLinear(4, width)

    model = Model(width=6)
    model.save_pretrained(tmp_path)
    again = Model.from_pretrained(tmp_path)
    assert torch.equal(again.layer(X), model.layer(X))
    assert "library_name: lipkit" in (tmp_path / "README.md").read_text()


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model, start = network(), network()
    model, optimiser = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    accelerator.backward(loss_of(model))
    optimiser.step()
    assert_trained(accelerator.unwrap_model(model), start)


def test_skorch_in_a_grid_search() -> None:
    skorch = pytest.importorskip("skorch")
    selection = pytest.importorskip("sklearn.model_selection")
    net = skorch.NeuralNetClassifier(
        network, criterion=nn.CrossEntropyLoss, max_epochs=2, optimizer=torch.optim.Adam, verbose=0
    )
    search = selection.GridSearchCV(net, {"lr": [1e-3, 1e-2]}, cv=2).fit(X.numpy(), Y.numpy())
    assert search.best_score_ > 0.3
    assert_trained(search.best_estimator_.module_)


@pytest.mark.parametrize("algorithm", ["PPO", "SAC"])
def test_stable_baselines3(algorithm: str) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    torch_layers = pytest.importorskip("stable_baselines3.common.torch_layers")

    class Features(torch_layers.BaseFeaturesExtractor):  # type: ignore[misc, name-defined]
        def __init__(self, space: Any) -> None:
            super().__init__(space, features_dim=2)
            self.model = network(space.shape[0], 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    settings: dict[str, Any] = {"n_steps": 32, "batch_size": 16} if algorithm == "PPO" else {"learning_starts": 16}
    policy = {"features_extractor_class": Features}
    agent = getattr(sb3, algorithm)("MlpPolicy", "Pendulum-v1", policy_kwargs=policy, device="cpu", **settings)
    agent.learn(48)
    part = agent.policy if algorithm == "PPO" else agent.actor
    assert_trained(part.features_extractor.model, inputs=3)


def test_tensordict_module() -> None:
    tensordict = pytest.importorskip("tensordict")
    nn_ = pytest.importorskip("tensordict.nn")
    model = network()
    policy = nn_.TensorDictModule(model, in_keys=["observation"], out_keys=["action"])
    out = policy(tensordict.TensorDict({"observation": X}, batch_size=[len(X)]))
    assert torch.equal(out["action"], model(X))


def test_torchrl_actor() -> None:
    modules = pytest.importorskip("torchrl.modules")
    tensordict = pytest.importorskip("tensordict")
    model = network()
    actor = modules.Actor(model, in_keys=["observation"])
    out = actor(tensordict.TensorDict({"observation": X}, batch_size=[len(X)]))
    assert torch.equal(out["action"], model(X))


def test_opacus() -> None:
    opacus = pytest.importorskip("opacus")
    model, start = network(), network()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 16)
    engine, optimiser = opacus.PrivacyEngine(), torch.optim.SGD(model.parameters(), lr=0.1)
    private, optimiser, data = engine.make_private(
        module=model,
        optimizer=optimiser,
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="functorch",
    )
    for x, y in data:
        optimiser.zero_grad()
        nn.functional.cross_entropy(private(x), y).backward()
        optimiser.step()
    assert engine.get_epsilon(1e-5) > 0
    assert_trained(private.to_standard_module(), start)


def test_pot() -> None:
    """A critic with a proved constant is a lower bound of the exact W1 that POT computes."""
    ot = pytest.importorskip("ot")
    a, b = X[:32].double(), X[32:].double() + 1
    exact = ot.emd2(np.full(32, 1 / 32), np.full(32, 1 / 32), torch.cdist(a, b).numpy())
    plain = lipkit.export(network(4, 1).double(), (4,))
    lower = abs(float(plain(a).mean() - plain(b).mean())) / lipkit.lipschitz(plain)
    assert 0 < lower <= exact * (1 + 1e-9)


def test_deepinv_plug_and_play() -> None:
    """A 1-Lipschitz denoiser as the prior of a proximal gradient method."""
    deepinv = pytest.importorskip("deepinv")
    optim = pytest.importorskip("deepinv.optim")
    torch.manual_seed(0)
    conv = nn.Sequential(
        lipkit.layers.CayleyConv2d(1, 8, 3), lipkit.layers.MaxMin(), lipkit.layers.CayleyConv2d(8, 1, 3)
    )

    class Denoiser(nn.Module):
        def forward(self, x: torch.Tensor, sigma: Any = None) -> torch.Tensor:
            return conv(x)

    image = torch.rand(1, 1, 8, 8)
    physics = deepinv.physics.Denoising(deepinv.physics.GaussianNoise(0.1))
    model = optim.PGD(data_fidelity=optim.L2(), prior=optim.PnP(denoiser=Denoiser()), stepsize=0.9, max_iter=5)
    with torch.no_grad():
        assert torch.isfinite(model(physics(image), physics)).all()


def test_mapie() -> None:
    mapie = pytest.importorskip("mapie.classification")
    skorch = pytest.importorskip("skorch")
    x, y = X.numpy(), Y.numpy()
    net = skorch.NeuralNetClassifier(
        network, criterion=nn.CrossEntropyLoss, max_epochs=5, optimizer=torch.optim.Adam, verbose=0
    )
    net.set_params(lr=0.01).fit(x[:32], y[:32])
    sets = mapie.SplitConformalClassifier(net, confidence_level=0.9, prefit=True).conformalize(x[32:], y[32:])
    assert sets.predict_set(x[32:])[1][..., 0].shape == (32, 2)
    assert_trained(net.module_)
