"""The rules of the house: which way imports point, how many rooms of which size, where tests are; its page."""

import ast
import contextlib
import functools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import normscope

PACKAGE = Path(normscope.__file__).parent
ROOMS_AT_THE_TOP = {"__init__", "__main__", "errors", "loading"}
# Each wing may import what stands behind it, and itself.
BELOW = {
    "errors": set(),
    "inputs": {"errors"},
    "runtime": {"inputs", "errors"},
    "models": {"runtime", "inputs", "errors"},
    "pairs": {"runtime", "inputs", "errors"},
    "fits": {"pairs", "runtime", "inputs", "errors"},
    "swaps": {"fits", "pairs", "runtime", "inputs", "errors"},
    "loading": {"models", "swaps", "runtime", "inputs", "errors"},
    "tables": {"fits", "pairs", "runtime", "inputs", "errors"},
    "figures": {"tables", "fits", "pairs", "runtime", "inputs", "errors"},
    "page": {"figures", "tables", "fits", "pairs", "runtime", "inputs", "errors"},
    "cli": {"page", "figures", "tables", "loading", "models", "swaps", "fits", "pairs", "runtime", "inputs", "errors"},
    "__main__": {"cli"},
}
# All that is drawn of swaps.
REPORTS = {f"normscope.swaps.{wing}.reports" for wing in ("drift", "heal", "bench", "keep")}
LIBRARIES = {
    "triton": {"pairs/sums/binning/cuda", "swaps/kernels", "swaps/bench/timing.py"},
    "numba": {"pairs/sums/binning/cpu_loop.py", "pairs/sums/binning/compiled_loops.py", "swaps/kernels/cpu_loop.py"},
    "llvmlite": {"pairs/sums/binning/cpu_loop.py", "swaps/kernels/cpu_loop.py"},
    "matplotlib": {"figures"},
    "jinja2": {"page"},
    "markupsafe": {"page"},
    "timm": {"models"},
    "torchaudio": {"models"},
    "diffusers": {"models"},
    "transformers": {"models"},
    "accelerate": {"models", "runtime/network.py"},
    "pyarrow": {"cli/formats.py"},
    "typer": {"cli"},
}
TESTS = PACKAGE.parent / "tests"
# Tests that are named for what they ask of several rooms.
ACROSS_ROOMS = {
    "cli/test_full_size.py": "the networks of the papers, through every command",
    "cli/test_hostile_names.py": "names that steer a terminal, in every output",
    "cli/test_mistakes.py": "a user's mistakes, in every command",
    "cli/test_ranks.py": "every command under torchrun",
    "figures/test_widths.py": "what a paper asks of every figure",
    "fits/test_stated_accuracy.py": "what docs/ state of errors that come of bins, in fits, cards and gradients",
    "models/embedded/test_calibration.py": "what the embedded networks learn from, whichever loads them",
    "swaps/test_compiled.py": "drift, healing and bench of compiled networks",
    "swaps/test_in_place.py": "drift, healing and bench of networks that change tensors in place",
}
# What holds rooms that have no tests under their own name.
HELD_BY = {
    "cli/test_commands.py": {"cli/commands/capture"},
    "cli/test_mistakes.py": {"cli/options"},
    "cli/commands/test_stats.py": {"tables/card"},
    "cli/commands/test_swap_bench.py": {"cli/swapping"},
    "cli/commands/test_swap.py": {"cli/keeping"},
    "cli/commands/test_gradient.py": {"tables/gradient"},
    "figures/test_scurves.py": {"figures/panels", "figures/notes"},
    "figures/test_speed.py": {"tables/speed"},
    "fits/curves/test_known.py": {"fits/curves/functions", "fits/curves/properties"},
    "fits/solving/test_solve.py": {"fits/solving/objective"},
    "fits/test_fit.py": {"fits/curve_fit"},
    "fits/views/test_gradient.py": {"fits/views/jacobians"},
    "models/inputs/test_numbered_inputs.py": {"models/inputs/file_inputs"},
    "models/transformers/": {
        "models/modalities",
        *(f"models/inputs/{room}" for room in ("tokenizer", "processors", "features")),
    },
    "pairs/norms/test_kinds_grouped.py": {"pairs/sums/tokens"},
    "pairs/sums/binning/test_cpu.py": {"pairs/sums/binning/reference"},
    "pairs/test_storage_merging.py": {"pairs/captures"},
    "pairs/sums/test_stats.py": {"pairs/sums/binned"},
    "swaps/bench/test_bench.py": {
        f"swaps/bench/{room}" for room in ("reports", "single_norm", "variants", "whole_network")
    },
    "swaps/drift/test_drift.py": {"swaps/drift/reports"},
    "swaps/heal/test_heal.py": {
        *(f"swaps/heal/{room}" for room in ("checkpoint", "lessons", "reports", "stages", "training")),
    },
    "swaps/store/test_store.py": {"swaps/store/record"},
    "swaps/store/test_standalone.py": {"swaps/store/origins"},
    "tables/test_fit.py": {"tables/table"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def home_of(name: str) -> str:
    """Return the module that holds this, or is it."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def imported(path: Path, *, run: bool = False) -> set[str]:
    """Return the full names of what a file imports; with ``run`` without what only a type checker reads."""
    names = set()
    for_types = {
        inner
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(parsed(path)):
        if run and node in for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path):
    place = path.relative_to(PACKAGE).as_posix()
    wing = place.partition("/")[0].removesuffix(".py")
    for name in imported(path):
        library, _, rest = name.partition(".")
        if name == "normscope":
            assert wing == "cli", f"{place} imports the public names, which stand above it"
        elif library == "normscope":
            target = rest.partition(".")[0]
            read = wing in ("figures", "tables", "page") and name.rpartition(".")[0] in REPORTS
            assert target == wing or target in BELOW[wing] or read, f"{place} imports {name}"
        elif library in LIBRARIES:
            homes = LIBRARIES[library]
            assert any(place.startswith(home) for home in homes), f"{place} imports {library}; only {homes} may"


def test_there_is_no_circle_of_imports():
    """What is imported for its type alone runs nothing, and is left out."""
    left = {
        name: {home_of(target) for target in imported(path, run=True)} & set(MODULES) - {name}
        for name, path in MODULES.items()
    }
    while free := [name for name, targets in left.items() if not targets & set(left)]:
        for name in free:
            del left[name]
    assert not left


def test_no_class_name_stands_twice():
    """With an underscore before it or without, a name means one thing."""
    nodes = (node for path in FILES for node in ast.walk(parsed(path)))
    classes = Counter(node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, times in classes.items() if times > 1} == set()


def test_rooms_are_few_and_of_a_size():
    assert {path.stem for path in PACKAGE.glob("*.py")} == ROOMS_AT_THE_TOP
    for folder in sorted({path.parent for path in FILES}):
        rooms = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
        most = {PACKAGE: 16, PACKAGE / "figures": 16, PACKAGE / "cli" / "commands": 16}.get(folder, 12)
        assert len([room for room in rooms if room.name != "__init__.py"]) <= most, folder
    long = [
        path.relative_to(PACKAGE).as_posix() for path in FILES if path.read_text(encoding="utf-8").count("\n") > 400
    ]
    assert not long


def named_after_a_room(path: Path) -> bool:
    """Whether tests stand in the place of a room under its name, or in a folder of its name."""
    place, name = path.relative_to(TESTS).parent, path.stem.removeprefix("test_")
    if any((PACKAGE / folder).with_suffix(".py").is_file() for folder in (place, *place.parents[:-1])):
        return True
    rooms = [room.name.partition(".")[0] for room in (PACKAGE / place).glob("*")]
    return any(name == room or name.startswith(f"{room}_") for room in rooms)


def test_tests_are_named_after_the_room_that_they_try():
    """test_ROOM.py or test_ROOM_TOPIC.py; the room may be a folder."""
    wings = [path.name for path in PACKAGE.iterdir() if path.is_dir()]
    files = {path.relative_to(TESTS).as_posix(): path for wing in wings for path in (TESTS / wing).rglob("test_*.py")}
    others = [place for place, path in files.items() if not named_after_a_room(path)]
    assert [place for place in others if not place.startswith(tuple(ACROSS_ROOMS))] == []


def held_by_its_name(room: Path) -> bool:
    """Whether tests in its place are named after a room, or after the room that it is a part of (cpu_loop: cpu)."""
    beside = TESTS / room.relative_to(PACKAGE).parent
    names = [path.stem.removeprefix("test_") for path in beside.glob("test_*.py")]
    own = any(f"_{room.stem}_" in f"_{name}_" or room.stem.startswith(f"{name}_") for name in names)
    return own or (beside / room.stem).is_dir()


def test_every_room_has_tests_that_its_name_finds():
    """What is short, and has none, is seen through the rooms that it is for."""
    rooms = [
        path for path in FILES if path.name != "__init__.py" and path.read_text(encoding="utf-8").count("\n") > 100
    ]
    without = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in rooms if not held_by_its_name(path)}
    listed = set().union(*HELD_BY.values())
    assert without - listed == set(), "name a file of tests after it, or say in HELD_BY which one holds it"
    assert {room for room in listed - without if (PACKAGE / f"{room}.py").is_file()} == set(), "HELD_BY need not say it"
    assert [place for place in (*ACROSS_ROOMS, *HELD_BY) if not (TESTS / place).exists()] == []


def test_the_page_of_the_house_shows_its_rooms():
    """Each line of the tree is a folder, or one or more files of the folder above it."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = page.partition("```\n")[2].partition("```")[0].splitlines()
    shown, folders = set(), {}
    for line in tree:
        depth = (len(line) - len(line.lstrip())) // 2
        above = folders[depth - 1] if depth else PACKAGE.parent
        names = re.findall(r"[\w/]+(?:\.pyi?|/)(?= |$)", re.split(r" {2,}(?=[^ ]*[^ ./\w])", line.strip())[0])
        for name in names:
            if name.endswith("/"):
                folders[depth] = above / name
            shown.add(above / name)
    there = {path for path in FILES if path.name not in ("__init__.py", "__main__.py")}
    assert {path for path in shown if path.suffix == ".py"} == there
    assert {path for path in shown if not path.suffix} == {path.parent for path in FILES} | {PACKAGE}


def test_importing_normscope_imports_nothing_heavy():
    code = "import sys, normscope; print([m for m in ('torch', 'numpy', 'timm', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert set(dir(normscope)) >= set(normscope.__all__) >= {"capture", "fit", "load", "plot", "swap", "HealReport"}
    for name in normscope.__all__:
        assert getattr(normscope, name).__doc__
    with pytest.raises(AttributeError, match="No normscope attribute swop"):
        _ = normscope.swop


def required(*names):
    """Names of all that pip installs for the package with these extras."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    left = [*project["dependencies"], *(line for name in names for line in project["optional-dependencies"][name])]
    found = set()
    while left:
        requirement = Requirement(left.pop())
        name = canonicalize_name(requirement.name)
        if name == project["name"]:
            left += [line for extra in requirement.extras for line in project["optional-dependencies"][extra]]
        elif name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                left += [line for line in metadata.requires(name) or [] if "extra ==" not in line]
    return found


def test_tests_do_without_torchaudio():
    """Its last release does not work beside a newer torch: tests import it by pytest.importorskip alone."""
    assert [path for path in TESTS.rglob("*.py") if any("torchaudio" in name for name in imported(path))] == []


def test_the_extra_test_brings_all_that_the_tests_import():
    """A fresh machine has nothing else: README's second command must not need what the linters or benchmarks bring."""
    root = PACKAGE.parent
    own = {path.stem for folder in ("tests", "benchmarks", "scripts") for path in (root / folder).rglob("*")}
    brings, homes = required("test"), metadata.packages_distributions()
    missing = set()
    for path in sorted((root / "tests").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
        for module in {name.partition(".")[0] for name in names} - own - {"normscope"} - set(sys.stdlib_module_names):
            if not {canonicalize_name(home) for home in homes.get(module, [])} & brings:
                missing.add(f"{path.relative_to(root)} imports {module}")
    assert not missing
