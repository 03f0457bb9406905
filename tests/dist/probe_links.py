"""Under torchrun: links between the processes of one machine, all and some; the first process prints what came out."""

import json
import os

from thinpipe.linkrate import measure_links
from thinpipe.topology import connect

with connect(30.0) as here:
    found = {"every": measure_links(here, 0.1), "some": measure_links(here, 0.1, [(1, 2)])}
    everyone = here.gather(found)
threads = len(os.listdir("/proc/self/task"))
if here.is_first:
    print("RESULT " + json.dumps({**found, "same": everyone.count(everyone[0]) == here.stages, "threads": threads}))
