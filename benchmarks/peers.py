"""The peers' environments: `python benchmarks/peers.py` makes those that are not there.

Each peer gets a virtual environment of its own with the same torch, under `envs/` of the cache folder or under
FEDADC_BENCH_ENVS. A peer that cannot be installed is named and left out; run.py shows it as not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from workloads import cache_folder

TORCH = "torch==2.13.0"
PEERS = {  # environment: what is installed, its name, its version
    "pfl": ("pfl[pytorch]==0.6.0", "pfl", "0.6.0"),
    "flw": ("flwr[simulation]==1.41.0", "flwr", "1.41.0"),
    "flk": ("fluke-fl==0.8.1", "fluke-fl", "0.8.1"),
}


def python_of(env: str) -> Path:
    given = os.environ.get("FEDADC_BENCH_ENVS")
    folder = Path(given).expanduser().absolute() if given else cache_folder() / "envs"
    return folder / env / "bin" / "python"


def installed(env: str) -> bool:
    """Whether an environment holds its peer, in its version."""
    python, (_, name, version) = python_of(env), PEERS[env]
    if not python.exists():
        return False
    code = f"import importlib.metadata as m; raise SystemExit(m.version({name!r}) != {version!r})"
    return subprocess.run([python, "-c", code], capture_output=True, timeout=60).returncode == 0


def install(env: str) -> None:
    python = python_of(env)
    subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    pip = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--upgrade", "pip"], check=True)
    subprocess.run([*pip, TORCH, "numpy", PEERS[env][0]], check=True)


def main() -> None:
    for env, (wanted, *_) in PEERS.items():
        if installed(env):
            print(f"{wanted} is there", flush=True)
            continue
        print(f"installing {wanted} with {TORCH} ...", flush=True)
        try:
            install(env)
        except subprocess.CalledProcessError as error:
            print(f"{wanted} could not be installed (exit code {error.returncode}); it will be left out", flush=True)


if __name__ == "__main__":
    main()
