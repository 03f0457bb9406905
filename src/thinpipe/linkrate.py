"""Rates and round trips of the links between the processes of a run, as Gloo moves messages over them.

Pairs are measured in rounds; in a round no process belongs to two pairs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations

import torch

from .lab import Measured
from .topology import Topology

_PING_TAG, _BULK_TAG, _ASK_TAG = 20, 21, 22
_PINGS = 6
_MESSAGES = 16  # of a transfer, all in flight
_FIRST, _LARGEST = 1 << 12, 1 << 20  # bytes of a message: a transfer holds 64 KiB to 16 MiB
_AGREE = 0.9  # the second fastest transfer of the full size against the fastest; others were held up, by a loss for instance

Pair = tuple[int, int]


def measure_links(here: Topology, seconds: float = 1.0, pairs: Sequence[Pair] | None = None) -> list[list[Measured | None]]:
    """What Gloo moves from every process i to every j, at [i][j] of the result, on every process. COLLECTIVE.

    The round trip is that of the fastest of a few small messages, whose receives were posted before; the rate that of many
    messages in flight. A pair takes about twice `seconds` + 25 round trips, more below 1 Mbit/s and where TCP is slow to get up
    to speed; every wait ends with the group's deadline.

    Args:
        pairs: which ones to measure, both ways, the same on all processes (None: all). 0.2 s do for a first idea.

    Raises PeerLost that names a process which did not answer.
    """
    found: list[list[Measured | None]] = [[None] * here.stages for _ in range(here.stages)]
    for round_ in rounds(here.stages, pairs):
        mine = [_measure(here, *pair, seconds) for pair in round_ if here.stage in pair]
        for told in here.gather(mine):  # nobody begins the next round before all are here
            for source, target, rate, round_trip in (each for pair in told for each in pair):
                found[source][target] = Measured(rate, round_trip)
    return found


def rounds(machines: int, pairs: Sequence[Pair] | None = None) -> list[list[Pair]]:
    """The pairs (None: all), each in one of a few rounds; all pairs take as many rounds as machines at most.

    Pairs of equal (i + j) mod machines have no machine in common.
    """
    packed: list[list[Pair]] = []
    wanted = combinations(range(machines), 2) if pairs is None else pairs
    for pair in sorted(wanted, key=lambda pair: (sum(pair) % machines, pair)):
        free = next((each for each in packed if not any(set(pair) & set(other) for other in each)), None)
        if free is None:
            packed.append(free := [])
        free.append(pair)
    return packed


def _measure(here: Topology, first: int, second: int, seconds: float) -> list[tuple[int, int, float, float]]:
    """On both machines of a pair. What this one has seen of it: source, target, Mbit/s, round trip in ms."""
    peer = second if here.stage == first else first
    round_trip = _ping(here, peer, begins=here.stage == first)
    seen = []
    for source, target in ((first, second), (second, first)):
        if here.stage == source:
            _send(here, target)
        else:
            seen.append((source, target, _receive(here, source, round_trip, seconds) / 1e6, 1e3 * round_trip))
    return seen


def _ping(here: Topology, peer: int, begins: bool) -> float:
    """Seconds there and back: the shortest of a few, since a busy processor only adds. The first one waits for the peer to come."""
    receives = [here.irecv(torch.empty(1, dtype=torch.uint8), peer, _PING_TAG) for _ in range(_PINGS)]
    sent, seconds = [], []

    def send() -> None:
        sent.append(here.isend(torch.zeros(1, dtype=torch.uint8), peer, _PING_TAG))

    for receive in receives:
        began = time.monotonic()
        if begins:
            send()
        here.wait(receive, peer)
        if not begins:
            send()
        seconds.append(time.monotonic() - began)
    for work in sent:
        here.wait(work, peer)
    return min(seconds[1:])


def _receive(here: Topology, peer: int, round_trip: float, seconds: float) -> float:
    """Bit/s from `peer`: ask for transfers that grow until they take long enough or hold the most.

    A transfer lasts a round trip, from the asking, and what its bytes take. When its parts arrive tells nothing: what stands in
    order behind a lost packet arrives late and all at once. One of a few round trips only shows how TCP gets up to speed.
    """
    buffer, long = torch.empty(_LARGEST, dtype=torch.uint8), max(seconds / 4, 2 * round_trip)
    size, before, latest = _FIRST, 0.0, time.monotonic() + 4 * seconds
    full: list[float] = []
    while True:
        # Gloo moves nothing before the receive is posted: all are, so that the messages follow each other without a gap.
        receives = [here.irecv(buffer[:size], peer, _BULK_TAG) for _ in range(_MESSAGES)]
        began = time.monotonic()
        _ask(here, peer, size)
        for receive in receives:
            here.wait(receive, peer)
        rate = 8 * size * _MESSAGES / max(time.monotonic() - began - round_trip, 1e-4)
        # Long enough at the speed of the one before, too: where that was faster, this one may have been held up.
        enough = max(rate, before) * long / 8 / _MESSAGES
        full = [*full, rate] if size >= min(0.8 * enough, _LARGEST) else []
        agree = len(full) > 1 and sorted(full)[-2] >= _AGREE * max(full)
        if agree or time.monotonic() > latest:
            _ask(here, peer, 0)
            return max(full, default=rate)
        size, before = size if full else min(4 * size, _LARGEST), rate


def _ask(here: Topology, peer: int, size: int) -> None:
    here.wait(here.isend(torch.tensor([size]), peer, _ASK_TAG), peer)


def _send(here: Topology, peer: int) -> None:
    """Send the transfers that `peer` asks for until it asks for none."""
    buffer, asked = torch.zeros(_LARGEST, dtype=torch.uint8), torch.empty(1, dtype=torch.int64)
    request = here.irecv(asked, peer, _ASK_TAG)
    while True:
        here.wait(request, peer)
        if not (size := int(asked)):
            return
        request = here.irecv(asked, peer, _ASK_TAG)
        for work in [here.isend(buffer[:size], peer, _BULK_TAG) for _ in range(_MESSAGES)]:
            here.wait(work, peer)
