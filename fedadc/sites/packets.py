"""What passes between the server and a site: a few facts, and the bytes of a message.

A message of training has two parts. Its head differs from client to client; its body, the vectors of the round, is the
same for all of them, so that a transport may store and send it once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Literal

from fedadc.errors import require
from fedadc.system.version import __version__

Fact = str | int | float | bool
Kind = Literal["hello", "refuse", "describe", "check", "agree", "train", "keep", "count", "finish"]
PROBLEM, NOT_JOINED, NEEDS_STATE = "problem", "not joined", "needs state"  # facts of an answer that is a refusal
REFUSED = "refused"  # fact that a transport puts in the place of an answer that cannot be accepted: the reason
MAX_ANSWER = 1 << 26  # bytes of an answer, unless its request says less
HAS = "has"  # fact of an answer to `keep`: the round whose state the site has now
# settings of a run, which Flower gives to both halves
RUN_CONFIG = {
    "out": "the run directory on the server's machine; a run that is there goes on",
    "server-data": "an .npz file with x_test and y_test for the server's own evaluation",
    "site-keys": "a folder with the public key of every site, NAME.pub; a node may only say the name of its own key",
    "metrics": "where Prometheus may ask for figures on the server's machine: a port, or host:port",
    "examine": "a file: the sites are only examined, and the file says what was found; nothing is trained",
    "examine-within": "seconds for which an examination waits for sites (default: 60)",
    "sites-data": "in Flower's simulation: a folder with one file per site",
}
HEADER_LENGTH = 8  # bytes at the beginning of a safetensors file, which have the length of its header


@dataclass(frozen=True)
class Lost:
    """No answer will come: the node is gone, or its process died."""

    reason: str


class NotSent(Exception):
    """A request could not be sent just now; it may be sent again."""


@dataclass(frozen=True)
class Packet:
    """A request or its answer."""

    facts: Mapping[str, Fact] = field(default_factory=dict)
    head: bytes = b""
    body: bytes = b""
    most: int = MAX_ANSWER  # bytes that the answer to this request may have

    @staticmethod
    def of(message: bytes, facts: Mapping[str, Fact]) -> Packet:
        """A message of `fedadc.training.wire`, which is a safetensors file, in two parts."""
        (length,) = struct.unpack("<Q", message[:HEADER_LENGTH])
        return Packet(facts, message[: HEADER_LENGTH + length], message[HEADER_LENGTH + length :])

    @property
    def size(self) -> int:
        """Bytes of its parts, without the facts."""
        return len(self.head) + len(self.body)

    @property
    def message(self) -> bytes:
        return self.head + self.body


def versions() -> dict[str, Fact]:
    """What a site tells of itself in every greeting; found without importing torch, which takes long."""
    return {"fedadc": __version__, "torch": version("torch")}


def require_same_versions(name: str, answer: Packet) -> None:
    """Refuse a site with another fedadc or torch: its numbers would differ."""
    for package, mine in versions().items():
        theirs = answer.facts.get(package, "of an unknown version")
        require(theirs == mine, f"site {name} has {package} {theirs}, but the server has {mine}; install the same.")


def too_large(most: int) -> str:
    """Why an answer is refused."""
    return f"its answer has more than {most} bytes, which none can have"
