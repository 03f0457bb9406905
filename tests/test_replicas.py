"""Replicas: the council's protocol, the averages and a newcomer's state, over real stores and groups, a thread per replica."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore

from thinpipe import council, replicas
from thinpipe.config import Config, from_dict
from thinpipe.council import Council, Epoch
from thinpipe.errors import Stopped, ThinpipeError
from thinpipe.replicas import ALONE, Distant, Synchronous, join_replicas, outer_step
from thinpipe.tally import Tally
from thinpipe.topology import PeerLost, Topology, connect, side_group

WELL, TORN = ({"well": well, "loss": 1.0, "leaving": False} for well in (True, False))


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a meeting's store; replicas are impatient."""
    monkeypatch.setattr(council, "_PULSE", 0.05)
    monkeypatch.setattr(council, "_SILENCE", 0.6)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store  # it lived so long


def opener(port: int) -> Callable[[], Store]:
    return lambda: PrefixStore("test", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))


def admitted(one: Council, patience: float = 60.0) -> Epoch:
    deadline = time.monotonic() + 10
    while (epoch := one.admitted(patience)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return epoch


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=30) for future in [pool.submit(call) for call in calls]]


def seated(port: int, steps: list[int], replicas: int | None = None) -> list[Council]:
    councils = [Council(opener(port), i, replicas or len(steps)) for i in range(len(steps))]
    for one, step in zip(councils, steps, strict=True):
        one.announce(step, "", {})
    return councils


def test_who_is_behind_gets_the_state_of_the_furthest(port: int) -> None:
    councils = seated(port, [20, 40, 40])
    epochs = together(*(lambda one=one: admitted(one) for one in councils))
    assert epochs[0] == epochs[1] == epochs[2]
    assert epochs[0].members == ((0, 1), (1, 1), (2, 1)) and epochs[0].newcomers == ((0, 1),) and epochs[0].source == (1, 1)
    for one in councils:
        one.close()


