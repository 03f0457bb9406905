"""The mesh between namespaces: members train through it; an outsider on the same network and a revoked machine reach nothing."""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from thinpipe import mesh
from thinpipe.config import ThinpipeError, dump, from_dict
from thinpipe.lab import Host, lab, parse_link, unavailable
from thinpipe.lab.namespaces import DEVICE, inside
from thinpipe.metrics import read_events


def _missing() -> str | None:
    for tool, package in (("wg", "wireguard-tools"), ("wireguard-go", "wireguard-go"), ("nft", "nftables"), ("nsenter", "util-linux")):
        if shutil.which(tool) is None:
            return f"needs {tool}; apt-get install {package}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs /dev/net/tun"
    return unavailable()


_REASON = _missing()
requires_net = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
PORT, EVERYWHERE = 29400, 29500
SECRET = b"the numbers of a boundary " * 40


@dataclass(frozen=True)
class Machine:
    """A host with a key and a list of its own."""

    host: Host
    prefix: tuple[str, ...]
    folder: Path
    inside: str = ""

    def run(self, *argv: str, status: int = 0) -> str:
        """`thinpipe ARGV` on this machine; what it said."""
        done = subprocess.run([*self.prefix, sys.executable, "-m", "thinpipe", *argv], capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def up(self, members: mesh.Mesh) -> None:
        mesh.save(members, self.folder / "mesh.toml")
        self.run("mesh", "up", str(self.folder / "mesh.toml"), "--key", str(self.folder / "mesh.key"))

    def addresses(self, device: str) -> str:
        command = [*self.prefix, "ip", "-4", "-br", "address", "show", "dev", device]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    def listen(self, address: str, port: int) -> socket.socket:
        with inside(self.host.name):
            return socket.create_server((address, port))

    def connect(self, address: str, port: int) -> socket.socket:
        with inside(self.host.name):
            made = socket.socket()
        made.settimeout(10)
        made.connect((address, port))
        return made

    def reaches(self, *doors: tuple[str, int], within: float = 1.0) -> list[bool]:
        """To which of them a connection comes about; round trips take 4 ms, a lost handshake is tried again after 5 s."""
        poll, tried = select.poll(), []
        for door in doors:
            with inside(self.host.name):
                tried.append(socket.socket())
            tried[-1].setblocking(False)
            with suppress(BlockingIOError):
                tried[-1].connect(door)
            poll.register(tried[-1], select.POLLOUT)
        deadline, open_ = time.monotonic() + within, set[int]()
        while len(open_) < len(doors) and (left := deadline - time.monotonic()) > 0:
            for descriptor, event in poll.poll(1e3 * left):
                poll.unregister(descriptor)
                open_ |= {descriptor} if event == select.POLLOUT else set()
        answers = [each.fileno() in open_ for each in tried]
        for each in tried:
            each.close()
        return answers

    def listening(self) -> list[tuple[str, int]]:
        """Every TCP address that something on this machine listens at."""
        found = []
        for version in ("tcp", "tcp6"):
            shown = subprocess.run(
                [*self.prefix, "cat", f"/proc/net/{version}"], capture_output=True, text=True, timeout=20, check=True
            ).stdout
            for fields in map(str.split, shown.splitlines()[1:]):
                if fields[3] == "0A":
                    address, port = fields[1].split(":")
                    found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]) if version == "tcp" else address, int(port, 16)))
        return found


@contextmanager
def machines(tmp_path: Path, count: int, link: str = "80mbit,2ms") -> Iterator[list[Machine]]:
    """Hosts on one network. Each has a /run of its own: wireguard-go keeps a socket there by its device's name."""
    with ExitStack() as stack:
        net = stack.enter_context(lab(parse_link(link), count, prefix="thinpipemesh", backend="tun"))
        made = []
        for i, host in enumerate(net.hosts):
            hold = [*host.command_prefix, "unshare", "-m", "sh", "-c", "mount -t tmpfs none /run && echo ready && exec sleep infinity"]
            holder = subprocess.Popen(hold, stdout=subprocess.PIPE, text=True)
            stack.callback(holder.communicate)
            stack.callback(holder.kill)
            assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
            folder = tmp_path / f"machine-{i}"
            folder.mkdir()
            prefix = ("nsenter", "-t", str(holder.pid), "-m", "-n", "env", "OMP_NUM_THREADS=1", "RES_OPTIONS=attempts:1 timeout:1")
            made.append(Machine(host, prefix, folder, f"10.77.0.{i + 1}"))
        yield made


