"""The kernel's own emulator: hosts joined by routers whose devices carry netem queues.

A star has one router with a port for each host; a chain has a router per host, joined to the next one. So each hop of
`paths` is the queue of one device, and both backends emulate the same network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinpipe.config import ThinpipeError
from thinpipe.lab.namespaces import DEVICE, run, set_sysctls
from thinpipe.lab.paths import Hop

_FRAME = 1500


class Place(NamedTuple):
    """The device at which a hop's packets queue."""

    namespace: str
    device: str


def works(scratch: str) -> bool:
    """Whether this kernel has netem: tried on the loopback device of a namespace."""
    try:
        run("tc", "-n", scratch, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except ThinpipeError:
        return False
    run("tc", "-n", scratch, "qdisc", "delete", "dev", "lo", "root")
    return True


def build(lab: str, hosts: Sequence[str], addresses: Sequence[str], star: bool) -> list[Place]:
    """Join the hosts' namespaces by routers; the place of each hop, in the order of `paths.build_hops`."""
    count = len(hosts)
    routers = [f"{lab}-r0"] if star else [f"{lab}-r{i}" for i in range(count)]
    run("ip", "-batch", "-", stdin="\n".join(f"netns add {router}" for router in routers))
    ports = [Place(routers[0 if star else i], f"port{i}") for i in range(count)]
    between = [] if star else [(Place(routers[i], "right"), Place(routers[i + 1], "left")) for i in range(count - 1)]
    for host, port in zip(hosts, ports, strict=True):
        _join(Place(host, DEVICE), port)
    for right, left in between:
        _join(right, left)
    for i, router in enumerate(routers):
        toward = [f"port{j}" if star or i == j else "right" if i < j else "left" for j in range(count)]
        run("ip", "-n", router, "-batch", "-", stdin="\n".join(f"route add {addresses[j]} dev {toward[j]}" for j in range(count)))
        set_sysctls(router, {"ipv4/ip_forward": "1"})
    return [Place(host, DEVICE) for host in hosts] + ports + [place for pair in between for place in pair]


def _join(one: Place, other: Place) -> None:
    """A pair of devices, up. No ARP, and one address for both ends: what one sends, the other takes for its own.

    A packet is never more than a frame (no segmentation offload), since netem's queue limit and losses count packets.
    """
    ends = f"netns {one.namespace}", f"peer name {other.device} netns {other.namespace}"
    run("ip", "link", "add", one.device, *ends[0].split(), "type", "veth", *ends[1].split())
    for place in (one, other):
        setting = f"link set {place.device} address 02:00:00:00:00:01 arp off mtu {_FRAME} gso_max_segs 1 up"
        run("ip", "-n", place.namespace, *setting.split())


def shape(place: Place, hop: Hop, rate: float | None) -> None:
    """Give the place the hop's delay, loss and queue, and this rate in bit/s (None: unlimited)."""
    packets = 100_000 if hop.rate is None else 100 + int((hop.queue + hop.delay) * hop.rate / 8 / _FRAME)
    loss = 100.0 if hop.cut else 100 * hop.loss
    setting = f"netem limit {packets} delay {1e6 * hop.delay:.0f}us loss {loss:g}% rate {rate or 0:.0f}bit"
    run("tc", "-n", place.namespace, "qdisc", "replace", "dev", place.device, "root", *setting.split())
