"""Network namespaces and emulated links: a real training over thin links on one machine.

`with lab(parse_links("80mbit,25ms", boundaries=3), hosts=4) as net:` gives four hosts; `net.hosts[0].command_prefix` before
a command's argv runs it on the first one.
"""

from thinpipe.lab.links import Link, parse_link, parse_links
from thinpipe.lab.measure import Measured
from thinpipe.lab.namespaces import clean, leftovers
from thinpipe.lab.network import Host, Lab, lab
from thinpipe.lab.requirements import unavailable

__all__ = ["Host", "Lab", "Link", "Measured", "clean", "lab", "leftovers", "parse_link", "parse_links", "unavailable"]
