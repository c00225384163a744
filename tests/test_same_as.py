"""`make same-as` finds what it should find. The whole command takes minutes; these are its parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import same_as
from same_as_cases import all_cases
from same_as_compare import compared_files, differing_files

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(7), "none": np.zeros((0, 4))}
RECORDS: list[dict[str, Any]] = [{"round": t, "loss": 0.5, "seconds": 0.1 * t, "cohort": [t, 3]} for t in (1, 2)]


@pytest.mark.slow
def test_a_renamed_purpose_of_random_numbers_is_found_and_equal_copies_are_equal(tmp_path: Path) -> None:
    assert same_as.self_test(tmp_path, ["batches"]) == []


def test_cases_have_names_of_their_own_and_those_of_the_self_test_exist(tmp_path: Path) -> None:
    names = [case.name for case in all_cases(tmp_path)]
    assert len(set(names)) == len(names) > 300
    assert set(same_as.PURPOSES.values()) <= set(names)


def test_every_purpose_of_random_numbers_has_a_case_that_uses_it() -> None:
    found = same_as.purposes_in(same_as.ROOT)
    assert found <= same_as.PURPOSES.keys() | same_as.WITHOUT_RESULT | {"local test shares"}  # "local" covers it
    assert {"batches", "dropout", "hold out", "local"} <= found


def test_only_natural_clients_with_shares_are_left_out_and_only_for_versions_that_pooled_them(tmp_path: Path) -> None:
    cases = all_cases(tmp_path)
    changed = [case for case in cases if case.since is not None]
    data = [case.config["data"] for case in changed]
    assert len(changed) == 7 and all(
        node["name"] == "csv" and "client" in node and node["test"] == 0.25 for node in data
    )
    assert all((same_as.ROOT / str(case.since)).exists() for case in changed)
    new = same_as.version_of_working_tree(tmp_path / "new")
    assert not any(same_as.changed_since(new, case) for case in cases)
    old = same_as.Version("0.2.0", tmp_path / "old")
    assert [case for case in cases if same_as.changed_since(old, case)] == changed


def lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def run_directory(**changes: bytes) -> dict[str, bytes]:
    return {"metrics.jsonl": lines(RECORDS), "model.safetensors": save(TENSORS), **changes}


def with_tensors(**changes: Any) -> dict[str, bytes]:
    return run_directory(**{"model.safetensors": save({**TENSORS, **changes})})


def with_record(change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, bytes]:
    return run_directory(**{"metrics.jsonl": lines([RECORDS[0], change(RECORDS[1])])})


def test_times_and_events_are_not_compared() -> None:
    assert differing_files(run_directory(), run_directory()) == []
    other = with_record(lambda record: {**record, "seconds": 9.0, "events": ["a worker died"]})
    assert differing_files(run_directory(), other) == []


@pytest.mark.parametrize(
    ("other", "phrase"),
    [
        (with_tensors(a=TENSORS["a"] % 5), "model.safetensors: a differs in 1 of 6 entries"),
        (with_tensors(a=TENSORS["a"].reshape(3, 2)), "all tensors are equal, but the header"),
        (with_tensors(a=np.negative(0 * TENSORS["a"]), b=np.array(8)), "entries, and 1 more tensors differ"),
        (with_tensors(c=np.zeros(2)), "model.safetensors: the tensor c is new"),
        (with_tensors(none=np.zeros((1, 4))), "none differs in size"),
        (run_directory(**{"model.safetensors": save(TENSORS, {"model": "x"})}), "the header"),
        (run_directory(**{"model-ema.safetensors": b""}), "model-ema.safetensors should not be there"),
        ({"metrics.jsonl": lines(RECORDS)}, "model.safetensors is missing"),
        (run_directory(**{"metrics.jsonl": lines(RECORDS[:1])}), "metrics.jsonl: 2 lines became 1"),
        (with_record(lambda record: {**record, "loss": 0.5000000000000001}), "line 2, loss: 0.5 became 0.50000"),
        (with_record(lambda record: {**record, "round": 2.0}), "line 2, round: 2 became 2.0"),
        (with_record(lambda record: {**record, "slow": [3]}), "line 2, slow: None became [3]"),
        (with_record(lambda record: dict(reversed(record.items()))), "line 2: the keys come in another order"),
    ],
)
def test_what_differs_is_said(other: dict[str, bytes], phrase: str) -> None:
    (found,) = differing_files(run_directory(), other)
    assert phrase in found


def test_a_single_bit_is_counted(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/clients").mkdir(parents=True)
    file = tmp_path / "checkpoints/clients/3-1.safetensors"
    file.write_bytes(save(TENSORS))
    (tmp_path / "config.yaml").write_text("is not compared")
    old = compared_files(tmp_path)
    content = bytearray(file.read_bytes())
    content[content.index(TENSORS["a"].tobytes()) + 5] ^= 1
    file.write_bytes(content)
    found = differing_files(old, compared_files(tmp_path))
    assert found == ["checkpoints/clients/3-1.safetensors: a differs in 1 of 6 entries"]


@pytest.mark.parametrize(
    ("old", "new", "may_be_refused", "wrong"),
    [
        ("ran", "ran", False, False),
        ("refused: a", "refused: b", True, False),
        ("refused: a", "refused: a", False, True),
        ("ran", "refused: a", True, True),
        ("refused: a", "ran", True, True),
        ("failed: a", "failed: a", True, True),
    ],
)
def test_outcomes(old: str, new: str, may_be_refused: bool, wrong: bool) -> None:
    run = same_as.Run(same_as.Case("name", {}, may_be_refused), 0)
    assert bool(same_as.differing_outcomes(run, old, new)) == wrong


def test_a_process_with_sources_of_another_place_fails(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with pytest.raises(SystemExit, match="fedadc was to come from"):
        same_as.do_jobs({same_as.Version("nothing", tmp_path): []})


def test_a_best_model_that_older_versions_do_not_keep_is_no_difference() -> None:
    kept = save({**TENSORS, "best.0": np.ones(3)})
    assert differing_files(run_directory(), run_directory(**{"model-best.safetensors": kept})) == []
    assert differing_files(run_directory(), {**run_directory(), "model.safetensors": kept}) == []
    other = save({**TENSORS, "a": TENSORS["a"] + 1, "best.0": np.ones(3)})
    assert differing_files(run_directory(), {**run_directory(), "model.safetensors": other}) == [
        "model.safetensors: a differs in 6 of 6 entries"
    ]
    assert differing_files({**run_directory(), "model.safetensors": kept}, run_directory()) == [
        "model.safetensors: the tensor best.0 is missing"
    ]
