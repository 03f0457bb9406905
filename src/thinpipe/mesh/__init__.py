"""Who belongs to a run: a WireGuard mesh between its machines, and a firewall that passes nothing beside it.

`members` is the list of machines, one TOML file without a secret; `files` makes WireGuard's configuration and the firewall's
rules of it; `machine` is what changes this machine: its key, up, down.
"""

from thinpipe.mesh.files import firewall, wireguard
from thinpipe.mesh.machine import KEY, bring_down, bring_up, describe, lines, make_key
from thinpipe.mesh.members import Machine, Mesh, add, dump, load, revoke, save

__all__ = [
    "KEY",
    "Machine",
    "Mesh",
    "add",
    "bring_down",
    "bring_up",
    "describe",
    "dump",
    "firewall",
    "lines",
    "load",
    "make_key",
    "revoke",
    "save",
    "wireguard",
]
