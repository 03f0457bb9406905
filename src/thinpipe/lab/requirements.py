"""What a lab needs of the machine, and the remedy where it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from thinpipe.config import ThinpipeError
from thinpipe.lab import namespaces, netem
from thinpipe.lab.namespaces import run

_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21


def unavailable() -> str | None:
    """Why a lab can't run here, in one line with the remedy; None if it can."""
    try:
        check()
        scratch = namespaces.lab_name(namespaces.PREFIX, 0) + "-probe"
        run("ip", "netns", "add", scratch)
        try:
            choose_backend(scratch)
        finally:
            namespaces.remove([scratch])
    except ThinpipeError as error:
        return str(error)
    return None


def check() -> None:
    """Raise ThinpipeError unless iproute2 and the right to make namespaces are at hand. Prepares a rootless lab's folder."""
    if not shutil.which("ip") or not shutil.which("tc"):
        raise ThinpipeError("lab: needs ip and tc; apt-get install iproute2 (and have /usr/sbin in PATH)")
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if not (capabilities >> _CAP_NET_ADMIN & 1 and capabilities >> _CAP_SYS_ADMIN & 1):
        rootless = shutil.which("unshare") and not subprocess.run(["unshare", "-rmn", "true"], capture_output=True, timeout=20).returncode
        way = "put 'unshare -rmn' before the command, or sudo" if rootless else "use sudo (in a container: --privileged)"
        raise ThinpipeError(f"lab: needs root to make network namespaces; {way}")
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
        _own_folder()


def _own_folder() -> None:
    """In a user namespace, where iproute2's folder for names is not ours: put a private one over it, and have a loopback."""
    source, folder = namespaces.PREFIX, namespaces.FOLDER if namespaces.FOLDER.is_dir() else namespaces.FOLDER.parent
    if f"\n{source} {folder.resolve()} tmpfs " in Path("/proc/self/mounts").read_text():
        return
    try:
        run("mount", "-t", "tmpfs", source, str(folder.resolve()))
        run("ip", "link", "set", "lo", "up")
    except ThinpipeError:
        raise ThinpipeError("lab: without root it needs a mount namespace too; put 'unshare -rmn' before the command") from None


def choose_backend(scratch: str) -> Literal["netem", "tun"]:
    """netem where the kernel has it (tried in the namespace `scratch`), else TUN devices.

    Raises ThinpipeError if there is neither.
    """
    if netem.works(scratch):
        return "netem"
    if os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "tun"
    raise ThinpipeError(
        "lab: needs netem (modprobe sch_netem) or /dev/net/tun (modprobe tun; in a container: --device /dev/net/tun), and may use neither"
    )
