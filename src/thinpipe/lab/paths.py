"""Which hops a packet passes: pure data that both backends build from.

With one link for all boundaries (a star), a packet passes its sender's uplink and its receiver's downlink, each
shared by all peers. With different links (a chain), these two are free and the packet passes every boundary between the
two hosts, so that hosts which are not neighbours see the smallest rate and the sum of the delays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.lab.links import Link


@dataclass(frozen=True)
class Hop:
    """A queue with a rate, then a wire with a delay."""

    rate: float | None = None
    """Bit/s (None: unlimited)."""
    delay: float = 0.0
    """Seconds."""
    loss: float = 0.0
    """Share of the packets."""
    jitter: float = 0.0
    """Standard deviation of the rate, bit/s."""
    queue: float = 0.1
    """Longest time that a packet may wait for its turn, in seconds; beyond it, it is dropped."""
    cut: bool = False
    """Drop everything."""

    def rate_in(self, second: int, key: str) -> float | None:
        """The rate in that second of the lab's life: a pure function, so that a seed gives the same links again."""
        if self.rate is None or not self.jitter:
            return self.rate
        return max(0.1 * self.rate, random.Random(f"{key}/{second}").gauss(self.rate, self.jitter))


def is_star(links: Sequence[Link]) -> bool:
    """One link for all boundaries: a host then has one uplink and one downlink for all its peers."""
    return len(set(links)) <= 1


def build_hops(links: Sequence[Link], star: bool) -> list[Hop]:
    """Hops of a lab with len(links) + 1 hosts: uplinks by host, downlinks by host, then (chain) both directions of each boundary."""
    hosts = len(links) + 1

    def hop(link: Link, rate: float | None, delay: float, loss: float) -> Hop:
        # As deep as home routers are: with less, the two or three connections of a stage overrun it and send again what was dropped.
        return Hop(rate=rate, delay=delay, loss=loss, jitter=link.jitter, queue=max(0.25, 2 * link.delay))

    if star:
        link = links[0] if links else Link()
        return [hop(link, link.up, link.delay, link.loss)] * hosts + [hop(link, link.down, 0.0, 0.0)] * hosts
    boundaries = [hop(link, slower(link.up, link.down), link.delay, link.loss) for link in links for _ in range(2)]
    return [Hop()] * (2 * hosts) + boundaries


def route(source: int, target: int, hosts: int, star: bool) -> list[int]:
    """Indices of the hops from host `source` to host `target`, in order."""
    if star:
        between = []
    elif source < target:
        between = [2 * hosts + 2 * boundary for boundary in range(source, target)]
    else:
        between = [2 * hosts + 2 * boundary + 1 for boundary in range(source - 1, target - 1, -1)]
    return [source, *between, hosts + target]


def slower(*rates: float | None) -> float | None:
    """The smallest of some rates, None being unlimited."""
    return min((rate for rate in rates if rate is not None), default=None)
