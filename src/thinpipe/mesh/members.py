"""The list of a mesh's machines: one TOML file, the same on all of them, that holds no secret."""

from __future__ import annotations

import base64
import dataclasses
import ipaddress
import json
import os
import re
import tomllib
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinpipe.errors import ThinpipeError, check_type

_PRIVATE = [ipaddress.IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")]
_ENDPOINT = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?")
_HEAD = "# The machines of a mesh, the same file on all. Holds no secret. Kept by `thinpipe mesh add` and `revoke`; you may edit it.\n"


@dataclass(frozen=True, kw_only=True)
class Machine:
    name: str
    address: str
    """Its IPv4 address inside the mesh."""
    key: str
    """Its public key."""
    endpoint: str = ""
    """HOST or HOST:PORT where the others reach it (empty: behind NAT, it calls the others)."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    name: str = "mesh"
    """Part of the name of the device and of the firewall's table."""
    subnet: str = "10.77.0.0/24"
    """Private IPv4 network of the addresses inside."""
    port: int = 51820
    """UDP port that every machine listens on."""
    mtu: int = 1420
    """Largest packet inside, in bytes: 80 less than what the way between the machines carries."""
    open: tuple[int, ...] = (22,)
    """TCP ports that the firewall passes from everywhere, ssh's above all."""
    machines: tuple[Machine, ...] = ()

    @property
    def device(self) -> str:
        """Name of the network device and of the firewall's table."""
        return f"tp-{self.name}"

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.subnet)

    def endpoint(self, machine: Machine) -> str:
        """HOST:PORT of a machine that has an endpoint."""
        match = _ENDPOINT.fullmatch(machine.endpoint)
        assert match is not None
        return f"{match[1]}:{match[2] or self.port}"

    def check(self, where: str) -> Mesh:
        """Raise ThinpipeError for the first thing that can't work; the line begins with `where` and names the field."""
        try:
            _check(self)
        except ThinpipeError as error:
            raise ThinpipeError(f"{where}: {error}") from None
        return self


def _check(mesh: Mesh) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]{0,11}", mesh.name):
        raise ThinpipeError(f"name = {mesh.name!r} can't name a device; use up to 12 lower-case letters and digits")
    try:
        network = mesh.network
    except ValueError as error:
        raise ThinpipeError(f"subnet = {mesh.subnet!r} is no network ({error}); write it as in 10.77.0.0/24") from None
    if not any(network.subnet_of(private) for private in _PRIVATE) or network.prefixlen > 30:
        raise ThinpipeError(f"subnet = {mesh.subnet} is no private network with room for machines; take one as 10.77.0.0/24")
    for name, ports in (("port", (mesh.port,)), ("open", mesh.open)):
        if wrong := [port for port in ports if not 0 < port < 65536]:
            raise ThinpipeError(f"{name} = {wrong[0]} is no port; use 1 to 65535")
    if not 1280 <= mesh.mtu <= 65455:
        raise ThinpipeError(f"mtu = {mesh.mtu} is out of range; use 1420, down to 1280 where the way carries less")
    for machine in mesh.machines:
        _check_machine(machine, mesh, network)
    for what in ("key", "address"):
        seen: dict[str, str] = {}
        for machine in mesh.machines:
            if (first := seen.setdefault(getattr(machine, what), machine.name)) != machine.name:
                raise ThinpipeError(f"machines.{machine.name}.{what} is that of {first} too; give each machine its own")
    hidden = [machine.name for machine in mesh.machines if not machine.endpoint]
    if len(hidden) > 1:
        raise ThinpipeError(
            f"machines.{hidden[1]}.endpoint is missing as {hidden[0]}'s is, and two machines behind NAT can't reach each other; "
            f"have a router pass UDP port {mesh.port} to one, and give its address"
        )


def _check_machine(machine: Machine, mesh: Mesh, network: ipaddress.IPv4Network) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}", machine.name):
        raise ThinpipeError(f"machines: {machine.name!r} can't name a machine; use letters, digits and dashes")
    here = f"machines.{machine.name}"
    if not is_key(machine.key):
        raise ThinpipeError(f"{here}.key = {machine.key!r} is no WireGuard key; give what `thinpipe mesh key` says on that machine")
    try:
        inside = ipaddress.IPv4Address(machine.address)
    except ValueError:
        raise ThinpipeError(f"{here}.address = {machine.address!r} is no IPv4 address; take one of {mesh.subnet}") from None
    if inside not in network or inside in (network.network_address, network.broadcast_address):
        raise ThinpipeError(f"{here}.address = {inside} is no machine's in subnet = {mesh.subnet}; take one of its others")
    if machine.endpoint:
        _check_endpoint(machine.endpoint, f"{here}.endpoint", network)


