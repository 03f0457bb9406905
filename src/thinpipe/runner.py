"""`thinpipe.train`: the stages of a run started from one call, or this process's part of one under torchrun."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import launch
from .config import Config, ThinpipeError, dump, from_dict, to_dict
from .data import prepare
from .metrics import write_whole
from .run import finished, open_run, result_of
from .topology import Topology, connect, under_launcher
from .trainer import Result, Trainer


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def train(config: Config, say: Callable[[str], None] = _say, debug: bool = False) -> Result | None:
    """Train as the config says: `pipeline.stages` processes on this machine, or this one's part under torchrun.

    Args:
        say: told remarks for the user.

    Returns the summary (None on later stages under torchrun). A finished run is only reported.

    Raises:
        ThinpipeError: the config, the data or a file can't work, or a stage was lost.
        launch.Stopped: the run was stopped by a signal, after saving.
    """
    if under_launcher():
        with connect(config.network.timeout, config.network.node_rank) as topology, topology.naming_peers():
            return train_together(config, topology, say)
    if config.network.rdzv is not None:
        return _join(config.check(), say, debug)
    config, folder, remarks = open_run(config)
    for remark in remarks:
        say(remark)
    if (done := finished(folder, config)) is not None:
        say(f"{folder} is finished; raise train.steps to train on")
        return Result(**done)
    say(f"run {folder}: {config.compression.method}, {config.pipeline.stages} stages, {config.segments} segments")
    prepare(config)  # a mistake in the data is told once, before any process starts
    launch.start("train", folder, config.pipeline.stages, debug)
    result = result_of(folder)
    assert result is not None
    return Result(**result)


def _join(config: Config, say: Callable[[str], None], debug: bool) -> Result | None:
    """This machine's share of a run over several; the summary where the first stage is."""
    prepare(config)
    network, share = config.network, config.pipeline.stages // config.network.nodes
    met = launch.meeting(network, f"thinpipe-{config.run.name}", say=say)
    with tempfile.TemporaryDirectory(prefix="thinpipe-join-") as scratch:
        folder = Path(scratch)
        write_whole(folder / "config.toml", dump(config))
        # Not in the run's folder: it may not be there yet, and on a shared disk it is everybody's.
        launch.start("join", folder, share, debug, logs=folder / "logs", meeting=met)
        results = [json.loads((folder / f"result-{local}.json").read_text(encoding="utf-8")) for local in range(share)]
    return next((Result(**result) for result in results if result is not None), None)


def train_together(config: Config, topology: Topology, say: Callable[[str], None] = _say) -> Result | None:
    """Train as one of the processes that someone started; the first one opens the run for all. COLLECTIVE.

    Returns the summary on the first stage, None on the others.

    Raises:
        ThinpipeError: as `train`, or other processes were started than the config wants.
    """
    if topology.stages != config.pipeline.stages:
        raise ThinpipeError(f"pipeline.stages = {config.pipeline.stages} but {topology.stages} processes were started; make them equal")
    opened: dict[str, Any] = {}
    if topology.is_first:
        try:
            config, folder, remarks = open_run(config)
            opened = {"dir": str(folder), "segments": config.segments, "done": finished(folder, config)}
            for remark in remarks:
                say(remark)
        except ThinpipeError as error:
            opened = {"error": str(error)}
    opened = topology.gather(opened)[0]
    if "error" in opened:
        raise ThinpipeError(opened["error"])
    if (done := opened["done"]) is not None:
        if topology.is_first:
            say(f"{opened['dir']} is finished; raise train.steps to train on")
        return Result(**done) if topology.is_first else None
    if not topology.is_first:
        values = to_dict(config)
        values["run"]["dir"] = opened["dir"]
        values["compression"]["segments"] = opened["segments"]
        config = from_dict(values)
    Path(opened["dir"]).mkdir(parents=True, exist_ok=True)
    return Trainer(config, topology, Path(opened["dir"]), launch.StopRequest()).fit()
