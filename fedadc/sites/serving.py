"""A run of a real federation: begun, or gone on with after whatever has stopped it, with the same bits."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from fedadc.config.build import TrainingPlan, complete
from fedadc.config.settings import Config, FederationConfig
from fedadc.data.dataset import Samples
from fedadc.data.loaders.arrays import samples_like
from fedadc.data.loaders.npz import pair_in, read_npz
from fedadc.data.schema import DataSchema
from fedadc.errors import DataError, FedadcError, RunDamaged, explained, require
from fedadc.fields.plain import from_json, to_json
from fedadc.personal.results import ResultRow
from fedadc.runs.environment import read_facts
from fedadc.runs.layout import CHECKPOINTS, METRICS, SITES
from fedadc.runs.runner import RunResult, Watcher, original_config, train_plan
from fedadc.sites.certificates import public_key_of
from fedadc.sites.connections import SiteConnections, Transport
from fedadc.sites.examination import Examination, examine
from fedadc.sites.finishing import finish
from fedadc.sites.joining import Terms, join, join_again
from fedadc.sites.journal import AuditFile, Journal, Line, LogFile, audit_file, log_file
from fedadc.sites.progress import ProgressNotes
from fedadc.sites.prometheus import MetricsServer
from fedadc.sites.server import HELD_OUT, SiteFederation
from fedadc.sites.status import Status, StatusFile, read_status, status_file
from fedadc.sites.trace_file import TraceFile, records_in
from fedadc.sites.tuning import request_of
from fedadc.system.files import LOCK, BusyError, checksum, file_lock, write_file
from fedadc.system.user_code import Notes
from fedadc.system.version import __version__

log = logging.getLogger("fedadc")
OTHER_ENDS = 180.0  # seconds in which an earlier server of the run may end


def serve(
    config: Config,
    transport: Transport,
    out: Path,
    server_data: Path | None = None,  # an .npz file with the server's own test samples
    watch: Watcher | None = None,
    notes: Notes = log.info,
    site_keys: Path | None = None,  # a folder with the public key of every site, NAME.pub
    metrics: str = "",  # where Prometheus may ask for figures: a port, or host:port; empty: nowhere
) -> RunResult:
    """Train with the sites that a transport reaches, and write a run directory. A run that is there goes on."""
    with only_server_of(out, notes):
        return _served(config, transport, out, server_data, watch, notes, site_keys, metrics)


def _served(
    config: Config,
    transport: Transport,
    out: Path,
    server_data: Path | None,
    watch: Watcher | None,
    notes: Notes,
    site_keys: Path | None,
    metrics: str,
) -> RunResult:
    served = served_metrics(metrics, notes)
    journal = journal_of(out, config.rounds, notes, served)
    try:
        _require_possible(config, server_data)
        connections = _connections(config, transport, journal, site_keys)
        result = _serve(config, connections, out, server_data, watch or (lambda record: None), notes)
        journal.finished()
        return result
    except Exception as error:
        journal.failed(explained(error) or FedadcError(f"a bug in fedadc or in your code: {type(error).__name__}."))
        raise
    finally:
        for server in served:
            server.close()


@contextmanager
def only_server_of(out: Path, notes: Notes) -> Iterator[None]:
    """Wait until an earlier server of a run has ended: two of them would write the same files.

    If the SuperLink died, its server program ends some time later.
    """
    until, said = time.monotonic() + OTHER_ENDS, False
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(file_lock(out.with_name(f"{out.name}-server{LOCK}")))
                break
            except BusyError:
                if time.monotonic() > until:
                    raise FedadcError(f"another server is at work on {out}; end it, or choose another `out`.") from None
            if not said:
                notes(f"waiting until an earlier server of {out} has ended")
                said = True
            time.sleep(1.0)
        yield


def examined(
    config: Config, transport: Transport, notes: Notes, site_keys: Path | None = None, within: float = 60.0
) -> Examination:
    """What there is at the sites, and what would go wrong. Nothing is trained, and nothing is written."""
    progress = ProgressNotes(config.rounds, notes)
    connections = _connections(config, transport, Journal(0, (), (progress.watch,)), site_keys)
    connections.patience = within
    return examine(config, connections, notes, within)


def served_metrics(address: str, notes: Notes) -> list[MetricsServer]:
    """A server for Prometheus, if it is wanted. One that cannot listen does not stop a run."""
    try:
        return [MetricsServer(address)] if address else []
    except FedadcError as error:
        notes(f"warning: {error}")
        return []


def journal_of(out: Path, rounds: int, notes: Notes, watchers: Sequence[Callable[[Status], None]] = ()) -> Journal:
    """Tells what happens: in files beside the run directory, and in sentences."""
    progress = ProgressNotes(rounds, notes)
    audit = AuditFile(audit_file(out))
    lines: list[Callable[[Line], None]] = [LogFile(log_file(out)), audit, progress.line]
    shown: list[Callable[[Status], None]] = [StatusFile(status_file(out)), progress.watch, *watchers]
    before = read_status(out) if (out / METRICS).is_file() else None
    return Journal(rounds, lines, shown, before, lambda: audit.end)


def _serve(
    config: Config,
    connections: SiteConnections,
    out: Path,
    server_data: Path | None,
    watch: Watcher,
    notes: Notes,
) -> RunResult:
    settings, journal = config.federation or FederationConfig(), connections.journal
    original = original_config(out, config, trust=True)
    before = None
    if original is None:
        assert settings.sites is not None
        run, holds_out = secrets.token_hex(8), settings.evaluate != "server"
        terms = join(connections, settings.sites, config, run, holds_out, notes)
    else:
        terms = recorded_terms(out)
        before = partial(_joined_before, out, terms)
        join_again(connections, terms, config)
    journal.status.run, journal.round = terms.run, max(checkpoint_rounds(out), default=0)
    _note_beginning(journal, connections, config, terms, "joined" if original is None else "returned")
    held = {} if server_data is None else _samples_of_server(server_data, terms.schema)
    federation = SiteFederation(config, connections, terms, held, before)
    federation.engine.oldest = lambda: oldest_checkpoint(out)
    federation.joined = lambda terms: write_file(out / SITES, to_json(terms))
    trace = TraceFile(out, lambda: federation.terms.names, terms.first or len(terms.names))

    def follow(record: dict[str, Any]) -> None:
        trace.add(record)
        journal.round_ended(record, federation.terms.names)
        watch(record)

    model = replace(federation.config.model, channels_last=terms.channels_last)
    plan = TrainingPlan(replace(complete(federation.config), model=model), federation)
    result = train_plan(plan, original, out, False, "cpu", None, follow, notes)
    trace.write()
    for row in finish(result, federation, out):
        notes(_about_own_models(row))
    notes(f"the run is in {out.resolve()}")
    return result


def _connections(config: Config, transport: Transport, journal: Journal, site_keys: Path | None) -> SiteConnections:
    settings = config.federation or FederationConfig()
    require(site_keys is None or site_keys.is_dir(), f"site-keys: there is no folder {site_keys}.", DataError)
    key_of = None if site_keys is None else partial(public_key_of, site_keys)
    return SiteConnections(transport, settings.patience, journal, settings.at_once, settings.open, key_of)


def _note_beginning(
    journal: Journal, connections: SiteConnections, config: Config, terms: Terms, event: Literal["joined", "returned"]
) -> None:
    """Lines about the beginning of a server's work: the settings, and who is there."""
    settings = checksum(json.dumps(config.tree(), default=str).encode())
    journal.write("began", {"config": settings, "fedadc": __version__, "schema": checksum(to_json(terms.schema))})
    for number, name in enumerate(terms.names):
        if name in connections.found:
            facts = {"client": number, "node": connections.found[name], "data": terms.answers[number].data}
            journal.write(event, facts, name)


