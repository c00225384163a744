"""The two halves of a federation as apps of Flower. Only this module, `grid` and `records` import Flower."""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import flwr
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedadc.errors import FedadcError, require, unknown
from fedadc.sites.node import NodeSettings
from fedadc.sites.packets import PROBLEM, RUN_CONFIG, Kind, Packet, versions
from fedadc.sites.records import TYPES, to_packet, to_record
from fedadc.sites.resident import ask_resident

log = logging.getLogger("flwr")  # what Flower shows


def client_app(app_file: str) -> ClientApp:
    """The ClientApp of a federation; the app's folder has its config."""
    app, folder = ClientApp(), Path(app_file).resolve().parent

    def answering(kind: Kind) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            try:
                packet = _answer(kind, to_packet(message.content), folder, context)
            except FedadcError as error:
                client = str(context.node_config.get("client", ""))
                packet = Packet({"client": client, PROBLEM: str(error)})
            if PROBLEM in packet.facts:
                log.error("%s: %s", kind, packet.facts[PROBLEM])
            return Message(to_record(packet), reply_to=message)

        return answer

    for kind, name in TYPES.items():
        category, _, action = name.partition(".")
        register: Any = getattr(app, category)
        (register(action) if action else register())(answering(kind))
    return app


def _answer(kind: Kind, request: Packet, folder: Path, context: Context) -> Packet:
    settings = NodeSettings.of(context.node_config, context.run_config)
    if kind == "hello" and not request.facts:
        return Packet({"client": settings.client, **versions()})
    if kind == "refuse":
        raise FedadcError(f"the server refuses site {settings.client}: {request.facts.get('reason')}")
    if (answer := ask_resident(kind, request, folder, settings)) is not None:
        return answer
    from fedadc.sites.app import config_of_app  # these import torch, which takes most of the start
    from fedadc.sites.replies import reply
    from fedadc.sites.site import Site

    return reply(Site(settings, config_of_app(folder)), kind, request)


def packed_app(folder: Path) -> bytes:
    """An app as Flower packs and sends it."""
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(folder)


def run_client_app(pins: Collection[str]) -> None:
    """What Flower does in the process of a message, for apps with these checksums only.

    The check stands before the place where Flower unpacks an app. If a version of Flower has no such place, nothing is
    run.
    """
    program: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    unpack = program.install_from_fab
    known = program.run_clientapp.__code__.co_names
    require("install_from_fab" in known, f"--pin does not work with Flower {flwr.__version__}; nothing is run.")

    def checked(content: bytes, *args: Any, **settings: Any) -> Any:
        found = hashlib.sha256(content).hexdigest()
        require(found in pins, f"this site runs only apps that it knows (--pin), not the one with checksum {found}.")
        return unpack(content, *args, **settings)

    program.install_from_fab = checked
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    flwr_clientapp()


def _one_sentence(record: logging.LogRecord) -> bool:
    """Flower logs errors with their tracebacks; of ours, the sentence is enough."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, FedadcError):
        record.msg, record.args, record.exc_info = f"error: {error}", (), None
    return True


def server_app(app_file: str) -> ServerApp:
    """The ServerApp of a federation; the app's folder has its config."""
    app, folder = ServerApp(), Path(app_file).resolve().parent

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedadc.sites.app import config_of_app
        from fedadc.sites.grid import GridTransport
        from fedadc.sites.serving import examined, serve

        log.addFilter(_one_sentence)
        given = context.run_config
        for name in given:
            if name not in RUN_CONFIG:
                raise unknown("--run-config: setting", name, RUN_CONFIG)
        out, data = Path(str(given.get("out") or "run")).expanduser(), str(given.get("server-data") or "")
        own, metrics = Path(data).expanduser() if data else None, str(given.get("metrics") or "")
        keys = Path(str(given["site-keys"])).expanduser() if given.get("site-keys") else None
        if report := str(given.get("examine") or ""):
            within = float(given.get("examine-within") or 60)
            examined(config_of_app(folder), GridTransport(grid), log.info, keys, within).write(Path(report))
            return
        serve(config_of_app(folder), GridTransport(grid), out, own, notes=log.info, metrics=metrics, site_keys=keys)

    return app
