"""A run's newest checkpoint put to use: loaded into one process or over the pipeline, evaluated, asked for text."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from . import launch
from .checkpoint import MANIFEST, Checkpoint, find
from .config import Config, ThinpipeError, from_dict, load
from .data import PAD, encode_all, end_of_text_id, entries, prepare, read_tokenizer
from .device import share_cores
from .errors import check_type, tell
from .generate import generate
from .metrics import to_json, write_whole
from .model import Stage, build_stages
from .pipeline import Pipeline, share_owned, to_tensor
from .run import TOKENIZER, differences
from .topology import Topology, connect


@dataclass(frozen=True)
class Loaded:
    """A run as one stage, or one of its stages, on the CPU.

    Attributes:
        config: the run's, with pipeline.stages as loaded.
        stage: with the checkpoint's weights.
        step, vocab, data_digest: what the checkpoint says of itself; sequences: that all replicas had trained on.
        tokenizer: the run's (None for token files without one).
    """

    config: Config
    stage: Stage
    step: int
    sequences: int
    vocab: int
    data_digest: str
    tokenizer: Tokenizer | None


def load_config(folder: Path) -> Config:
    """The config of a run. Raises ThinpipeError if the folder holds none."""
    if not (folder / "config.toml").is_file():
        raise ThinpipeError(f"{folder} holds no run (no config.toml); give the folder that thinpipe train named")
    return load(folder / "config.toml")


def _check_stages(stored: Config, stages: int) -> None:
    if stages > stored.segments:
        raise ThinpipeError(f"{stages} stages are more than this run's {stored.segments} segments; use at most {stored.segments}")


def load_run(folder: Path, topology: Topology | None = None) -> Loaded:
    """The newest whole checkpoint: the whole model, or with `topology` (COLLECTIVE) this process's stage of it.

    Raises:
        ThinpipeError: no run or no whole checkpoint there, or more processes than the run has segments.
    """
    stored = load_config(folder)
    stage_number, stages = (topology.stage, topology.stages) if topology else (0, 1)
    _check_stages(stored, stages)
    alone = replace(stored.pipeline, stages=stages)
    config = replace(stored, pipeline=alone, data=replace(stored.data, source="local"))
    segments = config.segments_of_stage(stage_number, stages)
    layers = tuple(f"model/layers.{i}." for segment in segments for i in config.layers_of_segments[segment])
    layers += tuple(f"model/tables.{segment}." for segment in segments)

    def wanted(names: set[str]) -> set[str]:
        ends = {"model/embed.weight"} if stage_number == 0 or config.sizes()["tied"] else set()
        ends |= {"model/norm.weight", "model/head.weight", "basis/U"} if stage_number == stages - 1 else set()
        return {name for name in names if name.startswith(layers) or name in ends}

    found = find(folder / "checkpoints", topology, wanted, tell)
    if found is None:
        raise ThinpipeError(f"{folder} has no checkpoint yet; train until train.checkpoint_every or to the end")
    vocab, digest = _facts(found, stored, folder)
    lean = replace(config, compression=replace(config.compression, local_loss=0.0))  # local losses are training's only
    (stage,) = build_stages(lean, vocab, [stage_number])
    stage.load_weights(found.tensors(stage.weights().keys() - (set() if stage.is_last else {"basis/U"})))
    if topology:
        share_owned(stage, topology)
    tokenizer = read_tokenizer(str(folder / TOKENIZER)) if (folder / TOKENIZER).is_file() else None
    if tokenizer is not None and entries(tokenizer) > vocab:
        raise ThinpipeError(f"{folder / TOKENIZER} has {entries(tokenizer)} ids and the run's model {vocab}; put back the run's own")
    sequences = found.facts.get("sequences", found.step * config.train.batch)  # older checkpoints don't tell
    return Loaded(config, stage, found.step, sequences, vocab, digest, tokenizer)


def _facts(found: Checkpoint, stored: Config, folder: Path) -> tuple[int, str]:
    """Vocabulary and digest of the data that a checkpoint was trained with, once its config is known to be the run's."""
    match found.facts:
        case {"vocab": int(vocab), "data": str(digest), "config": dict(config)}:
            trained = from_dict(config, str(found.folder / MANIFEST))
        case _:
            raise ThinpipeError(f"{found.folder / MANIFEST} doesn't tell vocab, data and config; restore it, or use another checkpoint")
    for name, was, now in differences(trained, stored):
        if name.startswith(("model.", "compression.")):
            raise ThinpipeError(f"{name} was {was!r} in training and is {now!r} in {folder / 'config.toml'} now; put it back")
    return vocab, digest


