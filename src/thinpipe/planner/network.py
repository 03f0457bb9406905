"""Messages over shared links, in simulated time.

Hops and routes are the lab's (lab/paths.py): with one link for all, a host's uplink and its downlink are shared by all its
boundaries; with different links, each boundary and direction is a hop of its own. Between two hosts there is one TCP
connection, as in Gloo, on which messages pass one after the other; the connections that send over a hop at the same time
get equal shares of its rate, and a message goes at the smallest share on its route. Measured over the lab, this is nearer
than a hop that serves whole messages in turn (docs/planner.md).

Gloo is rendezvous: a message waits until the sender has heard of its receive. That news takes the delay, and its turn
behind what the receiver is sending on the same connection, but no share of the rate.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from ..lab import Link
from ..lab.paths import build_hops, is_star, route

Process = Iterator["float | Event"]
"""A generator that yields seconds to sleep, or an event to wait for."""


class Event:
    """A moment that processes wait for."""

    __slots__ = ("happened", "time", "waiting")

    def __init__(self) -> None:
        self.happened, self.time = False, 0.0
        self.waiting: list[Process] = []


class Clock:
    """Simulated time and what is due in it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()  # of two things due at once the one that was asked for first comes first

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._number), call))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()

    def resume(self, process: Process) -> None:
        """Run a process up to its next wait."""
        for wanted in process:
            if isinstance(wanted, Event):
                if not wanted.happened:
                    wanted.waiting.append(process)
                    return
            elif wanted > 0:
                self.at(self.now + wanted, lambda: self.resume(process))
                return

    def happen(self, event: Event) -> None:
        event.happened, event.time = True, self.now
        for process in event.waiting:
            self.resume(process)


class Cores:
    """Cores that stages of one thread share: when more of them compute at once than there are cores, all get equal shares."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count
        self._left: dict[Event, float] = {}  # core-seconds of what is under way, at the time `since`
        self._since, self._version = 0.0, 0

    def compute(self, seconds: float) -> Event:
        """Begin work of so many core-seconds; the event is its end."""
        self._advance()
        done = Event()
        self._left[done] = seconds
        self._plan()
        return done

    def _advance(self) -> None:
        worked = (self.clock.now - self._since) * self._rate()
        self._left = {event: left - worked for event, left in self._left.items()}
        self._since = self.clock.now

    def _rate(self) -> float:
        return min(1.0, self.count / len(self._left)) if self._left else 1.0

    def _plan(self) -> None:
        self._version += 1
        if self._left:
            version, soonest = self._version, max(0.0, min(self._left.values()))
            self.clock.at(self.clock.now + soonest / self._rate(), lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:  # the shares have changed since
            return
        self._advance()
        # It is the time of the one that had the least: late in a long step rounding leaves more than nothing of it.
        least = min(self._left.values()) + 1e-12
        ended = [event for event, left in self._left.items() if left <= least]
        for event in ended:
            del self._left[event]
        self._plan()
        for event in ended:
            self.clock.happen(event)


class Message:
    """A payload from one host to another; `left` when the sender is rid of it, `arrived` when the receiver has it."""

    __slots__ = ("arrived", "issued", "left", "rate", "remaining", "since", "source", "start", "target", "version", "wanted")

    def __init__(self, source: int, target: int, size: int) -> None:
        self.source, self.target = source, target
        self.remaining = 8.0 * size  # bits, at the time `since`
        self.rate = self.since = self.start = 0.0
        self.version = 0  # of the rate: a finish that was planned at an older one is void
        self.issued = self.wanted = False
        self.left, self.arrived = Event(), Event()


class Network:
    """Carries messages between `len(links) + 1` hosts in a row."""

    def __init__(self, clock: Clock, links: Sequence[Link]) -> None:
        self.clock = clock
        hosts, star = len(links) + 1, is_star(links)
        hops = build_hops(links, star)
        self.rates = {number: hop.rate for number, hop in enumerate(hops) if hop.rate is not None}
        self.delays: dict[tuple[int, int], float] = {}
        self._routes: dict[tuple[int, int], list[int]] = {}
        last = hosts - 1
        for pair in [(i, j) for i in range(hosts) for j in range(hosts) if abs(i - j) == 1 or {i, j} == {0, last} != {i}]:
            passed = route(*pair, hosts, star)
            self.delays[pair] = sum(hops[number].delay for number in passed)
            self._routes[pair] = [number for number in passed if number in self.rates]
        self._sending: dict[tuple[int, int], Message] = {}
        self._queues: dict[tuple[int, int], deque[Message | Callable[[], None]]] = defaultdict(deque)
        # On each limited hop, in order, so that runs repeat bit for bit.
        self._sharing: dict[int, dict[Message, None]] = {number: {} for number in self.rates}

    def post(self, message: Message) -> None:
        """The receiver asks for the message."""

        def heard() -> None:
            message.wanted = True
            self._begin(message)

        back = (message.target, message.source)
        self._enqueue(back, lambda: self.clock.at(self.clock.now + self.delays[back], heard))

    def issue(self, message: Message) -> None:
        """The sender has it ready."""
        message.issued = True
        self._begin(message)

    def _begin(self, message: Message) -> None:
        if message.issued and message.wanted:
            self._enqueue((message.source, message.target), message)

    def _enqueue(self, connection: tuple[int, int], item: Message | Callable[[], None]) -> None:
        self._queues[connection].append(item)
        if connection not in self._sending:
            self._next(connection)

    def _next(self, connection: tuple[int, int]) -> None:
        queue = self._queues[connection]
        while queue:
            item = queue.popleft()
            if isinstance(item, Message):
                self._sending[connection] = item
                item.start = item.since = self.clock.now
                self._share(item, joins=True)
                return
            item()

    def _share(self, message: Message, joins: bool) -> None:
        """A message joins or leaves its hops: all on them get new shares."""
        route = self._routes[message.source, message.target]
        for hop in route:
            if joins:
                self._sharing[hop][message] = None
            else:
                del self._sharing[hop][message]
        changed = dict.fromkeys([message] if joins else [])
        for hop in route:
            changed |= self._sharing[hop]
        for other in changed:
            self._set_rate(other)

    def _set_rate(self, message: Message) -> None:
        route = self._routes[message.source, message.target]
        rate = min((self.rates[hop] / len(self._sharing[hop]) for hop in route), default=float("inf"))
        if rate == message.rate:
            return
        now = self.clock.now
        message.remaining = max(0.0, message.remaining - (now - message.since) * message.rate)
        message.rate, message.since = rate, now
        message.version += 1
        version = message.version
        self.clock.at(now + message.remaining / rate, lambda: self._finish(message, version))

    def _finish(self, message: Message, version: int) -> None:
        if version != message.version:
            return
        connection = (message.source, message.target)
        del self._sending[connection]
        self._share(message, joins=False)
        self.clock.at(self.clock.now + self.delays[connection], lambda: self.clock.happen(message.arrived))
        self._next(connection)
        self.clock.happen(message.left)