def test_a_silent_member_is_counted_out_and_comes_back_in_a_new_life(port: int) -> None:
    a, b = seated(port, [0, 0])
    together(lambda: admitted(a), lambda: admitted(b))
    ballots = together(lambda: a.vote(WELL, 9), lambda: b.vote(WELL, 9))
    assert ballots[0] == ballots[1] and all(ballots[0].values())
    assert [one.next_epoch(ballots[0], True, True) for one in (a, b)] == [None, None]

    b.close()  # its heart stops
    alone = a.vote(TORN, 9)
    assert alone[1, 1] is None and alone[0, 1] is not None
    after = a.next_epoch(alone, False, True)
    assert after is not None and after.members == ((0, 1),)
    with pytest.raises(PeerLost, match="counted out"):
        b.vote(WELL, 9)  # it was only slow, and finds out

    back = Council(opener(port), 1, 2)
    back.announce(7, "", {})
    deadline = time.monotonic() + 10
    while (after := a.next_epoch(a.vote(WELL, 9), True, True)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert after.members == ((0, 1), (1, 2)) and after.newcomers == ((1, 2),) and after.source == (0, 1)
    assert admitted(back) == after
    for one in (a, back):
        one.close()


def test_a_torn_vote_makes_a_new_epoch_even_when_all_are_there(port: int) -> None:
    a, b = seated(port, [0, 0])
    together(lambda: admitted(a), lambda: admitted(b))
    ballots = together(lambda: a.vote(WELL, 9), lambda: b.vote(TORN, 9))[0]
    after = [one.next_epoch(ballots, False, True) for one in (a, b)]
    assert after[0] == after[1] and after[0] is not None and after[0].number == 2 and len(after[0].members) == 2
    for one in (a, b):
        one.close()


def test_only_a_steps_last_vote_lets_in_and_lets_go(port: int) -> None:
    a, b, c = seated(port, [0, 0, 0])
    together(*(lambda one=one: admitted(one) for one in (a, b, c)))
    b.close()
    votes = together(lambda: a.vote(WELL, 9), lambda: c.vote(WELL, 9))  # b is out
    a.next_epoch(votes[0], False, True), c.next_epoch(votes[1], False, True)
    back = Council(opener(port), 1, 3)
    back.announce(7, "", {})
    leaving = WELL | {"leaving": True}
    deadline = time.monotonic() + 10
    while (1, 2) not in a.present() or (1, 2) not in c.present():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    votes = together(lambda: a.vote(WELL, 9), lambda: c.vote(leaving, 9))
    assert [one.next_epoch(vote, True, False) for one, vote in zip((a, c), votes, strict=True)] == [None, None]
    votes = together(lambda: a.vote(WELL, 9), lambda: c.vote(leaving, 9))
    after = [one.next_epoch(vote, True, True) for one, vote in zip((a, c), votes, strict=True)]
    assert after[0] == after[1] and after[0] is not None
    assert after[0].members == ((0, 1), (1, 2)) and after[0].newcomers == ((1, 2),)
    admitted(back)
    # Who has left still beats, and is not let in again.
    votes = together(lambda: a.vote(WELL, 9), lambda: back.vote(WELL, 9))
    assert [one.next_epoch(vote, True, True) for one, vote in zip((a, back), votes, strict=True)] == [None, None]
    for one in (a, c, back):
        one.close()


def test_equal_steps_of_another_lineage_are_newcomers(port: int) -> None:
    a, b = (Council(opener(port), i, 2) for i in range(2))
    a.announce(20, "ours", {})
    b.announce(20, "theirs", {})
    assert together(lambda: admitted(a), lambda: admitted(b))[0].newcomers == ((1, 1),)
    for one in (a, b):
        one.close()


def test_who_is_deaf_counts_nobody_out(port: int) -> None:
    a, b = seated(port, [0, 0])
    together(lambda: admitted(a), lambda: admitted(b))
    a.close()  # its ears
    with pytest.raises(PeerLost, match="hears the others no more"):
        a.vote(WELL, 9)
    assert not b.store.check([b._key((1, 1), 1)])
    b.close()


def test_a_slow_member_is_not_waited_for_for_ever(port: int) -> None:
    a, b = seated(port, [0, 0])
    together(lambda: admitted(a), lambda: admitted(b))
    assert a.vote(WELL, 0.1)[1, 1] is None  # its heart beats, and it says nothing
    for one in (a, b):
        one.close()


def test_who_waits_long_enough_begins_alone_and_a_finished_run_is_over(port: int) -> None:
    (a,) = seated(port, [0], replicas=2)
    assert a.admitted(60.0) is None
    assert admitted(a, patience=0.2).members == ((0, 1),)
    assert not a.is_over()
    a.finish()
    assert a.is_over()
    a.close()


def test_replicas_of_another_config_are_told(port: int) -> None:
    a, b = (Council(opener(port), i, 2) for i in range(2))
    a.announce(0, "", {"optim.lr": 0.1, "train.steps": 5})
    with pytest.raises(ThinpipeError, match=r"optim.lr is 0.1 in the other replicas and 0.2 in replica 1"):
        b.announce(0, "", {"optim.lr": 0.2, "train.steps": 5})
    a.close()


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_outer_step_is_torchs_sgd_with_nesterov_momentum(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    theirs = ours.clone().requires_grad_()
    torchs = torch.optim.SGD([theirs], lr=0.3, momentum=beta, nesterov=beta > 0)
    momentum = torch.zeros_like(ours)
    for _ in range(6):
        gradient = torch.randn(5, 3, dtype=torch.float64, generator=generator)
        outer_step(ours, gradient, momentum, 0.3, beta)
        theirs.grad = gradient.clone()
        torchs.step()
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("inner", "equal"), [(torch.optim.SGD, True), (torch.optim.AdamW, False)])
def test_one_step_apart_is_synchronous_for_sgd_and_not_for_adamw(inner: Any, equal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    together_, anchor, momentum = start.clone().requires_grad_(), start.clone(), torch.zeros_like(start)
    apart = [start.clone().requires_grad_() for _ in range(2)]
    optimizers = [inner([weights], lr=0.1) for weights in (together_, *apart)]
    for _ in range(5):
        gradients = [torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(2)]
        together_.grad = (gradients[0] + gradients[1]) / 2
        for weights, gradient in zip(apart, gradients, strict=True):
            weights.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        outer_step(anchor, sum(anchor - weights.detach() for weights in apart) / 2, momentum, 1.0, 0.0)
        for weights in apart:
            weights.data.copy_(anchor)
    assert torch.allclose(together_, anchor, rtol=1e-12, atol=0) == equal


# The averages, with one stage per replica


@pytest.fixture
def here() -> Iterator[Topology]:
    with connect(10.0) as topology:
        yield topology


def settings(port: int, replica: int, replicas: int) -> Config:
    groups: dict[str, dict[str, Any]] = {
        "pipeline": {"stages": 1, "replicas": replicas, "micro_batches": 1},
        "network": {"rdzv": f"127.0.0.1:{port}", "replica": replica, "timeout": 10.0},
        "train": {"batch": 2 * replicas},
    }
    return from_dict(groups).check()


class Pair:
    """Two replicas of a small model whose second layer is large enough for a bucket of its own."""

    def __init__(self, port: int, here: Topology, rank: int = 0) -> None:
        self.models = []
        self.replicas = []
        for number in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 1))
            config = settings(port, number, 2)
            one = join_replicas(replace(config, average=replace(config.average, rank=rank)), here)
            assert isinstance(one, Synchronous)
            one.watch(list(model.named_parameters()))
            self.models.append(model)
            self.replicas.append(one)
        self.taken: dict[int, Any] = {}

    def enter(self, steps: tuple[int, int] = (0, 0)) -> None:
        def one(number: int) -> Callable[[], bool]:
            def give() -> Any:
                return {name: p.detach() for name, p in self.models[number].named_parameters()}, {"step": steps[number]}

            def take(tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
                self.taken[number] = tensors, facts

            return lambda: self.replicas[number].enter(steps[number], {}, give, take, lambda _: None)

        assert together(one(0), one(1)) == [True, True]

    def backward(self, number: int, seed: int) -> list[torch.Tensor]:
        """Two micro-batches; the gradients by autograd alone."""
        model, data = self.models[number], torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(seed))
        model.zero_grad()
        (model(data[0]).square().mean() / 2).backward()
        self.replicas[number].arm()
        (model(data[1]).square().mean() / 2).backward()
        loss = sum(model(part).square().mean() / 2 for part in data)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    def close(self) -> None:
        for one in self.replicas:
            one.leave(False)


