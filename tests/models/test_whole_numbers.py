"""Models that take whole numbers, such as the indices of an embedding, receive them as int64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedadc.data import from_arrays
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.views.local_work import LocalWork

WORDS = 50


class BagOfWords(nn.Module):
    """The mean of the words' vectors, and a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.head = nn.Linear(6, 2)

    def embed(self, x: Tensor) -> Tensor:
        return self.words(x).mean(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def sentences(dtype: Any = np.int64) -> tuple[Any, Any]:
    """Sentences of eight words; those of class 1 use more of the later words."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=300)
    return rng.integers(0, 40, size=(300, 8)).astype(dtype) + 10 * y[:, None].astype(dtype), y


def trained(dtype: Any) -> tuple[Federation, Any]:
    x, y = sentences(dtype)
    torch.manual_seed(0)
    data = from_arrays(x, y, owners=np.arange(300) % 6)
    federation = Federation(model=BagOfWords(), data=data, local=LocalWork(epochs=3, batch_size=10, lr=1.0))
    return federation, list(federation.rounds(15))[-1]


def test_indices_reach_an_embedding() -> None:
    federation, last = trained(np.int64)
    x, _ = federation.agreement.inputs.gather(federation.data.train, np.arange(3))
    assert x.dtype == torch.int64 and federation.agreement.example.dtype == torch.int64
    assert last.metrics["test_accuracy"] > 0.85
    logits = federation.predict(last.state, sentences()[0][:5])
    model = BagOfWords()
    model.load_state_dict(federation.state_dict(last.state))
    with torch.no_grad():
        assert torch.allclose(logits, model(torch.from_numpy(sentences()[0][:5])), atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.float32])
def test_the_type_of_the_numbers_changes_no_bit(dtype: Any) -> None:
    assert torch.equal(trained(np.int64)[1].state.theta, trained(dtype)[1].state.theta)


def test_other_models_still_get_floating_point_numbers() -> None:
    x, y = sentences()
    federation = Federation(model=nn.Linear(8, 2), data=from_arrays(x, y), clients=3)
    assert federation.agreement.example.dtype == torch.float32


@pytest.mark.parametrize(("value", "words"), [(3.5, "has 3.5"), (2.0**25, "up to 16777216")])
def test_numbers_that_are_no_indices_are_named(value: float, words: str) -> None:
    x, y = sentences(np.float32)
    x[200, 3] = value
    with pytest.raises(FedadcError, match=words):
        Federation(model=BagOfWords(), data=from_arrays(x, y), clients=3, test=0)


def test_an_index_that_the_embedding_lacks_is_named() -> None:
    x, y = sentences()
    x[0, 0] = WORDS
    with pytest.raises(FedadcError, match="fails on a batch of shape"):
        Federation(model=BagOfWords(), data=from_arrays(x, y), clients=3, test=0)
