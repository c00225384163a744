"""Parts of a real federation are killed (-9) while it trains; started again, the run ends with the same bits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from family import eventually, linux
from fedadc.sites.serving import recorded_terms
from fedadc.sites.site import STATES
from fedadc.sites.trial import train_on_this_machine
from federations import Parts, config_of, parts_of, require_same_bits, simulated

pytestmark = [linux, pytest.mark.federation, pytest.mark.usefixtures("nothing_is_left")]
DATA = {"name": "digits", "clients": 3, "partition": {"name": "dirichlet", "alpha": 1.0}}
CONFIG = {"method": "scaffold", "rounds": 5, "data": DATA, "cohort": {"size": 2}}


@contextmanager
def interrupted(folder: Path, **changes: Any) -> Iterator[Parts]:
    """The parts of a federation, which must end with the bits of the simulation whatever is done to them."""
    config = config_of(**{**CONFIG, **changes})
    here = simulated(config, folder / "here")
    with parts_of(config, folder / "there") as parts:
        parts.last = [parts.names[client] for client in here.cohort]
        yield parts
        parts.finished()
    require_same_bits(here, folder / "here", folder / "there")


def test_the_server(tmp_path: Path) -> None:
    """The sites stay as they are; the run is started again."""
    with interrupted(tmp_path) as parts:
        parts.after_round(2)
        parts.kill(*parts.processes("flwr-serverapp"))
        parts.restart_run()


def test_the_superlink(tmp_path: Path) -> None:
    """It starts again on the same port; the sites find it by themselves."""
    with interrupted(tmp_path) as parts:
        parts.after_round(2)
        parts.kill(parts.link.pid)
        parts.link.wait()
        parts.run.wait(timeout=120)
        parts.kill(*parts.processes("flwr-serverapp"))
        parts.link = parts.federation.start_link(parts.address)
        parts.restart_run()


def test_a_site(tmp_path: Path) -> None:
    """The server waits for it and asks it again."""
    with interrupted(tmp_path) as parts:
        parts.after_round(1)
        parts.kill_site(parts.last[0])
        parts.restart_site(parts.last[0])


def test_a_site_whose_upload_is_lost(tmp_path: Path) -> None:
    """It has trained and kept its new state, but the server never gets the upload: it trains the round again."""
    with interrupted(tmp_path, cohort={}) as parts:
        parts.after_round(1)
        name, federation = parts.names[1], parts.federation
        states = federation.folder / "sites" / name / recorded_terms(federation.run).run / STATES
        eventually(lambda: list(states.glob("round-00000002-*")), 120)
        parts.kill_site(name)
        assert (federation.run / "metrics.jsonl").read_text().count("\n") == 1, "the upload arrived; nothing is tested"
        parts.restart_site(name)


def test_the_program_of_a_site(tmp_path: Path) -> None:
    """The process that Flower starts for a message, while it trains; its SuperNode lives on."""
    with interrupted(tmp_path) as parts:
        parts.after_round(1)
        eventually(lambda: parts.processes("flwr-clientapp"), 60)
        parts.kill(*parts.processes("flwr-clientapp"))


def test_the_whole_machine(tmp_path: Path) -> None:
    config = config_of(**CONFIG)
    here = simulated(config, tmp_path / "here")
    with parts_of(config, tmp_path / "there") as parts:
        parts.after_round(2)
        parts.kill(*parts.federation.processes())
    train_on_this_machine(tmp_path / "there")
    require_same_bits(here, tmp_path / "here", tmp_path / "there")


def kill_link_and_server(parts: Parts) -> None:
    """The SuperLink and the server's program at once, as when their machine dies; the sites live on."""
    parts.kill(parts.link.pid, *parts.processes("flwr-serverapp"))
    parts.link.wait()
    parts.run.wait(timeout=120)
    parts.link = parts.federation.start_link(parts.address)
    parts.restart_run()


def kill_server(parts: Parts) -> None:
    parts.kill(*parts.processes("flwr-serverapp"))
    parts.run.wait(timeout=120)
    parts.restart_run()


def kill_site(parts: Parts, name: str) -> None:
    parts.kill_site(name)
    parts.restart_site(name)


def test_twenty_five_kills(tmp_path: Path) -> None:
    """At times and in an order that a seed has drawn; the run goes on between them."""
    rng = random.Random(19)
    changes = {"rounds": 60, "cohort": {"size": 2}, "communication": {"uplink": "top_k"}}
    with interrupted(tmp_path, **changes) as parts:
        deeds = [lambda: kill_server(parts)] * 8 + [lambda: kill_link_and_server(parts)] * 5
        deeds += [partial(kill_site, parts, name) for name in parts.names for _ in range(4)]
        rng.shuffle(deeds)
        metrics, killed = parts.federation.run / "metrics.jsonl", 0
        for deed in deeds:
            before = metrics.read_text().count("\n") if metrics.is_file() else 0
            parts.after_round(before + 1)
            time.sleep(3 * rng.random())
            deed()
            killed += 1
        assert killed == 25 and not (parts.federation.run / "model.safetensors").exists(), "it ended too early"
