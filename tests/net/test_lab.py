"""The lab: what links mean, what the emulated network does, and that nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.config import ThinpipeError
from thinpipe.lab import Lab, Link, clean, lab, leftovers, parse_link, parse_links, unavailable
from thinpipe.lab.emulator import Netem, Queue
from thinpipe.lab.measure import _connected, _ping
from thinpipe.lab.namespaces import emulators, inside, lab_name, names, owned_by_the_dead, processes_in, start_time
from thinpipe.lab.network import _packet_bytes
from thinpipe.lab.paths import Hop, build_hops, route

_REASON = unavailable()
requires_net = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
PREFIX = "thinpipetest"
FAST = Link(up=80e6, down=80e6, delay=0.025)


# Links


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("80mbit,25ms", Link(up=80e6, down=80e6, delay=0.025)),
        ("1.5gbit,500us", Link(up=1.5e9, down=1.5e9, delay=0.0005)),
        ("25ms, 80Mbit", Link(up=80e6, down=80e6, delay=0.025)),
        ("up=20mbit,down=100mbit,1s", Link(up=20e6, down=100e6, delay=1.0)),
        ("100mbit,10ms,up=500kbit", Link(up=500e3, down=100e6, delay=0.01)),
        ("80mbit,25ms,loss=0.5%,jitter=16mbit,cc=bbr", Link(up=80e6, down=80e6, delay=0.025, loss=0.005, jitter=16e6, cc="bbr")),
        ("unlimited", Link()),
        ("unlimited,10ms", Link(delay=0.01)),
    ],
)
def test_parse_link(text: str, link: Link) -> None:
    assert parse_link(text) == link


rates = st.none() | st.floats(1e3, 1e12) | st.integers(1000, 10**9).map(float)


@given(rates, rates, st.floats(0, 10), st.floats(0, 1, exclude_max=True), st.floats(0, 1e12), st.sampled_from([None, "bbr", "cubic"]))
def test_link_round_trip(up: float | None, down: float | None, delay: float, loss: float, jitter: float, cc: str | None) -> None:
    link = Link(up=up, down=down, delay=delay, loss=loss, jitter=jitter if up or down else 0.0, cc=cc)
    assert parse_link(str(link)) == link


@pytest.mark.parametrize(("text", "again"), [("80mbit,25ms", None), ("unlimited", None), ("0.08gbit,0.025s", "80mbit,25ms")])
def test_link_is_written_as_one_would(text: str, again: str | None) -> None:
    assert str(parse_link(text)) == (again or text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty part"),
        ("80mbit", "no delay"),
        ("25ms", "no rate"),
        ("up=80mbit,25ms", "no rate"),
        ("80,25ms", "'80' is not a number with gbit or mbit or kbit"),
        ("80mbit,25", "'25' is not a number with s or ms or us"),
        ("-80mbit,25ms", "'-80mbit' is not a number"),
        ("nanmbit,25ms", "not a number"),
        ("80mbit,25ms,90ms", "delay is given twice"),
        ("80mbit,25ms,speed=3", "speed= is unknown"),
        ("80mbit,,25ms", "empty part"),
        ("0mbit,25ms", "up = 0bit is out of range"),
        ("80mbit,11s", "delay = 11s is out of range"),
        ("80mbit,25ms,loss=100%", "loss = 100% is out of range"),
        ("80mbit,25ms,loss=0.1", "loss '0.1' is not a number with %"),
        ("unlimited,25ms,jitter=1mbit", "jitter = 1mbit can't be"),
        ("80mbit,25ms,cc=b/r", "names no TCP congestion control"),
    ],
)
def test_malformed_link(text: str, says: str) -> None:
    with pytest.raises(ThinpipeError) as error:
        parse_link(text)
    assert str(error.value).startswith(f"--link {text!r}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_parse_links() -> None:
    slow, fast = parse_link("20mbit,10ms"), parse_link("80mbit,25ms")
    assert parse_links("20mbit,10ms", 3) == (slow,) * 3
    assert parse_links("20mbit,10ms/80mbit,25ms", 2) == (slow, fast)
    with pytest.raises(ThinpipeError, match=r"^--link has 2 links for 3 boundaries; give one for all, or 3"):
        parse_links("20mbit,10ms/80mbit,25ms", 3)
    with pytest.raises(ThinpipeError, match=r"^plan\.link '20' has no delay"):
        parse_links("80mbit,25ms/20", 2, where="plan.link")


# Paths and clocks


def test_star_shares_uplink_and_downlink() -> None:
    hops = build_hops([Link(up=1e6, down=2e6, delay=0.1)] * 2, star=True)
    path = [hops[i] for i in route(0, 2, hosts=3, star=True)]
    assert [(hop.rate, hop.delay) for hop in path] == [(1e6, 0.1), (2e6, 0.0)]
    assert route(0, 1, 3, True)[0] == route(0, 2, 3, True)[0]
    assert route(0, 2, 3, True)[-1] == route(1, 2, 3, True)[-1]


def test_chain_crosses_every_boundary_between() -> None:
    hops = build_hops([Link(up=4e6, down=3e6, delay=0.1), Link(up=9e6, down=9e6, delay=0.2)], star=False)
    for ends in ((0, 2), (2, 0)):
        path = [hops[i] for i in route(*ends, hosts=3, star=False)]
        assert min(hop.rate for hop in path if hop.rate) == 3e6
        assert sum(hop.delay for hop in path) == pytest.approx(0.3)
    assert not set(route(0, 2, 3, False)) & set(route(2, 0, 3, False))


def test_queue_spaces_packets_by_rate_and_drops_beyond_its_limit() -> None:
    queue = Queue(Hop(rate=12e6, delay=0.05, queue=0.1), "key", 0.0)
    left = [queue.leave(12_000, arrival=5.0, earlier=0.0) for _ in range(200)]
    passed = [leaves for leaves, _ in filter(None, left)]
    assert passed == pytest.approx([5.051 + 0.001 * i for i in range(len(passed))])
    assert len(passed) in (100, 101)  # 1 ms each, none waits above 100 ms


def test_equal_rates_in_a_row_delay_a_packet_once() -> None:
    first, second = (Queue(Hop(rate=8e6), "key", 0.0) for _ in range(2))
    left = first.leave(8000, 1.0, 0.0)
    assert left == pytest.approx((1.001, 0.001))
    assert second.leave(8000, *left) == pytest.approx((1.001, 0.001))
    slower = Queue(Hop(rate=4e6), "key", 0.0)
    assert slower.leave(8000, *left) == pytest.approx((1.002, 0.002))


def test_loss_and_jitter_follow_the_seed() -> None:
    def losses(key: str) -> list[bool]:
        queue = Queue(Hop(loss=0.1), key, 0.0)
        return [queue.leave(8000, float(i), 0.0) is None for i in range(1000)]

    assert losses("1/0") == losses("1/0") != losses("2/0")
    assert 50 < sum(losses("1/0")) < 150
    hop = Hop(rate=80e6, jitter=16e6)
    drawn = [hop.rate_in(second, "1/0") for second in range(500)]
    assert drawn == [hop.rate_in(second, "1/0") for second in range(500)]
    assert sum(drawn) / 500 == pytest.approx(80e6, rel=0.05)
    assert min(Hop(rate=80e6, jitter=400e6).rate_in(second, "") for second in range(100)) == 8e6


def test_packets_grow_with_the_rate() -> None:
    assert [_packet_bytes(rate, lossy=False) for rate in (1e6, 80e6, 300e6, 1e9, None)] == [1500, 10_000, 37_500, 65_000, 65_000]
    assert [_packet_bytes(rate, lossy=True) for rate in (80e6, 300e6)] == [1500, 3750]


def test_owner_is_known_by_start_time_too() -> None:
    alive = lab_name(PREFIX, 0)
    assert not owned_by_the_dead(f"{alive}-h0", PREFIX)
    prefix, pid, start, count = alive.split("-")
    assert owned_by_the_dead(f"{prefix}-{pid}-{int(start) + 1}-{count}-h0", PREFIX)  # the id went to another process
    assert not owned_by_the_dead("somebody-1-1-1-h0", PREFIX)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"links": [FAST] * 2, "hosts": 2}, "2 links for 2 hosts"),
        ({"links": FAST, "hosts": 0}, "hosts = 0"),
        ({"links": FAST, "hosts": 2, "prefix": "../x"}, "prefix"),
    ],
)
def test_lab_refuses(arguments: dict, says: str) -> None:
    with pytest.raises(ThinpipeError, match=says), lab(**arguments):
        pass


# The network


@pytest.fixture(params=["tun", "netem"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., object]]:
    """`lab` on each backend that this machine has."""
    try:
        with lab(FAST, 1, prefix=PREFIX, backend=request.param):
            pass
    except ThinpipeError as error:
        pytest.skip(str(error))
    yield lambda links, hosts: lab(links, hosts, prefix=PREFIX, backend=request.param)
    assert nothing_left()


def round_trip(net: Lab, source: int, target: int) -> float:
    with _connected(net.hosts[source], net.hosts[target], patience=10) as ends:
        return _ping(*ends)


def nothing_left(*processes: int, seconds: float = 15) -> bool:
    """Whether namespaces, emulators and leftovers of our prefix, and these processes, are gone, or go within some seconds."""
    deadline = time.monotonic() + seconds
    while names(PREFIX) or emulators(PREFIX) or leftovers(PREFIX) or any(start_time(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@requires_net
def test_link_has_its_rate_and_delay(start: Callable) -> None:
    achieved = []
    for link in (Link(up=10e6, down=10e6, delay=0.01), Link(up=80e6, down=80e6, delay=0.025)):
        with start(link, 2) as net:
            [measured] = net.measure()
            assert 0 <= net.emulator_cpu() < 2
        assert 2e3 * link.delay <= measured.round_trip < 1000
        achieved.append(measured.rate)
    assert 1 < achieved[0] < 15  # nothing timed is asserted closely: benchmarks/lab_links.py has the figures
    assert achieved[0] < achieved[1] < 120
    with start(Link(up=1e5, down=1e5, delay=0.025), 2) as net:  # a packet takes as long as a tenth of the measurement
        assert 0.06 < net.measure()[0].rate < 0.14


@requires_net
def test_chain_adds_delays_and_set_link_changes_one(start: Callable) -> None:
    links = parse_links("80mbit,10ms/40mbit,20ms", 2)
    with start(links, 3) as net:
        assert round_trip(net, 2, 0) >= 0.06
        net.set_link(Link(up=40e6, down=40e6, delay=0.04), boundary=1)
        assert round_trip(net, 0, 2) >= 0.1
        with pytest.raises(ThinpipeError, match="boundary = 2"):
            net.set_link(FAST, boundary=2)


@requires_net
def test_cut_host_loses_all_packets_and_comes_back(start: Callable) -> None:
    with start(Link(up=80e6, down=80e6, delay=0.001), 3) as net:
        ends = []
        for host in net.hosts:
            with inside(host.name):
                end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            end.bind((host.address, 5000))
            end.settimeout(0.3)
            ends.append(end)

        def passes(source: int, target: int) -> bool:
            ends[source].sendto(b"?", (net.hosts[target].address, 5000))
            try:
                return ends[target].recv(10) == b"?"
            except TimeoutError:
                return False

        assert passes(0, 1)
        assert passes(1, 2)
        net.cut(1)
        assert not passes(0, 1)
        assert not passes(1, 2)
        assert passes(0, 2)
        net.restore(1)
        assert passes(0, 1)
        assert passes(1, 2)
        for end in ends:
            end.close()


@requires_net
def test_command_runs_on_its_host(start: Callable) -> None:
    with start(FAST, 2) as net:
        shown = subprocess.run([*net.hosts[1].command_prefix, "ip", "-br", "address"], capture_output=True, text=True, timeout=20).stdout
        assert f"{net.hosts[1].address}/24" in shown
        assert "127.0.0.1" in shown
        assert "wan0" in shown


@requires_net
def test_congestion_control_is_set_or_named(start: Callable) -> None:
    with start(Link(up=80e6, down=80e6, delay=0.01, cc="reno"), 2) as net:
        routes = subprocess.run(["ip", "-n", net.hosts[0].name, "route"], capture_output=True, text=True, timeout=20).stdout
        assert "congctl reno" in routes
    with pytest.raises(ThinpipeError, match=r"cc=nosuch is not in this kernel, which has .*reno"), start(Link(cc="nosuch"), 2):
        pass


_GLOO = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
rank, address = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://{address}:29500", rank=rank, world_size=2, timeout=timedelta(seconds=30))
x = torch.full((250_000,), float(rank))
dist.barrier()
began = time.monotonic()
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
print(float(x.sum()), time.monotonic() - began)
dist.destroy_process_group()
"""


