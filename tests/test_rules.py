"""The rules of DESIGN: directions of imports, sizes of modules and folders, first words of docstrings, the map."""

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
ROOT = PACKAGE.parent
TESTS = ROOT / "tests"
# Each package of the first level may import those listed with it, and itself.
BELOW = {
    "errors": "",
    "inputs": "errors",
    "runtime": "inputs errors",
    "curves": "errors",
    "models": "runtime inputs errors",
    "norms": "curves runtime inputs errors",
    "pairs": "norms curves runtime inputs errors",
    "fits": "pairs norms curves runtime inputs errors",
    "swaps": "fits pairs norms curves runtime inputs errors",
    "loading": "models swaps runtime inputs errors",
    "show": "fits pairs norms curves runtime inputs errors",
    "tools": "show swaps fits pairs norms curves runtime inputs errors",
    "tables": "tools show fits pairs norms curves runtime inputs errors",
    "page": "tools show fits pairs norms curves runtime inputs errors",
    "figures": "",
    "cli": "page tables tools show loading models swaps fits pairs norms curves runtime inputs errors",
    "__main__": "cli",
}
# Presentation imports these records of swaps, and the table of initializations, but nothing else there.
RECORDS = re.compile(r"normscope\.swaps\.((\w+\.)?reports|inits)(\.\w+)?")
LIBRARIES = {
    "triton": {"pairs/sums/binning", "swaps/kernels", "runtime", "tools/bench/bench.py"},
    "numba": {"pairs/sums/binning", "swaps/kernels", "runtime"},
    "llvmlite": {"pairs/sums/binning", "swaps/kernels", "runtime"},
    "matplotlib": {"show/figures", "tools/bench/figure.py", "tools/heal/figure.py", "tools/probe/figure.py"},
    "jinja2": {"page"},
    "markupsafe": {"page"},
    "timm": {"models"},
    "torchaudio": {"models"},
    "diffusers": {"models"},
    "transformers": {"models"},
    "accelerate": {"models", "runtime/spread.py"},
    "tabulate": {"show/tables"},
    "typer": {"cli"},
}
FIRST_WORDS = re.compile(r"(What|Whether|Which|How|Those|They|That)\b")
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
FOLDERS = sorted({path.parent for path in FILES} - {PACKAGE})
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def imported(path: Path, *, types: bool = True) -> set[str]:
    """Return the full names of a file's imports, with or without those under ``if TYPE_CHECKING``."""
    names, for_types = set(), set()
    for node in ast.walk(parsed(path)):
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types |= set(ast.walk(node))
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imports_between_modules() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports when it runs."""
    return {
        name: {module_of(target) for target in imported(path, types=False)} - {name, ""}
        for name, path in MODULES.items()
    }


def module_of(name: str) -> str:
    """Return the module of the package that defines a full name, if any."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def in_cycles(graph: dict[str, set[str]]) -> set[str]:
    """Return the nodes of a graph that are on a cycle, or lead to one."""
    graph = dict(graph)
    while free := [name for name, targets in graph.items() if not targets & set(graph)]:
        for name in free:
            del graph[name]
    return set(graph)


def allowed(path: Path, name: str) -> bool:
    """True if a module may import a name: the command line alone imports the public names."""
    package = relative(path).partition("/")[0].removesuffix(".py")
    library, _, rest = name.partition(".")
    if name == "normscope":
        return package == "cli"
    if library == "normscope":
        if package in ("show", "tables", "page") and RECORDS.fullmatch(name):
            return True
        return rest.partition(".")[0] in (package, *BELOW[package].split())
    return library not in LIBRARIES or any(relative(path).startswith(home) for home in LIBRARIES[library])


def test_imports_follow_the_allowed_directions():
    assert [(relative(path), name) for path in FILES for name in imported(path) if not allowed(path, name)] == []


def test_modules_do_not_import_each_other_in_cycles():
    assert in_cycles(imports_between_modules()) == set()


