"""The table of models by config name. A model is an `nn.Module` with a method `embed(x)` and a module `head`."""

from __future__ import annotations

from torch import nn

from fedadc.models.cnn import CNN
from fedadc.models.flat import FlatModel
from fedadc.models.mlp import MLP, Logistic
from fedadc.models.resnet import ResNet18

MODELS: dict[str, type[nn.Module]] = {"mlp": MLP, "logistic": Logistic, "cnn": CNN, "resnet18": ResNet18}

__all__ = ["CNN", "MLP", "MODELS", "FlatModel", "Logistic", "ResNet18"]
