"""One process of a run: `python -m thinpipe.worker PARENT COMMAND RUN`, started by `launch` in the process PARENT."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is loaded, or where nothing is to be saved, needs no traceback

from . import faults, launch  # noqa: E402
from .config import load  # noqa: E402
from .metrics import to_json, write_whole  # noqa: E402
from .topology import connect  # noqa: E402


def main() -> None:
    parent, command, folder, arguments = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:]
    launch.die_with_parent(parent)
    with launch.reporting_failures():
        config = load(folder / "config.toml")
        before = None
        if command == "join":
            from .runner import join, remembered

            before = remembered(folder).get("place")
        with (
            connect(config.network.timeout, config.network.node_rank, before, config.network.insecure) as topology,
            topology.naming_peers(),
        ):
            faults.arm(topology.stage, config.network.replica or 0)
            if command == "join":
                join(config, topology, folder)
            elif command == "probe":
                from .probe import probe_machine

                write_whole(folder / "probe.json", to_json(probe_machine(config, topology, arguments[0])))
            elif command == "train":
                from .runner import fit

                fit(config, topology, folder)
            elif command == "calibrate":
                from .calibrate import calibrate_stage

                calibrate_stage(config, topology, folder)
            elif command == "generate":
                from .inference import Request, write_stage

                write_stage(folder, topology, Request(**json.loads(arguments[0])), Path(arguments[1]))
            else:
                from .verify import verify_stage

                result = verify_stage(config, topology)
                if topology.is_first:
                    write_whole(folder / "verify.json", to_json(result))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then torch's threads abort an interpreter that ends the long way
