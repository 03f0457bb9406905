"""What a link really does: TCP between two hosts, from this process's sockets inside their namespaces."""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from thinpipe.config import ThinpipeError
from thinpipe.lab.links import Link
from thinpipe.lab.namespaces import inside


class Measured(NamedTuple):
    """An achieved link."""

    rate: float
    """Payload in Mbit/s that one TCP connection moved, once it was up to speed."""
    round_trip: float
    """Milliseconds, median over small packets on an idle link."""


def measure(sender, receiver, link: Link, seconds: float = 1.5) -> Measured:
    patience = 10 + 20 * link.delay
    with _connected(sender, receiver, patience) as (here, there):
        round_trip = _round_trip(here, there)
        rate = _rate(here, there, warm_up=min(10 * round_trip, 1.5) + 0.2, seconds=seconds)
    return Measured(rate / 1e6, round_trip * 1e3)


@contextmanager
def _connected(sender, receiver, patience: float):
    with inside(receiver.name):
        listener = socket.socket()
    with listener:
        listener.settimeout(patience)
        listener.bind((receiver.address, 0))
        listener.listen(1)
        with inside(sender.name):
            here = socket.socket()
        with here:
            here.settimeout(patience)
            here.connect(listener.getsockname())
            there, _ = listener.accept()
            with there:
                there.settimeout(patience)
                yield here, there


def _round_trip(here, there, count: int = 5) -> float:
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    times = []
    for _ in range(count):
        begin = time.monotonic()
        for one, other in ((here, there), (there, here)):
            one.send(b"?")
            other.recv(1)
        times.append(time.monotonic() - begin)
    return statistics.median(times)


def _rate(here, there, warm_up: float, seconds: float) -> float:
    begin = time.monotonic()
    end = begin + warm_up + seconds

    def send() -> None:
        with suppress(OSError):
            while time.monotonic() < end:
                here.send(bytes(1 << 16))
        # What still waits in the socket would delay whoever measures next.
        with suppress(OSError):
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            here.close()
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    first, moved, now = 0.0, 0, begin
    while now < end:
        got = len(there.recv(1 << 18))
        now = time.monotonic()
        if first: moved += got
        elif now > begin + warm_up: first = now
    thread.join(10)
    return 8 * moved / (now - first)
