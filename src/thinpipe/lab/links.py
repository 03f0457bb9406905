"""Links as text: `80mbit,25ms`, and what a `Link` holds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from thinpipe.config import ThinpipeError

_EXAMPLE = "write RATE,DELAY as in 80mbit,25ms"
# Units as powers of ten: decimal arithmetic makes text and float agree to the last digit, both ways.
_RATE = {"gbit": 9, "mbit": 6, "kbit": 3, "bit": 0}
_DELAY = {"s": 0, "ms": -3, "us": -6}
_SHARE = {"%": -2}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z%]*)")


def _read(text: str, units: dict[str, int], name: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise ThinpipeError(f"{name} {text!r} is not a number with {' or '.join(unit for unit in units if unit != 'bit')}")
    return float(Decimal(match[1]).scaleb(units[match[2]]))


def _write(value: float, units: dict[str, int]) -> str:
    """In the largest unit that keeps the number at 1 or above."""
    if not math.isfinite(value):
        return str(value)
    exact = Decimal(repr(value))
    unit = next((unit for unit, power in units.items() if exact >= Decimal(1).scaleb(power)), list(units)[-1])
    return f"{exact.scaleb(-units[unit]).normalize():f}{unit}"


def _write_rate(rate: float | None) -> str:
    return "unlimited" if rate is None else _write(rate, _RATE)


@dataclass(frozen=True)
class Link:
    """What joins a host to its neighbours. `str(link)` is the text that `parse_link` reads back to an equal Link.

    Raises ThinpipeError if a value is out of its range.
    """

    up: float | None = None
    """Rate of a host's uplink in bit/s (None: unlimited)."""
    down: float | None = None
    """Rate of a host's downlink in bit/s (None: unlimited)."""
    delay: float = 0.0
    """One way, in seconds; a round trip takes twice as long."""
    loss: float = 0.0
    """Share of the packets that is lost, each way."""
    jitter: float = 0.0
    """Standard deviation of the rate in bit/s: redrawn from N(rate, jitter²) once per second, at least a tenth of the rate."""
    cc: str | None = None
    """TCP congestion control, "bbr" for instance (None: the kernel's default)."""

    def __post_init__(self) -> None:
        for name, rate in (("up", self.up), ("down", self.down)):
            if rate is not None and not 1e3 <= rate <= 1e12:
                raise ThinpipeError(f"link: {name} = {_write_rate(rate)} is out of range; use 1kbit to 1000gbit, or unlimited")
        if not 0 <= self.delay <= 10:
            raise ThinpipeError(f"link: delay = {_write(self.delay, _DELAY)} is out of range; use 0ms to 10s, one way")
        if not 0 <= self.loss < 1:
            raise ThinpipeError(f"link: loss = {self.loss * 100:g}% is out of range; use 0% to below 100%")
        if not 0 <= self.jitter <= 1e12 or (self.jitter and self.up is None and self.down is None):
            raise ThinpipeError(
                f"link: jitter = {_write_rate(self.jitter)} can't be; it is the standard deviation of a limited rate, 16mbit for 80mbit"
            )
        if self.cc is not None and not re.fullmatch(r"[a-z][a-z0-9_]{0,14}", self.cc):
            raise ThinpipeError(f"link: cc = {self.cc!r} names no TCP congestion control; bbr and cubic do")

    def __str__(self) -> str:
        if self == Link():
            return "unlimited"
        rate = [_write_rate(self.up)] if self.up == self.down else [f"up={_write_rate(self.up)}", f"down={_write_rate(self.down)}"]
        more = [f"loss={_write(self.loss, _SHARE)}"] * (self.loss > 0) + [f"jitter={_write_rate(self.jitter)}"] * (self.jitter > 0)
        return ",".join([*rate, _write(self.delay, _DELAY), *more, *([f"cc={self.cc}"] if self.cc else [])])


def parse_link(text: str, where: str = "--link") -> Link:
    """The Link of `RATE,DELAY[,loss=1%,jitter=16mbit,up=…,down=…,cc=bbr]`; `unlimited` is one too.

    RATE is a number with kbit, mbit or gbit and stands for both directions of a host (or give up= and down=),
    DELAY one with us, ms or s. Raises ThinpipeError that names `where`, the part and what would do.
    """
    found: dict[str, str] = {}
    for part in text.lower().split(","):
        if not part.strip():
            raise ThinpipeError(f"{where} {text!r} has an empty part; {_EXAMPLE}")
        key, equals, value = part.strip().partition("=")
        if not equals:  # the delay is told by its unit, so that it may stand first, and by its place, so that a wrong unit is named
            match = _QUANTITY.fullmatch(key)
            key, value = "delay" if "rate" in found or (match and match[2] in _DELAY) else "rate", key
        if key not in ("rate", "delay", "up", "down", "loss", "jitter", "cc"):
            raise ThinpipeError(f"{where} {text!r}: {key}= is unknown; {_EXAMPLE}, then loss=, jitter=, up=, down= or cc=")
        if key in found:
            raise ThinpipeError(f"{where} {text!r}: {key} is given twice; {_EXAMPLE}")
        found[key] = value
    if "rate" not in found and not {"up", "down"} <= found.keys():
        raise ThinpipeError(f"{where} {text!r} has no rate; {_EXAMPLE}")
    if "delay" not in found and found != {"rate": "unlimited"}:
        raise ThinpipeError(f"{where} {text!r} has no delay; {_EXAMPLE} (one way)")

    def rate(name: str) -> float | None:
        given = found.get(name, found.get("rate", ""))
        return None if given == "unlimited" else _read(given, _RATE, name if name in found else "rate")

    try:
        return Link(
            up=rate("up"),
            down=rate("down"),
            delay=_read(found.get("delay", "0s"), _DELAY, "delay"),
            loss=_read(found.get("loss", "0%"), _SHARE, "loss"),
            jitter=_read(found.get("jitter", "0bit"), _RATE, "jitter"),
            cc=found.get("cc"),
        )
    except ThinpipeError as error:
        raise ThinpipeError(f"{where} {text!r}: {error}") from None


def parse_links(text: str, boundaries: int, where: str = "--link") -> tuple[Link, ...]:
    """A Link for each boundary: one for all, or as many as boundaries, joined by `/`.

    Raises ThinpipeError that names `where` if the count or a link is wrong.
    """
    links = tuple(parse_link(part, where) for part in text.split("/"))
    if len(links) == 1:
        return links * boundaries
    if len(links) != boundaries:
        raise ThinpipeError(f"{where} has {len(links)} links for {boundaries} boundaries; give one for all, or {boundaries} joined by '/'")
    return links
