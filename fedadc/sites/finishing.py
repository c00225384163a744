"""After the last round, at the server: every site gets the final model. Models that sites tune stay with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from pathlib import Path

from fedadc.errors import require
from fedadc.fields.plain import from_json
from fedadc.personal.folder import PersonalFolder
from fedadc.personal.personalize import add_results
from fedadc.personal.request import Request, summary_text
from fedadc.personal.results import ClientTotal, ResultRow
from fedadc.personal.run import GLOBAL, stores_models
from fedadc.runs.layout import MODEL, PERSONAL
from fedadc.runs.runner import RunResult
from fedadc.sites.packets import Packet
from fedadc.sites.schema import UNKNOWN
from fedadc.sites.server import SiteFederation
from fedadc.sites.tuning import TunedTotals, request_of


def finish(result: RunResult, federation: SiteFederation, out: Path) -> list[ResultRow]:
    """Send the final model to all sites; if they tune it, record and return how good their own models are."""
    terms, method, state = federation.terms, federation.method, result.state
    content = (out / MODEL).read_bytes() if method.federated else b""
    theta = state.theta.cpu().numpy().tobytes() if stores_models(method) else b""
    packets = {
        name: Packet({"run": terms.run, "round": state.round, "counted": state.clients.counted(k)}, content, theta)
        for k, name in enumerate(terms.names)
    }
    found = dict(zip(terms.names, federation.engine.ask("finish", packets.items()), strict=True))
    answers = {name: answer for name, answer in found.items() if isinstance(answer, Packet)}
    request = request_of(federation.config)
    if request is None or not answers:
        return []
    rows = _rows(out.resolve().name, federation, request, answers)
    if not rows:
        return []
    stored = stores_models(method)
    calibration = None if stored else request.calibration(federation.config)
    model = MODEL if method.federated else None
    with PersonalFolder.create(out / PERSONAL, state.round) as folder:
        add_results(folder, rows, summary_text(rows[0].run, state.round, model, request, calibration, rows))
    return rows


def _rows(label: str, federation: SiteFederation, request: Request, answers: Mapping[str, Packet]) -> list[ResultRow]:
    """The rows of the table; numbers that cannot be are refused."""
    variants = ("own",) if stores_models(federation.method) else tuple(dict.fromkeys(request.regularizers))
    task = federation.agreement.task
    rows = {variant: ResultRow(label, variant, task=type(task)) for variant in variants}
    for name, answer in answers.items():
        with federation.engine.unless_refused("figures of own models", name):
            number = federation.terms.names.index(name)
            sizes = federation.terms.answers[number].sizes
            tests = sizes.get("test", 0)
            totals = _totals(answer, name, variants if tests else (), task.largest_value * tests if tests else 0.0)
            for variant, row in rows.items():
                found = sizes.get("train", UNKNOWN), tests, totals.get(variant, 0.0), totals.get(GLOBAL)
                row.totals.append(ClientTotal(number, name, *found))
    return [row for row in rows.values() if row.totals]


def _totals(answer: Packet, name: str, variants: Collection[str], most: float) -> Mapping[str, float]:
    """How good these models of a site are on its test samples: sums over these, each at most `most`."""
    totals = from_json(TunedTotals, answer.body, f"site {name}").totals
    complete = totals.keys() - {GLOBAL} == {*variants}
    possible = all(0 <= total <= most and isfinite(total) for total in totals.values())
    require(complete and possible, f"site {name} sent figures of its own models that cannot be.")
    return totals
