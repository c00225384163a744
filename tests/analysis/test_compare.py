"""Comparisons of runs whose records are written by hand, so that every expected value is known."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedadc.analysis.compare import curve, group, human_bytes, positions, summarize, table_rows
from fedadc.analysis.comparison import compare
from fedadc.analysis.plots import plot
from fedadc.errors import FedadcError
from fedadc.evaluation.stopping import higher_is_better
from fedadc.runs.record import RecordedRun, read_run

FEDAVG = {
    "seed": 0,
    "rounds": 3,
    "label": None,
    "data": {"name": "digits", "clients": 4, "partition": {"name": "iid"}, "seed": 0},
    "model": {"name": "mlp", "seed": 0, "hidden": [8]},
    "method": {"name": "fedavg"},
    "objective": {"name": "cross_entropy"},
    "local": {"steps": 1, "lr": 0.1, "schedule": {"name": "constant", "horizon": 3}},
}
FEDADC = {"method": {"name": "fedadc", "beta": 0.9, "nesterov": False}}
PLUS = {**FEDADC, "objective": {"name": "self_confidence", "lam": 0.35}}
Write = Callable[..., RecordedRun]


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` updated with `change`; mappings are merged one level deep."""
    return base | {k: {**base.get(k, {}), **v} if isinstance(v, dict) else v for k, v in change.items()}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a run directory with these accuracies (None: not evaluated) and reads it."""

    def make(accuracies: Sequence[float | None], cohort: int = 2, **change: Any) -> RecordedRun:
        path = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        (path / "config.yaml").write_text(yaml.safe_dump(merged(FEDAVG, change), sort_keys=False))
        lines = [
            {"round": t, "train_loss": 1.0, **({} if a is None else {"test_accuracy": a, "test_loss": 1 - a}),
             "cohort": list(range(cohort)), "bytes_up": 100 * cohort, "bytes_down": 250 * cohort,
             "virtual_seconds": 40.0 * t, "samples": 30, "seconds": 2.0}
            for t, a in enumerate(accuracies, start=1)
        ]  # fmt: skip
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_run(path)

    return make


def test_runs_without_the_metric_are_named_and_left_out(write: Write, tmp_path: Path, caplog: Any) -> None:
    good, blind = write([0.2, 0.6]), write([None, None], **FEDADC)
    assert [row.value for row in summarize([blind, good])] == [summarize([good])[0].value]
    assert caplog.messages == [f"{blind.path} is left out: it has no test_accuracy in any round"]
    plot([blind, good], tmp_path / "both.png")
    plot([good], tmp_path / "good.png")
    assert (tmp_path / "both.png").read_bytes() == (tmp_path / "good.png").read_bytes()
    with pytest.raises(FedadcError, match="has no test_accuracy in any round; it has"):
        summarize([blind, blind])


def seeds(seed: int) -> dict[str, Any]:
    return {"seed": seed, "data": {"seed": seed}, "model": {"seed": seed}}


# --- statistics ------------------------------------------------------------------------------------------------------


def test_mean_and_deviation_over_seeds(write: Write) -> None:
    runs = [write([0.1, a], **seeds(i)) for i, a in enumerate((0.7, 0.8, 0.9))]
    (row,) = summarize(runs, target=0.5)
    finals = [0.4, 0.45, 0.5]  # the mean of both rounds, because there are fewer than ten
    assert row.value == pytest.approx(0.45) and row.std == pytest.approx(statistics.stdev(finals))
    assert row.best == pytest.approx(0.8) and row.seeds == 3 and row.reached == 3 and row.rounds_to_target == 2


def test_the_final_accuracy_is_the_mean_over_the_last_ten_rounds_where_evaluated(write: Write) -> None:
    (row,) = summarize([write([0.9] * 10 + [None, 0.5] * 2 + [None, 0.7] * 3)])
    assert row.value == pytest.approx((2 * 0.5 + 3 * 0.7) / 5) and row.std is None and row.best == pytest.approx(0.9)


def test_a_given_target_is_reached_by_all_some_or_no_seeds(write: Write) -> None:
    first, second = write([0.3, 0.6, 0.9], **seeds(0)), write([0.3, 0.5, 0.55], **seeds(1))
    for target, reached, rounds in ((0.3, 2, 1), (0.5, 2, 2), (0.55, 2, 2.5), (0.6, 1, 2), (0.95, 0, None)):
        (row,) = summarize([first, second], target)
        assert (row.reached, row.rounds_to_target) == (reached, rounds), target
    headings, (cells,) = table_rows(summarize([first, second], 0.6))
    assert headings[3].startswith("rounds to 0.6") and cells[3] == "2 (1 of 2)"
    assert table_rows(summarize([first, second], 0.95))[1][0][3] == "–"


def test_a_target_is_shown_as_it_was_given(write: Write) -> None:
    headings, _ = table_rows(summarize([write([0.3, 0.99])], 0.985))
    assert headings[3] == "rounds to 0.985"


def test_the_default_target_is_nine_tenths_of_the_best(write: Write) -> None:
    rows = summarize([write([0.5, 0.5]), write([0.8, 0.8], **FEDADC)])
    assert {row.target for row in rows} == {0.72}


def with_values(run: RecordedRun, metric: str, *values: float) -> RecordedRun:
    """The run with another metric in its records."""
    records = [{**record, metric: value} for record, value in zip(run.records, values, strict=True)]
    return replace(run, records=records)


@pytest.mark.parametrize(
    ("metric", "first", "second", "target", "rounds"),
    [
        ("drift_spread", (0.9, 0.3, 0.3), (0.9, 0.9, 0.0), 0.55, [2, 3]),  # lower is better
        ("drift_distance", (0.006, 0.002, 0.001), (0.04, 0.03, 0.02), 0.0033, [2, None]),
        ("drift_cosine", (0.1, 0.2, 0.9), (0.3, 0.0, 0.0), 0.36, [3, None]),  # higher is better
        ("drift_cosine", (-0.4, -0.1, -0.1), (-0.5, -0.5, -0.2), -0.22, [2, 3]),  # a tenth worse is further below 0
        ("drift_momentum_cosine", (0.0, 0.0, 0.0), (-0.5, 0.5, -0.5), 0.0, [1, 2]),
    ],
)
def test_drift(write: Write, metric: str, first: Any, second: Any, target: float, rounds: list[int | None]) -> None:
    runs = [with_values(write([0.5] * 3), metric, *first), with_values(write([0.5] * 3, **FEDADC), metric, *second)]
    rows = summarize(runs, metric=metric)
    assert [row.target for row in rows] == [target, target] and [row.rounds_to_target for row in rows] == rounds
    better = max if higher_is_better(metric) else min
    assert [row.best for row in rows] == [better(first), better(second)]
    headings, cells = table_rows(rows)
    assert headings[2:4] == [metric.replace("_", " "), f"rounds to {target:g}"]
    assert [row[2] for row in cells] == [f"{statistics.mean(v):.4f}" for v in (first, second)]  # no per cent


def test_bytes_are_per_client_and_round_whatever_the_cohort(write: Write) -> None:
    for cohort in (1, 2, 10):
        (row,) = summarize([write([0.5, 0.6], cohort=cohort)])
        assert (row.bytes_up, row.bytes_down) == (100, 250)


def test_another_metric(write: Write) -> None:
    (row,) = summarize([write([0.25, 0.75])], metric="test_loss")
    assert row.value == pytest.approx(0.5)
    with pytest.raises(
        FedadcError, match=r"no test_list in any round as one value, but lists, .*; it has .*train_loss"
    ):
        curve(RecordedRun(Path("run"), {}, [{"round": 1, "train_loss": 1.0, "test_list": [1.0, 2.0]}]), "test_list")
    with pytest.raises(FedadcError, match=r"no test_f1 in any round; it has .*test_accuracy.*train_loss"):
        summarize([write([0.25])], metric="test_f1")


def test_a_loss_is_not_shown_as_a_percentage(write: Write) -> None:
    _, (cells,) = table_rows(summarize([write([0.25, 0.75])], metric="test_loss"))
    assert cells[2] == "0.5000"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1.5e6, "1.5 MB"), (2e9, "2.0 GB"), (3e12, "3000.0 GB")],
)
def test_human_readable_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


# --- groups ----------------------------------------------------------------------------------------------------------


def labels(*runs: RecordedRun) -> list[str]:
    return list(group(runs))


def test_groups_ignore_seeds_and_nothing_else(write: Write) -> None:
    same = [write([0.5], **seeds(i)) for i in range(3)]
    assert [len(members) for members in group(same).values()] == [3]
    for change in ({"rounds": 4}, {"local": {"lr": 0.2}}, {"data": {"clients": 5}}, {"model": {"hidden": [9]}}):
        assert len(group([same[0], write([0.5], **change)])) == 2, change


def test_labels_show_what_differs(write: Write) -> None:
    base = write([0.5])
    assert labels(base) == ["fedavg"]
    assert labels(base, write([0.5], **FEDADC), write([0.5], **PLUS)) == ["fedavg", "fedadc", "fedadc+"]
    assert labels(base, write([0.5], local={"lr": 0.5})) == ["fedavg lr=0.1", "fedavg lr=0.5"]
    assert labels(base, write([0.5], label="mine")) == ["fedavg", "mine"]
    both = labels(write([0.5], **FEDADC), write([0.5], method={**FEDADC["method"], "nesterov": True}))
    assert both == ["fedadc nesterov=False", "fedadc nesterov=True"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": {"name": "logistic"}}, "logistic"),
        ({"data": {"name": "mnist"}}, "mnist"),
        ({"data": {"partition": {"name": "dirichlet", "alpha": 0.5}}}, "dirichlet"),
        ({"local": {"schedule": {"name": "cosine", "horizon": 3, "final": 0.01}}}, "cosine"),
    ],
)
def test_labels_show_the_model_data_partition_and_schedule(write: Write, change: dict[str, Any], word: str) -> None:
    first, second = labels(write([0.5]), write([0.5], **change))
    assert word in second and word not in first


def test_a_setting_that_only_one_run_names_keeps_runs_apart(write: Write) -> None:
    """In either order, a config that sets the width is not grouped with one that leaves it to the default."""
    given, default = write([0.5]), write([0.9])
    del default.tree["model"]["hidden"]
    for runs in ((given, default), (default, given)):
        assert sorted(len(m) for m in group(runs).values()) == [1, 1]


def test_one_label_for_different_settings_gets_what_differs(write: Write) -> None:
    first, second = write([0.5], label="x"), write([0.5], label="x", local={"lr": 0.5})
    other = write([0.5], label="y", local={"lr": 0.7, "steps": 9})
    assert labels(first, second, other) == ["x lr=0.1", "x lr=0.5", "y"]  # only what differs among runs of the label
    assert len(group([first, second, write([0.5], label="x", **seeds(1))])["x lr=0.1"]) == 2
    assert len(group([first, write([0.5], label="x", **seeds(1))])["x"]) == 2
    models = labels(first, write([0.5], label="x", model={"name": "cnn"}), write([0.5], label="x", **FEDADC))
    assert models[:2] == ["x model=mlp method=fedavg", "x model=cnn method=fedavg"]
    assert models[2] == "x model=mlp method=fedadc beta=0.9 nesterov=False"


def test_a_setting_that_repeats_another_is_named_once(write: Write) -> None:
    runs = [
        write([0.5], label="x", rounds=n, local={"schedule": {"name": "constant", "horizon": n}, "lr": lr})
        for n, lr in ((3, 0.1), (6, 0.1), (9, 0.2))
    ]
    assert labels(*runs) == ["x rounds=3 lr=0.1", "x rounds=6 lr=0.1", "x rounds=9 lr=0.2"]


def test_a_label_that_spells_out_the_difference_itself_is_refused(write: Write) -> None:
    runs = [write([0.5], label="x"), write([0.5], label="x", local={"lr": 0.5}), write([0.5], label="x lr=0.5")]
    with pytest.raises(FedadcError, match=r"both labeled 'x lr=0\.5' but differ in"):
        group(runs)


def test_a_folder_of_a_grid_is_compared_even_while_it_is_trained(write: Write, tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        write([0.5, 0.6], label="x", local={"lr": lr})
    begun = write([0.5], label="x", local={"lr": 0.3}).path
    (begun / "metrics.jsonl").write_text("")
    said: list[str] = []
    assert [row.label for row in compare(tmp_path, notes=said.append)] == ["x lr=0.1", "x lr=0.2"]
    assert said[0] == f"{begun} is left out: it has no finished round yet" and "ended after 2 of 3" in said[1]
    with pytest.raises(FedadcError, match="no finished round"):
        compare([tmp_path, begun])  # it is asked for by name


# --- plots -----------------------------------------------------------------------------------------------------------


def test_a_plot_is_a_png_at_the_given_path(write: Write, tmp_path: Path) -> None:
    runs = [write([0.1, 0.5, 0.6]), write([0.2, None, 0.6], **seeds(1)), write([0.3, 0.9], **FEDADC)]
    for metric in ("test_accuracy", "train_loss"):
        picture = tmp_path / "deep" / "er" / f"{metric}.png"
        plot(runs, picture, metric, title="a title")
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 5000


def test_a_plot_that_cannot_be_written_is_an_error(write: Write, tmp_path: Path) -> None:
    run = write([0.5])
    (tmp_path / "a file").touch()
    with pytest.raises(FedadcError, match="cannot be written"):
        plot([run], tmp_path / "a file" / "x.png")


def test_a_plot_is_never_written_to_another_path(write: Write, tmp_path: Path) -> None:
    run = write([0.5])
    plot([run], tmp_path / "curve")
    assert (tmp_path / "curve").is_file()
    with pytest.raises(FedadcError, match="cannot be written"):
        plot([run], run.path)  # a folder


# --- damaged runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ['{"round": 2, "tes', "", "nonsense", "[1]", '{"lr": 1}', '{"round": "2"}', "[" * 100_000]
)
def test_a_damaged_line_is_named_by_its_number(write: Write, line: str) -> None:
    path = write([0.5, 0.6]).path
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(FedadcError, match=r"metrics\.jsonl, line 3 "):
        read_run(path)


@pytest.mark.parametrize("record", ['{"round": 3, "cohort": 5}', '{"round": 3, "bytes_up": "many"}'])
def test_a_record_with_wrong_types_is_refused_or_read(write: Write, record: str) -> None:
    path = write([0.5, 0.6]).path
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write(record + "\n")
    try:
        summarize([read_run(path)])
    except FedadcError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("metrics.jsonl", b"", "no finished round"),
        ("metrics.jsonl", None, "has no metrics.jsonl"),
        ("metrics.jsonl", b"\xff\xfe", "cannot be read"),
        ("config.yaml", None, "has no config.yaml"),
        ("config.yaml", b"", "is not a config"),
        ("config.yaml", b"{", "not valid YAML"),
        ("config.yaml", b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused(write: Write, name: str, content: bytes | None, fragment: str) -> None:
    file = write([0.5]).path / name
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FedadcError, match=fragment):
        read_run(file.parent)


def test_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FedadcError, match="there is no run directory"):
        read_run(tmp_path / "missing")


def test_the_same_run_twice_is_refused(write: Write) -> None:
    run = write([0.5, 0.6])
    with pytest.raises(FedadcError, match="same settings, same seed"):
        summarize([run, run])


def test_a_target_in_per_cent_is_refused(write: Write) -> None:
    with pytest.raises(FedadcError, match="a share such as"):
        summarize([write([0.5])], target=90)


@pytest.mark.parametrize(
    "clips", [(None, 1.0), (None, 1.0, 1.0), (None, None, 1.0), (None, 1.0, 2.0), (1.0, 1.0, 2.0, 2.0)]
)
def test_a_setting_that_some_runs_lack_keeps_them_apart(write: Write, clips: tuple[float | None, ...]) -> None:
    runs = [write([0.5], local={"clip": clip}, **seeds(i)) for i, clip in enumerate(clips)]
    groups = group(runs)
    assert sorted(len(g) for g in groups.values()) == sorted(clips.count(c) for c in set(clips))


@pytest.mark.parametrize(
    ("x", "at"),
    [("round", [1, 2, 3]), ("bytes", [700, 1400, 2100]), ("bytes_up", [200, 400, 600]),
     ("bytes_down", [500, 1000, 1500]), ("virtual_seconds", [40, 80, 120]), ("seconds", [2, 4, 6]),
     ("samples", [30, 60, 90])],
)  # fmt: skip
def test_progress_can_be_measured_by_every_recorded_quantity(x: str, at: list[float], write: Write) -> None:
    run = write([0.2, 0.6, 0.9])
    assert positions(run, x) == dict(zip((1, 2, 3), at, strict=True))
    (row,) = summarize([run], 0.5, x=x)
    assert (row.x, row.x_to_target, row.rounds_to_target) == (x, at[1], 2)


def test_progress_to_the_target_is_a_mean_over_seeds_in_a_readable_unit(write: Write) -> None:
    rows = summarize([write([0.2, 0.6]), write([0.6, 0.2], **seeds(1)), write([0.2, 0.2], **seeds(2))], 0.5, x="bytes")
    assert rows[0].x_to_target == (1400 + 700) / 2
    headings, (cells,) = table_rows(rows)
    assert headings[3] == "bytes up and down to 0.5 (kB)" and cells[3] == "1.05 (2 of 3)"
    headings, (cells,) = table_rows(summarize([write([0.2, 0.6])], 0.5, x="virtual_seconds"))
    assert headings[3] == "virtual time to 0.5 (min)" and cells[3] == "1.33"


@pytest.mark.parametrize("x", ["bytes", "virtual_seconds", "samples"])
def test_curves_against_other_axes(x: str, write: Write, tmp_path: Path) -> None:
    plot([write([0.2, 0.6]), write([0.3, 0.5], cohort=3, **seeds(1))], tmp_path / "x.png", x=x)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_an_axis_that_is_unknown_or_was_not_recorded(write: Write) -> None:
    run = write([0.5])
    with pytest.raises(FedadcError, match="did you mean 'bytes'"):
        summarize([run], x="byte")
    with pytest.raises(FedadcError, match="did you mean 'bytes'"):
        summarize([run], target=0.99, x="byte")
    for record in run.records:
        del record["virtual_seconds"]
    with pytest.raises(FedadcError, match="has no virtual_seconds in round 1; set clock in its config"):
        summarize([run], 0.4, x="virtual_seconds")
    with pytest.raises(FedadcError, match="has no virtual_seconds in round 1; set clock in its config"):
        summarize([run], 0.99, x="virtual_seconds")
