"""Targets that are not a race against another system; each prints a line of JSON, which run.py reads.

python benchmarks/checks.py plus W1        FedADC+ against FedADC, 2 local epochs, rounds in turn
python benchmarks/checks.py million 1000   so many small clients: start-up, time per round, memory
python benchmarks/checks.py help           `fedadc --help`
python benchmarks/checks.py first          from the command to the first line of metrics.jsonl
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from measure import pss_mb, say
from workloads import load_tensors, quick

COMMAND = Path(sys.executable).with_name("fedadc")
PATIENCE = 120  # seconds until a command is given up


def plus(name: str) -> None:
    """Both methods in one process tree, a round of each in turn, so that noise meets both alike."""
    from ours import dataset, federation

    data = dataset(*load_tensors(name))
    both = {method: federation(name, method, 2, data, epochs=2) for method in ("fedadc", "fedadc+")}
    rounds = 3 if name == "W1" or quick() else 12
    running = {method: trained.rounds(rounds) for method, trained in both.items()}
    seconds: dict[str, list[float]] = {method: [] for method in both}
    for _ in range(rounds):
        for method, its_rounds in running.items():
            begin = time.perf_counter()
            next(its_rounds)
            seconds[method].append(round(time.perf_counter() - begin, 4))
    for trained in both.values():
        trained.close()
    timed = {method: values[1:] for method, values in seconds.items()}  # the first round starts the workers
    say(fedadc=min(timed["fedadc"]), plus=min(timed["fedadc+"]), seconds=timed)


def million(clients: int) -> None:
    """Start-up counts from data in memory to the end of the first round; memory without the data: x, y and owners."""
    from ours import small_clients, small_federation

    data = small_clients(clients)
    owners = data.owners
    data_mb = (data.train.x.nbytes + data.train.y.nbytes + owners.nbytes) / 2**20
    begin = time.perf_counter()
    trained = small_federation(data, workers=2)
    del data, owners
    ends = []
    for _ in trained.rounds(10 if quick() else 200):
        ends.append(time.perf_counter())
    memory = pss_mb()
    trained.close()
    seconds = [after - before for before, after in pairwise(ends[4:])]
    say(
        min=round(min(seconds), 5),
        median=round(median(seconds), 5),
        startup_s=round(ends[0] - begin, 2),
        pss_mb=round(memory),
        data_mb=round(data_mb),
        beyond_data_mb=round(memory - data_mb),
    )


def help_text() -> None:
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run([COMMAND, "--help"], check=True, capture_output=True, timeout=PATIENCE)
        seconds.append(round(time.perf_counter() - begin, 3))
    say(min=min(seconds), seconds=seconds)


def first() -> None:
    """With the config that `fedadc init` writes, which trains on digits."""
    seconds = [_first_round() for _ in range(3)]
    say(min=min(seconds), seconds=seconds)


def _first_round() -> float:
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "fedadc.yaml"), Path(folder, "run")
        subprocess.run([COMMAND, "init", config], check=True, capture_output=True, timeout=PATIENCE)
        begin = time.perf_counter()
        run = subprocess.Popen(
            [COMMAND, "run", config, "--out", out],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return round(_first_line(out / "metrics.jsonl", run, begin) - begin, 3)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGTERM)
                run.wait(30)


def _first_line(path: Path, run: subprocess.Popen, begin: float) -> float:
    while not (path.exists() and b"\n" in path.read_bytes()):
        if run.poll() or time.perf_counter() - begin > PATIENCE:
            raise SystemExit("fedadc run failed before its first round.")
        time.sleep(0.005)
    return time.perf_counter()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["plus", name]:
            plus(name)
        case ["million", clients]:
            million(int(clients))
        case ["help"]:
            help_text()
        case ["first"]:
            first()
        case _:
            raise SystemExit(__doc__)
