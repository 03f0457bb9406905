"""Starting the stages of this machine and ending all of them together, on torch's elastic agent.

Every worker is `python -m thinpipe.worker PARENT COMMAND RUN`; this room never imports the trainer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from .errors import Stopped, ThinpipeError
from .meeting import Meeting, Rendezvous, Say, await_host
from .topology import PeerLost, usable_cores

STOPPED = 130  # exit status of a run that was asked to stop
_PATIENCE = 600  # seconds that a stop may take: the step under way and the checkpoint behind it
_LAST_WORDS = 1.0  # seconds that stages have to end by themselves when one of them has failed
_LONGEST_PAUSE = 60.0  # seconds between two starts
_ALONE = Meeting()


class Failed(Exception):
    """A stage failed for a reason that is not the user's; the text holds its traceback."""


class Lost(ThinpipeError):
    """A stage was killed, or cut off from its peers: another start may help."""

    status = 1


@dataclass(frozen=True)
class Restarts:
    """When a run whose stages were lost is started again.

    Attributes:
        limit: starts in a row that bring no new checkpoint; the next loss ends the run.
        saved: the newest checkpoint's step, as this machine sees it.
    """

    limit: int = 0
    saved: Callable[[], int | None] = lambda: None


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Signal handlers are those of the caller again in the end: this process may be somebody's program that trains."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # None: not one of Python's
                    signal.signal(number, handler)


@_handlers_kept()
def start(
    command: str,
    folder: Path,
    processes: int,
    debug: bool = False,
    *,
    logs: Path | None = None,
    arguments: Sequence[str] = (),
    meeting: Meeting = _ALONE,
    restarts: Restarts = Restarts(),
    say: Say = print,
) -> None:
    """Run `command` in `processes` processes on this machine, with those of the meeting's others, and wait for them.

    Their output goes to `logs` (RUN/logs), the first one's to the terminal. When a stage is lost, here or elsewhere, all machines
    end theirs, meet again and start anew.

    Args:
        arguments: more arguments of the command.
        meeting: with whom; by default nobody.
        say: told of losses, and for whom this machine waits.

    Raises:
        ThinpipeError: a stage found something the user can mend, or was lost too often; the first failure's own words.
        Failed: a stage failed otherwise.
        Stopped: Ctrl-C, SIGTERM or SIGHUP came, and the stages have ended.
    """
    # Torch's agent would take over SIGHUP even where it is ignored.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(s.name for s in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, *_hangup()))
    if not debug:
        for name in ("elastic", "distributed_c10d"):
            logging.getLogger(f"torch.distributed.{name}").setLevel(logging.CRITICAL)
    meeting = meeting if meeting.name else replace(meeting, name=uuid.uuid4().hex)
    argv = ("-m", "thinpipe.worker", str(os.getpid()), command, str(folder), *arguments)
    in_a_row, saved = 0, restarts.saved()
    rendezvous: Rendezvous | None = None
    for_all = True
    try:
        while True:
            rendezvous = rendezvous or _meet(meeting, say)
            try:
                cause = _live(rendezvous, meeting, processes, argv, logs or folder / "logs")
            except RendezvousError as error:
                say(f"lost the meeting's host {meeting.endpoint}")
                rendezvous.close(for_all=False)
                rendezvous, cause = None, Lost(f"the meeting's host {meeting.endpoint} can't be reached ({error})")
            if cause is None:
                return
            if not isinstance(cause, Lost):
                raise cause
            now = restarts.saved()
            in_a_row, saved = (in_a_row + 1 if now == saved else 1), now
            if in_a_row > restarts.limit:
                raise cause
            since = "from the beginning" if saved is None else f"from step {saved}"
            say(f"{cause}\nstarting again {since} ({in_a_row} of {restarts.limit})")
            # At once the first time; the longer the less it helped.
            time.sleep(0.0 if in_a_row == 1 else min(2.0 ** (in_a_row - 1), _LONGEST_PAUSE))
    except (SignalException, KeyboardInterrupt):
        for_all = False  # the others go on, or stop by themselves
        raise Stopped from None
    finally:
        if rendezvous is not None:
            rendezvous.close(for_all)


