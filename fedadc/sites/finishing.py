"""After the last round, at the server: every site gets the final model. Models that sites tune stay with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from fedadc.errors import require
from fedadc.fields.plain import from_json
from fedadc.personal.folder import PersonalFolder
from fedadc.personal.personalize import add_results
from fedadc.personal.request import Request, summary_text
from fedadc.personal.results import ClientAccuracy, ResultRow
from fedadc.personal.run import GLOBAL, stores_models
from fedadc.runs.layout import MODEL, PERSONAL
from fedadc.runs.runner import RunResult
from fedadc.sites.packets import Packet
from fedadc.sites.schema import UNKNOWN
from fedadc.sites.server import SiteFederation
from fedadc.sites.tuning import TunedCounts, request_of


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
    rows = {variant: ResultRow(label, variant) for variant in variants}
    for name, answer in answers.items():
        with federation.engine.unless_refused("figures of own models", name):
            number = federation.terms.names.index(name)
            sizes = federation.terms.answers[number].sizes
            tests = sizes.get("test", 0)
            correct = _correct(answer, name, tests, variants)
            for variant, row in rows.items():
                counts = sizes.get("train", UNKNOWN), tests, correct.get(variant, 0), correct.get(GLOBAL)
                row.counts.append(ClientAccuracy(number, name, *counts))
    return [row for row in rows.values() if row.counts]


def _correct(answer: Packet, name: str, tests: int, variants: Collection[str]) -> Mapping[str, int]:
    """How many of its test samples the models of a site classify correctly."""
    correct = from_json(TunedCounts, answer.body, f"site {name}").correct
    possible = all(0 <= count <= tests for count in correct.values()) and correct.keys() <= {*variants, GLOBAL}
    require(possible, f"site {name} sent counts of its own models that cannot be.")
    return correct
