"""MOON's projection heads: their place in each model, their size, and that the classifier follows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedadc.config.build import prepare
from fedadc.errors import FedadcError
from fedadc.models import CNN, MLP, MODELS, FlatModel, ResNet18
from fedadc.models.build import construct, probe
from fedadc.models.classifier import Classifier
from fedadc.runs.record import load_config
from fedadc.tasks import Classification

IMAGE = (3, 32, 32)
SMALL: dict[str, tuple[type[Classifier], dict[str, Any], int]] = {  # class, settings, width before the projection
    "mlp": (MLP, {"hidden": [12, 9]}, 9),
    "mlp without layers": (MLP, {"hidden": []}, 3 * 32 * 32),
    "cnn": (CNN, {"width": 0.125}, 64),
    "resnet18": (ResNet18, {"width": 8}, 64),
}


def small(name: str, **more: Any) -> Classifier:
    torch.manual_seed(0)
    make, settings, _ = SMALL[name]
    return make(input_shape=IMAGE, classes=7, **settings, **more)


def linear(module: nn.Module) -> list[tuple[int, int]]:
    return [(m.in_features, m.out_features) for m in module.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("name", SMALL)
def test_a_projection_is_two_layers_and_the_classifier_sits_on_it(name: str) -> None:
    model, width = small(name, projection=5), SMALL[name][2]
    assert isinstance(model.projection, nn.Sequential)
    assert [type(layer) for layer in model.projection] == [nn.Linear, nn.ReLU, nn.Linear]
    assert linear(model.projection) == [(width, width), (width, 5)] and linear(model.head) == [(5, 7)]
    seen: dict[str, Tensor] = {}
    model.projection.register_forward_hook(lambda module, inputs, output: seen.update(z=output))
    model.head.register_forward_hook(lambda module, inputs, output: seen.update(given=inputs[0]))
    x = torch.randn(3, *IMAGE)
    logits = model(x)
    assert seen["given"] is seen["z"] and seen["z"].shape == (3, 5) and (seen["z"] < 0).any()  # no ReLU at its end
    assert torch.equal(model.embed(x), seen["z"]) and torch.equal(logits, model.head(model.embed(x)))


@pytest.mark.parametrize("name", SMALL)
def test_without_one_the_classifier_sits_on_the_features(name: str) -> None:
    model = small(name)
    assert model.projection is None and linear(model.head) == [(SMALL[name][2] if name != "cnn" else 128, 7)]
    assert not any("projection" in key for key in model.state_dict())


def through_projection(model: Classifier, x: Tensor) -> Tensor:
    first, _, second = model.projection  # type: ignore[misc]
    return F.linear(F.relu(F.linear(x, first.weight, first.bias)), second.weight, second.bias)


def test_the_cnns_projection_follows_average_pooling_and_replaces_its_layers() -> None:
    model = small("cnn", projection=5)
    assert isinstance(model, CNN)
    assert len(model.layers) == 0 and linear(model) == [(64, 64), (64, 5), (5, 7)]
    x = images = torch.randn(2, *IMAGE)
    for convolution in model.convolutions:
        x = F.max_pool2d(F.relu(convolution(x)), 2)
    assert x.shape == (2, 64, 2, 2)
    assert torch.allclose(model.embed(images), through_projection(model, x.sum(dim=(2, 3)) / 4), atol=1e-6)
    assert FlatModel(model).theta.numel() == FlatModel(CNN((3, 48, 64), 7, width=0.125, projection=5)).theta.numel()


def test_the_other_models_keep_all_they_have_below_the_projection() -> None:
    for name in ("mlp", "resnet18"):
        with_head, without = small(name, projection=5), small(name)
        own = {k: v for k, v in with_head.state_dict().items() if not k.startswith(("projection", "head"))}
        without.load_state_dict({**without.state_dict(), **own})
        x = torch.randn(2, *IMAGE)
        assert own.keys() == {k for k in without.state_dict() if not k.startswith("head")}
        assert torch.allclose(with_head.embed(x), through_projection(with_head, without.embed(x)), atol=1e-6)


RESNET18_TO_THE_POOLING = 11_220_132 - (512 * 100 + 100)  # He et al.'s, less its classifier


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (MLP((5,), 4, [6], projection=3), (5 * 6 + 6) + (6 * 6 + 6) + (6 * 3 + 3) + (3 * 4 + 4)),
        (
            CNN(IMAGE, 10, projection=256),
            (3 * 9 * 64 + 64) + (64 * 9 * 128 + 128) + (128 * 9 * 256 + 256) + (256 * 9 * 512 + 512)  # convolutions
            + (512 * 512 + 512) + (512 * 256 + 256) + (256 * 10 + 10),
        ),
        (
            ResNet18(IMAGE, 100, projection=256),
            RESNET18_TO_THE_POOLING + (512 * 512 + 512) + (512 * 256 + 256) + (256 * 100 + 100),
        ),
    ],
    ids=["mlp", "cnn", "resnet18"],
)  # fmt: skip
def test_sizes_with_a_projection(model: nn.Module, parameters: int) -> None:
    assert FlatModel(model).theta.numel() == parameters


def test_the_projection_is_initialized_like_the_other_layers() -> None:
    model: Any = construct(CNN, {"projection": 256}, IMAGE, 10, seed=0, init="kaiming")
    probe(model, torch.randn(2, *IMAGE), Classification(10))
    for layer in (model.projection[0], model.projection[2]):
        assert float(layer.weight.detach().std()) == pytest.approx((2 / 512) ** 0.5, rel=0.02)
        assert not layer.bias.any()


def error_message(model: dict[str, Any]) -> str:
    size = {"data": {"name": "digits", "clients": 5}, "rounds": 1}
    with pytest.raises(FedadcError) as caught:
        prepare(load_config({**size, "model": model}))
    return str(caught.value)


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet18"])
@pytest.mark.parametrize("bad", [0, -3, "wide", 2.5, True, [8]])
def test_impossible_projections_are_one_sentence(name: str, bad: Any) -> None:
    sentence = error_message({"name": name, "projection": bad, **({"channels": [4, 8]} if name == "cnn" else {})})
    assert sentence.startswith("model.projection") and repr(bad) in sentence and "\n" not in sentence
    assert sentence.count(". ") == 0 and sentence.endswith(".")


@pytest.mark.parametrize("bad", [0, -3])
@pytest.mark.parametrize("name", SMALL)
def test_python_users_get_the_same_sentence(name: str, bad: int) -> None:
    with pytest.raises(FedadcError, match=rf"^model\.projection must be a positive width, not {bad}\.$"):
        small(name, projection=bad)


def test_logistic_regression_has_no_projection() -> None:
    assert error_message({"name": "logistic", "projection": 8}).startswith("model: key 'projection' is unknown")
    assert set(MODELS) == {"mlp", "logistic", "cnn", "resnet18"}, "every other model is tested above"
