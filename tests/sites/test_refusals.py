"""What a federation refuses, each tried by a real client that does it: nothing of it changes what is trained."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from family import eventually, linux
from fedadc.config.settings import Config
from fedadc.runs.record import load_config, read_run
from fedadc.runs.runner import run
from fedadc.sites import certificates
from fedadc.sites.certificates import Certificates
from fedadc.sites.journal import audit_file, changed_line
from fedadc.sites.local import LOGS, free_port
from federations import Parts, parts_of

pytestmark = [linux, pytest.mark.federation, pytest.mark.usefixtures("nothing_is_left")]
HOSTILE = Path(__file__).parents[1] / "hostile"
NAMES = ("anna", "bert", "mallory")
LARGE = 80_000_000  # bytes of an upload that should have 2,000
# what mallory does, round by round -> what the record of the round says of it
ATTACKS = {
    "honest": "",
    "another run": "of another run",
    "past round": "the result is of round 1, client 2, but round 3, client 2 was asked for",
    "another client": "client 0, but round 4, client 2 was asked for",
    "names": "lacks or should not have delta, gamma",
    "shape": "has delta as [1, ",
    "dtype": "torch.int32, but it must be",
    "nan": "its update is not finite",
    "infinity": "its update is not finite",
    "truncated": "the message is damaged",
    "garbage": "the message is damaged, or not one of fedadc",
    "pickle": "the message is damaged, or not one of fedadc",
    "long header": "the message is damaged, or not one of fedadc",
    "deep header": "the message is damaged, or not one of fedadc",
    "no records": "the message is not one of fedadc: it lacks",
    "a long problem": "lies lies",
    "repeated": "bytes, which none can have",
    "huge": "bytes, which none can have",
}


def data_of(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    path, client = folder / "all.npz", np.array(NAMES)[np.arange(90) % 3]
    np.savez(path, x=rng.normal(size=(90, 6)), y=rng.choice(3, 90), client=client)
    return path


def config_of(folder: Path, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "rounds": 2, "seed": 2, "data": {"name": "npz", "path": str(data_of(folder))},
        "model": {"name": "mlp", "hidden": [16], "projection": 6}, "method": "scaffold", "checkpoint": {"every": 1},
        "local": {"epochs": 1, "batch_size": 8, "lr": 0.1}, "federation": {"quorum": 0.5, "deadline": 120},
    }  # fmt: skip
    return load_config({**tree, **changes})


def peak_memory(pid: int) -> int:
    """The most bytes that a process has used."""
    (line,) = [own for own in Path(f"/proc/{pid}/status").read_text().splitlines() if own.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def test_uploads_that_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, rounds=len(ATTACKS) + 1)
    hostile = {"PYTHONPATH": str(HOSTILE), "HOSTILE": ",".join([*ATTACKS, "honest", "counts"])}
    hostile |= {"HOSTILE_FOLDER": str(tmp_path), "HOSTILE_BYTES": str(LARGE)}
    with parts_of(config, tmp_path / "there", {"mallory": hostile}) as parts:
        parts.after_round(len(ATTACKS) - 2, 400)
        server = max(parts.processes("flwr-serverapp"))
        before = peak_memory(server)
        parts.after_round(len(ATTACKS), 300)
        grown = peak_memory(server) - before
        parts.finished()
    out = parts.federation.run
    records = read_run(out).records
    for number, (attack, said) in enumerate(ATTACKS.items(), start=1):
        events = "\n".join(event for event in records[number - 1].get("events", ()) if "upload" in event)
        left_out = records[number - 1].get("dropped", []) + records[number - 1].get("skipped", [])
        assert left_out == ([] if attack == "honest" else [2]), attack
        assert (said in events and f"round {number}, site mallory: " in events) or attack == "honest", (attack, events)
        assert len(events) < 1000 and events.isprintable() == ("\n" not in events), attack
    assert not (tmp_path / "executed").exists()
    assert "evaluation without mallory" in "\n".join(records[0]["events"])
    assert grown < LARGE / 2, grown
    audit = [json.loads(line) for line in audit_file(out).read_text().splitlines()]
    refused = [line["round"] for line in audit if line["event"] in ("refused", "problem") and "upload" in line["text"]]
    assert sorted(refused) == list(range(2, len(ATTACKS) + 1)) and changed_line(audit_file(out)) is None
    assert all(line["site"] == "mallory" for line in audit if line["event"] in ("refused", "problem"))
    require_repeated(config, out, tmp_path / "repeated")


def require_repeated(config: Config, out: Path, folder: Path) -> None:
    """A simulation with the trace of the run has its model."""
    tree = {**config.tree(), "faults": {"trace": str(out / "trace.jsonl")}, "federation": None}
    run(load_config({**tree, "data": {**tree["data"], "test": 0.2}}), out=folder)
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def expired(found: Certificates) -> None:
    """Let the server's certificate be one that has expired four days ago."""
    real = certificates.datetime

    class Earlier:
        @staticmethod
        def now(zone: object) -> object:
            return real.now(certificates.UTC) - timedelta(days=5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "SKEW", timedelta(days=10))
        patch.setattr(certificates, "datetime", Earlier)
        found.renew(found.hosts(), days=1)


