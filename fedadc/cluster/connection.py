"""The connection to a Ray cluster: one that is running, or one on this machine that is started and stopped here."""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedadc.cluster.settings import NO_CLIENTS, RayCluster
from fedadc.errors import FedadcError, WorkersLost, one_line, require
from fedadc.system.determinism import MAX_WORKERS
from fedadc.system.processes import KEEP_MEMORY, cores, environment_set
from fedadc.system.signals import SIGNALS

log = logging.getLogger("fedadc")
Result = TypeVar("Result")
PREFIX = "fedadc-ray-"  # of the temporary folder of a local cluster; sockets need a short path
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
OPTIONS: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
# On this machine, workers are as important as this process (Ray would give them a low priority), and what they return
# comes with the answer: the object store would cost a job three milliseconds.
LOCAL = {"RAY_worker_niceness": "0", "RAY_max_direct_call_object_size": str(8 * 2**20)}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ANSWER = 15.0  # seconds for the process at an address to say that it is the head of a Ray cluster
HTTP2_SETTINGS = 4  # the type of a frame
CONNECT = 5.0  # seconds to reach the head of a cluster
SHUTDOWN = 10.0  # seconds to leave a cluster whose head is lost
HEAD_SILENCE = 15.0  # seconds without the head, after which it is lost; Ray would abort this process after 60


@dataclass(frozen=True)
class Node:
    """A node of the cluster, as Ray describes it."""

    id: str
    address: str
    cpus: float
    gpus: float
    memory: int  # bytes of the object store
    free_cpus: float = math.inf  # what other jobs have left
    free_gpus: float = math.inf

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:6]})"  # there may be several at one address

    @staticmethod
    def of(found: dict[str, Any], free: dict[str, float]) -> Node:
        offers = found["Resources"]
        return Node(
            found["NodeID"], found["NodeManagerAddress"], offers.get("CPU", 0.0), offers.get("GPU", 0.0),
            int(offers.get("object_store_memory", 0)), free.get("CPU", 0.0), free.get("GPU", 0.0),
        )  # fmt: skip

    def room(self, settings: RayCluster) -> int:
        """How many workers fit on it."""
        return _fitting(self.cpus, self.gpus, settings)

    def free_room(self, settings: RayCluster, ours: int) -> int:
        """How many more fit on it now, beside so many of ours and what other programs have there."""
        return min(self.room(settings) - ours, _fitting(self.free_cpus, self.free_gpus, settings))


def _fitting(cpus: float, gpus: float, settings: RayCluster) -> int:
    room = cpus / settings.cpus_per_worker
    room = min(room, gpus / settings.gpus_per_worker) if settings.gpus_per_worker else room
    return int(min(room + 1e-9, MAX_WORKERS))


def import_ray() -> Any:
    if ray := sys.modules.get("ray"):
        return ray
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own future
            import ray
    except ImportError as error:
        raise FedadcError(
            f"engine ray needs Ray, which is not installed ({one_line(error)}): pip install 'fedadc[ray]'."
        ) from error
    return ray


def _private(name: str) -> Any:
    """A function of Ray that has no public name, which another version of Ray may lack."""
    ray = import_ray()
    try:
        return functools.reduce(getattr, name.split("."), ray)
    except AttributeError:
        raise FedadcError(
            f"fedadc does not work with Ray {ray.__version__}, which lacks {name}; 2.55.1 to 2.60.0 were tried."
        ) from None


