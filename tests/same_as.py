"""`make same-as REF=v0.1.0`: proof that the working tree computes the same bits as another commit.

Both versions run the same list of configs (same_as_cases.py) with 0 and with 2 worker processes, each version in a
process of its own, side by side. Then every model, checkpoint and client state is compared byte for byte, and every
line of metrics.jsonl apart from `seconds` and `events`. Runs that REF left halfway are also resumed by the working tree
and must end as REF's uninterrupted runs do. A config that both versions refuse counts as equal, whatever they say.
Cases whose results have changed on purpose since REF are left out and named. The exit code is 1 if anything differs.

    python tests/same_as.py v0.1.0                            # a tag, a branch or a commit
    python tests/same_as.py v0.1.0 --only 'resumed/*'         # some of the cases
    python tests/same_as.py v0.1.0 --keep /tmp/same-as        # leave the runs there, to look at them
    python tests/same_as.py --self-test                       # shows that a change to any random stream is found

Both source trees are copied first, so the working tree may be edited meanwhile. It is quicker with TMPDIR=/dev/shm.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from same_as_cases import Case, all_cases
from same_as_compare import compared_files, differing_files

ROOT = Path(__file__).resolve().parent.parent
RUNNER = Path(__file__).with_name("same_as_runs.py")
WORKERS = (0, 2)
PROGRESS_EVERY = 20  # seconds between two lines about progress
SHOWN = 20  # runs that differ, in the report
PURPOSES = {  # by which random numbers are drawn, and for each a case that uses it
    "batches": "fedavg/cross_entropy",
    "cohort": "fedavg/cross_entropy",
    "partition": "fedavg/cross_entropy",
    "model": "fedavg/cross_entropy",
    "hold out": "momentum/fedavg",
    "local": "fedper/cross_entropy",
    "augment": "images/cnn-augmented",
    "selection": "settings/clusters",
    "uplink": "overlap/scaffold",
    "clock": "overlap/scaffold",
    "faults": "broadcast/scaffold",
    "slow": "settings/slow-epochs",
    "absent": "broadcast/scaffold",
    "dropout": "model/noisy",
    "evaluation": "model/noisy",
}
WITHOUT_RESULT = {  # which change no bit of a run
    "probe",  # a forward pass before training
    "example of an upload",
    "stand-in",  # samples in the place of data that is absent, for an estimate
    "sweep",  # which settings are tried; each is a run of its own
    "sweep importance",
    "bootstrap",
    "bootstrap of",  # intervals of an evaluation
    "hash",  # remarks about equal rows
}
DRAW = r'\b(?:generator|rng|torch_seeded)\([^")]*"'  # a call that names a purpose, up to the name
Job = dict[str, Any]  # what same_as_runs.py reads


@dataclass(frozen=True)
class Run:
    """A case with a number of worker processes."""

    case: Case
    workers: int

    @property
    def name(self) -> str:
        return f"{self.case.name} ({self.workers} workers)"


@dataclass(frozen=True)
class Version:
    """A version of the package. Its folder holds the sources, the run directories and what its process wrote."""

    name: str  # in messages
    folder: Path

    @property
    def tree(self) -> Path:
        return self.folder / "tree"

    def out(self, run: Run) -> Path:
        return self.folder / "runs" / run.case.name / f"{run.workers}-workers"

    def outcomes(self) -> dict[str, str]:
        """By the name of the run, of all runs that have ended: ran, refused or failed."""
        file = self.folder / "outcomes.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last may be incomplete
        return {line["name"]: line["outcome"] for line in map(json.loads, lines)}


def version_of_commit(ref: str, folder: Path) -> Version:
    found = subprocess.run(["git", "-C", str(ROOT), "archive", ref, "fedadc"], capture_output=True)
    if found.returncode:
        sys.exit(f"git cannot give {ref}: {found.stderr.decode().strip()}\nIn a shallow clone: git fetch --unshallow")
    version = Version(ref, folder)
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(version.tree, filter="data")
    return version


def version_of_working_tree(folder: Path, name: str = "the working tree") -> Version:
    version = Version(name, folder)
    shutil.copytree(ROOT / "fedadc", version.tree / "fedadc", ignore=shutil.ignore_patterns("__pycache__"))
    return version


def purposes_in(tree: Path) -> set[str]:
    """The names of all purposes for which random numbers are drawn; of a formatted name the part before a brace."""
    texts = [file.read_text(encoding="utf-8") for file in (tree / "fedadc").rglob("*.py")]
    return {name.partition("{")[0].strip() for text in texts for name in re.findall(rf'{DRAW}([^"]*)"', text)}


def with_purpose_renamed(purpose: str, folder: Path) -> Version:
    """The working tree, with one string changed of those from which random numbers are derived."""
    version, changes = version_of_working_tree(folder, f"the working tree with {purpose!r} renamed"), 0
    call = re.compile(rf"({DRAW})({purpose}\b)")
    for file in version.tree.rglob("*.py"):
        text, count = call.subn(r"\1another \2", file.read_text(encoding="utf-8"))
        file.write_text(text, encoding="utf-8")
        changes += count
    if not changes:
        sys.exit(f"nothing in fedadc/ draws random numbers for {purpose!r}; bring PURPOSES in {__file__} up to date")
    return version


@contextmanager
def process_of(version: Version, jobs: Sequence[Job]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does jobs with a version. It is ended when the block is left."""
    (version.folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(RUNNER), str(version.tree), str(version.folder / "jobs.json")]
    environment = {**os.environ, "PYTHONPATH": str(version.tree), "PYTHONSAFEPATH": "1"}
    with (version.folder / "outcomes.jsonl").open("wb") as stdout, (version.folder / "log").open("wb") as stderr:
        data = version.folder.parent / "data"  # where configs look for the users' modules
        cwd = data if data.is_dir() else version.folder
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=stdout, stderr=stderr)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def do_jobs(work: Mapping[Version, Sequence[Job]]) -> None:
    """Each version does its jobs, all of them side by side; if one process fails, everything ends."""
    total, began = sum(map(len, work.values())), time.monotonic()
    last, running = began, True
    with ExitStack() as stack:
        processes = [(version, stack.enter_context(process_of(version, jobs))) for version, jobs in work.items()]
        while running:
            time.sleep(0.1)
            running = any(process.poll() is None for _, process in processes)
            for version, process in processes:
                if process.poll():
                    sys.exit(f"{version.name}: the process failed\n{(version.folder / 'log').read_text()[-2000:]}")
            if time.monotonic() - last > PROGRESS_EVERY:
                last, done = time.monotonic(), sum(len(version.outcomes()) for version in work)
                left = f", about {(last - began) / done * (total - done) / 60:.0f} minutes left" if done else ""
                print(f"{done:,} of {total:,} runs{left}", flush=True)


