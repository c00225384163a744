"""Files as an accident or an attacker would leave them, made from one that is good."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable

from hypothesis import strategies as st

from fedadc.errors import FedadcError

EXTREMES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**63, 2**64 - 1]
WORDS = [b"(", b")", b"'", b"-1", b"9" * 30, b"\n", b"\0", b'"', b",", b"None", b"nan", b"1e400", b"{", b"\xff", b"O"]


@st.composite
def mutated(draw: st.DrawFn, good: bytes, most: int = 3) -> bytes:
    """Truncated, flipped, doubled, with bytes put in or numbers of a header made extreme; a few of these at once."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(content)) | st.integers(0, min(len(content), 64)))
        end = min(len(content), at + draw(st.integers(1, 40)))
        how = draw(st.sampled_from(["cut", "flip", "insert", "double", "delete", "extreme", "text"]))
        if how == "cut":
            del content[at:]
        elif how == "delete":
            del content[at:end]
        elif how == "flip":
            content[at:end] = bytes(b ^ draw(st.integers(1, 255)) for b in content[at:end][:4]) + content[at:end][4:]
        elif how == "insert":
            content[at:at] = draw(st.binary(min_size=1, max_size=40))
        elif how == "double":
            content[at:at] = content[at:] if draw(st.booleans()) else content[at:end]
        elif how == "extreme":
            number = struct.pack(draw(st.sampled_from("<>")) + "Q", draw(st.sampled_from(EXTREMES)))
            width = draw(st.sampled_from([1, 2, 4, 8]))
            content[at : at + width] = number[-width:] if draw(st.booleans()) else number[:width]
        else:
            content[at:end] = draw(st.sampled_from(WORDS))
    return bytes(content)


def read_or_refused(read: Callable[[], object]) -> str | None:
    """None where a file was read, else the one line that says why not; any other exception goes on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would stand on the user's screen
        try:
            read()
        except FedadcError as error:
            message = str(error)
            assert message.strip() and message.isprintable() and len(message) < 2100, message
            return message
    return None