def on_node(id: str) -> Any:
    """Where Ray is to start a worker or a task: on this node and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(id, soft=False)


def task_on(node: Node, function: Callable[..., Any], **options: Any) -> Any:
    """A function as Ray calls it on this node: at once, whatever is busy there, and once only."""
    on = on_node(node.id)
    return import_ray().remote(num_cpus=0, max_retries=0, scheduling_strategy=on, **options)(function)


class Session:
    """The one connection to Ray that a process can have, which several federations may share."""

    current: Session | None = None

    def __init__(self, settings: RayCluster) -> None:
        self.address, self.users, self.is_ours = settings.address, 0, True
        self.head_lost = False  # calls to Ray would wait for it
        self._local: _LocalCluster | None = None
        ray = import_ray()
        if ray.is_initialized():  # by the user, who ends it too
            self.is_ours, self.address = False, ray.get_runtime_context().gcs_address
            return
        with kept_signal_handlers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._start(ray, settings) if settings.address is None else self._connect(ray, settings.address)
        self._undo = _silenced(ray)

    def _start(self, ray: Any, settings: RayCluster) -> None:
        cpus = cores() if settings.workers == "auto" else settings.most_workers * settings.cpus_per_worker
        self._local = _LocalCluster(settings.logs)
        try:
            with environment_set({**KEEP_MEMORY, **ONE_THREAD, **LOCAL}):
                ray.init("local", num_cpus=math.ceil(cpus), _temp_dir=str(self._local.folder), **OPTIONS)
        except BaseException as error:
            ray.shutdown()
            self._local.end()
            if not isinstance(error, Exception):
                raise
            raise WorkersLost(f"a Ray cluster cannot be started on this machine ({one_line(error):.300}).") from error

    def _connect(self, ray: Any, address: str) -> None:
        reachable = _running_cluster() if address == "auto" else _reachable(address)
        _require_ray_at(reachable)
        try:
            ray.init(address=reachable, runtime_env={"env_vars": self._environment()}, **OPTIONS)
        except Exception as error:
            raise WorkersLost(
                f"no Ray cluster was found at the address {address} ({one_line(error):.300}); start one with "
                "`ray start --head`, or leave out the address."
            ) from error
        log.info("connected to the Ray cluster at %s", reachable)

    @staticmethod
    def _environment() -> dict[str, str]:
        """What the processes on other nodes must have as here."""
        here = {"MKL_CBWR": os.environ["MKL_CBWR"]} if "MKL_CBWR" in os.environ else {}
        return {**KEEP_MEMORY, **ONE_THREAD, **here}

    def end(self) -> None:
        if not self.is_ours:
            return
        self._undo()
        ray = import_ray()
        with kept_signal_handlers():
            within(SHUTDOWN, ray.shutdown) if self.head_lost else ray.shutdown()
        if self._local is not None:
            self._local.end()


class Connection:
    """A federation's part in the session of this process: made when it is first needed, left by `close`."""

    def __init__(self, settings: RayCluster) -> None:
        self.settings = settings
        self.session: Session | None = None

    @property
    def head_lost(self) -> bool:
        return self.session is not None and self.session.head_lost

    def open(self) -> None:
        if self.session is not None:
            return
        session = Session.current or Session(self.settings)
        wanted, known = self.settings.address, f"the Ray cluster {session.address or 'on this machine'}"
        if session.is_ours:
            fits, remedy = wanted == session.address, "close() the federations that use it before you use another one"
        else:
            fits = wanted in (None, "auto") or _is_same(wanted, session.address)
            remedy = "call ray.shutdown() before you use another one"
        require(fits, f"this process is connected to {known}; {remedy}.")
        session.users += 1
        self.session = Session.current = session

    def close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.users -= 1
            if not session.users:
                Session.current = None
                session.end()

    def nodes(self) -> list[Node]:
        """The nodes that are alive, in a fixed order; an error if the head of the cluster is lost."""
        assert self.session is not None
        ray = import_ray()
        address, until = ray.get_runtime_context().gcs_address, time.monotonic() + HEAD_SILENCE
        while not is_reachable(address, CONNECT) and time.monotonic() < until:
            time.sleep(0.5)
        free_resources = _private("_private.state.available_resources_per_node")
        found = within(until - time.monotonic(), lambda: (ray.nodes(), free_resources()))
        self.session.head_lost = found is None
        if found is None:
            raise WorkersLost(f"the head of the Ray cluster at {address} is lost.")
        nodes, free = found
        alive = (Node.of(node, free.get(node["NodeID"], {})) for node in nodes if node["Alive"])
        return sorted(alive, key=lambda node: (node.address, node.id))


