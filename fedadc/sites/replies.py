"""How a site answers a request of the server, whichever process it is in."""

from __future__ import annotations

from fedadc.errors import FedadcError
from fedadc.sites.packets import NEEDS_STATE, NOT_JOINED, PROBLEM, Fact, Kind, Packet
from fedadc.sites.site import NotJoined, Site, SiteRun
from fedadc.training.tracking import NotUpToDate


def reply(site: Site, kind: Kind, request: Packet) -> Packet:
    """Do what the server asks for, or say in one sentence why it cannot be done."""
    try:
        return _answer(site, kind, request)
    except (FedadcError, OSError) as error:
        facts: dict[str, Fact] = {"client": site.name, PROBLEM: str(error), NOT_JOINED: isinstance(error, NotJoined)}
        return Packet({**facts, NEEDS_STATE: True} if isinstance(error, NotUpToDate) else facts)


def _answer(site: Site, kind: Kind, request: Packet) -> Packet:
    if kind == "hello":
        return site.introduction(request)
    if kind == "describe":
        return site.describe(request)
    if kind == "agree":
        return site.agree(request)
    if kind == "check":
        from fedadc.sites.examination import check_of_site

        return check_of_site(site, request)
    run = SiteRun.opened(site, str(request.facts["run"]))
    if kind == "train":
        return run.train(request)
    if kind == "keep":
        return run.keep(request)
    if kind == "count":
        return run.count(request)
    from fedadc.sites.tuning import finish_at_site  # takes long to import, and is needed once

    return finish_at_site(run, request)
