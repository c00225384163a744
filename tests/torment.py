"""One run that is killed, asked to end and damaged again and again, and what must hold on the disk all the while."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from doomed import Doom, Life, finished, run_words
from family import children, descendants

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
    "scaffold": {**IN_FILES, "checkpoint": {"every": 2}, "evaluate": {"every": 5, "drift": True}},
    "moon": {**CONTRASTING, **IN_FILES},
    "scaffold/moon": {"method": "scaffold", "objective": {"name": "model_contrast"}, **CONTRASTING, **FAULTY},
    "feddyn/fedgkd": {"method": "feddyn", "objective": {"name": "global_distillation"}, "checkpoint": {"every": 2}},
    "fedadc/broadcast": {
        "method": "fedadc",
        "objective": {"name": "self_confidence", "teacher": "ema"},
        "ensembles": {"swa": {"start": 3}, "ema": {}, "lookahead": {}},
        "communication": {"downlink": {"name": "broadcast", "absent": 0.2}, "uplink": {"name": "top_k", "share": 0.2}},
        "clock": {"down": {"name": "lognormal", "median": 1e4, "sigma": 1.0}},
        "cohort": {"size": 10, "selection": "covering", "weighting": "samples"},
        "evaluate": {"every": 5, "drift": True},
        **FAULTY,
    },
    "scaffold/overlap": {
        "method": "scaffold",
        "ensembles": {"lookahead": {"every": 2}},
        "communication": {"downlink": "overlap", "uplink": "eight_bit"},
        "clock": {"up": {"name": "uniform", "low": 1e4, "high": 2e4}},
        "cohort": {"size": 6, "selection": "clusters"},
        **FAULTY,
    },
    "fedavg/patience": {
        "method": "fedavg",
        "data": {**BASE["data"], "validation": 0.2},
        "evaluate": {"every": 2, "overlap": True},
        "stop": {"patience": 3, "min_delta": 0.02},
        "local": {**BASE["local"], "lr": 0.02, "optimizer": {"name": "adam", "moments": "client"}},
        "checkpoint": {"every": 2},
    },
    "ditto/regression": {  # its data is in the file of `numbers`
        "method": "ditto",
        "task": "regression",
        "data": {"name": "npz", "clients": 20, "validation": 0.2},
        "evaluate": {"every": 2, "metrics": ["per_target"]},
        "cohort": {"size": 6, "weighting": "samples"},
        **IN_FILES,
    },
    "fedper": {**IN_FILES, **FAULTY},
    "ditto": {"checkpoint": {"every": 2}, "evaluate": {"every": 3, "overlap": True}},
    "local_only": {"evaluate": {"every": 20}},
}


def config_of(name: str, rounds: int, **changes: Any) -> dict[str, Any]:
    tree = {**BASE, "method": name, "rounds": rounds, **VARIED.get(name, {}), **changes}
    if tree["data"]["name"] == "npz":
        tree["data"] = {**tree["data"], "path": numbers()}
    return tree


@cache
def numbers() -> str:
    """A file of arrays with two numbers to predict, of different units."""
    rng, path = np.random.default_rng(0), Path(tempfile.mkdtemp(prefix="fedadc-numbers-")) / "numbers.npz"
    x = rng.normal(size=(400, 5))
    np.savez(path, x=x, y=np.stack([300 + 50 * x[:, 0], np.abs(x[:, 1]) - 3], axis=1))
    return str(path)


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
    content = json.loads(manifest.read_bytes())["manifest"]
    clients = {manifest.parent / "clients" / f"{k}-{t}.safetensors": mark for k, t, mark in content["clients"]}
    return {manifest.with_suffix(".safetensors"): content["state"], **clients}


def is_good(manifest: Path) -> bool:
    try:
        sealed = json.loads(manifest.read_bytes())
        content, mark = sealed["manifest"], sealed["manifest"]["metrics"]
        metrics = (manifest.parent.parent / "metrics.jsonl").read_bytes()[: mark["bytes"]]
        pairs = [(json.dumps(content, sort_keys=True, separators=(",", ":")).encode(), sealed["checksum"])]
        pairs += [(metrics, mark["checksum"]), *((file.read_bytes(), m) for file, m in files_of(manifest).items())]
        return all(sha(data) == expected for data, expected in pairs)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def good_rounds(out: Path) -> list[int]:
    """Of the checkpoints that are whole, newest first."""
    return [int(m.stem.removeprefix("round-")) for m in manifests(out) if is_good(m)]


def check_folder(out: Path, damaged: frozenset[str] = frozenset(), least: int = 0, most: int = 3) -> list[int]:
    """What must hold whenever a process was killed; `damaged` are checkpoints that the test has damaged itself."""
    lines = (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1] if (out / "metrics.jsonl").exists() else []
    assert [json.loads(line)["round"] for line in lines] == list(range(1, len(lines) + 1)), "metrics.jsonl"
    found, good = manifests(out), good_rounds(out)
    assert len(good) >= least, f"{least} good checkpoints have become {len(good)}"
    assert len(found) <= most, f"there are {len(found)} checkpoints"
    last_two = f"round-{[*good, 0, 0][1]:08d}"
    broken = {m.stem for m in found if m.stem > last_two and not is_good(m)} - damaged
    assert not broken, f"not whole: {broken}"
    return good


def check_finished(out: Path) -> None:
    """A finished run has left its last checkpoints and nothing that it does not need."""
    kept = manifests(out)
    named = {file.name for manifest in kept for file in (manifest, *files_of(manifest))}
    held = {file.name for file in (out / "checkpoints").rglob("*") if file.is_file()}
    assert 1 <= len(kept) <= 2 and held == named, f"left behind: {held ^ named}"
    plain = r"config\.yaml|environment\.json|preprocessing\.json|metrics\.jsonl|checkpoints|model.*\.safetensors"
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
        self.unwarned = False  # True while no process has reported the damage

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
        self.unwarned = self.unwarned and "continuing from the checkpoint before it" not in life.printed()
        assert not (self.unwarned and self.good > before), "damage was passed over in silence"

    def ended_by(self, number: int) -> bool:
        """End a process by a signal: it keeps the last round and prints how to resume."""
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
            assert code == 4 and one_sentence, f"exit code {code}:\n{life.printed()}"
            torment.look_after(life)
            assert torment.good, "there is no checkpoint"
        subprocess.run(["mount", "-o", "remount,size=50m", str(folder / "disk")], check=True)
        torment.finish()
    return f"the run ended by it after round {torment.before}, went on with more room, and no bit differs"
