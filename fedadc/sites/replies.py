"""How a site answers a request of the server, whichever process it is in."""

from __future__ import annotations

from fedadc.errors import FedadcError
from fedadc.sites.packets import NOT_JOINED, PROBLEM, Kind, Packet
from fedadc.sites.site import NotJoined, Site, SiteRun


def reply(site: Site, kind: Kind, request: Packet) -> Packet:
    """Do what the server asks for, or say in one sentence why it cannot be done."""
    try:
        return _answer(site, kind, request)
    except (FedadcError, OSError) as error:
        return Packet({"client": site.name, PROBLEM: str(error), NOT_JOINED: isinstance(error, NotJoined)})


def _answer(site: Site, kind: Kind, request: Packet) -> Packet:
    if kind == "hello":
        return site.introduction(request)
    if kind == "describe":
        return site.describe(request)
    if kind == "agree":
        return site.agree(request)
    run = SiteRun.opened(site, str(request.facts["run"]))
    if kind == "train":
        return run.train(request)
    if kind == "count":
        return run.count(request)
    from fedadc.sites.tuning import finish_at_site  # takes long to import, and is needed once

    return finish_at_site(run, request)
