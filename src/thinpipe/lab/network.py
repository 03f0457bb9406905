"""`lab`: hosts joined by emulated links, as a context manager."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from thinpipe.config import ThinpipeError
from thinpipe.lab import namespaces, netem, requirements
from thinpipe.lab.links import Link
from thinpipe.lab.measure import Measured, measure
from thinpipe.lab.namespaces import DEVICE, PREFIX, inside, run
from thinpipe.lab.paths import build_hops, is_star, route, slower

_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x1001
_ANSWER_SECONDS = 30
_LARGEST = 65_000
_COUNT = itertools.count()
_NO_NAME_SERVER = "RES_OPTIONS=attempts:1 timeout:1"  # is in reach: torch's look-ups of its peers' names would wait ten seconds each
_SYSCTLS = {
    "ipv4/tcp_rmem": "4096 131072 67108864",  # a window of 64 MB fills 1 Gbit/s over a round trip of 500 ms
    "ipv4/tcp_wmem": "4096 65536 67108864",
    "ipv4/tcp_no_metrics_save": "1",  # what `measure` learnt of a path must not change how the training starts
    "ipv6/conf/default/disable_ipv6": "1",  # else the kernel's own chatter crosses the links; before the device is made
}


@dataclass(frozen=True)
class Host:
    """A machine of the lab."""

    name: str
    """Its network namespace: `ip netns exec NAME …` looks inside."""
    address: str
    """Its IPv4 address, on device wan0."""
    command_prefix: tuple[str, ...]
    """What stands before a command's argv so that it runs on this host."""


class Lab:
    """A running lab: made by `lab`, not by its constructor."""

    def __init__(self, links: Sequence[Link], hosts: int, seed: int, prefix: str) -> None:
        number = next(_COUNT)
        self.name = namespaces.lab_name(prefix, number)
        self.links, self.seed, self.star = tuple(links), seed, is_star(links)
        self.backend: Literal["netem", "tun"] = "tun"
        network = (os.getpid() + number) % 65536  # so that the addresses of several labs are told apart in logs
        self.hosts = []
        for i in range(hosts):
            name = f"{self.name}-h{i}"
            begin = ("ip", "netns", "exec", name, "env", _NO_NAME_SERVER)
            self.hosts.append(Host(name, f"10.{network >> 8}.{network & 255}.{i + 1}", begin))
        self._cut: set[int] = set()
        self._control: socket.socket | None = None
        self._emulator: subprocess.Popen[bytes] | None = None
        self._cpu = (time.monotonic(), 0.0)

    def measure(self) -> list[Measured]:
        """What each boundary really does between its two hosts, one boundary after another: about 3 s each.

        Raises ThinpipeError if one passes nothing.
        """
        return [measure(self.hosts[i], self.hosts[i + 1], link) for i, link in enumerate(self.links)]

    def emulator_cpu(self) -> float:
        """Share of one core that the emulator used since the last call (the first: since the start)."""
        now, used = time.monotonic(), self._ask({})["cpu"]
        (before, used_before), self._cpu = self._cpu, (now, used)
        return (used - used_before) / max(now - before, 1e-9)

    def set_link(self, link: Link, boundary: int | None = None) -> None:
        """Change a boundary's link, or all (None); packets under way keep the old delay, connections the old `cc`.

        Raises ThinpipeError where hosts share one link for all boundaries and one of them is named, or it doesn't exist.
        """
        if boundary is None:
            self.links = (link,) * len(self.links)
        elif self.star or not 0 <= boundary < len(self.links):
            raise ThinpipeError(f"lab: boundary = {boundary} has no link of its own; leave it out, or start with a link per boundary")
        else:
            self.links = tuple(link if i == boundary else old for i, old in enumerate(self.links))
        for i in range(len(self.hosts)):
            self._set_routes(i)
        self._apply()

    def cut(self, host: int) -> None:
        """Drop all packets from and to a host, by its index (IndexError: no such host). Connections live on, as with a pulled cable."""
        self._cut.add(range(len(self.hosts))[host])
        self._apply()

    def restore(self, host: int) -> None:
        """Undo `cut`."""
        self._cut.discard(range(len(self.hosts))[host])
        self._apply()

    def _hops(self) -> list[dict[str, Any]]:
        hops = build_hops(self.links, self.star)
        for host in self._cut:
            for i in (host, len(self.hosts) + host):
                hops[i] = replace(hops[i], cut=True)
        return [asdict(hop) for hop in hops]

    def _apply(self) -> None:
        self._ask({"hops": self._hops()})

    def _ask(self, message: dict[str, Any], devices: Sequence[int] = ()) -> dict[str, Any]:
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], devices)
            answer = self._control.recv(1 << 16)
        except OSError as error:
            raise ThinpipeError(f"lab: the emulator of {self.name} doesn't answer ({error}); start the lab again") from None
        if not answer:
            raise ThinpipeError(f"lab: the emulator of {self.name} has ended; start the lab again")
        told: dict[str, Any] = json.loads(answer)
        if "error" in told:
            raise ThinpipeError(told["error"])
        return told

    def _start(self, backend: Literal["auto", "netem", "tun"]) -> None:
        # The emulator comes first: from here on, nothing outlives us, however we end.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._emulator = subprocess.Popen(
                [sys.executable, "-m", "thinpipe.lab.emulator", self.name],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the owner, which still needs the network to stop in order
                cwd=Path(__file__).parents[2],
            )
        run("ip", "-batch", "-", stdin="\n".join(f"netns add {host.name}" for host in self.hosts))
        for host in self.hosts:
            namespaces.set_sysctls(host.name, _SYSCTLS)
        self.backend = requirements.choose_backend(self.hosts[0].name) if backend == "auto" else backend
        devices: list[int] = []
        try:
            places: list[netem.Place] = []
            if self.backend == "netem":
                places = netem.build(self.name, [host.name for host in self.hosts], [host.address for host in self.hosts], self.star)
            else:
                devices += [_open_tun(host.name) for host in self.hosts]
            for i in range(len(self.hosts)):
                self._set_up(i)
            start = {"backend": self.backend, "hops": self._hops(), "star": self.star, "seed": self.seed, "places": places}
            self._ask(start, devices)
        finally:
            for device in devices:
                os.close(device)

    def _set_up(self, i: int) -> None:
        host = self.hosts[i]
        size = "" if self.backend == "netem" else f"mtu {_LARGEST} txqueuelen 1000"
        lines = ["link set lo up", f"link set {DEVICE} {size} up", f"address add {host.address}/24 dev {DEVICE}"]
        run("ip", "-n", host.name, "-batch", "-", stdin="\n".join(lines))
        self._set_routes(i)

    def _set_routes(self, i: int) -> None:
        """A route to each peer, for what TCP must know of the path: the size of a packet and the congestion control."""
        hops, lines = build_hops(self.links, self.star), []
        for j, peer in enumerate(self.hosts):
            if i == j:
                continue
            path = [hops[hop] for hop in route(i, j, len(self.hosts), self.star)]
            wanted = [link.cc for link in self.links[min(i, j) : max(i, j)] if link.cc]
            mtu = _packet_bytes(slower(*(hop.rate for hop in path)), lossy=any(hop.loss for hop in path))
            size = "" if self.backend == "netem" else f"mtu {mtu}"
            cc = f"congctl {wanted[0]}" if wanted else ""
            lines.append(f"route replace {peer.address} dev {DEVICE} src {self.hosts[i].address} {size} {cc}")
        try:
            run("ip", "-n", self.hosts[i].name, "-batch", "-", stdin="\n".join(lines))
        except ThinpipeError:
            _check_congestion_control(self.links)
            raise

    def _close(self) -> None:
        try:
            namespaces.remove(namespaces.names(self.name))
            if self._emulator is not None:
                self._emulator.kill()  # it has nothing left to do
        finally:  # if we were interrupted, the end of the socket tells the emulator to remove the lab
            if self._control is not None:
                self._control.close()
            if self._emulator is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._emulator.wait(10)