class _LocalCluster:
    """The folder of a cluster on this machine, and a process that cleans up if this one is killed."""

    def __init__(self, logs: Path | None) -> None:
        self.folder, self._logs = Path(tempfile.mkdtemp(prefix=PREFIX)), logs
        script = Path(__file__).with_name("reaper.py")
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(script), str(self.folder), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def end(self) -> None:
        session = self.folder / "session_latest"
        if self._logs is not None and self._logs.parent.is_dir() and session.is_dir():
            with suppress(OSError, shutil.Error):
                shutil.copytree(session / "logs", self._logs / session.resolve().name, dirs_exist_ok=True)
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()  # it ends what is left, and deletes the folder
        with suppress(subprocess.TimeoutExpired):
            self._reaper.wait(10)


def within(seconds: float, call: Callable[[], Result]) -> Result | None:
    """The result of a call, or None if it does not return in time: without its head, Ray may wait without end."""
    results: queue.Queue[Result | Exception] = queue.Queue()

    def answer() -> None:
        try:
            results.put(call())
        except Exception as error:
            results.put(error)

    threading.Thread(target=answer, daemon=True).start()
    try:
        result = results.get(timeout=max(0.1, seconds))
    except queue.Empty:
        return None
    if isinstance(result, Exception):
        raise result
    return result


def is_reachable(address: str, seconds: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except (OSError, OverflowError, ValueError):
        return False
    return True


def _is_same(first: str, second: str | None) -> bool:
    """Whether two addresses are one; the host may be a name or a number."""
    try:
        one, other = ((socket.gethostbyname(a.rpartition(":")[0]), a.rpartition(":")[2]) for a in (first, str(second)))
    except OSError:
        return False
    return one == other


def _reachable(address: str) -> str:
    """The address, if a process answers there: Ray itself would try for a long time."""
    require(is_reachable(address, CONNECT), f"no Ray cluster answers at the address {address}.", WorkersLost)
    return address


def _speaks_grpc(address: str) -> bool:
    """Whether a server begins as gRPC does, with the settings of HTTP/2. About others, Ray would print lines."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0]))
            first = connection.recv(9, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(first) == 9 and first[3] == HTTP2_SETTINGS


def _require_ray_at(address: str) -> None:
    """Ask the process at an address who it is: if it is not Ray, Ray would ask it without end."""
    require(_speaks_grpc(address), f"what answers at the address {address} is no Ray cluster.", WorkersLost)
    client = _private("_raylet.GcsClient")
    try:
        answer = within(ANSWER, lambda: client(address=address).cluster_id)
    except Exception as error:
        raise WorkersLost(f"no Ray cluster answers at the address {address} ({one_line(error):.200}).") from error
    require(answer is not None, f"what answers at the address {address} is no Ray cluster.", WorkersLost)


def _running_cluster() -> str:
    """The address of the cluster to which this machine belongs. Ray would also try one that has died, without end."""
    remembered, find = _private("_private.utils.read_ray_address"), _private("_private.services.find_gcs_addresses")
    given = os.environ.get("RAY_ADDRESS", "")
    require(not given.startswith("ray://"), f"RAY_ADDRESS is {given:.60}: {NO_CLIENTS}")
    found = [given] if given else [remembered(), *find()]
    for address in filter(None, found):
        if is_reachable(address, CONNECT):
            return str(address)
    raise WorkersLost("no running Ray cluster was found on this machine; start one with `ray start --head`.")


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM; ours saves the run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silenced(ray: Any) -> Callable[[], None]:
    """Keep Ray from printing pages about a dead node; returns how to undo it. Events name what was lost."""
    worker: Any = ray._private.worker
    original = getattr(worker, "print_to_stdstream", None)
    if original is None:  # another version of Ray
        return lambda: None
    worker.print_to_stdstream = lambda data, *_, **__: log.debug("Ray: %s", data.get("lines"))
    return lambda: setattr(worker, "print_to_stdstream", original)
