"""A run's folder: made new, or found with an earlier life in it.

RUN/config.toml     the config with segments resolved
RUN/metrics.jsonl   one event per line
RUN/checkpoints/    see checkpoint.py
RUN/tokenizer.json  the tokenizer, if the data has one
RUN/result.json     the summary of a finished run
RUN/logs/           what the stages said
RUN/replicas/N/     the same of replica N, from 1, where all of them run on one machine
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import WITHOUT_RANK, Config, NetworkConfig, ThinpipeError, dump, load, to_dict
from .metrics import write_whole

TOKENIZER = "tokenizer.json"

# What may not change in a run's life: the model, what it learns from and how.
_FIXED_GROUPS = ("model", "compression", "data", "optim")
_MAY_CHANGE = {"data.cache", "data.source", "compression.init_from"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """The summary of a run; the keys of `thinpipe train --json`.

    Attributes:
        train_loss: mean over the last tenth of the steps (at most 50); val_loss: mean over the validation batches (nats per token).
        seconds_per_step: median after the first max(3, 10 %) steps of this life, without validation and saving.
        wire_bytes_per_token: bytes per token, boundary and direction, counted from the tensors sent (`wire_measured`), or
            by formula what the cuts would send when one stage holds all.
        wire_bytes_forward, wire_bytes_backward: bytes of one step over all boundaries.
        dense_wire_bytes_per_token: the same for the full stream in bfloat16; compression: the ratio of the two.
        peak_rss_mb: largest resident memory of each stage, in MB.
        stopped: a stop was asked for before the last step.
    """

    run: str
    method: str
    stages: int
    segments: int
    steps: int
    tokens: int
    train_loss: float
    val_loss: float
    tokens_per_s: float
    seconds_per_step: float
    wire_bytes_per_token: float
    wire_bytes_forward: float
    wire_bytes_backward: float
    wire_measured: bool
    dense_wire_bytes_per_token: float
    compression: float
    tied_bytes_per_step: int
    peak_rss_mb: list[float]
    parameters: int
    refused_steps: int
    stopped: bool
    sample: str


def open_run(config: Config) -> tuple[Config, Path, list[str]]:
    """The run's folder, made if need be, and the config that holds in it.

    Returns the config (segments resolved), the folder, and remarks for the user.

    Raises:
        ThinpipeError: the folder holds a run whose fixed fields differ (field, old and new named) or that is training, or can't be made.
    """
    folder = Path(config.run.dir) if config.run.dir is not None else None
    config = _with_static_seed(with_tokenizer(config), folder).check()
    remarks: list[str] = []
    if config.compression.method not in WITHOUT_RANK and config.compression.rank == config.sizes()["width"]:
        remarks.append(f"compression.rank = {config.compression.rank} is model.width: nothing is saved; a smaller rank does")
    try:
        if folder is None:
            folder = _new_folder(config.run.name)
        folder.mkdir(parents=True, exist_ok=True)
        with alone_in(folder):
            if _has_begun(folder):
                config, remarks = _agree(load(folder / "config.toml"), config)
            elif any(folder.iterdir()) and not (folder / "config.toml").exists():
                raise ThinpipeError(f"run.dir = {str(folder)!r} is not empty and holds no run; give a new folder")
            segments = replace(config.compression, segments=config.segments)
            config = replace(config, run=replace(config.run, dir=str(folder)), compression=segments).check()
            # Which machine this is belongs to the machine, not to the run.
            network = NetworkConfig(timeout=config.network.timeout, restarts=config.network.restarts, patience=config.network.patience)
            write_whole(folder / "config.toml", dump(replace(config, network=network)))
    except OSError as error:
        what = f"run.name = {config.run.name!r}" if folder is None else f"run.dir = {str(folder)!r}"
        raise ThinpipeError(f"{what} can't be used: {error.strerror}; give run.dir a folder that can be written") from None
    return config, folder, remarks


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let no other process of this machine train in the folder meanwhile; who dies lets go.

    Raises ThinpipeError if one does.
    """
    here = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(here, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ThinpipeError(f"another command trains in {folder} now; wait for it or stop it, or give another run.dir") from None
        except OSError:
            pass  # a disk that knows no locks
        yield
    finally:
        os.close(here)


def of_replica(folder: Path, replica: int, replicas: int) -> list[str]:
    """The options of the command that trains one replica of the run in `folder`; each has a folder of its own."""
    if replicas == 1:
        return ["--run.dir", str(folder)]
    return ["--network.replica", str(replica), "--run.dir", str(folder / "replicas" / str(replica) if replica else folder)]


def _has_begun(folder: Path) -> bool:
    """Whether a run is bound to the config in its folder; one that failed before its first event or checkpoint takes another."""
    return (folder / "config.toml").exists() and any((folder / each).exists() for each in ("metrics.jsonl", "checkpoints"))


def with_tokenizer(config: Config) -> Config:
    """A model that starts from another's weights speaks that one's ids."""
    if config.model.init_from is None or config.data.tokenizer is not None:
        return config
    tokenizer = Path(config.model.init_from) / TOKENIZER
    return replace(config, data=replace(config.data, tokenizer=str(tokenizer))) if tokenizer.is_file() else config


def _with_static_seed(config: Config, folder: Path | None) -> Config:
    """Another run's basis goes with its static embedding; a run that has begun in `folder` knows it itself (`_agree`)."""
    source = config.compression.init_from
    if source is None or (folder is not None and _has_begun(folder)):
        return config
    seed = _agreeing(source, config).static_seed
    if config.compression.static_seed is not None:
        return config
    return replace(config, compression=replace(config.compression, static_seed=seed))


def _agreeing(source: str, config: Config) -> Config:
    """The config of the run that `config` begins with the basis of. Raises ThinpipeError if that one's doesn't fit."""
    if not (Path(source) / "config.toml").is_file():
        raise ThinpipeError(f"compression.init_from = {source!r} holds no run (no config.toml); give the folder of a run")
    theirs = load(Path(source) / "config.toml")
    for name, his, ours in (
        ("compression.method", theirs.compression.method, config.compression.method),
        ("compression.rank", theirs.compression.rank, config.compression.rank),
        ("compression.static", theirs.compression.static, config.compression.static),
        ("compression.static_scale", theirs.compression.static_scale, config.compression.static_scale),
        ("model.width", theirs.sizes()["width"], config.sizes()["width"]),
    ):
        if his != ours:
            raise ThinpipeError(f"compression.init_from = {source!r} has {name} = {his!r} and this run {ours!r}; make them equal")
    return theirs


def _new_folder(name: str) -> Path:
    number, runs = 1, Path("runs")
    runs.mkdir(exist_ok=True)
    while True:
        folder = runs / f"{name}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _agree(old: Config, new: Config) -> tuple[Config, list[str]]:
    kept = {name: getattr(old.compression, name) for name in ("segments", "static_seed") if getattr(new.compression, name) is None}
    new = replace(new, compression=replace(new.compression, **kept)).check()
    for name, was, now in differences(old, new):
        raise ThinpipeError(
            f"{name} was {was!r} when the run began and is {now!r} now; put it back, or start a new run with another run.dir"
        )
    remarks = []
    if new.train.steps < old.train.steps:
        raise ThinpipeError(
            f"train.steps was {old.train.steps} and is {new.train.steps} now; it may only grow (train.stop_at ends a run early)"
        )
    if new.train.steps > old.train.steps:
        remarks.append(f"train.steps grows from {old.train.steps} to {new.train.steps}: the learning rate's decay is laid out anew")
    return new, remarks


def differences(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """What may not change in a run's life and has: the field's name, the old value, the new one."""
    was, now = to_dict(old), to_dict(new)
    names = [(group, key) for group in _FIXED_GROUPS for key in {**was[group], **now[group]} if f"{group}.{key}" not in _MAY_CHANGE]
    names += [("run", "seed"), ("train", "batch"), ("pipeline", "layers_per_segment")]
    return [
        (f"{group}.{key}", was[group].get(key), now[group].get(key)) for group, key in names if was[group].get(key) != now[group].get(key)
    ]


def common_fields(config: Config) -> dict[str, Any]:
    """The fields, by name, that must be equal on all machines of a run."""
    groups = to_dict(config)
    groups["model"] |= config.sizes()
    # Files may lie elsewhere on another machine; what is in them is compared when it has been read.
    own = {"model.hf_config", "model.init_from", "compression.init_from", "run.dir", "run.device", "run.prometheus", "run.tensorboard"}
    named = {
        f"{group}.{key}": value
        for group in ("run", "model", "compression", "pipeline", "train", "optim", "average")
        for key, value in groups[group].items()
    }
    return {name: value for name, value in named.items() if name not in own} | {"data.source": groups["data"].get("source")}


def finished(folder: Path, config: Config) -> Result | None:
    """The summary of a run that has done all of the config's steps, or None: of the first replica (see `of_replica`) that has."""
    folders = [folder, *(folder / "replicas" / str(replica) for replica in range(1, config.pipeline.replicas))]
    results = (result for each in folders if (result := result_of(each)) is not None)
    return next((result for result in results if result.steps >= config.train.last_step), None)


def whats_finished(folder: Path | str, config: Config) -> str:
    return f"{folder} is finished; raise train.{'steps' if config.train.last_step == config.train.steps else 'stop_at'} to train on"


def result_of(folder: Path) -> Result | None:
    """The summary of a finished run, or None where there is none or it is damaged."""
    try:
        result = Result(**json.loads((folder / "result.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return result if isinstance(result.steps, int) else None
