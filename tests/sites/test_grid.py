"""Answers of sites as Flower stores them: in parts, of which equal ones are sent once."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedadc.sites.grid import MOST_FACTS, Answers, put_together
from fedadc.sites.packets import REFUSED, Packet
from fedadc.sites.records import to_record


def stored(content: RecordDict) -> tuple[Any, Any, dict[str, bytes]]:
    """An answer as the SuperLink has it: the message, the tree of its parts, and the parts."""
    metadata = Metadata(
        run_id=1, message_id="", src_node_id=7, dst_node_id=1, reply_to_message_id="question", group_id="",
        created_at=0.0, ttl=60.0, message_type="train",
    )  # fmt: skip
    message = make_message(metadata=metadata, content=content)
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    return message_to_proto(message), get_object_tree(message), parts


def received(content: RecordDict, most: int) -> Any:
    """What becomes of an answer that may have `most` bytes, and how many bytes were fetched."""
    message, tree, parts = stored(content)

    class Link:
        fetched = 0

        def PullMessages(self, request: Any) -> Any:
            return types.SimpleNamespace(messages_list=[message], message_object_trees=[tree])

        def PullObject(self, request: Any) -> Any:
            self.fetched += len(parts[request.object_id])
            return types.SimpleNamespace(
                object_found=True, object_available=True, object_content=parts[request.object_id]
            )

        def ConfirmMessageReceived(self, request: Any) -> None:
            return None

    link = Link()
    grid = types.SimpleNamespace(_runtime_client=link, node=Node(node_id=1), run=types.SimpleNamespace(run_id=1))
    answers = Answers(grid)
    answers.most["question"] = most + MOST_FACTS
    answers.seen({7: "now"})
    return answers.take(["question"])["question"], link.fetched


def with_body(body: bytes) -> RecordDict:
    arrays = ArrayRecord({"body": Array("uint8", (len(body),), "fedadc", body)})
    return RecordDict({"facts": ConfigRecord({}), "parts": arrays})


def test_an_answer_that_is_not_too_large_is_read() -> None:
    packet, _ = received(to_record(Packet({"a": 1}, b"head", b"body" * 5_000)), 20_004)
    assert packet == Packet({"a": 1}, b"head", b"body" * 5_000)


def test_equal_parts_are_counted_as_often_as_they_occur() -> None:
    """50 MB of zeros are a few parts of 5 MB on the way."""
    content = with_body(bytes(50_000_000))
    _, _, parts = stored(content)
    assert 50_000_000 <= put_together(parts) < 50_001_000  # with some bytes that name every part
    assert sum(map(len, parts.values())) < 12_000_000
    packet, fetched = received(content, 20_000_000)
    assert packet == Packet({REFUSED: "its answer has more than 20000000 bytes, which none can have"})
    assert fetched < 15_000_000


def test_a_site_cannot_pretend_that_its_answer_was_refused() -> None:
    packet, _ = received(to_record(Packet({REFUSED: "forged", "a": 1})), 1000)
    assert packet.facts == {"a": 1}
