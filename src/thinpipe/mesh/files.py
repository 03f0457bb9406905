"""What WireGuard and the firewall are told on one machine, as text: pure functions of the list."""

from __future__ import annotations

from thinpipe.mesh.members import Machine, Mesh

_KEEPALIVE = 25  # seconds: a router forgets whom a silent machine behind it talks to after 30 or more


def wireguard(mesh: Mesh, here: Machine, private: str) -> str:
    """WireGuard's configuration of the machine `here`, as `wg syncconf` reads it. Holds the private key: a pipe's, never a file's."""
    parts = [f"[Interface]\nPrivateKey = {private}\nListenPort = {mesh.port}\n"]
    for peer in mesh.machines:
        if peer != here:
            # A peer may send from, and is sent, its own address only.
            lines = ["[Peer]", f"PublicKey = {peer.key}", f"AllowedIPs = {peer.address}/32", f"PersistentKeepalive = {_KEEPALIVE}"]
            if peer.endpoint:
                lines.append(f"Endpoint = {mesh.endpoint(peer)}")
            parts.append("\n".join([*lines, ""]))
    return "\n".join(parts)


def firewall(mesh: Mesh) -> str:
    """The rules as `nft -f` reads them: one table of ours, replaced as a whole, so that no packet meets half of it."""
    device, table = mesh.device, f"inet {mesh.device}"
    passed = f"tcp dport {{ {', '.join(map(str, mesh.open))} }} accept" if mesh.open else ""
    return f"""\
table {table} {{}}
delete table {table}
table {table} {{
    chain input {{
        type filter hook input priority filter; policy drop;
        iifname {{ "lo", "{device}" }} accept
        # Linux takes packets for any of its addresses on any device: these did not come through the tunnel.
        ip daddr {mesh.subnet} drop
        ct state established,related accept
        meta l4proto {{ icmp, ipv6-icmp }} accept
        # DHCPv6 answers from an address that was not asked.
        ip6 saddr fe80::/10 udp dport 546 accept
        udp dport {mesh.port} accept
        {passed}
    }}
    chain forward {{
        # A machine of the mesh is no router into it.
        type filter hook forward priority filter; policy accept;
        iifname "{device}" drop
        oifname "{device}" drop
    }}
    chain output {{
        # While the tunnel is down, nothing for the mesh leaves in the clear.
        type filter hook output priority filter; policy accept;
        oifname != {{ "lo", "{device}" }} ip daddr {mesh.subnet} drop
    }}
}}
"""