@requires_net
def test_gloo_crosses_the_lab() -> None:
    with lab(FAST, 2, prefix=PREFIX) as net:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "wan0", "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [*host.command_prefix, sys.executable, "-c", _GLOO, str(rank), net.hosts[0].address],
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank, host in enumerate(net.hosts)
        ]
        said = [process.communicate(timeout=60)[0] for process in ranks]
    total, seconds = map(float, said[1].split())
    assert total == 0
    assert seconds >= 0.1  # 1 MB at 80 Mbit/s


# Nothing is left


@requires_net
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_when_the_block_ends(error: type[BaseException] | None) -> None:
    def use() -> None:
        with lab(FAST, 2, prefix=PREFIX) as net:
            begin = net.hosts[0].command_prefix
            running.append(subprocess.Popen([*begin, "sh", "-c", "trap '' TERM; sleep 100 & wait; sleep 100"]))
            running.append(subprocess.Popen([*begin, "sleep", "100"]))
            while len(processes_in([net.hosts[0].name])) < 3:
                time.sleep(0.02)
            if error:
                raise error

    running: list[subprocess.Popen[bytes]] = []
    if error:
        with pytest.raises(error):
            use()
    else:
        use()
    assert nothing_left(seconds=0)
    assert [process.wait(1) for process in running] == [-signal.SIGKILL, -signal.SIGTERM]


