"""Who takes part: what the replicas' first stages agree on, by write-once ballots in the meeting's store.

All that follows from a ballot is a pure function of what lies in the store, so that nobody leads. Between two changes of who
takes part lies an epoch. A member's ballot is set once: by itself, or, when it has been silent too long, as ABSENT by another.
Whoever finds its own ballot ABSENT has been counted out and comes back as a newcomer, in another life.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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


@dataclass
class _Heard:
    """What is known of another's life: its last beat, when that changed, and the state that it came with."""

    beat: int
    when: float
    state: list[Any]


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
        self._past: set[Member] = set()  # those that have been members
        self._enter(Epoch(0, ()))
        self._heard: dict[Member, _Heard] = {}
        self._looked = -math.inf  # when the listener was round last: who doesn't listen can't call others silent
        self._spent: list[str] = []  # ballots that everybody has read
        self._ended = threading.Event()
        self._listening = threading.Thread(target=self._listen, args=(connect(),), daemon=True)

    def announce(self, step: int, mark: str, about: Mapping[str, Any]) -> None:
        """Ask to take part, with the state of that many steps.

        Args:
            mark: a digest of that state, as far as it must be equal in all members.
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
        self._state = [step, mark]
        self._began = time.monotonic()
        self._listening.start()

    def admitted(self, patience: float) -> Epoch | None:
        """The epoch that has taken this replica in; None if not yet. Where nobody is at work, those who are there begin one.

        Args:
            patience: seconds with nobody at work after which they begin without the others.
        """
        text = self._pointer()
        now = Epoch.of(text) if text else Epoch(0, ())
        if self.me in now.members:
            self._enter(now)
            return now
        if set(now.members) & self._living():
            self._began = time.monotonic()
            return None
        present = sorted(self.present())
        if self.me in present and (len(present) == self.replicas or time.monotonic() - self._began > patience):
            states = {member: self._heard[member].state for member in present}
            furthest = max(step for step, _ in states.values())
            source = next(member for member in present if states[member][0] == furthest)
            newcomers = tuple(member for member in present if states[member] != states[source])
            self._publish(Epoch(now.number + 1, tuple(present), newcomers, source), text)
        return None

    def vote(self, ballot: Mapping[str, Any], patience: float) -> dict[Member, dict[str, Any] | None]:
        """Every member's ballot; None for who is absent: silent, or alive and without a word for `patience` seconds.

        Raises PeerLost if this replica has been counted out, or can't hear the others.
        """
        self._ballots += 1
        keys = {member: self._key(member, self._ballots) for member in self.epoch.members}
        mine = json.dumps(dict(ballot) | {"waiting": sorted(self.present() - self._past)})
        if self.store.compare_set(keys[self.me], "", mine) != mine.encode():
            raise PeerLost(f"replica {self.replica} was silent for too long and has been counted out")
        asked = time.monotonic()
        while (texts := self._read(list(keys.values()))) is None:
            if not self._listening.is_alive():
                raise PeerLost(f"replica {self.replica} hears the others no more")
            for member, key in keys.items():
                heard = self._heard[member].when if member in self._heard else -math.inf
                if self._looked - max(self._entered, heard) > _SILENCE or time.monotonic() - asked > patience:
                    self.store.compare_set(key, "", _ABSENT)
        self._spent.append(self._key(self.me, self._ballots - 1))  # all have put this ballot, so all have read the one before
        return {member: None if text == _ABSENT else json.loads(text) for member, text in zip(keys, texts, strict=True)}

    def next_epoch(self, ballots: Mapping[Member, Mapping[str, Any] | None], agreed: bool, settle: bool) -> Epoch | None:
        """What follows from a vote: None if all stays as it is.

        Args:
            agreed: all are there and well; else the members need a new group in any case.
            settle: this is the step's last vote: those who leave go, and those who wait are let in.
        """
        told = {member: ballot for member, ballot in ballots.items() if ballot is not None}
        staying, waiting = set(told), set()
        if agreed and settle:
            staying = {member for member, ballot in told.items() if not ballot["leaving"]}
            # Whom all members hear, and none knows as a member of earlier: whoever was counted out may still beat.
            waiting = set.intersection(*({(r, life) for r, life in ballot["waiting"]} for ballot in told.values()))
        if agreed and staying == set(self.epoch.members) and not waiting:
            return None
        source = min(staying, default=None)
        newcomers = tuple(sorted(waiting)) if source else ()
        after = Epoch(self.epoch.number + 1, tuple(sorted({*staying, *newcomers})), newcomers, source)
        self._publish(after, str(self.epoch) if self.epoch.number else "")
        self.store.set(f"epoch/{after.number}", str(after))
        self._enter(after)
        return after

    def mark(self, what: str) -> None:
        """Tell the epoch's members that this replica has come so far."""
        self.store.set(f"{what}/{self.epoch.number}/{self.replica}", "")

    def marked(self, what: str, members: Sequence[Member]) -> bool:
        """Whether all of these members of the epoch that live have."""
        living = [m for m in members if m in self._living() or time.monotonic() - self._entered < _SILENCE]
        return all(self.store.check([f"{what}/{self.epoch.number}/{replica}"]) for replica, _ in living)

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
        """The newest lives that have announced themselves and beat, this one among them."""
        living = self._living()
        return {member for member in living if member[1] == max(life for r, life in living if r == member[0])}

    def _enter(self, epoch: Epoch) -> None:
        self.epoch, self._entered, self._ballots = epoch, time.monotonic(), 0
        self._past |= set(epoch.members)  # a life is a member once

    def _key(self, member: Member, ballot: int) -> str:
        return f"ballot/{self.epoch.number}/{ballot}/{member[0]}.{member[1]}"

    def _living(self) -> set[Member]:
        return {member for member, heard in list(self._heard.items()) if self._looked - heard.when <= _SILENCE}

    def _pointer(self) -> str:
        return self.store.get("epoch").decode() if self.store.check(["epoch"]) else ""

    def _publish(self, after: Epoch, before: str) -> None:
        """Compared, since one that was counted out while it slept must not set it back. Raises PeerLost if it was."""
        now = self.store.compare_set("epoch", before, str(after)).decode()
        if now not in (before, str(after)) and self.me in self.epoch.members:
            raise PeerLost(f"replica {self.replica} was silent for too long and has been counted out")

    def _read(self, keys: list[str]) -> list[str] | None:
        """None if one of them isn't there within a pulse."""
        try:
            self.store.wait(keys, timedelta(seconds=_PULSE))
        except DistStoreError:
            return None
        return [text.decode() for text in self.store.multi_get(keys)]

    def _listen(self, store: Store) -> None:
        """Beat, and hear the others' hearts."""
        beat, known = 0, {self.replica}
        with contextlib.suppress(RuntimeError):  # the store is gone; whoever needs it will say so
            while not self._ended.wait(_PULSE):
                beat += 1
                store.set(f"life/{self.replica}", json.dumps([self.me[1], beat, self._state]))
                known |= {replica for replica in range(self.replicas) if replica not in known and store.check([f"life/{replica}"])}
                numbers = sorted(known)
                for replica, text in zip(numbers, store.multi_get([f"life/{replica}" for replica in numbers]), strict=True):
                    life, pulse, state = json.loads(text)
                    heard = self._heard.get((replica, life))
                    if heard is None:  # a first look tells of no beat
                        self._heard[replica, life] = _Heard(pulse, -math.inf, state)
                    elif heard.beat != pulse:
                        heard.beat, heard.when = pulse, time.monotonic()
                self._looked = time.monotonic()
                while self._spent:
                    store.delete_key(self._spent.pop())
