"""What the server sends to which site so that it has theta and the server's vectors: the downlinks, for real.

With `pull`, a task has all of it. With `broadcast` and `overlap`, sites keep a state and repeat the server's update
(`fedadc.training.tracking`). The server notes which state every site has, and sends what it lacks: the updates since,
or the whole state if that is smaller. A site that has lost its state says so, and is sent the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from fedadc.communication.downlinks import Broadcast, Downlink, Overlap
from fedadc.data.dataset import Array
from fedadc.models.vectors import State
from fedadc.sites.packets import HAS, Fact, Lost, Packet
from fedadc.training.agreement import Agreement
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.tracking import TrackingWire, bundle
from fedadc.views.round_info import RoundInfo

Post = Callable[[int, Packet, Callable[[Packet | Lost], None]], None]  # client, packet, what to do with the answer


def payload(message: bytes) -> int:
    """The bytes of the vectors of a message."""
    return len(Packet.of(message, {}).body)


class Deliveries:
    """Knows which state each client has, as the round at whose start it was the current one."""

    def __init__(
        self,
        agreement: Agreement,
        downlink: Downlink,
        select: Callable[[int], Array],
        post: Post,
        has_post: Callable[[int], bool],  # whether a client has not answered what was posted to it
    ) -> None:
        self.downlink, self.select, self.post, self.has_post = downlink, select, post, has_post
        self._wire = TrackingWire(agreement)
        self._has: dict[int, int] = {}
        self._updates: dict[int, bytes] = {}  # by the round that they end
        self._broadcast: ServerBroadcast | None = None
        self._dropped: set[int] = set()  # in the last round
        self._full = 0  # bytes of a whole state
        if downlink.tracks:
            self._full = payload(self._wire.write_state(2, agreement.start, agreement.server.start(agreement.start)))

    def write(self, broadcast: ServerBroadcast, task: ClientTask) -> bytes:
        """The message of a task."""
        return (
            self._wire.write_call(broadcast, task) if self.downlink.tracks else self._wire.write_task(broadcast, task)
        )

    def packets(
        self, broadcast: ServerBroadcast, messages: Iterable[tuple[int, bytes]], facts: Mapping[str, Fact]
    ) -> list[tuple[int, Packet]]:
        """The tasks of a round, each with what its client lacks."""
        self._broadcast = broadcast
        if not self.downlink.tracks:
            return [(client, Packet.of(message, facts)) for client, message in messages]
        return [(client, Packet(facts, message, self._lacking(client, broadcast))) for client, message in messages]

    def whole(self, packet: Packet) -> Packet:
        """The same task for a client that turned out to have less than was assumed."""
        assert self._broadcast is not None
        return replace(packet, body=bundle([self._state(self._broadcast)]))

    def send_ahead(
        self, broadcast: ServerBroadcast, cohort: Sequence[int], everyone: int, facts: Mapping[str, Fact]
    ) -> None:
        """While a cohort computes: the next one receives the state (overlap), or everybody the first (broadcast)."""
        others: Collection[int] = ()
        if isinstance(self.downlink, Overlap):
            others = [k for k in self.select(broadcast.round + 1).tolist() if k not in cohort]
        elif isinstance(self.downlink, Broadcast) and broadcast.round == 1:
            others = [k for k in range(everyone) if k not in cohort]
        for client in [k for k in others if not self.has_post(k)]:
            self._post(client, broadcast.round, bundle([self._state(broadcast)]), facts)

    def trained(self, round: int, dropped: Collection[int], cohort: Collection[int]) -> None:
        """The clients of a cohort have the state of their round. Of those that were dropped, it is not certain."""
        self._dropped = set(dropped)
        for client in cohort:
            forgotten = client in self._dropped and isinstance(self.downlink, Overlap)
            self._has[client] = 0 if forgotten else round

    def ended(self, info: RoundInfo, mean: State | None, everyone: int, facts: Mapping[str, Fact]) -> None:
        """A round has ended with this mean: with broadcast, everybody receives it who was not dropped."""
        self._updates[info.round] = self._wire.write_update(info, mean)
        if isinstance(self.downlink, Broadcast):
            for client in [k for k in range(everyone) if k not in self._dropped and not self.has_post(k)]:
                missed = self._missed(client, info.round + 1)
                if missed is not None:  # else it receives the whole state when it is selected
                    self._post(client, info.round + 1, bundle(missed), facts)
        self._forget_old_updates()

    def _forget_old_updates(self) -> None:
        """Keep the last updates, as long as they are together not larger than a whole state."""
        room, kept = self._full if isinstance(self.downlink, Broadcast) else 0, dict[int, bytes]()
        for round in sorted(self._updates, reverse=True):
            room -= payload(self._updates[round])
            if room < 0 and kept:
                break
            kept[round] = self._updates[round]
        self._updates = kept

    def _post(self, client: int, round: int, content: bytes, facts: Mapping[str, Fact]) -> None:
        self._has[client] = round

        def answered(answer: Packet | Lost) -> None:
            if isinstance(answer, Lost) or answer.facts.get(HAS) != round:
                self._has[client] = 0

        self.post(client, Packet(facts, b"", content), answered)

    def _lacking(self, client: int, broadcast: ServerBroadcast) -> bytes:
        """What brings a client to the state of a round: the updates that it missed, or the state if that is less."""
        if self._has.get(client) == broadcast.round:
            return b""
        missed, state = self._missed(client, broadcast.round), self._state(broadcast)
        if missed is None or sum(map(payload, missed)) > payload(state):
            return bundle([state])
        return bundle(missed)

    def _missed(self, client: int, round: int) -> list[bytes] | None:
        """The updates since the state that a client has; None: it has none, or they are no longer known."""
        has = self._has.get(client, 0)
        rounds = range(has, round) if has else ()
        return [self._updates[t] for t in rounds] if has and all(t in self._updates for t in rounds) else None

    def _state(self, broadcast: ServerBroadcast) -> bytes:
        return self._wire.write_state(broadcast.round, broadcast.theta, broadcast.server)