def join(members: mesh.Mesh, machine: Machine) -> mesh.Mesh:
    return mesh.add(members, machine.folder.name, mesh.make_key(machine.folder / "mesh.key"), machine.host.address)


def bring_up(members: mesh.Mesh, *wanted: Machine) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda machine: machine.up(members), wanted))


@contextmanager
def wire(machine: Machine, device: str = DEVICE) -> Iterator[list[bytes]]:
    """All packets that this machine sends on a device, once the block has ended."""
    sent: list[bytes] = []
    with inside(machine.host.name):
        capture = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
    with capture:
        capture.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
        capture.bind((device, 3))
        capture.setblocking(False)
        yield sent
        seen, dropped = struct.unpack("II", capture.getsockopt(263, 6, 8))  # PACKET_STATISTICS
        assert seen and not dropped
        while True:
            try:
                packet, (_, _, kind, *_) = capture.recvfrom(65536)
            except BlockingIOError:
                break
            if kind == socket.PACKET_OUTGOING:
                sent.append(packet)


def assert_only_the_tunnel(sent: list[bytes], peers: list[Machine]) -> None:
    """IPv4, UDP, from and to the tunnel's port, to a peer, and of WireGuard's four kinds of message."""
    assert sent
    for packet in sent:
        header = 4 * (packet[0] & 15)
        assert (packet[0] >> 4, packet[9]) == (4, socket.IPPROTO_UDP), packet[:40]
        assert struct.unpack(">HH", packet[header : header + 4]) == (51820, 51820)
        assert socket.inet_ntoa(packet[16:20]) in [peer.host.address for peer in peers]
        assert packet[header + 8] in (1, 2, 3, 4) and packet[header + 9 : header + 12] == bytes(3)
        assert SECRET[:20] not in packet and b"torch.rendezvous" not in packet


