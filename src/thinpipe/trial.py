"""`thinpipe lab`: the real training command on every host of a lab, the plan beside what happened."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from . import launch
from .calibrate import calibrate
from .config import Config, ThinpipeError
from .data import prepare
from .lab import Host, Lab, Link, Measured, lab, parse_links, unavailable
from .lab.paths import slower
from .metrics import to_json, write_whole
from .planner import find_gpu, plan
from .run import finished, of_replica, open_run, whats_finished

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
    stages, replicas = config.check().pipeline.stages, config.pipeline.replicas
    links = lab_links(config, text, where)
    if (missing := unavailable()) is not None:
        raise ThinpipeError(missing)
    config, folder, remarks = open_run(config)
    for remark in remarks:
        say(remark)
    if finished(folder, config) is not None:
        raise ThinpipeError(f"{whats_finished(folder, config)}, or leave run.dir out for a new run")
    vocab, costs = prepare(config).vocab, calibrate(config, debug, shared=True)
    with lab(links, stages * replicas, seed=config.run.seed) as net:
        shown = max(1, stages - 1)  # links; without boundaries, the one that replicas average over
        links, achieved = links[:shown], net.measure()[:shown]
        for i, (link, got) in enumerate(zip(links, achieved, strict=True)):
            say(
                f"boundary {i}: asked {link}; one connection moves {got.rate:.1f} Mbit/s, "
                f"round trip {got.round_trip:.1f} ms (asked {2e3 * link.delay:g})"
            )
        planned = plan(config, vocab, as_achieved(links, achieved), find_gpu("cpu"), costs=costs)
        say(f"planned: {planned.seconds_per_step:.3f} s per step ({planned.schedule}), bound by {planned.bound}")
        net.emulator_cpu()  # from here on
        run_hosts(net, folder, config, say, debug)
        cpu = net.emulator_cpu()
    if cpu > _BUSY:
        say(f"the emulator took {cpu:.0%} of a core: this figure may be bound by it, not by the link")
    result = finished(folder, config)
    assert result is not None
    told = asdict(result) | {
        "link": text,
        "achieved_link": "/".join(f"{got.rate:.1f}mbit,{got.round_trip / 2:.1f}ms" for got in achieved),
        "planned_seconds_per_step": planned.seconds_per_step,
        "emulator_cpu": cpu,
    }
    write_whole(folder / "lab.json", to_json(told))
    return told


def lab_links(config: Config, text: str, where: str) -> tuple[Link, ...]:
    """The links between all processes of a run, replica by replica. Raises ThinpipeError that names `where` if they aren't."""
    pipeline = config.pipeline
    links = parse_links(text, pipeline.stages * pipeline.replicas - 1, where)
    if pipeline.replicas > 1 and len(set(links)) > 1:
        raise ThinpipeError(f"{where} = {text!r} has different links for the boundaries; with pipeline.replicas above 1 give one for all")
    return links


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


def run_hosts(net: Lab, folder: Path, config: Config, say: Callable[[str], None], debug: bool = False) -> None:
    """`thinpipe train` for the run in `folder` on every host of the lab at once, replica by replica, until all have ended.

    The first host writes to this terminal, the others to RUN/logs.

    Raises:
        ThinpipeError: a host's own words.
        launch.Stopped: a stop was asked for, and the run has saved.
    """
    hosts, replicas = net.hosts, config.pipeline.replicas
    commands = [
        train_on(hosts, i, folder / "config.toml", folder, *(["--debug"] if debug else []), replicas=replicas) for i in range(len(hosts))
    ]
    logs = [folder / "logs" / f"host-{i}.txt" for i in range(len(hosts))]
    launch.side_by_side(
        commands, len(hosts), logs, "host {} of the lab", lambda: replicas > 1 and finished(folder, config) is not None, say
    )


def train_on(hosts: Sequence[Host], number: int, config: Path, run: Path, *arguments: str, replicas: int = 1) -> list[str]:
    """The command that trains a run on one host of a lab; they meet at the first host, and the first replica sits on the first hosts."""
    host, each = hosts[number], len(hosts) // replicas
    replica, place = divmod(number, each)
    command = [*host.command_prefix, sys.executable, "-m", "thinpipe", "train", str(config), *arguments]
    command += ["--network.rdzv", f"{hosts[0].address}:{_PORT}", "--network.nodes", str(each)]
    command += ["--network.addr", host.address, "--network.node-rank", str(place)]
    return [*command, *of_replica(run, replica, replicas)]
