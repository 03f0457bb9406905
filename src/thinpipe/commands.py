"""Commands of the system, bounded, with their own words as the error."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from .errors import ThinpipeError


def run_command(*argv: str, by: str, package: str, seconds: float, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
    """Standard output of a command.

    Args:
        by: who asks, for the error; package: what has the command.
        env: the whole environment (None: this process's).

    Raises ThinpipeError with the first line that it said on failure, never with `stdin`.
    """
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=seconds, env=env, check=False)
    except FileNotFoundError:
        raise ThinpipeError(f"{by}: needs {argv[0]}, which is not installed; apt-get install {package}") from None
    except subprocess.TimeoutExpired:
        raise ThinpipeError(f"{by}: {' '.join(argv)} did not end within {seconds:g} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise ThinpipeError(f"{by}: {' '.join(argv)} failed: {said[0]}")
    return done.stdout
