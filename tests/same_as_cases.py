"""The runs that `same_as.py` compares: small configs that together use every part of the package that makes numbers.

Nothing here imports fedadc: a config is a plain tree, which every version reads. Sizes are as small as they can be
while everything still happens: 12 clients, cohorts of 9 (the package adds up blocks of 8 clients), three rounds. There
is a checkpoint after every round, so that the states of server and clients are on the disk at the end.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

Tree = dict[str, Any]
METHODS = (
    "fedavg", "slowmo", "fedadc", "fedadc_double", "fedprox", "feddyn", "scaffold", "fedavgm", "fedadam", "fedyogi",
    "fedadagrad", "fedper", "fedrep", "fedbabu", "ditto", "local_only",
)  # fmt: skip
PAIRS = ("fedadc+", "moon", "fedgkd", "fedntd", "fedrs")  # names that stand for a method with an objective
OBJECTIVES = (
    "cross_entropy", "self_confidence", "restricted_softmax", "not_true_distillation", "global_distillation",
    "model_contrast",
)  # fmt: skip
BASE: Tree = {
    "seed": 5,
    "rounds": 3,
    "data": {"name": "digits", "clients": 12, "partition": {"name": "dirichlet", "alpha": 0.5}},
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
    "cohort": {"size": 9},
    "checkpoint": {"every": 1},
}
PROJECTION: Tree = {"model": {"name": "mlp", "hidden": [16], "projection": 8}}  # model_contrast needs one
ENSEMBLES: Tree = {"swa": {"start": 2}, "ema": {"decay": 0.5}, "lookahead": {"every": 2}}
FAULTS: Tree = {"faults": {"drop": 0.3, "slow": 0.3}}
CLOCK: Tree = {
    "step_seconds": {"name": "lognormal", "median": 0.01, "sigma": 1.0},
    "down": {"name": "uniform", "low": 1e4, "high": 1e5},
    "up": {"name": "exponential", "mean": 1e4, "low": 1e3},
    "latency": 0.1,
}
# since 0.3.0, natural clients hold out their own shares; before, shares were stratified over all clients' labels
SHARES_PER_CLIENT = "fedadc/data/summaries.py"
SMALL_CNN: Tree = {"name": "cnn", "channels": [4, 8], "hidden": [16]}
# not width 4: torch 2.13 corrupts the heap in 1 × 1 convolutions of 4 channels (AVX2, channels last, stride 2)
SMALL_RESNET: Tree = {"name": "resnet18", "width": 8, "groups": 2}


@dataclass(frozen=True)
class Case:
    """One config, run by both versions."""

    name: str
    config: Tree
    may_be_refused: bool = False  # whether it is fine if both versions refuse it; otherwise the case must run
    halfway: int | None = None  # the old version runs so many rounds, the new one resumes it and runs the rest
    since: str | None = None  # a file of the package: versions that do not have it give other results on purpose


def local(**changes: Any) -> Tree:
    return {"local": {**BASE["local"], **changes}}


def steps_or_epochs(**changes: Any) -> Tree:
    """Local work without the base's number of steps."""
    return {"local": {"batch_size": 8, "lr": 0.1, **changes}}


def data(**changes: Any) -> Tree:
    return {"data": {**BASE["data"], **changes}}


def cohort(**changes: Any) -> Tree:
    return {"cohort": {**BASE["cohort"], **changes}}


def method(name: str, **settings: Any) -> Tree:
    return {"method": {"name": name, **settings}}


def objective(name: str, **settings: Any) -> Tree:
    return {"objective": {"name": name, **settings}}


def downlink(name: str, **settings: Any) -> Tree:
    return {"communication": {"downlink": {"name": name, **settings}}}


def uplink(name: str, **settings: Any) -> Tree:
    return {"communication": {"uplink": {"name": name, **settings}}}


def every_method_with_every_objective() -> Iterator[Case]:
    for name, loss in product(METHODS, OBJECTIVES):
        model = PROJECTION if loss == "model_contrast" else {}
        yield Case(f"{name}/{loss}", BASE | model | method(name) | objective(loss), may_be_refused=True)
    for name in PAIRS:
        yield Case(f"pair/{name}", BASE | PROJECTION | method(name))


