"""Who takes part: what the replicas' first stages agree on, by write-once ballots in the meeting's store.

All that follows from a ballot is a pure function of what lies in the store, so that nobody leads. Between two changes of who
takes part lies an epoch. A member's ballot is set once: by itself, or, when it has been silent too long, as ABSENT by another.
Whoever finds its own ballot ABSENT has been counted out and comes back as a newcomer.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore

from .errors import ThinpipeError
from .topology import PeerLost

_PULSE = 0.5  # seconds between signs of life
_SILENCE = 4.0  # seconds without one after which a replica is absent
_ABSENT = "absent"
_FINISHED = "finished"

Member = tuple[int, int]  # a replica's number and which of its lives


@dataclass(frozen=True)
class Epoch:
    """Who takes part.

    Attributes:
        number: counts the epochs.
        members: in rising order.
        newcomers: those of them that have yet to get their state; source: the member that gives it.
    """

    number: int
    members: tuple[Member, ...]
    newcomers: tuple[Member, ...] = ()
    source: Member | None = None

    @staticmethod
    def of(text: str) -> Epoch:
        told = json.loads(text)
        members, newcomers = (tuple((r, life) for r, life in told[key]) for key in ("members", "newcomers"))
        return Epoch(told["number"], members, newcomers, tuple(told["source"]) if told["source"] else None)

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def store_at(endpoint: str, name: str, timeout: float) -> Store:
    """The replicas' own part of the store that the meeting's host keeps. Raises PeerLost if it can't be reached."""
    host, _, port = endpoint.rpartition(":")
    try:
        return PrefixStore(name, TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)))
    except RuntimeError as error:
        raise PeerLost(f"lost the meeting's host {endpoint}: {error}") from error