def test_gradients_are_the_mean_over_replicas_and_go_off_during_the_backward(port: int, here: Topology) -> None:
    pair = Pair(port, here)
    pair.enter()

    def step(number: int) -> tuple[list[torch.Tensor], int]:
        own = pair.backward(number, number)
        gone_off = len(pair.replicas[number]._works)
        assert pair.replicas[number].finish()
        return own, gone_off

    (a, off_a), (b, off_b) = together(lambda: step(0), lambda: step(1))
    assert off_a == off_b == len(pair.replicas[0]._buckets) >= 2  # before `finish` asked for it
    for first, second, x, y in zip(pair.models[0].parameters(), pair.models[1].parameters(), a, b, strict=True):
        assert first.grad is not None and second.grad is not None
        torch.testing.assert_close(first.grad, (x + y) / 2, rtol=1e-5, atol=1e-8)
        assert torch.equal(first.grad, second.grad)
    totals = together(
        *(lambda one=one, loss=loss: one.decide(Tally(loss=loss), True) for one, loss in zip(pair.replicas, (1.0, 2.0), strict=True))
    )
    assert [total.loss for total in totals] == [1.5, 1.5] and not totals[0].torn and not totals[0].epoch
    size = sum(p.nbytes for p in pair.models[0].parameters())
    assert [one.take_bytes() for one in pair.replicas] == [size, size] and pair.replicas[0].take_bytes() == 0
    pair.close()


def test_gradients_of_low_rank_are_near_and_equal_and_make_up_for_their_errors(port: int, here: Topology) -> None:
    pair = Pair(port, here, rank=4)
    pair.enter()
    size = sum(p.nbytes for p in pair.models[0].parameters())

    def step(number: int, seed: int) -> list[torch.Tensor]:
        own = pair.backward(number, seed)
        assert pair.replicas[number].finish()
        return own

    sums = [[torch.zeros_like(p) for p in pair.models[0].parameters()] for _ in range(2)]
    for turn in range(8):  # the same gradients again and again: what is left out once comes later
        a, b = together(lambda: step(0, 0), lambda: step(1, 1))
        for exact, near, x, y, first, second in zip(*sums, a, b, *(model.parameters() for model in pair.models), strict=True):
            assert first.grad is not None and torch.equal(first.grad, second.grad)
            if turn < 2:
                torch.testing.assert_close(first.grad, (x + y) / 2, rtol=1e-5, atol=1e-8)
            else:
                exact += (x + y) / 2
                near += first.grad
        assert (pair.replicas[0].take_bytes() < size / 10) == (turn >= 2)
    exact, near = (torch.cat([part.flatten() for part in parts]) for parts in sums)
    assert 0 < float((near - exact).norm() / exact.norm()) < 0.1

    weight = next(pair.models[1].parameters())
    before = weight.detach().clone()
    weight.data[0, 0] = torch.nan  # a step that will be refused
    together(lambda: step(0, 0), lambda: step(1, 1))
    assert not all(p.grad is None or p.grad.isfinite().all() for p in pair.models[0].parameters())
    weight.data.copy_(before)
    together(lambda: step(0, 0), lambda: step(1, 1))
    assert all(p.grad is None or p.grad.isfinite().all() for model in pair.models for p in model.parameters())
    pair.close()


def test_who_is_left_averages_its_own_again(port: int, here: Topology) -> None:
    pair = Pair(port, here)
    pair.enter()
    pair.replicas[1].leave(False)  # its group and its heart are gone
    a = pair.replicas[0]
    own = pair.backward(0, 3)
    assert not a.finish()
    total = a.decide(Tally(loss=1.0, torn=1.0), True)
    assert total.torn and total.epoch
    assert a.follow(total) and a.members == 1
    assert a.again()
    for parameter, gradient in zip(pair.models[0].parameters(), own, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-8)
    total = a.decide(Tally(loss=1.0), True)
    assert not total.torn and not a.follow(total)
    a.leave(False)


