"""Certificates and keys: who can read them, what they prove, when they expire, in real TLS connections."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedadc.cli.app import app
from fedadc.errors import FedadcError
from fedadc.sites.certificates import Certificates


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    certificates = Certificates(tmp_path / "tls")
    certificates.create(["localhost", "127.0.0.1"], ["bern", "zug"])
    return certificates


def said(server: Certificates, trusted: Path, host: str) -> str:
    """What a client says that connects to a server: "" if all is well, else why not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.server, server.server_key)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def accept() -> None:
            connection = listening.accept()[0]
            try:
                context.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            with socket.create_connection(listening.getsockname()) as plain:
                ssl.create_default_context(cafile=str(trusted)).wrap_socket(plain, server_hostname=host).close()
            return ""
        except ssl.SSLError as error:
            return str(error)
        finally:
            thread.join()


def test_only_their_owner_reads_private_keys(made: Certificates) -> None:
    for path in (made.server_key, made.folder / "ca.key", made.site_key("bern"), made.site_key("zug")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (made.folder, made.site_key("bern").parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert made.site_key("bern").read_bytes() != made.site_key("zug").read_bytes()


def test_the_server_is_believed_by_those_who_trust_the_authority_and_only_under_its_names(
    made: Certificates, tmp_path: Path
) -> None:
    other = Certificates(tmp_path / "other")
    other.create(["localhost"], ())
    assert said(made, made.authority, "localhost") == "" == said(made, made.authority, "127.0.0.1")
    assert "unable to get local issuer" in said(made, other.authority, "localhost") or "verify failed" in said(
        made, other.authority, "localhost"
    )
    assert "Hostname mismatch" in said(made, made.authority, "elsewhere.example")


def test_keys_of_sites_are_such_as_flower_reads(made: Certificates) -> None:
    register = pytest.importorskip("flwr.cli.supernode.register")
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    assert register.try_load_public_key(made.public_key("bern"))
    key = load_ssh_private_key(made.site_key("bern").read_bytes(), None)
    assert getattr(key, "curve").name == "secp384r1"  # noqa: B009


def test_what_is_there_stays_and_a_renewed_certificate_is_believed_by_the_same_sites(made: Certificates) -> None:
    before = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    assert [path.name for path in made.create(["localhost"], ["bern", "chur"])] == ["chur", "chur.pub"]
    assert all(path.read_bytes() == content for path, content in before.items())
    made.renew(made.hosts())
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"server.crt", "server.key"} and made.hosts() == ["localhost", "127.0.0.1"]
    assert said(made, made.authority, "localhost") == ""
    assert stat.S_IMODE(made.server_key.stat().st_mode) == 0o600


def test_expiry_is_warned_of_and_then_refused(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from fedadc.sites import certificates

    assert made.warning() is None and 364 < made.days_left() <= 365
    made.renew(made.hosts(), days=20)
    assert "expires in 20 days" in str(made.warning())
    monkeypatch.setattr(certificates, "SKEW", timedelta(days=10))
    real = certificates.datetime

    class Earlier:
        @staticmethod
        def now(zone: object) -> object:
            return real.now(certificates.UTC) - timedelta(days=5)

    monkeypatch.setattr(certificates, "datetime", Earlier)
    made.renew(made.hosts(), days=1)
    monkeypatch.setattr(certificates, "datetime", real)
    with pytest.raises(FedadcError, match=r"has expired 4 days ago; .*--renew"):
        made.warning()
    assert "certificate has expired" in said(made, made.authority, "localhost")


def test_the_command(tmp_path: Path) -> None:
    run, folder = CliRunner().invoke, str(tmp_path / "tls")
    done = run(app, ["federation", "certificates", folder, "--host", "server.example", "--site", "bern"])
    assert done.exit_code == 0 and "server.crt" in done.output and "365 days" in done.output
    assert run(app, ["federation", "certificates", folder, "--renew", "--days", "7"]).exit_code == 0
    assert Certificates(tmp_path / "tls").hosts() == ["server.example"]
    assert 6 < Certificates(tmp_path / "tls").days_left() <= 7


@pytest.mark.parametrize(
    ("hosts", "sites", "days", "sentence"),
    [
        ([], [], 365, "at least one host"),
        (["büro"], [], 365, "neither the name nor the address"),
        (["localhost"], ["../away"], 365, "the name of a site"),
        (["localhost"], [], 0, r"days must be in 1\.\.3650"),
        (["a b c.."], [], 365, "neither the name nor the address"),
        (["-x"], [], 365, "neither the name nor the address"),
    ],
)
def test_bad_input(hosts: list[str], sites: list[str], days: int, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FedadcError, match=sentence):
        Certificates(tmp_path / "tls").create(hosts, sites, days)
    assert not (tmp_path / "away").exists()


def test_files_that_are_no_certificates(made: Certificates) -> None:
    made.server.write_text("nonsense")
    with pytest.raises(FedadcError, match="is not a certificate"):
        made.days_left()
    (made.folder / "ca.key").write_text("nonsense")
    with pytest.raises(FedadcError, match="is not a private key"):
        made.renew(["localhost"])


def test_nothing_is_written_if_something_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FedadcError, match="the name of a site"):
        Certificates(tmp_path / "tls").create(["localhost"], ["bern", "a/b"])
    assert not (tmp_path / "tls").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FedadcError, match="is not a folder"):
        Certificates(tmp_path / "file").create(["localhost"], [])
    with pytest.raises(FedadcError, match="there is no authority in"):
        Certificates(tmp_path / "none").renew(["localhost"])
    assert not (tmp_path / "none").exists()


def test_a_key_that_a_site_has_made_itself_stays(made: Certificates) -> None:
    made.public_key("chur").write_text("ssh-ed25519 of their own")
    assert made.create(["localhost"], ["chur"]) == []
    assert made.public_key("chur").read_text() == "ssh-ed25519 of their own"


def test_another_host_needs_another_certificate(made: Certificates) -> None:
    with pytest.raises(FedadcError, match=r"is for localhost, 127\.0\.0\.1, not for elsewhere\.example; --renew makes"):
        made.create(["elsewhere.example"], [])
    made.renew(["elsewhere.example"])
    assert made.hosts() == ["elsewhere.example"]