class Council:
    """One replica's voice, in its first stage.

    Args:
        connect: opens a connection to the store; one connection serves one thread.
        replica, replicas: this one's number, and how many there may be.
    """

    def __init__(self, connect: Callable[[], Store], replica: int, replicas: int) -> None:
        self.store, self.replica, self.replicas = connect(), replica, replicas
        self.me: Member = (replica, self.store.add(f"lives/{replica}", 1))
        self._enter(Epoch(0, ()))
        self._heard: dict[Member, tuple[int, float]] = {}  # pulse, and when it was last seen to beat
        self._steps: dict[Member, int] = {}  # of those that announced themselves
        self._ended = threading.Event()
        self._listening = threading.Thread(target=self._listen, args=(connect(),), daemon=True)

    def announce(self, step: int, about: Mapping[str, Any]) -> None:
        """Ask to take part, with the state of that many steps.

        Args:
            about: what must be the same in all replicas (JSON), by name.

        Raises ThinpipeError that names the first thing that differs from what the first replica said.
        """
        ours = json.loads(json.dumps(dict(about)))
        theirs = json.loads(self.store.compare_set("about", "", json.dumps(ours)))
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise ThinpipeError(
                    f"{name} is {theirs.get(name)!r} in the other replicas and {ours.get(name)!r} in replica {self.replica}; "
                    "start all with the same config and options"
                )
        self.store.set(f"life/{self.replica}", json.dumps([self.me[1], step]))
        self._began = time.monotonic()
        self._listening.start()

    def admitted(self, patience: float) -> Epoch | None:
        """The epoch that has taken this replica in; None if not yet. Where nobody is at work, those who are there begin one.

        Args:
            patience: seconds after `announce` after which they begin without the others.
        """
        text = self._pointer()
        now = Epoch.of(text) if text else Epoch(0, ())
        if self.me in now.members:
            self._enter(now)
            return now
        present = sorted(self.present())
        nobody_works = not set(now.members) & self._living()
        if nobody_works and self.me in present and (len(present) == self.replicas or time.monotonic() - self._began > patience):
            furthest = max(self._steps[member] for member in present)
            source = next(member for member in present if self._steps[member] == furthest)
            newcomers = tuple(member for member in present if self._steps[member] < furthest)
            self._publish(Epoch(now.number + 1, tuple(present), newcomers, source), text)
        return None

    def vote(self, ballot: Mapping[str, Any]) -> dict[Member, dict[str, Any] | None]:
        """Every member's ballot; None for who is absent. Waits for all; a silent one becomes absent.

        Raises PeerLost if this replica has been counted out.
        """
        self._ballots += 1
        keys = {member: f"ballot/{self.epoch.number}/{self._ballots}/{member[0]}" for member in self.epoch.members}
        mine = json.dumps(dict(ballot) | {"waiting": sorted(self.present() - set(self.epoch.members))})
        if self.store.compare_set(keys[self.me], "", mine) != mine.encode():
            raise PeerLost(f"replica {self.replica} was silent for {_SILENCE:g} s and has been counted out")
        while not self._there(list(keys.values())):
            for member, key in keys.items():
                if time.monotonic() - max(self._entered, self._heard.get(member, (0, 0.0))[1]) > _SILENCE:
                    self.store.compare_set(key, "", _ABSENT)
        texts = [text.decode() for text in self.store.multi_get(list(keys.values()))]
        found = {member: None if text == _ABSENT else json.loads(text) for member, text in zip(keys, texts, strict=True)}
        with contextlib.suppress(RuntimeError):  # a store that keeps every ballot would grow for ever
            self.store.delete_key(f"ballot/{self.epoch.number}/{self._ballots - 2}/{self.replica}")
        return found

    def next_epoch(self, ballots: Mapping[Member, Mapping[str, Any] | None], leaving: set[Member], agreed: bool) -> Epoch | None:
        """What follows from a vote: None if all stays as it is.

        Args:
            leaving: present members that go.
            agreed: all are well. Those who wait are let in then; else the members need a new group in any case.
        """
        staying = [member for member, ballot in ballots.items() if ballot is not None and member not in leaving]
        waiting = {(r, life) for ballot in ballots.values() if ballot is not None for r, life in ballot["waiting"]} if agreed else set()
        if agreed and set(staying) == set(self.epoch.members) and not waiting:
            return None
        source = min(staying, default=None)
        newcomers = tuple(sorted(waiting)) if source else ()
        after = Epoch(self.epoch.number + 1, tuple(sorted({*staying, *newcomers})), newcomers, source)
        self.store.set(f"epoch/{after.number}", str(after))
        self._publish(after, str(self.epoch))
        self._enter(after)
        return after

    def _enter(self, epoch: Epoch) -> None:
        self.epoch, self._entered, self._ballots = epoch, time.monotonic(), 0

    def is_over(self) -> bool:
        """Whether the others have finished the run."""
        return self.store.check([_FINISHED])

    def finish(self) -> None:
        """Whoever comes later finds the run done."""
        self.store.set(_FINISHED, "")

    def close(self) -> None:
        self._ended.set()
        if self._listening.is_alive():
            self._listening.join(2 * _PULSE)

    def present(self) -> set[Member]:
        """Replicas that have announced themselves and live, this one among them."""
        return set(self._steps) & self._living()

    def _living(self) -> set[Member]:
        return {member for member, (_, when) in list(self._heard.items()) if time.monotonic() - when < _SILENCE}

    def _pointer(self) -> str:
        return self.store.get("epoch").decode() if self.store.check(["epoch"]) else ""

    def _publish(self, after: Epoch, before: str) -> None:
        # Compared, since one that was counted out while it slept must not set it back.
        self.store.compare_set("epoch", before, str(after))

    def _there(self, keys: list[str]) -> bool:
        try:
            self.store.wait(keys, timedelta(seconds=_PULSE))
        except DistStoreError:
            return False
        return True

    def _listen(self, store: Store) -> None:
        """Beat, and hear the others' hearts."""
        with contextlib.suppress(RuntimeError):  # the store is gone; whoever needs it will say so
            while not self._ended.wait(_PULSE):
                store.add(f"pulse/{self.me[0]}/{self.me[1]}", 1)
                for replica in range(self.replicas):
                    if not store.check([f"life/{replica}"]):
                        continue
                    life, step = json.loads(store.get(f"life/{replica}"))
                    member = (replica, life)
                    pulse = store.add(f"pulse/{replica}/{life}", 0)
                    if pulse and self._heard.get(member, (0, 0.0))[0] != pulse:
                        self._heard[member] = pulse, time.monotonic()
                        self._steps[member] = step