_HOLDER = f"""
import subprocess, sys, time
from thinpipe.lab import Link, lab
with lab(Link(up=80e6, down=80e6, delay=0.01), 3, prefix={PREFIX!r}) as net:
    inside = subprocess.Popen([*net.hosts[1].command_prefix, "sleep", "100"])
    print(net._emulator.pid, inside.pid, flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen, int, int]]:
    """A process that holds a lab, its emulator's id, and that of a process inside the lab."""
    # A shell's job in the background has SIGINT ignored, and what it starts has too.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=heard
    )
    assert process.stdout
    emulator, child = map(int, process.stdout.readline().split())
    yield process, emulator, child
    process.kill()
    process.wait(10)
    clean(PREFIX)
    process.stdout.close()


@requires_net
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_killed(holder: tuple, number: signal.Signals) -> None:
    process, emulator, child = holder
    process.send_signal(number)
    assert nothing_left(process.pid, emulator, child)


@requires_net
def test_next_lab_cleans_up_when_the_emulator_is_killed_too(holder: tuple) -> None:
    process, emulator, child = holder
    with lab(FAST, 2, prefix=PREFIX) as other:
        os.kill(process.pid, signal.SIGSTOP)  # so that it sees nothing of what comes
        os.kill(emulator, signal.SIGKILL)
        assert leftovers(PREFIX) == []  # stopped is not dead
        process.kill()
        process.wait(10)
        found = leftovers(PREFIX)
        assert len([line for line in found if line.startswith("namespace")]) >= 3  # netem has routers too
        assert any(f"process {child} in" in line for line in found)
        with lab(FAST, 2, prefix=PREFIX):
            assert leftovers(PREFIX) == []
            assert start_time(child) is None
        other.emulator_cpu()  # a living lab is left alone