def every_method_with(images: Tree) -> Iterator[Case]:
    """Each method under the conditions that touch every part of a round."""
    slow_links = {"clock": CLOCK, "cohort": {"size": 4}, **FAULTS}
    conditions: dict[str, Tree] = {
        "regularized": steps_or_epochs(epochs=1, batch_size=32, clip=1.0, weight_decay=0.01, schedule="cosine")
        | {"storage": {"memory_gb": 0}},
        "momentum": local(momentum=0.5) | data(validation=0.2),
        "weighted": cohort(weighting="samples") | FAULTS,
        "broadcast": slow_links
        | {"communication": {"downlink": {"name": "broadcast", "absent": 0.3}, "uplink": {"name": "top_k"}}},
        "overlap": slow_links | {"communication": {"downlink": "overlap", "uplink": "eight_bit"}},
        "ensembles": {"ensembles": ENSEMBLES},
        "cnn": images | {"model": SMALL_CNN},
    }
    for (condition, tree), name in product(conditions.items(), METHODS):
        yield Case(f"{condition}/{name}", BASE | tree | method(name), may_be_refused=True)


def settings_of_methods_and_objectives() -> dict[str, Tree]:
    confident = method("fedadc") | {"ensembles": ENSEMBLES}
    return {
        "fedadc-nesterov": method("fedadc", nesterov=True),
        "fedadc-beta-local": method("fedadc", beta=0.8, beta_local=0.5, server_lr=0.7),
        "fedadc-nesterov-beta-local": method("fedadc", nesterov=True, beta_local=0.3),
        "fedadc-nesterov-momentum": method("fedadc", nesterov=True) | local(momentum=0.5, clip=0.5, weight_decay=0.1),
        "double-phi": method("fedadc_double", beta=0.5, phi=0.3, server_lr=0.5),
        "slowmo-settings": method("slowmo", beta=0.6, server_lr=0.5),
        "fedprox-mu": method("fedprox", mu=0.5),
        "feddyn-by-size": method("feddyn", alpha=0.2, alpha_by_size=True),
        "feddyn-judged-by-server": method("feddyn", judged_by="server"),
        "scaffold-server-lr": method("scaffold", server_lr=2.0),
        "fedavgm-settings": method("fedavgm", beta=0.5, server_lr=0.5),
        "fedadam-settings": method("fedadam", beta1=0.5, beta2=0.9, tau=0.1, server_lr=0.1),
        "fedrep-half": method("fedrep", head_share=0.5),
        "fedrep-none": method("fedrep", head_share=0.0),
        "ditto-lam": method("ditto", lam=1.0),
        "confidence-tau": objective("self_confidence", tau=2.0, tau_squared=True, lam=0.5),
        "confidence-self": objective("self_confidence", teacher="self"),
        "confidence-none": objective("self_confidence", lam=0.0),
        "restricted-soft": objective("restricted_softmax", soft=True, alpha=0.3),
        "not-true-tau": objective("not_true_distillation", beta=1.0, tau=2.0),
        "distillation-window": objective("global_distillation", window=2, tau=2.0),
        "contrast-tau": PROJECTION | objective("model_contrast", mu=5.0, tau=1.0),
        **{f"taught-by-{name}": confident | objective("self_confidence", teacher=name) for name in ENSEMBLES},
        **{f"distilled-by-{name}": confident | objective("global_distillation", teacher=name) for name in ENSEMBLES},
    }