def _meet(meeting: Meeting, say: Say) -> Rendezvous:
    """Raises ThinpipeError if the meeting's host can't be reached within its patience."""
    deadline = time.monotonic() + meeting.patience
    while True:
        await_host(meeting, say)
        try:
            return Rendezvous.at(meeting, say)
        except RendezvousError as error:
            if meeting.is_host or time.monotonic() > deadline:
                raise ThinpipeError(
                    f"no meeting at {meeting.endpoint} ({error.__cause__ or error}); is that port another program's?"
                ) from None
            time.sleep(1.0)


def _live(rendezvous: Rendezvous, meeting: Meeting, processes: int, argv: tuple[str, ...], logs: Path) -> Exception | None:
    """Meet, start this machine's stages and wait for their end: None, or why they failed.

    Raises:
        RendezvousError: the meeting's host is lost.
        ThinpipeError: the machines did not meet, or another one has ended the run.
    """
    quiet = {rank: Std.ALL if rank else Std.NONE for rank in range(processes)}
    spec = WorkerSpec(
        role="default",
        local_world_size=processes,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=argv,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=meeting.address,
    )
    try:
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=str(logs), redirects=quiet))
        result: RunResult | None = agent.run()
    except RendezvousClosedError:
        raise Lost("the run was ended by another machine; the cause stands there") from None
    except RendezvousTimeoutError:
        raise Lost(
            f"the machines of the run did not meet at {meeting.endpoint} within {meeting.patience:g} s (network.patience); "
            "are all of them started?"
        ) from None
    except OSError as error:
        raise ThinpipeError(f"the stages' logs can't be written: {error}; make room") from None
    if result is None or not result.is_failed():  # None: a spare that was not needed
        return None
    return _explain([(rank, failure) for rank, failure in result.failures.items() if failure.pid not in agent.ended])


class _Agent(LocalElasticAgent):
    """Torch's agent, for one life of the stages.

    Attributes:
        ended: processes that it killed itself because another one had failed.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs) -> None:
        super().__init__(spec, logs_specs, shutdown_timeout=_PATIENCE)
        self.ended: set[int] = set()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert isinstance(self._pcontext, SubprocessContext)
        processes = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]
        if any(process.poll() not in (None, 0) for process in processes):
            # The others notice at once and say whom they miss. What stays then waits or is frozen; torch would give it 30 s.
            deadline = time.monotonic() + _LAST_WORDS
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.ended |= {process.pid for process in processes if process.poll() is None}
            self._shutdown(signal.SIGKILL)
        return super()._monitor_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # The machines meet anew: there is nothing left to finish, and a stage that is frozen doesn't hear SIGTERM.
        self._shutdown(signal.SIGKILL)


def _explain(failures: Iterable[tuple[int, ProcessFailure]]) -> Exception:
    """The failure that came first; a peer's loss only when there is nothing else, a stop (the agent stops the others) last."""
    reports = []
    for rank, failure in failures:
        report = failure.error_file_data.get("thinpipe") or {}
        stopped = failure.exitcode in (STOPPED, -signal.SIGINT, -signal.SIGTERM)
        reports.append((stopped, report.get("kind") == "peer", failure.timestamp, rank, failure, report))
    stopped, is_peer, _, rank, failure, report = min(reports, key=lambda r: r[:4])
    if stopped:
        return Stopped()
    if is_peer:
        return Lost(report["text"])
    if report.get("kind") == "user":
        return ThinpipeError(report["text"])
    if failure.exitcode < 0:
        return Lost(f"stage {rank} was killed by {failure.signal_name()}; if that was not you, look for a lack of memory (dmesg)")
    if not report:
        return ThinpipeError(f"stage {rank} failed and could not leave a report in the run's logs; is that disk full?")
    return Failed(f"stage {rank} failed:\n{report['text']}")