def test_a_meetings_host_that_is_gone_is_a_lost_peer(here: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pair = Pair(store.port, here)
    pair.enter()
    del store
    with pytest.raises(PeerLost, match=r"replica 0 lost the meeting's host 127\.0\.0\.1:"):
        pair.replicas[0].decide(Tally(loss=1.0), True)
    pair.close()


def test_a_newcomer_gets_the_others_state_whole(port: int, here: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(port, here)
    pair.models[1][2].weight.data.mul_(2)
    pair.enter((3, 9))
    tensors, facts = pair.taken[0]
    assert facts == {"step": 9} and 1 not in pair.taken
    for name, parameter in pair.models[1].named_parameters():
        assert torch.equal(tensors[name], parameter)
    pair.close()


def test_int8_rounds_a_tensor_alike_whatever_lies_beside_it(port: int, here: Topology) -> None:
    config = settings(port, 0, 2)
    one = Distant(replace(config, average=replace(config.average, every=1, wire="int8")), here)
    one._epoch = Epoch(1, (one._me,), (), one._me)
    one._group = side_group(PrefixStore("alone", opener(port)()), 0, 1, 1, 5.0, 5.0)
    generator = torch.Generator().manual_seed(0)
    table, other = torch.randn(700, generator=generator), torch.randn(33, generator=generator)
    with_, without = one._rounded_mean([other, table]), one._rounded_mean([table])
    assert with_ is not None and without is not None and torch.equal(with_[1], without[0])
    assert 0 < float((without[0] - table).abs().max()) < float(table.abs().max()) / 100


def test_a_transfer_that_breaks_goes_on_where_it_was(port: int, here: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(port, here)
    real, ends = replicas.side_group, []

    class End:
        """The source's end of a connection; the first one breaks behind its second piece."""

        def __init__(self, group: Any) -> None:
            self.group, self.messages = group, 0
            ends.append(self)

        def recv(self, *arguments: Any) -> Any:
            return self.group.recv(*arguments)

        def send(self, *arguments: Any) -> Any:
            self.messages += 1
            if self is ends[0] and self.messages == 5:  # behind length, head and two pieces
                self.group = None
                raise RuntimeError("Connection reset by peer")
            return self.group.send(*arguments)

    def side_group(store: Store, rank: int, size: int, threads: int, *rest: float) -> Any:
        group = real(store, rank, size, threads, *rest)
        return End(group) if threads == 1 and rank == 0 else group

    monkeypatch.setattr(replicas, "side_group", side_group)
    monkeypatch.setattr(replicas, "_PIECE", 1 << 17)
    pair.enter((3, 9))
    tensors, _ = pair.taken[0]
    pieces = sum(-(-p.nbytes // (1 << 17)) for p in pair.models[1].parameters())
    assert len(ends) == 2 and ends[1].messages in (pieces, pieces + 1)  # two messages more, one or two pieces less
    for name, parameter in pair.models[1].named_parameters():
        assert torch.equal(tensors[name], parameter)
    pair.close()


def test_a_state_that_comes_damaged_is_refused(port: int, here: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(port, here)
    monkeypatch.setattr("thinpipe.replicas._digest", lambda tensor: str(time.monotonic_ns()))
    with pytest.raises(PeerLost, match="came damaged from replica 1"):
        pair.enter((3, 9))
    pair.close()


def test_one_replica_is_alone_without_a_meeting() -> None:
    config = Config()
    assert join_replicas(replace(config, pipeline=replace(config.pipeline, replicas=1)), None) is ALONE  # type: ignore[arg-type]
    assert ALONE.enter(0, {}, None, None, None) and ALONE.finish() and not ALONE.follow(Tally())  # type: ignore[arg-type]


def test_who_waits_for_replicas_may_be_stopped(port: int, here: Topology) -> None:
    one = join_replicas(settings(port, 0, 2), here)
    one.watch([])
    with pytest.raises(Stopped):
        one.enter(0, {}, lambda: ({}, {}), lambda *_: None, lambda _: None, asked=lambda: True)


def test_a_newcomer_waits_for_a_state_that_takes_long_to_pack(port: int, here: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, packed = Pair(port, here), replicas._packed

    def slowly(*state: Any) -> Any:
        time.sleep(4.0)
        return packed(*state)

    monkeypatch.setattr(replicas, "_packed", slowly)
    monkeypatch.setattr(replicas, "_MEETING", 2.5)
    monkeypatch.setattr(replicas, "_ATTEMPTS", 1)
    pair.enter((3, 9))
    assert pair.taken[0][1] == {"step": 9}
    pair.close()
