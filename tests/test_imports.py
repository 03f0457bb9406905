"""Imports go downwards only: the rooms by floors."""

import ast
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "thinpipe"

FLOORS = {
    0: {"errors", "commands", "sizes", "config", "schedule", "planner", "lab", "mesh", "standing", "endpoint"},
    1: {"subspace", "codecs"},
    2: {"method", "optim", "data", "export", "metrics", "watch", "tally"},
    3: {"model", "topology", "pipeline", "replicas", "council", "checkpoint", "launch", "meeting", "run", "device", "linkrate"},
    4: {"trainer", "generate", "calibrate"},
    5: {"cli", "probe", "runner", "trial", "verify", "inference", "publish", "race", "report", "page", "faults", "status", "worker"}
    | {"__init__", "__main__"},
}
# Rooms of one floor that stand on each other.
SIDEWAYS = {
    *(("sizes", "errors"), ("config", "errors"), ("config", "sizes"), ("schedule", "config"), ("lab", "config"), ("lab", "errors")),
    *(("planner", room) for room in ("config", "errors", "sizes", "schedule", "lab")),
    *(("mesh", room) for room in ("config", "errors", "commands")),
    *(("commands", "errors"), ("lab", "commands")),
    *(("optim", "method"), ("trainer", "generate"), ("trainer", "calibrate")),
    *(("pipeline", "topology"), ("pipeline", "model"), ("checkpoint", "topology"), ("launch", "topology"), ("device", "topology")),
    *(("replicas", room) for room in ("council", "meeting", "topology")),
    *(("council", "topology"), ("pipeline", "replicas")),
    *(("linkrate", "topology"), ("launch", "meeting"), ("meeting", "topology")),
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
TORCH_FREE = {"errors", "commands", "sizes", "config", "schedule", "planner", "lab", "mesh", "standing", "endpoint", "data"}


def imports(path: Path) -> set[str]:
    """Names of our rooms, and of torch, that a file imports (type-checking blocks and function bodies included)."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level and not module:
                found |= {alias.name for alias in node.names}
            elif node.level:
                found.add(module.split(".")[0])
            elif module.startswith("thinpipe."):
                found.add(module.split(".")[1])
            elif module.split(".")[0] == "torch":
                found.add("torch")
        elif isinstance(node, ast.Import):
            found |= {"torch" for alias in node.names if alias.name.split(".")[0] == "torch"}
    return found


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def test_every_file_has_a_floor() -> None:
    assert {room_of(path) for path in SRC.rglob("*.py")} <= set(FLOOR_OF)


def test_imports_go_downwards() -> None:
    for path in SRC.rglob("*.py"):
        room = room_of(path)
        for other in imports(path) & set(FLOOR_OF):
            below = FLOOR_OF[other] < FLOOR_OF[room] or FLOOR_OF[room] == 5
            assert other == room or below or (room, other) in SIDEWAYS, f"{room} imports {other}"


def test_lowest_floor_is_free_of_torch() -> None:
    for path in SRC.rglob("*.py"):
        if room_of(path) in TORCH_FREE:
            assert "torch" not in imports(path), path
