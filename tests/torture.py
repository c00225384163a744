"""`make torture`: every method, killed again and again in real processes, must end with the bits of a quiet run.

Half an hour on two cores, two minutes with --quick. A process is killed at random moments, and ends itself at random
points of a checkpoint's writing; between the kills it is asked to end politely, loses workers, and finds its newest
checkpoint damaged. After every kill the folder is checked. Then: a full disk, and memory over many rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from family import children, descendants
from fedadc.methods import METHODS, PAIRS
from fedadc.processes import context, cores, get_ready

BASE: dict[str, Any] = {
    "seed": 3,
    "data": {"name": "digits", "clients": 20, "partition": {"name": "dirichlet", "alpha": 1.0}},
    "model": {"name": "mlp", "hidden": [16]},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.05, "weight_decay": 1e-3},
    "cohort": {"size": 6},
    "evaluate": {"every": 5},
    "checkpoint": {"every": 1},
}
IN_FILES = {"storage": {"memory_gb": 0}}
FAULTY = {"faults": {"drop": 0.3, "slow": 0.2}}
CONTRASTING = {"model": {"name": "mlp", "hidden": [16], "projection": 4}}
VARIED: dict[str, dict[str, Any]] = {  # so that every setting is met by some method
    "fedadc": {"local": {**BASE["local"], "schedule": {"name": "cosine"}}},
    "fedadc+": {"evaluate": {"every": 3, "overlap": True}},
    "fedadc_double": {"checkpoint": {"every": 2}, "evaluate": {"every": 1, "overlap": True}},
    "fedavgm": {"checkpoint": {"every": 2}, **FAULTY},
    "feddyn": {**IN_FILES, **FAULTY},
    "scaffold": {**IN_FILES, "checkpoint": {"every": 2}},
    "moon": {**CONTRASTING, **IN_FILES},
    "scaffold/moon": {"method": "scaffold", "objective": {"name": "model_contrast"}, **CONTRASTING, **FAULTY},
    "feddyn/fedgkd": {"method": "feddyn", "objective": {"name": "global_distillation"}, "checkpoint": {"every": 2}},
    "local_only": {"evaluate": {"every": 20}},
}
NAMES = list(dict.fromkeys([*METHODS, *PAIRS, *VARIED]))
STARTING = threading.Lock()  # multiprocessing looks after all of its children whenever it starts one
MANY_ROUNDS = 200  # enough for the memory to show where it goes
FLAT = 20  # kB per round that memory may grow: a cohort's states are some 400
PATIENCE = 120  # seconds until a process that does not end is a failure


def config_of(name: str, rounds: int, **changes: Any) -> dict[str, Any]:
    return {**BASE, "method": name, "rounds": rounds, **VARIED.get(name, {}), **changes}


@dataclass(frozen=True)
class Doom:
    """The point at which a process ends itself: before or after its n-th such call on a file in a folder."""

    call: str  # fsync, replace or unlink; or append, in the middle of a line of the metrics
    after: bool
    number: int
    folder: str
    by: int = signal.SIGKILL

    def arm(self) -> None:
        """What had not been flushed is lost, as when the power goes."""
        count, flushed = itertools.count(1), set[str]()

        def die(path: str) -> None:
            if path not in flushed and self.call in ("fsync", "replace") and Path(path).is_file():
                os.truncate(path, random.randint(0, Path(path).stat().st_size))
            os.kill(os.getpid(), self.by)

        def watched(call: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def calling(file: Any, *rest: Any, **kw: Any) -> None:
                path = str(Path(f"/proc/self/fd/{file}").readlink()) if isinstance(file, int) else os.fspath(file)
                strikes = call == self.call and path.startswith(self.folder) and next(count) == self.number
                if strikes and not self.after:
                    die(path)
                original(file, *rest, **kw)
                if call == "fsync":
                    flushed.add(path)
                if call == "replace" and path in flushed:
                    flushed.add(os.fspath(rest[0]))
                if strikes:
                    die(os.fspath(rest[0]) if call == "replace" else path)

            return calling

        for call in ("fsync", "replace", "unlink"):
            setattr(os, call, watched(call, getattr(os, call)))
        if self.call == "append":
            self._arm_the_metrics()

    def _arm_the_metrics(self) -> None:
        from fedadc.directory import MetricsFile

        count, whole = itertools.count(1), MetricsFile.append

        def append(metrics: Any, record: Any) -> None:
            if next(count) == self.number:
                metrics._stream.write(json.dumps(record).encode()[: random.randint(1, 100)])
                os.kill(os.getpid(), self.by)
            whole(metrics, record)

        MetricsFile.append = append  # type: ignore[method-assign]


def obey(words: list[str], log: Path, doom: Doom | None, server: str) -> None:
    """`fedadc ...` in this process, which has just been forked from a server that has torch and no threads.

    Its workers come from the same server: one of its own would need seconds to import torch.
    """
    forkserver._forkserver._forkserver_address = server  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # workers, which this server is for, never hear one
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.argv = ["fedadc", *words]
    if doom is not None:
        doom.arm()
    from fedadc.cli import main

    main()


class Life:
    """A process of `fedadc ...`: forked, which is quick, or started as a user does."""

    def __init__(self, words: list[str], log: Path, doom: Doom | None = None, started: bool = False) -> None:
        self.log, self.process = log, None
        if started:
            with log.open("wb") as stream:
                command = [sys.executable, "-m", "fedadc.cli", *words]
                self.started = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
            self.pid = self.started.pid
        else:
            get_ready()
            told = (words, log, doom, forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
            with STARTING:
                self.process = context().Process(target=obey, args=told)  # type: ignore[attr-defined]
                self.process.start()
            self.pid = self.process.pid

    def code(self) -> int | None:
        """Negative after a signal, None while it lives."""
        if self.process is None:
            return self.started.poll()
        with STARTING:
            return self.process.exitcode

    def until(self, condition: Callable[[], Any]) -> bool:
        """Wait for something; whether it came before the end."""
        end = time.monotonic() + PATIENCE
        while self.code() is None:
            if condition():
                return True
            assert time.monotonic() < end, f"process {self.pid} hangs:\n{self.printed()}"
            time.sleep(0.001)
        return False

    def end(self) -> int:
        self.until(lambda: False)
        code = self.code()
        assert code is not None
        return code

    def signal(self, number: int) -> None:
        if self.code() is None:
            os.kill(self.pid, number)

    def has_open(self, path: Path) -> bool:
        try:
            return path in {fd.readlink() for fd in Path(f"/proc/{self.pid}/fd").iterdir()}
        except OSError:  # a file that was closed meanwhile
            return False

    def printed(self) -> str:
        return self.log.read_text()

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.end()


def run_words(config: dict[str, Any], out: Path, workers: int = 0) -> list[str]:
    """`fedadc run` by a config beside the run directory."""
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    return ["run", str(file), "--out", str(out), "--resume", "--workers", str(workers)]


def finished(words: list[str], log: Path, **how: Any) -> str:
    """What a process prints that must come to a good end."""
    with Life(words, log, **how) as life:
        code = life.end()
    assert code == 0, f"exit code {code}:\n{life.printed()}"
    return life.printed()


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def recorded(out: Path) -> int:
    """Rounds in the metrics, in whole lines."""
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def manifests(out: Path) -> list[Path]:
    return sorted((out / "checkpoints").glob("round-*.json"), reverse=True)


def files_of(manifest: Path) -> dict[Path, str]:
    """The files of a checkpoint with their checksums."""
    told = json.loads(manifest.read_bytes())["manifest"]
    clients = {manifest.parent / "clients" / f"{k}-{t}.safetensors": mark for k, t, mark in told["clients"]}
    return {manifest.with_suffix(".safetensors"): told["state"], **clients}


def is_good(manifest: Path) -> bool:
    try:
        sealed = json.loads(manifest.read_bytes())
        told, mark = sealed["manifest"], sealed["manifest"]["metrics"]
        metrics = (manifest.parent.parent / "metrics.jsonl").read_bytes()[: mark["bytes"]]
        pairs = [(json.dumps(told, sort_keys=True, separators=(",", ":")).encode(), sealed["checksum"])]
        pairs += [(metrics, mark["checksum"]), *((file.read_bytes(), m) for file, m in files_of(manifest).items())]
        return all(sha(content) == expected for content, expected in pairs)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def good_rounds(out: Path) -> list[int]:
    """Of the checkpoints that are whole, newest first."""
    return [int(m.stem.removeprefix("round-")) for m in manifests(out) if is_good(m)]


def check_folder(out: Path, damaged: frozenset[str] = frozenset(), least: int = 0, most: int = 3) -> list[int]:
    """What must hold whenever a process was killed; `damaged` are checkpoints that we have spoilt ourselves."""
    lines = (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1] if (out / "metrics.jsonl").exists() else []
    assert [json.loads(line)["round"] for line in lines] == list(range(1, len(lines) + 1)), "metrics.jsonl"
    found, good = manifests(out), good_rounds(out)
    assert len(good) >= least, f"{least} good checkpoints have become {len(good)}"
    assert len(found) <= most, f"there are {len(found)} checkpoints"
    last_two = f"round-{[*good, 0, 0][1]:08d}"
    spoilt = {m.stem for m in found if m.stem > last_two and not is_good(m)} - damaged
    assert not spoilt, f"not whole: {spoilt}"
    return good


def check_finished(out: Path) -> None:
    """A finished run has left its last checkpoints and nothing that it does not need."""
    kept = manifests(out)
    named = {file.name for manifest in kept for file in (manifest, *files_of(manifest))}
    held = {file.name for file in (out / "checkpoints").rglob("*") if file.is_file()}
    assert 1 <= len(kept) <= 2 and held == named, f"left behind: {held ^ named}"
    plain = r"config\.yaml|environment\.json|metrics\.jsonl|checkpoints|model.*\.safetensors"
    strange = [file.name for file in out.iterdir() if not re.fullmatch(plain, file.name)]
    assert not strange, f"left behind: {strange}"


def outcome(out: Path) -> dict[str, Any]:
    """All that a run leaves, but for the time that it took and what happened to its workers."""
    check_folder(out)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "events")} for line in lines]
    files = [*out.glob("model*.safetensors"), *files_of(manifests(out)[0])]
    return {"metrics": records, **{str(file.relative_to(out)): file.read_bytes() for file in files}}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in {**one, **other} if one.get(key) != other.get(key))


def quiet_outcome(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Of a run that nobody disturbs, in a folder where it stays."""
    out = folder / "quiet"
    folder.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        finished(run_words(config, out), folder / "log")
    check_finished(out)
    return outcome(out)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A file system of its own on a folder; whether that was possible."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    possible = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield possible
    finally:
        if possible:
            subprocess.run(["umount", str(folder)], check=True)