def _require_possible(config: Config, server_data: Path | None) -> None:
    """Refuse settings with which no federation could train."""
    settings = config.federation or FederationConfig()
    require(config.faults.trace is None, "faults.trace repeats a federation in a simulation; leave it out here.")
    require(settings.sites is not None, "federation.sites is missing: how many sites take part, or their names.")
    needs = settings.evaluate in ("server", "both")
    require(needs == (server_data is not None), _about_server_data(settings, server_data))
    require(
        not needs or config.method.federated,
        f"federation.evaluate is {settings.evaluate}, but the method has no model at the server; set it to sites.",
    )
    if (request := request_of(config)) is not None:
        request.calibration(config)  # refuses what no site could do


def _about_own_models(row: ResultRow) -> str:
    found = row.figures()
    figures = {"own": found.personal_mean, "common": found.global_mean}
    shown = "{} {:.1%}" if row.is_share else "{} {:.4g}"
    means = ", ".join(shown.format(name, mean) for name, mean in figures.items() if mean is not None)
    return f"models of the sites ({row.regularizer}), mean {row.metric} on their test shares: {means or 'not known'}"


def _about_server_data(settings: FederationConfig, given: Path | None) -> str:
    if given is None:
        return f"federation.evaluate is {settings.evaluate}, so server-data must name the server's test samples."
    return f"server-data is {given}, but federation.evaluate is sites; set it to server or both."


def _samples_of_server(path: Path, schema: DataSchema) -> dict[str, Samples]:
    """The test samples of the server, and its validation samples if it has some."""
    arrays = read_npz(path)
    found = {}
    for split in HELD_OUT:
        if split == "test" or f"x_{split}" in arrays:
            samples = samples_like(schema.classes, *pair_in(arrays, path, (f"_{split}",)), path.name, schema.targets)
            mine, wanted = (tuple(samples.x.shape[1:]), samples.x.dtype), (schema.shape, getattr(torch, schema.dtype))
            require(mine == wanted, f"{path} has inputs {mine}, but the sites have {wanted}.", DataError)
            found[split] = samples
    return found


def recorded_terms(out: Path) -> Terms:
    """What the sites of a run have agreed on when it began."""
    if (out / SITES).is_file():
        return from_json(Terms, (out / SITES).read_bytes(), str(out))
    recorded = read_facts(out).get("federation")
    if not isinstance(recorded, str):
        raise RunDamaged(f"{out} cannot go on: its environment.json does not say what its sites have agreed on.")
    return from_json(Terms, recorded.encode(), str(out))


def _joined_before(out: Path, terms: Terms) -> tuple[int, int]:
    """The last round of a run that was opened again, and how many sites had joined until then.

    Rounds after the checkpoint from which it goes on are not recorded any more.
    """
    records = list(records_in(out / METRICS))
    joined = sum(len(record.get("joined", ())) for record in records)
    return len(records), (terms.first or len(terms.names)) + joined


def checkpoint_rounds(out: Path) -> list[int]:
    return [int(path.stem.removeprefix("round-")) for path in (out / CHECKPOINTS).glob("round-*.json")]


def oldest_checkpoint(out: Path) -> int:
    """The round of the oldest checkpoint of a run, to which its server may go back; 0: there is none."""
    return min(checkpoint_rounds(out), default=0)
