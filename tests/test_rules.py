"""Imports point one way: cli → {figures, swaps} → fits → pairs → errors, and cli → loading → {models, swaps}."""

import ast
import contextlib
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import normscope

PACKAGE = Path(normscope.__file__).parent
ROOT = {
    "errors",
    "batches",
    "drifts",
    "files",
    "healings",
    "outputs",
    "processes",
    "shares",
    "speeds",
    "splits",
    "state",
}
ALLOWED = {
    "errors": set(),
    "batches": {"errors"},
    "outputs": {"errors", "batches"},
    "processes": set(),
    "shares": {"errors", "batches"},
    "splits": {"errors", "batches", "shares"},
    "drifts": {"errors"},
    "files": {"errors"},
    "healings": set(),
    "state": {"errors", "batches"},
    "speeds": set(),
    "pairs": ROOT,
    "fits": ROOT | {"pairs"},
    "models": ROOT,
    "swaps": ROOT | {"pairs", "fits"},
    "loading": ROOT | {"models", "swaps"},
    "figures": ROOT | {"pairs", "fits"},
    "cli": ROOT | {"pairs", "fits", "models", "loading", "figures", "swaps"},
}
LIBRARIES = {
    "triton": {"pairs/binning/cuda", "swaps/kernels", "swaps/cuda_timing.py"},
    "numba": {"pairs/binning/cpu_loop.py"},
    "llvmlite": {"pairs/binning/cpu_loop.py"},
    "matplotlib": {"figures"},
    "plotly": {"figures"},
    "timm": {"models"},
    "torchaudio": {"models"},
    "diffusers": {"models"},
    "transformers": {"models"},
    "accelerate": {"models", "pairs/spread.py"},
    "pyarrow": {"cli/records.py"},
    "typer": {"cli"},
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ALLOWED)


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path):
    place = path.relative_to(PACKAGE).as_posix()
    wing = path.stem if path.parent == PACKAGE else place.partition("/")[0]
    for name in imported(path):
        library, _, rest = name.partition(".")
        if library == "normscope":
            target = rest.partition(".")[0]
            assert target == wing or target in ALLOWED[wing], f"{place} imports {name}"
        elif library in LIBRARIES:
            homes = LIBRARIES[library]
            assert any(place.startswith(home) for home in homes), f"{place} imports {library}; only {homes} may"


def test_importing_normscope_imports_nothing_heavy():
    code = "import sys, normscope; print([m for m in ('torch', 'numpy', 'timm', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert sorted(normscope.__all__) == normscope.__all__
    assert set(normscope.__all__) == set(normscope._HOMES)
    for name in normscope.__all__:
        assert getattr(normscope, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'swop'"):
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
