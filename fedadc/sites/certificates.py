"""Certificates and keys for a federation: an authority of its own, the server's certificate, and a key for every site.

A folder has all of it. Private keys are readable by their owner only. The authority signs the server's certificate,
which every site and every user of the SuperLink checks against `ca.crt`. A site proves who it is with its own key,
whose public half is registered at the SuperLink.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fedadc.errors import DataError, FedadcError, require
from fedadc.sites.node import require_file_name
from fedadc.system.files import PARTIAL, write_file

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY_NAME, SERVER_NAME, SITES_FOLDER = "ca", "server", "sites"
AUTHORITY_DAYS, SERVER_DAYS = 3650, 365
WARN_DAYS = 30  # a certificate that expires sooner is warned of
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
SKEW = timedelta(minutes=5)  # clocks differ


@dataclass(frozen=True)
class Certificates:
    """The folder with the certificates and keys of a federation."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / f"{AUTHORITY_NAME}.crt"

    @property
    def server(self) -> Path:
        return self.folder / f"{SERVER_NAME}.crt"

    @property
    def server_key(self) -> Path:
        return self.folder / f"{SERVER_NAME}.key"

    def site_key(self, site: str) -> Path:
        """The private key of a site; the public one has .pub behind its name."""
        return self.folder / SITES_FOLDER / site

    def public_key(self, site: str) -> Path:
        return self.site_key(site).with_name(f"{site}.pub")

    @property
    def link_options(self) -> list[str]:
        """Options of flower-superlink."""
        files = {"--ssl-ca-certfile": self.authority, "--ssl-certfile": self.server, "--ssl-keyfile": self.server_key}
        return [*(word for option, file in files.items() for word in (option, str(file))), "--enable-supernode-auth"]

    def site_options(self, site: str) -> list[str]:
        """Options of flower-supernode."""
        return [
            "--root-certificates", str(self.authority), "--auth-supernode-private-key", str(self.site_key(site)),
        ]  # fmt: skip

    def create(self, hosts: Sequence[str], sites: Collection[str], days: int = SERVER_DAYS) -> list[Path]:
        """Make what is not there: the authority, the server's certificate, keys of sites. Returns the new files."""
        self._require_possible(hosts, sites, days)
        before = set(self.folder.rglob("*"))
        for folder in (self.folder, self.folder / SITES_FOLDER):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.authority.exists():
            self._create_authority()
        if not self.server.exists():
            self.renew(hosts, days)
        for site in sites:
            if not self.site_key(site).exists() and not self.public_key(site).exists():
                self._create_site_key(site)
        return sorted(path for path in set(self.folder.rglob("*")) - before if path.is_file())

    def _require_possible(self, hosts: Sequence[str], sites: Collection[str], days: int) -> None:
        """Refuse what could not be made, before anything is written."""
        require(not self.folder.exists() or self.folder.is_dir(), f"{self.folder} is not a folder; name another one.")
        require(bool(hosts), "a certificate needs at least one host, by which sites reach the server.")
        require(1 <= days <= AUTHORITY_DAYS, f"days must be in 1..{AUTHORITY_DAYS}, not {days}.")
        for site in sites:
            require_file_name(site, "the name of a site")
        names = [_name_of(host) for host in hosts]
        if self.server.exists():
            known = self.hosts()
            further = [str(name.value) for name in names if str(name.value) not in known]
            require(
                not further,
                f"the certificate in {self.folder} is for {', '.join(known)}, not for {', '.join(further)}; --renew "
                "makes one for other hosts.",
            )

    def renew(self, hosts: Sequence[str], days: int = SERVER_DAYS) -> None:
        """A new certificate and key for the server, signed by the same authority, so that sites need nothing new."""
        require(self.authority.is_file(), f"there is no authority in {self.folder}; make one without --renew.")
        require(1 <= days <= AUTHORITY_DAYS, f"days must be in 1..{AUTHORITY_DAYS}, not {days}.")
        key, signer = _new_key(), self._authority_key()
        from cryptography import x509

        issuer = _read_certificate(self.authority)
        builder = (
            _builder(hosts[0], issuer.subject, key, days)
            .add_extension(x509.SubjectAlternativeName([_name_of(host) for host in hosts]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        _write_private(self.server_key, _pem(key))
        write_file(self.server, _signed(builder, signer))

    def hosts(self) -> list[str]:
        """The hosts of the server's certificate."""
        from cryptography import x509

        require(self.server.is_file(), "--host is missing: a name or address by which sites reach the server.")
        names = _read_certificate(self.server).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [str(name.value) for name in names]

    def days_left(self) -> float:
        """Days until the first of the two certificates expires; negative: it has expired."""
        return min(map(_days_left, (self.authority, self.server)))

    def warning(self) -> str | None:
        """A sentence if a certificate expires soon; an error if it has expired."""
        days = self.days_left()
        how = f"`fedadc federation certificates {self.folder} --renew` makes a new one"
        if _days_left(self.authority) <= days:
            how = "it is the authority's own: make certificates in another folder, and give its ca.crt to all sites"
        require(days > 0, f"the certificate in {self.folder} has expired {-days:.0f} days ago; {how}.")
        return f"the certificate in {self.folder} expires in {days:.0f} days; {how}." if days < WARN_DAYS else None

    def _create_authority(self) -> None:
        key = _new_key()
        from cryptography import x509

        name = _subject("fedadc federation")
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = (
            _builder("fedadc federation", name, key, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        _write_private(self.folder / f"{AUTHORITY_NAME}.key", _pem(key))
        write_file(self.authority, _signed(builder, key))

    def _authority_key(self) -> ec.EllipticCurvePrivateKey:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        path = self.folder / f"{AUTHORITY_NAME}.key"
        require(path.is_file(), f"{path} is missing: the key of the authority that signs the server's certificate.")
        try:
            key = load_pem_private_key(path.read_bytes(), None)
        except (ValueError, TypeError) as error:
            raise DataError(f"{path} is not a private key.") from error
        require(isinstance(key, ec.EllipticCurvePrivateKey), f"{path} is not a key of this authority.", DataError)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key

    def _create_site_key(self, site: str) -> None:
        from cryptography.hazmat.primitives import serialization

        require_file_name(site, "the name of a site")
        key = _new_key()
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        write_file(self.public_key(site), public + b"\n")
        _write_private(self.site_key(site), private)


def public_key_of(folder: Path, site: str) -> bytes:
    """The public key of a site in PEM, from the file NAME.pub in a folder."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    path = folder / f"{site}.pub"
    require(path.is_file(), f"there is no key {path.name} in {folder} (site-keys).")
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is not a public key as OpenSSH writes them.") from error
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _new_key() -> ec.EllipticCurvePrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise FedadcError("certificates need the extra flower: pip install 'fedadc[flower]'.") from error
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=_subject(name),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - SKEW,
        not_valid_after=now + timedelta(days=days),
    )


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _name_of(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        require(bool(HOST.fullmatch(host)), f"{host!r:.60} is neither the name nor the address of a host.")
        return x509.DNSName(host)
    except ValueError as error:
        raise FedadcError(f"{host!r:.60} is neither the name nor the address of a host.") from error


def _read_certificate(path: Path) -> x509.Certificate:
    from cryptography import x509

    require(path.is_file(), f"there is no certificate {path}.")
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not a certificate.") from error


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    partial = path.with_name(f"{path.name}-{os.getpid()}{PARTIAL}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    partial.replace(path)


def _days_left(certificate: Path) -> float:
    return (_read_certificate(certificate).not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)
