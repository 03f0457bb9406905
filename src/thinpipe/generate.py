"""Decoding with a KV cache, in one process or over the pipeline: k numbers per token and boundary.

Legend: B sequences, N new tokens of a round (the prompt, then one), W numbers per token on the wire, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from .config import ThinpipeError
from .model import KVCache, Stage
from .topology import DECODE_TAG, Topology


def pick(logits_BV: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> torch.Tensor:
    """The next ids (B,): the likeliest at temperature 0, else drawn from the smallest set of probability `top_p`."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.double()
    below_BV = logits_BV - logits_BV.amax(-1, keepdim=True)  # so that no temperature makes the largest infinite
    probabilities, ids = (below_BV / temperature).softmax(-1).sort(dim=-1, descending=True)
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
    cache, ids_BN = KVCache(), prompt_BN
    done_B = torch.zeros(batch, dtype=torch.bool)
    coming = _expect(stage, topology, prompt_BN)
    for left in range(min(new_tokens, stage.spec.context - length + 1) - 1, -1, -1):
        # The next round's receive is posted a round ahead: Gloo moves nothing before the sender knows of it.
        now, coming = coming, _expect(stage, topology, prompt_BN[:, :1]) if left else None
        choose = partial(pick, temperature=temperature, top_p=top_p, generator=generator)
        ids_BN = _round(stage, topology, ids_BN, cache, now, choose)[:, None]
        yield ids_BN[:, 0]
        if end_of_text is not None:
            done_B |= ids_BN[:, 0] == end_of_text
            if done_B.all():
                if left:
                    _cancel(stage, topology, prompt_BN[:, :1], coming)
                return


_Receive = tuple[dist.Work, torch.Tensor] | None


def _expect(stage: Stage, here: Topology, ids_BN: torch.Tensor) -> _Receive:
    """Post the receive of what such tokens will be at the boundary before this stage."""
    if here.is_first:
        return None
    wire = _wire(stage, ids_BN)
    return here.irecv(wire, here.stage - 1, DECODE_TAG), wire


def _wire(stage: Stage, ids_BN: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*ids_BN.shape, stage.codec.wire_bytes, dtype=torch.uint8)


def _round(
    stage: Stage, here: Topology, ids_BN: torch.Tensor, cache: KVCache, coming: _Receive, choose: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """One pass of N new tokens through all stages; the ids (B,) that the last one chooses, on every stage."""
    last, picked = here.stages - 1, torch.empty(ids_BN.shape[0], dtype=torch.int64)
    works = [] if here.is_last else [(here.irecv(picked, last, DECODE_TAG), last)]
    c_BNW = None
    if coming is not None:
        work, wire = coming
        here.wait(work, here.stage - 1)
        c_BNW = stage.codec.decode(wire.to(stage.device), stage.dtype)
    ids_on_device = ids_BN.to(stage.device)
    s = stage.run(c_BNW, ids_on_device, cache)
    if here.is_last:
        picked = choose(stage.logits(s[:, -1:], ids_on_device[:, -1:])[:, 0]).cpu()
        works = [(here.isend(picked, other, DECODE_TAG), other) for other in range(last)]
    else:
        sent = stage.codec.encode(s).cpu()
        works.append((here.isend(sent, here.stage + 1, DECODE_TAG), here.stage + 1))
    for work, peer in works:
        here.wait(work, peer)
    return picked


def _cancel(stage: Stage, here: Topology, ids_BN: torch.Tensor, coming: _Receive) -> None:
    """Meet the receives of a round that won't come with empty messages: left alone, they would take a later one's."""
    sent = _wire(stage, ids_BN)
    works = [] if here.is_last else [(here.isend(sent, here.stage + 1, DECODE_TAG), here.stage + 1)]
    if coming is not None:
        works.append((coming[0], here.stage - 1))
    for work, peer in works:
        here.wait(work, peer)
