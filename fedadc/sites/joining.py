"""Before the first round: the server finds the sites, merges what they tell of their data, and lets them prepare it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedadc.config.build import build_agreement, complete
from fedadc.config.settings import Config, FederationConfig
from fedadc.data.dataset import Normalization
from fedadc.data.roster import Roster
from fedadc.data.schema import DataSchema
from fedadc.engines.remote import NoAnswer
from fedadc.errors import FedadcError, WorkersLost, require
from fedadc.fields.plain import from_json, to_json
from fedadc.models.build import read_weights
from fedadc.sites.connections import NAME_ONLY, SiteConnections
from fedadc.sites.packets import Fact, Packet, require_same_versions
from fedadc.sites.requests import Limits, Requests, ask, share_of
from fedadc.sites.schema import (
    SiteAnswer,
    SiteSummary,
    lonely_classes,
    merged_schema,
    mixed_columns,
    notes_about_tables,
    with_names,
)
from fedadc.sites.site_data import rules_of
from fedadc.system.files import to_safetensors
from fedadc.system.user_code import Notes
from fedadc.training.agreement import Agreement
from fedadc.views.local_work import MOST

ADMITTED_WITHIN = 30.0  # seconds for a site that wishes to join a run that has begun


@dataclass(frozen=True)
class Terms:
    """What a federation has agreed on before its first round. It is stored with the run, and never changes."""

    run: str
    names: tuple[str, ...]  # of the clients, in the order of their numbers
    schema: DataSchema
    answers: tuple[SiteAnswer, ...]  # of the sites, in the same order
    holds_out: bool  # whether the sites have test samples
    channels_last: bool
    first: int = 0  # how many sites the run began with; the others have joined later. 0: all

    @property
    def at_start(self) -> Terms:
        """As they were when the run began."""
        many = self.first or len(self.names)
        return replace(self, names=self.names[:many], answers=self.answers[:many], first=0)

    def roster(self, config: Config) -> Roster:
        """What the server knows of its clients. One that does not tell its size counts as one with a single batch."""
        counts = [answer.label_counts for answer in self.answers]
        sizes = np.array([answer.sizes.get("train", config.local.batch_size) for answer in self.answers])
        known = all("train" in answer.sizes for answer in self.answers)
        return Roster(sizes, self.names, None if None in counts else lambda: np.array(counts), known)


def join(
    connections: SiteConnections, wanted: int | Sequence[str], config: Config, run: str, holds_out: bool, notes: Notes
) -> Terms:
    """Wait for the sites, merge and freeze what they tell, and let every site prepare its data accordingly."""
    connections.hello = question(holds_out)
    names = connections.wait_for(wanted)
    connections.hello = NAME_ONLY
    notes(f"{len(names)} sites are connected: {', '.join(names[:20])}")
    _require_same_versions(connections.said)
    schema = frozen_schema(connections, names, config, holds_out, notes)
    terms = Terms(run, tuple(names), schema, (), holds_out, channels_last_of(config, schema), len(names))
    answers = agree_again(connections, terms, config, names)
    _require_same_agreement(answers, agreement_of(config, terms))
    require_sizes(answers, config, len(schema.classes))
    return replace(terms, answers=tuple(answers.values()))


def join_again(connections: SiteConnections, terms: Terms, config: Config) -> None:
    """Wait for the sites of a run that was interrupted; each must have the data with which it began.

    If some are missing, a quorum is enough after the deadline.
    """
    settings, enough = config.federation or FederationConfig(), None
    connections.hello = Packet({"run": terms.run, "label_counts": _needs_label_counts(config)})
    if settings.quorum is not None:  # sites that are not there are treated as in any other round
        enough = 1 if settings.open else share_of(len(terms.names), settings.quorum)
    names = connections.wait_for(terms.names, enough, settings.deadline, strict=enough is None)
    connections.hello = NAME_ONLY
    for name in names:
        try:
            _take_up_again(connections, terms, config, name)
        except FedadcError as error:
            if enough is None:
                raise
            connections.turn_away(name, str(error))
    left = len([name for name in terms.names if name in connections.found])
    found = f"{left} of {len(terms.names)} sites can go on; {enough} are needed."
    require(enough is None or left >= enough, found, WorkersLost)


def _take_up_again(connections: SiteConnections, terms: Terms, config: Config, name: str) -> None:
    """Refuse a site that cannot go on with the run, as it is now."""
    said, within = connections.said[name], (config.federation or FederationConfig()).deadline
    if said.body:
        found = {name: from_json(SiteAnswer, said.body, f"site {name}")}
    else:
        found = agree_again(connections, terms, config, [name], within)
    require_same_data(terms, found)
    _require_fitting(config, terms, {name: said}, found)


def admit(connections: SiteConnections, terms: Terms, config: Config) -> Iterator[tuple[str, SiteAnswer]]:
    """Let sites join a run that has begun; those that do not fit, or do not answer soon, are refused and told why."""
    settings, names = config.federation or FederationConfig(), connections.newcomers()
    first = len(connections.roster or ())
    requests = [(name, to_agree(terms, config, name, first + k)) for k, name in enumerate(names)]
    limits = Limits(min(settings.deadline or settings.patience, ADMITTED_WITHIN), 0)
    answers = Requests(connections, "agree", requests, None, limits, "answer").answers() if requests else iter(())
    admitted = 0
    for position, (name, answer) in enumerate(list(zip(names, answers, strict=True))):
        try:
            found = _agreed(name, answer)
            assert isinstance(answer, Packet)
            _require_fitting(config, terms, {name: answer}, {name: found})
        except FedadcError as error:
            if name in connections.found and name not in connections.busy:
                connections.turn_away(name, str(error))
            continue
        if position == admitted:  # else it was told a number that it does not get; it is asked again next time
            admitted += 1
            yield name, found


def _require_fitting(
    config: Config, terms: Terms, said: Mapping[str, Packet], answers: Mapping[str, SiteAnswer]
) -> None:
    """Refuse sites that would not train as the others do."""
    _require_same_versions(said)
    _require_same_agreement(answers, agreement_of(config, terms))
    require_sizes(answers, config, len(terms.schema.classes))


def _require_same_versions(said: Mapping[str, Packet]) -> None:
    """Refuse sites with another fedadc or torch: their numbers would differ."""
    for name, packet in said.items():
        require_same_versions(name, packet)


def question(holds_out: bool, as_text: Collection[str] = ()) -> Packet:
    return Packet({"holds_out": holds_out, "as_text": json.dumps(sorted(as_text))})


def frozen_schema(
    connections: SiteConnections, names: Sequence[str], config: Config, holds_out: bool, notes: Notes
) -> DataSchema:
    """What the data of all sites is like together, as they tell it."""
    summaries = summaries_of(names, [connections.said[name] for name in names])
    if mixed := mixed_columns(summaries):
        again = question(holds_out, mixed)
        summaries = summaries_of(names, ask(connections, "describe", [(name, again) for name in names]))
    options = config.data.options
    schema = with_names(merged_schema(summaries, rules_of(config)), options.get("label", ""), None)
    for note in notes_about_tables(schema, summaries):
        notes(note)
    for label, site in lonely_classes(summaries).items():
        notes(f"only site {site} has the class {label}")
    if config.data.normalize is None:
        return schema
    mean, std = config.data.normalize.mean, config.data.normalize.std
    return replace(schema, normalization=Normalization(schema.normalization.scale, mean, std))


def summaries_of(names: Sequence[str], said: Iterable[Packet]) -> list[SiteSummary]:
    """What sites tell about their data."""
    found = [from_json(SiteSummary, a.body, f"site {name}") for name, a in zip(names, said, strict=True)]
    for name, summary in zip(names, found, strict=True):
        require(summary.client == name, f"site {name} answered as {summary.client}.")
    return found


def agree_again(
    connections: SiteConnections, terms: Terms, config: Config, names: Sequence[str], within: float | None = None
) -> dict[str, SiteAnswer]:
    """Let these sites prepare their data for a run, as the frozen schema says; each must answer `within` seconds."""
    requests = [(name, to_agree(terms, config, name, terms.names.index(name))) for name in names]
    limits = None if within is None else Limits(within, len(requests))
    answers = Requests(connections, "agree", requests, None, limits, strict=True).answers()
    found = dict(zip(names, answers, strict=True))
    return {name: _agreed(name, answer) for name, answer in found.items()}


def _agreed(name: str, answer: Packet | NoAnswer) -> SiteAnswer:
    if isinstance(answer, NoAnswer):
        raise FedadcError(answer.reason)
    return from_json(SiteAnswer, answer.body, f"site {name}")


def to_agree(terms: Terms, config: Config, name: str, number: int) -> Packet:
    facts: dict[str, Fact] = {
        "run": terms.run, "number": number, "channels_last": terms.channels_last, "holds_out": terms.holds_out,
        "label_counts": _needs_label_counts(config),
    }  # fmt: skip
    return Packet(facts, _initial_weights(config), to_json(terms.schema))


def _initial_weights(config: Config) -> bytes:
    """Weights that the server has in a file, for the sites, which do not have it."""
    path = config.model.weights
    return b"" if path is None else to_safetensors(read_weights(config.file(path)))


def _needs_label_counts(config: Config) -> bool:
    return config.cohort.selection is not None and config.cohort.selection.needs_label_counts


def channels_last_of(config: Config, schema: DataSchema) -> bool:
    """Whether inputs are stored pixel by pixel, which the server decides for all."""
    return build_agreement(complete(config), schema.spec).inputs.channels_last


def agreement_of(config: Config, terms: Terms) -> Agreement:
    """What the server trains with, as the sites do."""
    config = complete(config)
    config = replace(config, model=replace(config.model, channels_last=terms.channels_last))
    return build_agreement(config, terms.schema.spec)


def _require_same_agreement(answers: Mapping[str, SiteAnswer], agreement: Agreement) -> None:
    expected = agreement.fingerprint()
    for name, answer in answers.items():
        require(
            answer.agreement == expected,
            f"site {name} would train with other settings or initial weights than the server; make fedadc and torch "
            "the same there.",
        )


def require_sizes(answers: Mapping[str, SiteAnswer], config: Config, classes: int) -> None:
    """Refuse numbers of samples that cannot be, and sites that do not tell theirs if training depends on it."""
    for name, answer in answers.items():
        for split, size in answer.sizes.items():
            require(0 < size <= MOST, f"site {name} says that it has {size} samples of {split}; that cannot be.")
        if _needs_label_counts(config):
            counts, total = answer.label_counts or (), answer.sizes.get("train")
            possible = len(counts) == classes and all(0 <= count <= MOST for count in counts) and sum(counts) > 0
            wrong = f"site {name} tells label counts that cannot be those of its samples: {str(list(counts))[:60]}."
            require(possible and total in (None, sum(counts)), wrong)
    needs = {
        "local.epochs": config.local.steps is None,
        "cohort.weighting": config.cohort.weighting == "samples",
        "the method": config.method.needs_sizes,
    }
    for name in [name for name, answer in answers.items() if "train" not in answer.sizes]:
        for what in [what for what, depends in needs.items() if depends]:
            instead = "; use local.steps, or let the site allow samples" if what == "local.epochs" else ""
            raise FedadcError(f"site {name} does not tell its number of samples, on which {what} depends{instead}.")


def require_same_data(terms: Terms, answers: Mapping[str, SiteAnswer]) -> None:
    """Refuse sites whose data has changed since the run began."""
    for name, answer in answers.items():
        before = terms.answers[terms.names.index(name)]
        if answer.data != before.data:
            raise FedadcError(f"the data of site {name} has changed since the run began; a new run is needed.")
