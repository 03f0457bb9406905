"""The spine: build a stage, train it step by step with the others. Read `Trainer.fit` and `Trainer.train_step` first."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from . import launch, subspace
from .calibrate import choose_schedule
from .checkpoint import Checkpointer, await_together, find, in_background, newest_step
from .config import Config, ThinpipeError, to_dict
from .data import Data, prepare
from .device import pick_device, share_cores, use_bf16
from .errors import tell
from .export import initial_from_llama
from .generate import generate
from .method import GradientStatistic, Subspace
from .metrics import Metrics, read_events, to_json, write_whole
from .model import build_stages
from .optim import Optimizer, clip_scale, learning_rate
from .pipeline import Pipeline, share_owned, to_tensor
from .planner import Choice, wire_bytes_per_token
from .replicas import State, join_replicas
from .run import TOKENIZER, Result, common_fields
from .standing import wire_bytes
from .tally import Tally
from .topology import Topology
from .watch import RankWatch, stream_writers


class Trainer:
    """One stage of a training run.

    Args:
        config: from `run.open_run`, the same on all stages.
        folder: the run's folder.
        stop: whose `asked` turns true when this process is asked to stop.
    """

    def __init__(self, config: Config, topology: Topology, folder: Path, stop: launch.StopRequest | None = None) -> None:
        self.config, self.here, self.folder, self.stop = config, topology, folder, stop
        share_cores(topology)
        has_data = config.data.source == "local" or topology.is_first
        preparing = in_background(lambda: prepare(config) if has_data else None)
        await_together(preparing, topology, math.inf)  # a large corpus, where it is new, takes longer than network.timeout
        self.data: Data | None = preparing.result()
        vocab = self._agree_on_data()
        (self.stage,) = build_stages(config, vocab, [topology.stage])
        device = pick_device(config.run.device, topology.local_rank)
        if config.model.init_from is not None:
            names = [name for name, _, _ in self.stage.roles()]
            initial = initial_from_llama(Path(config.model.init_from), names, self.stage.spec)
            self.stage.load_weights({f"model/{name}": tensor for name, tensor in initial.items()})
        self.stage.to(device)
        self.stage.bf16 = use_bf16(config.run.precision, device)
        topology.require_equal("the static embedding", self.stage.method.digest(), "use the same thinpipe and numpy on all machines")
        self.choice: Choice | None = None
        options = config.pipeline
        if options.schedule == "auto":
            self.choice = choose_schedule(self.stage, topology, config)
            options = replace(options, schedule=self.choice.schedule, warmup=self.choice.warmup)
        self.replicas = join_replicas(config, topology)
        self.pipeline = Pipeline(self.stage, topology, options, config.micro_batch, self.replicas)
        self._take_basis()
        share_owned(self.stage, self.here)
        self.optimizer = Optimizer(self.stage.roles(), config.optim, self.stage.spec.width)
        self.statistic: GradientStatistic | None = None
        if isinstance(self.stage.method, Subspace) and config.compression.move_every and topology.is_last:
            self.statistic = self.stage.method.statistic = GradientStatistic(self.stage.method)
        self.watch = RankWatch(stream_writers(self.stage.layers), config.compression.rank)
        self.done_steps = self.refused = self.refused_in_a_row = 0
        self.skipped = 0  # batches that roll-backs have left out
        self.moved: dict[str, Any] | None = None
        self.sequences = 0  # that all replicas have trained on
        self.took_part = 0  # replicas, in the last step
        self.replicas.watch([(name, parameter) for name, parameter, _ in self.stage.roles()])
        resumed = self._resume()
        self.finished_elsewhere = not self.replicas.enter(self.done_steps, self._about(), self._give, self._take, tell, self._asked)
        if topology.is_first and self.data is not None and self.data.tokenizer is not None:
            write_whole(folder / TOKENIZER, self.data.tokenizer.to_str())  # for those who have the run but not the corpus
        if resumed is not None:
            resumed = min(resumed, self.done_steps)  # the other replicas may be behind this one's checkpoints
        self.checkpoints = Checkpointer(folder / "checkpoints", topology, config.train.keep_last, config.train.keep_every, resumed)
        self.metrics = self._open_metrics()

    # Training

    def fit(self) -> Result | None:
        """Train to the last step, or to a stop; the summary on the first stage, None on the others.

        Raises launch.Stopped after saving when a stop was asked for.
        """
        config = self.config
        if self.finished_elsewhere:
            self.metrics.say("the other replicas have finished this run meanwhile")
            self.metrics.close()
            return None
        self.metrics.event("start", step=self.done_steps, config=to_dict(config), stages=self.here.stages)
        if self.choice is not None:
            self.metrics.event("schedule", step=self.done_steps, **self.choice._asdict())
            self.metrics.say(f"schedule: {self.choice.why}")
        losses = self._losses_before()
        seconds: list[float] = []
        total, val_loss, stopped = Tally(), math.nan, False
        while self.done_steps < config.train.last_step and not stopped:
            began = time.perf_counter()
            total = self.train_step(self.done_steps)
            seconds.append(time.perf_counter() - began)
            losses.append(total.loss)
            stopped = total.stop > 0 and self.done_steps < config.train.last_step
            self._report(total, median(seconds[-20:]))
            if total.written + total.failed == self.here.stages:
                self._told(self.checkpoints.commit())
            if self._is_spike(losses):
                losses = losses[: len(losses) - self._roll_back()]
                continue
            if config.train.eval_every and self.done_steps % config.train.eval_every == 0 and self.done_steps < config.train.last_step:
                val_loss = self.evaluate()
            if config.train.checkpoint_every and self.done_steps % config.train.checkpoint_every == 0 and not self.refused_in_a_row:
                self.save()
        self.replicas.leave(finished=False)
        self.save()
        self._told(self.checkpoints.finish())
        if self.checkpoints.newest != self.done_steps:
            remedy = f"make room, then the same command goes on from step {self.checkpoints.newest or 0}"
            raise ThinpipeError(f"step {self.done_steps} could not be saved; {remedy}")
        if stopped:
            self.metrics.say(f"stopped after step {self.done_steps}; the same command with --run.dir {self.folder} goes on from there")
            self.metrics.close()
            raise launch.Stopped
        val_loss = self.evaluate()
        if not seconds:  # this life had nothing left to train
            seconds, total = self._told_before()
        result = self._result(total, losses, val_loss, seconds)
        if self.done_steps == config.train.steps:
            self.replicas.leave(finished=True)  # not before there is a result: whoever comes later doesn't train
        self.metrics.close()
        return result

    def train_step(self, step: int) -> Tally:
        """One optimizer step over all stages; returns what all stages know of it."""
        config = self.config
        self.optimizer.zero_grad()
        loss = self.pipeline.step(self.batch(step), another=step + 1 < config.train.last_step)
        own = self._own_tally(loss)
        moves = self._moves(step + 1)
        total = self.pipeline.tally(own, settle=not moves)
        while self.replicas.follow(total):  # one was lost in the middle: the others average what they have without it
            self.pipeline.average_again()
            total = self.pipeline.tally(own, settle=not moves)
        self.took_part = self.replicas.members
        self.sequences += config.share * self.took_part
        if math.isfinite(total.norm) and math.isfinite(total.loss):
            self.refused_in_a_row = 0
            watched = config.train.watch_every and (step + 1) % config.train.watch_every == 0
            if watched:
                self.watch.before_step()
            self.optimizer.step(learning_rate(config.optim, config.train, step), clip_scale(total.norm, config.optim.clip))
            if watched:
                self._report_ranks(step + 1)
            if self.statistic is not None:
                self.statistic.accept()
            if self.moved is not None:
                self.metrics.event("move", **self.moved, energy_after=total.energy)
                self.moved = None
        else:  # all stages see the same total, so all refuse the step
            self.refused += 1
            self.refused_in_a_row += 1
            if self.statistic is not None:
                self.statistic.drop()
            self._refuse(step + 1)
        self.done_steps = step + 1
        self.replicas.stepped(self.done_steps, self.done_steps == config.train.steps, settle=not moves)
        if moves:
            assert isinstance(self.stage.method, Subspace)
            self.move_subspace(self.stage.method, self.batch(step))
        self.replicas.admit(self._give)
        return total

    def _refuse(self, step: int) -> None:
        """Say whose numbers were not finite first. Raises ThinpipeError after too many steps in a row."""
        origin = self.pipeline.origin_of_poison()
        self._told(f"step {step} is refused: {origin}")
        if self.refused_in_a_row >= self.config.train.max_refused:
            newest = self.checkpoints.newest
            raise ThinpipeError(
                f"{self.refused_in_a_row} steps in a row were refused (train.max_refused); the last one: {origin}\n"
                f"{'no checkpoint was made yet' if newest is None else f'the checkpoint of step {newest} stands'}; "
                "look at the data and at that machine, or lower optim.lr"
            )

    def _is_spike(self, losses: list[float]) -> bool:
        usual = [loss for loss in losses[-51:-1] if math.isfinite(loss)]
        above = self.config.train.roll_back_above
        return bool(above) and len(usual) >= 10 and losses[-1] > above * median(usual)

    def _roll_back(self) -> int:
        """Return to the newest checkpoint and go on with the batches that follow those seen; the number of steps undone."""
        self._told(self.checkpoints.finish())
        spiked, at = self.done_steps, self.checkpoints.newest
        found = None if at is None else find(self.folder / "checkpoints", self.here, self.wants, tell)
        if found is None or found.step != at:
            raise ThinpipeError(f"the loss of step {spiked} is a spike, and there is no checkpoint to roll back to; save more often")
        self._load(found.tensors(self.wants(set(found.names))))
        self.done_steps, self.moved = found.step, None
        self.skipped += spiked - found.step
        self.sequences -= (spiked - found.step) * self.config.share
        self.metrics.close()
        self.metrics = self._open_metrics()
        self._told(f"step {spiked} was a spike of the loss: back to step {found.step}, {spiked - found.step} batches are left out")
        return spiked - found.step

    def move_subspace(self, method: Subspace, tokens_BS: torch.Tensor | None) -> None:
        """Turn the basis towards the gradients that it misses; transport all that is expressed in it (METHOD.md section 3).

        The event tells the captured energy before (over all steps since the last move) and after it (over the next step: it
        can't be had from the statistic), the angles between the two bases, and the loss on the step's batch before and after.
        """
        loss_before = self.pipeline.evaluate([tokens_BS])
        energy_before = 0.0
        old_DK = method.U_DK.clone()
        moved_DK = method.U_DK.cpu().contiguous()
        self._average_statistic()
        if self.statistic is not None:
            energy_before = subspace.captured_energy(old_DK, self.statistic.M_DK, float(self.statistic.square_norm))
            moved_DK = subspace.move(method.U_DK, self.statistic.M_DK, self.config.compression.move_step)
            moved_DK = moved_DK.to(old_DK.dtype).cpu().contiguous()
            self.statistic.reset()
        self.here.broadcast(moved_DK, self.here.stages - 1)
        method.U_DK.copy_(moved_DK)
        T_KK = subspace.transport(old_DK, method.U_DK)
        self.optimizer.transport(T_KK)
        self.replicas.transport(lambda name, tensor: self.optimizer.turn(name, tensor, T_KK))
        self.moved = {
            "step": self.done_steps,
            "energy_before": self.here.gather(energy_before)[-1],
            "angles": subspace.principal_angles(old_DK, method.U_DK).tolist(),
            "loss_before": loss_before,
            "loss_after": self.pipeline.evaluate([tokens_BS]),
        }

    def _moves(self, step: int) -> bool:
        """Whether the basis moves behind this step (from 1)."""
        every = self.config.compression.move_every
        return isinstance(self.stage.method, Subspace) and bool(every) and step % every == 0 and step < self.config.train.steps

    def _average_statistic(self) -> None:
        """The gradients of all replicas decide where the basis goes."""
        own = [] if self.statistic is None else [self.statistic.M_DK, self.statistic.square_norm]
        for tensor, mean in zip(own, self.replicas.average(own), strict=True):
            tensor.copy_(mean)

    def batch(self, step: int) -> torch.Tensor | None:
        """This replica's share of the step's tokens, (share, context + 1), or None where the ids come over the boundary."""
        if self.data is None:
            return None
        first, share = self.replicas.number * self.config.share, self.config.share
        return to_tensor(self.data.batch(step + self.skipped, self.config.train.batch)[first : first + share])

    def evaluate(self) -> float:
        """Mean validation loss, in nats per token."""
        loss = self.pipeline.evaluate(self._validation())
        self.metrics.event("eval", step=self.done_steps, val_loss=loss)
        return loss

    def _validation(self) -> Iterator[torch.Tensor | None]:
        train = self.config.train
        if self.data is None:
            return iter([None] * self.eval_batches)
        # The same sequences for any number of replicas; each replica looks at all of them.
        batches = self.data.validation(train.batch, train.eval_batches)
        return (share for batch in batches for share in to_tensor(batch).split(self.config.share))

    # Building

    def _agree_on_data(self) -> int:
        """All stages train on the same tokens; returns the tokenizer's entries."""
        mine: dict[str, Any] = {}
        if self.data is not None:
            batches = sum(1 for _ in self._validation())
            mine = {"vocab": self.data.vocab, "digest": self.data.digest, "eval_batches": batches}
        everyone = self.here.gather([self.here.host, mine])
        first = everyone[0][1]
        for stage, (host, theirs) in enumerate(everyone):
            if theirs and theirs["digest"] != first["digest"]:
                raise ThinpipeError(
                    f"the data of stage {stage} on {host} differs from stage 0's on {everyone[0][0]}; use the same files, "
                    "tokenizer and Python version, or data.source = 'first'"
                )
        self.eval_batches: int = first["eval_batches"]
        self.digest: str = first["digest"]
        return int(first["vocab"])

    def _take_basis(self) -> None:
        """Begin with the basis of another run, and with the embedding that goes with it."""
        source = self.config.compression.init_from
        if source is None:
            return
        basis_DK = self.stage.method.basis
        assert basis_DK is not None
        if self.here.is_last and newest_step(self.folder / "checkpoints") is None:
            found = find(Path(source) / "checkpoints", None, {"basis/U"}, tell)
            if found is None:
                raise ThinpipeError(f"compression.init_from = {source!r} has no checkpoint; give a run that has one")
            theirs, ours = found.facts["vocab"], self.stage.spec.vocab
            if self.stage.method.digest() and theirs != ours:  # another table, whatever its seed
                raise ThinpipeError(
                    f"compression.init_from = {source!r} has a vocabulary of {theirs} and this run one of {ours}: another static "
                    "embedding; make them equal, by data.tokenizer or model.vocab"
                )
            basis_DK.copy_(found.tensor("basis/U"))
        share_owned(self.stage, self.here)
        self.stage.initialise(self.config.run.seed)

    # Saving

    def owned(self) -> dict[str, torch.Tensor]:
        """What a checkpoint takes from this stage, by global name; a tied table is the first stage's."""
        tensors = self._state()
        if not self.here.is_first:
            tensors = {name: tensor for name, tensor in tensors.items() if "/embed.weight" not in name}
        if not self.here.is_last:
            tensors.pop("basis/U", None)
        return tensors

    def _state(self) -> dict[str, torch.Tensor]:
        """All that this stage would need to go on from here."""
        tensors = self.stage.weights() | {f"optim/{name}": tensor for name, tensor in self.optimizer.state().items()}
        if self.statistic is not None:
            tensors |= {"basis/M": self.statistic.M_DK, "basis/square_norm": self.statistic.square_norm}
        return tensors | self.replicas.state()

    def wants(self, names: set[str]) -> set[str]:
        """Which of a checkpoint's tensors this stage needs: all its parameters and basis, and the moments that there are."""
        weights = self.stage.weights().keys() - (set() if self.here.is_last else {"basis/U"})
        moments = {n for n in names if n.startswith(("optim/", "outer/")) and f"model/{n.split('/')[1]}" in weights}
        statistic = names & {"basis/M", "basis/square_norm"} if self.statistic is not None else set()
        return weights | moments | statistic

    def save(self) -> None:
        """Begin a checkpoint of the steps done; the step waits only for a copy."""
        self._told(self.checkpoints.finish())
        facts = {
            "config": to_dict(self.config),
            "vocab": self.stage.spec.vocab,
            "segments": [[r.start, r.stop] for r in self.config.layers_of_segments],
            # All randomness is drawn from (seed, step), so these two are the state of every generator.
            "random": {"seed": self.config.run.seed, "step": self.done_steps},
            "data": self.digest,
            "static": self.stage.method.digest(),
        }
        self.checkpoints.save(self.done_steps, self.owned(), facts | self._progress())

    def _progress(self) -> dict[str, int]:
        counts = {"step": self.done_steps, "refused_steps": self.refused, "refused_in_a_row": self.refused_in_a_row}
        return counts | {"skipped_batches": self.skipped, "sequences": self.sequences}

    def _go_on(self, progress: dict[str, Any]) -> None:
        self.done_steps, self.refused = progress["step"], progress["refused_steps"]
        self.refused_in_a_row = progress["refused_in_a_row"]
        self.skipped, self.sequences = progress["skipped_batches"], progress["sequences"]

    def _about(self) -> dict[str, Any]:
        """What must be the same in all replicas."""
        return common_fields(self.config) | {"the data": self.digest, "the static embedding": self.stage.method.digest()}

    def _give(self) -> State:
        """This stage's state, for a newcomer among the replicas."""
        return self._state(), self._progress()

    def _take(self, tensors: dict[str, torch.Tensor], progress: dict[str, Any]) -> None:
        """Go on from another replica's state. COLLECTIVE."""
        self._load(tensors)
        self._go_on(progress)
        if self.statistic is not None:  # the other's tokens are in its own already
            self.statistic.reset()
        if self.here.is_first:
            tell(f"took over the state of step {self.done_steps} from another replica")

    def _resume(self) -> int | None:
        found = find(self.folder / "checkpoints", self.here, self.wants, tell)
        if found is None:
            folder = self.folder / "checkpoints"
            if any(step is not None for step in self.here.gather(newest_step(folder))):
                raise ThinpipeError(f"no checkpoint in {folder} is whole; bring its files, or remove the folder to begin anew")
            if self.here.is_first and any(event["event"] == "step" for event in read_events(self.folder / "metrics.jsonl")):
                tell(f"{folder} holds no checkpoint; training begins anew")
            return None
        if found.facts["data"] != self.digest:
            raise ThinpipeError(f"the data differs from that of {found.folder}; bring the same files and tokenizer, or start a new run")
        self._load(found.tensors(self.wants(set(found.names))))
        unsaid = {"skipped_batches": 0, "refused_in_a_row": 0, "sequences": found.step * self.config.train.batch}
        self._go_on(unsaid | found.facts | {"step": found.step})
        if self.here.is_first:
            tell(f"resumed from step {found.step}")
        return found.step

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.stage.load_weights(tensors)
        self.optimizer.load({n.removeprefix("optim/"): t for n, t in tensors.items() if n.startswith("optim/")})
        if self.statistic is not None and "basis/M" in tensors:
            self.statistic.M_DK.copy_(tensors["basis/M"])
            self.statistic.square_norm.copy_(tensors["basis/square_norm"])
        self.replicas.load(tensors)
        share_owned(self.stage, self.here)

    # Reporting

    def _open_metrics(self) -> Metrics:
        run, steps = self.config.run, self.config.train.steps
        if not self.here.is_first:
            return Metrics(None, steps, self.done_steps, quiet=True)
        board = self.folder / "tensorboard" if run.tensorboard else None
        metrics = Metrics(self.folder / "metrics.jsonl", steps, self.done_steps, tensorboard=board)
        if run.prometheus is not None and self.replicas.number == 0:
            metrics.serve(run.prometheus, str(self.folder), lambda: self.checkpoints.newest)
        return metrics

    def _own_tally(self, loss: float) -> Tally:
        wire, state = self.pipeline.take_wire(), self.checkpoints.state
        return Tally(
            loss=loss,
            wire_forward=wire.forward,
            wire_backward=wire.backward,
            average_bytes=self.replicas.take_bytes(),
            stop=float(self._asked()),
            written=float(state == "written"),
            failed=float(state == "failed"),
            energy=self.statistic.captured() if self.statistic is not None else 0.0,
        )

    def _asked(self) -> bool:
        """Whether this process has been asked to stop."""
        return self.stop is not None and self.stop.asked

    def _told(self, complaint: str | None) -> None:
        if complaint:
            self.metrics.say(complaint)
            self.metrics.event("complaint", step=self.done_steps, text=complaint)

    def _report(self, total: Tally, seconds: float) -> None:
        config, replicas = self.config, self.config.pipeline.replicas
        speed = self.stage.batch_tokens * self.took_part / seconds
        lr = learning_rate(config.optim, config.train, self.done_steps - 1)
        self.metrics.event(
            "step",
            step=self.done_steps,
            loss=total.loss,
            norm=total.norm,
            lr=lr,
            seconds=seconds,
            tokens=self._tokens,
            tokens_per_s=speed,
            wire_forward=int(total.wire_forward),
            wire_backward=int(total.wire_backward),
            refused=self.refused,
            **({"energy": total.energy} if total.energy else {}),
            **({"replicas": self.took_part, "average_bytes": int(total.average_bytes)} if replicas > 1 else {}),
        )
        per_token, _ = self._wire_per_token(total)
        refused = f"  refused {self.refused}" if self.refused else ""
        missing = f"  without {replicas - self.took_part} of {replicas} replicas" if self.took_part < replicas else ""
        self.metrics.progress(self.done_steps, f"loss {total.loss:.3f}  {speed:,.0f} tokens/s  {per_token:g} bytes/token{refused}{missing}")

    @property
    def _tokens(self) -> int:
        """That the run has trained on, by all replicas."""
        return self.sequences * self.stage.spec.context

    def _report_ranks(self, step: int) -> None:
        everyone = self.here.gather(self.watch.after_step())
        matrices = {name: figures for stage in everyone for name, figures in stage.items()}
        self.metrics.event("ranks", step=step, k=self.config.compression.rank, matrices=matrices)

    def _wire_per_token(self, total: Tally) -> tuple[float, bool]:
        boundaries = self.here.stages - 1
        if not boundaries:
            return wire_bytes_per_token(self.config), False
        return (total.wire_forward + total.wire_backward) / (self.stage.batch_tokens * boundaries * 2), True

    def _steps_before(self) -> list[dict[str, Any]]:
        """The events of the steps that earlier lives have done; the first stage has them."""
        return [event for event in read_events(self.folder / "metrics.jsonl") if event["event"] == "step"] if self.here.is_first else []

    def _losses_before(self) -> list[float]:
        """The newest losses of earlier lives. COLLECTIVE."""
        told: list[float] = self.here.gather([float(step.get("loss") or math.nan) for step in self._steps_before()[-50:]])[0]
        return told

    def _told_before(self) -> tuple[list[float], Tally]:
        """The steps' seconds, and the last one's traffic, as earlier lives have written them (the first stage does)."""
        steps = self._steps_before()
        forward, backward = wire_bytes(steps[-1]) if steps else (0, 0)
        return [float(step.get("seconds") or math.nan) for step in steps], Tally(wire_forward=forward, wire_backward=backward)

    def _result(self, total: Tally, losses: list[float], val_loss: float, seconds: list[float]) -> Result | None:
        stage, config = self.stage, self.config
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
        owned = sum(p.numel() for n, p, _ in stage.roles() if self.here.is_first or n != "embed.weight")
        everyone = self.here.gather([peak_kb / 1024, owned, self.pipeline.tied_bytes_per_step])
        sample = self._sample()
        if not self.here.is_first:
            return None
        steady = seconds[max(3, len(seconds) // 10) :] or seconds or [math.nan]
        tail = [loss for loss in losses[-max(1, min(50, self.done_steps // 10)) :] if math.isfinite(loss)] or [math.nan]
        per_token, measured = self._wire_per_token(total)
        dense = 2.0 * stage.spec.width
        result = Result(
            run=str(self.folder),
            method=config.compression.method,
            stages=self.here.stages,
            segments=config.segments,
            steps=self.done_steps,
            tokens=self._tokens,
            train_loss=float(np.mean(tail)),
            val_loss=val_loss,
            tokens_per_s=stage.batch_tokens * self.replicas.members / median(steady),
            seconds_per_step=median(steady),
            wire_bytes_per_token=per_token,
            wire_bytes_forward=total.wire_forward,
            wire_bytes_backward=total.wire_backward,
            wire_measured=measured,
            dense_wire_bytes_per_token=dense,
            compression=dense / per_token if per_token else math.inf,
            tied_bytes_per_step=sum(tied for _, _, tied in everyone),
            peak_rss_mb=[round(peak, 1) for peak, _, _ in everyone],
            parameters=sum(count for _, count, _ in everyone),
            refused_steps=self.refused,
            stopped=self.done_steps < config.train.steps,
            sample=sample,
        )
        self.metrics.event("result", step=self.done_steps, **asdict(result))
        write_whole(self.folder / "result.json", to_json(asdict(result)))
        return result

    def _sample(self) -> str:
        """What the model writes after train.sample, decoded over the pipeline; "" without a tokenizer or prompt."""
        prompt: list[int] = []
        if self.data is not None and self.data.tokenizer is not None and self.here.is_first:
            try:
                prompt = self.data.encode(self.config.train.sample)[: self.stage.spec.context]
            except ThinpipeError as error:
                self._told(f"no sample: {error}")
        prompt = self.here.gather(prompt)[0]
        if not prompt:
            return ""
        ids = [int(i) for i in generate(self.stage, self.here, torch.tensor([prompt]), 80, temperature=0.7, top_p=0.9)]
        return self.data.decode(prompt + ids) if self.data is not None and self.here.is_first else ""
