"""Where the machines of a run meet: torch's rendezvous, with the traps of real networks handled."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from .config import NetworkConfig, ThinpipeError
from .topology import PeerLost, address_towards, listen_on, refuse_public

_HEARTBEAT = 1  # seconds between a machine's signs of life
_HEARTBEATS = 6  # missing ones after which its place is free
_SILENCE = 10  # seconds after which a connection to the meeting's host that answers nothing is given up
_LOOK = 0.2  # seconds
_CLOCK = "thinpipe/clock"  # the host's, in the meeting's store
_TICK = 0.3  # seconds between two of its settings
_QUIET = 3.0  # seconds of waiting for others that go without a word

# Machines that meet look every so often whether the others are there, torch's once a second: a new start takes several looks.
dynamic_rendezvous._delay = lambda seconds: time.sleep(_LOOK)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Meeting:
    """Where the agents of a run meet, one per machine.

    Attributes:
        endpoint: HOST:PORT, the same on all; name: what they meet for.
        nodes: machines that take part; what comes beyond them waits as a spare.
        address: this machine's, as the others reach it.
        is_host: whether this machine keeps the meeting.
        patience: seconds to wait for the meeting's host, and for machines that are missing.
    """

    endpoint: str = "127.0.0.1:0"
    name: str = ""
    nodes: int = 1
    address: str = "127.0.0.1"
    is_host: bool = True
    patience: float = 600.0


def meeting(network: NetworkConfig, name: str, say: Say = print) -> Meeting:
    """Find this machine's address and wait until the meeting's host listens, before anything heavy starts.

    Raises ThinpipeError if there is no way to it, it is public, its port is taken, or nobody listens after network.patience seconds.
    """
    assert network.rdzv is not None
    host, _, port_text = network.rdzv.rpartition(":")
    port = int(port_text)
    address = _number_of(network.addr, "network.addr") if network.addr else address_towards(host, port)
    there = _number_of(host, "network.rdzv")
    own = there == address
    try:
        if not network.insecure:
            refuse_public(address, there)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port if own else 0))
    except OSError as error:
        if own and error.errno == errno.EADDRINUSE and network.replica is not None:  # another replica's command here keeps it
            return Meeting(network.rdzv, name, network.needed, address, False, network.patience)
        remedy = "another run may use it; choose another port" if own else "network.addr must be an address of this machine"
        raise ThinpipeError(f"can't listen on {address}:{port if own else 0} ({error.strerror}); {remedy}") from None
    met = Meeting(network.rdzv, name, network.needed, address, own, network.patience)
    await_host(met, say)
    return met


def _number_of(name: str, field: str) -> str:
    """The address of a machine that may be given by name."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ThinpipeError(f"{field}: the name {name} is unknown ({error}); give an address") from None


def await_host(meeting: Meeting, say: Say) -> None:
    """Until the meeting's host listens. Raises PeerLost after the meeting's patience."""
    host, _, port = meeting.endpoint.rpartition(":")
    deadline, told = time.monotonic() + meeting.patience, False
    while not meeting.is_host:
        try:
            with socket.create_connection((host, int(port)), timeout=5):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"network.rdzv = {meeting.endpoint}: nobody listens after {meeting.patience:g} s ({error}); "
                    "start the run on that machine, and let its firewall pass the port"
                ) from None
            if not told:
                say(f"waiting for {meeting.endpoint} ({error}) ...")
                told = True
            time.sleep(0.5)


