"""The process behind a lab: carries the packets (TUN) or redraws the rates (netem), and cleans up if its owner dies.

Started by `lab` as `python -m thinpipe.lab.emulator LAB`, with one end of a socket pair as standard input. Every message
on it is one JSON object with one answer; when the socket or the owner is gone, the lab is removed.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import json
import os
import random
import select
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from thinpipe.config import ThinpipeError
from thinpipe.lab import namespaces, netem
from thinpipe.lab.paths import Hop, route

_TICK = 0.0005  # seconds between two looks at the queues: what bounds both the error of a delay and the number of wake-ups
_PACKET = 65535


class Backend(Protocol):
    """What carries the packets of a lab."""

    files: list[int]
    """Descriptors whose readiness calls for `work`."""

    def wait(self) -> float | None:
        """Seconds until there is work without a descriptor being ready; None: never."""

    def work(self, ready: Sequence[int]) -> None:
        """Do what is due."""

    def configure(self, hops: Sequence[Hop]) -> None:
        """From now on, these hops; packets on their way keep the delay they were given."""


class Queue:
    """The token clock of one hop: when a packet that arrives has wholly left."""

    def __init__(self, hop: Hop, key: str, began: float) -> None:
        self.hop, self.key, self.began = hop, key, began
        self.rate, self.second, self.free = hop.rate, 0, 0.0
        self.random = random.Random(key)

    def leave(self, size: int, arrival: float, earlier: float) -> tuple[float, float] | None:
        """When a packet's last bit leaves and how long it took to send; None: dropped.

        `size` in bits, `arrival` of the last bit, which was `earlier` seconds after the first: a hop passes a
        packet on while it comes in, so that equal rates in a row delay it once.
        """
        hop = self.hop
        if hop.jitter and (second := int(arrival - self.began)) != self.second:
            self.rate, self.second = hop.rate_in(second, self.key), second
        start = max(arrival - earlier, self.free)
        if hop.cut or start - arrival > hop.queue:
            return None
        duration = size / self.rate if self.rate else 0.0
        self.free = start + duration
        if hop.loss and self.random.random() < hop.loss:
            return None
        return max(arrival, self.free) + hop.delay, duration


class Tun:
    """Packets read from one TUN device per host and written to another's, by clocks in user space."""

    def __init__(self, devices: list[int], hops: Sequence[Hop], star: bool, seed: int) -> None:
        hosts = len(devices)
        self.files, began = devices, time.monotonic()
        self.source = {device: host for host, device in enumerate(devices)}
        self.routes = [[route(i, j, hosts, star) for j in range(hosts)] for i in range(hosts)]
        self.due: list[tuple[float, int, int, int, int, float, bytes]] = []
        self.number = itertools.count()
        self.queues = [Queue(hop, f"{seed}/{i}", began) for i, hop in enumerate(hops)]

    def configure(self, hops: Sequence[Hop]) -> None:
        for queue, hop in zip(self.queues, hops, strict=True):
            queue.hop, queue.rate, queue.second = hop, hop.rate, -1

    def wait(self) -> float | None:
        return max(_TICK, self.due[0][0] - time.monotonic()) if self.due else None

    def work(self, ready: Sequence[int]) -> None:
        now = time.monotonic()
        for device in ready:
            source = self.source[device]
            with suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(device, _PACKET)
                    target = packet[19] - 1  # the last byte of the IPv4 destination is the host's number, from 1
                    if packet[0] >> 4 == 4 and 0 <= target < len(self.files) and target != source:
                        self.forward(now, now, 0, source, target, 0.0, packet)
        while self.due and self.due[0][0] <= now:
            arrival, _, step, source, target, earlier, packet = heapq.heappop(self.due)
            self.forward(now, arrival, step, source, target, earlier, packet)

    def forward(self, now: float, arrival: float, step: int, source: int, target: int, earlier: float, packet: bytes) -> None:
        """Take the packet, which arrived at its route's hop `step`, as far as it is due."""
        hops = self.routes[source][target]
        while step < len(hops):
            left = self.queues[hops[step]].leave(8 * len(packet), arrival, earlier)
            if left is None:
                return
            arrival, earlier = left
            step += 1
            if arrival > now:
                heapq.heappush(self.due, (arrival, next(self.number), step, source, target, earlier, packet))
                return
        with suppress(OSError):  # the device is down, or its host's own queue is full
            os.write(self.files[target], packet)


class Netem:
    """The kernel carries the packets; what is left is to redraw the rates that jitter."""

    def __init__(self, places: Sequence[netem.Place], hops: Sequence[Hop], seed: int) -> None:
        self.files: list[int] = []
        self.places, self.seed, self.began, self.second = places, seed, time.monotonic(), 0
        self.configure(hops)

    def configure(self, hops: Sequence[Hop]) -> None:
        self.hops = list(hops)
        self._apply(range(len(hops)))

    def wait(self) -> float | None:
        return max(0.0, self.began + self.second + 1 - time.monotonic()) if any(hop.jitter for hop in self.hops) else None

    def work(self, ready: Sequence[int]) -> None:
        second = int(time.monotonic() - self.began)
        if second != self.second:
            self.second = second
            self._apply(i for i, hop in enumerate(self.hops) if hop.jitter)

    def _apply(self, which: Iterable[int]) -> None:
        for i in which:
            netem.shape(self.places[i], self.hops[i], self.hops[i].rate_in(self.second, f"{self.seed}/{i}"))


def _start(message: dict[str, Any], devices: list[int]) -> Backend:
    hops = [Hop(**hop) for hop in message["hops"]]
    if message["backend"] == "netem":
        return Netem([netem.Place(*place) for place in message["places"]], hops, message["seed"])
    return Tun(devices, hops, message["star"], message["seed"])


def _answer(control: socket.socket, backend: Backend | None) -> Backend | None:
    """Do what one message asks. Returns None when the other end is gone."""
    text, devices, _, _ = socket.recv_fds(control, 1 << 20, 256)
    if not text:
        return None
    message = json.loads(text)
    answer: dict[str, Any] = {}
    try:
        if "backend" in message:
            backend = _start(message, devices)
        elif backend is not None and "hops" in message:
            backend.configure([Hop(**hop) for hop in message["hops"]])
        answer["cpu"] = time.process_time()
    except ThinpipeError as error:
        answer["error"] = str(error)
    control.send(json.dumps(answer).encode())
    return backend


def serve(control: socket.socket, owner: int) -> None:
    """Carry packets and answer messages until the owner (a pidfd) or its end of the socket is gone."""
    backend = _answer(control, None)
    while backend is not None:
        watched: list[Any] = [control, owner, *backend.files]
        ready = select.select(watched, [], [], backend.wait())[0]
        if owner in ready:
            return
        if control in ready:
            backend = _answer(control, backend)
        else:
            backend.work(ready)


def main() -> None:
    lab = sys.argv[1]
    control, parent = socket.socket(fileno=0), os.getppid()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a packet that waits for a core behind the training is late
    gc.disable()  # nothing here makes cycles
    try:
        # A pidfd tells of the owner's death whatever thread started us and whoever else inherited the socket;
        # PR_SET_PDEATHSIG would strike when that thread ends, and leave no time to clean up.
        owner = os.pidfd_open(parent)
        if str(parent) == lab.split("-")[1]:
            serve(control, owner)
    finally:
        time.sleep(0.2)  # a command that the dead owner had started may still be making namespaces
        namespaces.remove(namespaces.names(lab))


if __name__ == "__main__":
    main()
