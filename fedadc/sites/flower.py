"""The two halves of a federation on Flower, which carries their packets. No other module imports Flower."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedadc.errors import FedadcError, one_line, require, unknown
from fedadc.sites.node import NodeSettings
from fedadc.sites.packets import PROBLEM, RUN_CONFIG, Fact, Kind, Lost, NotSent, Packet
from fedadc.sites.resident import ask_resident
from fedadc.system.version import __version__

log = logging.getLogger("flwr")  # what Flower shows

TYPES: dict[Kind, str] = {
    "hello": "query.hello",
    "refuse": "query.refuse",
    "describe": "query.describe",
    "agree": "query.agree",
    "train": "train",
    "keep": "query.keep",
    "count": "evaluate",
    "finish": "query.finish",
}
Value = TypeVar("Value")
FACTS_RECORD, PARTS_RECORD = "facts", "parts"
SERIALIZATION = "fedadc"  # how the bytes of an array came about: they are the bytes of a message, as they are
PAUSES = (1.0, 3.0, 9.0)  # seconds before the SuperLink is asked again
# errors of Flower that mean: the app does not work there; after all others, the site may answer again
APP_FAILED = (1, 2, 7)  # it cannot be loaded, it raised an exception, its bundle is not valid


def to_record(packet: Packet) -> RecordDict:
    parts = {name: content for name, content in (("head", packet.head), ("body", packet.body)) if content}
    arrays = {name: Array("uint8", (len(content),), SERIALIZATION, content) for name, content in parts.items()}
    return RecordDict({FACTS_RECORD: ConfigRecord(dict(packet.facts)), PARTS_RECORD: ArrayRecord(arrays)})


def to_packet(record: RecordDict) -> Packet:
    try:
        facts: dict[str, Fact] = {k: v for k, v in record.config_records[FACTS_RECORD].items() if isinstance(v, Fact)}
        parts = {name: array.data for name, array in record.array_records[PARTS_RECORD].items()}
    except KeyError as error:
        raise FedadcError(f"the message is not one of fedadc: it lacks {error}.") from None
    return Packet(facts, parts.get("head", b""), parts.get("body", b""))


class GridTransport:
    """Packets over Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> Collection[int]:
        return _tried(lambda: list(self.grid.get_node_ids()))

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        try:
            numbers = list(self.grid.push_messages([Message(to_record(packet), node, TYPES[kind])]))
        except Exception as error:  # a SuperLink with much to do; Flower has many kinds of errors
            time.sleep(PAUSES[0])
            raise NotSent(f"{type(error).__name__}: {one_line(error):.120}") from error
        require(bool(numbers) and numbers[0] is not None, f"the SuperLink does not take the {kind} message.")
        return str(numbers[0])

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        found: dict[str, Packet | Lost] = {}
        for message in _tried(lambda: list(self.grid.pull_messages(list(numbers)))):
            found[message.metadata.reply_to_message_id] = self._read(message)
        return found

    @staticmethod
    def _read(message: Message) -> Packet | Lost:
        if not message.has_error():
            return to_packet(message.content)
        reason = f"Flower's error {message.error.code}: {message.error.reason or 'no reason given'}"
        return Packet({PROBLEM: reason}) if message.error.code in APP_FAILED else Lost(reason)


def _tried(call: Callable[[], list[Value]]) -> list[Value]:
    """What the SuperLink answers; one with much to do is asked again."""
    for pause in PAUSES:
        try:
            return call()
        except Exception as error:  # Flower has many kinds of errors
            log.warning("the SuperLink does not answer (%s: %s)", type(error).__name__, one_line(error))
            time.sleep(pause)
    return call()


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
        return Packet({"client": settings.client, "fedadc": __version__})
    if kind == "refuse":
        raise FedadcError(f"the server refuses site {settings.client}: {request.facts.get('reason')}")
    if (answer := ask_resident(kind, request, folder, settings)) is not None:
        return answer
    from fedadc.sites.app import config_of_app  # these import torch, which takes most of the start
    from fedadc.sites.replies import reply
    from fedadc.sites.site import Site

    return reply(Site(settings, config_of_app(folder)), kind, request)


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
        from fedadc.sites.serving import serve

        log.addFilter(_one_sentence)
        given = context.run_config
        for name in given:
            if name not in RUN_CONFIG:
                raise unknown("--run-config: setting", name, RUN_CONFIG)
        out, data = Path(str(given.get("out") or "run")).expanduser(), str(given.get("server-data") or "")
        own, metrics = Path(data).expanduser() if data else None, str(given.get("metrics") or "")
        serve(config_of_app(folder), GridTransport(grid), out, own, notes=log.info, metrics=metrics)

    return app