def _check_endpoint(endpoint: str, field: str, network: ipaddress.IPv4Network) -> None:
    match = _ENDPOINT.fullmatch(endpoint)
    outside: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    if match is not None:
        try:
            outside = ipaddress.ip_address(match[1].strip("[]"))
        except ValueError:
            match = None if match[1].startswith("[") else match  # else a name
    if match is None or not 0 < int(match[2] or 1) < 65536:
        raise ThinpipeError(f"{field} = {endpoint!r} is not HOST or HOST:PORT (IPv6: [HOST]:PORT)")
    if outside is not None and outside in network:
        raise ThinpipeError(f"{field} = {endpoint} lies inside the mesh; give the machine's address outside")


def is_key(text: str) -> bool:
    """Whether it has the form of a WireGuard key: 32 bytes in base64."""
    try:
        return len(text) == 44 and len(base64.b64decode(text, validate=True)) == 32
    except ValueError:
        return False


def add(mesh: Mesh, name: str, key: str, endpoint: str = "") -> Mesh:
    """The mesh with one more machine, at the first free address. Raises ThinpipeError if it can't belong."""
    if any(machine.name == name for machine in mesh.machines):
        raise ThinpipeError(f"{name} is a machine of the mesh already; revoke it first, or choose another name")
    taken = {machine.address for machine in mesh.machines}
    address = next((str(address) for address in mesh.network.hosts() if str(address) not in taken), None)
    if address is None:
        raise ThinpipeError(f"subnet = {mesh.subnet} is full; take a larger one")
    machine = Machine(name=name, address=address, key=key, endpoint=endpoint)
    return dataclasses.replace(mesh, machines=(*mesh.machines, machine))


def revoke(mesh: Mesh, name: str) -> Mesh:
    """The mesh without that machine. Raises ThinpipeError if there is none of that name."""
    left = tuple(machine for machine in mesh.machines if machine.name != name)
    if len(left) == len(mesh.machines):
        raise ThinpipeError(f"no machine is called {name!r}; machines are {', '.join(m.name for m in mesh.machines) or 'none yet'}")
    return dataclasses.replace(mesh, machines=left)


def load(path: Path) -> Mesh:
    """Read and check a list. Raises ThinpipeError that names the file and the field."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ThinpipeError(f"{path}: {error.strerror}; give the path of a mesh's list, or begin one with thinpipe mesh add") from None
    except (ValueError, RecursionError) as error:
        raise ThinpipeError(f"{path} is not valid TOML: {error}") from None
    tables = raw.pop("machines", {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ThinpipeError(f"{path}: machines must be tables, as [machines.NAME]")
    machines = tuple(_build(Machine, {**table, "name": name}, f"{path}: machines.{name}.") for name, table in tables.items())
    mesh: Mesh = _build(Mesh, {**raw, "machines": machines}, f"{path}: ")
    return mesh.check(str(path))


def _build(kind: Any, values: dict[str, Any], where: str) -> Any:
    fields, kinds = {field.name: field for field in dataclasses.fields(kind)}, typing.get_type_hints(kind)
    for name, value in values.items():
        if name not in fields:
            raise ThinpipeError(f"{where}{name} is unknown; fields are {', '.join(fields)}")
        if name != "machines":
            check_type(value, kinds[name], f"{where}{name}")
    if missing := [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]:
        raise ThinpipeError(f"{where}{missing[0]} is missing")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def dump(mesh: Mesh) -> str:
    """The list as TOML; `load` of it gives an equal Mesh."""

    def lines(values: dict[str, Any]) -> list[str]:
        return [f"{name} = {json.dumps(value)}" for name, value in values.items() if name not in ("machines", "name")]

    text = [f"name = {json.dumps(mesh.name)}", *lines(dataclasses.asdict(mesh))]
    for machine in mesh.machines:
        text += ["", f"[machines.{json.dumps(machine.name)}]", *lines(dataclasses.asdict(machine))]
    return _HEAD + "\n".join(text) + "\n"


def save(mesh: Mesh, path: Path) -> None:
    """Check the list and write it, whole or not at all. Raises ThinpipeError as `Mesh.check`."""
    mesh.check(str(path))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(dump(mesh), encoding="utf-8")
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