def evaluate(folder: Path, batches: int = 0) -> dict[str, Any]:
    """Validation loss (nats per token), perplexity and bits per byte (None for token files) of a run, in one process.

    Args:
        batches: at most so many validation batches (0: the whole split).

    Raises:
        ThinpipeError: as `load_run`, or the data is not what the run was trained on.
    """
    if batches < 0:
        raise ThinpipeError(f"--batches {batches} is too small; give at least 1, or 0 for all")
    run = load_run(folder)
    config = run.config
    data = prepare(config)
    if data.digest != run.data_digest:
        raise ThinpipeError(f"the data differs from what {folder} was trained on; bring the same files, tokenizer and Python version")
    validation = [to_tensor(batch) for batch in data.validation(config.share, batches)]
    with connect(config.network.timeout) as alone:
        loss = Pipeline(run.stage, alone, config.pipeline, config.micro_batch).evaluate(validation)
    tokens = sum(int((batch[:, 1:] != PAD).sum()) for batch in validation)
    bits = None if data.val_bytes is None else loss / math.log(2) * len(data.val) / data.val_bytes
    return {"val_loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits, "tokens": tokens, "step": run.step}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to write.

    Attributes:
        new_tokens: at most so many; the model's context ends it too.
        temperature: 0 takes the likeliest token; top_p: draw from the smallest set of that probability.
    """

    prompt: str
    new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ThinpipeError("the prompt is empty; give one with -p")
        if self.new_tokens < 1:
            raise ThinpipeError(f"--new-tokens {self.new_tokens} is too small; give at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ThinpipeError(f"--temperature {self.temperature} must be 0 or above")
        if not 0 < self.top_p <= 1:
            raise ThinpipeError(f"--top-p {self.top_p} must be in (0, 1]")
        check_type(self.seed, int, "--seed")


def write(run: Loaded, topology: Topology, request: Request) -> Iterator[str]:
    """The text that the model adds to the prompt, piece by piece as its tokens come. COLLECTIVE.

    Raises:
        ThinpipeError: the run has no tokenizer, or the prompt doesn't fit into the context.
    """
    if run.tokenizer is None:
        raise ThinpipeError("the run has no tokenizer.json; put it back, or, if it trained on token files, set data.tokenizer for it")
    (encoded,) = encode_all(run.tokenizer, [request.prompt], "the prompt")
    end, stream = end_of_text_id(run.tokenizer), DecodeStream(skip_special_tokens=True)
    rounds = generate(
        run.stage,
        topology,
        torch.tensor([encoded.ids]),
        request.new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        end_of_text=end,
    )
    for picked in rounds:
        # A token may end inside a character; the stream then waits for the next one.
        piece = stream.step(run.tokenizer, int(picked[0]))
        if piece:
            yield piece


def write_staged(folder: Path, stages: int | None, request: Request, debug: bool = False) -> str:
    """The same over a pipeline of local processes, streamed to stdout by the first; returns prompt and text."""
    stored = load_config(folder)
    stages = stages or stored.pipeline.stages
    _check_stages(stored, stages)  # before so many processes start
    with tempfile.TemporaryDirectory(prefix="thinpipe-generate-") as scratch:
        answer = Path(scratch) / "answer.json"
        arguments = [json.dumps(asdict(request)), str(answer)]
        launch.start("generate", folder, stages, debug, logs=Path(scratch), arguments=arguments)
        return str(json.loads(answer.read_text(encoding="utf-8"))["text"])


def write_stage(folder: Path, topology: Topology, request: Request, answer: Path) -> None:
    """One worker's part of `write_staged`."""
    share_cores(topology)
    text = request.prompt
    for piece in write(load_run(folder, topology), topology, request):
        text += piece
        if topology.is_first:
            print(piece, end="", flush=True)
    if topology.is_first:
        print(flush=True)
        write_whole(answer, to_json({"text": text}))
