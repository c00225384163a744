"""After the last round, at a site: it keeps the final model, and may tune it on its own data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedadc.config.settings import Config, FederationConfig
from fedadc.data.dataset import Samples
from fedadc.fields.plain import to_json
from fedadc.models.build import read_weights
from fedadc.personal.calibrate import ClientTuner, Models, tuned_part
from fedadc.personal.folder import PersonalFolder
from fedadc.personal.request import Request, summary_text
from fedadc.personal.run import GLOBAL, stores_models
from fedadc.runs.layout import MODEL, PERSONAL, PERSONAL_SUMMARY
from fedadc.sites.packets import Packet
from fedadc.sites.site import SiteRun
from fedadc.system.determinism import deterministic
from fedadc.system.files import write_file


@dataclass(frozen=True)
class TunedTotals:
    """How good a site's models are on its test samples: sums of `Task.sample_values` by model; "": the global one."""

    totals: dict[str, float]


def request_of(config: Config) -> Request | None:
    """How the sites tune the final model; None: they do not."""
    personal = (config.federation or FederationConfig()).personalize
    return None if personal is None else Request(**vars(personal))


def finish_at_site(run: SiteRun, packet: Packet) -> Packet:
    """Keep the final model. Tune it if the run says so, keep the result too, and tell how good it is."""
    round, request = int(packet.facts["round"]), request_of(run.site.config)
    if packet.head:
        write_file(run.folder / MODEL, packet.head)
    if request is None:
        return Packet()
    with deterministic():
        tuner, models = _models_of_site(run, packet, request)
        method, test = run.agreement.method, run.joined.samples.get("test")
        stored = stores_models(method)
        compared = {GLOBAL: tuner.part.start} if method.federated and not (stored and method.headless) else {}
        totals = {}
        if test is not None and len(test) and run.site.settings.tells_evaluation:
            totals = tuner.totals({**models, **compared}, test, np.arange(len(test)))
    with PersonalFolder.create(run.folder / PERSONAL, round) as folder:
        for variant, theta in models.items():
            folder.add_model(variant, run.joined.number, tuner.tuned(theta, differing=stored and method.federated))
        model, calibration = MODEL if packet.head else None, None if stored else tuner.calibration
        folder.add_texts({PERSONAL_SUMMARY: summary_text(run.run, round, model, request, calibration, [])})
    return Packet(body=to_json(TunedTotals(totals)))


def _models_of_site(run: SiteRun, packet: Packet, request: Request) -> tuple[ClientTuner, Models]:
    """The site's own models: calibrated, or as the method has stored them."""
    agreement, config = run.agreement, run.site.config
    if packet.head:
        agreement.load_weights(read_weights(run.folder / MODEL), "the final model")
    stored, theta = stores_models(agreement.method), agreement.start.clone()
    layers = "all" if stored else request.layers
    part = tuned_part(agreement, theta, layers, config.evaluate.batch_size)
    tuner = ClientTuner(part, agreement, request.calibration(config), request.regularizers)
    train: Samples = run.joined.samples["train"]
    if not stored:
        return tuner, tuner.models(run.joined.number, train, np.arange(len(train)))
    return tuner, {"own": run.own_model(packet)}
