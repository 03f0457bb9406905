"""`thinpipe.train`: the stages of a run started from one call, or this process's part of one under torchrun."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from . import launch
from .checkpoint import newest_step
from .config import Config, ThinpipeError, dump, from_dict, to_dict
from .data import prepare
from .errors import tell
from .meeting import keep_time, meeting
from .metrics import to_json, write_whole
from .run import Result, alone_in, common_fields, finished, of_replica, open_run, whats_finished, with_tokenizer
from .topology import Topology, connect, listen_on, under_launcher
from .trainer import Trainer

_MEMORY = "memory.json"  # in a machine's scratch folder


def train(config: Config, say: Callable[[str], None] = tell, debug: bool = False) -> Result | None:
    """Train as the config says: `pipeline.stages` processes on this machine, or this one's part under torchrun.

    Args:
        say: told remarks for the user.

    Returns the summary (None on later stages under torchrun). A finished run is only reported.

    Raises:
        ThinpipeError: the config, the data or a file can't work, or a stage was lost.
        launch.Stopped: the run was stopped by a signal, after saving.
    """
    config = with_tokenizer(config)
    if under_launcher():
        with (
            connect(config.network.timeout, config.network.node_rank, insecure=config.network.insecure) as topology,
            topology.naming_peers(),
        ):
            return train_together(config, topology, say)
    if config.network.rdzv is not None:
        return _join(config.check(), say, debug)
    config, folder, remarks = open_run(config)
    for remark in remarks:
        say(remark)
    if (done := finished(folder, config)) is not None:
        say(whats_finished(folder, config))
        return done
    if config.pipeline.replicas > 1:
        return _beside_each_other(config, folder, say, debug)
    say(f"run {folder}: {config.compression.method}, {config.pipeline.stages} stages, {config.segments} segments")
    prepare(config)  # a mistake in the data is told once, before any process starts
    restarts = launch.Restarts(config.network.restarts, lambda: newest_step(folder / "checkpoints"))
    launch.start("train", folder, config.pipeline.stages, debug, restarts=restarts, say=say)
    result = finished(folder, config)
    assert result is not None
    return result


def _beside_each_other(config: Config, folder: Path, say: Callable[[str], None], debug: bool) -> Result:
    """All replicas on this machine, a command each, as they would run on several; they meet here."""
    replicas = config.pipeline.replicas
    say(f"run {folder}: {config.compression.method}, {replicas} replicas of {config.pipeline.stages} stages, {config.segments} segments")
    prepare(config)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=listen_on("127.0.0.1", 0))
    end = keep_time(store)
    commands = []
    for replica in range(replicas):
        command = [sys.executable, "-m", "thinpipe", "train", str(folder / "config.toml"), "--network.rdzv", f"127.0.0.1:{store.port}"]
        commands.append([*command, *of_replica(folder, replica, replicas), *(["--debug"] if debug else [])])
    stages = replicas * config.pipeline.stages
    logs = [folder / "logs" / f"replica-{replica}.txt" for replica in range(replicas)]
    try:
        launch.side_by_side(commands, stages, logs, "replica {}", lambda: finished(folder, config) is not None, say)
    finally:
        end()
    result = finished(folder, config)
    assert result is not None
    if result.run != str(folder):
        say(f"replica 0 was lost before the end; the finished run is {result.run}")
    return result


def _join(config: Config, say: Callable[[str], None], debug: bool) -> Result | None:
    """This machine's share of a run over several; the summary where the first stage is."""
    if config.data.source == "local":
        prepare(config)
    network, share = config.network, config.pipeline.stages // config.network.needed
    replica = "" if network.replica is None else f"-{network.replica}"
    met = meeting(network, f"thinpipe-{config.run.name}{replica}", say=say)
    with tempfile.TemporaryDirectory(prefix="thinpipe-join-") as scratch:
        folder = Path(scratch)
        write_whole(folder / "config.toml", dump(config))
        restarts = launch.Restarts(network.restarts, lambda: newest_step(Path(remembered(folder).get("run", scratch)) / "checkpoints"))
        # Not in the run's folder: it may not be there yet, and on a shared disk it is everybody's.
        launch.start("join", folder, share, debug, logs=folder / "logs", meeting=met, restarts=restarts, say=say)
        told = [folder / f"result-{local}.json" for local in range(share)]
        results = [json.loads(path.read_text(encoding="utf-8")) for path in told if path.exists()]  # a spare has none
    return next((Result(**result) for result in results if result is not None), None)


