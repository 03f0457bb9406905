"""Stages joined into a pipeline: schedule tuples become torch actions, boundaries become Gloo messages.

The only user of torch's private pipelining names (torch 2.13; a test compares with ScheduleGPipe bit for bit). One stage
is a pipeline of one: the same code, no neighbour.

Legend: B sequences, S = context + 1 tokens of a window, T context, W numbers per token on the wire.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from . import schedule
from .config import PipelineConfig
from .data import PAD
from .method import Subspace
from .model import Stage
from .topology import TALLY_TAG, TIED_TAG, Topology

_TORCH_KIND = {
    "forward": _ComputationType.FORWARD,
    "backward": _ComputationType.FULL_BACKWARD,
    "recv_forward": _ComputationType.RECV_F,
    "recv_backward": _ComputationType.RECV_B,
    "send_forward": _ComputationType.SEND_F,
    "send_backward": _ComputationType.SEND_B,
}

# On a failure the runtime logs the whole schedule; the error itself says what a user needs.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


@dataclass
class Wire:
    """Bytes that this stage really sent over its boundaries since the last reset."""

    forward: int = 0
    backward: int = 0


class _MeteredStage(PipelineStage):
    """A torch stage that counts the bytes of the tensors it sends."""

    wire: Wire

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_fwd_send_ops(fwd_chunk_id)
        self.wire.forward += sum(op.tensor.nbytes for op in ops)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        self.wire.backward += sum(op.tensor.nbytes for op in ops)
        return ops


@dataclass
class Tally:
    """What all stages learn of a step by one small message down the pipeline and one up (DESIGN.md, one step).

    Fields add up over the stages. The last stage's gradients are finished first, so the running sums travel down behind the
    last gradients; the first stage knows the total at once, and it travels up ahead of the next step's first activation.
    """

    square_norm: float = 0.0
    loss: float = 0.0
    wire_forward: float = 0.0
    wire_backward: float = 0.0
    stop: float = 0.0
    written: float = 0.0
    failed: float = 0.0
    energy: float = 0.0

    @property
    def norm(self) -> float:
        """Global gradient norm; NaN where a gradient is."""
        return math.sqrt(self.square_norm) if self.square_norm >= 0 else math.nan

    def tensor(self) -> torch.Tensor:
        return torch.tensor(list(vars(self).values()), dtype=torch.float64)

    @staticmethod
    def of(tensor: torch.Tensor) -> Tally:
        return Tally(*tensor.tolist())


class Pipeline:
    """The trainable pipeline as one of its processes sees it.

    Args:
        stage: this process's part of the model.
        micro_batch: sequences per micro-batch; every batch must have micro_batch * micro_batches of them.
    """

    def __init__(self, stage: Stage, topology: Topology, config: PipelineConfig, micro_batch: int) -> None:
        self.stage, self.topology = stage, topology
        self.micro_batches, self.batch = config.micro_batches, micro_batch * config.micro_batches
        self.wire = Wire()
        self._expected: dict[str, tuple[dist.Work, torch.Tensor]] = {}  # the tally's receives
        self.actions = schedule.actions(config.schedule, topology.stages, config.micro_batches, config.warmup)
        self._train = self._runtime(self.actions, micro_batch, self.wire)
        # Validation is not training traffic: a meter of its own that nobody reads.
        self._evaluate = self._runtime(schedule.forwards(topology.stages, config.micro_batches), micro_batch, Wire())

    def _runtime(self, actions: list[list[schedule.Action]], micro_batch: int, wire: Wire) -> _PipelineScheduleRuntime:
        """torch's interpreter for our action lists. Shapes are static, so nothing is inferred, pickled or run on garbage."""
        stage, topology = self.stage, self.topology
        tokens_BS = torch.zeros(micro_batch, stage.spec.context + 1, dtype=torch.int64)
        wire_BTW = torch.empty(
            micro_batch, stage.spec.context, stage.method.wire_width, dtype=stage.codec.dtype, device="cpu", requires_grad=True
        )
        boundary: tuple[torch.Tensor, ...] = (wire_BTW,)
        with_ids = (wire_BTW, tokens_BS.to(torch.int32))
        loss = torch.zeros((), dtype=stage.dtype, requires_grad=True)
        torch_stage = _MeteredStage(
            stage,
            topology.stage,
            topology.stages,
            torch.device("cpu"),
            input_args=tokens_BS if topology.is_first else (with_ids if stage.receives_ids else boundary),
            output_args=loss if topology.is_last else (with_ids if stage.sends_ids else boundary),
            group=topology.group,
        )
        torch_stage.wire = wire
        # The last stage returns its loss; torch's hook for a loss function has nothing left to do.
        runtime = _PipelineScheduleRuntime([torch_stage], self.micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)
        torch_actions: dict[int, list[_Action]] = {
            rank: [_Action(rank, _TORCH_KIND[action.kind], action.micro_batch) for action in stage_actions]
            for rank, stage_actions in enumerate(actions)
        }
        # _prepare_schedule_with_comms would do the same after a check that refuses forward-only lists.
        runtime.pipeline_order_with_comms = torch_actions
        return runtime

    def _arguments(self, tokens_BS: torch.Tensor | None) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        expected = (self.batch, self.stage.spec.context + 1)
        # A message of another size than the posted buffer would abort the receiving process.
        assert tokens_BS is None or tuple(tokens_BS.shape) == expected, f"batch of shape {tuple(tokens_BS.shape)}, not {expected}"
        if self.stage.is_first:
            assert tokens_BS is not None
            return (tokens_BS,), {}
        return (), {} if self.stage.receives_ids or tokens_BS is None else {"tokens_BS": tokens_BS}

    def step(self, tokens_BS: torch.Tensor | None) -> float:
        """Forward and backward of one batch over all stages; gradients of the mean loss are in the parameters' .grad.

        Args:
            tokens_BS: the batch, integer (B, S); may be None on stages that get the ids over the boundary.

        Returns the mean loss on the last stage and 0 elsewhere (they learn it from the tally).
        """
        args, kwargs = self._arguments(tokens_BS)
        losses: list[torch.Tensor] = []
        dummy = torch.zeros(self.batch) if self.stage.is_last else None
        self._expect_tally()
        # One autocast around all micro-batches: they share one bfloat16 copy of each weight instead of holding one each.
        with torch.autocast(self.stage.device.type, torch.bfloat16, enabled=self.stage.bf16):
            self._train.step(*args, target=dummy, losses=losses, return_outputs=False, **kwargs)
        self._add_tied_gradients()
        return float(torch.stack([loss.detach().double() for loss in losses]).sum()) if losses else 0.0

    @torch.no_grad()
    def evaluate(self, batches: Iterable[torch.Tensor | None]) -> float:
        """Mean loss over the real (not PAD) targets of all batches, known to every stage.

        Every stage must bring equally many batches, on stages without data of any content.
        """
        total = torch.zeros(2, dtype=torch.float64)  # summed loss, targets
        for tokens_BS in batches:
            args, kwargs = self._arguments(tokens_BS)
            losses: list[torch.Tensor] = []
            dummy = torch.zeros(self.batch) if self.stage.is_last else None
            self._evaluate.eval(*args, target=dummy, losses=losses, return_outputs=False, **kwargs)
            if losses:
                total[0] += torch.stack([loss.double() for loss in losses]).sum().cpu() * self.stage.batch_tokens
            if self.stage.is_first and tokens_BS is not None:
                total[1] += int((tokens_BS[:, 1:] != PAD).sum())
        dist.all_reduce(total, group=self.topology.group)
        return float(total[0] / total[1])

    def tally(self, own: Tally) -> Tally:
        """Sum over all stages, on all stages. `own` is this stage's share without its gradients' norm."""
        here = self.topology
        squares = self._gradient_squares()
        self._expect_tally()
        total = own.tensor()
        if not here.is_last:
            work, from_above = self._expected.pop("above")
            work.wait()
            total += from_above
        # One addition per parameter in the model's order: the norm is the same bits for any number of stages.
        for square in squares:
            total[0] += square
        if not here.is_first:
            sent = here.isend(total, here.stage - 1, TALLY_TAG)
            work, total = self._expected.pop("below")
            work.wait()
            sent.wait()
        if not here.is_last:
            here.isend(total, here.stage + 1, TALLY_TAG).wait()
        return Tally.of(total)

    def _expect_tally(self) -> None:
        """Post the tally's receives when the step begins: Gloo moves nothing before, and a late one costs a delay."""
        here = self.topology
        for side, exists, peer in (("above", not here.is_last, here.stage + 1), ("below", not here.is_first, here.stage - 1)):
            if exists and side not in self._expected:
                buffer = Tally().tensor()
                self._expected[side] = here.irecv(buffer, peer, TALLY_TAG), buffer

    def _gradient_squares(self) -> list[float]:
        """Squared norms of this stage's gradients in float64, last parameter first; a tied table counts on the first stage."""
        norms = []
        for name, parameter, _ in self.stage.roles():
            counted_elsewhere = name == "embed.weight" and not self.stage.is_first
            if parameter.grad is not None and not counted_elsewhere:
                norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
        return (torch.stack(norms).cpu().square().tolist() if norms else [])[::-1]

    def _add_tied_gradients(self) -> None:
        """Sum the tied table's gradients of the first and the last stage, on both (METHOD.md 3.6)."""
        here = self.topology
        if not _exchanges_tied(self.stage, here):
            return
        grad = self.stage.embed.weight.grad
        assert grad is not None
        own = grad.cpu().contiguous()
        theirs = torch.empty_like(own)
        peer = here.stages - 1 if here.is_first else 0
        works = [here.irecv(theirs, peer, TIED_TAG), here.isend(own, peer, TIED_TAG)]
        for work in works:
            work.wait()
        grad.copy_(own + theirs)

    @property
    def tied_bytes_per_step(self) -> int:
        """Bytes that this stage sends per step for a tied table."""
        return self.stage.embed.weight.nbytes if _exchanges_tied(self.stage, self.topology) else 0

    def take_wire(self) -> Wire:
        """Bytes sent since the last call."""
        taken = Wire(self.wire.forward, self.wire.backward)
        self.wire.forward = self.wire.backward = 0
        return taken


def _exchanges_tied(stage: Stage, here: Topology) -> bool:
    return stage.spec.tied and here.stages > 1 and (here.is_first or here.is_last)


@torch.no_grad()
def share_owned(stage: Stage, here: Topology) -> None:
    """Give every stage the owner's basis, and the last stage the first's tied table. COLLECTIVE.

    Both are made from the seed by linear algebra, whose last bits differ between machines; an owner's copy doesn't.
    """
    if isinstance(stage.method, Subspace):
        basis_DK = stage.method.U_DK
        basis_DK.copy_(here.broadcast(basis_DK.cpu().contiguous(), here.stages - 1))
    if _exchanges_tied(stage, here):
        table = stage.embed.weight
        copy = table.detach().cpu().contiguous()
        if here.is_first:
            here.isend(copy, here.stages - 1, TIED_TAG).wait()
        else:
            here.irecv(copy, 0, TIED_TAG).wait()
            table.copy_(copy)


def to_tensor(batch: np.ndarray) -> torch.Tensor:
    """A batch of `data` as the int64 tensor that a pipeline takes."""
    return torch.from_numpy(np.ascontiguousarray(batch, dtype=np.int64))
