"""How vectors travel between the server and its clients: downlinks, uplinks, bytes and virtual time."""

from fedadc.communication.clock import Between, Clock, Fixed, LogNormal
from fedadc.communication.downlinks import Broadcast, Downlink, Overlap, Pull
from fedadc.communication.network import Communication
from fedadc.communication.uplinks import EightBit, Full, TopK, Uplink

__all__ = [
    "Between", "Broadcast", "Clock", "Communication", "Downlink", "EightBit", "Fixed", "Full", "LogNormal", "Overlap",
    "Pull", "TopK", "Uplink",
]  # fmt: skip
