"""The run directory when something fails: no user files are lost, and what is kept can be resumed."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedadc
from commands import contents
from conftest import small_federation
from fedadc.config.build import prepare
from fedadc.errors import CannotResume, FedadcError
from fedadc.runs.directory import MetricsFile, RunDirectory, metrics_prefix
from fedadc.runs.evaluate import evaluate
from fedadc.runs.record import is_finished
from fedadc.runs.runner import execute
from fedadc.system.files import folder_lock
from fedadc.system.signals import Stopped
from fedadc.training.client_states import Storage
from snapshots import CONFIG, outcome, run_with_snapshots

SHORT = {**CONFIG, "rounds": 3}


def stopping_after(round: int) -> Any:
    def watch(record: dict[str, Any]) -> None:
        if record["round"] == round:
            raise Stopped(15)

    return watch


def test_the_last_line_of_the_metrics_can_be_replaced(tmp_path: Path) -> None:
    """Also after the file was opened again; its checksum is that of the lines in it."""
    path, size = tmp_path / "metrics.jsonl", 0
    for begun in (0, 1, 2):  # lines when it is opened
        metrics = MetricsFile(path, size)
        assert [r["round"] for r in metrics.records] == list(range(1, begun + 1))
        metrics.append({"round": begun + 1, "note": "a longer line, which is replaced by a shorter one"})
        metrics.replace_last({"round": begun + 1})
        assert metrics.flush() == metrics_prefix(path, path.stat().st_size)
        metrics.close()
        reopened = MetricsFile(path, path.stat().st_size)
        reopened.replace_last({"round": begun + 1, "é": begun})
        size = reopened.flush().bytes
        assert reopened.flush() == metrics_prefix(path, path.stat().st_size) and size == path.stat().st_size
        assert [json.loads(line) for line in path.read_text().splitlines()] == reopened.records
        reopened.close()


# --- replacing a run -------------------------------------------------------------------------------------------------


def test_a_full_disk_does_not_destroy_the_old_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fedadc.run(SHORT, out=tmp_path / "a")
    before = contents(tmp_path / "a")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("fedadc.runs.directory.shutil.disk_usage", lambda _: usage._replace(free=1000))
    for overwrite, place in ((True, "a"), (False, "new")):
        with pytest.raises(FedadcError, match=r"the disk has 1,000 bytes left, but this run's first checkpoint"):
            fedadc.run({**SHORT, "seed": 1}, out=tmp_path / place, overwrite=overwrite)
    assert contents(tmp_path / "a") == before and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_run_on_a_file_system_of_its_own_can_be_replaced(tmp_path: Path) -> None:
    """A container volume is an example: nothing can be moved out of it by renaming."""
    place = tmp_path / "volume"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount")
    try:
        fedadc.run(SHORT, out=place)
        fedadc.run({**SHORT, "seed": 1}, out=place, overwrite=True)
        assert json.loads((place / "environment.json").read_text()) and not list(place.glob(".replaced-*"))
        assert fedadc.load_config(place / "config.yaml").seed == 1
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_the_old_run_is_kept_until_the_new_one_isis_finished(tmp_path: Path) -> None:
    fedadc.run(SHORT, out=tmp_path / "lr[0.1]*")  # characters that are special in a shell
    place = tmp_path / "lr[0.1]*"
    old, messages = contents(place), []
    with pytest.raises(Stopped):
        fedadc.run({**SHORT, "seed": 1}, out=place, overwrite=True, watch=stopping_after(1), notes=messages.append)
    (replaced,) = place.glob(".replaced-*")
    assert contents(replaced) == old and "still contains the run that it replaces" in messages[-1]
    assert f"resume it with `fedadc resume '{place}'`" in messages[-1]  # quoted for the shell
    fedadc.resume(place)
    assert not list(place.glob(".replaced-*")) and [p.name for p in tmp_path.iterdir()] == [place.name]


def test_the_old_run_is_kept_if_the_new_one_is_killed_before_its_first_round(tmp_path: Path) -> None:
    fedadc.run(SHORT, out=tmp_path / "a")
    old, config = contents(tmp_path / "a"), {**SHORT, "seed": 1}
    with pytest.raises(Stopped):
        fedadc.run(config, out=tmp_path / "a", overwrite=True, watch=stopping_after(1))
    for name in ("checkpoints", "model.safetensors", "metrics.jsonl"):  # the state after a kill -9 in round 1
        path = tmp_path / "a" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    warnings: list[str] = []
    plan = prepare(fedadc.load_config(config), out=tmp_path / "a")
    directory = RunDirectory.reopen(tmp_path / "a", plan, {}, warnings.append)
    assert "is saved at round 0" in str(directory.save_after_interruption(Stopped(15)))
    assert not (tmp_path / "a/model.safetensors").exists()  # nothing was trained
    (replaced,) = (tmp_path / "a").glob(".replaced-*")
    assert contents(replaced) == old


# --- only files written by fedadc are deleted ------------------------------------------------------------------------


def test_only_files_written_by_fedadc_are_deleted(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "clients" / ".snapshot").mkdir(parents=True)
    for name in ("thesis.txt", "best.safetensors", "round-7.json", "clients/list.csv", "clients/7.safetensors"):
        (mine / name).write_text("years of work")
    federation = fedadc.Federation(
        model=torch.nn.Linear(5, 4).double(), data=small_federation(), method=fedadc.methods.FedDyn()
    )
    checkpoints = fedadc.runs.Checkpoints(mine, federation)
    before = contents(mine)
    for result in federation.rounds(4):
        checkpoints.write(result.state)
    assert {name: text for name, text in contents(mine).items() if text == b"years of work"} == before
    assert sorted(p.name for p in mine.glob("round-0*.json")) == ["round-00000003.json", "round-00000004.json"]


def test_files_of_the_user_in_folders_of_a_run_stay(tmp_path: Path) -> None:
    """`resume` leaves them alone, and `overwrite` is refused while there are any."""
    place = tmp_path / "run"
    fedadc.run({**CONFIG, "rounds": 2}, out=place)
    mine = [place / "fedadc-states-mine" / "notes.txt", place / "work.part" / "a.txt", place / "checkpoints" / "b.txt"]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("years of work")
    (place / "fedadc-states-mine" / "7.safetensors").touch()  # of a killed process
    fedadc.resume(place, "rounds=3")
    assert all(file.read_text() == "years of work" for file in mine)
    assert not (place / "fedadc-states-mine" / "7.safetensors").exists()
    with pytest.raises(FedadcError, match=r"checkpoints.* not part of a run"):
        fedadc.run({**CONFIG, "rounds": 2}, out=place, overwrite=True)
    assert all(file.read_text() == "years of work" for file in mine)


@pytest.mark.parametrize("how", ["gone", "dangling", "older"])
def test_a_run_without_its_checkpoints_is_not_restarted(how: str, tmp_path: Path) -> None:
    run_with_snapshots(CONFIG, tmp_path / "whole", {4})
    place = tmp_path / "after-4"
    shutil.rmtree(place / "checkpoints")
    if how == "dangling":
        (place / "checkpoints").symlink_to(tmp_path / "nowhere")
    if how == "older":
        (place / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    before = contents(place)
    with pytest.raises(
        CannotResume, match="cannot be resumed because its checkpoints are missing, and nothing was changed"
    ):
        fedadc.resume(place)
    assert contents(place) == before


def test_client_states_that_belong_to_no_checkpoint_are_deleted(tmp_path: Path) -> None:
    """A process that is killed while it writes a checkpoint may leave such files."""
    run_with_snapshots({**CONFIG, "method": "scaffold"}, tmp_path / "whole", {4})
    clients = tmp_path / "after-4/checkpoints/clients"
    for name in ("3-5.safetensors", "4-5.safetensors.part"):
        (clients / name).write_bytes(b"orphan")
    with pytest.raises(Stopped):
        fedadc.resume(tmp_path / "after-4", ["checkpoint.every=1000"], watch=stopping_after(5))
    named = {f"{c}-{r}.safetensors" for p in (tmp_path / "after-4/checkpoints").glob("*.json")
             for c, r, _ in json.loads(p.read_text())["manifest"]["clients"]}  # fmt: skip
    assert {p.name for p in clients.iterdir()} == named


def test_old_checkpoints_left_by_a_kill_are_deleted_on_resume(tmp_path: Path) -> None:
    """Also if nothing is left to train. A damaged checkpoint does not count as one of the last two."""
    run_with_snapshots({**CONFIG, "method": "feddyn"}, tmp_path / "whole", {2, 4})
    place = tmp_path / "whole/checkpoints"
    for earlier in ("after-2", "after-4"):
        shutil.copytree(tmp_path / earlier / "checkpoints", place, dirs_exist_ok=True)
    (place / "round-00000005.safetensors").write_bytes(b"damaged")
    assert len(list(place.glob("*.json"))) == 6
    fedadc.resume(tmp_path / "whole")
    assert sorted(p.name for p in place.glob("*.json")) == ["round-00000004.json", "round-00000006.json"]
    named = {f"{c}-{r}.safetensors" for p in place.glob("*.json")
             for c, r, _ in json.loads(p.read_text())["manifest"]["clients"]}  # fmt: skip
    assert {p.name for p in (place / "clients").iterdir()} == named


# --- two processes at once -------------------------------------------------------------------------------------------


def test_a_run_that_another_process_started_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """Two processes with resume=True found no run; the second one is late."""
    late = prepare(fedadc.load_config({**SHORT, "seed": 5}), out=tmp_path / "a")
    fedadc.run(SHORT, out=tmp_path / "a", resume=True)
    before = contents(tmp_path / "a")
    with pytest.raises(FedadcError, match="is not empty"):
        RunDirectory.create(tmp_path / "a", late, {})
    with pytest.raises(CannotResume, match=r"seed 0 \(now 5\)"):
        RunDirectory.reopen(tmp_path / "a", late, {}, print)
    assert contents(tmp_path / "a") == before


def test_a_folder_lock_has_one_owner_at_a_time(tmp_path: Path) -> None:
    inside, most, refused, held = 0, 0, 0, 0

    def contend() -> None:
        nonlocal inside, most, refused, held
        for _ in range(200):
            try:
                with folder_lock(tmp_path):
                    inside += 1
                    most, held = max(most, inside), held + 1
                    inside -= 1
            except FedadcError:
                refused += 1

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and held and held + refused == 800 and not (tmp_path / ".lock").exists()


# --- what a run writes -----------------------------------------------------------------------------------------------


def test_the_model_of_an_interrupted_run_is_not_mistaken_for_the_final_one(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(Stopped):
        fedadc.run(CONFIG, out=tmp_path / "a", watch=stopping_after(2))
    shutil.copy(tmp_path / "a/model.safetensors", tmp_path / "early")
    config = fedadc.resume(tmp_path / "a").config
    assert is_finished(tmp_path / "a", config)
    shutil.copy(tmp_path / "early", tmp_path / "a/model.safetensors")  # as if killed before it was written
    assert not is_finished(tmp_path / "a", config)
    evaluate(tmp_path / "a")
    assert "was saved after round 2, but" in caplog.text and "is at round 6" in caplog.text
    fedadc.resume(tmp_path / "a")  # trains nothing, but writes the model
    assert is_finished(tmp_path / "a", config)


@dataclass(frozen=True, kw_only=True)
class CannotBeShown(fedadc.methods.FedADC):
    """A user-defined method with a bug that appears only when its model is evaluated."""

    def evaluated(self, theta: Any, server: Any) -> Any:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("kind", ["round-00000003.json", "round-00000003.safetensors", "clients"])
def test_a_pipe_among_the_checkpoints_does_not_block(kind: str, tmp_path: Path, caplog: Any) -> None:
    fedadc.run({**SHORT, "method": "scaffold"}, out=tmp_path / "a")
    place = tmp_path / "a/checkpoints"
    victim = next((place / kind).glob("*-3.safetensors")) if kind == "clients" else place / kind
    victim.unlink()
    os.mkfifo(victim)
    fedadc.resume(tmp_path / "a", ["checkpoint.every=9"])
    assert f"{victim.name} is missing, or not a file" in caplog.text


@pytest.mark.parametrize(("settings", "words"), [({}, "model.weights"), ({"bad_update": "stop"}, "model.weights")])
def test_after_divergence_no_resume_is_suggested(settings: Any, words: str, tmp_path: Path) -> None:
    config, messages = {**CONFIG, "faults": settings, "local": {**CONFIG["local"], "lr": 1e4, "steps": 8}}, []
    with pytest.raises(FedadcError, match=r"local\.lr or set local\.clip") as caught:
        fedadc.run({**config, "rounds": 50}, out=tmp_path / "a", notes=messages.append)
    assert messages == [] or (words in messages[-1] and "fedadc resume" not in messages[-1])
    assert ("faults.bad_update=skip would continue" in str(caught.value)) == bool(settings)


def test_a_checkpoint_is_kept_if_the_model_cannot_be_written(tmp_path: Path) -> None:
    config = fedadc.load_config({**CONFIG, "evaluate": {"every": 50}, "checkpoint": {"every": 50}, "rounds": 100})
    plan = prepare(replace(config, method=CannotBeShown()), out=tmp_path / "a")
    directory, messages = RunDirectory.create(tmp_path / "a", plan, {}), []
    with pytest.raises(Stopped):
        execute(plan, directory, stopping_after(5), messages.append)
    assert "a bug; " in messages[-1] and "is saved at round 5 of 100" in messages[-1]
    assert (tmp_path / "a/checkpoints/round-00000005.json").is_file()


@dataclass(frozen=True, kw_only=True)
class Complex(fedadc.methods.FedAvg):
    def server_state(self, theta: Any) -> Any:
        return {"z": torch.zeros(3, dtype=torch.complex128)}


def test_a_state_that_cannot_be_saved_is_rejected_at_the_start(tmp_path: Path) -> None:
    plan = prepare(replace(fedadc.load_config(CONFIG), method=Complex()))
    with pytest.raises(FedadcError, match=r"a state of type torch\.complex128 cannot be saved"):
        RunDirectory.create(tmp_path / "a", plan, {})
    assert not (tmp_path / "a").exists()


def test_the_last_round_is_evaluated_even_if_it_was_not_planned_to_be_the_last(tmp_path: Path) -> None:
    config = {**CONFIG, "evaluate": {"every": 4}}
    with pytest.raises(Stopped):
        fedadc.run(config, out=tmp_path / "a", watch=stopping_after(5))
    ended = fedadc.resume(tmp_path / "a", ["rounds=5"])
    work = {**CONFIG["local"], "schedule": {"name": "cosine", "horizon": 6}}
    whole = fedadc.run({**config, "rounds": 5, "local": work}, out=tmp_path / "b")
    assert outcome(tmp_path / "a") == outcome(tmp_path / "b")
    assert "test_accuracy" in ended.history[-1] and len(ended.history) == len(whole.history) == 5
    fedadc.resume(tmp_path / "a", ["rounds=7"])
    assert len((tmp_path / "a/metrics.jsonl").read_text().splitlines()) == 7


def test_a_project_folder_that_was_moved_is_found_after_one_run_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    table = "\n".join(["u,label,site", *(f"{k % 7},{k % 3},{'abc'[k % 3]}" for k in range(60))])
    (tmp_path / "old/t.csv").write_text(table + "\n")
    tree = {**CONFIG, "data": {"name": "csv", "path": "t.csv", "label": "label", "client": "site"},
            "cohort": {"size": 2}, "model": {"name": "mlp", "hidden": [4]}, "rounds": 2}  # fmt: skip
    (tmp_path / "old/c.yaml").write_text(json.dumps(tree))
    fedadc.run(tmp_path / "old/c.yaml", out=tmp_path / "old/run")
    shutil.move(tmp_path / "old", tmp_path / "new")
    with pytest.raises(FedadcError, match="there is no file"):
        fedadc.resume(tmp_path / "new/run", ["rounds=3"])
    fedadc.run(tmp_path / "new/c.yaml", ["rounds=3"], out=tmp_path / "new/run", resume=True)
    assert len(fedadc.resume(tmp_path / "new/run", ["rounds=4"]).history) == 4


@pytest.mark.parametrize("facts", ["[]", "{", '{"data_dir": 5, "device": 7}', '{"data_dir": "\\u0000", "begun": 3}'])
def test_a_damaged_environment_file_does_not_prevent_resuming(facts: str, tmp_path: Path) -> None:
    fedadc.run({**SHORT, "rounds": 2}, out=tmp_path / "a")
    (tmp_path / "a/environment.json").write_text(facts)
    assert len(fedadc.resume(tmp_path / "a", ["rounds=3"]).history) == 3


def test_changed_frozen_weights_are_detected(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.base, self.head = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)\n"
        "        self.base.requires_grad_(False)\n"
        "    def forward(self, x):\n        return self.head(self.base(x.flatten(1)).relu())\n"
    )
    weights = {"base.weight": torch.randn(8, 64), "base.bias": torch.zeros(8),
               "head.weight": torch.zeros(10, 8), "head.bias": torch.zeros(10)}  # fmt: skip
    save_file(weights, tmp_path / "w.safetensors")
    tree = {**CONFIG, "model": {"name": "net:Net", "weights": "w.safetensors"}, "rounds": 2}
    (tmp_path / "c.yaml").write_text(json.dumps(tree))
    fedadc.run(tmp_path / "c.yaml", out=tmp_path / "a")
    assert torch.equal(load_file(tmp_path / "a/model.safetensors")["base.weight"], weights["base.weight"])
    save_file({**weights, "base.bias": torch.ones(8)}, tmp_path / "w.safetensors")
    with pytest.raises(CannotResume, match="other data or weights"):
        fedadc.resume(tmp_path / "a", ["rounds=3"])


# --- states of any form ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Odd(fedadc.methods.FedAvg):
    """States that would give other results if a checkpoint changed their strides or their order."""

    def client_state(self, theta: Any) -> Any:
        return {"z": torch.zeros(5, 4).t(), "a": torch.ones(3)}

    def server_state(self, theta: Any) -> Any:
        return {"z": torch.zeros(5, 4).t(), "a": torch.ones(3)}

    def finish(self, theta: Any, local: Any) -> Any:
        upload, _ = super().finish(theta, local)
        first, second = local.client.values()
        wide = theta[:20].view(5, 4).t() * 3.7 + second.sum()
        shifted = upload["delta"] + 1e-3 * float(second.sum() + first.flatten()[0])
        return {"delta": shifted}, {"z": wide, "a": first.flatten()[:3] * 0.9}

    def update(self, theta: Any, server: Any, mean: Any, info: Any) -> Any:
        first, second = server.values()
        theta, _ = super().update(theta, server, mean, info)
        wide = (theta[:20].view(5, 4).t() * 2.3) + second.sum()
        return theta + 1e-4 * float(second.sum() + first.flatten()[0]), {"z": wide, "a": first.flatten()[:3] * 0.9}


@dataclass(frozen=True, kw_only=True)
class Renames(fedadc.methods.FedAvg):
    """States whose names change after the first round."""

    def client_state(self, theta: Any) -> Any:
        return {"early": torch.zeros(2)}

    def finish(self, theta: Any, local: Any) -> Any:
        return super().finish(theta, local)[0], {"late": torch.ones(2)}

    def server_state(self, theta: Any) -> Any:
        return {"early": torch.zeros(2)}

    def update(self, theta: Any, server: Any, mean: Any, info: Any) -> Any:
        return super().update(theta, server, mean, info)[0], {}


@pytest.mark.parametrize("method", [Odd(), Renames()], ids=["odd", "renames"])
def test_states_of_any_form_can_be_resumed(method: fedadc.methods.Method, tmp_path: Path) -> None:
    def federation(memory: float = 2.0, workers: int = 0) -> fedadc.Federation:
        torch.manual_seed(0)
        return fedadc.Federation(
            model=torch.nn.Linear(5, 4), data=small_federation(), method=method, cohort=4, workers=workers,
            storage=Storage(memory_gb=memory), local=fedadc.LocalWork(steps=3, batch_size=4, lr=0.1),
        )  # fmt: skip

    def bits(state: fedadc.training.RunState) -> tuple[Any, ...]:
        clients = {k: {n: v.tolist() for n, v in s.items()} for k, s in state.clients.items()}
        return state.theta.tolist(), {n: v.tolist() for n, v in state.server.items()}, clients

    whole = list(federation().rounds(6))
    assert bits(list(federation(memory=0).rounds(6))[-1].state) == bits(whole[-1].state)
    spread = federation(workers=2)
    assert bits(list(spread.rounds(6))[-1].state) == bits(whole[-1].state)
    spread.close()
    fedadc.runs.Checkpoints(tmp_path / "c", federation()).write(whole[2].state)
    again = federation()
    state = fedadc.runs.Checkpoints(tmp_path / "c", again).newest()
    assert bits(list(again.rounds(6, start=state, trusted=True))[-1].state) == bits(whole[-1].state)


def test_states_still_in_use_and_copies_of_states_are_saved_correctly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    federation = fedadc.Federation(
        model=torch.nn.Linear(5, 4),
        data=small_federation(),
        method=fedadc.methods.FedDyn(),
        cohort=4,
        storage=Storage(memory_gb=0),
    )
    checkpoints, held = fedadc.runs.Checkpoints(tmp_path / "c", federation), []
    for result in federation.rounds(6):
        checkpoints.write(copy.deepcopy(result.state) if result.round == 3 else result.state)
        checkpoints.write(result.state)  # again
        held.append((result.state, {k: v["h"].clone() for k, v in result.state.clients.items()}))
        assert len(list((tmp_path / "c").glob("*.json"))) == min(2, result.round)
    for state, then in held:
        assert {k: v["h"].tolist() for k, v in state.clients.items()} == {k: v.tolist() for k, v in then.items()}
    other = fedadc.runs.Checkpoints(tmp_path / "d", federation)  # a second folder has files of its own
    other.write(held[-1][0])
    shutil.rmtree(tmp_path / "c")
    state = fedadc.runs.Checkpoints(tmp_path / "d", federation).newest()
    assert state is not None and {k: v["h"].tolist() for k, v in state.clients.items()} == {
        k: v.tolist() for k, v in held[-1][1].items()
    }


def test_a_checkpoints_folder_that_is_not_writable(tmp_path: Path) -> None:
    """It ends the run with a one-sentence error, and existing files are kept."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    fedadc.run(SHORT, out=tmp_path / "a")
    (tmp_path / "a/checkpoints").chmod(0o500)
    with pytest.raises(FedadcError, match="cannot write to"):
        fedadc.resume(tmp_path / "a", ["rounds=5"])
    (tmp_path / "a/checkpoints").chmod(0o700)
