import hashlib
import re
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from normscope.errors import DataError, ModelError, UsageError
from normscope.inputs.chunks import ALL, RankSampler
from normscope.loading import load

MINE = """
import torch
from torch import nn
import helper
from normscope.inputs.batch import Batch, Sample

print("a print of the user's")

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))

class Anew:
    def __iter__(self):
        return (torch.randn(3, 4) for _ in range(4))

make = lambda: (net(), [torch.randn(3, 4) for _ in range(4)])
once = lambda: (net(), iter(Anew()))
anew = lambda: (net(), Anew())
single = lambda: (net(), iter([torch.zeros(3, 4)]))

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x, ids=None):
        return self.norm(x)

def kinds():
    x, ids = torch.ones(2, 4), torch.arange(2)
    samples = (Sample("a", 0, 0), Sample("a", 0, 1))
    return Both(), [x, (x, ids), {"x": x, "ids": ids}, Batch((x,), {"ids": ids}, samples)]

class Factories:
    make = make

def divides():
    return helper.divide(0)

def leaves():
    raise SystemExit(3)

def takes(size):
    return net(), []

module_alone = net
three = lambda: (1, 2, 3)
no_module = lambda: ("net", [torch.zeros(3, 4)])
no_list = lambda: (net(), torch.zeros(3, 4))
no_batch = lambda: (net(), [])
no_tensor = lambda: (net(), ["text"])
on_meta = lambda: (net().to("meta"), [torch.zeros(3, 4)])

def breaks():
    def batches():
        yield torch.zeros(3, 4)
        raise OSError("the disk is on fire")
    return net(), batches()

number = 3
"""


def line_of(statement):
    return next(number for number, line in enumerate(MINE.splitlines(), start=1) if statement in line)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Write a file of the user's with a helper beside it; imports and their search path are as before afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("def divide(x):\n    return 1 / x\n")
    return f"py:{tmp_path}/mine.py"


def load_mine(name, **changes):
    return load(name, device="cpu", **changes)


def values(inputs):
    return torch.cat([batch.args[0] for batch in inputs])


def test_list_of_batches(mine, tmp_path):
    model = load_mine(f"{mine}:make")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    expected = torch.cat([torch.randn(3, 4) for _ in range(4)])
    assert torch.equal(model.module[0].weight, net[0].weight)
    assert torch.equal(values(model.inputs), expected) and torch.equal(values(model.inputs), expected)
    assert not model.module.training
    digest = hashlib.sha256((tmp_path / "mine.py").read_bytes()).hexdigest()[:12]
    assert model.provenance.kind == "custom"
    assert model.about == {
        "model": f"{mine}:make",
        "weights": f"as {mine}:make made them (sha256 {digest}, seed 0)",
        "data": f"batches of {mine}:make",
    }
    assert (model.outputs.kind, model.calibration) == ("tensor", None)


def test_every_kind_of_batch(mine):
    model = load_mine(f"{mine}:kinds", dtype="bfloat16")
    batches = list(model.inputs)
    assert [sample.index for batch in batches for sample in batch.samples] == [0, 1, 2, 3, 4, 5, 0, 1]
    assert {tuple(batch.args[0].shape) if batch.args else None for batch in batches} == {(2, 4), None}
    assert batches[1].args[1].dtype == torch.int64
    assert batches[2].kwargs["x"].dtype == torch.bfloat16 == model.module.norm.weight.dtype
    with torch.no_grad():
        assert all(model.module(*batch.args, **batch.kwargs).shape == (2, 4) for batch in batches)
    last = list(load_mine(f"{mine}:kinds", limit=7).inputs)[-1]
    assert [len(last.args[0]), len(last.kwargs["ids"]), len(last.samples)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [(None, [3, 3, 3, 3]), (1, [1]), (3, [3]), (5, [3, 2]), (12, [3, 3, 3, 3]), (99, [3, 3, 3, 3])],
)
def test_limit_cuts_within_a_batch(mine, limit, sizes):
    inputs = load_mine(f"{mine}:make", limit=limit).inputs
    assert [len(batch.args[0]) for batch in inputs] == [len(batch.samples) for batch in inputs] == sizes
    assert inputs.n_samples == sum(sizes)
    some = f"the first {limit} samples of the " if sum(sizes) < 12 else ""
    assert inputs.description == f"{some}batches of {mine}:make"


def test_an_iterator_can_be_read_once_beyond_its_first_batch(mine):
    inputs = load_mine(f"{mine}:once").inputs
    assert inputs.n_samples is None
    first = next(iter(inputs)).args[0]
    whole = values(inputs)
    assert torch.equal(whole[:3], first)
    assert torch.equal(whole, values(load_mine(f"{mine}:make").inputs))
    with pytest.raises(DataError, match=r"taken only once, and are asked for again\. Return a list"):
        values(inputs)
    assert load_mine(f"{mine}:once", limit=4).inputs.n_samples == 4
    single = load_mine(f"{mine}:single").inputs
    assert len(values(single)) == len(values(single)) == 3


def test_random_batches_are_the_same_in_every_iteration(mine):
    inputs = load_mine(f"{mine}:anew").inputs
    torch.manual_seed(99)
    before = torch.get_rng_state()
    first = values(inputs)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert torch.equal(values(inputs), first)
    assert not torch.equal(values(load_mine(f"{mine}:anew", seed=1).inputs), first)


def test_weights_of_a_file(mine, tmp_path):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    model = load_mine(f"{mine}:make", weights=tmp_path / "net.safetensors")
    assert torch.equal(model.module[0].weight, net[0].weight)
    assert model.provenance.kind == "file"