@dataclass
class Row:
    """What a run went through."""

    name: str
    workers: int
    kills: int = 0
    in_writes: int = 0
    lost: list[int] = field(default_factory=list)  # rounds to do again, per kill
    signals: int = 0
    workers_lost: int = 0
    damages: int = 0
    wrong: str = ""


class Torment:
    """One config, run quietly once, then in processes that all end before their time."""

    def __init__(self, name: str, config: dict[str, Any], folder: Path, workers: int, seed: str = "") -> None:
        self.config, self.folder, self.workers = config, folder, workers
        self.row, self.rng = Row(name, workers), random.Random(f"{seed} {name} {workers}")
        self.quiet = quiet_outcome(config, folder)
        self.log = folder / "log"
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.out = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        self.good: list[int] = []
        self.least, self.most = 0, 3  # checkpoints that the next process may leave
        self.damaged: frozenset[str] = frozenset()
        self.unwarned = False  # whether a process is still to tell of the damage

    def life(self, **how: Any) -> Life:
        self.before = recorded(self.out)
        again = ["resume", str(self.out), "--workers", str(self.workers)]
        may_resume = (self.out / "config.yaml").exists()
        words = again if may_resume and self.rng.random() < 0.5 else run_words(self.config, self.out, self.workers)
        return Life(words, self.log, **how)

    def comes(self, life: Life, least: int = 0) -> bool:
        """Wait for a random moment: some rounds on, or as soon as it has the folder, and a little more."""
        more = self.rng.randint(least, 3)
        if not life.until(lambda: life.has_open(self.out / ".lock") and (not more or self.rounds_on() >= more)):
            return False
        time.sleep(self.rng.uniform(0, 0.03))
        return True

    def rounds_on(self) -> int:
        return recorded(self.out) - self.before

    def killed(self, started: bool = False) -> bool:
        """At a random moment, from outside. False, here and below, if the run came to its end before that."""
        with self.life(started=started) as life:
            if self.comes(life):
                life.signal(signal.SIGKILL)
        return self.buried(life)

    def killed_in_a_write(self) -> bool:
        call, after = self.rng.choice(["fsync", "replace", "unlink"]), self.rng.random() < 0.5
        with self.life(doom=Doom(call, after, self.rng.randint(1, 20), str(self.out / "checkpoints"))) as life:
            life.end()
        self.row.in_writes += life.code() == -signal.SIGKILL
        return self.buried(life)

    def killed_in_a_line(self) -> bool:
        with self.life(doom=Doom("append", False, self.rng.randint(1, 4), "")) as life:
            life.end()
        return self.buried(life)

    def killed_without_a_worker(self) -> bool:
        """A worker goes first, and that is recorded."""
        with self.life(started=True) as life:
            if self.comes(life, least=1):
                workers = sorted(descendants(life.pid) - children(life.pid))
                if workers:
                    os.kill(self.rng.choice(workers), signal.SIGKILL)
                self.row.workers_lost += life.until(self.recorded_a_death)
                life.signal(signal.SIGKILL)
        return self.buried(life)

    def recorded_a_death(self) -> bool:
        return any("was killed by SIGKILL" in line for line in _lines(self.out)[self.before :])

    def buried(self, life: Life) -> bool:
        if life.end() == 0:
            self.compare()
            self._begin_anew()
            return False
        assert life.end() == -signal.SIGKILL, f"exit code {life.end()}:\n{life.printed()}"
        self.look_after(life)
        self.row.kills += 1
        self.row.lost.append(recorded(self.out) - (self.good[0] if self.good else 0))
        if self.rng.random() < 0.2 and len(self.good) > 1 and not self.damaged:
            self.damage()
        return True

    def look_after(self, life: Life) -> None:
        before = self.good
        self.good = check_folder(self.out, self.damaged, self.least, self.most)
        self.least = min(2, len(self.good))
        self.most = max(2, len(manifests(self.out))) + 1  # a process writes one before it deletes others
        self.damaged = frozenset(m.stem for m in manifests(self.out) if m.stem in self.damaged and not is_good(m))
        self.unwarned = self.unwarned and "going on from the one before" not in life.printed()
        assert not (self.unwarned and self.good > before), "damage was passed over in silence"

    def ended_by(self, number: int) -> bool:
        """Politely: the last round is kept, and how to go on is told."""
        with self.life() as life:
            if self.comes(life, least=1):
                life.signal(number)
            code = life.end()
        if code == 0:
            return self.buried(life)
        assert code == 128 + number and f"`fedadc resume {self.out}`" in life.printed(), f"{code}:\n{life.printed()}"
        self.look_after(life)
        assert self.good[0] == recorded(self.out), "rounds were lost"
        self.row.signals += 1
        return True

    def damage(self, victim: Path | None = None, how: str | None = None) -> None:
        """Spoil the newest checkpoint, but nothing that the one before needs."""
        newest = next(m for m in manifests(self.out) if is_good(m))
        victim = victim or self.rng.choice([newest, *self.own_files()])
        how, content = how or self.rng.choice(["delete", "truncate", "flip"]), bytearray(victim.read_bytes())
        at = self.rng.randrange(len(content))
        if how == "delete":
            victim.unlink()
        else:
            content[at] ^= 1 << self.rng.randrange(8)
            victim.write_bytes(content[:at] if how == "truncate" else content)
        self.damaged, self.unwarned = frozenset({newest.stem}), newest.exists()
        self.least = min(2, len(self.good) - 1)
        self.good = self.good[1:]
        self.row.damages += 1

    def own_files(self) -> list[Path]:
        """Of the newest checkpoint: its tensors first, then the clients' states that the one before does not name."""
        newest, previous, *_ = (files_of(m) for m in manifests(self.out) if is_good(m))
        return [file for file in newest if file not in previous]

    def compare(self) -> None:
        check_finished(self.out)
        wrong = differing(self.quiet, outcome(self.out))
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        assert not wrong, f"differs: {', '.join(wrong[:3])}{more}"

    def finish(self) -> None:
        with self.life() as life:
            assert life.end() == 0, life.printed()
        self.look_after(life)
        self.compare()

    def fates(self, kills: int) -> list[Callable[[], bool]]:
        """How its processes will end, in random order: so many kills, half of them within a write."""
        some = _some(kills)
        lives = [self.killed_in_a_line, lambda: self.killed(started=True)]
        lives += [self.killed_without_a_worker if self.workers else lambda: self.killed(started=True)] * some
        lives += [self.killed_in_a_write] * (kills // 2)
        lives += [self.killed] * (kills - len(lives))
        lives += [lambda: self.ended_by(signal.SIGTERM), lambda: self.ended_by(signal.SIGINT)] * some
        self.rng.shuffle(lives)
        return lives

    def suffer(self, fate: Callable[[], bool]) -> None:
        """However often the run comes to its end before."""
        while not fate():
            pass

    def endure(self, kills: int, tick: Callable[[], None]) -> Row:
        try:
            for fate in self.fates(kills):
                self.suffer(fate)
                tick()
            self.finish()
        except AssertionError as error:
            self.row.wrong = str(error)
        return self.row


def _some(kills: int) -> int:
    return max(1, kills // 6)


def lives_of(kills: int) -> int:
    """How many processes one run takes that end before their time."""
    return kills + 2 * _some(kills)


def _lines(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


def fill_the_disk(folder: Path) -> str:
    """A disk that is full ends a run with one sentence; with more room it goes on. What came of it."""
    torment = Torment("full disk", config_of("scaffold", 40), folder, workers=0)
    with small_disk(folder / "disk", "200k") as possible:
        if not possible:
            return "not possible here: no file system may be mounted"
        torment.out = folder / "disk" / "run"
        for _ in range(2):  # the second finds no room at all
            with torment.life() as life:
                code = life.end()
            *_, last = life.printed().splitlines()
            one_sentence = last.startswith("error: ") and "No space left" in last and "Traceback" not in life.printed()
            assert code == 2 and one_sentence, f"exit code {code}:\n{life.printed()}"
            torment.look_after(life)
            assert torment.good, "there is no checkpoint"
        subprocess.run(["mount", "-o", "remount,size=50m", str(folder / "disk")], check=True)
        torment.finish()
    return f"the run ended by it after round {torment.before}, went on with more room, and no bit differs"


@dataclass
class Memory:
    """Resident memory over the rounds of a run, in kB."""

    name: str
    rounds: list[int] = field(default_factory=list)
    main: list[float] = field(default_factory=list)
    worker: list[float] = field(default_factory=list)  # the mean

    def slopes(self) -> list[float]:
        """kB per round of main process and worker, by least squares over all but the first quarter."""
        rounds, kb = np.array(self.rounds), np.array([self.main, self.worker]).T
        counted = (rounds > rounds[-1] / 4) & np.isfinite(kb).all(axis=1)  # workers may be gone before the last
        return [float(slope) for slope in np.polyfit(rounds[counted], kb[counted], 1)[0]]


def resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
    except (OSError, IndexError):  # gone in the meantime
        return float("nan")


def memory_of(name: str, folder: Path, tick: Callable[[int], None]) -> Memory:
    """1,000 clients, whose states soon outgrow the memory that they may take."""
    config = {
        **BASE, "method": name, "rounds": MANY_ROUNDS, "cohort": {"size": 20}, "model": {"name": "mlp", "hidden": [64]},
        "data": {"name": "digits", "clients": 1000}, "storage": {"memory_gb": 0.001}, "checkpoint": {"every": 5},
    }  # fmt: skip
    folder.mkdir(parents=True)
    found, out = Memory(name), folder / "run"
    with Life(run_words(config, out, workers=2), folder / "log", started=True) as life:
        done = 0
        while life.until(lambda: recorded(out) > done):  # noqa: B023
            tick(recorded(out) - done)
            done = recorded(out)
            workers = descendants(life.pid) - children(life.pid)
            found.rounds.append(done)
            found.main.append(resident(life.pid))
            found.worker.append(float(np.mean([resident(pid) for pid in workers] or [np.nan])))
    assert life.code() == 0, life.printed()
    return found


def kills_table(rows: list[Row]) -> Table:
    table = Table(title="Killed, and gone on", box=SIMPLE, padding=0, collapse_padding=True)
    heads = (
        "workers",
        "kills",
        "in a\nwrite",
        "rounds\nlost",
        "at\nmost",
        "signals",
        "workers\nkilled",
        "files\nspoilt",
    )
    for head in ("method", *heads, "bits\ndiffering"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for r in sorted(rows, key=lambda r: (NAMES.index(r.name), r.workers)):
        lost = f"{np.mean(r.lost or [0]):.1f}", max(r.lost or [0])
        told = (r.workers, r.kills, r.in_writes, *lost, r.signals, r.workers_lost, r.damages)
        table.add_row(r.name, *map(str, told), "see below" if r.wrong else "0")
    return table


def memory_table(found: list[Memory]) -> Table:
    table = Table(title="Resident memory: 1,000 clients, cohorts of 20", box=SIMPLE, padding=(0, 1))
    for head in ("method", "rounds", "main: MB", "kB per round", "a worker: MB", "kB per round"):
        table.add_column(head, justify="left" if head == "method" else "right")
    for m in found:
        main, worker = m.slopes()
        told = (
            m.rounds[-1],
            f"{m.main[-1] / 1024:.0f}",
            f"{main:+.1f}",
            f"{m.worker[-1] / 1024:.0f}",
            f"{worker:+.1f}",
        )
        table.add_row(m.name, *map(str, told))
    return table


def torment_all(options: argparse.Namespace, folder: Path, progress: Progress) -> list[Row]:
    cells = list(itertools.product(options.methods, options.workers))
    random.Random(options.seed).shuffle(cells)  # so that the time left is told rightly
    task = progress.add_task("kills", total=len(cells) * lives_of(options.kills))

    def endured(cell: tuple[str, int]) -> Row:
        (name, workers), began = cell, time.monotonic()
        place = folder / f"{NAMES.index(name)}-{workers}"
        try:
            torment = Torment(name, config_of(name, 5 * options.kills), place, workers, str(options.seed))
            row = torment.endure(options.kills, lambda: progress.advance(task))
        except AssertionError as error:
            row = Row(name, workers, wrong=str(error))
        if not row.wrong:
            shutil.rmtree(place)
        how = row.wrong.split("\n")[0] or "same bits"
        progress.console.print(f"{name}, {workers} workers: {row.kills} kills, {how}, {time.monotonic() - began:.0f} s")
        return row

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(endured, cells))


def remember_all(names: list[str], folder: Path, progress: Progress) -> list[Memory]:
    task = progress.add_task("memory", total=MANY_ROUNDS * len(names))
    return [memory_of(name, folder / f"memory-{name}", lambda new: progress.advance(task, new)) for name in names]


def options_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25, help="per method and number of workers")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=NAMES, help="of " + ", ".join(NAMES))
    parser.add_argument("--workers", type=lambda text: [int(n) for n in text.split(",")], default=[0, 2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=cores(), help="methods at a time")
    parser.add_argument("--quick", action="store_true", help="few kills, of few methods")
    options = parser.parse_args(words)
    if strange := set(options.methods) - set(NAMES):
        parser.error(f"there is no method {', '.join(sorted(strange))}")
    options.memory = ["fedadc", "scaffold", "feddyn"]
    if options.quick:
        options.kills, options.memory = 6, ["scaffold"]
        options.methods = ["fedadc", "fedadc_double", "scaffold", "feddyn", "moon", "local_only"]
    return options


def main() -> int:
    options, console, began = options_of(), Console(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fedadc-torture-"))
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left:", TimeRemainingColumn()
    with Progress("{task.description}", *columns, console=console, speed_estimate_period=600) as progress:
        rows = torment_all(options, folder, progress)
        memory = remember_all(options.memory, folder, progress)
    console.print(kills_table(rows), memory_table(memory))
    wrong = [f"{row.name}, {row.workers} workers: {row.wrong}" for row in rows if row.wrong]
    wrong += [f"{m.name}: memory grows by {max(m.slopes()):.0f} kB per round" for m in memory if max(m.slopes()) > FLAT]
    try:
        console.print(f"A full disk: {fill_the_disk(folder / 'full')}.")
    except AssertionError as error:
        wrong.append(f"a full disk: {error}")
    for sentence in wrong:
        console.print(sentence, style="red", markup=False)
    kills, minutes = sum(row.kills for row in rows), (time.monotonic() - began) / 60
    console.print(f"{kills} kills in {minutes:.0f} minutes; {len(wrong)} things went wrong.")
    if wrong:
        console.print(f"What is left of them is in {folder}.")
    else:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