def test_emulator_starts_without_torch() -> None:
    code = "import sys, thinpipe.lab.emulator; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@requires_net
def test_dead_emulator_is_an_error(start: Callable) -> None:
    with start(FAST, 2) as net:
        assert isinstance(net, Lab)
        net._emulator.kill()
        net._emulator.wait(10)
        with pytest.raises(ThinpipeError, match="emulator"):
            net.emulator_cpu()


_ROOTLESS = """
import os
from thinpipe.lab import Link, lab, leftovers
with lab(Link(up=80e6, down=80e6, delay=0.01), 2) as net:
    assert net.measure()[0].round_trip >= 20
assert os.listdir("/var/run/netns") == []
"""


@requires_net
@pytest.mark.skipif(subprocess.run(["unshare", "-rmn", "true"], capture_output=True).returncode != 0, reason="no user namespaces here")
def test_lab_in_a_user_namespace() -> None:
    done = subprocess.run(["unshare", "-rmn", sys.executable, "-c", _ROOTLESS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_second_that_passes_meanwhile_is_no_wait_of_less_than_nothing() -> None:
    """Redrawing many rates takes time; select takes no negative timeout."""
    late = Netem([], [], 0)
    late.hops, late.began = [Hop(rate=1e6, delay=0.01, jitter=1e5)], time.monotonic() - 3
    assert late.wait() == 0
