"""Real sites on slow links: measured seconds per round beside those that the virtual clock predicts.

python benchmarks/links.py [--rounds 5]      (as root on Linux; needs `ip` and `tc`; ten minutes; wants a quiet machine)

The SuperLink and every site are in network namespaces of their own, whose links `tc` limits to a bandwidth. The clock
is given the same figures. It knows nothing of what Flower does beside carrying bytes (processes, waiting times between
two looks for messages), so the same run on unlimited links is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedadc.runs.record import load_config, read_run
from fedadc.sites.local import LocalFederation, free_port
from fedadc.sites.trial import prepared

SERVER, NETWORK = "fedadc-server", "10.77.0"
LINKS = {"0": (2e6, 1e6), "1": (1e6, 0.5e6), "2": (0.5e6, 0.25e6)}  # bytes per second, down and up
MODEL = {"name": "mlp", "hidden": [1024, 1024]}  # 4.5 MB
BURST = 32_000  # bytes that `tc` lets pass at once
QUEUE = 1_000_000  # bytes that wait; what comes beside them is dropped, as a router does


def ip(*words: str, namespace: str = "") -> None:
    within = ["-n", namespace] if namespace else []
    subprocess.run(["ip", *within, *words], check=True)


def tc(namespace: str, device: str, rate: float) -> None:
    """Limit what a device sends."""
    words = f"qdisc add dev {device} root tbf rate {8 * rate:.0f}bit burst {BURST} limit {QUEUE}"
    subprocess.run(["tc", "-n", namespace, *words.split()], check=True)


def build(limited: bool) -> None:
    """One namespace for the server, with a bridge, and one for every site."""
    ip("netns", "add", SERVER)
    ip("link", "add", "bridge", "type", "bridge", namespace=SERVER)
    ip("addr", "add", f"{NETWORK}.1/24", "dev", "bridge", namespace=SERVER)
    for device in ("bridge", "lo"):
        ip("link", "set", device, "up", namespace=SERVER)
    for number, (site, (down, up)) in enumerate(LINKS.items(), start=2):
        own = namespace_of(site)
        ip("netns", "add", own)
        ip("link", "add", "net", "type", "veth", "peer", "name", f"to-{site}", "netns", SERVER, namespace=own)
        ip("link", "set", f"to-{site}", "master", "bridge", "up", namespace=SERVER)
        ip("addr", "add", f"{NETWORK}.{number}/24", "dev", "net", namespace=own)
        for device in ("net", "lo"):
            ip("link", "set", device, "up", namespace=own)
        if limited:
            tc(own, "net", up)
            tc(SERVER, f"to-{site}", down)


def remove() -> None:
    for namespace in (SERVER, *map(namespace_of, LINKS)):
        subprocess.run(["ip", "netns", "del", namespace], check=False, stderr=subprocess.DEVNULL)


def namespace_of(site: str) -> str:
    return f"fedadc-site-{site}"


@dataclass(frozen=True)
class Spread(LocalFederation):
    """A federation whose sites are in namespaces of their own."""

    def start_program(
        self, name: str, program: str, words: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        if not name.startswith("site-"):
            return super().start_program(name, program, words, variables)
        inside = ["netns", "exec", namespace_of(name.removeprefix("site-"))]
        whole = [*inside, str(Path(sys.executable).parent / program), *words]
        return super().start_program(name, "/usr/sbin/ip", whole, variables)


def config_of(downlink: str, rounds: int, folder: Path) -> Any:
    table = folder / "links.csv"
    lines = [f"{site},0.01,{down},{up},0" for site, (down, up) in LINKS.items()]
    table.write_text("\n".join(["client,step_seconds,down,up,latency", *lines]))
    tree = {
        "rounds": rounds, "data": {"name": "digits", "clients": len(LINKS)}, "model": MODEL, "method": "fedadc",
        "local": {"steps": 4, "batch_size": 32, "lr": 0.05}, "evaluate": {"every": rounds},
        "communication": {"downlink": downlink}, "clock": {"trace": str(table)}, "cohort": {"size": 2},
    }  # fmt: skip
    return load_config(tree)


def measured(downlink: str, rounds: int) -> dict[str, Any]:
    """A run, in this namespace: seconds per round, the clock's, and bytes per round. The first round is left out."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(downlink, rounds, Path(folder))
        federation = Spread(prepared(Path(folder) / "app", config, len(LINKS))[0].app)
        port = free_port()
        try:
            federation.start_link(f"0.0.0.0:{port}")
            for site in LINKS:
                federation.start_site(site, f"{NETWORK}.1:{port}")
            federation.start_run(f"127.0.0.1:{port}").wait(timeout=3600)
            records = read_run(federation.run).records
        finally:
            federation.down()
    return {
        "seconds": [record["seconds"] for record in records[1:]],
        "clock": [after["virtual_seconds"] - before["virtual_seconds"] for before, after in pairwise(records)],
        "megabytes": [(r["wire_bytes_up"] + r["wire_bytes_down"]) / 1e6 for r in records[1:]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", help=argparse.SUPPRESS)  # the downlink: this process is in the server's namespace
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measured(options.inside, options.rounds)))
        return
    print(f"{'downlink':9} {'links':9} {'seconds':>8} {'clock':>7} {'MB':>6}   medians of {options.rounds - 1} rounds")
    for downlink in ("pull", "overlap"):
        for limited in (False, True):
            remove()
            build(limited)
            try:
                words = [sys.executable, __file__, "--inside", downlink, "--rounds", str(options.rounds)]
                done = subprocess.run(
                    ["ip", "netns", "exec", SERVER, *words], capture_output=True, text=True, check=True, env=os.environ
                )
            finally:
                remove()
            found = {key: statistics.median(values) for key, values in json.loads(done.stdout.splitlines()[-1]).items()}
            links = "limited" if limited else "unlimited"
            clock = f"{found['clock']:7.1f}" if limited else "      -"
            print(f"{downlink:9} {links:9} {found['seconds']:8.1f} {clock} {found['megabytes']:6.1f}", flush=True)


if __name__ == "__main__":
    main()
