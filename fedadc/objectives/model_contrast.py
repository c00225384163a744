"""Model-contrastive learning, the loss of MOON (Li, He and Song, CVPR 2021).

L = CE + mu · contrast (its eq. 4), contrast = -log(exp(s_glob) / (exp(s_glob) + exp(s_prev))) (eq. 3). s is a cosine
similarity over the temperature: s_glob between the client's representation z and that of the received global model,
s_prev between z and that of the client's own model after its previous round. z is the output of a projection head, and
the classifier's input, so the model needs a projection head (`model.projection`). In its first round a client uses the
received model as its previous one, which makes the contrast constant; the authors' code uses a random network instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedadc.data.batches import Batch
from fedadc.errors import require
from fedadc.models.flat import FlatModel
from fedadc.models.vectors import State
from fedadc.objectives.base import Objective, require_temperature, require_weight
from fedadc.views.local import Local
from fedadc.views.setup import Setup


@dataclass(frozen=True, kw_only=True)
class ModelContrast(Objective):
    """Cross-entropy, plus a contrast: features close to the global model's, far from the client's previous ones."""

    mu: float = 1.0  # μ, the weight of the contrast
    tau: float = 0.5  # the temperature of the cosines

    task: ClassVar[str] = "classification"
    paper: ClassVar[str] = "Li et al., CVPR 2021"
    computation: ClassVar[str] = "2 forward passes / round"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_weight("mu", self.mu)
        require_temperature("tau", self.tau)

    @property
    def asks_the_global_model(self) -> bool:
        return self.mu > 0

    def check(self, setup: Setup) -> None:
        model = setup.model
        model.part("head")  # raises an error if the model has no head
        name = type(model.module).__name__
        require(
            getattr(model.module, "projection", None) is not None,
            f"objective model_contrast needs a projection head, which this {name} lacks; set model.projection, e.g. to "
            "256, for mlp, cnn or resnet18 (in your own model, add a module `projection` as the last step of `embed`).",
        )
        require(
            model.is_head_of_embed(setup.example),
            f"objective model_contrast trains head(embed(x)), but forward(x) of {name} returns something else.",
        )

    def __call__(self, model: FlatModel, batch: Batch, local: Local) -> Tensor:
        z = model.embed(batch.x)
        cross_entropy = F.cross_entropy(model.head(z), batch.y)
        if self.mu == 0 or torch.equal(local.client["previous"], local.start):  # then the contrast is log 2 for every z
            return cross_entropy + self.mu * math.log(2)
        z_glob = local.per_sample("z_glob", batch, lambda b: model.features(local.start, b.x))
        z_prev = local.per_sample("z_prev", batch, lambda b: model.features(local.client["previous"], b.x))
        s_glob, s_prev = (F.cosine_similarity(z, other, dim=1) / self.tau for other in (z_glob, z_prev))
        contrast = -F.logsigmoid(s_glob - s_prev)  # log σ(a - b) = log(e^a / (e^a + e^b))
        return cross_entropy + self.mu * contrast.mean()

    def client_state(self, theta: Tensor) -> State:
        return {"previous": theta}

    def remember(self, theta: Tensor, local: Local) -> State:
        return {"previous": theta}