def remembered(scratch: Path) -> dict[str, Any]:
    """What an earlier life on this machine has left for the next one: "run", its folder, and "place", in the pipeline."""
    told = scratch / _MEMORY
    memory: dict[str, Any] = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
    return memory


def join(config: Config, topology: Topology, scratch: Path) -> None:
    """One worker's part of `_join`. COLLECTIVE."""
    # A machine that has been here before knows the folder that the first one had made.
    known = next((run for run in topology.gather(remembered(scratch).get("run")) if run is not None), None)
    if known is not None:
        config = replace(config, run=replace(config.run, dir=known))

    def opened(run: str) -> None:
        write_whole(scratch / _MEMORY, to_json({"run": run, "place": topology.place}))

    summary = train_together(config, topology, opened=opened)
    write_whole(scratch / f"result-{topology.local_rank}.json", to_json(summary and asdict(summary)))


def train_together(
    config: Config, topology: Topology, say: Callable[[str], None] = tell, opened: Callable[[str], None] = lambda _: None
) -> Result | None:
    """Train as one of the processes that someone started; the first one opens the run for all. COLLECTIVE.

    Args:
        opened: told the run's folder.

    Returns the summary on the first stage, None on the others.

    Raises:
        ThinpipeError: as `train`, or other processes were started than the config wants.
    """
    if topology.stages != config.pipeline.stages:
        raise ThinpipeError(f"pipeline.stages = {config.pipeline.stages} but {topology.stages} processes were started; make them equal")
    _require_one_config(config, topology)
    facts: dict[str, Any] = {}
    if topology.is_first:
        try:
            config, folder, remarks = open_run(config)
            done = finished(folder, config)
            compression = {"segments": config.segments, "static_seed": config.static_seed}
            facts = {"dir": str(folder), "compression": compression, "done": done and asdict(done)}
            for remark in remarks:
                say(remark)
        except ThinpipeError as error:
            facts = {"error": str(error)}
    facts = topology.gather(facts)[0]
    if "error" in facts:
        raise ThinpipeError(facts["error"])
    if facts["done"] is not None:
        if topology.is_first:
            say(whats_finished(facts["dir"], config))
        return Result(**facts["done"]) if topology.is_first else None
    if not topology.is_first:
        values = to_dict(config)
        values["run"]["dir"] = facts["dir"]
        values["compression"] |= facts["compression"]
        config = from_dict(values)
    Path(facts["dir"]).mkdir(parents=True, exist_ok=True)
    opened(facts["dir"])
    return fit(config, topology, Path(facts["dir"]))


def fit(config: Config, topology: Topology, folder: Path) -> Result | None:
    """Train in the run's folder, alone in it. COLLECTIVE."""
    with alone_in(folder) if topology.is_first else contextlib.nullcontext():
        return Trainer(config, topology, folder, launch.StopRequest()).fit()


def _require_one_config(config: Config, topology: Topology) -> None:
    """Raise ThinpipeError that names the first field that differs between two machines. COLLECTIVE."""
    everyone = topology.gather([topology.host, common_fields(config)])
    first_host, first = everyone[0]
    for stage, (host, theirs) in enumerate(everyone):
        for name in sorted(first.keys() | theirs.keys()):
            if first.get(name) != theirs.get(name):
                raise ThinpipeError(
                    f"{name} is {first.get(name)!r} on {first_host} (stage 0) and {theirs.get(name)!r} on {host} (stage {stage}); "
                    "start all machines with the same config and options"
                )
