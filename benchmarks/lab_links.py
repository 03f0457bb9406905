"""How close the lab's links come to what was asked, and what the emulator costs (root; about 5 s per link).

python benchmarks/lab_links.py [--hosts N] [--backend tun] [LINK ...]
"""

from __future__ import annotations

import argparse

from thinpipe.lab import lab, parse_link

GRID = [f"{rate}mbit,{delay}ms" for rate in (20, 80, 300) for delay in (10, 50)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", nargs="*", default=GRID, metavar="LINK", help="RATE,DELAY[,…] (default: 20, 80, 300 Mbit/s x 10, 50 ms)")
    parser.add_argument("--hosts", type=int, default=2, help="hosts in a row; every boundary is measured (default 2)")
    parser.add_argument("--backend", choices=["auto", "tun", "netem"], default="auto")
    arguments = parser.parse_args()
    print("| asked | Mbit/s achieved | round trip asked, ms | achieved, ms | emulator, % of a core | backend |\n|---|---|---|---|---|---|")
    for text in arguments.links:
        link = parse_link(text)
        with lab(link, arguments.hosts, backend=arguments.backend) as net:
            net.emulator_cpu()
            achieved, busy = net.measure(), 100 * net.emulator_cpu()
            for measured in achieved:
                asked = 2000 * link.delay
                print(f"| {link} | {measured.rate:.1f} | {asked:g} | {measured.round_trip:.1f} | {busy:.0f} | {net.backend} |", flush=True)


if __name__ == "__main__":
    main()