class Attempts:
    """SuperNodes that try to take part in a federation with TLS, and what becomes of them."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self.parts, self.federation, self.folder = parts, parts.federation, folder
        found = self.federation.certificates
        assert found is not None
        self.tls = found
        self.seen: set[str] = set()
        self.other = Certificates(folder / "other")
        self.other.create(["127.0.0.1"], ["eve"])

    def refused(self, name: str, options: Sequence[str], address: str = "") -> str:
        """The log of a SuperNode with these options, which must end by itself."""
        words = ["--superlink", address or self.parts.address, "--max-retries", "0", "--port", str(free_port())]
        words += [*options, "--node-config", f'client="anna" data-path="{self.folder}"']
        node = self.federation.start_program(name, "flower-supernode", words)
        assert node.wait(timeout=60) != 0, name
        return (self.federation.folder / LOGS / f"{name}.log").read_text()

    def flwr(self, *words: str) -> str:
        """What a command of Flower says."""
        log = self.federation.folder / LOGS / "flwr.log"
        log.unlink(missing_ok=True)
        self.federation.write_connection(self.parts.address)
        self.federation.start_program("flwr", "flwr", [*words, "local"]).wait(timeout=60)
        return log.read_text()

    def node_of(self, name: str) -> int:
        """The number of the node that the audit file has for a site."""
        lines = [json.loads(line) for line in audit_file(self.federation.run).read_text().splitlines()]
        nodes = [line["node"] for line in lines if line.get("site") == name and "node" in line]
        return int(nodes[-1])

    def message_to(self, node: int) -> tuple[int, str]:
        """The run and the number of the next message to a node."""
        found: list[tuple[int, str]] = []

        def is_asked() -> bool:
            with sqlite3.connect(self.federation.folder / "state.db") as database:
                wanted = "select run_id, message_id from message_ins where dst_node_id = ? order by created_at desc"
                found.extend(row for row in database.execute(wanted, (signed(node),)) if row[1] not in self.seen)
            return bool(found)

        eventually(is_asked, 60)
        run, number = found[0]
        self.seen.add(number)
        return run % 2**64, number


def push(attempts: Attempts, key: Path, message: Any, node: int) -> Any:
    """Send a reply as Flower's own client does, signed with a site's key."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.common.serde import message_to_proto
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private: Any = load_ssh_private_key(key.read_bytes(), None)
    authentication = NodeAuthHttpInterceptor(private, private.public_key())
    named = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    root = str(attempts.tls.authority)
    with FleetHttpClient.from_server_address(attempts.parts.address, False, root, [named, authentication]) as client:
        request = PushMessagesRequest(
            node=Node(node_id=node), messages_list=[message_to_proto(message)],
            message_object_trees=[get_object_tree(message)], clientapp_runtime_list=[0.1],
        )  # fmt: skip
        return client.PushMessages(request)


def reply_to(number: str, run: int, node: int) -> Any:
    """A reply to a message of which a node knows only the number."""
    from flwr.app import Metadata, RecordDict
    from flwr.app.message import make_message
    from flwr.supercore.date import now

    facts = {
        "run_id": run, "message_id": "", "src_node_id": node, "dst_node_id": 1, "reply_to_message_id": number,
        "group_id": "", "created_at": now().timestamp(), "ttl": 60.0, "message_type": "train",
    }  # fmt: skip
    message = make_message(metadata=Metadata(**facts), content=RecordDict())
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


