"""The result of a sweep in a terminal: a table of its trials, the choice, and what to know about it."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from fedadc.analysis.compare import is_share
from fedadc.analysis.heatmap import HEATMAP
from fedadc.cli.terminal import note, out, say
from fedadc.studies.search import EVALUATOR
from fedadc.studies.space import brief, described
from fedadc.studies.sweep import CHOICE, SweepResult
from fedadc.studies.trial_file import TRIALS, SweepTrial

SHOWN_TRIALS = 20


def sweep_summary(result: SweepResult, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**result.as_dict(), "all": [asdict(trial) for trial in result.trials]}, indent=2))
        return
    _table(result)
    if result.best is None:
        note("every trial diverged, so there is nothing to choose")
    else:
        _choice(result, result.best)
    say(f"runs:  {result.out}\nall trials:  {result.out / TRIALS}\nchoice:  {result.out / CHOICE}")
    if (result.out / HEATMAP).exists():
        say(f"heat map:  {result.out / HEATMAP}")


def _table(result: SweepResult) -> None:
    metric = result.choose_by.replace("_", " ")
    caption = "mean of the last 10 rounds, then mean ± std over seeds"
    table = Table(title=result.title or f"trials by {metric}", title_justify="left", caption_justify="left")
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("setting", overflow="fold")
    table.add_column(metric.replace(" ", "\n", 1), justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    ranked = result.ranked()
    given = {key: {brief(trial.settings[key]) for trial in ranked} for key in (ranked[0].settings if ranked else ())}
    swept = [key for key, values in given.items() if len(values) > 1] or list(given)
    for trial in ranked[:SHOWN_TRIALS]:
        state, value = str(trial.state), _shown(trial.values.get(result.choose_by, []), result.choose_by)
        if trial.state == "pruned":
            rung, last = list(trial.rungs.items())[-1]
            state, value = f"pruned at {rung}", f"({_shown([last], result.choose_by)})"
        best = "chosen" if result.best is not None and trial.trial == result.best.trial else state
        table.add_row(str(trial.trial), Text(described({key: trial.settings[key] for key in swept})), value, best)
    if any(trial.state == "pruned" for trial in ranked[:SHOWN_TRIALS]):
        caption += "; in brackets: the last value of a pruned trial"
    if (hidden := len(ranked) - SHOWN_TRIALS) > 0:
        caption += f"; {hidden} more trials are in {TRIALS}"
    table.caption = caption
    out.print(table)


def _choice(result: SweepResult, best: SweepTrial) -> None:
    parts = [f"{name.replace('_', ' ')} {_shown(values, name)}" for name, values in best.values.items()]
    say(f"best:  {described(best.settings)}: {', '.join(parts)}")
    if result.importance:
        shares = ", ".join(f"{key} {100 * share:.0f} %" for key, share in result.importance.items())
        say(f"importance ({EVALUATOR}):  {shares}")
    else:
        say(f"importance:  not known: {result.no_importance}")
    for sentence in result.edges:
        note(sentence)


def _shown(values: list[float], metric: str) -> str:
    if not values:
        return "–"
    scale, unit, digits = (100, " %", 1) if is_share(metric) else (1, "", 4)
    spread = f" ± {scale * statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.mean(values):.{digits}f}{spread}{unit}"