def settings_of_rounds() -> dict[str, Tree]:
    schedules: Sequence[Tree] = (
        {"name": "step", "every": 2, "gamma": 0.5},
        {"name": "cosine", "final": 0.1, "horizon": 2},
        {"name": "exponential", "gamma": 0.9},
    )
    reset = {"lookahead": {"every": 2, "alpha": 0.3, "reset": True}}
    return {
        "epochs": steps_or_epochs(epochs=2),
        "one-epoch": steps_or_epochs(),
        "large-batches": local(batch_size=500),
        **{f"schedule-{schedule['name']}": local(schedule=schedule) for schedule in schedules},
        "all-clients": {"cohort": {}},
        "ratio": {"cohort": {"ratio": 0.4}},
        "one-client": cohort(size=1),
        "covering": cohort(selection={"name": "covering", "at_least": 2}),
        "covering-classes": cohort(selection={"name": "covering", "reports": "classes"}),
        "covering-chains": cohort(size=4, selection={"name": "covering", "draws": 1, "chains": 8})
        | data(partition={"name": "sort", "labels_per_client": 3}),
        "clusters": cohort(selection={"name": "clusters", "count": 3}),
        "clusters-classes": cohort(selection={"name": "clusters", "reports": "classes"}),
        "nobody-reports": {"faults": {"drop": 1.0}},
        "slow-epochs": {"faults": {"slow": 1.0}} | steps_or_epochs(epochs=2),
        "metrics": {"evaluate": {"metrics": ["top5", "macro_f1", "per_class"], "batch_size": 70}},
        "evaluated-once": {"evaluate": {"every": 2}},
        "evaluated-beside-training": {"evaluate": {"overlap": True}},
        "stopped": {"rounds": 20, "stop": {"accuracy": 0.3}},
        **{f"lookahead-reset-{name}": {"ensembles": ENSEMBLES | reset} | method(name) for name in ("fedavg", "fedadc")},
    }


def settings_of_communication(trace: Path) -> dict[str, Tree]:
    downlinks = {
        "pull": downlink("pull"), "broadcast": downlink("broadcast"), "absent": downlink("broadcast", absent=0.5),
        "overlap": downlink("overlap"),
    }  # fmt: skip
    uplinks = {  # FedDyn refuses all but full, and all downlinks but pull
        "full": uplink("full"), "top-k": uplink("top_k", share=0.07), "eight-bit": uplink("eight_bit"),
        "top-k-forgetful": uplink("top_k", error_feedback=False), "eight-bit-blocks": uplink("eight_bit", block=7),
    }  # fmt: skip
    found: dict[str, Tree] = {"clock-trace": {"clock": {"trace": str(trace)}}}
    harder: Tree = {"clock": CLOCK, **FAULTS}
    for name in ("fedadc", "scaffold"):
        found |= {f"{link}-{name}": tree | method(name) for link, tree in (downlinks | uplinks).items()}
        found |= {f"{link}-{name}-harder": tree | method(name) | harder for link, tree in downlinks.items()}
    return found


def settings_of_models(weights: Path) -> dict[str, Tree]:
    return {
        "logistic": {"model": "logistic"},
        "deep": {"model": {"name": "mlp", "hidden": [16, 12, 8], "init": "kaiming"}},
        "projection": PROJECTION,
        "weights": {"model": {"name": "mlp", "hidden": [16], "weights": str(weights)}},
        "seeds": {"model": {"name": "mlp", "hidden": [16], "seed": 77}} | data(seed=78),
        "digits-cnn": {"model": SMALL_CNN} | data(augment={"crop": 1, "flip": True}),
    }


def settings_of_images(images: Tree, folder: Path) -> dict[str, Tree]:
    augmented: Tree = {"data": {**images["data"], "augment": {"crop": 2, "flip": True}}}
    constants = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    normalized: Tree = {"data": {**images["data"], "normalize": constants}}
    resnet = images | {"model": SMALL_RESNET}
    return {
        **{f"resnet-{name}": resnet | method(name) for name in ("fedavg", "fedadc", "scaffold", "feddyn", "fedrep")},
        "resnet-augmented": resnet | augmented | method("fedadc", nesterov=True) | local(clip=1.0, momentum=0.5),
        "resnet-planes": images | {"model": {**SMALL_RESNET, "channels_last": False}},
        "resnet-moon": images | method("moon") | {"model": {**SMALL_RESNET, "projection": 8}},
        "cnn-augmented": augmented | {"model": SMALL_CNN} | method("fedadc+"),
        "cnn-pixels": images | {"model": {**SMALL_CNN, "channels_last": True, "init": "default"}} | method("fedgkd"),
        "cnn-planes": images | {"model": {**SMALL_CNN, "channels_last": False}} | method("fedntd"),
        "cnn-moon": augmented | method("moon") | {"model": {"name": "cnn", "channels": [4, 8], "projection": 8}},
        "cnn-normalized": normalized | {"model": {"name": "cnn", "channels": [64], "width": 0.1}},
        "mlp-on-images": images | method("fedadc"),
        "image-folder": {"data": {"name": "folder", "path": str(folder), "size": 8, "clients": 9}, "model": SMALL_CNN},
    }


