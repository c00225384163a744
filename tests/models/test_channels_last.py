"""The memory format of images: it affects the bits of a result, and the faster one is chosen automatically."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedadc.config.build import prepare
from fedadc.data import Normalization, from_arrays
from fedadc.data.batches import Inputs
from fedadc.data.dataset import Samples
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.models import CNN, MLP
from fedadc.runs.record import load_config
from fedadc.views.local_work import LocalWork


def images(channels: int = 3) -> Any:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, channels, 8, 8), dtype=np.uint8)
    return from_arrays(x, np.arange(40) % 4)


class Viewing(nn.Module):
    """A common way to write models, which works with the default format only."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.convolution(x).view(len(x), -1))


class Stride(nn.Module):
    """Returns other logits for the same images in another format."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).flatten(1) * x.stride(1)


def chosen(model: nn.Module, data: Any = None, **kw: Any) -> bool:
    return Federation(model=model, data=data or images(), clients=4, **kw).agreement.inputs.channels_last


def test_only_models_with_convolutions_get_channels_last() -> None:
    assert chosen(CNN((3, 8, 8), 4, channels=[4, 8], hidden=[8]))
    assert not chosen(MLP((3, 8, 8), 4, [6]))
    assert not chosen(Viewing()) and not chosen(Stride())
    assert not chosen(CNN((3, 8, 8), 4, channels=[4, 8], hidden=[8]), channels_last=False)
    assert chosen(MLP((3, 8, 8), 4, [6]), channels_last=True)


def test_channels_last_is_refused_where_it_does_not_work() -> None:
    with pytest.raises(FedadcError, match="Viewing fails on a batch"):
        chosen(Viewing(), channels_last=True)
    table = from_arrays(np.zeros((8, 5), dtype=np.float32), np.arange(8) % 2)
    with pytest.raises(FedadcError, match=r"channels_last is for images"):
        chosen(MLP((5,), 2, [3]), data=table, channels_last=True)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("raw", ["planes", "pixels", "a slice"])
def test_strides_are_always_the_same(channels: int, raw: str) -> None:
    x = torch.randint(0, 256, (10, channels, 6, 8), dtype=torch.uint8)
    if raw == "pixels":
        x = x.to(memory_format=torch.channels_last)
    if raw == "a slice":
        x = torch.cat([x, x], dim=3)[..., :8]
    samples = Samples(x, torch.arange(10))
    planes, pixels = (
        Inputs(Normalization(scale=255.0), channels_last=last).gather(samples, np.array([7, 2, 2]))[0]
        for last in (False, True)
    )
    assert planes.stride() == (channels * 48, 48, 8, 1) and pixels.stride() == (
        channels * 48,
        1,
        8 * channels,
        channels,
    )
    assert torch.equal(planes, pixels) and torch.equal(planes, x[[7, 2, 2]] / 255)


def test_both_formats_learn_the_same_to_rounding() -> None:
    torch.manual_seed(0)
    model = CNN((3, 8, 8), 4, channels=[4, 8], hidden=[8]).double()
    settings: dict[str, Any] = {"data": images(), "clients": 4, "local": LocalWork(steps=3, batch_size=5, lr=0.01)}
    thetas = [
        list(Federation(model=model, channels_last=last, **settings).rounds(2))[-1].state.theta
        for last in (True, False)
    ]
    assert torch.allclose(*thetas, rtol=0, atol=1e-12)


def test_a_runs_config_records_the_format() -> None:
    tree = {
        "rounds": 1,
        "data": {"name": "digits", "clients": 5},
        "model": {"name": "cnn", "channels": [4], "hidden": [4]},
    }
    for given, resolved in ((None, True), (True, True), (False, False)):
        config = load_config({**tree, "model": {**tree["model"], "channels_last": given}})  # type: ignore[dict-item]
        assert prepare(config).config.model.channels_last is resolved
    assert prepare(load_config({**tree, "model": "mlp"})).config.model.channels_last is False
