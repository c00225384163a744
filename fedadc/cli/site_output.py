"""What the commands of federations show in a terminal."""

from __future__ import annotations

import time

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedadc.cli.terminal import out, say
from fedadc.sites.examination import Examination, SiteReport
from fedadc.sites.overview import Overview
from fedadc.sites.status import SiteStatus, Status

HEADINGS = ("site", "here", "round", "heard", "late", "refused", "unable", "lost", "MB up/down")


def show_overview(found: Overview) -> None:
    """How a federation stands."""
    status = found.status
    say(str(found.run))
    say(f"{status.state}, round {status.round} of {status.rounds}{_figures(status)}")
    if status.error:
        say(f"error: {status.error}")
    elif status.state == "running" and status.activity is not None:
        say(status.activity.sentence)
    elif status.state == "stopped":
        say("its server does not run; start the run again to go on")
    out.print(_table(status))
    for name, own in status.sites.items():
        if own.last_problem:
            say(f"{name}: {own.last_problem}")
    if found.audit is not None:
        state = "all lines are as they were written" if found.changed is None else f"line {found.changed} was changed"
        say(f"{found.audit.name}: {state}")


def _figures(status: Status) -> str:
    parts = [f"{name} {value:.4g}" for name, value in status.metrics.items()]
    return ", " + ", ".join([*parts, f"{_ago(status.updated)} ago"])


def _table(status: Status) -> Table:
    caption = "round: the last one that counted; heard: since the last answer"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("site", "here") else "right", overflow="fold")
    for name, own in sorted(status.sites.items()):
        table.add_row(Text(name), *_row(own, name in status.connected and status.state == "running"))
    return table


def _row(own: SiteStatus, here: bool) -> list[str]:
    counts = [str(n) if n else "-" for n in (own.late, own.refused, own.problems, own.lost)]
    megabytes = f"{own.bytes_up / 1e6:.2f}/{own.bytes_down / 1e6:.2f}"
    counted = str(own.counted) if own.counted else "-"
    return ["yes" if here else "no", counted, _ago(own.answered) if own.answered else "-", *counts, megabytes]


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def show_examination(found: Examination) -> None:
    """What was found of a federation before a run."""
    server = found.server
    caption = (
        "weights: of the model; GB: free on its disk; s: from the question to the answer\n"
        "clock: as the server's, as far as these seconds can tell\n"
        f"server: fedadc {server.fedadc}, torch {server.torch}, {server.machine} with {server.cpu}"
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), caption=caption, caption_justify="left")
    for heading in ("site", "train", "test", "inputs", "weights", "GB", "s", "clock", ""):
        table.add_column(heading, justify="left" if heading in ("site", "") else "right", overflow="fold")
    for site in found.sites:
        table.add_row(Text(site.name), *_examined(site), "wrong" if site.problems else "ready")
    out.print(table)
    for note in found.notes:
        say(note)
    if found.healthy:
        ready = "1 site is ready" if len(found.sites) == 1 else f"{len(found.sites)} sites are ready"
        say(f"{ready}; {len(found.classes)} classes: {', '.join(found.classes)[:200]}" if found.classes else ready)


def _examined(site: SiteReport) -> list[str]:
    check = site.check
    if check is None:
        return ["-"] * 7
    sizes = [str(check.sizes.get(split, "-")) for split in ("train", "test")]
    shape = "x".join(map(str, check.shape))
    return [
        *sizes, shape, _short(check.parameters), f"{check.free_gb:.0f}", f"{site.seconds:.1f}", _clock(site),
    ]  # fmt: skip


def _clock(site: SiteReport) -> str:
    return f"{site.clock:+.0f} s" if any("clock" in problem for problem in site.problems) else "ok"


def _short(number: int) -> str:
    """1.7M for 1,663,370."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
