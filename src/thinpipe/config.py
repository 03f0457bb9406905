"""Everything a run is told: frozen dataclasses, one TOML file, checked before any process starts.

The defaults are the embedded demo. A field's docstring is its help text on the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import json
import re
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .errors import ThinpipeError, check_type
from .sizes import PRESETS, ModelSpec, read_hf_config


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    dir: str | None = None
    """Folder of the run. Not given: a new folder runs/NAME-N. Given: an unfinished run there is resumed."""
    name: str = "demo"
    """Name of the run, used for its folder."""
    seed: int = 0
    """Seed of the weights, the static table, the basis and the order of the data."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where a stage computes (auto: cuda, else mps, else cpu). What crosses a boundary is always host memory."""
    precision: Literal["auto", "float32", "bf16"] = "auto"
    """Precision of the matrix products; parameters stay float32 (auto: bf16 where the hardware has it)."""
    tensorboard: bool = False
    """Also write the numbers of metrics.jsonl to RUN/tensorboard (needs the [tensorboard] extra)."""
    prometheus: str | None = None
    """IP:PORT, as in 127.0.0.1:9400, where the first stage's machine serves Prometheus text while it trains: its loopback, or
    its private address in the mesh; `thinpipe status IP:PORT` reads it too."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    preset: Literal["demo", "small", "medium", "llama-160m", "llama-1b", "llama-8b"] | None = None
    """Named size; a field given beside it wins (neither preset nor hf_config: "demo")."""
    width: int | None = None
    """Width d of the residual stream, in numbers per token."""
    layers: int | None = None
    """Number of transformer blocks."""
    heads: int | None = None
    """Number of query heads."""
    kv_heads: int | None = None
    """Number of key and value heads (grouped-query attention); divides heads."""
    hidden: int | None = None
    """Width of the SwiGLU layer."""
    context: int | None = None
    """Tokens per sequence."""
    vocab: int | None = None
    """Rows of the embedding table. Not given: the tokenizer's size; may only be larger."""
    tied: bool | None = None
    """Share the embedding table with the output head."""
    rope_theta: float | None = None
    """Base of the rotary position frequencies."""
    norm_eps: float | None = None
    """Epsilon of RMSNorm."""
    hf_config: str | None = None
    """A Hugging Face Llama config.json to take the sizes from."""
    init_from: str | None = None
    """A Hugging Face Llama folder to take sizes, weights and (unless data.tokenizer is given) tokenizer from; method "none" only."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    corpus: Literal["stdlib"] = "stdlib"
    """The embedded corpus: the Python standard library's own sources. Replaced by files or dataset."""
    files: tuple[str, ...] = ()
    """Files or globs: text, .jsonl (see field), or tokens (.npy, or .bin raw or speed-run format)."""
    dataset: str | None = None
    """A Hugging Face dataset: hub name, or a folder made by save_to_disk (needs the [hf] extra)."""
    split: str = "train"
    """Split of the dataset."""
    field: str = "text"
    """Name of the text field in .jsonl, .parquet and datasets."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in raw .bin token files."""
    tokenizer: str | None = None
    """A tokenizer.json. Not given: a byte-level BPE is trained on the training documents and cached."""
    vocab: int = 4096
    """Entries of a tokenizer to be trained."""
    validation: float = 0.05
    """Share of the documents held out for validation; they never train the tokenizer or the model."""
    source: Literal["local", "first"] = "local"
    """Who has the data: every stage its own copy, or the first stage only, which then sends the ids along."""
    cache: str | None = None
    """Folder for trained tokenizers and token files (not given: $XDG_CACHE_HOME/thinpipe)."""


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    method: Literal["none", "subspace", "projected", "topk", "quantize", "lowrank"] = "subspace"
    """What a boundary sends: none = the full stream (d numbers a token); subspace = k coordinates, blocks write into the
    subspace; projected = k coordinates, blocks are free between the cuts. For comparison, lossy:
    topk = the k largest numbers; quantize = none with an integer wire; lowrank = the stream projected to k numbers."""
    rank: int = 12
    """Rank k of the shared subspace: numbers per token that cross a boundary. d / k is the compression."""
    segments: int | None = None
    """Runs of layers between two cuts; belongs to the model (not given: pipeline.stages)."""
    wire: Literal["float32", "bfloat16", "int8", "int4", "int2", "int1"] = "bfloat16"
    """Number format on the wire, both directions; integers are packed and have a scale per token."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How an integer wire rounds gradients: up or down at random, right on average, or to the nearest."""
    static: Literal["gaussian", "factored"] = "factored"
    """Static embedding: a full Gaussian table (V x d), or products of two small tables of signs (2 sqrt(V) x d)."""
    stage_table: int | str = 0
    """A trainable table per segment, added to what its blocks read and never sent: its rank, "full", or 0 for none."""
    local_loss: float = 0.0
    """Weight of a next-token loss that each segment has at its end, by its own table (needs stage_table): it learns with little coming
    back over the wire. It costs a head's compute on every stage, in training only."""
    static_scale: float = 1.0
    """Standard deviation of the static embedding's entries."""
    embedding_start: float = 0.25
    """Start of the trainable embedding, times E U: its share of the static embedding (1: as published; 0: none)."""
    static_seed: int | None = None
    """Seed of the static embedding (not given: that of init_from's run, else run.seed)."""
    move_every: int = 500
    """Steps between two moves of the subspace (0: frozen)."""
    move_step: float = 0.25
    """Step size of a subspace move, free of the gradient's scale, in (0, 0.5]."""
    init_from: str | None = None
    """A run of the same width, rank and vocabulary, whose last checkpoint's basis and whose static embedding this one starts with."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    stages: int = 4
    """Processes in a row, each holding some segments."""
    micro_batches: int = 4
    """Parts a batch is cut into, so that the stages work at the same time."""
    schedule: Literal["auto", "wan", "gpipe", "1f1b"] = "wan"
    """Order of compute and communication. wan: receives posted early, sends at once, deep warm-up. auto: the planner's
    choice from compute, links and memory as measured when the run starts."""
    warmup: int | None = None
    """wan only: forwards the first stage runs before its first backward (not given: all micro-batches)."""
    layers_per_segment: tuple[int, ...] = ()
    """Layers of each segment in turn (not given: as even as possible)."""
    replicas: int = 1
    """Pipelines beside each other: each computes its share of every batch, and they average."""
    recompute: bool = False
    """Recompute the materialised stream and its norm in the backward pass: less memory, a little more compute."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = 560
    """Optimizer steps; warm-up and decay are laid out over them."""
    stop_at: int | None = None
    """End early after this step, as a stop would: save, and leave the decay unbent."""
    batch: int = 16
    """Sequences per step."""
    eval_every: int = 200
    """Steps between two validations (0: only at the end)."""
    eval_batches: int = 12
    """Validation batches at most (0: all)."""
    checkpoint_every: int = 200
    """Steps between two checkpoints (0: only at the end)."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Keep every checkpoint whose step this divides (0: none)."""
    max_refused: int = 10
    """Steps refused in a row, for a loss or gradient that is not finite, after which the run ends."""
    roll_back_above: float = 0.0
    """Go back to the newest checkpoint, and on with other data, when the loss is this many times the median of the last 50
    steps (0: never)."""
    watch_every: int = 80
    """Steps between two looks at the rank of the matrices that write into the stream (0: never)."""
    sample: str = "def "
    """Prompt of the sample text shown at the end (empty: no sample)."""

    @property
    def last_step(self) -> int:
        """Steps that are done when the run ends by itself."""
        return min(self.steps, self.stop_at or self.steps)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = 6e-3
    """Peak learning rate."""
    warmup: int = 40
    """Steps of linear warm-up."""
    decay: Literal["linear", "cosine", "none"] = "linear"
    """Shape of the decay to zero after warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; never applied to norms or the embedding."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: float = 1e-8
    """Epsilon of AdamW, outside the root."""
    hidden: Literal["adamw", "muon"] = "adamw"
    """Optimizer of the blocks' matrices; the rest always takes AdamW."""
    clip: float = 1.0
    """Largest global gradient norm, over all stages (0: no clipping)."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    timeout: float = 60.0
    """Seconds after which a silent peer counts as lost."""
    restarts: int = 5
    """Starts from the newest checkpoint after a stage was lost, in a row without a new checkpoint (0: the run ends)."""
    patience: float = 600.0
    """Seconds to wait for machines that are not there, at the start and after a loss."""
    rdzv: str | None = None
    """HOST:PORT where the machines of a run meet: an address of one of them, the same on all (not given: this machine alone)."""
    nodes: int | str = 1
    """Machines of the run; each starts the same share of the stages. "4:5": four, and a fifth may wait as a spare."""
    addr: str | None = None
    """This machine's address towards the others (not given: that of the way to network.rdzv)."""
    replica: int | None = None
    """Which of the pipeline.replicas this machine belongs to, from 0 (not given: this machine runs all of them)."""
    node_rank: int | None = None
    """This machine's place in the pipeline, from 0 (not given: one that is left, as a spare takes)."""
    insecure: bool = False
    """Run over public addresses: anybody who reaches them can read and change what is trained. See thinpipe mesh."""

    @property
    def needed(self) -> int:
        """Machines that take part."""
        return int(str(self.nodes).partition(":")[0])


