"""The commands of real federations: `federation init`, `up`, `status` and so on."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from fedadc.cli.options import DataDir, Json, Overrides

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the app.")]
GivenConfig = Annotated[Path | None, typer.Option("--config", help="A config, as `fedadc run` takes it.")]


def federation_init(folder: Folder, overrides: Overrides = None, config: GivenConfig = None) -> None:
    """Write a Flower app that trains across sites with the settings of a config. Its data is left out."""
    from fedadc.cli.terminal import note
    from fedadc.errors import require
    from fedadc.runs.record import load_config
    from fedadc.sites.app import write_app

    require(config is not None, "--config is missing: the config whose settings the federation uses.")
    assert config is not None
    write_app(folder, load_config(config, overrides or (), notes=note))
    typer.echo(f"wrote {folder}; its README.md says how to start the SuperLink, the sites and the run.")


def federation_up(
    folder: Folder,
    overrides: Overrides = None,
    sites: Annotated[int | None, typer.Option(min=1, metavar="N", help="Sites to deal the data to.")] = None,
    config: GivenConfig = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the SuperLink (default: a free one).")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Encrypt all connections, and let sites prove who they are.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Start a federation on this machine, for trying: deal the data, train to the end, and stop it. A run goes on."""
    from fedadc.cli.terminal import note, progress_of_federation
    from fedadc.errors import require
    from fedadc.runs.record import load_config
    from fedadc.sites.trial import prepared, secure, train_here

    require(config is not None or not overrides, "settings can be changed with --config only, before a run begins.")
    chosen = None if config is None else load_config(config, overrides or (), notes=note)
    federation, known = prepared(folder, chosen, sites, data_dir, port)
    secure(federation, tls, note)
    with progress_of_federation(known.rounds, folder.name) as (watch, show):
        out = train_here(federation, known, port, watch, note, show)
    typer.echo(f"the run is in {out}")


def federation_status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, or the folder of a trial.")],
    json: Json = False,
) -> None:
    """Show how a federation stands: who is in, who is late, the last round, bytes and errors."""
    from fedadc.sites.overview import federation_status as read

    found = read(folder)
    if json:
        typer.echo(json_module.dumps(found.as_json(), indent=2))
        return
    from fedadc.cli.site_output import show_overview

    show_overview(found)


def federation_doctor(
    folder: Folder,
    link: Annotated[
        str | None, typer.Argument(metavar="[SUPERLINK]", help="Its name in Flower's config (default: its default).")
    ] = None,
    within: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds to wait for sites, and for their answers.")
    ] = 60.0,
    site_keys: Annotated[Path | None, typer.Option("--site-keys", help="A folder with the sites' public keys.")] = None,
    json: Json = False,
) -> None:
    """Examine a federation before a run: the SuperLink, its certificate, and at every site versions, clock and data."""
    from fedadc.errors import WorkersLost, require
    from fedadc.sites.doctor import examine_federation

    found = examine_federation(folder, link, within, site_keys)
    if json:
        from fedadc.sites.examination import as_json

        typer.echo(json_module.dumps(as_json(found), indent=2))
    else:
        from fedadc.cli.site_output import show_examination

        show_examination(found)
    bad = [f"site {site.name}: {problem}" for site in found.sites for problem in site.problems]
    require(found.healthy, "; ".join([*found.problems, *bad]) + ".", WorkersLost)


def federation_certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder for certificates and keys.")],
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address by which sites reach the server.")
    ] = None,
    sites: Annotated[list[str] | None, typer.Option("--site", help="A site that needs a key.")] = None,
    days: Annotated[int, typer.Option(help="Days for which the server's certificate is valid.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the server's certificate and key.")] = False,
) -> None:
    """Make certificates and keys for a federation: an authority, the server's certificate, a key per site."""
    from fedadc.sites.certificates import Certificates

    certificates = Certificates(folder)
    if renew:
        certificates.renew(hosts or certificates.hosts(), days)
        typer.echo(f"renewed {certificates.server}; start the SuperLink again. Sites need nothing new.")
        if not sites:
            return
    for path in certificates.create(hosts or certificates.hosts(), sites or (), days):
        typer.echo(f"wrote {path}")
    typer.echo(f"the certificates are valid for {certificates.days_left():.0f} days")


def federation_checksum(folder: Folder) -> None:
    """Print the checksum of an app as Flower sends it, for sites that run only apps that they know."""
    from fedadc.sites.pinning import checksum_of_app

    typer.echo(checksum_of_app(folder))


def federation_site(
    options: Annotated[
        list[str], typer.Argument(metavar="-- OPTIONS", help="Options of flower-supernode, behind two dashes.")
    ],
    pins: Annotated[
        list[str] | None, typer.Option("--pin", metavar="APP", help="An app's checksum, or a folder with a copy of it.")
    ] = None,
) -> None:
    """Start a SuperNode that runs only the given apps. Flower's own program runs whatever app the server sends."""
    from fedadc.errors import require
    from fedadc.sites.pinning import become_pinned_site, pins_of

    require(bool(pins), "--pin is missing: the checksum of an app that this site runs, or a folder with a copy of it.")
    become_pinned_site(pins_of(pins or ()), options)


def federation_down(folder: Folder) -> None:
    """End all processes of a federation on this machine."""
    from fedadc.sites.trial import end_processes

    count = end_processes(folder)
    typer.echo(f"ended {count} processes" if count else "no process was running")
