"""Which stage this process is, who its peers are, and the one process group; the only reader of RANK and its kin.

Every wait has the deadline `network.timeout`. Nothing here pickles: what is exchanged is tensors or JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .config import ThinpipeError

# Gloo matches messages by (sender, receiver, tag), in order.
STEP_TAG, TALLY_TAG, TIED_TAG, DECODE_TAG, EVALUATE_TAG = range(5)


def under_launcher() -> bool:
    """Whether this process was started as one of several (torchrun's environment)."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@dataclass(eq=False)
class Topology:
    """A process's place in the pipeline.

    Attributes:
        stage, stages: this process's stage and their number.
        host: name of this machine, for messages.
        local_rank, local_world: place among the processes of this machine.
        group: the process group of the pipeline; its rank r is stage r.
    """

    stage: int
    stages: int
    host: str
    local_rank: int
    local_world: int
    group: dist.ProcessGroup

    @property
    def place(self) -> int:
        """This machine's place in the pipeline."""
        return self.stage // self.local_world

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def __str__(self) -> str:
        return f"stage {self.stage} on {self.host}"

    def isend(self, tensor: torch.Tensor, stage: int, tag: int) -> dist.Work:
        assert tensor.is_contiguous()
        work = dist.isend(tensor, group=self.group, group_dst=stage, tag=tag)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, stage: int, tag: int) -> dist.Work:
        assert tensor.is_contiguous()
        work = dist.irecv(tensor, group=self.group, group_src=stage, tag=tag)
        assert work is not None
        return work

    def wait(self, work: dist.Work, stage: int) -> None:
        """Wait for a transfer with `stage`. Raises PeerLost that names it."""
        with self.naming_peers(stage):
            work.wait()

    def gather(self, value: Any) -> list[Any]:
        """Every stage's `value` (JSON), in the order of stages, on every stage."""
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.stages)]
        dist.all_gather(sizes, torch.tensor([payload.numel()]), group=self.group)
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        received = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.stages)]
        dist.all_gather(received, padded, group=self.group)
        return [json.loads(bytes(r[: int(n)].numpy())) for r, n in zip(received, sizes, strict=True)]

    def broadcast(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Fill `tensor` (in host memory) with that stage's; returns it."""
        assert tensor.is_contiguous()  # Gloo sends the memory as it lies, a transposed tensor too
        dist.broadcast(tensor, group=self.group, group_src=stage)
        return tensor

    def require_equal(self, what: str, value: Any, remedy: str) -> None:
        """Raise ThinpipeError that names the first stage whose `value` (JSON) differs from stage 0's."""
        everyone = self.gather([self.host, value])
        for stage, (host, theirs) in enumerate(everyone):
            if theirs != everyone[0][1]:
                raise ThinpipeError(f"{what} differs between stage 0 on {everyone[0][0]} and stage {stage} on {host}; {remedy}")

    @contextlib.contextmanager
    def naming_peers(self, *peers: int) -> Iterator[None]:
        """Turn a transfer that fails into one line that names this stage and the peers (none given: its neighbours)."""
        try:
            yield
        except PeerLost:
            raise
        except RuntimeError as error:
            text = _innermost(error)
            lost = "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text
            silent = "imed out" in text or "timeout" in text.lower()
            if not (lost or silent):
                raise
            named = peers or [s for s in (self.stage - 1, self.stage + 1) if 0 <= s < self.stages]
            what = "lost the connection to" if lost else "heard nothing (network.timeout) from"
            raise PeerLost(f"{self} {what} {' or '.join(f'stage {s}' for s in named)}") from error


class PeerLost(ThinpipeError):
    """A neighbour died, froze or became unreachable."""

    status = 1


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`. Raises ThinpipeError if there is no way or no such name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing: UDP connect only chooses a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ThinpipeError(f"no way to {host} ({error}); check the name and this machine's network") from None


def refuse_public(*addresses: str) -> None:
    """Raises ThinpipeError if one is public: nothing of a run is encrypted or authenticated."""
    for address in addresses:
        if ipaddress.ip_address(address).is_global:
            raise ThinpipeError(
                f"{address} is a public address, where anybody could read the run and join it; put the machines into a mesh "
                "(thinpipe mesh) and meet at an address inside, or say network.insecure = true"
            )


def _interface_of(address: str) -> str | None:
    """Name of the network interface whose first address this is (Linux; else None).

    Gloo takes the address that the machine's name resolves to, which is 127.0.0.1 on many systems.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def side_group(store: dist.Store, rank: int, size: int, threads: int, meet: float, timeout: float) -> Any:
    """A Gloo group beside the pipeline's, on the same network interface; torch's registry doesn't know it, so it just goes.

    Args:
        store: where its members find each other, within `meet` seconds.
        threads: operations under way at the same time.
        timeout: seconds that an operation may last.

    Returns a ProcessGroupGloo (Any, since torch's types leave its methods out). Raises RuntimeError if they don't meet.
    """
    kind: Any = dist.ProcessGroupGloo
    options, names = kind._Options(), os.environ.get("GLOO_SOCKET_IFNAME", "")
    options._devices = [kind.create_device(interface=name) for name in names.split(",") if name] or [kind.create_default_device()]
    options._timeout, options._threads = timedelta(seconds=meet), threads
    group = kind(store, rank, size, options)
    group._set_default_timeout(timedelta(seconds=timeout))
    return group


def listen_on(host: str, port: int) -> int:
    """Descriptor of a socket that listens on one address of this machine; a store that is handed it listens nowhere else.

    Raises OSError if the port is taken there.
    """
    return socket.create_server((host, port), backlog=512).detach()


def _open_store(master: str, port: int, rank: int, world: int, deadline: timedelta) -> dist.TCPStore:
    """Where the stages find each other; the first one holds it, unless torchrun does."""
    holds, listener = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True", None
    if holds:
        with contextlib.suppress(ValueError):  # a name may mean another address here (127.0.1.1) than elsewhere: all addresses then
            listener = listen_on(str(ipaddress.IPv4Address(master)), port)
    return dist.TCPStore(master, port, world, is_master=holds, timeout=deadline, master_listen_fd=listener)


def usable_cores() -> int:
    """Of this machine, by this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _stage_of(store: dist.Store, rank: int, world: int, wanted: int | None, before: int | None) -> int:
    """This process's stage: its machine's place is the one it wants, else the one it had before, else one that is left."""
    local, machine = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("GROUP_RANK", "0"))
    store.set(f"place/{rank}", json.dumps([machine, wanted, before, local]))
    told = [json.loads(store.get(f"place/{r}")) for r in range(world)]
    store.set(f"read/{rank}", "")
    if rank == 0:  # holds the store: if it ended over what it has read, the others could not read it
        store.wait([f"read/{r}" for r in range(world)])
    machines = {machine: (wanted, before) for machine, wanted, before, _ in told}
    places = {machine: wanted for machine, (wanted, _) in machines.items() if wanted is not None}
    if len(set(places.values())) != len(places):
        raise ThinpipeError("network.node_rank is the same on two machines; give each its own")
    if places and max(places.values()) >= len(machines):
        raise ThinpipeError(
            f"network.node_rank = {max(places.values())} names no place: with {len(machines)} machines the last is {len(machines) - 1}"
        )
    left = set(range(len(machines))) - set(places.values())
    # Who stays where it was has its checkpoints there; a machine without a past takes a lost one's place.
    for machine, (_, before) in sorted(machines.items()):
        if machine not in places and before in left:
            places[machine] = before
            left.remove(before)
    places |= zip(sorted(machines.keys() - places.keys()), sorted(left), strict=True)
    return sorted(range(world), key=lambda r: (places[told[r][0]], told[r][3])).index(rank)


@contextlib.contextmanager
def connect(timeout: float, node_rank: int | None = None, before: int | None = None, insecure: bool = False) -> Iterator[Topology]:
    """Join the processes of this run, or be a pipeline of one when started alone.

    Args:
        timeout: seconds that any wait for a peer may last.
        node_rank: this machine's place in the pipeline (None: the one it had before, else one that is left).
        before: its place in an earlier life of the run, if it had one.
        insecure: whether this machine's address may be public.

    Raises:
        PeerLost: the others did not come within the deadline.
        ThinpipeError: places don't agree.
    """
    deadline = timedelta(seconds=timeout)
    env = os.environ
    if under_launcher():
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        local = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        master, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        try:
            address = address_towards(master, port)
            if not insecure:
                refuse_public(address)
            if (interface := _interface_of(address)) is not None:
                env.setdefault("GLOO_SOCKET_IFNAME", interface)
            elif sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in env and not ipaddress.ip_address(address).is_loopback:
                # Left to itself Gloo would listen at whatever this machine's name means, a public address perhaps.
                raise ThinpipeError(
                    f"{address} is not the first address of a network interface, and Gloo listens at that one only; "
                    "make it the first, or meet at an address on the way of the first (network.rdzv)"
                )
            store = _open_store(master, port, rank, world, deadline)
            rank = _stage_of(store, rank, world, node_rank, before)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=deadline)
        except ThinpipeError:
            raise
        except (OSError, RuntimeError, ValueError) as error:
            raise PeerLost(f"stage {rank} can't reach {master}:{port} or a peer within {timeout:g} s (network.timeout): {error}") from error
    else:
        rank, world, local = 0, 1, (0, 1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=deadline)
    here = Topology(rank, world, socket.gethostname(), *local, dist.distributed_c10d._get_default_group())
    try:
        yield here
    finally:
        dist.destroy_process_group()
        # The last reference: Gloo's threads are joined here. One that still holds a tensor of Python's when the
        # interpreter ends aborts the process.
        del here.group