class Rendezvous(DynamicRendezvousHandler):
    """Torch's rendezvous that says for whom it waits, and doesn't end a run whose meeting's host is away."""

    say: Say
    _end_clock: Callable[[], None] | None = None

    @classmethod
    def at(cls, meeting: Meeting, say: Say) -> Rendezvous:
        """Raises RendezvousError if the meeting's host can't be reached, ThinpipeError if its clock differs from this machine's."""
        # With torch's shared store a machine keeps the address of the first round's leader and waits there for ever
        # when another one leads the next.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        store = _open_store(meeting)
        clock = None
        if meeting.is_host and not meeting.endpoint.endswith(":0"):  # others may come
            clock = keep_time(store)
        elif not meeting.is_host:
            try:
                check_clock(store, meeting.endpoint)
            except RuntimeError as error:  # the store's; ours is no such
                raise RendezvousError("lost the store") from error
        made = cls.from_backend(
            meeting.name,
            store,
            C10dRendezvousBackend(store, meeting.name),
            meeting.nodes,
            meeting.nodes,
            meeting.address,
            RendezvousTimeout(join=timedelta(seconds=meeting.patience)),
            _HEARTBEAT,
            _HEARTBEATS,
        )
        assert isinstance(made, Rendezvous)
        made.say, made._end_clock = say, clock
        if not meeting.is_host:
            give_up_silence(meeting.endpoint)
        return made

    def close(self, for_all: bool) -> None:
        """Leave; with `for_all` the meeting is over for the others too."""
        if for_all:
            with contextlib.suppress(RendezvousError):
                self.shutdown()
        if self._end_clock is not None:
            self._end_clock()  # it holds the store, and so the port

    def next_rendezvous(self) -> RendezvousInfo:
        done = threading.Event()
        threading.Thread(target=self._tell, args=(done,), daemon=True).start()
        try:
            return super().next_rendezvous()
        finally:
            done.set()

    def num_nodes_waiting(self) -> int:
        try:
            return super().num_nodes_waiting()
        except RendezvousError:  # the stages need their neighbours only
            return 0

    def _tell(self, done: threading.Event) -> None:
        """Say once in a while who is missing."""
        told, quiet = "", time.monotonic() + _QUIET
        while not done.wait(0.5):
            state, needed = self._state_holder.state, self.settings.max_nodes
            here = sorted(node.addr for node in list(state.participants))
            if state.complete and len(here) == needed:
                line = f"a spare: {needed} machines are at work; waiting until one is lost"
            else:
                line = f"waiting for {needed - len(here)} of {needed} machines; {', '.join(here) or 'nobody'} here"
            if line != told and time.monotonic() > quiet:
                self.say(line)
                told = line


def _open_store(meeting: Meeting) -> TCPStore:
    """Raises RendezvousConnectionError."""
    host, _, port = meeting.endpoint.rpartition(":")
    listener = None
    if meeting.is_host:
        with contextlib.suppress(OSError):  # taken: by an earlier life in this process, whose server torch finds again, or torch says so
            listener = listen_on(meeting.address, int(port))
    silence = timedelta(seconds=_SILENCE)
    try:
        return TCPStore(host, int(port), is_master=meeting.is_host, timeout=silence, multi_tenant=True, master_listen_fd=listener)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError("no store") from error


def keep_time(store: Store) -> Callable[[], None]:
    """On the meeting's host: write its clock into the store, again and again, in the background. Returns what ends that.

    The thread ends before the interpreter does: one that is inside of torch then aborts the process.
    """
    over = threading.Event()

    def write() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not over.wait(_TICK):
                store.set(_CLOCK, repr(time.time()))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join(1.0)
        atexit.unregister(end)

    atexit.register(end)
    return end


def check_clock(store: Store, endpoint: str) -> None:
    """Raises ThinpipeError if this machine's clock differs from the meeting host's so much that its signs of life look old."""
    before, deadline = None, time.monotonic() + 20 * _TICK
    while time.monotonic() < deadline:
        if store.check([_CLOCK]):
            reading = float(store.get(_CLOCK))
            if before is not None and reading != before:  # so this one is fresh
                if abs(off := time.time() - reading) > _HEARTBEATS * _HEARTBEAT / 2:
                    raise ThinpipeError(
                        f"this machine's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} that of {endpoint}; "
                        "set both (NTP does): machines that meet compare times"
                    )
                return
            before = reading
        time.sleep(_TICK / 3)


def give_up_silence(endpoint: str) -> None:
    """Have the kernel end this process's connections to the meeting's host that get no answer (Linux).

    Torch waits for an answer without a deadline, and a machine that was cut off would wait for the kernel's retries: minutes.
    """
    if sys.platform != "linux":
        return
    host, _, port = endpoint.rpartition(":")
    peer = (socket.gethostbyname(host), int(port))
    # Without the probes a connection that waits for an answer sends nothing, and nothing tells it that the way is gone.
    probes = {socket.TCP_KEEPIDLE: _SILENCE // 2, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: _SILENCE // 2}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not os.readlink(link).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                address, at, *_ = connection.getpeername()  # torch reaches an IPv4 host over IPv6 sockets
                if (address.removeprefix("::ffff:"), at) == peer:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for option, value in (probes | {socket.TCP_USER_TIMEOUT: 1000 * _SILENCE}).items():
                        connection.setsockopt(socket.IPPROTO_TCP, option, value)
