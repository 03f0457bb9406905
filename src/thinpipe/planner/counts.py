"""What a stage holds, computes and sends, counted from the config: parameters, FLOPs, bytes on the wire, memory.

Tests hold the counts equal to the model's: parameters, moments, the tensors that autograd saves, the bytes that are sent.

Symbols: d width, k rank, h hidden width of the MLP, V vocabulary, T context (tokens of a sequence).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..config import WITHOUT_RANK, CompressionConfig, Config
from ..sizes import ModelSpec

_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
_ID_BYTES = 4  # token ids travel as int32
_INTEGER_BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
_SCALE_BYTES = 2  # integers have one bfloat16 scale per token
_INDEX_BYTES = 2  # of a kept entry; enough for widths to 65,536


def wire_bytes(compression: CompressionConfig, width: int) -> int:
    """Bytes per token and direction that cross a cut, ids apart (METHOD.md sections 3, 5, 6 and 8).

    Dense and quantised streams send all `width` numbers, "topk" sends `rank` values with their places, every other method
    `rank` coordinates.
    """
    method, wire = str(compression.method), str(compression.wire)
    numbers = width if method in WITHOUT_RANK else compression.rank
    if wire in _INTEGER_BITS:
        size = math.ceil(numbers * _INTEGER_BITS[wire] / 8) + _SCALE_BYTES
    else:
        size = numbers * _NUMBER_BYTES[wire]
    return size + (_INDEX_BYTES * numbers if method == "topk" else 0)


def message_bytes(config: Config) -> tuple[int, int]:
    """Bytes of one micro-batch's message forward and backward; with data.source = "first" the ids ride forward."""
    sizes = config.sizes()
    payload = config.micro_batch * sizes["context"] * wire_bytes(config.compression, sizes["width"])
    ids = config.micro_batch * (sizes["context"] + 1) * _ID_BYTES if config.data.source == "first" else 0
    return payload + ids, payload


def wire_bytes_per_token(config: Config) -> float:
    """Payload bytes of a step over all boundaries and both directions / (tokens x boundaries x 2)."""
    return sum(message_bytes(config)) / (2 * config.micro_batch * config.sizes()["context"])


def tied_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes that the first and the last stage each send per step to add up a tied table's gradient (float32)."""
    if not spec.tied or config.pipeline.stages == 1:
        return 0
    return 4 * spec.vocab * (spec.width if is_dense_inside(config) else config.compression.rank)


def tied_bytes_per_step(config: Config, spec: ModelSpec) -> int:
    """Bytes sent per step over all stages for a tied table (METHOD.md section 3.6)."""
    return 2 * tied_bytes(config, spec)


def is_dense_inside(config: Config) -> bool:
    """Whether the blocks write full width, as with every method but "subspace"."""
    return str(config.compression.method) != "subspace"


def has_static(config: Config) -> bool:
    """Whether every stage holds the static table E."""
    return str(config.compression.method) in ("subspace", "projected")


