"""Replicas: pipelines that train one model on other parts of each batch, average, and may come and go.

Each replica is a pipeline with a process group and a life of its own. The processes of one stage, over all replicas, average
over a group that is made anew whenever who takes part changes (council.py). A step counts when all members have averaged all
their stages; else those who are left average what they have kept once more, without the lost one. So no batch is counted
twice, and one that is lost is seen in the number of members.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from .codecs import Integers
from .config import Config
from .council import Council, Epoch, Member, store_at
from .errors import Stopped
from .meeting import Say, give_up_silence
from .tally import Tally
from .topology import PeerLost, Topology, side_group

_BUCKET = 1 << 20  # bytes of gradients that go off together
_AT_ONCE = 8  # buckets under way: one alone waits for the links' delays more than it travels
_PIECE = 1 << 20  # bytes of a newcomer's state per message: each has the whole of network.timeout
_ATTEMPTS = 4  # to send it
_MEETING = 8.0  # seconds in which the members of a new epoch come together
_TORN = 4  # averages in a row that may fail although nobody is lost
_BLOCK = 256  # numbers that share a step of int8
_STATISTIC = ("basis/M", "basis/square_norm")  # each replica's own share since the last move

T = TypeVar("T")
State = tuple[dict[str, torch.Tensor], dict[str, Any]]  # tensors by name, and facts (JSON)
Give = Callable[[], State]
Take = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


class Alone:
    """The only pipeline of its run: nobody to average with.

    Attributes:
        number: this replica's; members: how many take part.
    """

    number = 0

    @property
    def members(self) -> int:
        return 1

    def watch(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Average these from now on; in the model's order."""

    def enter(
        self, step: int, about: Mapping[str, Any], give: Give, take: Take, say: Say, asked: Callable[[], bool] = lambda: False
    ) -> bool:
        """Join those who are at work, with the state of so many steps, or begin together. COLLECTIVE in the pipeline.

        Args:
            about: what must be the same in all replicas, by name (JSON).
            give: returns this stage's state; take: replaces it by a member's.
            asked: whether this process has been asked to stop; then nobody is waited for any longer.

        Returns False if the others have finished the run.

        Raises:
            ThinpipeError: `about` differs.
            PeerLost: the others or their state could not be reached.
            Stopped: a stop was asked for.
        """
        return True

    def arm(self) -> None:
        """The backward that comes is the batch's last: each gradient that it finishes goes off."""

    def finish(self) -> bool:
        """Put the average in the place of this stage's gradients; False if a member was lost meanwhile."""
        return True

    def again(self) -> bool:
        """The same with those who are left."""
        return True

    def decide(self, total: Tally, settle: bool) -> Tally:
        """On the first stage: what the step's tally comes to among all replicas.

        Args:
            settle: no average follows in this step, so that whoever leaves or waits may.
        """
        return total

    def follow(self, total: Tally) -> bool:
        """On every stage, when the tally is known: whether the gradients must be averaged again."""
        return False

    def average(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The mean over all members, however many get lost meanwhile; a step's last. COLLECTIVE in the pipeline, over the replicas."""
        return tensors

    def stepped(self, step: int, last: bool, settle: bool) -> None:
        """The optimizer has done its step number `step`. COLLECTIVE like `average`."""

    def admit(self, give: Give) -> None:
        """Between two steps: let newcomers in. COLLECTIVE in the pipeline."""

    def transport(self, turn: Callable[[str, torch.Tensor], None]) -> None:
        """The basis has moved: `turn` expresses the tensor of a parameter's name in the new one, in place."""

    def take_bytes(self) -> int:
        """Bytes that this stage sent to other replicas since the last call."""
        return 0

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps beside weights and moments."""
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state()` gave."""

    def leave(self, finished: bool) -> None:
        """This replica trains no more; with `finished`, which may be said later, nobody else need come."""


ALONE = Alone()


class _Together(Alone):
    """One of several replicas: who takes part, and what its members tell each other.

    Args:
        here: this replica's pipeline.
    """

    def __init__(self, config: Config, here: Topology) -> None:
        assert config.network.rdzv is not None and config.network.replica is not None
        self.here, self.number, self.config = here, config.network.replica, config
        connect = partial(store_at, config.network.rdzv, f"thinpipe-{config.run.name}/replicas", config.network.timeout)
        self._store = connect()
        self._council = Council(connect, self.number, config.pipeline.replicas) if here.is_first else None
        give_up_silence(config.network.rdzv)
        self._me: Member = tuple(here.gather(self._council.me if self._council else None)[0])
        self._epoch, self._next = Epoch(0, ()), Epoch(0, ())
        self._group: Any = None  # a ProcessGroupGloo; None when a member is lost
        self._sent = self._torn = 0
        self._leaving = False
        self._say: Say = print

    @property
    def members(self) -> int:
        return len(self._epoch.members)

    # Who takes part

    def enter(
        self, step: int, about: Mapping[str, Any], give: Give, take: Take, say: Say, asked: Callable[[], bool] = lambda: False
    ) -> bool:
        self._say = say
        marks = self.here.gather(self._mark(give()[0]))
        self._ask(lambda council: council.announce(step, " ".join(marks), about))
        told, began = 0, time.monotonic()
        while True:
            over = self._ask(Council.is_over)
            epoch = self._ask(lambda council: council.admitted(self.config.network.patience))
            there = len(self._ask(Council.present) or ())
            everyone = self.here.gather([str(epoch) if epoch else None, over, asked()])
            text, over, _ = everyone[0]
            if over:
                return False
            if any(stop for _, _, stop in everyone):
                self.leave(False)
                raise Stopped
            if text is not None:
                break
            if self._council is not None and there != told and time.monotonic() - began > 3:
                say(f"waiting for replicas: {there} of {self.config.pipeline.replicas} are here")
                told = there
            time.sleep(0.1)
        self._next = Epoch.of(text)
        self._meet()
        if not all(self.here.gather(self._group is not None)):
            raise PeerLost(f"replica {self.number} did not come together with the others")
        try:
            state = self._exchange(give)
        except PeerLost:
            self.leave(False)  # its heart stops, so that nobody waits for it
            raise
        if state is not None:
            take(*state)
        return True

    def admit(self, give: Give) -> None:
        if self._next.number != self._epoch.number and self._me in self._next.members:
            self._meet()
            self._exchange(give)

    def leave(self, finished: bool) -> None:
        if self._council is not None:
            with contextlib.suppress(RuntimeError):  # the meeting's host may have left already
                if finished:
                    self._council.finish()
            self._council.close()
        self._group = None

    def _vote(self, well: bool, loss: float, settle: bool) -> tuple[list[float], bool, int]:
        """On the first stage: the members' losses, whether they must average again, the number of the epoch that follows (0: the same)."""
        assert self._council is not None
        with self._asking():
            # Other stages wait for this one, for network.timeout at most.
            ballots = self._council.vote({"well": well, "loss": loss, "leaving": self._leaving}, self.config.network.timeout / 2)
            agreed = all(ballot is not None and ballot["well"] for ballot in ballots.values())
            after = self._council.next_epoch(ballots, agreed, settle)
        if not agreed:
            there = sum(ballot is not None for ballot in ballots.values())
            self._say(f"the average was torn: {there} of {len(ballots)} replicas are left, and average again")
        return [ballot["loss"] for ballot in ballots.values() if ballot is not None], not agreed, after.number if after else 0

    def _heed(self, torn: bool, epoch: int) -> None:
        """What a vote means for this stage."""
        if epoch:
            with self._asking():
                self._next = Epoch.of(self._store.get(f"epoch/{epoch}").decode())
        self._torn = self._torn + 1 if torn and len(self._next.members) == self.members else 0
        if self._torn == _TORN:
            raise PeerLost(f"the replicas reach the meeting's host but not each other at {self.here}; look at their firewalls")
        if torn:
            self._meet()

    def _meet(self) -> None:
        """Make the group of the next epoch; without one, the next average fails, and whoever is lost is found out."""
        self._epoch, self._group = self._next, None
        store = dist.PrefixStore(f"group/{self._epoch.number}/{self.here.stage}", self._store)
        with contextlib.suppress(RuntimeError):
            rank, timeout = self._epoch.members.index(self._me), self.config.network.timeout
            # The others may yet have a basis to move and a batch to look at before they let a newcomer in.
            meet = timeout if self._me in self._epoch.newcomers else _MEETING
            self._group = side_group(store, rank, self.members, _AT_ONCE, meet, timeout)

    def _ask(self, question: Callable[[Council], T]) -> T | None:
        """On the first stage: what the council says; None on the others."""
        if self._council is None:
            return None
        with self._asking():
            return question(self._council)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Around questions to the meeting's host: a store that is gone is a lost peer."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"replica {self.number} lost the meeting's host {self.config.network.rdzv}: {error}") from error

    def _until(self, done: Callable[[], bool]) -> None:
        """Wait for something that may take long: every stage asks the others all the time, so that none believes another lost."""
        while not all(self.here.gather(done())):
            time.sleep(0.2)

    # Messages

    def _start(self, operation: Callable[[Any], dist.Work]) -> dist.Work | None:
        """Begin an operation over the group; None if a member is lost."""
        if self._group is None:
            return None
        try:
            return operation(self._group)
        except RuntimeError:
            self._group = None
            return None

    def _begin_sum(self, buffer: torch.Tensor) -> dist.Work | None:
        """Begin to add up `buffer` over the members, in place; None if one is lost."""
        # A ring sends each part of the buffer twice over every link but one.
        self._sent += 2 * buffer.nbytes * (self.members - 1) // self.members
        return self._start(lambda group: group.allreduce([buffer]))

    def _ended(self, work: dist.Work | None) -> bool:
        if work is None:
            return False
        try:
            work.wait()
        except RuntimeError:
            self._group = None
            return False
        return True

    def average(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._agreed(partial(self._mean, tensors), settle=True)

    def _agreed(self, average: Callable[[], list[torch.Tensor] | None], settle: bool) -> list[torch.Tensor]:
        """What `average` gives when it goes well on all stages of all members; on those who are left, if one gets lost."""
        while True:
            mean = average()
            well = all(self.here.gather(mean is not None))
            verdict = self._vote(well, 0.0, settle) if self._council is not None else None
            _, torn, epoch = self.here.gather(verdict)[0]
            self._heed(torn, epoch)
            if not torn:
                assert mean is not None
                return mean

    def _mean(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The members' mean; None if one was lost."""
        copies = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]
        works = [self._begin_sum(copy) for copy in copies]
        if not all(self._ended(work) for work in works):
            return None
        return [(copy / self.members).to(tensor) for copy, tensor in zip(copies, tensors, strict=True)]

    def _mark(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Digest of what must be equal in all members."""
        raise NotImplementedError

    def _exchange(self, give: Give) -> State | None:
        """Send this stage's state to the epoch's newcomers, or receive it, or wait for those who do. COLLECTIVE in the pipeline.

        Raises PeerLost if the state did not come, or not whole.
        """
        if not self._epoch.newcomers:
            return None
        newcomers = self._epoch.newcomers
        is_new = self._me in newcomers
        works: list[Future[Any]] = []
        with ThreadPoolExecutor(1 + len(newcomers)) as pool:
            if is_new:
                works = [pool.submit(self._receive)]
            elif self._me == self._epoch.source and self._group is not None:
                # A large state takes long to copy and to hash: the newcomers are met meanwhile.
                ready = pool.submit(_packed, *give())
                works = [ready, *(pool.submit(self._send, newcomer, ready) for newcomer in newcomers)]
            self._until(lambda: all(work.done() for work in works))
        results = [work.result() for work in works]
        if is_new:
            self._ask(lambda council: council.mark("given"))
        self._until(lambda: self._ask(lambda council: council.marked("given", newcomers)) is not False)
        return results[0] if is_new else None

    def _between(self, newcomer: Member, attempt: int) -> Any:
        """A group of the source (rank 0) and a newcomer (rank 1), both at this stage: what breaks here is no other average's trouble."""
        store = dist.PrefixStore(f"give/{self._epoch.number}/{newcomer[0]}/{self.here.stage}/{attempt}", self._store)
        return side_group(store, int(self._me == newcomer), 2, 1, _MEETING, self.config.network.timeout)

    def _pass(self, message: dist.Work) -> None:
        """Else a message of a group like `_between`'s had no more time than its members had to meet."""
        message.wait(timedelta(seconds=self.config.network.timeout))

    def _send(self, newcomer: Member, ready: Future[tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
        """A connection that breaks is made anew, and goes on where the newcomer is; one that is lost is left to its fate."""
        for attempt in range(_ATTEMPTS):
            with contextlib.suppress(RuntimeError):
                group, has = self._between(newcomer, attempt), torch.zeros(1, dtype=torch.int64)
                self._pass(group.recv([has], 1, 0))
                head, pieces = ready.result()
                for message in (torch.tensor([head.numel()]), head, *pieces[int(has) :]):
                    self._pass(group.send([message], 1, 0))
                self._pass(group.recv([has], 1, 0))
                break

    def _receive(self) -> State:
        assert self._epoch.source is not None
        source, failure = self._epoch.source[0], ""
        told: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        has = 0
        for attempt in range(_ATTEMPTS):
            try:
                group, size = self._between(self._me, attempt), torch.zeros(1, dtype=torch.int64)
                self._pass(group.send([torch.tensor([has])], 0, 0))
                self._pass(group.recv([size], 0, 0))
                head = torch.empty(int(size), dtype=torch.uint8)
                self._pass(group.recv([head], 0, 0))
                if not told:
                    told = json.loads(bytes(head.numpy()))
                    tensors = {n: torch.empty(shape, dtype=getattr(torch, dtype)) for n, (dtype, shape, _) in told["tensors"].items()}
                for piece in [piece for tensor in tensors.values() for piece in _pieces(tensor)][has:]:
                    self._pass(group.recv([piece], 0, 0))
                    has += 1
                self._pass(group.send([torch.tensor([has])], 0, 0))
                break
            except RuntimeError as error:
                failure = str(error)
        else:
            raise PeerLost(f"replica {self.number} could not get its state from replica {source}: {failure}")
        for name, tensor in tensors.items():
            if _digest(tensor) != told["tensors"][name][2]:
                raise PeerLost(f"{name} came damaged from replica {source} to replica {self.number}")
        return tensors, told["facts"]

    def take_bytes(self) -> int:
        sent, self._sent = self._sent, 0
        return sent


class Synchronous(_Together):
    """Gradients averaged in every step: the same as one pipeline with the whole batch, to rounding."""

    def watch(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._parameters = [parameter for _, parameter in reversed(parameters)]  # as a backward finishes them
        self._buckets: list[list[nn.Parameter]] = [[]]
        for parameter in self._parameters:
            if sum(p.nbytes for p in self._buckets[-1]) >= _BUCKET:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
        self._bucket_of = {parameter: i for i, bucket in enumerate(self._buckets) for parameter in bucket}
        self._armed = False
        self._forget()
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._finished)

    def _forget(self) -> None:
        """Let go of a step's own gradients and of what is under way, and so of connections to members that are lost."""
        self._own: list[torch.Tensor | None] = []
        self._works: list[tuple[dist.Work, torch.Tensor]] = []

    def arm(self) -> None:
        self._armed = True
        self._waiting_for = [len(bucket) for bucket in self._buckets]

    def _finished(self, parameter: nn.Parameter) -> None:
        if not self._armed:
            return
        self._waiting_for[self._bucket_of[parameter]] -= 1
        # In the same order on all members, whatever order the gradients come in.
        while len(self._works) < len(self._buckets) and not self._waiting_for[len(self._works)] and self._send_bucket():
            pass

    def _send_bucket(self) -> bool:
        """Begin the average of the next bucket; False if a member is lost."""
        bucket = self._buckets[len(self._works)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        buffer = torch.cat([grad.float().flatten() for grad in gradients]).cpu()
        work = self._begin_sum(buffer)
        if work is not None:
            self._works.append((work, buffer))
        return work is not None

    def finish(self) -> bool:
        self._armed = False
        self._own = [parameter.grad for parameter in self._parameters]  # kept for another average
        return self._collect()

    def again(self) -> bool:
        for parameter, own in zip(self._parameters, self._own, strict=True):
            parameter.grad = own
        return self._collect()

    def _collect(self) -> bool:
        while len(self._works) < len(self._buckets) and self._send_bucket():
            pass
        if len(self._works) < len(self._buckets) or not all(self._ended(work) for work, _ in self._works):
            self._works = []
            return False
        for bucket, (_, buffer) in zip(self._buckets, self._works, strict=True):
            buffer /= self.members
            for parameter, mean in zip(bucket, buffer.split([p.numel() for p in bucket]), strict=True):
                if parameter.grad is not None:
                    parameter.grad = mean.view_as(parameter).to(parameter)
        self._works = []
        return True

    def decide(self, total: Tally, settle: bool) -> Tally:
        self._leaving = bool(total.stop)
        losses, torn, epoch = self._vote(not total.torn, total.loss, settle)
        if not torn:
            total.loss = sum(losses) / len(losses)
        total.torn, total.epoch = float(torn), float(epoch)
        return total

    def follow(self, total: Tally) -> bool:
        self._heed(bool(total.torn), int(total.epoch))
        if not total.torn:
            self._forget()
        return bool(total.torn)

    def _mark(self, tensors: Mapping[str, torch.Tensor]) -> str:
        return _digest_all({name: tensor for name, tensor in tensors.items() if name not in _STATISTIC})


class Approximate(Synchronous):
    """Gradients of low rank by torch's PowerSGD (arXiv 1905.13727), with its error feedback, from a group's third step on, and
    from the third behind one that wasn't finite.

    Torch's hook waits inside of its callbacks, so that two buckets under way could get into each other's places: there is one,
    and it goes off when the backward is done.
    """

    def _meet(self) -> None:
        super()._meet()
        self._begin_anew()  # whoever comes knows nothing of the others' errors

    def _begin_anew(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        self._hook: Callable[..., Any] = powerSGD_hook
        self._power = PowerSGDState(self._group, self.config.average.rank, start_powerSGD_iter=2)

    def _finished(self, parameter: nn.Parameter) -> None:
        pass

    def _collect(self) -> bool:
        if self._group is None:
            return False
        there = [parameter for parameter in self._parameters if parameter.grad is not None]
        bucket = _Bucket([parameter.grad for parameter in there if parameter.grad is not None])
        numbers = self._power.total_numel_after_compression
        try:
            self._hook(self._power, bucket).wait()
        except RuntimeError:
            self._group = None
            return False
        numbers = self._power.total_numel_after_compression - numbers or bucket.buffer().numel()
        self._sent += 2 * 4 * numbers * (self.members - 1) // self.members
        if not bucket.buffer().isfinite().all():  # on all members: what each keeps of it would poison the steps behind the refused one
            self._begin_anew()
        for parameter, mean in zip(there, bucket.gradients(), strict=True):
            parameter.grad = mean.to(parameter)
        return True


class _Bucket:
    """As much of torch's GradBucket, which only torch can make, as its hook asks for."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        self._flat = torch.cat([gradient.float().flatten() for gradient in gradients]).cpu()
        parts = self._flat.split([gradient.numel() for gradient in gradients])
        self._gradients = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Distant(_Together):
    """DiLoCo (arXiv 2311.08105): each replica trains by itself; every H steps they average how far they have come.

    The mean way of H steps is a gradient for an outer step by SGD with Nesterov's momentum, from where all began; H,
    learning rate and momentum are `[average]`'s. Inner moments stay each replica's own.
    """

    def watch(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._named = list(parameters)
        self._begin()
        self._momentum = {name: torch.zeros_like(parameter) for name, parameter in self._named}

    def _begin(self) -> None:
        self._anchor = {name: parameter.detach().clone() for name, parameter in self._named}

    @torch.no_grad()
    def stepped(self, step: int, last: bool, settle: bool) -> None:
        options = self.config.average
        if step % options.every and not last:
            return
        self._ask(lambda council: council.mark(f"step-{step}"))
        # A slower replica may be far behind.
        self._until(lambda: self._ask(lambda council: council.marked(f"step-{step}", council.epoch.members)) is not False)
        ways = [self._anchor[name] - parameter for name, parameter in self._named]
        ways = self._agreed(partial(self._mean if options.wire == "float32" else self._rounded_mean, ways), settle)
        for (name, parameter), way in zip(self._named, ways, strict=True):
            outer_step(self._anchor[name], way, self._momentum[name], options.outer_lr, options.outer_momentum)
            parameter.copy_(self._anchor[name])

    def _rounded_mean(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The mean of what all send as int8, rounded at random; None if a member was lost.

        A tensor's blocks are its own, so that the copies of a tied table on two stages stay equal.
        """
        codec = Integers(8, _BLOCK)
        blocks = [nn.functional.pad(t.detach().cpu().flatten(), (0, -t.numel() % _BLOCK)).view(1, -1, _BLOCK) for t in tensors]
        parts = [codec.encode_gradient(block, None) for block in blocks]
        wire = torch.cat([part.flatten() for part in parts])
        theirs = [torch.empty_like(wire) for _ in range(self.members)]
        self._sent += wire.nbytes * (self.members - 1)
        if not self._ended(self._start(lambda group: group.allgather([theirs], [wire]))):
            return None
        totals = [torch.zeros_like(block) for block in blocks]
        for one in theirs:
            for total, part, like in zip(totals, one.split([part.numel() for part in parts]), parts, strict=True):
                total += codec.decode_gradient(part.view_as(like), total.dtype)
        return [(total.flatten()[: t.numel()] / self.members).view_as(t).to(t) for total, t in zip(totals, tensors, strict=True)]

    def transport(self, turn: Callable[[str, torch.Tensor], None]) -> None:
        for name, _ in self._named:
            turn(name, self._momentum[name])
        self._begin()  # all are where they began: the basis moves right after an average

    def state(self) -> dict[str, torch.Tensor]:
        kinds = (("anchor", self._anchor), ("momentum", self._momentum))
        return {f"outer/{name}/{kind}": tensor for kind, tensors in kinds for name, tensor in tensors.items()}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._begin()  # here, unless the state says that it was elsewhere
        for full, tensor in self.state().items():
            if full in state:
                tensor.copy_(state[full])

    def _mark(self, tensors: Mapping[str, torch.Tensor]) -> str:
        return _digest_all({name: t for name, t in tensors.items() if name.startswith("outer/") or name == "basis/U"})


@torch.no_grad()
def outer_step(weights: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, lr: float, beta: float) -> None:
    """One step of SGD with Nesterov's momentum as torch.optim.SGD does it, in place (arXiv 2311.08105, algorithm 1)."""
    momentum.mul_(beta).add_(gradient)
    weights.add_(gradient + beta * momentum, alpha=-lr)


def join_replicas(config: Config, here: Topology) -> Alone:
    """This process's side of its run's replicas, by the config."""
    if config.pipeline.replicas == 1:
        return ALONE
    kind = Distant if config.average.every else Approximate if config.average.rank else Synchronous
    return kind(config, here)


def _packed(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A state as messages: what it consists of, with digests (JSON), and its bytes."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    about = {n: [str(t.dtype).removeprefix("torch."), list(t.shape), _digest(t)] for n, t in ready.items()}
    head = torch.frombuffer(bytearray(json.dumps({"tensors": about, "facts": facts}).encode()), dtype=torch.uint8)
    return head, [piece for tensor in ready.values() for piece in _pieces(tensor)]


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The memory of a contiguous tensor as bytes, in messages."""
    return tensor.view(-1).view(torch.uint8).split(_PIECE)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()


def _digest_all(tensors: Mapping[str, torch.Tensor]) -> str:
    return hashlib.sha256("".join(name + _digest(tensor) for name, tensor in sorted(tensors.items())).encode()).hexdigest()
