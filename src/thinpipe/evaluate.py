"""Validation of a checkpoint in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .checkpoint import find
from .config import Config, ThinpipeError, from_dict, load
from .data import PAD, prepare
from .method import Subspace
from .model import Stage, build_stages
from .pipeline import Pipeline, to_tensor
from .topology import connect


def load_run(folder: Path) -> tuple[Config, Stage, dict[str, Any]]:
    """A run's newest whole checkpoint as one stage that holds the whole model.

    Returns the config (pipeline.stages = 1), the stage on the CPU and {"step", "vocab", "data"}.

    Raises:
        ThinpipeError: no run or no whole checkpoint there.
    """
    if not (folder / "config.toml").is_file():
        raise ThinpipeError(f"{folder} holds no run (no config.toml); give the folder that thinpipe train named")
    config = load(folder / "config.toml")
    found = find(folder / "checkpoints", None, None, lambda line: print(line))
    if found is None:
        raise ThinpipeError(f"{folder} has no checkpoint yet; train until train.checkpoint_every or to the end")
    config = from_dict(found.facts["config"])
    alone = replace(config, pipeline=replace(config.pipeline, stages=1), data=replace(config.data, source="local"))
    (stage,) = build_stages(alone, found.facts["vocab"])
    with torch.no_grad():
        for name, parameter, _ in stage.roles():
            parameter.copy_(found.tensor(f"model/{name}"))
        if isinstance(stage.method, Subspace):
            stage.method.U_DK.copy_(found.tensor("basis/U"))
    return alone, stage, {"step": found.step, "vocab": found.facts["vocab"], "data": found.facts["data"]}


def evaluate(folder: Path, batches: int = 0) -> dict[str, Any]:
    """Validation loss (nats per token), perplexity and bits per byte (None for token files) of a run.

    Args:
        batches: at most so many validation batches (0: the whole split).
    """
    config, stage, facts = load_run(folder)
    data = prepare(config)
    if data.digest != facts["data"]:
        raise ThinpipeError(f"the data differs from what {folder} was trained on; bring the same files, tokenizer and Python version")
    validation = [to_tensor(batch) for batch in data.validation(config.train.batch, batches)]
    with connect(config.network.timeout) as alone:
        loss = Pipeline(stage, alone, config.pipeline, config.micro_batch).evaluate(validation)
    tokens = sum(int((batch[:, 1:] != PAD).sum()) for batch in validation)
    bits = None if data.val_bytes is None else loss / math.log(2) * len(data.val) / data.val_bytes
    return {"val_loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits, "tokens": tokens, "step": facts["step"]}