class Matrix(NamedTuple):
    """A trained matrix, (inputs, outputs); with `coordinates` its outputs are the k coordinates of the subspace."""

    inputs: int
    outputs: int
    kind: str
    """As Role.kind: "hidden", "embedding" or "head"."""
    coordinates: bool = False

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True)
class StageSizes:
    """What one stage holds and how often: the counts below are made of it."""

    spec: ModelSpec
    matrices: tuple[Matrix, ...]
    gains: int
    """Numbers in the norms' gains."""
    constrained: int
    """Layers whose stream is k coordinates."""
    free: int
    """Layers whose stream is full width."""
    cuts: int
    """Places where coordinates become a full stream or the other way round."""
    rank: int
    known: int
    """Tensors of X's known part that the reads take: each table's segment has one, those without share the static table's."""
    table_lifts: int
    """Numbers per token that segments' tables lift to full width, all together; behind the last block once more."""
    local: tuple[int, ...]
    """Numbers per token that each local loss's table takes."""
    lookups: tuple[int, ...]
    """Widths of the tables that ids are looked up in, of trained numbers: the embedding, segments' tables and, behind the last
    block, the last segment's once more (0: none)."""
    static: int
    """Bytes of the static table."""
    is_first: bool
    is_last: bool
    tied: bool

    @property
    def layers(self) -> int:
        return self.constrained + self.free

    @property
    def parameters(self) -> int:
        return sum(matrix.size for matrix in self.matrices) + self.gains

    @property
    def products(self) -> int:
        """Parameters that take part in matrix products (an embedding is looked up)."""
        return sum(matrix.size for matrix in self.matrices if matrix.kind != "embedding")

    @property
    def head(self) -> int:
        """Size of the (d, V) product at the model's end, tied or not."""
        return self.spec.width * self.spec.vocab if self.is_last else 0

    @property
    def scored(self) -> int:
        """Sizes of the tables that local losses use as heads, all together."""
        return self.spec.vocab * sum(self.local)

    @property
    def multiplied(self) -> int:
        """Numbers that take part in matrix products, a table's each time that it is a head."""
        return self.products + (self.head if self.tied else 0) + self.scored

    @property
    def local_reads(self) -> int:
        """Local losses that read coordinates."""
        return len(self.local) if self.constrained else 0

    @property
    def lifts_table(self) -> bool:
        """Whether the head is E + A_T U^T, which is made anew for every micro-batch."""
        return self.is_last and self.tied and any(matrix.kind == "embedding" and matrix.coordinates for matrix in self.matrices)


def stage_sizes(config: Config, spec: ModelSpec, stage: int) -> StageSizes:
    """Count stage `stage` of config.pipeline.stages as model.Stage builds it."""
    segments = config.segments_of_stage(stage, config.pipeline.stages)
    is_last = segments[-1] == config.segments - 1
    rank, dense = config.compression.rank, is_dense_inside(config)
    d, kv = spec.width, spec.kv_heads * spec.head_dim
    matrices: list[Matrix] = []
    embedding = Matrix(spec.vocab, d, "embedding") if dense else Matrix(spec.vocab, rank, "embedding", True)
    if stage == 0 or (is_last and spec.tied):
        matrices.append(embedding)
    layers = [0, 0]
    table_lifts = 0
    local: list[int] = []
    table = d if config.compression.stage_table == "full" else int(config.compression.stage_table)
    for segment in segments:
        if table and (segment > 0 or not dense):
            matrices.append(Matrix(spec.vocab, table, "embedding"))
            if config.compression.stage_table != "full":
                table_lifts += table * (2 if segment == config.segments - 1 else 1)
        if config.compression.local_loss and segment < config.segments - 1:
            local.append(table if segment > 0 or not dense else d)
            table_lifts += table if local[-1] < d else 0
        free = dense or segment == config.segments - 1
        w = d if free else rank
        count = len(config.layers_of_segments[segment])
        layers[free] += count
        matrices += [
            *[Matrix(d, d, "hidden"), Matrix(d, kv, "hidden"), Matrix(d, kv, "hidden"), Matrix(d, w, "hidden", not free)] * count,
            *[Matrix(d, spec.hidden, "hidden"), Matrix(d, spec.hidden, "hidden"), Matrix(spec.hidden, w, "hidden", not free)] * count,
        ]
    if is_last and not spec.tied:
        matrices.append(Matrix(d, spec.vocab, "head"))
    if str(config.compression.method) in ("none", "topk", "quantize"):
        cuts = 0
    elif dense:  # a projection on both sides of every cut
        cuts = 2 * len(segments) - (stage == 0) - is_last
    else:
        cuts = int(is_last)
    with_table = sum(segment > 0 or not dense for segment in segments) if table else 0
    return StageSizes(
        spec=spec,
        matrices=tuple(matrices),
        gains=2 * d * sum(layers) + d * (is_last + len(local)),
        constrained=layers[0],
        free=layers[1],
        cuts=cuts,
        rank=rank,
        known=with_table + (has_static(config) and with_table < len(segments)),
        table_lifts=table_lifts,
        local=tuple(local),
        lookups=(embedding.outputs,) * (stage == 0) + (table,) * with_table + (table if is_last and with_table else 0,),
        static=static_bytes(config, spec),
        is_first=stage == 0,
        is_last=is_last,
        tied=spec.tied,
    )


