"""Packets as the records of Flower's messages, and back."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedadc.errors import FedadcError
from fedadc.sites.packets import Fact, Kind, Packet

TYPES: dict[Kind, str] = {
    "hello": "query.hello",
    "refuse": "query.refuse",
    "describe": "query.describe",
    "check": "query.check",
    "agree": "query.agree",
    "train": "train",
    "keep": "query.keep",
    "count": "evaluate",
    "finish": "query.finish",
}
FACTS_RECORD, PARTS_RECORD = "facts", "parts"
SERIALIZATION = "fedadc"  # how the bytes of an array came about: they are the bytes of a message, as they are


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
