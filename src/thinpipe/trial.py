"""`thinpipe lab`: the real training command on every host of a lab, the plan beside what happened."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from . import launch
from .calibrate import calibrate
from .config import Config, ThinpipeError
from .data import prepare
from .lab import Host, Lab, Link, Measured, lab, parse_links, unavailable
from .lab.paths import slower
from .metrics import to_json, write_whole
from .planner import find_gpu, plan
from .run import finished, open_run, result_of

_PORT = 29400
_BUSY = 0.5  # share of a core above which the emulator, not the link, may be what binds


def train_in_lab(config: Config, text: str, where: str, say: Callable[[str], None], debug: bool = False) -> dict[str, Any]:
    """Train with every stage on a host of its own, joined by the links of `text`.

    Args:
        where: what the user calls the text, for errors.
        say: told what was found out on the way.

    Returns the keys of `thinpipe train` and `link`, `achieved_link`, `planned_seconds_per_step`, `emulator_cpu`.

    Raises:
        ThinpipeError: config, data or links can't work, the machine can't hold a lab, or a stage was lost.
        launch.Stopped: the run was stopped by a signal, after saving.
    """
    stages = config.check().pipeline.stages
    links = parse_links(text, stages - 1, where)
    if (missing := unavailable()) is not None:
        raise ThinpipeError(missing)
    config, folder, remarks = open_run(config)
    for remark in remarks:
        say(remark)
    if finished(folder, config) is not None:
        raise ThinpipeError(f"{folder} is finished; raise train.steps, or leave run.dir out for a new run")
    vocab, costs = prepare(config).vocab, calibrate(config, debug)
    with lab(links, stages, seed=config.run.seed) as net:
        achieved = net.measure()
        for i, (link, got) in enumerate(zip(links, achieved, strict=True)):
            say(
                f"boundary {i}: asked {link}; one connection moves {got.rate:.1f} Mbit/s, "
                f"round trip {got.round_trip:.1f} ms (asked {2e3 * link.delay:g})"
            )
        planned = plan(config, vocab, as_achieved(links, achieved), find_gpu("cpu"), costs=costs)
        say(f"planned: {planned.seconds_per_step:.3f} s per step ({planned.schedule}), bound by {planned.bound}")
        net.emulator_cpu()  # from here on
        run_hosts(net, folder, debug)
        cpu = net.emulator_cpu()
    if cpu > _BUSY:
        say(f"the emulator took {cpu:.0%} of a core: this figure may be bound by it, not by the link")
    result = result_of(folder)
    assert result is not None
    result |= {
        "link": text,
        "achieved_link": "/".join(f"{got.rate:.1f}mbit,{got.round_trip / 2:.1f}ms" for got in achieved),
        "planned_seconds_per_step": planned.seconds_per_step,
        "emulator_cpu": cpu,
    }
    write_whole(folder / "lab.json", to_json(result))
    return result


def as_achieved(links: Sequence[Link], achieved: Sequence[Measured]) -> list[Link]:
    """The links with the rates and delays that were measured; equal links stay equal, since that makes them shared uplinks."""
    if not links:
        return []
    if len(set(links)) == 1:
        achieved = [Measured(median(got.rate for got in achieved), median(got.round_trip for got in achieved))] * len(links)
    found = []
    for link, got in zip(links, achieved, strict=True):
        asked = slower(link.up, link.down)
        share = 1e6 * got.rate / asked if asked else 1.0
        up, down = (None if rate is None else rate * share for rate in (link.up, link.down))
        found.append(Link(up=up, down=down, delay=got.round_trip / 2e3))
    return found


def run_hosts(net: Lab, folder: Path, debug: bool = False) -> None:
    """`thinpipe train` for the run in `folder` on every host of the lab at once, until all have ended.

    The first host writes to this terminal, the others to RUN/logs.

    Raises:
        ThinpipeError: a host's own words.
        launch.Stopped: a stop was asked for, and the run has saved.
    """
    hosts, stop = net.hosts, launch.StopRequest()
    cores = len(os.sched_getaffinity(0))
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, cores // len(hosts)))}  # each host believes that it has all cores
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for i in range(len(hosts)):
            command = train_on(hosts, i, "--run.dir", str(folder), *(["--debug"] if debug else []))
            told: TextIO | None = None if i == 0 else stack.enter_context(open(_log(logs, i), "w", encoding="utf-8"))
            # A session of its own: Ctrl-C reaches it once, from here.
            processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=told, text=True, start_new_session=True))
        passed_on = False
        while any(process.poll() is None for process in processes):
            if stop.asked and not passed_on:
                passed_on = True
                for process in processes:
                    with suppress(ProcessLookupError):
                        process.terminate()
            time.sleep(0.1)
    statuses = [process.returncode for process in processes]
    if launch.STOPPED in statuses or (stop.asked and any(statuses)):
        raise launch.Stopped
    # A host that lost a peer ends with 1, one whose user made a mistake with 2: the cause comes first.
    for i in sorted(range(len(hosts)), key=lambda i: -statuses[i]):
        if statuses[i]:
            text = "" if i == 0 else "".join(_log(logs, i).read_text(encoding="utf-8", errors="replace").splitlines(True)[-2:]).strip()
            raise ThinpipeError(f"host {i} of the lab ended with status {statuses[i]}{': ' + text if text else ''}")


def train_on(hosts: Sequence[Host], place: int, *arguments: str) -> list[str]:
    """The command that trains on one host of a lab, at its place in the pipeline; they meet at the first host."""
    host = hosts[place]
    command = [*host.command_prefix, sys.executable, "-m", "thinpipe", "train", *arguments]
    command += ["--network.rdzv", f"{hosts[0].address}:{_PORT}", "--network.nodes", str(len(hosts))]
    return [*command, "--network.addr", host.address, "--network.node-rank", str(place)]


def _log(logs: Path, host: int) -> Path:
    return logs / f"host-{host}.txt"