def natural_clients_with_shares(table: Path) -> Iterator[Case]:
    """Data that names its clients and has no test part."""
    wards: Tree = {"name": "csv", "path": str(table), "label": "diagnosis", "client": "ward", "drop": ["number"]}
    natural: Tree = {"data": {**wards, "test": 0.25, "scale": {"age": [50, 20]}}}
    configs = {
        "table": natural,
        "table-dealt": {"data": {**natural["data"], "clients": 10, "partition": "iid", "validation": 0.2}},
        **{f"table-{name}": natural | method(name) for name in ("fedper", "ditto", "scaffold", "local_only")},
        "table-fedadc+": natural | method("fedadc+"),
    }
    for name, tree in configs.items():
        yield Case(f"data/{name}", BASE | tree, since=SHARES_PER_CLIENT)


def settings_of_data(table: Path, named: Path, huge: Path) -> dict[str, Tree]:
    partitions: Sequence[Tree] = (
        {"name": "iid"}, {"name": "sort", "labels_per_client": 2}, {"name": "dirichlet", "alpha": 0.05},
    )  # fmt: skip
    pooled: Tree = {"name": "csv", "path": str(table), "label": "diagnosis", "drop": ["number", "ward"], "clients": 10}
    owned: Tree = {"data": {"name": "npz", "path": str(named)}}
    return {
        **{f"partition-{rule['name']}": data(partition=rule) for rule in partitions},
        "partition-pooled": {"data": {"name": "digits", "partition": "pooled"}, "cohort": {}},
        "validation": data(validation=0.3, seed=9),
        "table-pooled": {"data": {**pooled, "scale": {"age": [50, 20]}, "validation": 0.2}},
        "npz-named": owned,
        **{f"npz-named-{name}": owned | method(name) for name in ("fedrep", "ditto")},
        "bad-update": {"data": {"name": "npz", "path": str(huge)}, "cohort": {}},
    }


def resumed(images: Tree) -> Iterator[Case]:
    """Run directories of the old version that the new one goes on with. The learning rate is constant."""
    configs: dict[str, Tree] = {
        "plain": method("fedavg"),
        "momentum": method("fedadc", nesterov=True) | {"cohort": {"size": 4, "selection": "clusters"}},
        "states": method("scaffold") | {"storage": {"memory_gb": 0}} | FAULTS,
        "two-models": method("feddyn") | PROJECTION | objective("model_contrast"),
        "ensembles": method("fedadc") | {"ensembles": ENSEMBLES, "clock": CLOCK} | objective("self_confidence")
        | {"communication": {"downlink": "overlap", "uplink": {"name": "top_k"}}, **FAULTS},
        "broadcast": method("fedprox") | downlink("broadcast", absent=0.3) | {"clock": CLOCK},
        "heads": method("fedper") | images | {"model": SMALL_CNN},
    }  # fmt: skip
    for name, tree in configs.items():
        yield Case(f"resumed/{name}", BASE | tree | {"rounds": 4}, halfway=2)