def test_folders_do_not_import_each_other_in_cycles():
    """Modules at the top and ``__init__.py`` files, which register commands, count as nodes of their own."""

    def folder(name: str) -> str:
        path = MODULES[name]
        return relative(path if path.name == "__init__.py" or path.parent == PACKAGE else path.parent)

    graph: dict[str, set[str]] = {folder(name): set() for name in MODULES}
    for name, targets in imports_between_modules().items():
        graph[folder(name)] |= {folder(target) for target in targets} - {folder(name)}
    assert in_cycles(graph) == set(), "folders import each other"


def test_names_of_public_classes_are_unique():
    nodes = (node for path in FILES for node in ast.walk(parsed(path)))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    assert {name for name, times in names.items() if times > 1} == set()


def test_sizes():
    """A module has at most 700 lines, a folder at most 16 modules."""
    assert {relative(path) for path in FILES if path.read_text(encoding="utf-8").count("\n") > 700} == set()
    modules = Counter(relative(path.parent) for path in FILES if path.name != "__init__.py")
    assert {folder for folder, number in modules.items() if number > 16} == set()


def test_docstrings_begin_with_a_noun_or_an_imperative():
    """What, Whether, Which, How, Those, They and That begin no summary."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, documented):
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                assert not FIRST_WORDS.match(summary), f"{relative(path)}: {summary}"


def test_tests_mirror_the_folders_of_the_package():
    """Each folder has tests. The tests of one module may fill a folder of its name, with folders in it."""
    tested = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")} - {Path(), Path("benchmarks")}
    modules = {path.relative_to(PACKAGE).with_suffix("") for path in FILES}
    folders = {path.relative_to(PACKAGE) for path in FOLDERS}
    assert {folder for folder in tested - folders if not {folder, *folder.parents} & modules} == set()
    with_code = {path.parent.relative_to(PACKAGE) for path in FILES if path.name != "__init__.py"} - {Path()}
    assert with_code - tested == set()


def test_the_architecture_page_is_true():
    """Its tree shows each folder, below the folder that contains it; the modules that the page names exist."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, tree, text = page.split("```", 2)
    shown, above = set(), {-1: ROOT}
    for line in tree.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        path = above[depth - 1] / name
        assert path.exists(), f"{line.strip()!r} is not in {relative(path.parent)}"
        if path.is_dir():
            above[depth] = path
            shown.add(path)
    assert shown == {*FOLDERS, PACKAGE}
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert {name for name in BELOW if f">{name}</text>" in picture} == {*BELOW} - {
        "errors",
        "figures",
        "tables",
        "__main__",
    }
    named = set(re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", text))
    assert {name for name in named if not any((above / name).exists() for above in (PACKAGE, ROOT))} == set()


def test_importing_normscope_imports_nothing_heavy():
    code = "import sys, normscope; print([m for m in ('torch', 'numpy', 'timm', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    assert set(dir(normscope)) >= set(normscope.__all__) >= {"capture", "fit", "load", "plot", "swap", "errors"}
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
    mention_it = [path for path in TESTS.rglob("*.py") if "torchaudio" in path.read_text(encoding="utf-8")]
    assert [path for path in mention_it if any("torchaudio" in name for name in imported(path))] == []


def test_the_extra_test_brings_all_that_the_tests_import():
    """A fresh machine has nothing else: README's second command must not need what the linters or benchmarks bring."""
    root = PACKAGE.parent
    own = {path.stem for folder in ("tests", "benchmarks", "scripts") for path in (root / folder).rglob("*")}
    brings, homes = required("test"), metadata.packages_distributions()
    missing = set()
    for path in sorted((root / "tests").rglob("*.py")):
        names = {name.partition(".")[0] for name in imported(path)}
        for module in names - own - {"normscope"} - set(sys.stdlib_module_names):
            if not {canonicalize_name(home) for home in homes.get(module, [])} & brings:
                missing.add(f"{path.relative_to(root)} imports {module}")
    assert not missing
