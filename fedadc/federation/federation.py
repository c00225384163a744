"""A federation: a model, clients with data, a method, and how they work together. It holds no state of a run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from fedadc.data.batches import Augment, Inputs
from fedadc.data.dataset import Clients, Dataset
from fedadc.data.partition import Partition, deal
from fedadc.engines import Engine, InProcess
from fedadc.errors import require
from fedadc.evaluate import Evaluation, Evaluator, until
from fedadc.federation.local import LocalWork, Workplace
from fedadc.federation.rounds import Round, RunState, train
from fedadc.methods import FedAvg, Method
from fedadc.models.build import probe
from fedadc.models.flat import FlatModel

Weighting = Literal["uniform", "samples"]


class Federation:
    """Clients that train one model. `rounds(n)` yields a `Round` after each of n rounds."""

    def __init__(
        self,
        *,
        model: nn.Module,
        data: Dataset,
        method: Method | None = None,
        local: LocalWork | None = None,
        clients: int | None = None,  # how many the data is dealt to; None for natural clients
        partition_by: Partition | None = None,  # None: the data's own clients, else iid
        cohort: int | float | None = None,  # how many clients a round, or which share of them; None: all
        weighting: Weighting = "uniform",
        augment: Augment | None = None,
        evaluation: Evaluation | None = None,
        seed: int = 0,
        data_seed: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        for value, kind, name in (
            (model, nn.Module, "model"),
            (data, Dataset, "data"),
            (method or FedAvg(), Method, "method"),
        ):
            require(isinstance(value, kind), f"{name} must be a {kind.__name__}, not a {type(value).__name__}.")
        self.method = method or FedAvg()
        self.data, self.seed, self.weighting = data, seed, weighting
        work, augment = local or LocalWork(), augment or Augment()
        require(weighting in ("uniform", "samples"), f"weighting is uniform or samples, not {weighting!r}.")
        require(
            not augment or len(data.input_shape) == 3,
            f"data.augment needs images [channels, height, width], not inputs of shape {list(data.input_shape)}.",
        )
        require(
            not augment or augment.crop <= min(data.input_shape[1:]),
            f"data.augment.crop is {augment.crop}, more than the images' {list(data.input_shape[1:])} pixels.",
        )
        self.method.check(work)
        held = deal(data, partition_by, clients, seed if data_seed is None else data_seed)
        self.cohort = _cohort_size(cohort, len(held))
        model = copy.deepcopy(model).cpu()  # the user's own stays as it is
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        first = Inputs(data.normalisation, dtype).gather(data.train, held.indices[:2])[0]
        probe(model, first, len(data.classes), seed)
        flat = FlatModel(model, device)
        inputs = Inputs(data.normalisation, flat.dtype, flat.device)
        self.workplace = Workplace(flat, self.method, work, data.train, held, len(data.classes), inputs, augment, seed)
        self.engine: Engine = InProcess(self.workplace)
        splits = {name: samples for name, samples in data.splits().items() if name != "train"}
        self.evaluator = Evaluator(flat, splits, inputs, len(data.classes), evaluation or Evaluation())
        self._theta = flat.theta.clone()
        self.downlink = tuple(dict.fromkeys((*self.method.downlink, *self.method.objective.downlink)))
        for name in self.downlink:
            require(
                name in self.start().server,
                f"{type(self.method.objective).__name__} needs the server's {name!r}, "
                f"which {type(self.method).__name__} does not keep.",
            )

    def start(self) -> RunState:
        """The run before its first round."""
        theta = self._theta.clone()
        return RunState(0, theta, self.method.server_state(theta), {})

    def rounds(
        self, rounds: int, start: RunState | None = None, stop_at_accuracy: float | None = None
    ) -> Iterator[Round]:
        """Train up to round `rounds`, from the beginning or from a state of an earlier round."""
        stream = train(self, rounds, start or self.start())
        return until(self.evaluator.follow(stream, rounds), stop_at_accuracy)

    @property
    def clients(self) -> Clients:
        return self.workplace.clients

    def load_state_dict(self, state: dict[str, torch.Tensor], source: str) -> None:
        """Start from given weights instead of the module's own."""
        self.workplace.model.load_state_dict(state, source)
        self._theta = self.workplace.model.theta.clone()

    def state_dict(self, state: RunState) -> dict[str, torch.Tensor]:
        """The model of a state, for `load_state_dict` of your own module."""
        return self.workplace.model.state_dict(state.theta)


def _cohort_size(cohort: int | float | None, clients: int) -> int:
    if cohort is None:
        return clients
    if isinstance(cohort, float):
        require(0 < cohort <= 1, f"cohort.ratio must lie in (0, 1], not {cohort}.")
        return max(1, round(cohort * clients))
    require(cohort >= 1, f"cohort.size must be at least 1, not {cohort}.")
    require(cohort <= clients, f"cohort.size is {cohort}, but there are only {clients} clients.")
    return cohort