def job(run: Run, out: Path, rounds: int | None = None) -> Job:
    config = run.case.config if rounds is None else {**run.case.config, "rounds": rounds}
    return {"name": run.name, "out": str(out), "workers": run.workers, "config": config}


def job_of_new_version(run: Run, out: Path) -> Job:
    """The run, or the second part of it where the old version has done the first."""
    whole = job(run, out)
    return whole if run.case.halfway is None else {**whole, "resume": [f"rounds={run.case.config['rounds']}"]}


def do_runs(old: Version, new: Version, runs: Sequence[Run]) -> None:
    halves = [job(run, new.out(run), run.case.halfway) for run in runs if run.case.halfway is not None]
    if halves:
        do_jobs({old: halves})
    do_jobs({
        old: [job(run, old.out(run)) for run in runs],
        new: [job_of_new_version(run, new.out(run)) for run in runs],
    })  # fmt: skip


def differing_outcomes(run: Run, old: str, new: str) -> list[str]:
    """What is wrong with the outcomes of a run in two versions."""
    if failed := [outcome for outcome in (old, new) if outcome.startswith("failed")]:
        return [f"a version {failed[0]}"]
    if old.startswith("refused") and new.startswith("refused"):
        return [] if run.case.may_be_refused else [f"both versions refuse it, so nothing is compared: {old}"]
    return [] if old == new else [f"the old version {old}; the new version {new}"]


@dataclass
class Comparison:
    """The result of comparing what two versions left."""

    runs: int
    refused: int  # by both versions
    files: int
    differing: dict[str, list[str]]  # run -> a phrase for everything that differs

    def report(self) -> str:
        counts = f"{self.runs:,} runs ({self.refused} of them refused by both versions), {self.files:,} files"
        if not self.differing:
            return f"{counts}: all equal"
        lines = []
        for name, phrases in list(self.differing.items())[:SHOWN]:
            more = [f"and {len(phrases) - 2} more files"] if len(phrases) > 2 else []
            lines += [name, *(f"    {phrase}" for phrase in phrases[:2] + more)]
        lines += [f"and {len(self.differing) - SHOWN} more runs"] if len(self.differing) > SHOWN else []
        return "\n".join([*lines, f"{counts}: {len(self.differing):,} runs differ"])


