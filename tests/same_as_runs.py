"""Runs a list of jobs with one version of fedadc. `same_as.py` starts it once for each version that it compares.

    PYTHONPATH=TREE python same_as_runs.py TREE JOBS.json

A job is an object with `name`, `out`, `workers`, and either `config` (begin a run in `out`) or `resume` (overrides with
which the run in `out` goes on). One line of JSON per finished job goes to standard output: its name and its outcome,
which is "ran", "refused: ..." (a FedadcError) or "failed: ..." (any other exception, which is a bug).

Only `fedadc.run`, `fedadc.resume` and `fedadc.FedadcError` are used, because every version has these.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import fedadc


def outcome(job: dict[str, Any]) -> str:
    try:
        if "resume" in job:
            fedadc.resume(job["out"], job["resume"], workers=job["workers"])
        else:
            fedadc.run(job["config"], out=job["out"], workers=job["workers"])
    except fedadc.FedadcError as error:
        return f"refused: {error}"
    except Exception:
        return f"failed: {traceback.format_exc()}"
    return "ran"


def main(tree: str, jobs: str) -> None:
    imported = Path(fedadc.__file__).resolve()
    if not imported.is_relative_to(Path(tree).resolve()):
        sys.exit(f"fedadc was to come from {tree}, but came from {imported}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files of multiprocessing are removed
    for job in json.loads(Path(jobs).read_text()):
        print(json.dumps({"name": job["name"], "outcome": outcome(job)}), flush=True)


if __name__ == "__main__":  # worker processes import this file again
    main(*sys.argv[1:])
