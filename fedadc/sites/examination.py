"""An examination of a federation before a run: what every site has, and what would go wrong. Nothing is trained.

Every site reads its data, builds the model, and says what it found. Problems are collected, not only the first one.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load

from fedadc.config.settings import Config, FederationConfig
from fedadc.engines.remote import NoAnswer
from fedadc.errors import FedadcError
from fedadc.fields.plain import from_json, to_json
from fedadc.sites.joining import (
    Terms,
    agreement_of,
    channels_last_of,
    frozen_schema,
    question,
    require_sizes,
    summaries_of,
    to_agree,
)
from fedadc.sites.packets import Packet
from fedadc.sites.requests import Limits, Requests
from fedadc.sites.schema import SiteAnswer, SiteSummary, difference_of
from fedadc.system.files import write_file
from fedadc.system.node_facts import NodeFacts
from fedadc.system.user_code import Notes

if TYPE_CHECKING:
    from fedadc.sites.connections import SiteConnections
    from fedadc.sites.site import Site

EXAMINATION = "examination"  # the name of a run that never begins
CLOCK_TOLERANCE = 5.0  # seconds by which clocks may differ: Flower's own tolerance for signed messages
MIN_FREE_GB = 1.0


@dataclass(frozen=True)
class SiteCheck:
    """What a site says of itself."""

    machine: NodeFacts
    python: str
    time: float  # seconds since 1970, by its clock
    free_gb: float  # on the disk of its folder
    sizes: dict[str, int]  # samples of every split that it tells
    label_counts: tuple[int, ...] | None  # if the selection needs them
    shape: tuple[int, ...]  # of its inputs
    parameters: int  # of the model that it has built
    agreement: str  # fingerprint of what it would train with


@dataclass
class SiteReport:
    """What was found of a site."""

    name: str
    check: SiteCheck | None = None  # None: it did not get so far
    seconds: float = 0.0  # from the question to its answer
    clock: float = 0.0  # seconds by which its clock is ahead of the server's, give or take half of these
    problems: list[str] = field(default_factory=list)


@dataclass
class Examination:
    """What was found of a federation."""

    server: NodeFacts
    classes: tuple[str, ...] = ()
    sites: list[SiteReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # of no site in particular
    notes: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not self.problems and not any(site.problems for site in self.sites)

    def write(self, path: Path) -> None:
        write_file(path, to_json(self))

    @staticmethod
    def read(path: Path) -> Examination:
        return from_json(Examination, path.read_bytes(), str(path))


def check_of_site(site: Site, request: Packet) -> Packet:
    """The site's half: read the data, build the model, keep nothing."""
    from fedadc.sites.site import SiteRun

    joined = site.joined(request)
    run = SiteRun(site, EXAMINATION, joined)
    agreement = run.agreement
    if request.head:
        agreement.load_weights(load(request.head), "the server's initial weights")
    told = site.told(run, bool(request.facts["label_counts"]))
    folder = next(path for path in (site.settings.folder, *site.settings.folder.parents) if path.is_dir())
    found = SiteCheck(
        machine=NodeFacts.here(), python=sys.version.split()[0], time=time.time(),
        free_gb=round(shutil.disk_usage(folder).free / 1e9, 1), sizes=told.sizes,
        label_counts=told.label_counts, shape=tuple(joined.spec.input_shape), parameters=agreement.start.numel(),
        agreement=told.agreement,
    )  # fmt: skip
    return Packet(body=to_json(found))


def examine(config: Config, connections: SiteConnections, notes: Notes, within: float) -> Examination:
    """The server's half: ask all sites that connect in time, and compare what they say."""
    settings, found = config.federation or FederationConfig(), Examination(NodeFacts.here())
    holds_out = settings.evaluate != "server"
    connections.hello = question(holds_out)
    wanted = settings.sites if settings.sites is not None else 1
    reports = {name: SiteReport(name) for name in connections.gather(wanted, within)}
    if not isinstance(wanted, int):
        reports = {name: reports.get(name, SiteReport(name)) for name in wanted} | reports
    elif len(reports) != wanted:
        found.problems.append(f"{len(reports)} sites are connected, but federation.sites is {wanted}")
    found.sites = list(reports.values())
    for name, problem in connections.problems:
        (reports[name].problems if name in reports else found.problems).append(problem)
    for report in found.sites:
        if report.name not in connections.found and not report.problems:
            report.problems.append(f"it did not connect within {within:g} seconds")
        if not isinstance(wanted, int) and report.name not in wanted and not settings.open:
            report.problems.append("it is not in federation.sites")
    fitting = _fitting(connections, [report for report in found.sites if not report.problems])
    if fitting:
        _check_all(config, connections, fitting, found, notes, within)
    return found


def _fitting(connections: SiteConnections, reports: Sequence[SiteReport]) -> list[SiteReport]:
    """The sites whose data has the columns or shapes of the first one."""
    first: SiteSummary | None = None
    for report in reports:
        try:
            (summary,) = summaries_of([report.name], [connections.said[report.name]])
        except FedadcError as error:
            report.problems.append(str(error))
            continue
        first = first or summary
        if difference := difference_of(first, summary):
            report.problems.append(f"it does not fit site {first.client}: {difference}")
    return [report for report in reports if not report.problems]


def _check_all(
    config: Config,
    connections: SiteConnections,
    reports: Sequence[SiteReport],
    found: Examination,
    notes: Notes,
    within: float,
) -> None:
    """Let these sites build the model for the data that they have together."""
    names, holds_out = [report.name for report in reports], bool(connections.hello.facts["holds_out"])
    try:
        schema = frozen_schema(connections, names, config, holds_out, found.notes.append)
        terms = Terms(EXAMINATION, tuple(names), schema, (), holds_out, channels_last_of(config, schema))
        expected = agreement_of(config, terms).fingerprint()
    except FedadcError as error:
        found.problems.append(str(error))
        return
    found.classes = schema.classes
    requests = [(name, to_agree(terms, config, name, number)) for number, name in enumerate(names)]
    began = time.time()
    answers = Requests(connections, "check", requests, None, Limits(within, 0)).answers()
    for report, answer in zip(reports, answers, strict=True):
        notes(f"site {report.name} has answered")
        if isinstance(answer, NoAnswer):
            report.problems.append(answer.reason)
            continue
        _judge(report, answer, began, connections.journal.site(report.name).answered, found.server, expected)
        if report.check is not None:
            told = SiteAnswer(report.check.sizes, report.check.label_counts, "", report.check.agreement)
            try:
                require_sizes({report.name: told}, config, len(schema.classes))
            except FedadcError as error:
                report.problems.append(str(error))


def _judge(report: SiteReport, answer: Packet, began: float, came: float, server: NodeFacts, expected: str) -> None:
    try:
        check = from_json(SiteCheck, answer.body, f"site {report.name}")
    except FedadcError as error:
        report.problems.append(str(error))
        return
    report.check, report.seconds = check, came - began
    report.clock = check.time - (began + came) / 2
    others = check.machine.differences(server)
    report.problems += [f"it has {difference}" for difference in others]
    if abs(report.clock) > report.seconds / 2 + CLOCK_TOLERANCE:
        report.problems.append(f"its clock is {abs(report.clock):.0f} s {'ahead' if report.clock > 0 else 'behind'}")
    if check.free_gb < MIN_FREE_GB:
        report.problems.append(f"its disk has {check.free_gb:g} GB left")
    if check.agreement != expected and not others:
        report.problems.append("it would train with other settings or initial weights than the server")


def as_json(found: Examination) -> Mapping[str, Any]:
    return {**asdict(found), "healthy": found.healthy}