def compare(old: Version, new: Version, runs: Sequence[Run]) -> Comparison:
    outcomes, found = (old.outcomes(), new.outcomes()), Comparison(len(runs), 0, 0, {})
    for run in runs:
        before, now = (found[run.name] for found in outcomes)
        files = compared_files(old.out(run)), compared_files(new.out(run))
        phrases = differing_outcomes(run, before, now) or differing_files(*files)
        if before == now == "ran" and not files[0]:
            phrases = ["the run left no file that could be compared"]
        found.refused += before.startswith("refused") and now.startswith("refused")
        found.files += len(files[0])
        if phrases:
            found.differing[run.name] = phrases
    return found


def same_as(ref: str, folder: Path, only: str) -> int:
    """Compare the working tree with a commit; the exit code."""
    began = time.monotonic()
    old, new = version_of_commit(ref, folder / "old"), version_of_working_tree(folder / "new")
    chosen = [case for case in cases_in(folder) if fnmatch.fnmatch(case.name, only)]
    if not chosen:
        sys.exit(f"no case is called {only}")
    changed = [case.name for case in chosen if changed_since(old, case)]
    if changed:
        print(f"left out, because results changed on purpose since {ref}: {', '.join(changed)}", flush=True)
    runs = [Run(case, workers) for case in chosen if case.name not in changed for workers in WORKERS]
    do_runs(old, new, runs)
    found = compare(old, new, runs)
    print(f"{found.report()} ({(time.monotonic() - began) / 60:.1f} minutes)")
    return 1 if found.differing else 0


def changed_since(old: Version, case: Case) -> bool:
    """Whether the results of a case have changed on purpose since the old version."""
    return case.since is not None and not (old.tree / case.since).exists()


def cases_in(folder: Path) -> list[Case]:
    """All cases, with their data in a folder below this one."""
    (folder / "data").mkdir()
    return all_cases(folder / "data")


def self_test(folder: Path, purposes: Collection[str] = tuple(PURPOSES)) -> list[str]:
    """What the comparison gets wrong, a sentence each.

    Two copies of the working tree must be equal, and a copy in which one purpose of random numbers has another name
    must differ from them.
    """
    cases = {case.name: case for case in cases_in(folder)}
    runs = {purpose: [Run(cases[PURPOSES[purpose]], workers) for workers in WORKERS] for purpose in purposes}
    every_run = list({run.name: run for some in runs.values() for run in some}.values())
    first, second = (version_of_working_tree(folder / name) for name in ("first", "second"))
    renamed = {purpose: with_purpose_renamed(purpose, folder / purpose) for purpose in purposes}
    work = [(first, every_run), (second, every_run), *((renamed[purpose], runs[purpose]) for purpose in purposes)]
    for start in range(0, len(work), 2):
        do_jobs({version: [job(r, version.out(r)) for r in some] for version, some in work[start : start + 2]})
    wrong = [f"two copies differ: {name}" for name in compare(first, second, every_run).differing]
    for purpose, some in runs.items():
        found = compare(first, renamed[purpose], some)
        print(f"{purpose!r} renamed: {len(found.differing)} of {found.runs} runs differ", flush=True)
        wrong += [f"{purpose!r} renamed, and {run.name} is equal" for run in some if run.name not in found.differing]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", nargs="?", help="the commit with which the working tree is compared")
    parser.add_argument("--only", default="*", help="a pattern of names of cases")
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which are otherwise deleted")
    parser.add_argument("--self-test", action="store_true", help="shows that differences are found; needs no commit")
    options = parser.parse_args()
    if (options.ref is None) != options.self_test:
        parser.error("give a commit, or --self-test")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and folders go, as after Ctrl-C
    if options.keep is not None:
        options.keep.mkdir(parents=True)
    temporary = tempfile.TemporaryDirectory(prefix="fedadc-same-as-", ignore_cleanup_errors=True)
    with temporary if options.keep is None else nullcontext(options.keep) as place:
        folder = Path(place).resolve()
        if not options.self_test:
            return same_as(options.ref, folder, options.only)
        wrong = self_test(folder)
    print("\n".join(wrong) or "self-test: equal copies are equal, and every renamed purpose is noticed")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