@dataclass(frozen=True, kw_only=True)
class AverageConfig:
    every: int = 0
    """What replicas average. 0: gradients, in every step. H: the way of H steps that each has trained by itself (DiLoCo)."""
    rank: int = 0
    """Rank of the gradients that travel in every step, by PowerSGD with error feedback (0: they travel whole)."""
    outer_lr: float = 0.7
    """DiLoCo: learning rate of the step along the mean way."""
    outer_momentum: float = 0.9
    """DiLoCo: Nesterov momentum of that step."""
    wire: Literal["float32", "int8"] = "float32"
    """DiLoCo: how the ways travel."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    link: str = "80mbit,25ms"
    """Links for `thinpipe plan`: RATE,DELAY one way; several joined by "/" are for the boundaries in turn."""
    gpu: str = "L4"
    """What each stage computes on, by name; an unknown name lists the known ones."""
    tokens: int | None = None
    """Tokens to train on, for the days that it takes (not given: those of train.steps)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def segments(self) -> int:
        """Number of segments: the model's, not the run's (METHOD.md 3.4b)."""
        return self.compression.segments if self.compression.segments is not None else self.pipeline.stages

    @property
    def static_seed(self) -> int:
        """Seed of the static embedding and the first basis."""
        return self.compression.static_seed if self.compression.static_seed is not None else self.run.seed

    @property
    def layers_of_segments(self) -> list[range]:
        """Layer numbers of each segment; uneven rests go to the first segments, since the last one holds the head."""
        spec = self.sizes()
        each, rest = divmod(spec["layers"], self.segments)
        counts = self.pipeline.layers_per_segment or [each + (i < rest) for i in range(self.segments)]
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]

    @property
    def share(self) -> int:
        """Sequences of a batch that one replica computes."""
        return self.train.batch // self.pipeline.replicas

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch."""
        return self.share // self.pipeline.micro_batches

    def segments_of_stage(self, stage: int, stages: int) -> range:
        """Segments held by `stage` of `stages`: contiguous, as even as possible."""
        return range(stage * self.segments // stages, (stage + 1) * self.segments // stages)

    def sizes(self) -> dict[str, Any]:
        """Model sizes from preset, hf_config and fields, in rising precedence. `vocab` may be missing."""
        model = self.model
        if model.init_from is not None:
            sizes = read_hf_config(Path(model.init_from) / "config.json", "model.init_from")
        elif model.hf_config is not None:
            sizes = read_hf_config(model.hf_config)
        else:
            sizes = dict(PRESETS[model.preset or "demo"])
        given = {f.name: getattr(model, f.name) for f in dataclasses.fields(model)}
        chosen = {name: value for name, value in given.items() if name not in ("preset", "hf_config", "init_from") and value is not None}
        if "heads" in chosen and "kv_heads" not in chosen:
            chosen["kv_heads"] = chosen["heads"]
        if "width" in chosen and "hidden" not in chosen:  # SwiGLU's usual 8/3 d, rounded up to a multiple of 32
            chosen["hidden"] = -(-chosen["width"] * 8 // 3 // 32) * 32
        return sizes | chosen

    def spec(self, tokenizer_vocab: int) -> ModelSpec:
        """The resolved model for a tokenizer of that many entries.

        Raises ThinpipeError if model.vocab is smaller than the tokenizer's.
        """
        sizes = self.sizes()
        vocab = sizes.setdefault("vocab", tokenizer_vocab)
        if vocab < tokenizer_vocab:
            raise ThinpipeError(f"model.vocab = {vocab} is smaller than the tokenizer's {tokenizer_vocab}; leave it out or raise it")
        return ModelSpec(**sizes)

    def check(self) -> Config:
        """Raise ThinpipeError for the first thing that can't work; one line with field, value and what would do."""
        _check(self)
        return self


