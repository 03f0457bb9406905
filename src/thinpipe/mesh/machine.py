"""What changes this machine: its key, the tunnel's device and the firewall's table. Needs root, wireguard-tools and nftables.

The private key is made here and stays here, in one file that only its owner can read. It reaches `wg` through a pipe: no
argument, no environment, no log, no other file ever holds it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from thinpipe.commands import run_command
from thinpipe.errors import ThinpipeError
from thinpipe.mesh.files import firewall, wireguard
from thinpipe.mesh.members import Machine, Mesh, is_key

KEY = Path("/etc/thinpipe/mesh.key")
"""This machine's private key, for all its meshes."""
_COMMAND_SECONDS = 60
# A name that has no address yet is asked for again twice, not for minutes; wireguard-go with a log keeps our pipe open for ever.
_ENVIRONMENT = {"WG_ENDPOINT_RESOLUTION_RETRIES": "2", "LOG_LEVEL": ""}
_PACKAGES = {"wg": "wireguard-tools", "nft": "nftables", "ip": "iproute2", "ss": "iproute2", "wireguard-go": "wireguard-go"}


def _run(*argv: str, stdin: str = "") -> str:
    """Standard output of a command. Raises ThinpipeError with the first line that it said on failure, never with `stdin`."""
    return run_command(*argv, by="mesh", package=_PACKAGES[argv[0]], seconds=_COMMAND_SECONDS, stdin=stdin, env=os.environ | _ENVIRONMENT)


def _works(*argv: str) -> bool:
    with suppress(ThinpipeError):
        _run(*argv)
        return True
    return False


def _need_root() -> None:
    if os.geteuid():
        raise ThinpipeError("mesh: needs root; put sudo before the command")


def make_key(file: Path = KEY) -> str:
    """This machine's public key. Where it has no key yet, one is made and its private half written to `file`, mode 0600.

    Raises ThinpipeError if the file is not a key, or others may read it.
    """
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = _run("wg", "genkey")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(private)
    return _public(_private(file))


def _private(file: Path) -> str:
    try:
        mode, text = file.stat().st_mode, file.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        raise ThinpipeError(f"{file}: this machine has no key yet; make one with thinpipe mesh key") from None
    if mode & 0o077:
        raise ThinpipeError(f"{file}: others may read this private key; chmod 600 it, or remove it and make another with thinpipe mesh key")
    if not is_key(text):
        raise ThinpipeError(f"{file} holds no WireGuard key; remove it and make one with thinpipe mesh key")
    return text


def _public(private: str) -> str:
    return _run("wg", "pubkey", stdin=private).strip()


def bring_up(mesh: Mesh, key: Path = KEY) -> Machine:
    """Put this machine into the mesh, or apply a changed list: tunnels that stay are not interrupted.

    The firewall comes first, so that nothing is open for a moment; a first `up` that fails leaves nothing behind.
    Returns this machine's entry.

    Raises ThinpipeError if its key is not in the list, the network or ssh would be cut off, or a command failed.
    """
    _need_root()
    private = _private(key)
    public = _public(private)
    here = next((machine for machine in mesh.machines if machine.key == public), None)
    if here is None:
        raise ThinpipeError(f"this machine's key {public} is not in the mesh: it was revoked, or not yet added (thinpipe mesh add)")
    _refuse_overlap(mesh)
    refuse_lockout(mesh)
    device, table = _is_up(mesh), _is_shut(mesh)
    try:
        _run("nft", "-f", "-", stdin=firewall(mesh))
        if not device:
            _add_device(mesh.device)
        _run("wg", "syncconf", mesh.device, "/dev/stdin", stdin=wireguard(mesh, here, private))
        for name, old in _addresses():
            if name == mesh.device and str(old.ip) != here.address:  # the list has changed: it may be another machine's now
                _run("ip", "address", "delete", str(old), "dev", mesh.device)
        _run("ip", "address", "replace", f"{here.address}/{mesh.network.prefixlen}", "dev", mesh.device)
        _run("ip", "link", "set", mesh.device, "mtu", str(mesh.mtu), "up")
    except ThinpipeError:
        if not (device or table):
            with suppress(ThinpipeError):
                bring_down(mesh)
        raise
    return here


