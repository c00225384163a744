"""Every method, any number of workers: the same model and the same metrics.jsonl, byte for byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedadc.config.build import prepare
from fedadc.engines.blocks import grouped
from fedadc.methods import METHODS, PAIRS
from fedadc.runs.record import load_config
from fedadc.runs.runner import run
from fedadc.training.aggregate import BLOCK_LENGTH
from fedadc.training.messages import ClientTask
from fedadc.training.rounds import train

CONFIG: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 40, "partition": {"name": "dirichlet", "alpha": 1.0}},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1, "weight_decay": 1e-3},
    "cohort": {"size": 37},  # whole blocks for up to three workers, and a rest
    "evaluate": {"batch_size": 100},
}


def files(config: dict[str, Any], out: Path, workers: int) -> dict[str, bytes]:
    """What a run leaves, without the time it took."""
    run(config, out=out, workers=workers)
    assert json.loads((out / "environment.json").read_text())["workers"] == workers
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]
    timeless = [re.sub(r'"seconds": [^,}]*', "", line) for line in lines]
    models = {path.name: path.read_bytes() for path in sorted(out.glob("model*.safetensors"))}
    return {"metrics": "\n".join(timeless).encode(), **models}


@pytest.mark.parametrize("method", [*METHODS, *PAIRS])
def test_any_number_of_workers_gives_the_bytes_of_one_process(method: str, tmp_path: Path) -> None:
    config = {**CONFIG, "method": method}
    if method == "moon":
        config["model"] = {"name": "mlp", "hidden": [8], "projection": 4}
    if method == "local_only":  # forty models are measured
        config["evaluate"] = {"every": 3}
    alone = files(config, tmp_path / "0", workers=0)
    assert method == "local_only" or "model.safetensors" in alone
    for workers in (1, 2, 3, 4):
        assert files(config, tmp_path / str(workers), workers) == alone, f"{workers} workers"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "cnn", "channels": [4, 8], "hidden": [16]}, "data.augment": {"crop": 1, "flip": True}},
        {"cohort": {"size": 37, "weighting": "samples"}, "local": {"epochs": 1, "batch_size": 8, "momentum": 0.9}},
        {"model": {"name": "cnn", "channels": [4, 8], "hidden": [16], "channels_last": False}},
    ],
    ids=["augmented images", "weights and clients of all sizes", "planes"],
)
def test_so_it_is_with_other_data_and_models(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {**CONFIG, "method": "fedadc+", **{k: v for k, v in changes.items() if "." not in k}}
    if "data.augment" in changes:
        config["data"] = {**CONFIG["data"], "augment": changes["data.augment"]}
    assert files(config, tmp_path / "0", workers=0) == files(config, tmp_path / "3", workers=3)


@pytest.mark.parametrize("method", ["fedadc", "feddyn", "local_only", "fedper", "ditto"])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluating_while_the_next_round_trains_changes_nothing(method: str, workers: int, tmp_path: Path) -> None:
    config = {**CONFIG, "method": method, "evaluate": {"every": 2}}  # and the last
    overlapping = {**config, "evaluate": {"every": 2, "overlap": True}}
    assert files(overlapping, tmp_path / "overlap", workers) == files(config, tmp_path / "plain", 0)


def test_workers_with_nothing_to_train_evaluate() -> None:
    """One client and three workers: two of them measure the last round's model, unasked."""
    tree = {"rounds": 1, "data": {"name": "digits", "clients": 4}, "model": "mlp", "cohort": {"size": 1}}
    config = load_config({**tree, "local": {"steps": 300}, "evaluate": {"batch_size": 20}})
    federation = prepare(config, workers=3).federation
    engine: Any = federation.engine
    tallies = engine.count(federation.start().theta, federation.counter.batches())
    round = next(train(federation.coordinator, federation.engine.run, 1, federation.start()))
    waiting = len(engine._to_count)
    counted = len(list(tallies))
    engine.close()
    assert round.round == 1 and counted == 18 and waiting < counted - 2


def shares(steps: list[int], workers: int) -> list[int]:
    """The sizes of the shares of clients with so many steps."""
    orders = [ClientTask(client, h) for client, h in enumerate(steps)]
    cut = [list(share) for share in grouped(orders, workers)]
    assert [order for share in cut for order in share] == orders  # nobody is lost, and in order
    return [len(share) for share in cut]


def test_whole_blocks_are_handed_out_while_there_is_plenty_for_everybody() -> None:
    assert shares([1] * 100, 2) == [BLOCK_LENGTH] * 10 + [1] * 20
    assert shares([1] * 100, 50) == [1] * 100
    assert shares([1] * 7, 1) == [1] * 7
    assert (
        shares([50] * 8 + [1] * 60, 2) == [1] * 8 + [BLOCK_LENGTH] * 5 + [1] * 20
    )  # the largest would hold up the rest
