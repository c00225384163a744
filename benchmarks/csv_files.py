"""Time and memory of reading a CSV file: `python benchmarks/csv_files.py` takes a few minutes and 500 MB of disk.

The table has a million rows of 50 columns and 1,000 clients: 36 measurements, ten of them with empty fields, 10 counts
and 2 columns of texts, a label and the client. `fedadc.from_csv` reads, checks, holds out, scales and encodes it;
`pandas.read_csv` reads it. Each reads it in a process of its own, in turn; the memory is the growth of the peak from
before the call. Before each of them another process touches more memory than either needs, because on a virtual machine
the first use of a page can take longer than all the rest. Ratios are of the minima. The size of the data is that of its
float32 features.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

CLIENTS, MEASURED, COUNTED, TEXTS = 1_000, 36, 10, 2
AT_ONCE = 20_000  # rows that are written at once
GAPS = 10  # measurements that are missing now and then
READERS = ("pandas", "fedadc")
TOUCHED = 3 << 30  # bytes


def write(path: Path, rows: int) -> None:
    """Write the table."""
    rng = np.random.default_rng(0)
    header = [f"m{k}" for k in range(MEASURED)] + [f"n{k}" for k in range(COUNTED)] + [f"t{k}" for k in range(TEXTS)]
    with path.open("w") as file:
        file.write(",".join([*header, "label", "client"]) + "\n")
        for first in range(0, rows, AT_ONCE):
            many = min(AT_ONCE, rows - first)
            measured = rng.normal(50, 20, (many, MEASURED)).round(4).astype(str)
            measured[:, :GAPS][rng.random((many, GAPS)) < 0.02] = ""
            counted = rng.poisson(30, (many, COUNTED)).astype(str)
            texts = rng.choice(["red", "green", "blue", "yellow"], (many, TEXTS))
            label = rng.choice(["healthy", "ill", "very ill"], (many, 1))
            client = np.char.add("site-", rng.integers(0, CLIENTS, (many, 1)).astype(str))
            for row in np.hstack([measured, counted, texts, label, client]).tolist():
                file.write(",".join(row) + "\n")


def _kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measure(reader: str, path: Path) -> dict[str, float]:
    """Read the file in this process: seconds, and megabytes by which the peak has grown."""
    if reader == "pandas":
        import pandas

        read = pandas.read_csv
    else:
        import pyarrow.csv  # pandas has loaded it too

        from fedadc import from_csv

        assert pyarrow.csv is not None

        def read(path: Path) -> object:
            return from_csv(path, "label", client="client")

    before = _kilobytes("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    data = read(path)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert data is not None
    return {"seconds": wall, "cpu": cpu, "megabytes": (_kilobytes("VmHWM") - before) / 1024}


def main() -> None:
    """Write the table, let both read it in turn, and print the ratios."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--measure", nargs=2)
    chosen = options.parse_args()
    if chosen.measure:
        print(json.dumps(measure(chosen.measure[0], Path(chosen.measure[1]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write(path, chosen.rows)
        print(f"{path.stat().st_size / 2**20:,.0f} MB")
        found: dict[str, list[dict[str, float]]] = {reader: [] for reader in READERS}
        for _ in range(chosen.repeats):
            for reader in READERS:
                subprocess.run([sys.executable, "-c", f"bytearray(b'x') * {TOUCHED}"], check=True)
                command = [sys.executable, __file__, "--measure", reader, str(path)]
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[reader].append(json.loads(said))
                print(reader, {key: round(value, 2) for key, value in found[reader][-1].items()}, flush=True)
    best = {reader: {key: min(one[key] for one in several) for key in several[0]} for reader, several in found.items()}
    size = 4 * chosen.rows * (MEASURED + GAPS + COUNTED + 4 * TEXTS) / 2**20
    pandas, ours = best["pandas"], best["fedadc"]
    print(f"seconds: {ours['seconds'] / pandas['seconds']:.2f} x pandas; CPU: {ours['cpu'] / pandas['cpu']:.2f} x")
    print(f"memory: {ours['megabytes'] / size:.2f} x the data of {size:,.0f} MB")


if __name__ == "__main__":
    main()
