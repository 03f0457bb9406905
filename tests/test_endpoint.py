"""Prometheus text: as its own parser reads it, over HTTP, and back in `thinpipe status`."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import tiny
from prometheus_client.parser import text_string_to_metric_families

from thinpipe import status as status_module
from thinpipe.cli import main
from thinpipe.config import ThinpipeError, from_dict
from thinpipe.endpoint import PATH, Endpoint, expose, read
from thinpipe.status import describe, status

TOLD: dict[str, Any] = {
    "run": 'runs/"a"\\n\nb',
    "method": "subspace",
    "stages": 4,
    "replicas": 2,
    "step": 20,
    "steps": 560,
    "tokens": 40_960,
    "loss": 3.25,
    "val_loss": 1e-7,
    "seconds_per_step": 0.125,
    "tokens_per_s": 16_384.0,
    "link_mbit": 2.5,
    "total_bytes_forward": 2**40,
    "total_bytes_backward": 12,
    "restarts": 1,
    "refused_steps": 2,
    "checkpoint": 18,
    "heard": 1e9,
    "silent_s": 1.0,
    "finished": False,
    "complaints": ["disk full"],
}


@contextlib.contextmanager
def served(text: str) -> Iterator[str]:
    endpoint = Endpoint("127.0.0.1:0", lambda: text)
    yield f"127.0.0.1:{endpoint.port}"
    endpoint.close()


def get(address: str, path: str = PATH) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path)
    return connection.getresponse()


def test_prometheus_reads_it() -> None:
    families = {family.name: family for family in text_string_to_metric_families(expose(TOLD))}
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families.values())
    assert {name for name, family in families.items() if family.type == "counter"} == {"thinpipe_wire_bytes", "thinpipe_restarts"}
    samples = {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}
    assert samples["thinpipe_wire_bytes_total", "forward"] == 2**40 and samples["thinpipe_wire_bytes_total", "backward"] == 12
    assert samples["thinpipe_link_bytes_per_second",] == 2.5e6 / 8
    assert samples["thinpipe_run_info", 'runs/"a"\\n\nb', "subspace"] == 1
    plain = {"step": "step", "steps": "steps", "val_loss": "val_loss", "step_seconds": "seconds_per_step", "checkpoint_step": "checkpoint"}
    assert all(samples[f"thinpipe_{name}",] == TOLD[key] for name, key in plain.items())
    assert len(samples) == 1 + len(TOLD) - len({"run", "method", "silent_s", "finished", "complaints"})


def test_it_reads_back() -> None:
    told = read(expose(TOLD))
    known = TOLD.keys() - {"silent_s", "complaints"}
    assert told.keys() == TOLD.keys() and {key: told[key] for key in known} == {key: TOLD[key] for key in known}
    assert told["silent_s"] > 1e8 and told["complaints"] is None
    young = TOLD | dict.fromkeys(("loss", "val_loss", "seconds_per_step", "tokens_per_s", "link_mbit", "checkpoint"))
    assert "thinpipe_loss" not in expose(young) and read(expose(young))["loss"] is None
    assert describe(read(expose(young)))["checkpoint"] == "none yet"
    for text in ("", expose(TOLD).replace("thinpipe_step 20", ""), expose(TOLD).replace(" 20\n", " x\n"), "thinpipe_step 20\n"):
        with pytest.raises((LookupError, ValueError)):
            read(text)


def test_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    with served(expose(TOLD)) as address:
        answer = get(address)
        assert answer.status == 200 and answer.getheader("Content-Type", "").startswith("text/plain; version=0.0.4")
        assert answer.read().decode() == expose(TOLD)
        assert get(address, "/").status == 404
        assert status(address)["step"] == 20
        with pytest.raises(SystemExit) as stop:
            main(["status", address, "--json"])
        assert stop.value.code == 0 and json.loads(capsys.readouterr().out.splitlines()[-1]).keys() == TOLD.keys()


def test_a_mistake_in_the_text_is_the_readers_matter_and_the_end_waits_for_nobody() -> None:
    endpoint = Endpoint("[::1]:0" if socket.has_ipv6 else "127.0.0.1:0", lambda: str(math.sqrt(-1)))
    address = f"[::1]:{endpoint.port}" if socket.has_ipv6 else f"127.0.0.1:{endpoint.port}"
    assert get(address).status == 503
    with pytest.raises(ThinpipeError, match="is no thinpipe run's"):
        status(address)
    with socket.create_connection(("::1" if socket.has_ipv6 else "127.0.0.1", endpoint.port)):  # says nothing, and stays
        endpoint.close()
    again = Endpoint(address, lambda: "")  # the same port, at once
    with pytest.raises(OSError, match="in use"):
        Endpoint(address, lambda: "")
    again.close()


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.0 200 OK\r\n\r\nup 1\n", b"", None])
def test_other_things_on_that_port(answer: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status_module, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())

        def serve() -> None:
            with server.accept()[0] as client:
                if answer is None:
                    client.recv(1 << 16)
                    client.recv(1)  # until the other side has lost its patience
                else:
                    client.recv(1 << 16)
                    client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(SystemExit) as stop:
            main(["status", address])
        thread.join()
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.startswith(f"thinpipe: {address} ") and told.count("\n") == 1
    assert ("no thinpipe run's" in told) == bool(answer)


@pytest.mark.parametrize("where", ["127.0.0.1:1", "no.such.host.invalid:9400", "a..b:9400", "127.0.0.1:99999"])
def test_nobody_there(where: str) -> None:
    with pytest.raises(ThinpipeError, match=rf"{where} can't be reached \(.+\); is the run training there"):
        status(where)


@pytest.mark.parametrize("address", ["127.0.0.1:9400", "10.77.0.1:1", "100.64.0.7:65535", "[::1]:9400", "[fd00::1]:9400"])
def test_addresses_that_will_do(address: str) -> None:
    assert from_dict(tiny(run={"prometheus": address})).check().run.prometheus == address


@pytest.mark.parametrize("address", ["0.0.0.0:9400", "[::]:9400", "8.8.8.8:9400", "[2001:4860:4860::8888]:9400", "[::ffff:8.8.8.8]:9400"])
def test_addresses_that_strangers_reach(address: str) -> None:
    with pytest.raises(ThinpipeError, match="would tell strangers"):
        from_dict(tiny(run={"prometheus": address})).check()


@pytest.mark.parametrize(
    "address", ["9400", ":9400", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "localhost:9400", "::1:9400", "[::1]", ""]
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ThinpipeError, match=r"is not IP:PORT; write it as in 127\.0\.0\.1:9400"):
        from_dict(tiny(run={"prometheus": address})).check()
