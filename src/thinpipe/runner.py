"""`thinpipe.train`: the stages of a run started from one call, or this process's part of one under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import launch
from .config import Config, ThinpipeError, from_dict, to_dict
from .data import prepare
from .run import open_run, result_of
from .topology import connect, under_launcher
from .trainer import Result, Trainer


def train(config: Config, say: Callable[[str], None] = lambda line: print(line, file=sys.stderr), debug: bool = False) -> Result | None:
    """Train as the config says: `pipeline.stages` processes on this machine, or this one's part under torchrun.

    Args:
        say: told remarks for the user.

    Returns the summary (None on later stages under torchrun). A finished run is only reported.

    Raises:
        ThinpipeError: the config, the data or a file can't work, or a stage was lost.
        launch.Stopped: the run was stopped by a signal, after saving.
    """
    if under_launcher():
        return _train_under_torchrun(config, say)
    config, folder, remarks = open_run(config)
    for remark in remarks:
        say(remark)
    done = result_of(folder)
    if done is not None and done.get("steps", 0) >= config.train.steps:
        say(f"{folder} is finished; raise train.steps to train on")
        return Result(**done)
    say(f"run {folder}: {config.compression.method}, {config.pipeline.stages} stages, {config.segments} segments")
    prepare(config)  # a mistake in the data is told once, before any process starts
    launch.start("train", folder, config.pipeline.stages, debug)
    finished = result_of(folder)
    assert finished is not None
    return Result(**finished)


def _train_under_torchrun(config: Config, say: Callable[[str], None]) -> Result | None:
    with connect(config.network.timeout) as topology, topology.naming_peers():
        if topology.stages != config.pipeline.stages:
            raise ThinpipeError(f"pipeline.stages = {config.pipeline.stages} but {topology.stages} processes were started; make them equal")
        opened: dict[str, Any] = {}
        if topology.is_first:
            try:
                config, folder, remarks = open_run(config)
                opened = {"dir": str(folder), "segments": config.segments}
                for remark in remarks:
                    say(remark)
            except ThinpipeError as error:
                opened = {"error": str(error)}
        opened = topology.gather(opened)[0]
        if "error" in opened:
            raise ThinpipeError(opened["error"])
        if not topology.is_first:
            values = to_dict(config)
            values["run"]["dir"] = opened["dir"]
            values["compression"]["segments"] = opened["segments"]
            config = from_dict(values)
        Path(opened["dir"]).mkdir(parents=True, exist_ok=True)
        return Trainer(config, topology, Path(opened["dir"]), launch.StopRequest()).fit()