def bring_down(mesh: Mesh) -> bool:
    """Remove what `bring_up` made: the device and the firewall's table. Returns whether there was any. Raises ThinpipeError."""
    _need_root()
    device, table = _is_up(mesh), _is_shut(mesh)
    if device:
        _run("ip", "link", "delete", mesh.device)  # wireguard-go ends with it
    if table:
        _run("nft", "delete", "table", "inet", mesh.device)
    return device or table


def _is_up(mesh: Mesh) -> bool:
    return _works("ip", "link", "show", "dev", mesh.device)


def _is_shut(mesh: Mesh) -> bool:
    return _works("nft", "list", "table", "inet", mesh.device)


def _add_device(device: str) -> None:
    """A WireGuard device, the kernel's where it has WireGuard, else wireguard-go's."""
    if _works("ip", "link", "add", device, "type", "wireguard"):
        return
    if shutil.which("wireguard-go") is None:
        raise ThinpipeError("mesh: this kernel has no WireGuard (modprobe wireguard), and there is no other; apt-get install wireguard-go")
    _run("wireguard-go", device)


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Interface]]:
    """This machine's devices and their addresses."""
    for device in json.loads(_run("ip", "-json", "-4", "address")):
        for address in device.get("addr_info", []):
            yield device["ifname"], ipaddress.IPv4Interface(f"{address['local']}/{address['prefixlen']}")


def _refuse_overlap(mesh: Mesh) -> None:
    """The firewall drops what comes from elsewhere for the mesh's addresses: they must be nobody else's."""
    for device, address in _addresses():
        if device != mesh.device and address.ip in mesh.network:
            raise ThinpipeError(f"subnet = {mesh.subnet} holds {device}'s address {address.ip}; choose another subnet")


def refuse_lockout(mesh: Mesh) -> None:
    """Raise ThinpipeError if an ssh server listens on a port that would be shut; with `open = []` that is what the user wants."""
    for line in _run("ss", "-Hltnp").splitlines():
        host, _, port = line.split()[3].rpartition(":")
        forwarded = host.startswith("127.") or host == "[::1]"  # by somebody's ssh session
        if '"sshd"' in line and not forwarded and mesh.open and int(port) not in mesh.open:
            raise ThinpipeError(f"open = {list(mesh.open)} would shut port {port}, where this machine's ssh listens; add it to the list")


def describe(mesh: Mesh) -> dict[str, Any]:
    """The mesh as this machine sees it.

    Returns `mesh`, `subnet`, `up` (whether here), `machines`: list of {`name`, `address`, `endpoint`, `key`, `here`, `handshake`
    (when the tunnel last agreed on keys, Unix time; null: never), `received`, `sent` (bytes)}; and `revoked`: keys that this
    machine still lets in, though the list has them no more. What the tunnel knows needs root.
    """
    known: dict[str, tuple[int, ...]] = {}
    own, up = "", _is_up(mesh)
    if up:
        _need_root()
        own = _run("wg", "show", mesh.device, "public-key").strip()
        # Not `wg show DEVICE dump`, which tells the private key.
        for what in ("latest-handshakes", "transfer"):
            for key, *figures in map(str.split, _run("wg", "show", mesh.device, what).splitlines()):
                known[key] = (*known.get(key, ()), *map(int, figures))
    machines = []
    for machine in mesh.machines:
        handshake, received, sent = known.get(machine.key, (0, 0, 0))
        told = {"name": machine.name, "address": machine.address, "endpoint": machine.endpoint, "key": machine.key}
        machines.append({**told, "here": machine.key == own, "handshake": handshake or None, "received": received, "sent": sent})
    revoked = sorted(known.keys() - {machine.key for machine in mesh.machines})
    return {"mesh": mesh.name, "subnet": mesh.subnet, "up": up, "machines": machines, "revoked": revoked}


def lines(told: dict[str, Any]) -> dict[str, str]:
    """`describe`'s answer for people: a line for each machine."""
    rows = {}
    for machine in told["machines"]:
        at = f"{machine['address']}, {machine['endpoint'] or 'behind NAT'}"
        if machine["here"]:
            at += ", this machine"
        elif machine["handshake"]:
            ago = max(0.0, time.time() - machine["handshake"])
            at += f", keys agreed {ago:.0f} s ago, {machine['received']:,} bytes received, {machine['sent']:,} sent"
        elif told["up"]:
            at += ", never heard of"
        rows[machine["name"]] = at
    return rows | dict.fromkeys(told["revoked"], "NOT IN THE LIST and still let in: run thinpipe mesh up")
