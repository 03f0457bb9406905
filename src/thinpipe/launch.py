"""Starting the stages of this machine and ending all of them together, on torch's elastic agent.

Every worker is `python -m thinpipe.worker COMMAND RUN`; this room never imports the trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .config import NetworkConfig, ThinpipeError
from .topology import PeerLost, address_towards

STOPPED = 130  # exit status of a run that was asked to stop
_PATIENCE = 600  # seconds that a stop may take: the step under way and the checkpoint behind it


class Stopped(Exception):
    """The run was asked to stop and has saved."""


class Failed(Exception):
    """A stage failed for a reason that is not the user's; the text holds its traceback."""


@dataclass(frozen=True)
class Meeting:
    """Where the agents of a run meet, one per machine.

    Attributes:
        endpoint: HOST:PORT, the same on all; name: what they meet for.
        address: this machine's, as the others reach it.
        is_host: whether this machine keeps the meeting.
    """

    endpoint: str = "127.0.0.1:0"
    name: str = ""
    nodes: int = 1
    address: str = "127.0.0.1"
    is_host: bool = True


def meeting(network: NetworkConfig, name: str, patience: float = _PATIENCE, say: Callable[[str], None] = print) -> Meeting:
    """Find this machine's address and wait until the meeting's host listens, before anything heavy starts.

    Raises ThinpipeError if there is no way to it, its port is taken, or nobody listens after `patience` seconds.
    """
    assert network.rdzv is not None
    host, _, port_text = network.rdzv.rpartition(":")
    port = int(port_text)
    address = network.addr or address_towards(host, port)
    try:
        own = socket.gethostbyname(host) == address
    except OSError as error:
        raise ThinpipeError(f"network.rdzv: the name {host} is unknown ({error}); give an address") from None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port if own else 0))
    except OSError as error:
        remedy = "another run may use it; choose another port" if own else "network.addr must be an address of this machine"
        raise ThinpipeError(f"can't listen on {address}:{port if own else 0} ({error.strerror}); {remedy}") from None
    deadline, told = time.monotonic() + patience, False
    while not own:
        try:
            with socket.create_connection((host, port), timeout=5):
                break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ThinpipeError(
                    f"network.rdzv = {network.rdzv}: nobody listens after {patience:g} s ({error}); "
                    "start the run on that machine, and let its firewall pass the port"
                ) from None
            if not told:
                say(f"waiting for {network.rdzv} ({error}) ...")
                told = True
            time.sleep(0.5)
    return Meeting(network.rdzv, name, network.nodes, address, own)


def start(
    command: str,
    folder: Path,
    processes: int,
    debug: bool = False,
    *,
    logs: Path | None = None,
    arguments: Sequence[str] = (),
    meeting: Meeting = Meeting(),
) -> None:
    """Run `command` in `processes` processes on this machine, with those of the meeting's others, and wait for them.

    Their output goes to `logs` (RUN/logs), the first one's to the terminal.

    Args:
        arguments: more arguments of the command.
        meeting: with whom; by default nobody.

    Raises:
        ThinpipeError: a stage found something the user can mend, or died; the first failure's own words.
        Failed: a stage failed otherwise.
        Stopped: Ctrl-C or SIGTERM came, and the stages have ended.
    """
    if not debug:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    quiet = {rank: Std.ALL if rank else Std.NONE for rank in range(processes)}
    config = LaunchConfig(
        min_nodes=meeting.nodes,
        max_nodes=meeting.nodes,
        nproc_per_node=processes,
        run_id=meeting.name or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting.endpoint,
        # A name that maps to 127.0.0.1 would make torch guess the host wrong.
        rdzv_configs={"is_host": meeting.is_host, "join_timeout": _PATIENCE},
        local_addr=meeting.address,
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_PATIENCE,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs or folder / "logs"), redirects=quiet),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "thinpipe.worker", command, str(folder), *arguments)
    except ChildFailedError as error:
        _explain(error)
    except SignalException:
        raise Stopped from None
    except RendezvousError as error:
        raise ThinpipeError(f"the machines of the run did not meet at {meeting.endpoint} ({error}); are all of them started?") from None


def _explain(error: ChildFailedError) -> None:
    """Raise the failure that came first; a peer's loss only when there is nothing else, a stop (the agent stops the others) last."""
    reports = []
    for rank, failure in error.failures.items():
        report = failure.error_file_data.get("thinpipe") or {}
        stopped = failure.exitcode in (STOPPED, -signal.SIGINT, -signal.SIGTERM)
        reports.append((stopped, report.get("kind") == "peer", failure.timestamp, rank, failure, report))
    stopped, *_, rank, failure, report = min(reports, key=lambda r: r[:4])
    if stopped:
        raise Stopped
    if report.get("kind") in ("user", "peer"):
        raise ThinpipeError(report["text"])
    if failure.exitcode < 0:
        raise ThinpipeError(f"stage {rank} was killed by {failure.signal_name()}; if that was not you, look for a lack of memory (dmesg)")
    if not report:
        raise ThinpipeError(f"stage {rank} failed and could not leave a report in the run's logs; is that disk full?")
    raise Failed(f"stage {rank} failed:\n{report['text']}")


@contextlib.contextmanager
def reporting_failures() -> Iterator[None]:
    """In a worker: write what goes wrong where the agent looks for it, and exit with 1 (or 130 for a stop)."""
    try:
        yield
    except Stopped:
        os._exit(STOPPED)  # peers may be gone already: no goodbye over the network
    except BaseException as error:
        kind = "peer" if isinstance(error, PeerLost) else "user" if isinstance(error, ThinpipeError) else "bug"
        text = str(error) if kind != "bug" else traceback.format_exc()
        report = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}, "thinpipe": {"kind": kind, "text": text}}
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            try:
                Path(path).write_text(json.dumps(report))
            except OSError:  # a full disk; the agent takes half a report amiss
                Path(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        os._exit(1)


def die_with_parent() -> None:
    """Have the kernel kill this worker when its agent dies, even by kill -9 (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


class StopRequest:
    """Ctrl-C or SIGTERM: the first asks for a stop after the step, the second ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.asked:
            os._exit(STOPPED)
        self.asked = True
