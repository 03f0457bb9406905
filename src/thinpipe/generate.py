"""Decoding with a KV cache, in one process or over the pipeline: k numbers per token and boundary.

Legend: B sequences, N new tokens of a round (the prompt, then one), W numbers per token on the wire, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .config import ThinpipeError
from .model import KVCache, Stage
from .topology import DECODE_TAG, Topology


def pick(logits_BV: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> torch.Tensor:
    """The next ids (B,): the likeliest at temperature 0, else drawn from the smallest set of probability `top_p`."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    probabilities, ids = (logits_BV.double() / temperature).softmax(-1).sort(dim=-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= top_p, 0.0)  # the likeliest always stays
    return ids.gather(-1, kept.cpu().multinomial(1, generator=generator).to(ids.device)).squeeze(-1)


@torch.no_grad()
def generate(
    stage: Stage,
    topology: Topology,
    prompt_BN: torch.Tensor,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    end_of_text: int | None = None,
) -> Iterator[torch.Tensor]:
    """Decode over the pipeline; every stage calls it and gets the same ids (B,) per round, as they come.

    What crosses a boundary is what crosses in training: coordinates forward. The last stage picks the id and sends it
    straight to every stage, which adds its static embedding by itself.

    Args:
        prompt_BN: ids, the same on every stage.
        temperature, top_p: 0 and 1 pick the likeliest token.
        end_of_text: ends the decoding once every sequence has produced it.

    Raises:
        ThinpipeError: prompt and new tokens don't fit into the context, or the prompt is empty.
    """
    batch, length = prompt_BN.shape
    if not 0 < length <= stage.spec.context:
        raise ThinpipeError(f"the prompt has {length} tokens; give 1 to model.context = {stage.spec.context}")
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache()
    ids_BN = prompt_BN
    done_B = torch.zeros(batch, dtype=torch.bool)
    for _ in range(min(new_tokens, stage.spec.context - length + 1)):
        ids_BN = _round(stage, topology, ids_BN, cache, temperature, top_p, generator)[:, None]
        yield ids_BN[:, 0]
        if end_of_text is not None:
            done_B |= ids_BN[:, 0] == end_of_text
            if done_B.all():
                return


def _round(
    stage: Stage, here: Topology, ids_BN: torch.Tensor, cache: KVCache, temperature: float, top_p: float, generator: torch.Generator
) -> torch.Tensor:
    """One pass of N new tokens through all stages; the picked ids (B,) on every stage."""
    codec, c_BNW = stage.codec, None
    if not here.is_first:
        wire = torch.empty(*ids_BN.shape, codec.wire_bytes(stage.method.wire_width), dtype=torch.uint8)
        here.wait(here.irecv(wire, here.stage - 1, DECODE_TAG), here.stage - 1)
        c_BNW = codec.decode(wire.to(stage.device), stage.dtype)
    ids_on_device = ids_BN.to(stage.device)
    s = stage.run(c_BNW, ids_on_device, cache)
    picked = torch.empty(ids_BN.shape[0], dtype=torch.int64)
    last = here.stages - 1
    if here.is_last:
        picked = pick(stage.logits(s[:, -1:], ids_on_device[:, -1:])[:, 0], temperature, top_p, generator).cpu()
        works = [(here.isend(picked, other, DECODE_TAG), other) for other in range(last)]
    else:
        sent = codec.encode(s).cpu()
        works = [(here.isend(sent, here.stage + 1, DECODE_TAG), here.stage + 1), (here.irecv(picked, last, DECODE_TAG), last)]
    for work, peer in works:
        here.wait(work, peer)
    return picked