def test_strangers_and_revoked_sites_are_refused(tmp_path: Path) -> None:
    """Behind TLS with keys of sites: strangers do not take part, and a new key takes the place of a revoked one."""
    config = config_of(tmp_path, rounds=12, federation={"quorum": 0.5, "deadline": 30, "patience": 120})
    with parts_of(config, tmp_path / "there", tls=True) as parts:
        attempts = Attempts(parts, tmp_path)
        tls, other, federation = attempts.tls, attempts.other, parts.federation
        trusted, mine = ["--root-certificates", str(tls.authority)], "--auth-supernode-private-key"
        parts.after_round(1)
        anna, mallory = attempts.node_of("anna"), attempts.node_of("mallory")
        plain = attempts.refused("plain", ["--insecure"])
        assert "disconnected without sending a response" in plain or "Connection reset by peer" in plain
        wrong = ["--root-certificates", str(other.authority), mine, str(tls.site_key("anna"))]
        assert "CERTIFICATE_VERIFY_FAILED" in attempts.refused("wrong-ca", wrong)
        unknown = attempts.refused("unknown-key", [*trusted, mine, str(other.site_key("eve"))])
        assert "Failed to activate SuperNode" in unknown
        assert "authentication is enabled" in attempts.refused("no-key", trusted)
        old = Certificates(tmp_path / "old")
        shutil.copytree(tls.folder, old.folder)
        expired(old)
        second = f"127.0.0.1:{free_port()}"
        federation.start_program(
            "expired-link", "flower-superlink", [*old.link_options, "--host", "127.0.0.1", "--port", second[10:]]
        )
        eventually(lambda: "Uvicorn running" in (federation.folder / LOGS / "expired-link.log").read_text(), 60)
        late = attempts.refused("expired", [*trusted, mine, str(tls.site_key("anna"))], second)
        assert "certificate has expired" in late
        run, number = attempts.message_to(anna)
        push(attempts, tls.site_key("mallory"), reply_to("0" * 64, run, mallory), mallory)
        push(attempts, tls.site_key("mallory"), reply_to(number, run, mallory), mallory)
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            push(attempts, tls.site_key("mallory"), reply_to(number, run, anna), anna)
        reply_twice(attempts, mallory)
        link_log = (federation.folder / LOGS / "superlink.log").read_text()
        assert f"message_id {'0' * 64} does not exist" in " ".join(link_log.split())
        options = ["--superlink", parts.address, *trusted, mine, str(registered(attempts, tmp_path))]
        options += ["--port", str(free_port()), "--node-config", f'client="anna" data-path="{tmp_path}"']
        stranger = federation.start_program("impostor", "flower-supernode", options)
        audit = audit_file(federation.run)
        refusal = "its key is not that of site anna (site-keys)"
        # newcomers are asked after the round, which waits for mallory
        eventually(lambda: refusal in audit.read_text(), 150)
        stranger.terminate()
        assert "unregistered successfully" in attempts.flwr("supernode", "unregister", str(mallory))
        assert parts.sites["mallory"].wait(timeout=60) is not None
        lost = federation.run / "metrics.jsonl"
        eventually(lambda: "[2]" in lost.read_text(), 200)
        for half in (tls.site_key("mallory"), tls.public_key("mallory")):
            half.unlink()
        tls.create(tls.hosts(), ["mallory"])
        federation.register_sites(parts.address)
        parts.restart_site("mallory")
        parts.finished()
    records = read_run(federation.run).records
    assert records[-1].get("dropped") is None, "with its new key, the site takes part again"
    require_repeated(config, federation.run, tmp_path / "repeated")


def reply_twice(attempts: Attempts, mallory: int) -> None:
    """Answer a message to mallory twice beside its own program: only one of the answers is taken.

    The SuperLink says that another one is a duplicate or, if the server has fetched the first, that it answers nothing.
    """
    log = attempts.federation.folder / LOGS / "superlink.log"

    def refused() -> bool:
        run, number = attempts.message_to(mallory)
        for _ in range(2):
            push(attempts, attempts.tls.site_key("mallory"), reply_to(number, run, mallory), mallory)
        said = " ".join(log.read_text().split())
        return f"duplicate reply for reply_to_message_id {number}" in said or f"{number} does not exist" in said

    eventually(refused, 120)


def signed(number: int) -> int:
    """A number of Flower as SQLite has it."""
    return number - 2**64 if number >= 2**63 else number


def registered(attempts: Attempts, folder: Path) -> Path:
    """The key of a site that is registered, and known by no name."""
    known = Certificates(folder / "known")
    known.create(["127.0.0.1"], ["impostor"])
    assert "registered" in attempts.flwr("supernode", "register", str(known.public_key("impostor")))
    return known.site_key("impostor")
