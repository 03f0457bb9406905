"""What a link really does: TCP between two hosts, over sockets of this process inside their namespaces."""

from __future__ import annotations

import math
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from thinpipe.config import ThinpipeError
from thinpipe.lab.links import Link
from thinpipe.lab.namespaces import inside

_PINGS = 5
_FEW = 40  # arrivals that a rate needs, however long they take


class Measured(NamedTuple):
    """An achieved link."""

    rate: float
    """Payload in Mbit/s that one TCP connection moves, once it is up to speed."""
    round_trip: float
    """Milliseconds: median over small messages on the idle link."""


class End(Protocol):
    """A host, as far as measuring goes."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...


def measure(sender: End, receiver: End, link: Link, seconds: float = 1.5) -> Measured:
    """Rate and round trip from sender to receiver, in about `seconds` + 30 round trips; below 0.3 Mbit/s longer (100 kbit/s: 8 s).

    Raises ThinpipeError if the link passes nothing.
    """
    patience = 10 + 20 * link.delay
    try:
        with _connected(sender, receiver, patience) as (here, there):
            round_trip = statistics.median(_ping(here, there) for _ in range(_PINGS))
            rate = _transfer(here, there, warm_up=0.2 + min(2.5, 20 * round_trip), seconds=seconds)
    except OSError as error:
        raise ThinpipeError(
            f"lab: {sender.name} can't reach {receiver.name} over {link} ({error}); is a host cut, or the loss too high?"
        ) from None
    return Measured(rate / 1e6, round_trip * 1e3)


@contextmanager
def _connected(sender: End, receiver: End, patience: float) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection, each inside its host's namespace; no call on them waits longer than `patience` seconds."""
    with inside(receiver.name):
        listener = socket.create_server((receiver.address, 0), backlog=1)
    with inside(sender.name):
        here = socket.socket()
    with listener, here:
        listener.settimeout(patience)
        here.settimeout(patience)
        here.connect(listener.getsockname())
        there, _ = listener.accept()
        with there:
            there.settimeout(patience)
            for end in (here, there):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield here, there


def _ping(here: socket.socket, there: socket.socket) -> float:
    began = time.monotonic()
    for one, other in ((here, there), (there, here)):
        one.send(b"?")
        other.recv(1)
    return time.monotonic() - began


def _transfer(here: socket.socket, there: socket.socket, warm_up: float, seconds: float) -> float:
    """Bit/s that arrive after `warm_up` seconds of sending as fast as TCP will: median over the tenths of `seconds`.

    A median, since what stood in order behind a lost packet arrives all at once, later than it crossed the link. Of a thin link,
    where a tenth holds a few packets at most, what arrives between the first and the last of some.
    """

    def send() -> None:
        with suppress(OSError):  # the receiver's reset ends it
            while True:
                here.send(bytes(1 << 16))

    sender = threading.Thread(target=send, daemon=True)
    arrived: list[tuple[float, int]] = []
    begin = time.monotonic() + warm_up
    sender.start()
    while True:
        got = len(there.recv(1 << 20))
        if (at := time.monotonic() - begin) >= 0:
            arrived.append((at, got))
        if at >= seconds and len(arrived) > _FEW:
            break
    there.close()  # with data unread: a reset, which also drops what the sender still has queued
    sender.join(5)
    if len(arrived) < 100:
        return 8 * sum(got for _, got in arrived[1:]) / (arrived[-1][0] - arrived[0][0])
    tenths = [0] * 10
    for at, got in arrived[:-1]:
        tenths[math.floor(at / seconds * 10)] += got
    return 8 * statistics.median(tenths) / (seconds / 10)
