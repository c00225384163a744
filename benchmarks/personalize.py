"""What calibrating 1,000 clients costs, beside one forward pass over their data: `python benchmarks/personalize.py`.

The forward pass is the same model's over all training samples, in cuts of 500 as evaluation makes them, with one thread
as for calibration. Seconds are this thread's on a core, the least of interleaved goes: others there count for less.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ours import dataset
from rich.console import Console
from rich.progress import track
from rich.table import Table
from workloads import CLASSES, LR

import fedadc
from fedadc.data.batches import Augment, ClientData
from fedadc.models import CNN, MLP
from fedadc.personal.calibrate import REGULARIZERS, Calibration, TunedPart, calibrated, calibration_work, tuned_part
from fedadc.personal.folder import PersonalFolder
from fedadc.system.determinism import deterministic

CLIENTS = 1000
REPEATS = 2


def federation(model: torch.nn.Module, shape: tuple[int, ...], each: int) -> fedadc.Federation:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS, each, *shape, generator=rng)
    data = dataset(x, torch.randint(0, CLASSES, (CLIENTS, each), generator=rng))
    return fedadc.Federation(test=0, model=model, data=data, local=fedadc.LocalWork(epochs=1, batch_size=20, lr=LR))


def cases() -> dict[str, fedadc.Federation]:
    torch.manual_seed(0)
    image, digit = (3, 32, 32), (1, 8, 8)
    return {
        "60 vectors, MLP 784-200-200-10": federation(MLP((784,), CLASSES, (200, 200)), (784,), 60),
        "60 images 8x8, CNN at quarter width": federation(
            CNN(digit, CLASSES, width=0.25, channels=(64, 128, 256)), digit, 60
        ),
        "20 images 3x32x32, CNN at half width": federation(CNN(image, CLASSES, width=0.5), image, 20),
    }


def forward(trained: fedadc.Federation) -> None:
    """One pass over all training samples."""
    place, model = trained.agreement, trained.model
    everything = ClientData(trained.data.train, trained.clients.indices, place.classes, place.inputs, Augment())
    for batch in everything.in_order(None, trained.counter.evaluation.batch_size):
        model.predict(model.theta, batch.x)


def calibrate(trained: fedadc.Federation, part: TunedPart, regularizers: tuple[str, ...]) -> list[list[torch.Tensor]]:
    calibration = Calibration(work=calibration_work(trained.local))
    methods = [calibration.method(name) for name in regularizers]
    tuned = []
    for client in range(CLIENTS):
        features = part.features(trained.data.train, trained.clients[client])
        tuned.append([calibrated(part, trained.agreement, client, features, calibration.work, m) for m in methods])
    return tuned


def seconds(work: Callable[..., object], *arguments: object) -> float:
    began = time.thread_time()
    work(*arguments)
    return time.thread_time() - began


def write(part: TunedPart, tuned: list[list[torch.Tensor]]) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as room, PersonalFolder.create(Path(room) / "p", 1) as folder:
        for client, (theta, *_) in enumerate(tuned):
            folder.add_model("none", client, part.state_dict(theta))


def measured(trained: fedadc.Federation) -> list[str]:
    """Seconds of a forward pass; calibration over it, plain and with all three regularizers; seconds of writing."""
    part = tuned_part(trained.agreement, trained.start().theta, "head", trained.evaluation.batch_size)
    goes = []
    for _ in range(REPEATS):
        ours = [seconds(calibrate, trained, part, names) for names in (("none",), REGULARIZERS)]
        goes.append([seconds(forward, trained), *ours])
    passed, plain, all_three = map(min, zip(*goes, strict=True))
    tuned = calibrate(trained, part, ("none",))
    began = time.perf_counter()
    write(part, tuned)
    took = time.perf_counter() - began
    return [f"{passed:.2f}", f"{plain / passed:.2f}", f"{all_three / passed:.2f}", f"{took:.1f}"]


def main() -> None:
    table = Table("1,000 clients, each with", "forward pass, s", "× plain", "× all three", "writing files, s")
    with deterministic():
        for name, trained in track(cases().items(), "calibrating"):
            table.add_row(name, *measured(trained))
    Console().print(table)


if __name__ == "__main__":
    main()
