"""A Llama-style decoder whose stream is a method's: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Legend: B sequences, T tokens, D stream width, W width of a segment's state, H heads, G key/value heads, E head size,
F hidden width of the MLP, V vocabulary. Weights are torch.nn.Linear's, (out, in): the transpose of the paper's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from .codecs import Codec, cross, make_codec
from .config import Config, ModelSpec, ThinpipeError
from .data import PAD
from .method import Dense, Role, make_method
from .subspace import initial_basis

GAIN = Role("gain")
HIDDEN = Role("hidden")


class Linear(nn.Linear):
    """A matrix without bias that knows its role."""

    def __init__(self, inputs: int, outputs: int, role: Role) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.role = role


class Embedding(nn.Embedding):
    def __init__(self, vocab: int, width: int, role: Role) -> None:
        super().__init__(vocab, width)
        self.role = role

    def scores(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The table the other way round: how well each of the V rows fits, (B, T, V)."""
        return F.linear(x_BTD, self.weight)


class StageTable(Embedding):
    """A trainable part of X that a segment knows from the ids: there from its first block to its last, never on the wire.

    A row per token at full width, or R numbers that a fixed orthonormal (D, R) lifts (METHOD.md section 5, anchors). Starts at 0.
    """

    lift_DR: torch.Tensor | None

    def __init__(self, vocab: int, width: int, rank: int | None, seed: int) -> None:
        super().__init__(vocab, rank or width, Role("embedding"))
        self.register_buffer("lift_DR", initial_basis(width, rank, seed).float() if rank else None)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids_BT)
        return rows if self.lift_DR is None else rows @ self.lift_DR.T

    def scores(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return super().scores(x_BTD if self.lift_DR is None else x_BTD @ self.lift_DR)


class _Beside(torch.autograd.Function):
    """x as it is; behind it, backward also minimises `weight` times a loss of this process's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.share = loss.new_tensor(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return gradients[0], ctx.share, None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.role, self.eps = GAIN, eps

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class KVCache:
    """Keys and values of the tokens that a stage has seen, for decoding; per layer (B, G, context, E)."""

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def extend(self, layer: int, k_BGTE: torch.Tensor, v_BGTE: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to a layer; returns all keys and values so far. `length` moves on once all layers have been extended."""
        if layer not in self._layers:
            shape = (*k_BGTE.shape[:2], context, k_BGTE.shape[-1])
            self._layers[layer] = (k_BGTE.new_empty(shape), v_BGTE.new_empty(shape))
        keys, values = self._layers[layer]
        end = self.length + k_BGTE.shape[2]
        keys[:, :, self.length : end], values[:, :, self.length : end] = k_BGTE, v_BGTE
        return keys[:, :, :end], values[:, :, :end]


class Rope(nn.Module):
    """Rotary positions, half-split layout as in Hugging Face's Llama; angles in float32 whatever the model's dtype."""

    cos_TE: torch.Tensor
    sin_TE: torch.Tensor

    def __init__(self, head_dim: int, context: int, theta: float) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles_TE = torch.arange(context, dtype=torch.float32)[:, None] * frequencies.repeat(2)
        self.register_buffer("cos_TE", angles_TE.cos(), persistent=False)
        self.register_buffer("sin_TE", angles_TE.sin(), persistent=False)

    def forward(self, x_BHTE: torch.Tensor, start: int) -> torch.Tensor:
        """Rotate queries or keys of positions start, start + 1, ..."""
        end = start + x_BHTE.shape[2]
        left, right = x_BHTE.chunk(2, dim=-1)
        rotated = torch.cat((-right, left), dim=-1)
        return (x_BHTE * self.cos_TE[start:end] + rotated * self.sin_TE[start:end]).to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; writes W numbers per token."""

    def __init__(self, spec: ModelSpec, width: int, writer: Role) -> None:
        super().__init__()
        self.head_dim, self.groups = spec.head_dim, spec.heads // spec.kv_heads
        self.q = Linear(spec.width, spec.heads * spec.head_dim, HIDDEN)
        self.k = Linear(spec.width, spec.kv_heads * spec.head_dim, HIDDEN)
        self.v = Linear(spec.width, spec.kv_heads * spec.head_dim, HIDDEN)
        self.o = Linear(spec.heads * spec.head_dim, width, writer)

    def forward(self, x_BTD: torch.Tensor, rope: Rope, layer: int, cache: KVCache | None) -> torch.Tensor:
        start = 0 if cache is None else cache.length
        q_BHTE, k_BGTE, v_BGTE = (m(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in (self.q, self.k, self.v))
        q_BHTE, k_BGTE = rope(q_BHTE, start), rope(k_BGTE, start)
        if cache is not None:
            k_BGTE, v_BGTE = cache.extend(layer, k_BGTE, v_BGTE, rope.cos_TE.shape[0])
        k_BHTE, v_BHTE = (x if self.groups == 1 else x.repeat_interleave(self.groups, dim=1) for x in (k_BGTE, v_BGTE))
        tokens = q_BHTE.shape[2]
        if start == 0 or tokens == 1:
            y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=start == 0 and tokens > 1)
        else:  # several new tokens behind cached ones
            seen = torch.ones(tokens, start + tokens, dtype=torch.bool, device=x_BTD.device).tril(start)
            y_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, attn_mask=seen)
        return self.o(y_BHTE.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU; writes W numbers per token."""

    def __init__(self, spec: ModelSpec, width: int, writer: Role) -> None:
        super().__init__()
        self.gate = Linear(spec.width, spec.hidden, HIDDEN)
        self.up = Linear(spec.width, spec.hidden, HIDDEN)
        self.down = Linear(spec.hidden, width, writer)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """One transformer block: reads X (width D) from the state and adds W numbers per token to it."""

    def __init__(self, spec: ModelSpec, width: int, writer: Role, layer: int, recompute_norms: bool) -> None:
        super().__init__()
        self.layer, self.recompute_norms = layer, recompute_norms
        self.attn_norm = RMSNorm(spec.width, spec.norm_eps)
        self.attn = Attention(spec, width, writer)
        self.mlp_norm = RMSNorm(spec.width, spec.norm_eps)
        self.mlp = MLP(spec, width, writer)

    def forward(self, s_BTW: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor], rope: Rope, cache: KVCache | None) -> torch.Tensor:
        s_BTW = s_BTW + self.attn(self._normed(self.attn_norm, read, s_BTW), rope, self.layer, cache)
        return s_BTW + self.mlp(self._normed(self.mlp_norm, read, s_BTW))

    def _normed(self, norm: RMSNorm, read: Callable[[torch.Tensor], torch.Tensor], s_BTW: torch.Tensor) -> torch.Tensor:
        if self.recompute_norms and torch.is_grad_enabled():
            return recompute(lambda s: norm(read(s)), s_BTW, use_reentrant=False, preserve_rng_state=False)
        return norm(read(s_BTW))


