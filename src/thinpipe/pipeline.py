"""Stages joined into a pipeline: a stage works off its schedule's actions; boundaries are Gloo messages.

torch's own interpreter of such lists can't post a receive before its step begins, and Gloo moves no byte before that;
hence the few lines of `_Passage`. A test compares gradients with torch's ScheduleGPipe bit for bit. One stage is a
pipeline of one: the same code, no neighbour.

Legend: B sequences, S = context + 1 tokens of a window, T context, W numbers per token at a cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from . import schedule
from .config import PipelineConfig
from .data import PAD
from .model import Stage
from .replicas import ALONE, Alone, Synchronous
from .schedule import Action
from .tally import Tally
from .topology import EVALUATE_TAG, STEP_TAG, TALLY_TAG, TIED_TAG, Topology

_PASSES = ("received activations", "activations", "received gradients", "gradients")  # what a stage takes in and hands on


@dataclass
class Wire:
    """Bytes that this stage really sent over its boundaries since the last reset."""

    forward: int = 0
    backward: int = 0


class _Passage:
    """One batch on its way through a stage: the messages under way and what a backward needs of its forward.

    A message is the codec's bytes of a micro-batch, forward with the token ids behind them where these travel.

    Args:
        actions: the stage's list; the methods below are named after its kinds.
        micro_batch: sequences of a micro-batch.
        arm: called before the last backward.
    """

    def __init__(
        self,
        stage: Stage,
        here: Topology,
        actions: list[Action],
        micro_batch: int,
        tag: int,
        wire: Wire,
        arm: Callable[[], None],
    ) -> None:
        self.stage, self.here, self.actions = stage, here, actions
        self.micro_batch, self.tag, self.wire, self.arm = micro_batch, tag, wire, arm
        self._backwards = sum(action.kind == "backward" for action in actions)
        self.losses: list[torch.Tensor] = []
        self.sizes: dict[str, list[torch.Tensor]] = {what: [] for what in _PASSES}
        self._done = 0
        self._tokens: list[torch.Tensor] = []
        self._incoming: dict[tuple[str, int], tuple[dist.Work, torch.Tensor]] = {}
        self._outgoing: dict[tuple[str, int], torch.Tensor] = {}
        self._sent: list[tuple[dist.Work, int, torch.Tensor]] = []
        self._graphs: dict[int, tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]] = {}

    def post(self) -> None:
        """Post the receives that the list begins with."""
        while self.actions[self._done].kind.startswith("recv"):
            self._do(self.actions[self._done])

    def run(self, tokens: list[torch.Tensor]) -> None:
        """Work off the rest of the list.

        Args:
            tokens: (B, S) per micro-batch; empty where the ids come with the messages.
        """
        self._tokens = tokens
        while self._done < len(self.actions):
            self._do(self.actions[self._done])

    def finish(self) -> None:
        """Wait until all is sent."""
        for work, peer, _ in self._sent:
            self.here.wait(work, peer)

    def _do(self, action: Action) -> None:
        self._done += 1
        getattr(self, "_" + action.kind)(action.micro_batch)

    def _recv_forward(self, m: int) -> None:
        self._receive("forward", m, self.here.stage - 1)

    def _recv_backward(self, m: int) -> None:
        self._receive("backward", m, self.here.stage + 1)

    def _send_forward(self, m: int) -> None:
        self.wire.forward += self._send("forward", m, self.here.stage + 1)

    def _send_backward(self, m: int) -> None:
        self.wire.backward += self._send("backward", m, self.here.stage - 1)

    def _forward(self, m: int) -> None:
        stage, codec = self.stage, self.stage.codec
        c_BTW, places, tokens_BS = None, None, self._tokens[m] if self._tokens else None
        if not stage.is_first:
            message = self._arrived("forward", m, self.here.stage - 1)
            wire = message[: self._wire_bytes].view(self._wire_shape).to(stage.device)
            if stage.receives_ids:
                tokens_BS = message[self._wire_bytes :].clone().view(torch.int32).view(self.micro_batch, -1)
            c_BTW, places = codec.decode(wire, stage.dtype).requires_grad_(torch.is_grad_enabled()), codec.places(wire)
            self._note("received activations", c_BTW)
        assert tokens_BS is not None
        out = stage(c_BTW, tokens_BS)
        self._note("activations", out)
        if torch.is_grad_enabled():
            self._graphs[m] = c_BTW, out, places
        if stage.is_last:
            self.losses.append(out.detach())
        else:
            parts = [codec.encode(out.detach()).cpu().flatten()]
            if stage.sends_ids:
                parts.append(tokens_BS.to("cpu", torch.int32).contiguous().view(torch.uint8).flatten())
            self._outgoing["forward", m] = torch.cat(parts) if len(parts) > 1 else parts[0]

    def _backward(self, m: int) -> None:
        stage, codec = self.stage, self.stage.codec
        c_BTW, out, places = self._graphs.pop(m)
        grad = None
        if not stage.is_last:
            wire = self._arrived("backward", m, self.here.stage + 1).view(self._wire_shape)
            grad = codec.decode_gradient(wire.to(stage.device), out.dtype)
            self._note("received gradients", grad)
        self._backwards -= 1
        if not self._backwards:
            self.arm()
        torch.autograd.backward(out, grad)
        if c_BTW is not None:
            assert c_BTW.grad is not None
            self._note("gradients", c_BTW.grad)
            self._outgoing["backward", m] = codec.encode_gradient(c_BTW.grad, places).cpu().flatten()

    def _note(self, what: str, tensor: torch.Tensor) -> None:
        """Remember the largest absolute value, which is NaN where a NaN is; on a device nobody waits for it."""
        if torch.is_grad_enabled():  # nobody asks after a validation
            self.sizes[what].append(torch.linalg.vector_norm(tensor.detach(), float("inf")))

    @property
    def _wire_shape(self) -> tuple[int, int, int]:
        return self.micro_batch, self.stage.spec.context, self.stage.codec.wire_bytes

    @property
    def _wire_bytes(self) -> int:
        return math.prod(self._wire_shape)

    def _receive(self, direction: str, m: int, peer: int) -> None:
        ids = 4 * self.micro_batch * (self.stage.spec.context + 1) if direction == "forward" and self.stage.receives_ids else 0
        message = torch.empty(self._wire_bytes + ids, dtype=torch.uint8)
        self._incoming[direction, m] = self.here.irecv(message, peer, self.tag), message

    def _arrived(self, direction: str, m: int, peer: int) -> torch.Tensor:
        work, message = self._incoming.pop((direction, m))
        self.here.wait(work, peer)
        return message

    def _send(self, direction: str, m: int, peer: int) -> int:
        message = self._outgoing.pop((direction, m))
        self._sent.append((self.here.isend(message, peer, self.tag), peer, message))
        return message.nbytes


class Pipeline:
    """The trainable pipeline as one of its processes sees it.

    Args:
        stage: this process's part of the model.
        micro_batch: sequences per micro-batch; every batch must have micro_batch * micro_batches of them.
        replicas: the other pipelines of the run, with which gradients are averaged.
    """

    def __init__(self, stage: Stage, topology: Topology, config: PipelineConfig, micro_batch: int, replicas: Alone = ALONE) -> None:
        self.stage, self.topology, self.replicas = stage, topology, replicas
        self.micro_batch, self.batch = micro_batch, micro_batch * config.micro_batches
        self.wire = Wire()
        self._expected: dict[str, tuple[dist.Work, torch.Tensor]] = {}  # the tally's receives
        self._next: _Passage | None = None  # the next step's, whose receives are posted
        self._sizes: dict[str, list[torch.Tensor]] = {}  # of what the last step passed on
        self._whole = True  # whether all replicas' gradients are in this stage's
        name = "wan" if config.schedule == "auto" else config.schedule  # where nobody has measured: any gives the same numbers
        self.actions = schedule.actions(name, topology.stages, config.micro_batches, config.warmup)
        self._forwards = schedule.forwards(topology.stages, config.micro_batches)

    def _passage(self, actions: list[list[Action]], tag: int, wire: Wire) -> _Passage:
        return _Passage(self.stage, self.topology, actions[self.topology.stage], self.micro_batch, tag, wire, self.replicas.arm)

    def _split(self, tokens_BS: torch.Tensor | None) -> list[torch.Tensor]:
        """The batch as micro-batches; nothing where the ids come with the messages."""
        expected = (self.batch, self.stage.spec.context + 1)
        # A message of another size than the posted buffer would abort the receiving process.
        assert tokens_BS is None or tuple(tokens_BS.shape) == expected, f"batch of shape {tuple(tokens_BS.shape)}, not {expected}"
        if tokens_BS is None or self.stage.receives_ids:
            assert self.stage.receives_ids
            return []
        return list(tokens_BS.split(self.micro_batch))

    def step(self, tokens_BS: torch.Tensor | None, another: bool = False) -> float:
        """Forward and backward of one batch over all stages; gradients of the mean loss are in the parameters' .grad.

        Args:
            tokens_BS: the batch, integer (B, S); may be None on stages that get the ids over the boundary.
            another: a step follows; its first receives are posted at once, so that no stage waits for another's.

        Returns the mean loss on the last stage and 0 elsewhere (they learn it from the tally).
        """
        tokens = self._split(tokens_BS)
        passage = self._next or self._passage(self.actions, STEP_TAG, self.wire)
        passage.post()
        self._expect_tally()
        # One autocast around all micro-batches: they share one bfloat16 copy of each weight instead of holding one each.
        with torch.autocast(self.stage.device.type, torch.bfloat16, enabled=self.stage.bf16):
            passage.run(tokens)
        self._next = self._passage(self.actions, STEP_TAG, self.wire) if another else None
        if self._next is not None:
            self._next.post()
        passage.finish()
        self._sizes = passage.sizes
        self._whole = self.replicas.finish()
        self._add_tied_gradients()
        return float(torch.stack(passage.losses).double().sum()) if passage.losses else 0.0

    def average_again(self) -> None:
        """Average the step's gradients with the replicas that are left."""
        self._whole = self.replicas.again()
        self._add_tied_gradients()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[torch.Tensor | None]) -> float:
        """Mean loss over the real (not PAD) targets of all batches, known to every stage.

        Every stage must bring equally many batches, on stages without data of any content.
        """
        total = torch.zeros(2, dtype=torch.float64)  # summed loss, targets
        for tokens_BS in batches:
            # Validation is not training traffic: a meter of its own that nobody reads, and a tag of its own, since the
            # next step's receives are posted already.
            passage = self._passage(self._forwards, EVALUATE_TAG, Wire())
            passage.run(self._split(tokens_BS))
            passage.finish()
            if passage.losses:
                total[0] += torch.stack(passage.losses).double().sum().cpu() * self.stage.batch_tokens
            if self.stage.is_first and tokens_BS is not None:
                total[1] += int((tokens_BS[:, 1:] != PAD).sum())
        dist.all_reduce(total, group=self.topology.group)
        return float(total[0] / total[1])

    def tally(self, own: Tally, settle: bool = True) -> Tally:
        """Sum over all stages, on all stages, and what it comes to among the replicas (`Alone.decide`).

        Args:
            own: this stage's share without its gradients' norm.
        """
        here = self.topology
        squares = gradient_squares(self.stage)
        self._expect_tally()
        total = replace(own, torn=float(not self._whole)).tensor()
        if not here.is_last:
            work, from_above = self._expected.pop("above")
            here.wait(work, here.stage + 1)
            total += from_above
        # One addition per parameter in the model's order: the norm is the same bits for any number of stages. (A tied table's
        # gradient isn't: one stage adds up its two uses in each micro-batch, several add two sums over all of them.)
        for square in squares:
            total[0] += square
        if here.is_first:
            total = self.replicas.decide(Tally.of(total), settle).tensor()
        else:
            sent = here.isend(total, here.stage - 1, TALLY_TAG)
            work, total = self._expected.pop("below")
            here.wait(work, here.stage - 1)
            here.wait(sent, here.stage - 1)
        if not here.is_last:
            here.wait(here.isend(total, here.stage + 1, TALLY_TAG), here.stage + 1)
        return Tally.of(total)

    def origin_of_poison(self) -> str:
        """Which stage or link had the first number that is not finite in the last step, in words. COLLECTIVE."""
        finite = {what: all(bool(torch.isfinite(size)) for size in sizes) for what, sizes in self._sizes.items()}
        finite["own gradients"] = all(math.isfinite(square) for square in gradient_squares(self.stage))
        everyone = self.topology.gather([self.topology.host, finite])
        for what, received, stages in (
            ("activations", "received activations", list(enumerate(everyone))),
            ("gradients", "received gradients", list(enumerate(everyone))[::-1]),
        ):
            for stage, (host, has) in stages:
                if not has[received]:
                    return f"{what} that are not finite came to stage {stage} on {host}, though they had been sent finite"
                if not has[what]:
                    return f"stage {stage} on {host} made {what} that are not finite{' (or the loss)' * (stage == len(everyone) - 1)}"
        blamed = [f"stage {stage} on {host}" for stage, (host, has) in enumerate(everyone) if not has["own gradients"]]
        if not blamed:
            return "the global norm of the gradients is not finite"
        if isinstance(self.replicas, Synchronous) and self.replicas.members > 1:  # these are all replicas' gradients by now
            return "the mean of the replicas' gradients is not finite, though all that this one's stages handed on was; see the others"
        return f"{blamed[0]} made gradients of its weights that are not finite"

    def _expect_tally(self) -> None:
        """Post the tally's receives when the step begins: Gloo moves nothing before, and a late one costs a delay."""
        here = self.topology
        for side, exists, peer in (("above", not here.is_last, here.stage + 1), ("below", not here.is_first, here.stage - 1)):
            if exists and side not in self._expected:
                buffer = Tally().tensor()
                self._expected[side] = here.irecv(buffer, peer, TALLY_TAG), buffer

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
            here.wait(work, peer)
        self.stage.embed.weight.grad = (own + theirs).to(grad.device)  # not in place: the replicas keep their own

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


def gradient_squares(stage: Stage) -> list[float]:
    """Squared norms of a stage's gradients in float64, last parameter first; a tied table counts on the first stage."""
    norms = []
    for name, parameter, _ in stage.roles():
        counted_elsewhere = name == "embed.weight" and not stage.is_first
        if parameter.grad is not None and not counted_elsewhere:
            norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64))
    return (torch.stack(norms).cpu().square().tolist() if norms else [])[::-1]


@torch.no_grad()
def share_owned(stage: Stage, here: Topology) -> None:
    """Give every stage the owner's basis, and the last stage the first's tied table. COLLECTIVE.

    Both are made from the seed by linear algebra, whose last bits differ between machines; an owner's copy doesn't.
    """
    if (basis_DK := stage.method.basis) is not None:
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