def all_cases(folder: Path) -> list[Case]:
    """Every case. Their data files are written to `folder`, which must exist."""
    rng = np.random.default_rng(0)
    images = write_images(folder / "images.npz", rng)
    table = folder / "table.csv"
    groups = {
        "settings": settings_of_methods_and_objectives() | settings_of_rounds(),
        "communication": settings_of_communication(write_trace(folder / "trace.csv", rng)),
        "model": settings_of_models(write_weights(folder / "weights.safetensors", rng)) | write_noisy_model(folder),
        "images": settings_of_images(images, write_image_folder(folder / "classes", rng)),
        "data": settings_of_data(
            write_table(table, rng),
            write_named_clients(folder / "named.npz", rng),
            write_named_clients(folder / "huge.npz", rng, largest=1e30),
        ),
    }
    single = [Case(f"{group}/{name}", BASE | tree) for group, trees in groups.items() for name, tree in trees.items()]
    natural = natural_clients_with_shares(table)
    return [*every_method_with_every_objective(), *every_method_with(images), *single, *natural, *resumed(images)]


NOISY = """
from torch import Tensor, nn
from torch.nn.functional import dropout


class Noisy(nn.Module):
    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(dropout(x.flatten(1), 0.3, training=True))
"""


def write_noisy_model(folder: Path) -> dict[str, Tree]:
    """A model that draws random numbers in training and in evaluation, in a file of its own."""
    (folder / "same_as_noisy.py").write_text(NOISY)
    return {"noisy": {"model": {"name": "same_as_noisy:Noisy"}}}


def write_images(path: Path, rng: np.random.Generator) -> Tree:
    """Color images of 8 × 8 pixels in 5 classes, with a test part; the data of a config that reads them."""
    drawn = {f"x{part}": rng.integers(256, size=(n, 3, 8, 8), dtype=np.uint8) for part, n in (("", 240), ("_test", 60))}
    np.savez(path, y=np.arange(240) % 5, y_test=np.arange(60) % 5, **drawn)
    return {"data": {"name": "npz", "path": str(path), "clients": 12, "partition": {"name": "dirichlet", "alpha": 0.5}}}


def write_image_folder(path: Path, rng: np.random.Generator) -> Path:
    """A folder of small pictures for each of 3 classes."""
    for number in range(60):
        file = path / f"class-{number % 3}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(9, 9, 3), dtype=np.uint8)).save(file)
    return path


def write_named_clients(path: Path, rng: np.random.Generator, largest: float = 1.0) -> Path:
    """Numbers of 11 clients with names, which also own the test samples; those of one client are larger."""
    owner = np.arange(220) % 11
    x = rng.normal(size=(220, 6)) * np.where(owner == 3, largest, 1.0)[:, None]
    y = rng.integers(3, size=220)
    named = np.array([f"client {k}" for k in owner])
    np.savez(path, x=x, y=y, client=named, x_test=rng.normal(size=(66, 6)), y_test=y[:66], client_test=named[:66])
    return path


def write_table(path: Path, rng: np.random.Generator) -> Path:
    """A table of numbers and texts, some of them missing, of 10 wards of unequal size."""
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["number", "age", "pressure", "smoker", "ward", "diagnosis"])
        for number in range(300):
            age = "" if number % 17 == 0 else round(rng.uniform(20, 90), 1)
            smoker = ["yes", "no", "", "once"][rng.integers(4)]
            ward = f"ward {int(10 * rng.random() ** 2)}" if number >= 40 else f"ward {number % 10}"
            rows.writerow([number, age, round(rng.normal(), 3), smoker, ward, "abc"[rng.integers(3)]])
    return path


def write_trace(path: Path, rng: np.random.Generator) -> Path:
    """The clock's figures of 12 clients."""
    with path.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["client", "step_seconds", "down", "up", "latency"])
        rows.writerows([client, *rng.uniform([0.01, 1e4, 1e4, 0], [1, 1e6, 1e6, 0.2])] for client in range(12))
    return path


def write_weights(path: Path, rng: np.random.Generator) -> Path:
    """Weights for the base's model."""
    shapes = {"layers.0.weight": (16, 64), "layers.0.bias": (16,), "head.weight": (10, 16), "head.bias": (10,)}
    save_file({name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}, path)
    return path