@requires_net
def test_outsiders_and_revoked_machines_reach_nothing(tmp_path: Path) -> None:
    with machines(tmp_path, 4) as (a, b, c, outsider), ExitStack() as stack:
        members = mesh.Mesh(mtu=1420)
        for machine in (a, b, c):
            members = join(members, machine)
        taken = dataclasses.replace(members, subnet="10.0.0.0/8")
        with inside(a.host.name), pytest.raises(ThinpipeError, match=rf"holds {DEVICE}'s address {a.host.address}; choose another"):
            mesh.bring_up(taken, a.folder / "mesh.key")
        bring_up(members, a, b, c)
        for at in ((a.inside, PORT), ("0.0.0.0", EVERYWHERE)):
            stack.enter_context(a.listen(*at))
        inner = stack.enter_context(a.listen(a.inside, PORT + 1))
        doors = [(a.inside, PORT), (a.inside, EVERYWHERE), (a.host.address, EVERYWHERE)]
        # The outsider's packets for an address inside reach the machine's public device: it needs the firewall, not only the tunnel.
        subprocess.run(["ip", "-n", outsider.host.name, "route", "add", "10.77.0.0/24", "dev", DEVICE], check=True)
        subprocess.run([*a.prefix, "nft", "delete", "table", "inet", members.device], check=True)
        assert outsider.reaches(*doors) == [True] * 3
        a.up(members)
        assert outsider.reaches(*doors) == [False] * 3
        assert c.reaches(*doors[:2], within=40.0) == [True] * 2 and c.reaches(doors[2]) == [False]

        with wire(a) as from_a, wire(b) as from_b, wire(b, members.device) as within:
            kept, kept_end, lost, lost_end = ends = [
                stack.enter_context(end) for client in (b, c) for end in (client.connect(a.inside, PORT + 1), inner.accept()[0])
            ]
            for end in ends:
                end.settimeout(1.0)
            lost.sendall(b"before")
            assert lost_end.recv(100) == b"before"

            left = mesh.revoke(members, c.folder.name)
            bring_up(left, a, b)
            kept.sendall(SECRET)
            assert kept_end.recv(len(SECRET), socket.MSG_WAITALL) == SECRET  # the tunnels that stay never broke
            lost.sendall(b"after")
            with pytest.raises(TimeoutError):
                lost_end.recv(100)
            assert c.reaches(*doors) == [False] * 3
            refused = c.run("mesh", "up", str(a.folder / "mesh.toml"), "--key", str(c.folder / "mesh.key"), status=2)
            assert "is not in the mesh: it was revoked" in refused

            # The list is no secret: the outsider has it, writes itself into it and knocks with a key of its own.
            subprocess.run(["ip", "-n", outsider.host.name, "route", "del", "10.77.0.0/24", "dev", DEVICE], check=True)
            outsider.up(join(left, outsider))
            assert outsider.reaches(*doors) == [False] * 3
        assert any(SECRET[:20] in packet for packet in within)  # so that this would be seen on the wire too
        for sent, peers in ((from_a, [b, c]), (from_b, [a, c])):
            assert_only_the_tunnel(sent, peers)

        private = (a.folder / "mesh.key").read_text().strip()
        assert private not in a.run("mesh", "show", str(a.folder / "mesh.toml"))
        assert outsider.reaches(doors[2]) == [False]

        # A list that gives a machine another address: the old one may be somebody else's from now on.
        moved = dataclasses.replace(left, machines=(dataclasses.replace(left.machines[0], address="10.77.0.200"), *left.machines[1:]))
        a.up(moved)
        assert "10.77.0.200/24" in a.addresses(members.device) and a.inside not in a.addresses(members.device)
        a.run("mesh", "down", str(a.folder / "mesh.toml"))
        devices = subprocess.run([*a.prefix, "ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
        tables = subprocess.run([*a.prefix, "nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
        assert members.device not in devices and not tables and outsider.reaches(doors[2]) == [True]


@requires_net
@pytest.mark.slow
def test_training_through_the_mesh(tmp_path: Path, corpus: dict[str, Any]) -> None:
    path, run = tmp_path / "config.toml", tmp_path / "run"
    groups = {"pipeline": {"stages": 3, "micro_batches": 4}, "train": {"steps": 100, "eval_every": 0}}
    path.write_text(dump(from_dict(tiny(data=corpus, **groups))))
    meet = ["train", str(path), "--network.nodes", "3", "--network.rdzv", f"10.77.0.1:{PORT}"]
    with machines(tmp_path, 4) as (*members, outsider), ExitStack() as stack:
        listed = mesh.Mesh()
        for machine in members:
            listed = join(listed, machine)
        bring_up(listed, *members)
        subprocess.run(["ip", "-n", outsider.host.name, "route", "add", "10.77.0.0/24", "dev", DEVICE], check=True)
        sent = [stack.enter_context(wire(machine)) for machine in members]
        began = [
            subprocess.Popen(
                [*machine.prefix, sys.executable, "-m", "thinpipe", *meet, "--network.addr", machine.inside, "--run.dir", str(run)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for machine in members
        ]
        deadline = time.monotonic() + 120
        while not steps(run):
            assert time.monotonic() < deadline and all(process.poll() is None for process in began)
            time.sleep(0.1)
        for machine in members:
            doors = machine.listening()
            assert doors and {address for address, _ in doors} <= {machine.inside, "127.0.0.1"}, doors
            knocks = [(address, port) for _, port in doors for address in (machine.inside, machine.host.address)]
            assert not any(outsider.reaches(*knocks))
        assert all(process.poll() is None for process in began), "the run was to be knocked at while it ran"
        refused = outsider.run(*meet, "--network.patience", "1", status=2)
        assert "nobody listens" in refused
        said = [process.communicate(timeout=120) for process in began]
        assert [process.returncode for process in began] == [0, 0, 0], said
        assert steps(run) == 100 and "starting again" not in said[0][1]

        subprocess.run(["ip", "-n", members[0].host.name, "address", "add", "9.9.9.9/32", "dev", "lo"], check=True)
        public = ["train", str(path), "--network.nodes", "3", "--network.rdzv", f"9.9.9.9:{PORT}"]
        assert "9.9.9.9 is a public address" in members[0].run(*public, status=2)
        stack.close()
    for machine, packets in zip(members, sent, strict=True):
        assert_only_the_tunnel(packets, [other for other in members if other is not machine])
    private = [(machine.folder / "mesh.key").read_text().strip() for machine in members]
    for file in run.rglob("*"):
        assert not file.is_file() or not any(key.encode() in file.read_bytes() for key in private), file


def steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return sum(event["event"] == "step" for event in read_events(metrics)) if metrics.exists() else 0
