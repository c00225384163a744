"""Real sites: seconds per round beside Flower's quickstart and a simulation, and where the time of a message goes.

python benchmarks/federation.py [--sites 10] [--rounds 4]      (some minutes; wants a quiet machine)

One SuperLink and the same SuperNodes serve both apps, which do the same local work: an epoch of 1,500 samples with an
MLP of 1.3 million parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

QUICKSTART = Path(__file__).with_name("quickstart")
sys.path.insert(0, str(QUICKSTART))
from task import BATCH, CLASSES, FEATURES, HIDDEN, LR  # noqa: E402

from fedadc.runs.record import load_config  # noqa: E402
from fedadc.runs.runner import run as simulate  # noqa: E402
from fedadc.sites.local import LocalFederation, free_port  # noqa: E402
from fedadc.sites.serving import recorded_terms  # noqa: E402
from fedadc.sites.trial import prepared  # noqa: E402

SAMPLES = 1500  # of a site
REPEATS = 5
IN_MEMORY = ":flwr-in-memory:"  # Flower's default; with a file, ten answers at once lock it, and the quickstart waits
CLOCK = """
import json, sys, time
from pathlib import Path
last, parts = time.perf_counter(), {}
def done(name):
    global last
    parts[name], last = time.perf_counter() - last, time.perf_counter()
app, given, run, file = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
facts = {"run": run, "oldest": 0}
"""
# what the process that stays at a site does with a request; it also writes the request to a file
TRAINING = f"""{CLOCK}
import torch
from fedadc.sites.app import config_of_app
from fedadc.sites.node import NodeSettings
from fedadc.sites.packets import Packet
from fedadc.sites.site import Site, SiteRun
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.wire import Wire
site = Site(NodeSettings.of(given, {{}}), config_of_app(app))
last = time.perf_counter()
part = SiteRun.opened(site, run)
done("data")
part.agreement
done("model")
samples = len(part.joined.samples["train"])
broadcast = ServerBroadcast(1, 0.05, part.agreement.start, {{}}, float(samples))
message = Wire(part.agreement).write_task(broadcast, ClientTask(part.joined.number, -(-samples // {BATCH})))
file.write_bytes(message)
last = time.perf_counter()
part.train(Packet.of(message, facts))
done("local update")
print(json.dumps(parts))
"""
# what the process that Flower starts for every message does; the second time, since the first one starts the other
MESSAGE = f"""{CLOCK}
import flwr.app, flwr.clientapp, flwr.serverapp
done("import of Flower")
import fedadc.sites.flower as ours
done("ours: import")
packet = ours.Packet.of(file.read_bytes(), facts)
settings = ours.NodeSettings.of(given, {{}})
last = time.perf_counter()
answer = ours.ask_resident("train", packet, app, settings)
done("request")
ours.to_record(answer)
done("ours: answer")
print(json.dumps(parts))
"""


def config_of(folder: Path, sites: int, rounds: int) -> dict[str, Any]:
    """FedAvg of all sites; their samples are written to a file."""
    rng, total = np.random.default_rng(0), sites * SAMPLES
    owner = np.repeat([f"s{k:02d}" for k in range(sites)], SAMPLES)
    x, y = rng.normal(size=(total, FEATURES)).astype(np.float32), rng.integers(CLASSES, size=total)
    np.savez(folder / "all.npz", x=x, y=y, client=owner)
    return {
        "rounds": rounds, "data": {"name": "npz", "path": str(folder / "all.npz"), "test": 0.01},
        "model": {"name": "mlp", "hidden": list(HIDDEN)}, "method": "fedavg", "cohort": {"size": sites},
        "local": {"epochs": 1, "batch_size": BATCH, "lr": LR}, "evaluate": {"every": 1000, "last": 1},
    }  # fmt: skip


def seconds_per_round(file: Path, running: subprocess.Popen[bytes]) -> float:
    """The median time between two lines that a run writes, one for every round."""
    times: list[float] = []
    while running.poll() is None:
        lines = file.read_text().count("\n") if file.is_file() else 0
        times += [time.monotonic()] * (lines - len(times))
        time.sleep(0.02)
    return statistics.median(b - a for a, b in pairwise(times))


def of_sites(federation: LocalFederation, sites: int, rounds: int) -> dict[str, float]:
    """Seconds per round of both apps, on the same SuperLink and SuperNodes."""
    address = f"127.0.0.1:{free_port()}"
    federation.start_link(address, IN_MEMORY)
    assert federation.dealt is not None
    for name in federation.dealt.sites:
        federation.start_site(name, address)
    ours = seconds_per_round(federation.run / "metrics.jsonl", federation.start_run(address))
    times = federation.folder / "times.txt"
    settings = f"rounds={rounds} sites={sites} times={json.dumps(str(times))}"
    theirs = federation.start_program("quickstart", "flwr", ["run", str(QUICKSTART), "local", "--run-config", settings,
                                                             "--stream"])  # fmt: skip
    return {"fedadc": ours, "quickstart": seconds_per_round(times, theirs)}


def of_a_message(federation: LocalFederation) -> dict[str, float]:
    """Seconds of every part of a message, medians."""
    assert federation.dealt is not None
    name, path = next(iter(federation.dealt.sites.items()))
    settings = {"client": name, "data-path": str(path), "folder": str(federation.folder / "sites" / name), "keep": 60}
    words = [
        str(federation.app),
        json.dumps(settings),
        recorded_terms(federation.run).run,
        str(federation.folder / "m"),
    ]

    def timed(program: str) -> dict[str, float]:
        done = subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, text=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found

    found = []
    for repeat in range(REPEATS + 1):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", ""], check=True)
        one = {"start of Python": time.perf_counter() - begin, **timed(TRAINING), **timed(MESSAGE)}
        passing = one.pop("request") - one["data"] - one["model"] - one["local update"]
        one |= {"ours: data": one.pop("data"), "ours: model": one.pop("model"), "ours: passing on": passing}
        found += [one] if repeat else []  # the first one starts the process that stays
    return {part: statistics.median(one[part] for one in found) for part in found[0]}


def of_simulation(config: dict[str, Any], folder: Path) -> float:
    result = simulate(config, out=folder, workers=2)
    return statistics.median([record["seconds"] for record in result.history][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(folder, given.sites, given.rounds)
        federation, _ = prepared(folder / "app", load_config(config), given.sites)
        try:
            rounds = of_sites(federation, given.sites, given.rounds)
        finally:
            federation.down()
        rounds["simulation"] = of_simulation(config, folder / "simulation")
        parts = of_a_message(federation)
    ours = sum(value for part, value in parts.items() if part.startswith("ours"))
    print(f"seconds per round, {given.sites} sites: {', '.join(f'{n} {s:.2f}' for n, s in rounds.items())}")
    print("seconds of a message: " + ", ".join(f"{part} {value:.3f}" for part, value in parts.items()))
    print(f"ours: {ours:.3f} s, {100 * ours:.0f} % of a local update of one second")


if __name__ == "__main__":
    main()