def static_bytes(config: Config, spec: ModelSpec) -> int:
    """Bytes of the static table, bfloat16: V x d, or two tables of about sqrt(V) x d (METHOD.md section 7)."""
    if not has_static(config):
        return 0
    rows = spec.vocab
    if config.compression.static == "factored":
        side = math.isqrt(spec.vocab - 1) + 1
        rows = side + -(-spec.vocab // side)
    return 2 * rows * spec.width


def parameters(config: Config, spec: ModelSpec) -> int:
    """Trained numbers of the whole model; a tied table counts once."""
    whole = replace(config, pipeline=replace(config.pipeline, stages=1), compression=replace(config.compression, segments=config.segments))
    return stage_sizes(whole, spec, 0).parameters


def flops(sizes: StageSizes, micro_batch: int, recompute: bool) -> tuple[float, float]:
    """FLOPs of one micro-batch forward and backward.

    Two per parameter and token forward, four backward; causal attention 2 T d per token and layer forward (half of the
    full square), twice that backward. A read X = E[t] + C U^T costs 2 k d, twice per layer, and as much for the gradient of
    C (U needs none); again with pipeline.recompute. Norms, RoPE and SwiGLU's products are left to the utilisation.
    """
    spec = sizes.spec
    tokens = micro_batch * spec.context
    products = 2.0 * tokens * sizes.multiplied
    attention = 2.0 * tokens * spec.context * spec.width * sizes.layers
    reads = 4.0 * tokens * sizes.rank * spec.width * sizes.constrained
    lifts = 2.0 * tokens * spec.width * (sizes.rank * (sizes.cuts + sizes.local_reads) + sizes.table_lifts)
    if sizes.lifts_table:
        lifts += 2.0 * spec.vocab * sizes.rank * spec.width  # E + A_T U^T, the whole table
    return products + attention + reads + lifts, 2 * (products + attention) + reads * (2 if recompute else 1) + lifts


def saved_bytes(sizes: StageSizes, micro_batch: int, bf16: bool, recompute: bool) -> int:
    """Bytes that autograd keeps for the backward pass of one micro-batch in flight.

    Counted per token and layer from model.Block (a = 2 bytes in bf16, 4 in float32; w = width of the stream): each of the
    two norms keeps X and the normalised X in float32 and a scale (8 d + 4), with recompute only the stream (4 w), and once
    per segment what it knows of X (4 d); the five matrices that read X keep a cast copy each in bf16 (10 d), or share one per
    norm in float32 (8 d); attention keeps queries, keys and values at all heads, its output and a float32 sum per head; SwiGLU
    keeps four tensors of width h.
    The first stage adds the ids, the last one and each local loss a norm, the head's input, float32 log-probabilities (4 V per
    token) and the targets; under bf16 each use of the basis its cast, and a tied head E + A_T U^T. CUDA's fused norm may keep 8 d
    less per layer and token than is counted here.
    """
    spec, d = sizes.spec, sizes.spec.width
    number = 2 if bf16 else 4
    inputs = 10 * d if bf16 else 8 * d
    layer = inputs + 4 * number * d + 4 * spec.heads + 4 * number * spec.hidden
    per_token = layer * sizes.layers
    if recompute:
        lifted = sizes.table_lifts and not sizes.static  # by a product, and nothing in float32 is added
        per_token += 2 * 4 * (sizes.rank * sizes.constrained + d * sizes.free) + (number if lifted else 4) * d * sizes.known
    else:
        per_token += 2 * (8 * d + 4) * sizes.layers
    if sizes.is_first:
        per_token += 8
    if sizes.is_last:
        per_token += 8 * d + 4 + number * d + 4 * spec.vocab
    per_token += sum(8 * d + 4 + number * width + 4 * spec.vocab for width in sizes.local)
    per_token += 8 * (sizes.is_last or bool(sizes.local))
    bases = sizes.cuts + sizes.local_reads + sizes.lifts_table + (0 if recompute else 2 * sizes.constrained)
    tables = number * (sizes.head if sizes.lifts_table else 0) + (2 * bases * sizes.rank * d if bf16 else 0)
    return micro_batch * spec.context * per_token + tables


def weight_copies(sizes: StageSizes, bf16: bool) -> int:
    """Bytes of the bf16 copies of the weights that a step's micro-batches share (Pipeline.step's autocast)."""
    tied = sizes.matrices[0].size if sizes.is_last and sizes.tied else 0
    return 2 * (sizes.products + tied + sizes.scored) if bf16 else 0


@dataclass(frozen=True)
class Memory:
    """Bytes on one stage, by what they are for."""

    weights: int
    gradients: int
    moments: int
    static: int
    activations: int
    working: int
    fixed: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.static + self.activations + self.working + self.fixed


def stage_memory(sizes: StageSizes, config: Config, in_flight: int, bf16: bool, fixed: int) -> Memory:
    """Memory of a stage that holds `in_flight` micro-batches at once (schedule.in_flight).

    Assumes: parameters, gradients and moments in float32, and `weight_copies`; AdamW with two moments, of which the second is
    one number per row for coordinates (METHOD.md section 3), Muon with one for the blocks' matrices; activations as `saved_bytes`;
    working space for the largest of: the gradients inside SwiGLU, a matrix's gradient (in bf16, then in float32), a table's and,
    with a head, the logits and their gradient beside the saved log-probabilities, or E + A_T U^T in the making; beside it the
    gradient of a table that is used more than once, until the last one of a backward has come; `fixed` for libraries. Messages
    lie in host memory and aren't counted; neither is fragmentation.
    """
    spec = sizes.spec
    muon = config.optim.hidden == "muon"
    moments = 8 * sizes.gains
    for matrix in sizes.matrices:
        moments += 4 * matrix.size
        if not (muon and matrix.kind == "hidden"):
            moments += 4 * (matrix.inputs if matrix.coordinates else matrix.size)
    number = 2 if bf16 else 4
    tokens = config.micro_batch * spec.context
    product, shared = (6, 4) if bf16 else (4, 8)  # of a gradient; of a head's that waits for a lookup's, in float32 with their sum
    local, hidden = max(sizes.local, default=0), max(matrix.size for matrix in sizes.matrices if matrix.kind == "hidden")
    waiting = spec.vocab * max(shared * local, 4 * sizes.lookups[-1])
    if sizes.is_first and sizes.is_last and sizes.tied:
        waiting += shared * sizes.matrices[0].size
    working = waiting + max(2 * number * spec.hidden * tokens, product * hidden, 4 * spec.vocab * max(sizes.lookups))
    working = max(working, product * max(sizes.head, spec.vocab * local))
    if sizes.is_last or sizes.local:
        working = max(working, 8 * spec.vocab * tokens, 8 * sizes.head if sizes.lifts_table else 0)
    return Memory(
        weights=4 * sizes.parameters + weight_copies(sizes, bf16),
        gradients=4 * sizes.parameters,
        moments=moments,
        static=sizes.static,
        activations=in_flight * saved_bytes(sizes, config.micro_batch, bf16, config.pipeline.recompute),
        working=working,
        fixed=fixed,
    )