def test_module_of_the_current_folder_and_dotted_function(mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "mine.py").rename(tmp_path / "package_of_mine" / "inner.py")
    model = load_mine("py:package_of_mine.inner:Factories.make")
    assert model.provenance.description == "as py:package_of_mine.inner:Factories.make made them (seed 0)"
    assert model.inputs.n_samples == 12


@pytest.mark.parametrize(
    ("function", "kind", "sentence"),
    [
        ("mkae", ModelError, "There is no function 'mkae'. Did you mean 'make'?"),
        ("number", ModelError, "is no function but of type int."),
        ("Factories.none", ModelError, "There is no function 'none'."),
        ("divides", ModelError, f"raised ZeroDivisionError: division by zero (FILE, line {line_of('helper.divide')})."),
        ("leaves", ModelError, f"raised SystemExit: 3 (FILE, line {line_of('SystemExit')})."),
        ("takes", ModelError, "raised TypeError: takes() missing 1 required positional argument: 'size'."),
        ("module_alone", ModelError, "returned a Sequential; it has to return two: a torch.nn.Module and its batches."),
        ("three", ModelError, "returned 3 values; it has to return two"),
        ("no_module", ModelError, "returned a str where a torch.nn.Module has to be."),
        ("no_list", DataError, "returned a Tensor where batches have to be: a list of tensors"),
        ("on_meta", ModelError, "on_meta cannot be loaded: NotImplementedError: Cannot copy out of meta tensor"),
        ("no_batch", DataError, "returned no batch to run its module on."),
        ("no_tensor", DataError, "Batch 0 is a str; a batch is a tensor, a tuple of arguments, or a dict"),
        ("breaks", DataError, f"py:FILE:breaks raised OSError: the disk is on fire (FILE, line {line_of('OSError')})."),
    ],
)
def test_refused_functions(mine, function, kind, sentence):
    with pytest.raises(kind, match=re.escape(sentence.replace("FILE", mine.removeprefix("py:")))):
        list(load_mine(f"{mine}:{function}").inputs)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("py:mine.py", "names no function. Write py:FILE.py:FUNCTION or py:MODULE:FUNCTION."),
        (
            "py:no_such_module:make",
            "Importing 'no_such_module' as a module (the name of a file ends in .py) raised ",
        ),
        ("py:mine.txt:make", "raised ModuleNotFoundError: No module named 'mine.txt'; 'mine' is not a package."),
        ("py:../mine:make", "Importing '../mine' as a module (the name of a file ends in .py) raised "),
        ("py:os:getcwd", "py:os:getcwd returned a str; it has to return two"),
        ("py:syntax.py:make", "syntax.py raised SyntaxError: invalid syntax (syntax.py, line 2)."),
        ("py:imports.py:make", "imports.py raised ModuleNotFoundError: No module named 'no_such' (imports.py, line 1)"),
        ("py:imports:make", "raised ModuleNotFoundError: No module named 'no_such'."),
    ],
)
def test_refused_names(mine, tmp_path, monkeypatch, name, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "syntax.py").write_text("\ndef make(:\n")
    (tmp_path / "imports.py").write_text("import no_such\n")
    with pytest.raises(ModelError, match=re.escape(sentence)):
        load_mine(name)
    assert "normscope_py_syntax" not in sys.modules


def test_options_that_only_the_function_decides(mine):
    for function, changes, sentence in (
        ("make", {"weights": "random"}, "decides on its weights: leave --weights out, or name a file"),
        ("make", {"data": "."}, "brings its own batches: data can have no effect on it"),
        ("make", {"batch_size": 4}, "decides how large its batches are: batch_size can have no effect on it"),
        ("once", {"shuffle": True}, "batches that can be taken only in their order: to shuffle takes a list"),
    ):
        with pytest.raises(UsageError, match=sentence):
            load_mine(f"{mine}:{function}", **changes)


def test_prints_do_not_mix_with_results(mine, capsys):
    load_mine(f"{mine}:make")
    printed = capsys.readouterr()
    assert printed.out == "" and "a print of the user's" in printed.err


@pytest.mark.parametrize(("function", "limit"), [("make", None), ("once", 7), ("anew", 7)])
def test_ranks_divide_the_batches(mine, function, limit):
    def chunks(share):
        return {
            chunk.numbers[0]: values(chunk.batches)
            for chunk in load_mine(f"{mine}:{function}", limit=limit).inputs.chunks(share)
        }

    whole = chunks(ALL)
    assert list(whole) == list(range(4 if limit is None else 3))
    assert sum(map(len, whole.values())) == (12 if limit is None else 7), "the last one is cut"
    for ranks in (2, 5):
        parts = [chunks(RankSampler(rank, ranks)) for rank in range(ranks)]
        assert sorted(number for part in parts for number in part) == list(whole)
        assert all(torch.equal(batch, whole[number]) for part in parts for number, batch in part.items())
    assert list(chunks(RankSampler(0, 2, {0}))) == [1, *([3] if limit is None else [])]


def test_a_list_can_be_shuffled(mine):
    inputs = load_mine(f"{mine}:make", limit=7, seed=2, shuffle=True).inputs
    plain = list(load_mine(f"{mine}:make", seed=2).inputs)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(2)).tolist()
    assert [chunk.numbers for chunk in inputs.chunks(ALL)] == [[number] for number in order[:3]]
    for batch, number, size in zip(inputs, order, (3, 3, 1), strict=False):
        assert torch.equal(batch.args[0], plain[number].args[0][:size])
        assert batch.samples == plain[number].samples[:size]
    assert inputs.n_samples == 7
    assert inputs.first_sample().samples == plain[order[0]].samples[:1]
    assert inputs.description == f"7 samples of the batches of {mine}:make, drawn with seed 2"
