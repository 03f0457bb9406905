"""How a run stands as text for Prometheus (exposition format 0.0.4), and the HTTP server that gives it away.

Few lines of the standard library, so that neither the one who serves nor `thinpipe status` needs another package.
"""

from __future__ import annotations

import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

PATH = "/metrics"
_SILENT_CLIENT = 10.0  # seconds after which a connection without a request is closed


class _Row(NamedTuple):
    key: str
    """Of `Standing.told`."""
    sample: str
    """Name and labels. A counter ends in _total; the rest are gauges, which a restart may take back."""
    help: str
    unit: int = 1
    """What one of the key's is in base units (seconds, bytes)."""


_SENT = "Bytes sent over all boundaries, for steps that a restart has undone too."
_ROWS = (
    _Row("stages", "thinpipe_stages", "Stages of the pipeline."),
    _Row("replicas", "thinpipe_replicas", "Replicas that took part in the last step."),
    _Row("step", "thinpipe_step", "Optimizer steps done."),
    _Row("steps", "thinpipe_steps", "Optimizer steps of the whole run."),
    _Row("tokens", "thinpipe_tokens", "Tokens trained on in the steps done."),
    _Row("loss", "thinpipe_loss", "Training loss of the last step in nats per token; absent if that step was refused."),
    _Row("val_loss", "thinpipe_val_loss", "Newest validation loss in nats per token."),
    _Row("seconds_per_step", "thinpipe_step_seconds", "Median time of the last 20 steps."),
    _Row("tokens_per_s", "thinpipe_tokens_per_second", "Tokens of the last step over the median time of the last 20."),
    _Row("link_mbit", "thinpipe_link_bytes_per_second", "What a boundary carries in one direction on average.", 125_000),
    _Row("total_bytes_forward", 'thinpipe_wire_bytes_total{direction="forward"}', _SENT),
    _Row("total_bytes_backward", 'thinpipe_wire_bytes_total{direction="backward"}', _SENT),
    _Row("restarts", "thinpipe_restarts_total", "Starts after the first."),
    _Row("refused_steps", "thinpipe_refused_steps", "Steps refused for a loss or gradient that was not finite."),
    _Row("checkpoint", "thinpipe_checkpoint_step", "Step of the newest checkpoint."),
    _Row("heard", "thinpipe_heard_timestamp_seconds", "Unix time of the last event."),
)
_MAY_LACK = {"loss", "val_loss", "seconds_per_step", "tokens_per_s", "link_mbit", "checkpoint"}
_INFO = re.compile(r'^thinpipe_run_info\{run="(.*)",method="(.*)"\} 1$', re.MULTILINE)


def expose(told: dict[str, Any]) -> str:
    """What `Standing.told` returned as Prometheus text; what is None is left out."""
    run = told["run"].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = ["# HELP thinpipe_run_info The run.", "# TYPE thinpipe_run_info gauge"]
    lines.append(f'thinpipe_run_info{{run="{run}",method="{told["method"]}"}} 1')
    family = ""
    for row in _ROWS:
        if told[row.key] is None:
            continue
        name = row.sample.partition("{")[0]
        if name != family:
            lines += [f"# HELP {name} {row.help}", f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"]
        family = name
        lines.append(f"{row.sample} {told[row.key] * row.unit}")
    return "\n".join(lines) + "\n"


def read(text: str) -> dict[str, Any]:
    """What `expose` was given, its complaints apart (None); the times are from this machine's clock.

    Raises LookupError, TypeError or ValueError for any other text.
    """
    samples = dict(line.rpartition(" ")[::2] for line in text.split("\n") if not line.startswith("#"))
    run, method = _INFO.findall(text)[0]
    told: dict[str, Any] = {"run": re.sub(r"\\(.)", lambda sign: "\n" if sign[1] == "n" else sign[1], run), "method": method}
    for row in _ROWS:
        if row.key in _MAY_LACK and row.sample not in samples:
            told[row.key] = None
            continue
        value = samples[row.sample]
        number = int(value) if value.isdecimal() else float(value)
        told[row.key] = number if row.unit == 1 else number / row.unit
    return told | {"silent_s": max(0.0, time.time() - told["heard"]), "finished": False, "complaints": None}


class Endpoint:
    """Serves a text at PATH, from a thread of its own, until it is closed.

    Args:
        address: IP:PORT, or [IP]:PORT for IPv6; port 0 takes a free one.
        text: called for each request; if it raises, that request is answered with 503.

    Attributes:
        port: where it listens.

    Raises OSError if the address can't be had.
    """

    def __init__(self, address: str, text: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENT_CLIENT

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != PATH:
                    self.send_error(404, f"see {PATH}")
                    return
                try:
                    body = text().encode(errors="replace")
                except Exception as error:  # not started yet, or an earlier life's events are damaged: never the training's matter
                    self.send_error(503, type(error).__name__)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        host, _, port = address.rpartition(":")
        self._server = _Server(host.strip("[]"), int(port), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Free the port. Requests under way are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):  # not HTTPServer, which asks the DNS for its own name
    allow_reuse_address = True  # for the next life of a run
    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client went away
