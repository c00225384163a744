"""A run of a real federation: begun, or gone on with after whatever has stopped it, with the same bits."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from fedadc.config.build import TrainingPlan, complete
from fedadc.config.settings import Config
from fedadc.errors import RunDamaged
from fedadc.runs.environment import read_facts
from fedadc.runs.layout import CHECKPOINTS
from fedadc.runs.runner import RunResult, Watcher, original_config, train_plan
from fedadc.sites.connections import SiteConnections, Transport
from fedadc.sites.schema import from_json
from fedadc.sites.server import SiteFederation, Terms, agree_again, agree_with_sites, require_same_data
from fedadc.system.user_code import Notes

log = logging.getLogger("fedadc")


def serve(
    config: Config,
    sites: Collection[str] | int,  # their names, or how many
    transport: Transport,
    out: Path,
    holds_out: bool = True,
    patience: float = 600.0,
    watch: Watcher | None = None,
    notes: Notes = log.info,
) -> RunResult:
    """Train with the sites that a transport reaches, and write a run directory. A run that is there goes on."""
    original = original_config(out, config, trust=True)
    connections = SiteConnections(transport, patience)
    if original is None:
        names = connections.wait_for(sites)
        notes(f"{len(names)} sites are connected: {', '.join(names[:20])}")
        terms = agree_with_sites(connections, names, config, secrets.token_hex(8), holds_out)
    else:
        terms = recorded_terms(out)
        names = connections.wait_for(terms.names)
        require_same_data(terms, dict(zip(names, agree_again(connections, terms, config, names), strict=True)))
    federation = SiteFederation(config, connections, terms)
    federation.engine.oldest = lambda: oldest_checkpoint(out)
    model = replace(federation.config.model, channels_last=terms.channels_last)
    plan = TrainingPlan(replace(complete(federation.config), model=model), federation)
    return train_plan(plan, original, out, False, "cpu", None, watch, notes)


def recorded_terms(out: Path) -> Terms:
    """What the sites of a run have agreed on when it began."""
    recorded = read_facts(out).get("federation")
    if not isinstance(recorded, str):
        raise RunDamaged(f"{out} cannot go on: its environment.json does not say what its sites have agreed on.")
    return from_json(Terms, recorded.encode(), str(out))


def oldest_checkpoint(out: Path) -> int:
    """The round of the oldest checkpoint of a run, to which its server may go back; 0: there is none."""
    rounds = [int(path.stem.removeprefix("round-")) for path in (out / CHECKPOINTS).glob("round-*.json")]
    return min(rounds, default=0)
