"""FlatModel: views, frozen and tied parameters, buffers, parts, saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedadc.errors import FedadcError
from fedadc.models import CNN, MLP, FlatModel, Logistic, ResNet18
from fedadc.models.build import construct, probe, read_weights
from fedadc.tasks import Classification


class Tied(nn.Module):
    """Two layers that share one weight, beside a frozen one and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.fixed = nn.Linear(6, 6)
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.head = nn.Linear(6, 3)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(self.fixed(x * self.scale))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


class HeadFirst(nn.Module):
    """The head is registered before the body."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.body = nn.Linear(5, 4)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_frozen_parameters_stay_out_and_tied_weights_have_one_slot() -> None:
    assert FlatModel(Tied()).theta.numel() == 36 + 6 + 6 + (18 + 3)


def test_gradient_is_the_one_of_autograd() -> None:
    torch.manual_seed(0)
    module, x, y = Tied().double(), torch.randn(9, 6).double(), torch.randint(3, (9,))
    nn.functional.cross_entropy(module(x), y).backward()
    expected = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    flat = FlatModel(module)
    for _ in range(2):  # the second time from a dirty buffer
        g, _ = flat.gradient_of(lambda: nn.functional.cross_entropy(flat(x), y), flat.theta.clone())
    found = flat._views(g)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-15), name
    assert torch.equal(g, flat.gradient) and all(p.grad is None for p in flat.module.parameters())


def test_predict_runs_another_theta_and_changes_nothing() -> None:
    torch.manual_seed(0)
    flat = FlatModel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    before, x = flat.theta.clone(), torch.randn(5, 4)
    other = torch.randn_like(before)
    logits = flat.predict(other, x)
    assert torch.equal(flat.theta, before) and flat.module.training and not logits.requires_grad
    assert torch.equal(flat.predict(other, x), logits)  # evaluation mode: no dropout
    flat.theta.copy_(other)
    assert torch.equal(flat.module.eval()(x), logits)


@pytest.mark.parametrize("make", [HeadFirst, Tied])
def test_head_is_the_last_slice(make: type[nn.Module]) -> None:
    flat = FlatModel(make())
    head = torch.cat([p.detach().reshape(-1) for p in flat.module.head.parameters()])  # type: ignore[union-attr]
    assert torch.equal(flat.theta[flat.part("head")], head)
    assert flat.theta[flat.part("embed")].numel() + head.numel() == flat.theta.numel()
    x = torch.randn(3, 5 if make is HeadFirst else 6)
    assert torch.equal(flat.module.head(flat.module.embed(x)), flat(x))  # type: ignore[operator, union-attr]


def test_a_module_without_the_split_says_what_it_needs() -> None:
    with pytest.raises(FedadcError, match="`embed` and `head`"):
        FlatModel(nn.Sequential(nn.Linear(3, 2))).part("head")


def test_saved_model_loads_into_the_users_own_module(tmp_path: Path) -> None:
    flat = FlatModel(Tied())
    theta = torch.randn_like(flat.theta)
    save_file(flat.state_dict(theta), tmp_path / "model.safetensors")

    own = Tied()
    own.load_state_dict(load_file(tmp_path / "model.safetensors"))

    x = torch.randn(4, 6)
    assert torch.equal(own.eval()(x), flat.predict(theta, x))


def test_loading_keeps_the_buffers_and_names_what_does_not_fit(tmp_path: Path) -> None:
    flat, other = FlatModel(Tied()), FlatModel(Tied())
    where = flat.theta.data_ptr()
    flat.load_state_dict(other.state_dict(other.theta), "file")
    assert torch.equal(flat.theta, other.theta) and flat.theta.data_ptr() == where
    state = other.state_dict(other.theta)
    for broken, word in (
        ({k: v for k, v in state.items() if k != "head.bias"}, "lacks head.bias"),
        ({**state, "extra": torch.zeros(1)}, "the model does not have extra"),
        ({**state, "head.bias": torch.zeros(4)}, "the shape differs in head.bias"),
        ({**state, "head.bias": state["head.bias"].long()}, "the kind of number .* differs in head.bias"),
        (
            {**state, "head.bias": state["head.bias"].double() * 0 + 1e300},
            "too large for .* type in head.bias",
        ),
    ):
        with pytest.raises(FedadcError, match=word):
            flat.load_state_dict(broken, "file")
    (tmp_path / "junk").write_bytes(b"\x00" * 50)
    for path in (tmp_path / "junk", tmp_path / "absent"):
        with pytest.raises(FedadcError, match=path.name):
            read_weights(path)


def test_models_that_cannot_be_flat_are_refused() -> None:
    with pytest.raises(FedadcError, match="frozen"):
        FlatModel(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(FedadcError, match="one floating-point type"):
        FlatModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize("module", [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), Counting()])
def test_changing_buffers_are_refused_with_the_remedy(module: nn.Module) -> None:
    before = {n: b.clone() for n, b in module.named_buffers()}
    with pytest.raises(FedadcError, match="GroupNorm"):
        probe(module, torch.randn(2, 4), Classification(3))
    assert all(torch.equal(b, before[n]) for n, b in module.named_buffers())


def test_constant_buffers_are_kept() -> None:
    probe(Tied(), torch.randn(2, 6), Classification(3))


@pytest.mark.parametrize(
    ("module", "word"),
    [(nn.Linear(5, 3), "fails on a batch"), (nn.Linear(4, 2), r"\[2, 3\]"), (nn.LSTM(4, 3), "returned tuple")],
)
def test_wrong_shapes_are_named(module: nn.Module, word: str) -> None:
    with pytest.raises(FedadcError, match=word):
        probe(module, torch.randn(2, 4), Classification(3))


@pytest.mark.parametrize(
    ("module", "parameters"),
    [
        (CNN((3, 32, 32), 10), 2_513_418),  # the paper's, docs/deviations.md 5
        (ResNet18((3, 32, 32), 100), 11_220_132),  # He et al.'s CIFAR form, GroupNorm in BatchNorm's place
        (MLP((1, 8, 8), 10), 64 * 64 + 64 + 64 * 64 + 64 + 650),
        (Logistic((5,), 3), 18),
    ],
)
def test_sizes(module: nn.Module, parameters: int) -> None:
    assert FlatModel(module).theta.numel() == parameters


def test_pooling_before_relu_is_the_same_function() -> None:
    module = CNN((3, 32, 32), 10, width=0.1)
    x = reference = torch.randn(2, 3, 32, 32)
    for convolution in module.convolutions:
        reference = nn.functional.max_pool2d(nn.functional.relu(convolution(reference)), 2)
    reference = reference.flatten(1)
    for layer in module.layers:
        reference = nn.functional.relu(layer(reference))
    assert torch.equal(module(x), module.head(reference))


@pytest.mark.parametrize(
    ("make", "options"), [(CNN, {"width": 0.125}), (ResNet18, {"width": 8}), (MLP, {"hidden": []}), (Logistic, {})]
)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_built_in_models_run_on_images_and_their_split_holds(make: Any, options: dict[str, Any], shape: Any) -> None:
    module = construct(make, options, shape, 7, seed=0, init="kaiming")
    x = torch.randn(2, *shape)
    probe(module, x, Classification(7))
    assert torch.equal(module(x), module.head(module.embed(x)))  # type: ignore[operator, union-attr]


def test_initialization_is_seeded_and_kaiming_has_its_variances() -> None:
    first, same, other = (construct(CNN, {}, (3, 32, 32), 10, seed, "kaiming") for seed in (1, 1, 2))
    assert torch.equal(FlatModel(first).theta, FlatModel(same).theta)
    assert not torch.equal(FlatModel(first).theta, FlatModel(other).theta)
    convolution, layer = first.convolutions[2], first.layers[3]  # type: ignore[index]
    assert float(convolution.weight.detach().std()) == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)  # fan-out
    assert float(layer.weight.detach().std()) == pytest.approx((2 / 512) ** 0.5, rel=0.02)  # fan-in
    assert not convolution.bias.any() and not layer.bias.any()


@pytest.mark.parametrize(
    ("make", "options", "shape", "word"),
    [
        (CNN, {}, (1, 8, 8), "at least 16×16"),
        (CNN, {}, (64,), "takes images"),
        (CNN, {"width": -1.0}, (3, 32, 32), "width"),
        (ResNet18, {"width": 48}, (3, 32, 32), "groups"),
        (MLP, {"hidden": [0]}, (4,), "positive"),
        (MLP, {"hiden": [3]}, (4,), "did you mean 'hidden'"),
        (MLP, {"classes": 3}, (4,), "comes from the data"),
        (nn.Linear, {}, (4,), "needs in_features, out_features"),
        (nn.Linear, {"in_features": "a", "out_features": 2}, (4,), "failed"),
    ],
)
def test_impossible_models_are_one_sentence(make: Any, options: dict[str, Any], shape: Any, word: str) -> None:
    with pytest.raises(FedadcError, match=word):
        construct(make, options, shape, 3, seed=0)


class Dropping(nn.Module):
    """Features through dropout; a batch of three raises an error, after dropout was applied."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 32)
        self.head = nn.Linear(32, 3)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        features = nn.functional.dropout(self.body(x), 0.5, self.training)
        if len(x) == 3:
            raise ArithmeticError("three")
        return features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_embed_and_head_are_the_two_halves_of_a_call_with_gradients() -> None:
    torch.manual_seed(0)
    flat, x = FlatModel(HeadFirst()), torch.randn(6, 5)
    z = flat.embed(x)
    assert torch.equal(flat.head(z), flat(x)) and z.shape == (6, 4) and z.requires_grad
    whole, _ = flat.gradient_of(lambda: flat(x).square().mean(), flat.theta.clone())
    whole = whole.clone()
    halves, _ = flat.gradient_of(lambda: flat.head(flat.embed(x)).square().mean(), flat.theta.clone())
    assert torch.equal(whole, halves) and whole.any()


