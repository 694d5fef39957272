import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "dflash_lightning"
ROOMS = [
    "errors",
    "precision",
    "target_files",
    "target_rules",
    "target_spec",
    "target_head",
    "target",
    "data",
    "drafter",
    "flops",
    "logits",
    "slot_losses",
    "position_weights",
    "losses",
    "metrics",
    "objective",
    "decoding",
    "initialisation",
    "checkpoints",
    "budget",
    "optimizer",
    "stopwatch",
    "memory",
    "module",
    "throughput",
    "figures",
    "console",
    "token_board",
    "evaluation",
    "runs",
    "requests",
    "streaming",
    "generate",
    "reporting",
    "report",
    "commands",
    "run_names",
    "run_record",
    "configs",
    "cli",
    "sweeps",
    "sweep",
    "__main__",
]
"""Data flows one way: a module imports only from its own room and from rooms above it."""


def _imported_rooms(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dflash_lightning."):
            names.add((node.module or "").split(".")[1])
        if isinstance(node, ast.Import):
            names |= {
                a.name.split(".")[1] for a in node.names if a.name.startswith("dflash_lightning.")
            }
    return names


def test_imports_go_up() -> None:
    wrong = []
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":
            below = ROOMS[ROOMS.index(room) + 1 :]
            wrong += [f"{file.name} imports {name}" for name in _imported_rooms(file) & set(below)]
    assert not wrong


def test_every_module_has_a_room_and_is_small() -> None:
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        assert room in [*ROOMS, "__init__"]
        assert len(file.read_text().splitlines()) <= 300, f"{file.name} is over 300 lines"


def test_nothing_points_out_of_the_project() -> None:
    root = PACKAGE.parent
    files = [
        *PACKAGE.rglob("*.*"),
        *root.glob("*.*"),
        *root.glob("experiments/*"),
        root / "Makefile",
        root / ".ci/run",
    ]
    for file in files:
        if file.is_file() and file.suffix not in {".pyc"}:
            assert "../" not in file.read_text(errors="ignore"), file