@contextlib.contextmanager
def reporting_failures() -> Iterator[None]:
    """In a worker: write what goes wrong where the agent looks for it, and exit with 1 (or 130 for a stop)."""
    try:
        yield
    except Stopped:
        os._exit(STOPPED)  # peers may be gone already: no goodbye over the network
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is not None:  # of a file that nobody expected to fail
            error = ThinpipeError(f"{error.filename}: {error.strerror}; mend that file, folder or disk")
        kind = "peer" if isinstance(error, PeerLost) else "user" if isinstance(error, ThinpipeError) else "bug"
        text = str(error) if kind != "bug" else traceback.format_exc()
        report = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}, "thinpipe": {"kind": kind, "text": text}}
        left = False
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            try:
                left = bool(Path(path).write_text(json.dumps(report)))
            except OSError:  # a full disk; the agent takes half a report amiss
                Path(path).unlink(missing_ok=True)
        # The first one's stderr is the terminal, where the command tells it.
        if not (left and kind == "user" and os.environ.get("LOCAL_RANK") == "0"):
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)
        os._exit(1)


@_handlers_kept()
def side_by_side(
    commands: Sequence[Sequence[str]], stages: int, logs: Sequence[Path], named: str, whole: Callable[[], bool], say: Say
) -> None:
    """Run commands of `thinpipe` on this machine until all have ended; the first one tells this terminal, the others their logs.

    Args:
        stages: of all commands together; each command believes that it has all cores.
        named: what a command is called in errors, with {} for its number.
        whole: asked in the end whether what they were to do is done; if so, a command that failed is only told of.

    Raises:
        ThinpipeError: a command's own words.
        Stopped: a stop was asked for, and the commands have ended.
    """
    stop = StopRequest()
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, usable_cores() // stages))}
    with contextlib.ExitStack() as stack:
        told: list[TextIO | None] = [None]
        for log in logs[1:]:
            log.parent.mkdir(parents=True, exist_ok=True)
            told.append(stack.enter_context(open(log, "w", encoding="utf-8")))
        # A session of its own: Ctrl-C reaches it once, from here; and whatever ends this process ends it.
        end: dict[str, Any] = {"start_new_session": True, "preexec_fn": partial(die_with_parent, os.getpid())}
        processes = [
            subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr, text=True, **end)
            for command, stderr in zip(commands, told, strict=True)
        ]
        passed_on = False
        while any(process.poll() is None for process in processes):
            if stop.asked and not passed_on:
                passed_on = True
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        process.terminate()
            time.sleep(0.1)
    statuses = [process.returncode for process in processes]
    if STOPPED in statuses or (stop.asked and any(statuses)):
        raise Stopped
    # Who lost a peer ends with 1, whose user made a mistake with 2, who was killed with less than 0: the cause comes first.
    for i in sorted(range(len(commands)), key=lambda i: (statuses[i] >= 0, -statuses[i])):
        if statuses[i]:
            text = "" if i == 0 else "".join(logs[i].read_text(encoding="utf-8", errors="replace").splitlines(True)[-2:]).strip()
            how = f"ended with status {statuses[i]}" if statuses[i] > 0 else f"was killed by {signal.Signals(-statuses[i]).name}"
            ended = f"{named.format(i)} {how}{': ' + text if text else ''}"
            if not whole():
                raise ThinpipeError(ended) if statuses[i] == 2 else Lost(ended)
            say(ended)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, even by kill -9, or die now if that has happened (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _hangup() -> tuple[signal.Signals, ...]:
    """SIGHUP, unless whoever started this process had it ignored, as nohup does."""
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


class StopRequest:
    """Ctrl-C, SIGTERM or a terminal that closes: the first asks for a stop after the step, the second ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM, *_hangup()):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.asked:
            os._exit(STOPPED)
        self.asked = True