def test_embed_is_in_training_mode_and_features_are_not() -> None:
    torch.manual_seed(0)
    flat, x = FlatModel(Dropping()), torch.ones(5, 4)
    assert not torch.equal(flat.embed(x), flat.embed(x))  # dropout draws
    assert torch.equal(flat.features(flat.theta, x), flat.features(flat.theta, x))


def test_features_run_another_theta_frozen_and_change_nothing() -> None:
    torch.manual_seed(0)
    flat, x = FlatModel(Dropping()), torch.randn(5, 4)
    before, other = flat.theta.clone(), torch.randn_like(flat.theta)
    where, drawn = flat.theta.data_ptr(), torch.get_rng_state()
    features = flat.features(other, x)
    assert not features.requires_grad and not flat.gradient.any()
    assert torch.equal(flat.theta, before) and flat.theta.data_ptr() == where
    assert all(module.training for module in flat.module.modules()) and torch.equal(torch.get_rng_state(), drawn)
    body = flat.state_dict(other)
    assert torch.allclose(features, x @ body["body.weight"].T + body["body.bias"], atol=1e-6)
    assert torch.equal(flat.predict(other, x), features @ body["head.weight"].T + body["head.bias"])


@pytest.mark.parametrize("ask", ["features", "predict"])
def test_a_forward_that_raises_changes_nothing_either(ask: str) -> None:
    flat = FlatModel(Dropping())
    before = flat.theta.clone()
    with pytest.raises(ArithmeticError, match="three"):
        getattr(flat, ask)(torch.zeros_like(before), torch.ones(3, 4))
    assert torch.equal(flat.theta, before) and all(module.training for module in flat.module.modules())
    assert torch.is_grad_enabled() and flat(torch.ones(2, 4)).requires_grad


class Prior(nn.Module):
    """The same logits for every input: a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(x), -1)


def test_predictions_of_a_frozen_model_do_not_follow_theta() -> None:
    logits = FlatModel(Prior()).predict(torch.ones(3), torch.zeros(2, 1))
    assert torch.equal(logits, torch.ones(2, 3)) and not logits.requires_grad
