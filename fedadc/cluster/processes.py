"""Processes on the nodes of a cluster, whose messages come here through a pipe like those of a local process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedadc.cluster.connection import Node, import_ray, on_node
from fedadc.system.processes import context, manner_of_death
from fedadc.system.signals import KILL

LISTEN = 1.0  # seconds that a node waits for messages before it answers without any


class ProcessActor:
    """Starts a process on its node, and hands on its messages. The process ends with the actor."""

    def start(self, target: Callable[[Connection, Any], None], argument: Any, folder: str) -> None:
        with suppress(OSError):  # this node may not have the current folder of the process that wants the messages
            os.chdir(folder)
        self._pipe, theirs = context().Pipe()
        self._process = context().Process(target=target, args=(theirs, argument))  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()

    def listen(self) -> tuple[list[Any], bool, int | None]:
        """The messages of the next moment, whether the process has ended, and its exit code."""
        messages: list[Any] = []
        try:
            if self._pipe.poll(LISTEN):
                messages.append(self._pipe.recv())
            while self._pipe.poll():
                messages.append(self._pipe.recv())
        except (EOFError, OSError):
            self._process.join(LISTEN)
            return messages, True, self._process.exitcode
        return messages, False, None

    def signal(self, number: int) -> None:
        with suppress(OSError, AttributeError):  # it has ended, or was never started
            os.kill(self._process.pid or 0, number)


class NodeProcess:
    """A process on a node, as the process that wants its messages sees it."""

    def __init__(
        self, node: Node, cpus: float, gpus: float, patience: float, target: Callable[..., None], argument: Any
    ) -> None:
        ray = import_ray()
        self.node, self._patience = node, patience
        self.exitcode: int | None = None
        self.lost = ""  # how, if the node or the actor is gone
        self._actor = ray.remote(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0, max_concurrency=2,
            scheduling_strategy=on_node(node.id),
        )(ProcessActor).remote()  # fmt: skip
        started = self._actor.start.remote(target, argument, str(Path.cwd()))
        self.pipe, theirs = context().Pipe(duplex=False)
        self._relay = threading.Thread(target=self._hand_on, args=(theirs, started), daemon=True)
        self._relay.start()

    def _hand_on(self, pipe: Connection, started: Any) -> None:
        """Send all messages on, until the process has ended or is lost."""
        ray = import_ray()
        try:
            ray.get(started, timeout=self._patience)
            ended = False
            while not ended:
                messages, ended, self.exitcode = ray.get(self._actor.listen.remote(), timeout=self._patience)
                for message in messages:
                    pipe.send(message)
        except OSError:  # nobody listens any more
            pass
        except Exception as error:
            self.lost = f"was lost on node {self.node} ({type(error).__name__})"
        finally:
            with suppress(Exception):
                ray.kill(self._actor)
            pipe.close()

    @property
    def manner_of_death(self) -> str:
        return self.lost or manner_of_death(self.exitcode)

    def signal(self, number: int) -> None:
        with suppress(Exception):
            if number == KILL:  # the process ends with its actor, also one that waits for a place
                import_ray().kill(self._actor)
            else:
                self._actor.signal.remote(number)

    def join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._relay.is_alive() and time.monotonic() < until:
            self._relay.join(0.1)
