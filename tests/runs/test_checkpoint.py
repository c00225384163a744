"""Checkpoints and resuming from them: the same bits for every method; damage is reported, and survived."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

import fedadc
from commands import contents
from conftest import small_federation
from fedadc.config.settings import Checkpointing
from fedadc.errors import CannotResume, FedadcError
from fedadc.methods import METHODS, PAIRS
from fedadc.runs.checkpoint import CheckpointTimer
from fedadc.runs.manifest import FilePrefix, Manifest, UnusableCheckpoint, _canonical, decode, encode
from fedadc.system.files import checksum
from snapshots import CONFIG, outcome, run_with_snapshots


@pytest.mark.parametrize("method", [*METHODS, *PAIRS])
def test_every_method_goes_on_with_the_same_bits(method: str, tmp_path: Path) -> None:
    memory = 0 if method in ("scaffold", "moon") else 2.0
    config = {**CONFIG, "method": method, "storage": {"memory_gb": memory}}
    run_with_snapshots(config, tmp_path / "whole", {1, 3, 4})
    for left in (1, 3, 4):
        place = tmp_path / f"after-{left}"
        result = fedadc.run(config, out=place, resume=True, workers=2 if left == 3 else 0)
        assert [r["round"] for r in result.history] == [1, 2, 3, 4, 5, 6]
        assert outcome(place) == outcome(tmp_path / "whole"), f"after round {left}"
        again = fedadc.resume(place)  # nothing is left to do
        assert again.history == result.history and outcome(place) == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate": {"every": 1, "overlap": True}},
        {"faults": {"drop": 0.3, "slow": 0.4}, "method": "scaffold"},
        {"method": "fedadc+", "model": {"name": "cnn", "channels": [4, 8], "hidden": [16]},
         "data": {**CONFIG["data"], "augment": {"crop": 1, "flip": True}}},
        {"method": "fedgkd", "objective": {"name": "global_distillation", "window": 3}},
        {"checkpoint": {"every": 2}, "cohort": {"ratio": 0.5, "weighting": "samples"}},
    ],
    ids=["overlap", "faults", "augmented", "window", "every 2"],
)  # fmt: skip
def test_other_settings_go_on_too(changes: dict[str, Any], tmp_path: Path) -> None:
    config = {**CONFIG, **changes}
    run_with_snapshots(config, tmp_path / "whole", {1, 3, 5})
    for left in (1, 3, 5):
        fedadc.resume(tmp_path / f"after-{left}", workers=2 if left == 3 else 0)
        assert outcome(tmp_path / f"after-{left}") == outcome(tmp_path / "whole")


# --- what may change -------------------------------------------------------------------------------------------------


def test_more_rounds_keep_the_schedule_with_which_the_run_began(tmp_path: Path) -> None:
    fedadc.run({**CONFIG, "rounds": 4}, out=tmp_path / "a")
    fedadc.run({**CONFIG, "rounds": 7}, out=tmp_path / "a", resume=True)
    work = {**CONFIG["local"], "schedule": {"name": "cosine", "horizon": 4}}
    fedadc.run({**CONFIG, "rounds": 7, "local": work}, out=tmp_path / "b")
    a, b = outcome(tmp_path / "a"), outcome(tmp_path / "b")
    assert a["models"] == b["models"] and a["state"] == b["state"]
    assert fedadc.load_config(tmp_path / "a/config.yaml") == fedadc.load_config(tmp_path / "b/config.yaml")


@pytest.mark.parametrize(
    "free",
    [["rounds=9"], ["evaluate.every=1"], ["evaluate.overlap=true"], ["checkpoint.every=null"], ["checkpoint.every=3"],
     ["storage.memory_gb=0"], ["label=mine"], ["stop.accuracy=0.999"], ["faults.bad_update=stop"]],
    ids=lambda f: f[0],
)  # fmt: skip
def test_what_changes_no_round_may_change(free: list[str], tmp_path: Path) -> None:
    run_with_snapshots({**CONFIG, "method": "feddyn"}, tmp_path / "whole", {3})
    fedadc.resume(tmp_path / "after-3", free)
    rounds = 9 if free == ["rounds=9"] else 6
    assert len((tmp_path / "after-3/metrics.jsonl").read_text().splitlines()) == rounds
    if rounds == 6:
        assert outcome(tmp_path / "after-3")["models"] == outcome(tmp_path / "whole")["models"]
    key, value = free[0].split("=")
    tree = yaml.safe_load((tmp_path / "after-3/config.yaml").read_text())
    for part in key.split("."):
        tree = tree[part]
    assert tree == yaml.safe_load(value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (["local.lr=0.2"], "local.lr 0.1 (now 0.2)"),
        (["method=slowmo"], "method.name fedavg (now slowmo)"),
        (["seed=3"], "seed 0 (now 3)"),
        (["cohort.size=4"], "cohort.size 5 (now 4)"),
        (["faults.drop=0.5"], "faults.drop 0.0 (now 0.5)"),
        (["local.schedule=step"], "local.schedule.name cosine (now step)"),
        (["local.schedule.horizon=9"], "local.schedule.horizon 3 (now 9)"),
        (["model.hidden=[9]", "data.clients=11"], "model.hidden [8] (now [9])"),
        (["rounds=2"], "has 3 rounds already"),
    ],
)
def test_what_changes_the_result_is_refused_by_name(other: list[str], words: str, tmp_path: Path) -> None:
    run_with_snapshots({**CONFIG, "rounds": 3}, tmp_path / "a", set())
    before = contents(tmp_path / "a")
    with pytest.raises(CannotResume, match=re.escape(words)) as caught:
        fedadc.resume(tmp_path / "a", other)
    assert "\n" not in str(caught.value) and contents(tmp_path / "a") == before


def test_data_that_has_changed_is_noticed(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rows = [f"{k % 7},{k % 5},{k % 3},{'abc'[k % 3]}" for k in range(60)]
    table.write_text("\n".join(["u,v,label,site", *rows]) + "\n")
    config = {**CONFIG, "data": {"name": "csv", "path": str(table), "label": "label", "client": "site"},
              "cohort": {"size": 2}, "model": {"name": "mlp", "hidden": [4]}}  # fmt: skip
    fedadc.run({**config, "rounds": 2}, out=tmp_path / "a")
    table.write_text(table.read_text().replace("\n3,", "\n4,", 1))
    with pytest.raises(CannotResume, match="it belongs to other data or weights, or they have changed since"):
        fedadc.run(config, out=tmp_path / "a", resume=True)


def test_another_environment_is_told_and_recorded(tmp_path: Path, caplog: Any) -> None:
    run_with_snapshots(CONFIG, tmp_path / "whole", {3})
    place = tmp_path / "after-3"
    facts = json.loads((place / "environment.json").read_text())
    (place / "environment.json").write_text(json.dumps({**facts, "torch": "1.0"}))
    fedadc.resume(place)
    assert "torch 1.0 (now " in caplog.text and "bits may differ" in caplog.text
    now = json.loads((place / "environment.json").read_text())
    assert now["begun"]["torch"] == "1.0" and [r["round"] for r in now["resumed"]] == [3]
    assert now["resumed"][0]["torch"] == facts["torch"]


# --- where a run begins ----------------------------------------------------------------------------------------------


def test_resume_begins_where_there_is_nothing(tmp_path: Path) -> None:
    fedadc.run(CONFIG, out=tmp_path / "whole")
    fedadc.run(CONFIG, out=tmp_path / "new", resume=True)
    for name in ("empty", "locked", "half"):
        (tmp_path / name).mkdir()
    (tmp_path / "locked/.lock").touch()
    (tmp_path / "half/environment.json").write_text("{}")
    (tmp_path / "half/config.yaml.part").write_text("rou")
    for name in ("new", "empty", "locked", "half"):
        fedadc.run(CONFIG, out=tmp_path / name, resume=True)
        assert outcome(tmp_path / name) == outcome(tmp_path / "whole")
    assert {p.name for p in tmp_path.iterdir()} == {"whole", "new", "empty", "locked", "half"}


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    config = {**CONFIG, "checkpoint": {"every": 5}}
    run_with_snapshots(config, tmp_path / "whole", {2})
    place = tmp_path / "after-2"
    with (place / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"round": 3, "lr"')  # torn
    (place / "model.safetensors.part").write_bytes(b"half a model")
    result = fedadc.resume(place)
    assert len(result.history) == 6 and outcome(place) == outcome(tmp_path / "whole")
    assert not list(place.glob("*.part"))


@pytest.mark.parametrize("files", [["notes.txt"], ["metrics.jsonl", "checkpoints"]])
def test_what_is_no_run_does_not_go_on(files: list[str], tmp_path: Path) -> None:
    fedadc.run({**CONFIG, "rounds": 2}, out=tmp_path / "a")
    for file in (tmp_path / "a").iterdir():
        if file.name not in files:
            file.unlink() if file.is_file() else shutil.rmtree(file)
    (tmp_path / "a" / files[0]).touch()
    before = contents(tmp_path / "a")
    with pytest.raises(FedadcError, match=r"has no config\.yaml|not part of a run"):
        fedadc.run(CONFIG, out=tmp_path / "a", resume=True)
    with pytest.raises(FedadcError, match=r"is not a run directory: it has no config\.yaml\.$"):
        fedadc.resume(tmp_path / "a")
    assert contents(tmp_path / "a") == before
    with pytest.raises(FedadcError, match="there is no run directory"):
        fedadc.resume(tmp_path / "absent")


# --- damage ----------------------------------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def removed(path: Path) -> None:
    path.unlink()


def of_the_future(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))


def hostile(path: Path) -> None:
    path.write_text("[" * 100_000)


DAMAGE = [flipped, halved, emptied, removed, hostile]


def newest(place: Path, kind: str) -> Path:
    if kind == "client":
        seen = set()
        for manifest in sorted((place / "checkpoints").glob("*.json"))[:-1]:
            seen |= {(c, r) for c, r, _ in json.loads(manifest.read_text())["manifest"]["clients"]}
        last = json.loads(max((place / "checkpoints").glob("*.json")).read_text())["manifest"]["clients"]
        client, round = next((c, r) for c, r, _ in last if (c, r) not in seen)
        return place / f"checkpoints/clients/{client}-{round}.safetensors"
    return max((place / "checkpoints").glob(f"round-*.{kind}"))


@pytest.mark.parametrize("kind", ["json", "safetensors", "client"])
@pytest.mark.parametrize("damage", [*DAMAGE, of_the_future], ids=lambda d: d.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(
    kind: str, damage: Callable[[Path], None], tmp_path: Path, caplog: Any
) -> None:
    if (damage is of_the_future and kind != "json") or (damage is removed and kind == "json"):
        return  # a checkpoint without a manifest is none
    run_with_snapshots({**CONFIG, "method": "scaffold"}, tmp_path / "whole", {4})
    place = tmp_path / "after-4"
    damage(newest(place, kind))
    fedadc.resume(place)
    assert f"{place}/checkpoints/round-00000004.json cannot be" in caplog.text
    assert "continuing from the checkpoint before it" in caplog.text
    assert outcome(place) == outcome(tmp_path / "whole")
    assert len(list((place / "checkpoints").glob("round-*.json"))) == 2


def test_a_foreign_checkpoint_is_noticed(tmp_path: Path, caplog: Any) -> None:
    run_with_snapshots(CONFIG, tmp_path / "whole", {4})
    fedadc.run({**CONFIG, "seed": 1, "rounds": 5}, out=tmp_path / "other")
    for file in (tmp_path / "other/checkpoints").glob("round-00000005.*"):
        shutil.copy(file, tmp_path / "after-4/checkpoints")
    fedadc.resume(tmp_path / "after-4")
    assert "round-00000005.json cannot be used: it belongs to a run with other settings" in caplog.text
    assert outcome(tmp_path / "after-4") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("damage", [flipped, halved, emptied, hostile], ids=lambda d: d.__name__)
def test_where_no_checkpoint_is_good_nothing_is_deleted(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run_with_snapshots(CONFIG, tmp_path / "whole", {4})
    place = tmp_path / "after-4"
    for manifest in (place / "checkpoints").glob("*.json"):
        damage(manifest)
    before = contents(place)
    with pytest.raises(CannotResume, match="no checkpoint is usable, and nothing was changed") as caught:
        fedadc.resume(place)
    assert "round-00000004" in str(caught.value) and "round-00000003" in str(caught.value)
    assert contents(place) == before


@pytest.mark.parametrize("damage", [flipped, emptied, removed], ids=lambda d: d.__name__)
def test_metrics_that_lost_rounds_are_noticed(damage: Callable[[Path], None], tmp_path: Path) -> None:
    run_with_snapshots(CONFIG, tmp_path / "whole", {4})
    place = tmp_path / "after-4"
    damage(place / "metrics.jsonl")
    with pytest.raises(CannotResume, match=r"metrics\.jsonl no longer has the rounds before it"):
        fedadc.resume(place)


@given(st.data())
def test_no_manifest_does_harm(data: st.DataObject) -> None:
    """Whatever bytes it has: the manifest that was written, or a reason why not."""
    whole = Manifest(1, 7, 9, "c", "d", "s", FilePrefix(10, "m"), [(3, 7, "x"), (4, 2, "y")])
    content = bytearray(encode(whole))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    cut = data.draw(st.integers(0, len(content)))
    for candidate in (bytes(content), bytes(content[:cut])):
        try:
            assert decode(candidate) == whole
        except UnusableCheckpoint as reason:
            assert "\n" not in str(reason)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_no_value_in_a_sealed_manifest_does_harm(value: Any) -> None:
    """With a seal that is right, as a stranger could make it."""
    whole = asdict(Manifest(1, 7, 9, "c", "d", "s", FilePrefix(10, "m"), [(3, 7, "x")]))
    for key in whole:
        tree = {**whole, key: value}
        try:
            found = decode(json.dumps({"checksum": checksum(_canonical(tree)), "manifest": tree}).encode())
            assert isinstance(getattr(found, key), type(whole[key]) if key != "metrics" else FilePrefix)
        except UnusableCheckpoint:
            pass


# --- what is on the disk ---------------------------------------------------------------------------------------------


def test_client_files_never_change_and_go_when_two_newer_checkpoints_exist(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, bytes]] = {}  # inode and content
    listed: list[set[str]] = []

    def watch(record: dict[str, Any]) -> None:
        folder = tmp_path / "a/checkpoints"
        manifests = sorted(folder.glob("*.json"))
        assert len(manifests) == min(2, record["round"]) == len(list(folder.glob("*.safetensors")))
        trees = [json.loads(m.read_text())["manifest"] for m in manifests]
        assert [t["round"] for t in trees] == list(range(max(1, record["round"] - 1), record["round"] + 1))
        listed.append({f"{c}-{r}.safetensors" for c, r, _ in trees[-1]["clients"]})
        assert {p.name for p in (folder / "clients").iterdir()} == set().union(*listed[-2:])
        for path in (folder / "clients").iterdir():
            now = (path.stat().st_ino, path.read_bytes())
            assert seen.setdefault(path.name, now) == now

    fedadc.run({**CONFIG, "method": "feddyn", "rounds": 8}, out=tmp_path / "a", watch=watch)
    assert len(seen) == 8 * 5 and len(listed[-1]) < len(seen)  # of each round's five clients


def test_by_time_a_checkpoint_costs_at_most_two_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("fedadc.runs.checkpoint.time.monotonic", lambda: now)
    for cost in (0.01, 0.5, 3.0):
        pace, written, lost = CheckpointTimer(Checkpointing(seconds=30)), 0.0, 0.0
        begin = last = now
        for round in range(1, 4000):
            now += 0.7
            lost = max(lost, now - last)
            if pace.due(round):
                began = now
                now += cost
                pace.took(began)
                written, last = written + cost, now
        assert written / (now - begin) <= 0.02 and lost < max(30, 50 * cost) + 0.8


def test_every_k_rounds(tmp_path: Path) -> None:
    pace = CheckpointTimer(Checkpointing(every=3))
    assert [t for t in range(1, 10) if pace.due(t)] == [3, 6, 9]
    for settings in ({"every": 0}, {"seconds": -1.0}, {"seconds": float("inf")}):
        with pytest.raises(FedadcError, match=rf"^{next(iter(settings))} must be "):
            Checkpointing(**settings)


def test_an_unfinished_manifest_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kill between writing a manifest and renaming it: the run continues as if the checkpoint had not begun."""
    run_with_snapshots(CONFIG, tmp_path / "whole", {1, 4})
    for after in (1, 4):
        place = tmp_path / f"after-{after}"
        (last,) = (place / "checkpoints").glob(f"round-*{after}.json")
        last.rename(last.with_name(f"{last.name}.part"))
        fedadc.resume(place)
        assert outcome(place) == outcome(tmp_path / "whole"), f"after round {after}"
        assert not list((place / "checkpoints").glob("*.part"))
    assert caplog.text == ""  # nothing is damaged


def test_a_loop_of_ones_own_can_be_saved_too(tmp_path: Path) -> None:
    def federation() -> fedadc.Federation:
        torch.manual_seed(0)
        net, method = torch.nn.Linear(5, 4).double(), fedadc.methods.Scaffold()
        return fedadc.Federation(model=net, data=small_federation(), method=method, cohort=3)

    whole = list(federation().rounds(6))[-1].state
    first = federation()
    checkpoints = fedadc.runs.Checkpoints(tmp_path / "mine", first)
    assert checkpoints.newest() is None
    for result in first.rounds(6):
        checkpoints.write(result.state)
        if result.round == 4:
            break
    second = federation()
    state = fedadc.runs.Checkpoints(tmp_path / "mine", second).newest()
    assert state is not None and state.round == 4
    last = list(second.rounds(6, start=state))[-1].state
    assert torch.equal(last.theta, whole.theta) and torch.equal(last.server["c"], whole.server["c"])
    assert {k: s["c"].tolist() for k, s in last.clients.items()} == {
        k: s["c"].tolist() for k, s in whole.clients.items()
    }
    with pytest.raises(FedadcError, match=f"there is no folder {tmp_path / 'no'}"):
        fedadc.runs.Checkpoints(tmp_path / "no" / "such", second)
