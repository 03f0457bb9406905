"""Network namespaces with an owner: made, entered, emptied, removed, and found again after their owner's death.

A namespace is called PREFIX-PID-START-COUNT-NAME. PID and START (when the process began, in clock ticks after boot) are
its owner's, so the name alone tells whether the owner still lives, even after its process id was given to another.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from thinpipe.commands import run_command
from thinpipe.config import ThinpipeError

PREFIX = "thinpipe"
DEVICE = "wan0"
"""Every host's device: GLOO_SOCKET_IFNAME of the training."""
FOLDER = Path("/var/run/netns")
"""Where iproute2 keeps the names."""
_CLONE_NEWNET = 0x40000000
_COMMAND_SECONDS = 20
_PATIENCE = 3.0


def run(*argv: str, stdin: str = "") -> str:
    """Standard output of a command. Raises ThinpipeError with the first line that it said on failure."""
    return run_command(*argv, by="lab", package="iproute2", seconds=_COMMAND_SECONDS, stdin=stdin)


def start_time(pid: int) -> int | None:
    """When a process began, in clock ticks after boot; None if it is dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def lab_name(prefix: str, count: int) -> str:
    """What the names of all namespaces of this process's lab number `count` begin with."""
    return f"{prefix}-{os.getpid()}-{start_time(os.getpid())}-{count}"


def owned_by_the_dead(name: str, prefix: str) -> bool:
    """Whether a namespace (or lab) of that name lost its owner."""
    match = re.match(rf"{re.escape(prefix)}-(\d+)-(\d+)-\d+\b", name)
    return match is not None and start_time(int(match[1])) != int(match[2])


def names(lab: str) -> list[str]:
    """Namespaces whose names begin with `lab`."""
    with suppress(FileNotFoundError):
        return sorted(path.name for path in FOLDER.iterdir() if path.name.startswith(f"{lab}-"))
    return []


@contextmanager
def inside(name: str) -> Iterator[None]:
    """The calling thread inside a namespace: a socket or /proc/sys/net file opened there belongs to it for good."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(there)
        yield
    finally:
        _enter(here)
        os.close(there)
        os.close(here)


def set_sysctls(name: str, values: dict[str, str]) -> None:
    """Write kernel settings (paths below /proc/sys/net) that belong to one namespace; one the kernel doesn't have is left out."""
    with inside(name):
        for path, value in values.items():
            with suppress(FileNotFoundError):
                Path("/proc/sys/net", path).write_text(value)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns: can't enter a network namespace")


def _argv(process: Path) -> list[str]:
    return (process / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def _identity(namespace: os.stat_result) -> tuple[int, int]:
    return namespace.st_dev, namespace.st_ino


@contextmanager
def _held(namespaces: Iterable[str]) -> Iterator[set[tuple[int, int]]]:
    """Identities of the namespaces, kept open: the kernel gives the number of one that is gone to the next."""
    with ExitStack() as held:
        found = set()
        for name in namespaces:
            with suppress(FileNotFoundError):
                found.add(_identity(os.fstat(held.enter_context(open(FOLDER / name)).fileno())))
        yield found - {_identity(os.stat("/proc/self/ns/net"))}  # whatever happened to a name: never end what runs where we do


def _find(identities: set[tuple[int, int]], namespaces: Collection[str]) -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or a zombie, or another user's
            argv = _argv(process)
            entering = any(argv[1:4] == ["netns", "exec", name] for name in namespaces)  # seen on its way in, it can't slip through
            if entering or _identity((process / "ns/net").stat()) in identities:
                found.add(int(process.name))
    return found - {os.getpid()}


def processes_in(namespaces: Collection[str]) -> set[int]:
    """Ids of the processes that run inside any of the namespaces, or are about to."""
    with _held(namespaces) as identities:
        return _find(identities, namespaces)


def emulators(prefix: str) -> dict[int, str]:
    """Process id of every emulator, and its lab."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            argv = _argv(process)
            if argv[1:-1] == ["-m", "thinpipe.lab.emulator"] and argv[-1].startswith(f"{prefix}-"):
                found[int(process.name)] = argv[-1]
    return found


def _end(identities: set[tuple[int, int]], namespaces: Collection[str]) -> None:
    """SIGTERM, later SIGKILL, to all that runs inside; waits for twice `_PATIENCE` at most."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        deadline, told = time.monotonic() + _PATIENCE, set[int]()
        while (alive := _find(identities, namespaces)) and time.monotonic() < deadline:
            for pid in alive - told:  # a process may have started another between our look and our signal
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
            told |= alive
            time.sleep(0.02)


def remove(namespaces: Collection[str]) -> None:
    """End all that runs inside and delete the namespaces, their devices with them; one that is gone is no error.

    Raises ThinpipeError if one can't be deleted.
    """
    with _held(namespaces) as identities:
        _end(identities, namespaces)
        for name in namespaces:
            try:
                run("ip", "netns", "delete", name)
            except ThinpipeError:
                if (FOLDER / name).exists():  # else another clean-up was faster
                    raise
        _end(identities, namespaces)  # what was just entering: without a name, nobody enters any more


def leftovers(prefix: str = PREFIX) -> list[str]:
    """Namespaces and processes of labs whose owner is dead, one line each. Devices can't outlive their namespace."""
    dead = [name for name in names(prefix) if owned_by_the_dead(name, prefix)]
    lines = [f"namespace {name}" for name in dead]
    lines += [f"process {pid} in {name}" for name in dead for pid in sorted(processes_in([name]))]
    return lines + [f"process {pid}, emulator of {lab}" for pid, lab in emulators(prefix).items() if owned_by_the_dead(lab, prefix)]


def clean(prefix: str = PREFIX) -> list[str]:
    """Remove what dead labs left, return what `leftovers` called it. Waits 6 s at most for processes that won't end."""
    found = leftovers(prefix)
    for pid, lab in emulators(prefix).items():
        if owned_by_the_dead(lab, prefix):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    remove([name for name in names(prefix) if owned_by_the_dead(name, prefix)])
    return found
