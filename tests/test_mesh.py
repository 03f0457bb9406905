"""The mesh's list and what is made of it: addresses, peers, rules, permissions; no secret leaves its file."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe import cli, mesh
from thinpipe.config import NetworkConfig, ThinpipeError
from thinpipe.meeting import meeting
from thinpipe.mesh.machine import refuse_lockout

requires_wg = pytest.mark.skipif(shutil.which("wg") is None, reason="needs wg; apt-get install wireguard-tools")


def key(number: int) -> str:
    return base64.b64encode(bytes([number]) * 32).decode()


def three() -> mesh.Mesh:
    made = mesh.Mesh()
    for number, (name, endpoint) in enumerate([("a", "a.example.org"), ("b", "[2001:db8::2]:7000"), ("c", "")]):
        made = mesh.add(made, name, key(number), endpoint)
    return made


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["mesh", *argv])
    return int(stop.value.code or 0)


def peers(text: str) -> list[dict[str, str]]:
    """The sections of a WireGuard configuration."""
    return [dict(line.split(" = ", 1) for line in part.splitlines() if " = " in line) for part in text.split("\n\n")]


def test_a_machine_lets_in_the_others_each_at_its_own_address() -> None:
    made = three()
    assert [machine.address for machine in made.machines] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    interface, *others = peers(mesh.wireguard(made, made.machines[0], "SECRET"))
    assert interface == {"PrivateKey": "SECRET", "ListenPort": "51820"}
    assert others == [
        {"PublicKey": key(1), "AllowedIPs": "10.77.0.2/32", "PersistentKeepalive": "25", "Endpoint": "[2001:db8::2]:7000"},
        {"PublicKey": key(2), "AllowedIPs": "10.77.0.3/32", "PersistentKeepalive": "25"},
    ]
    assert "Endpoint = a.example.org:51820\n" in mesh.wireguard(made, made.machines[2], "SECRET")


def test_who_is_revoked_is_nobodys_peer_and_its_address_is_free() -> None:
    left = mesh.revoke(three(), "b")
    for here in left.machines:
        assert key(1) not in mesh.wireguard(left, here, "SECRET") and "10.77.0.2/" not in mesh.wireguard(left, here, "SECRET")
    assert mesh.add(left, "d", key(9), "d.example.org").machines[-1].address == "10.77.0.2"


def test_the_firewall_shuts_what_the_list_does_not_open() -> None:
    rules = mesh.firewall(dataclasses.replace(three(), port=7777, open=(22, 2222)))
    chains = {part.split(" ", 1)[0]: part.split("\n    }")[0] for part in rules.split("    chain ")[1:]}
    assert "policy drop" in chains["input"]
    accepted = re.findall(r"^ *(.*) accept$", chains["input"], re.M)
    assert [rule for rule in accepted if "dport" in rule] == [
        "ip6 saddr fe80::/10 udp dport 546",
        "udp dport 7777",
        "tcp dport { 22, 2222 }",
    ]
    # Before answers are let in: whoever forges one must not reach an address inside either.
    assert chains["input"].index("ip daddr 10.77.0.0/24 drop") < chains["input"].index("established")
    assert "tcp dport" not in mesh.firewall(dataclasses.replace(three(), open=()))


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.-]{0,20}", fullmatch=True)


@settings(max_examples=25)
@given(
    st.lists(names, unique=True, max_size=8), st.integers(1, 65535), st.integers(1280, 9000), st.lists(st.integers(1, 65535), max_size=3)
)
def test_a_list_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, called: list[str], port: int, mtu: int, shut: list[int]
) -> None:
    made = mesh.Mesh(port=port, mtu=mtu, open=tuple(shut))
    for number, name in enumerate(called):
        made = mesh.add(made, name, key(number), f"{number}.example.org:{port}")
    path = tmp_path_factory.mktemp("mesh") / "mesh.toml"
    mesh.save(made, path)
    assert mesh.load(path) == made


def test_a_list_is_kept_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mesh.toml"
    for number, name in enumerate("abc"):
        assert run("add", str(path), name, key(number), f"{name}.example.org", "--json") == 0
        assert json.loads(capsys.readouterr().out)["address"] == f"10.77.0.{number + 1}"
    assert run("revoke", str(path), "b") == 0 and "b is off" in capsys.readouterr().err
    assert [machine.name for machine in mesh.load(path).machines] == ["a", "c"]
    assert run("show", str(path), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [machine["name"] for machine in shown["machines"]] == ["a", "c"] and shown["up"] is False
    assert os.listdir(tmp_path) == ["mesh.toml"]


MACHINE = f'[machines.a]\naddress = "10.77.0.1"\nkey = "{key(1)}"\nendpoint = "a.example.org"\n'
BAD = {
    "not TOML": ("name = ", "is not valid TOML"),
    "unknown field": ("keys = 1", "keys is unknown; fields are name, subnet"),
    "mistyped": ("port = 'x'", "port = 'x' can't be used; give a whole number"),
    "no port": ("port = 65536", "port = 65536 is no port"),
    "open to nowhere": ("open = [22, 0]", "open = 0 is no port"),
    "a name for two devices": ("name = '../x'", r"name = '\.\./x' can't name a device"),
    "a public subnet": ("subnet = '9.9.9.0/24'", r"subnet = 9\.9\.9\.0/24 is no private network"),
    "all private addresses": ("subnet = '0.0.0.0/0'", "is no private network"),
    "bits below the mask": ("subnet = '10.77.0.1/24'", "has host bits set"),
    "IPv6": ("subnet = 'fd00::/64'", "subnet = 'fd00::/64' is no network"),
    "a small mtu": ("mtu = 576", "mtu = 576 is out of range"),
    "machines in a list": ("machines = [1]", r"machines must be tables"),
    "a machine without a key": ("[machines.a]\naddress = '10.77.0.1'", r"machines\.a\.key is missing"),
    "half a key": (MACHINE.replace(key(1), key(1)[4:]), r"machines\.a\.key = .* is no WireGuard key"),
    "a key that ends the line": (MACHINE.replace(key(1), "x\\nAllowedIPs = 0.0.0.0/0"), r"machines\.a\.key = .* is no WireGuard key"),
    "an address elsewhere": (MACHINE.replace("10.77.0.1", "10.78.0.1"), r"machines\.a\.address = 10\.78\.0\.1 is no machine's"),
    "everybody's address": (MACHINE.replace("10.77.0.1", "10.77.0.255"), r"machines\.a\.address = 10\.77\.0\.255 is no machine's"),
    "an endpoint that ends the line": (MACHINE.replace("a.example", "a\\n[Peer]"), r"machines\.a\.endpoint = .* is not HOST"),
    "an endpoint inside": (MACHINE.replace("a.example.org", "10.77.0.9"), r"machines\.a\.endpoint = 10\.77\.0\.9 lies inside"),
    "an endpoint's port": (MACHINE.replace("a.example.org", "h:99999"), r"machines\.a\.endpoint = 'h:99999' is not HOST"),
    "one key twice": (MACHINE + MACHINE.replace("s.a]", "s.b]").replace("0.1", "0.2"), r"machines\.b\.key is that of a too"),
    "one address twice": (MACHINE + MACHINE.replace("s.a]", "s.b]").replace(key(1), key(2)), r"machines\.b\.address is that of a too"),
    "two behind NAT": (
        (MACHINE + MACHINE.replace("s.a]", "s.b]").replace("0.1", "0.2").replace(key(1), key(2))).replace("a.example.org", ""),
        r"machines\.b\.endpoint is missing as a's is",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD.keys())
def test_a_list_that_can_not_work_is_told(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    assert run("show", str(path)) == 2
    err = capsys.readouterr().err
    assert re.search(rf"^thinpipe: {re.escape(str(path))}.*{says}", err) and len(err.splitlines()) <= 2, err


WORDS = {
    "an unknown command": ("start", "unknown command 'mesh start'; they are mesh key, mesh add"),
    "no list": ("up no.toml", "no.toml: No such file"),
    "no name": ("add mesh.toml", "see thinpipe mesh add --help"),
    "no key": ("add mesh.toml a key", r"mesh\.toml: machines\.a\.key = 'key' is no WireGuard key; give what `thinpipe mesh key` says"),
    "nobody": ("revoke {list} x", "no machine is called 'x'; machines are a"),
    "twice": (f"add {{list}} a {key(3)} h", "a is a machine of the mesh already"),
    "a bad name": (f"add {{list}} a/b {key(3)} h", "'a/b' can't name a machine"),
}


@pytest.mark.parametrize(("words", "says"), WORDS.values(), ids=WORDS.keys())
def test_commands_that_can_not_work_are_told(words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "list.toml"
    path.write_text(MACHINE)
    assert run(*words.replace("{list}", str(path)).split()) == 2
    err = capsys.readouterr().err
    assert re.search(says, err) and len(err.splitlines()) <= 2, err
    assert path.read_text() == MACHINE and not Path("mesh.toml").exists()


@requires_wg
def test_a_key_is_made_once_and_only_its_public_half_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "etc" / "mesh.key"
    old = os.umask(0)
    try:
        assert run("key", "--key", str(file)) == 0
    finally:
        os.umask(old)
    out, err = capsys.readouterr()
    private = file.read_text().strip()
    assert private not in out + err
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert subprocess.run(["wg", "pubkey"], input=private, capture_output=True, text=True, check=True).stdout == out
    assert run("key", "--key", str(file)) == 0 and capsys.readouterr().out == out and file.read_text().strip() == private


@pytest.mark.parametrize(
    ("mode", "text", "says"),
    [(0o644, key(7), "others may read this private key; chmod 600"), (0o600, key(7)[1:], "holds no WireGuard key")],
)
def test_a_bad_key_file_is_told_and_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, text: str, says: str) -> None:
    file = tmp_path / "mesh.key"
    file.write_text(text)
    file.chmod(mode)
    assert run("key", "--key", str(file)) == 2
    out, err = capsys.readouterr()
    assert says in err and text not in out + err


_SSHD = """
import socket, sys
listening = socket.create_server((sys.argv[1], 0))
print(listening.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss; apt-get install iproute2")
def test_the_firewall_is_not_to_shut_ssh(tmp_path: Path) -> None:
    server = tmp_path / "sshd"
    server.symlink_to(os.path.realpath(sys.executable))
    for address, shut in (("0.0.0.0", True), ("127.0.0.1", False)):  # the latter is what a session forwards
        with subprocess.Popen([server, "-c", _SSHD, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sshd:
            assert sshd.stdout is not None
            port = int(sshd.stdout.readline())
            others = tuple({22, 2222} - {port})
            with pytest.raises(ThinpipeError, match=rf"would shut port {port}") if shut else contextlib.nullcontext():
                refuse_lockout(mesh.Mesh(open=others))
            refuse_lockout(mesh.Mesh(open=(*others, port)))
            refuse_lockout(mesh.Mesh(open=()))
            sshd.communicate("")


def test_training_refuses_public_addresses_unless_told() -> None:
    for network in ({"rdzv": "9.9.9.9:29400", "addr": "127.0.0.1"}, {"rdzv": "127.0.0.1:29400", "addr": "9.9.9.9"}):
        with pytest.raises(ThinpipeError, match=r"^9\.9\.9\.9 is a public address.*thinpipe mesh.*network\.insecure"):
            meeting(NetworkConfig(**network), "m")
    with pytest.raises(ThinpipeError, match=r"can't listen on 9\.9\.9\.9"):  # it isn't this machine's, but may be
        meeting(NetworkConfig(rdzv="127.0.0.1:29400", addr="9.9.9.9", insecure=True), "m")