class Stage(nn.Module):
    """Consecutive segments of the model, cuts between them included; the first has the embedding, the last the head.

    Parameter names are the model's, whatever the number of stages: "layers.3.attn.q.weight".

    Args:
        segments: which of the model's segments this stage holds.
        layers_of_segments: layer numbers of every segment of the model.
        codec: number format at the cuts.
        batch_tokens: tokens of a whole batch; the loss of a micro-batch is its summed cross-entropy over this, so that
            micro-batches add up to the mean and gradients don't depend on their number.
        tables: the rank of every segment's table ("full": full width; 0: no tables).
        local_loss: weight of the next-token loss that each segment but the last has at its end by its own table (deep
            supervision, arXiv 1409.5185): it learns also where little comes back over the wire. Nothing of it is in the model's loss.
        ids_travel: token ids cross the boundaries beside the coordinates (data.source = "first").
    """

    def __init__(
        self,
        spec: ModelSpec,
        method: Dense,
        segments: Sequence[int],
        layers_of_segments: Sequence[range],
        codec: Codec,
        batch_tokens: int,
        *,
        tables: int | str = 0,
        local_loss: float = 0.0,
        seed: int = 0,
        ids_travel: bool = False,
        recompute_norms: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.method, self.codec = spec, method, codec
        self.bf16 = False  # matrix products in bfloat16 (autocast); the trainer decides by the device
        self.segments = list(segments)
        self.layers_of_segments = layers_of_segments
        self.batch_tokens = batch_tokens
        self.is_first = self.segments[0] == 0
        self.is_last = self.segments[-1] == len(layers_of_segments) - 1
        self.sends_ids, self.receives_ids = ids_travel and not self.is_last, ids_travel and not self.is_first
        self.rope = Rope(spec.head_dim, spec.context, spec.rope_theta)
        if self.is_first or (self.is_last and spec.tied):
            self.embed = Embedding(spec.vocab, method.embedding_width, method.embedding_role)
        self.tables = nn.ModuleDict()
        for segment in self.segments if tables else []:
            if segment > 0 or method.embedding_role.coordinates is not None:  # else the embedding is that already
                rank = None if tables == "full" else int(tables)
                self.tables[str(segment)] = StageTable(spec.vocab, spec.width, rank, seed + 1 + segment)
        self.local_loss = local_loss
        self.local_norms = nn.ModuleDict()
        for segment in self.segments if local_loss else []:
            if segment < len(layers_of_segments) - 1:
                self.local_norms[str(segment)] = RMSNorm(spec.width, spec.norm_eps)
        self.layers = nn.ModuleDict()
        for segment in self.segments:
            for i in layers_of_segments[segment]:
                self.layers[str(i)] = Block(spec, method.width(segment), method.writer(segment), i, recompute_norms)
        if self.is_last:
            self.norm = RMSNorm(spec.width, spec.norm_eps)
            if not spec.tied:
                self.head = Linear(spec.width, spec.vocab, Role("head"))

    @property
    def device(self) -> torch.device:
        return self.rope.cos_TE.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters and of the stream."""
        return self.rope.cos_TE.dtype

    def forward(self, c_BTW: torch.Tensor | None, tokens_BS: torch.Tensor) -> torch.Tensor:
        """One micro-batch through the stage; S = T + 1, inputs and targets overlap by T.

        Args:
            c_BTW: what crossed the cut before this stage, decoded; None on the first stage.
            tokens_BS: integer ids, PAD where there is none.

        Returns what is to cross the next cut, (B, T, W), or the last stage's share of the loss.
        """
        ids_BT = tokens_BS[:, :-1].to(self.device)
        targets_BT = tokens_BS[:, 1:].to(self.device, torch.int64)
        s = self.run(c_BTW, ids_BT, targets_BT=targets_BT if torch.is_grad_enabled() else None)
        return self._loss(self.logits(s, ids_BT), targets_BT) if self.is_last else s

    def _loss(self, logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the batch's mean cross-entropy."""
        total = F.cross_entropy(logits_BTV.flatten(0, 1).to(self.dtype), targets_BT.flatten(), ignore_index=PAD, reduction="sum")
        return total / self.batch_tokens

    def run(
        self,
        c_BTW: torch.Tensor | None,
        ids_BT: torch.Tensor,
        cache: KVCache | None = None,
        targets_BT: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Through all segments: from what crossed the cut before (None: from the ids) to what is to cross the next one;
        for the last stage to its final state, (B, T, W). Backward adds the segments' local losses where `targets_BT` are given."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return self._run(c_BTW, ids_BT.clamp(min=0), cache, targets_BT)

    def _run(self, c: torch.Tensor | None, ids_BT: torch.Tensor, cache: KVCache | None, targets_BT: torch.Tensor | None) -> torch.Tensor:
        static_BTD = self.method.static(ids_BT, self.dtype)
        c = self.embed(ids_BT) if c is None else c
        for segment in self.segments:
            s = self.method.enter(c, segment)
            known_BTD = self._known(static_BTD, ids_BT, segment)

            def read(s: torch.Tensor, segment: int = segment, known_BTD: torch.Tensor | None = known_BTD) -> torch.Tensor:
                return self.method.read(s, known_BTD, segment)

            for i in self.layers_of_segments[segment]:
                s = self.layers[str(i)](s, read, self.rope, cache)
            if segment == len(self.layers_of_segments) - 1:
                c = s
            else:
                if targets_BT is not None and self.local_loss:
                    x_BTD = self.local_norms[str(segment)](read(s))
                    s = _Beside.apply(s, self._loss(self._table(segment).scores(x_BTD), targets_BT), self.local_loss)
                c = self.method.leave(s, segment)
                if segment != self.segments[-1]:
                    c = cross(c, self.codec)
        if cache is not None:
            cache.length += ids_BT.shape[1]
        return c

    def _table(self, segment: int) -> Embedding:
        """The table that a segment has of its own; of the first one the embedding may be that."""
        tables: dict[str, Any] = dict(self.tables.items())
        table: Embedding = tables.get(str(segment)) or self.embed
        return table

    def _known(self, static_BTD: torch.Tensor | None, ids_BT: torch.Tensor, segment: int) -> torch.Tensor | None:
        """The part of X that a segment knows by itself: the method's static one and the segment's table."""
        if str(segment) not in self.tables:
            return static_BTD
        table_BTD: torch.Tensor = self.tables[str(segment)](ids_BT)
        return table_BTD if static_BTD is None else static_BTD + table_BTD

    def logits(self, s: torch.Tensor, ids_BT: torch.Tensor) -> torch.Tensor:
        """The last stage's logits (B, T, V) from its final state and the ids it read."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            ids_BT, last = ids_BT.clamp(min=0), self.segments[-1]
            known_BTD = self._known(self.method.static(ids_BT, self.dtype), ids_BT, last)
            x_BTD = self.norm(self.method.read(s, known_BTD, last))
            return F.linear(x_BTD, self.method.full_embedding(self.embed.weight)) if self.spec.tied else self.head(x_BTD)

    def weights(self) -> dict[str, torch.Tensor]:
        """Everything that a trained stage holds, by its name in a checkpoint: "model/NAME" and the basis "basis/U"."""
        weights = {f"model/{name}": parameter.detach() for name, parameter, _ in self.roles()}
        if self.method.basis is not None:
            weights["basis/U"] = self.method.basis
        return weights

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what is given of `weights()`. Raises ThinpipeError if one has another shape or holds whole numbers."""
        for name, tensor in self.weights().items():
            if name in tensors:
                given = tensors[name]
                if given.shape != tensor.shape or not given.is_floating_point():
                    theirs, ours = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (given, tensor))
                    raise ThinpipeError(f"{name} is {theirs} instead of {ours}; restore the config or the file that it comes from")
                tensor.copy_(given)

    def roles(self) -> Iterator[tuple[str, nn.Parameter, Role]]:
        """Name, parameter and role of everything trained, in the model's order: the same however it is cut."""
        parts = ["embed"]
        for segment in self.segments:
            parts += [f"tables.{segment}", f"local_norms.{segment}", *(f"layers.{i}" for i in self.layers_of_segments[segment])]
        modules = dict(self.named_modules())
        for part in filter(modules.__contains__, [*parts, "norm", "head"]):
            for prefix, module in modules[part].named_modules(prefix=part):
                for name, parameter in module.named_parameters(recurse=False):
                    yield f"{prefix}.{name}", parameter, module.role

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw every weight from (seed, its name), so that the model doesn't depend on how it is cut.

        Matrices: N(0, 1/in); those that write into the stream: the same over sqrt(2 layers), GPT-2's rule, and where they
        hold coordinates times sqrt(d/k), so that K numbers carry what D would. Embedding rows: the method's, else N(0, 1).
        Head: N(0, 1/d) (docs/LOG.md has the trials). A tied head keeps the
        embedding's scale, so there the final gain starts at 1/d: the input token's own logit, |E[t]|^2 gain, is then of order one;
        the same where the first segment's local loss uses the embedding.
        """
        for name, parameter, role in self.roles():
            generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big"))
            if role.kind == "gain":
                before_rows = (self.spec.tied and name == "norm.weight") or (name == "local_norms.0.weight" and "0" not in self.tables)
                parameter.fill_(1 / self.spec.width if before_rows else 1.0)
                continue
            if name.startswith("tables."):
                parameter.zero_()
                continue
            if role.kind == "embedding" and (start := self.method.initial_embedding()) is not None:
                parameter.copy_(start)
                continue
            std = 1.0 if role.kind == "embedding" else parameter.shape[1] ** -0.5
            if name.endswith((".o.weight", ".down.weight")):
                std /= math.sqrt(2 * self.spec.layers)
                if role.coordinates is not None:
                    std *= math.sqrt(self.spec.width / parameter.shape[role.coordinates])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def build_stages(config: Config, vocab: int, stages: Sequence[int] | None = None, wire: str | None = None) -> list[Stage]:
    """The stages of a run, initialised, on the CPU in float32.

    Args:
        config: a checked config.
        vocab: entries of the tokenizer.
        stages: which of the run's stages to build (None: all).
        wire: number format at the cuts, in place of compression.wire.
    """
    spec, layers = config.spec(vocab), config.layers_of_segments
    count = config.pipeline.stages
    built = []
    for stage in range(count) if stages is None else stages:
        method = make_method(config.compression, spec, config.segments, config.static_seed)
        built.append(
            Stage(
                spec,
                method,
                config.segments_of_stage(stage, count),
                layers,
                make_codec(config.compression, method.wire_width, wire),
                config.share * spec.context,
                tables=config.compression.stage_table,
                local_loss=config.compression.local_loss,
                seed=config.static_seed,
                ids_travel=config.data.source == "first",
                recompute_norms=config.pipeline.recompute,
            )
        )
        built[-1].initialise(config.run.seed)
    return built
