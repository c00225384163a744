"""Figures of a federation for Prometheus, at http://ADDRESS/metrics. Nothing listens unless it is asked for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedadc.errors import FedadcError, require
from fedadc.sites.status import Status

METRIC_PREFIX = "fedadc_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAST_PORT = 65535
SITE_FIGURES = {  # name of the metric -> its help, its field
    "site_bytes_up_total": ("Bytes of messages from the site, without framing.", "bytes_up"),
    "site_bytes_down_total": ("Bytes of messages to the site, without framing.", "bytes_down"),
    "site_late_total": ("Answers of the site that were late.", "late"),
    "site_refused_total": ("Answers and nodes of the site that were refused.", "refused"),
    "site_problems_total": ("Requests that the site could not do.", "problems"),
    "site_lost_total": ("Messages to the site that were lost.", "lost"),
    "site_counted_round": ("Last round in which the upload of the site was counted.", "counted"),
    "site_answered_timestamp_seconds": ("When the site answered last.", "answered"),
}


def exposition(status: Status) -> str:
    """The text that Prometheus reads."""
    lines: list[str] = []
    plain = {
        "rounds": ("Rounds of the run.", status.rounds),
        "round": ("Last complete round.", status.round),
        "round_seconds": ("Seconds that the last round took.", status.seconds),
        "sites_connected": ("Sites that are connected.", len(status.connected)),
        "finished": ("1 when the run is finished.", int(status.finished)),
        "updated_timestamp_seconds": ("When these figures were updated.", status.updated),
    }
    for name, (text, value) in plain.items():
        lines += [*_head(name, text), f"{METRIC_PREFIX}{name} {_number(value)}"]
    lines += _labelled("metric", "Accuracies and losses of the last evaluated round.", "name", status.metrics)
    here = {name: int(name in status.connected) for name in status.sites}
    lines += _labelled("site_connected", "1 if the site is connected.", "site", here)
    for name, (text, field) in SITE_FIGURES.items():
        lines += _labelled(name, text, "site", {site: getattr(own, field) for site, own in status.sites.items()})
    return "\n".join(lines) + "\n"


def _head(name: str, text: str) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    return [f"# HELP {METRIC_PREFIX}{name} {text}", f"# TYPE {METRIC_PREFIX}{name} {kind}"]


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> list[str]:
    rows = [f'{METRIC_PREFIX}{name}{{{label}="{_escaped(key)}"}} {_number(value)}' for key, value in values.items()]
    return [*_head(name, text), *rows] if rows else []


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else f"{value:.17g}"


class MetricsServer:
    """Serves the figures of the last status that it was shown, in a thread of its own."""

    def __init__(self, address: str) -> None:
        host, port = split_address(address)
        self._text = b""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == "/metrics"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                body = server._text if found else b"see /metrics\n"
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Requests are not logged."""

        class FiguresServer(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._http = FiguresServer((host, port), Handler)
        except (OSError, ValueError, TypeError) as error:  # the last two: a name that no host can have
            reason = getattr(error, "strerror", None) or error
            raise FedadcError(f"metrics cannot be served at {address:.80}: {reason}.") from None
        self._http.daemon_threads = True
        self.port: int = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __call__(self, status: Status) -> None:
        self._text = exposition(status).encode()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def split_address(address: str) -> tuple[str, int]:
    """The host and port of `host:port` or of a port of this machine."""
    host, _, port = address.rpartition(":")
    require(
        port.isascii() and port.isdecimal() and int(port) <= LAST_PORT,
        f"metrics must be a port or host:port, not {address!r:.60}.",
    )
    return host.strip("[]") or "127.0.0.1", int(port)
