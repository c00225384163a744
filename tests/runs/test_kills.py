"""Real processes that are killed, stopped by signals or out of disk space: a resumed run has the same bits.

tests/torture.py is the long version, for every method.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from commands import contents
from doomed import Doom, Life, finished, run_words
from family import eventually, linux
from torment import Torment, check_finished, config_of, differing, fill_the_disk, outcome

pytestmark = linux


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the uninterrupted runs that others are compared with."""
    return tmp_path_factory.mktemp("kills")


def torment(name: str, folder: Path, workers: int = 0) -> Torment:
    return Torment(name, config_of(name, 30), folder / name, workers)


def test_killed_at_any_moment(folder: Path) -> None:
    run = torment("fedadc", folder)
    for fate in (run.killed, run.killed_in_a_line, run.killed_in_a_write, lambda: run.killed(started=True)):
        run.suffer(fate)
    assert (run.row.kills, run.row.in_writes) == (4, 1)
    run.finish()


def test_killed_with_workers(folder: Path) -> None:
    run = torment("scaffold", folder, workers=2)
    run.suffer(run.killed_without_a_worker)
    run.suffer(run.killed_in_a_write)
    run.finish()
    assert run.row.workers_lost


def test_killed_with_ensembles_links_residuals_and_a_clock(folder: Path) -> None:
    run = torment("fedadc/broadcast", folder)
    run.suffer(run.killed)
    run.suffer(run.killed_in_a_write)
    run.finish()


def test_killed_before_it_ends_early(folder: Path) -> None:
    """It ends after the same round, with the same best model, also in its checkpoint."""
    run = torment("fedavg/patience", folder)
    best = run.quiet["model-best.safetensors"]
    assert 6 < len(run.quiet["metrics"]) < 30 and run.quiet["metrics"][-1]["stopped"]
    assert best != run.quiet["model.safetensors"]
    for fate in (run.killed, run.killed_in_a_write, run.killed_in_a_line):
        run.suffer(fate)
    run.finish()


def test_killed_and_damaged(folder: Path) -> None:
    run = torment("moon", folder)
    for victim, how in [("manifest", "flip"), ("tensors", "flip"), ("client", "delete")]:
        killed_by(Doom("append", False, 5, ""), run)
        tensors, client, *_ = run.own_files()
        run.damage({"manifest": tensors.with_suffix(".json"), "tensors": tensors, "client": client}[victim], how)
    run.finish()
    assert not run.unwarned


def test_killed_in_the_middle_of_a_checkpoint(folder: Path) -> None:
    """While it writes client states, or the tensors and the manifest: at the fifth or sixth such call."""
    run = torment("feddyn", folder)
    for call, after, part, number in [
        ("fsync", False, "clients/", 5), ("replace", True, "clients/", 6), ("unlink", True, "clients/", 2),
        ("fsync", False, "round-", 5), ("replace", True, "round-", 5), ("fsync", False, "round-", 6),
        ("replace", True, "round-", 6), ("unlink", True, "round-", 1),
    ]:  # fmt: skip
        killed_by(Doom(call, after, number, f"{run.out}/checkpoints/{part}"), run)
    run.finish()


def killed_by(doom: Doom, run: Torment) -> None:
    with run.life(doom=doom) as life:
        assert life.end() == -signal.SIGKILL, life.printed()
    run.look_after(life)


def test_a_run_stopped_by_a_signal_can_be_resumed(folder: Path) -> None:
    run = torment("fedadc", folder)
    run.config = {**run.config, "checkpoint": {"every": 1000}}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        run.suffer(lambda: run.ended_by(number))  # noqa: B023
        assert (run.out / "model.safetensors").is_file()
    run.finish()


def test_a_second_process_is_rejected(folder: Path, tmp_path: Path) -> None:
    run = torment("fedadc", folder)
    words = run_words(run.config, run.out)
    pause = Doom("fsync", True, 1, str(run.out / "checkpoints"), by=signal.SIGSTOP)  # until the other has been rejected
    with Life(words, tmp_path / "one", pause) as one, Life(words, tmp_path / "other", pause) as other:
        eventually(lambda: {one.code(), other.code()} != {None})
        first, second = (one, other) if one.code() is None else (other, one)
        assert second.end() == 2
        eventually(lambda: is_stopped(first.pid))
        first.signal(signal.SIGCONT)
        assert first.end() == 0
    refused = f"error: another process is writing to {run.out}; wait for it or choose another --out.\n"
    assert second.printed() == refused
    run.compare()


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def test_a_full_disk(tmp_path: Path) -> None:
    report = fill_the_disk(tmp_path / "full")
    if "not possible" in report:
        pytest.skip(report)
    assert "no bit differs" in report


COSINE = {"name": "cosine", "final": 0.1}


def test_settings_that_may_change_on_resume_change_no_bit(tmp_path: Path) -> None:
    """Workers, more rounds, evaluation, checkpoints; a schedule keeps its original horizon."""
    local = config_of("fedavg", 30)["local"]
    quiet = config_of("scaffold", 30, local={**local, "schedule": {**COSINE, "horizon": 20}})
    finished(run_words(quiet, tmp_path / "quiet"), tmp_path / "log")
    out = tmp_path / "run"
    short = config_of("scaffold", 20, local={**local, "schedule": COSINE})
    with Life(run_words(short, out), tmp_path / "log", Doom("append", False, 7, "")) as life:
        assert life.end() == -signal.SIGKILL
    changes = ["rounds=30", "evaluate.every=7", "checkpoint.every=5", "storage.memory_gb=1"]
    printed = finished(["resume", str(out), *changes, "--workers", "2"], tmp_path / "log")
    assert "resuming after round 6 of 30" in printed
    check_finished(out)
    assert differing(outcome(tmp_path / "quiet"), outcome(out)) == ["metrics"]  # evaluated after other rounds
    assert [r["train_loss"] for r in outcome(out)["metrics"]] == [
        r["train_loss"] for r in outcome(tmp_path / "quiet")["metrics"]
    ]


def test_settings_that_determine_the_result_must_not_change(folder: Path, tmp_path: Path) -> None:
    run = torment("fedadc", folder)
    killed_by(Doom("append", False, 7, ""), run)
    before = contents(run.out)
    words = [*run_words(run.config, run.out), "local.lr=0.01", "method.beta=0.5", "evaluate.every=2"]
    with Life(words, tmp_path / "log") as life:
        assert life.end() == 2
    assert re.fullmatch(
        r"error: the run in .* was started with other settings: .*; keep them, or start another run\.\n",
        life.printed(),
    )
    assert "local.lr 0.05 (now 0.01)" in life.printed() and "method.beta" in life.printed()
    assert "evaluate" not in life.printed()
    assert contents(run.out) == before
    run.finish()