def _packet_bytes(rate: float | None, lossy: bool) -> int:
    """The largest packet of a TUN path with that rate in bit/s.

    Python carries some 10,000 packets per second, so that packets grow with the rate: 1 ms of it. A loss-based congestion
    control lives on packets per loss, so that a lossy path keeps to packets of 1,500 bytes up to 120 Mbit/s.
    """
    if rate is None:
        return _LARGEST
    return int(min(_LARGEST, max(1500, rate / 8 / (10_000 if lossy else 1000))))


def _open_tun(namespace: str) -> int:
    """The descriptor of a new TUN device in the namespace; the device lives as long as it is open."""
    try:
        with inside(namespace):
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22s", DEVICE.encode(), _IFF_TUN_NO_PI, b""))
    except OSError as error:
        raise ThinpipeError(f"lab: can't make a TUN device ({error}); modprobe tun (in a container: --device /dev/net/tun)") from None
    return device


def _check_congestion_control(links: Sequence[Link]) -> None:
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    for link in links:
        if link.cc and link.cc not in available:
            raise ThinpipeError(
                f"--link {link}: cc={link.cc} is not in this kernel, which has {', '.join(available)}; try modprobe tcp_{link.cc}"
            )


@contextmanager
def lab(
    links: Link | Sequence[Link],
    hosts: int,
    seed: int = 0,
    prefix: str = PREFIX,
    backend: Literal["auto", "netem", "tun"] = "auto",
) -> Iterator[Lab]:
    """`hosts` network namespaces joined by emulated links; all of it, and all that runs inside, is gone afterwards.

    One link (or equal ones) for all boundaries gives each host one uplink and one downlink for all its peers; different
    links, one per boundary, make a chain (see `paths`). `seed` fixes losses and jitter. Labs whose owner
    died are cleaned up first. Namespaces are called PREFIX-…; needs Linux and root, or `unshare -rmn` before the command.

    Raises ThinpipeError with the remedy if the machine lacks something or the arguments don't agree.
    """
    links = [links] if isinstance(links, Link) else list(links)
    if not 1 <= hosts <= 250:
        raise ThinpipeError(f"lab: hosts = {hosts} is out of range; use 1 to 250")
    if len(links) not in (1, hosts - 1):
        raise ThinpipeError(f"lab: {len(links)} links for {hosts} hosts; give one for all, or {hosts - 1}")
    if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", prefix):
        raise ThinpipeError(f"lab: prefix = {prefix!r} can't name namespaces; use up to 16 lower-case letters and digits")
    requirements.check()
    namespaces.clean(prefix)
    net = Lab(links * (hosts - 1) if len(links) == 1 else links, hosts, seed, prefix)
    try:
        net._start(backend)
        yield net
    finally:
        net._close()