WITHOUT_RANK = ("none", "quantize")  # methods that send the full width
# Far beyond use; more would keep checks, plans and the tokenizer's training busy for ever, or fill all memory.
LARGEST_VOCAB = 1 << 24
_MOST_LAYERS, _MOST_SEQUENCES = 10_000, 1_000_000


def _positive(group: Any, prefix: str, *names: str, least: float = 1) -> None:
    for name in names:
        value = getattr(group, name)
        if value is not None and value < least:
            raise ThinpipeError(f"{prefix}.{name} = {value} is too small; it must be at least {least}")


def _check(config: Config) -> None:
    c, p, t, o, d = config.compression, config.pipeline, config.train, config.optim, config.data
    for group in dataclasses.fields(config):
        values = getattr(config, group.name)
        for name, kind in _kinds(values.__class__).items():  # what comes from a file has been checked, options and Python's values haven't
            check_type(getattr(values, name), kind, f"{group.name}.{name}")
    sources = [f"model.{name}" for name in ("preset", "hf_config", "init_from") if getattr(config.model, name) is not None]
    if len(sources) > 1:
        raise ThinpipeError(f"{sources[0]} and {sources[1]} are both given; keep one of them")
    if config.model.init_from is not None and c.method != "none":
        raise ThinpipeError(f'model.init_from starts a dense model, not compression.method = {c.method!r}; use compression.method = "none"')
    _positive(config.model, "model", "width", "layers", "heads", "kv_heads", "hidden", "context", "vocab")
    if not config.run.name or any(sign in config.run.name for sign in "/\\\0"):
        raise ThinpipeError(f"run.name = {config.run.name!r} can't name a folder; use letters, digits and dashes")
    if config.run.prometheus is not None:
        _check_prometheus(config.run.prometheus)
    sizes = config.sizes()
    for name in ("rope_theta", "norm_eps"):
        if not sizes[name] > 0:
            raise ThinpipeError(f"model.{name} = {sizes[name]} must be above 0")
    width, heads, kv_heads, layers = sizes["width"], sizes["heads"], sizes["kv_heads"], sizes["layers"]
    vocabs = (("model.vocab", sizes.get("vocab", 0), LARGEST_VOCAB), ("data.vocab", d.vocab, LARGEST_VOCAB))
    for name, value, most in (("model.layers", layers, _MOST_LAYERS), ("train.batch", t.batch, _MOST_SEQUENCES), *vocabs):
        if value > most:
            raise ThinpipeError(f"{name} = {value} is too large; it may be at most {most}")
    if width % heads or (width // heads) % 2:
        raise ThinpipeError(f"model.heads = {heads} doesn't divide model.width = {width} into even head sizes; try {max(1, width // 64)}")
    if heads % kv_heads:
        raise ThinpipeError(f"model.kv_heads = {kv_heads} doesn't divide model.heads = {heads}; use a divisor of it")

    _positive(p, "pipeline", "stages", "micro_batches", "warmup", "replicas")
    _positive(c, "compression", "rank", "segments")
    if c.method == "quantize" and not c.wire.startswith("int"):
        raise ThinpipeError(f'compression.wire = {c.wire!r} quantises nothing; method "quantize" takes "int8", "int4", "int2" or "int1"')
    if c.method == "topk" and width > 65536:
        raise ThinpipeError(f'model.width = {width} is above 65536, which method "topk" can name places in; use a smaller one')
    if c.method not in WITHOUT_RANK and c.rank > width:
        raise ThinpipeError(f"compression.rank = {c.rank} is above model.width = {width}; use {width // 8} for 8x compression")
    if c.init_from is not None and c.method in (*WITHOUT_RANK, "topk"):
        raise ThinpipeError(
            f"compression.init_from = {c.init_from!r} gives a basis, which compression.method = {c.method!r} has none of; "
            'leave it out, or use "subspace", "projected" or "lowrank"'
        )
    if p.stages > config.segments:
        raise ThinpipeError(
            f"pipeline.stages = {p.stages} is above compression.segments = {config.segments}; "
            f"raise segments or use at most {config.segments} stages"
        )
    if config.segments > layers:
        raise ThinpipeError(
            f"compression.segments = {config.segments} (default: pipeline.stages) is above model.layers = {layers}; use at most {layers}"
        )
    if p.layers_per_segment:
        if len(p.layers_per_segment) != config.segments:
            raise ThinpipeError(
                f"pipeline.layers_per_segment has {len(p.layers_per_segment)} entries; "
                f"compression.segments = {config.segments} wants as many"
            )
        if min(p.layers_per_segment) < 1 or sum(p.layers_per_segment) != layers:
            raise ThinpipeError(
                f"pipeline.layers_per_segment = {list(p.layers_per_segment)} must be positive and sum to model.layers = {layers}"
            )
    if c.stage_table != "full" and not (isinstance(c.stage_table, int) and 0 <= c.stage_table <= width):
        raise ThinpipeError(f'compression.stage_table = {c.stage_table!r} must be a rank up to model.width = {width}, 0 or "full"')
    _positive(c, "compression", "local_loss", least=0)
    if c.local_loss and not c.stage_table:
        raise ThinpipeError(f'compression.local_loss = {c.local_loss:g} needs the segments\' tables; set compression.stage_table = "full"')
    if not c.static_scale > 0:
        raise ThinpipeError(f"compression.static_scale = {c.static_scale} must be above 0")
    _positive(c, "compression", "embedding_start", least=0)
    if not 0 < c.move_step <= 0.5:
        raise ThinpipeError(f"compression.move_step = {c.move_step} must be in (0, 0.5]")
    _positive(c, "compression", "move_every", least=0)

    _positive(t, "train", "steps", "batch", "keep_last", "stop_at", "max_refused")
    if t.roll_back_above and not t.roll_back_above > 1:
        raise ThinpipeError(f"train.roll_back_above = {t.roll_back_above} must be above 1 (twice the usual loss: 2), or 0 for never")
    _positive(t, "train", "eval_every", "eval_batches", "checkpoint_every", "keep_every", "watch_every", least=0)
    if t.batch % p.replicas:
        raise ThinpipeError(f"train.batch = {t.batch} is not divisible by pipeline.replicas = {p.replicas}; each computes an equal share")
    if config.share % p.micro_batches:
        near = max(m for m in range(1, min(p.micro_batches, config.share) + 1) if config.share % m == 0)
        share = f"train.batch = {t.batch}" + (f" / pipeline.replicas = {p.replicas}" if p.replicas > 1 else "")
        raise ThinpipeError(f"{share} is not divisible by pipeline.micro_batches = {p.micro_batches}; {near} micro-batches would do")
    if p.schedule == "1f1b" and p.micro_batches < p.stages:
        raise ThinpipeError(
            f"pipeline.micro_batches = {p.micro_batches} is below pipeline.stages = {p.stages}, which schedule 1f1b needs; "
            f"use at least {p.stages} or schedule wan"
        )
    if p.warmup is not None and p.warmup < min(p.stages, p.micro_batches):
        raise ThinpipeError(f"pipeline.warmup = {p.warmup} leaves stages idle; use at least {min(p.stages, p.micro_batches)}")

    if d.files and d.dataset is not None:
        raise ThinpipeError("data.files and data.dataset are both given; keep one of them")
    if d.vocab < 257:
        raise ThinpipeError(f"data.vocab = {d.vocab} is too small for a byte-level tokenizer; use at least 257")
    if not 0 < d.validation < 1:
        raise ThinpipeError(f"data.validation = {d.validation} must be between 0 and 1; 0.05 holds out 5 %")
    for name, value, low, high in (("lr", o.lr, 0, 1e3), ("eps", o.eps, 0, 1)):
        if not low < value < high:
            raise ThinpipeError(f"optim.{name} = {value} must be above {low} and below {high:g}")
    _positive(o, "optim", "warmup", "weight_decay", "clip", least=0)
    if not all(0 <= beta < 1 for beta in o.betas):
        raise ThinpipeError(f"optim.betas = {list(o.betas)} must each be in [0, 1)")
    _positive(config.plan, "plan", "tokens")
    _check_replicas(config)
    _check_network(config)


def _check_replicas(config: Config) -> None:
    a, p, c = config.average, config.pipeline, config.compression
    _positive(a, "average", "every", "rank", least=0)
    if a.rank and a.every:
        raise ThinpipeError(f"average.rank = {a.rank} and average.every = {a.every} don't go together; leave one of them at 0")
    if not 0 < a.outer_lr <= 10 or not 0 <= a.outer_momentum < 1:
        raise ThinpipeError(f"average.outer_lr = {a.outer_lr} must be in (0, 10] and average.outer_momentum = {a.outer_momentum} in [0, 1)")
    if a.wire == "int8" and not a.every:
        raise ThinpipeError('average.wire = "int8" is for average.every above 0: gradients are averaged exactly')
    if a.every and c.method == "subspace" and c.move_every % a.every:
        raise ThinpipeError(
            f"compression.move_every = {c.move_every} is no multiple of average.every = {a.every}; the basis moves in all replicas at once"
        )
    if p.replicas > 1 and config.train.roll_back_above:
        raise ThinpipeError("train.roll_back_above and pipeline.replicas above 1 don't go together; leave one of them out")
    replica = config.network.replica
    if p.replicas > 1 and config.network.rdzv is not None and replica is None:
        raise ThinpipeError(
            f"pipeline.replicas = {p.replicas} over several machines needs network.replica: the one this machine belongs to"
        )
    if replica is not None:
        if not 0 <= replica < p.replicas:
            raise ThinpipeError(f"network.replica = {replica} must be from 0 to pipeline.replicas - 1 = {p.replicas - 1}")
        if config.network.rdzv is None:
            raise ThinpipeError("network.replica needs network.rdzv = HOST:PORT, where the replicas meet")


def _check_prometheus(address: str) -> None:
    host, _, port = address.rpartition(":")
    six = host.startswith("[") and host.endswith("]")
    try:
        ip: ipaddress.IPv4Address | ipaddress.IPv6Address
        ip = ipaddress.IPv6Address(host[1:-1]) if six else ipaddress.IPv4Address(host)
        usable = port.isdecimal() and 0 < int(port) < 65536
    except ValueError:
        usable = False
    if not usable:
        raise ThinpipeError(f"run.prometheus = {address!r} is not IP:PORT; write it as in 127.0.0.1:9400 or [::1]:9400")
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_unspecified or ip.is_global:
        raise ThinpipeError(
            f"run.prometheus = {address!r} would tell strangers about the run, for nothing there is encrypted or asks who reads; "
            "use 127.0.0.1 or this machine's private address in the mesh"
        )


def _check_network(config: Config) -> None:
    n = config.network
    for name, value, least in (("timeout", n.timeout, 0), ("patience", n.patience, 0)):
        if not least < value < 86400:
            raise ThinpipeError(f"network.{name} = {value} must be above {least} and below 86400 seconds")
    _positive(n, "network", "restarts", least=0)
    if not re.fullmatch(r"[1-9][0-9]{0,5}(:[1-9][0-9]{0,5})?", str(n.nodes)) or int(str(n.nodes).rpartition(":")[2]) < n.needed:
        raise ThinpipeError(f'network.nodes = {n.nodes!r} is no number of machines; write 4, or "4:5" for four and a spare one')
    if n.addr is not None and not _is_host(n.addr):
        raise ThinpipeError(f"network.addr = {n.addr!r} is no address; give this machine's, as in 10.0.0.2, or leave it out")
    if n.rdzv is None:
        if n.needed > 1:
            raise ThinpipeError(f"network.nodes = {n.nodes} needs network.rdzv = HOST:PORT, an address of one of the machines")
        return
    host, _, port = n.rdzv.rpartition(":")
    if not _is_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ThinpipeError(f"network.rdzv = {n.rdzv!r} is not HOST:PORT; write it as in 10.0.0.1:29400")
    if config.pipeline.stages % n.needed:
        raise ThinpipeError(
            f"pipeline.stages = {config.pipeline.stages} can't be shared equally by network.nodes = {n.nodes}; use a multiple of {n.needed}"
        )
    if n.node_rank is not None and not 0 <= n.node_rank < n.needed:
        raise ThinpipeError(f"network.node_rank = {n.node_rank} is no place among {n.needed} machines; use 0 to {n.needed - 1}")


def _is_host(name: str) -> bool:
    """Whether it can be looked up at all: an address with two dots in a row, for one, can't."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


@functools.cache
def _kinds(group: Any) -> dict[str, Any]:
    """Types of a group's fields."""
    return typing.get_type_hints(group)


def _convert(value: Any, kind: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, int) and not isinstance(value, bool) and (kind is float or float in typing.get_args(kind)):
        return float(value)
    return value


def from_dict(raw: dict[str, Any], where: str = "config") -> Config:
    """A Config from nested dicts, each key and type checked (not yet `check`ed as a whole).

    Raises ThinpipeError that names the unknown or mistyped key.
    """
    groups = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    built = {}
    for group, values in raw.items():
        if group not in groups:
            raise ThinpipeError(f"{where}: unknown group [{group}]; groups are {', '.join(groups)}")
        if not isinstance(values, dict):
            raise ThinpipeError(f"{where}: {group} must be a table; write [{group}] and its fields below it")
        kind = typing.cast(type, groups[group])
        hints = _kinds(kind)
        for key, value in values.items():
            if key not in hints:
                raise ThinpipeError(f"{where}: unknown field {group}.{key}; fields are {', '.join(hints)}")
            check_type(value, hints[key], f"{where}: {group}.{key}")
        built[group] = kind(**{key: _convert(value, hints[key]) for key, value in values.items()})
    return Config(**built)


def load(path: str | Path) -> Config:
    """Read and check a TOML config. Raises ThinpipeError that names the file and the field."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors put a mark first
        raw = tomllib.loads(text)
    except OSError as error:
        raise ThinpipeError(f"{path}: {error.strerror}; give the path of a TOML config") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, a number of thousands of digits; brackets in brackets
        raise ThinpipeError(f"{path} is not valid TOML: {error}") from None
    if not text.strip():
        raise ThinpipeError(f"{path} is empty; write a config into it, [run] is enough for the demo")
    return from_dict(raw, str(path))


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Nested plain dicts without the fields that are None: what `from_dict` reads back to an equal Config."""
    plain = {f.name: dataclasses.asdict(getattr(config, f.name)) for f in dataclasses.fields(Config)}
    return {
        group: {key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value is not None}
        for group, values in plain.items()
    }


def dump(config: Config) -> str:
    """The config as TOML; `load` of it gives an equal Config."""
    lines = []
    for group, values in to_dict(config).items():
        # JSON's strings, numbers, booleans and arrays are TOML's, but for a sign that JSON leaves as it is.
        plain = {key: json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") for key, value in values.items()}
        lines += [f"[{group}]", *(f"{key} = {text}" for key, text in plain.items()), ""]
    return "\n".join(lines)
