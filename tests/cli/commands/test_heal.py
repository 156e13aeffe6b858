"""``normscope heal``, end to end on a network that comes with it."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import normscope
from normscope.cli import app
from normscope.swaps.distances import output_errors
from normscope.swaps.heal.training import TrainingState

QUICK = ("demo_vit", "--steps", "16", "--device", "cpu", "--sites", "blocks.0.*,norm", "--limit", "160")


def heal(*arguments):
    return CliRunner().invoke(app, ["heal", *map(str, arguments)])


@pytest.mark.slow
def test_a_network_is_healed_and_written(here):
    done = heal(*QUICK, "-o", "healed", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["after"]["median"] < document["before"]["median"]
    assert document["closed"] == pytest.approx(1 - document["after"]["median"] / document["before"]["median"])
    assert list(document["stages"]) == ["calibrated", "trained"]
    assert (document["model"], document["func"], document["steps"], document["sites"]) == ("demo_vit", "dyisru", 16, 3)
    assert sorted(path.name for path in here.iterdir()) == ["healed", "healed-healing.png"]
    with Image.open("healed-healing.png") as image:
        assert json.loads(image.text["Description"])["model"] == "demo_vit"
    # What was written has the drift that was told.
    network = normscope.load("demo_vit", device="cpu")
    swapped = normscope.load_swapped("healed", device="cpu")
    errors = output_errors(network.module, swapped.module, list(network.inputs), network.outputs)
    # Batches of another size sum in another order, in float32.
    assert float(errors.quantile(0.5)) == pytest.approx(document["after"]["median"], rel=1e-4)


@pytest.mark.slow
def test_a_table_for_people_and_what_was_interrupted(here, monkeypatch):
    check, checks = TrainingState.check, []

    def interrupted(state, *found):
        checks.append(state.step)
        if len(checks) == 3:
            raise KeyboardInterrupt
        return check(state, *found)

    monkeypatch.setattr(TrainingState, "check", interrupted)
    stopped = heal(*QUICK, "-o", "out/healed")
    assert stopped.exit_code == 130
    assert "the same command goes on from out/healed.healing.safetensors" in " ".join(stopped.stderr.split())
    assert [path.name for path in (here / "out").iterdir()] == ["healed.healing.safetensors"]
    monkeypatch.setattr(TrainingState, "check", check)
    done = heal(*QUICK, "-o", "out/healed")
    assert done.exit_code == 0, done.output
    assert "going on from out/healed.healing.safetensors" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("demo_vit · embedded demo_vit")
    rows = [line for line in lines if line.startswith(("start values", "calibrated", "trained"))]
    assert len(rows) == 3 and "%" in rows[-1] and sum(row.endswith("yes") for row in rows) == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in told] == [
        f"step {step}" for step in (4, 6, 7, 8, 10, 11, 12, 14, 15, 16)
    ], told
    assert all(": loss " in line and ", drift 0." in line for line in told), told
    assert lines[-2:] == ["out/healed", "out/healed-healing.png"]
    assert sorted(path.name for path in (here / "out").iterdir()) == ["healed", "healed-healing.png"]
    # The same as without an interruption.
    whole = heal(*QUICK, "-o", "whole")
    assert [line for line in whole.stdout.splitlines() if line in rows] == rows


@pytest.fixture(scope="module")
def leftover(tmp_path_factory):
    """What an interrupted healing of QUICK to a folder ``healed`` left beside it, as bytes."""

    def interrupt(state, *found):
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingState, "check", interrupt)
        assert heal(*QUICK, "-o", folder / "healed").exit_code == 130
    (path,) = folder.iterdir()
    assert path.name == "healed.healing.safetensors"
    return path.read_bytes()


@pytest.fixture
def interrupted(here, leftover):
    path = here / "healed.healing.safetensors"
    path.write_bytes(leftover)
    return path


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("--func", "dyt"), "its func is 'dyisru', not 'dyt'"),
        (("--steps", "20"), "its steps is 16, not 20"),
        (("--no-shift",), "its shift is None, not False"),
        (("--weights", "random"), "its weights is 'pretrained', not 'random'"),
    ],
)
def test_what_another_healing_left_is_refused_before_any_work(interrupted, other, told):
    before = interrupted.read_bytes()
    done = heal(*QUICK, *other, "-o", "healed")
    assert done.exit_code == 2
    said = " ".join(done.stderr.split())
    assert said.startswith("Error: healed.healing.safetensors is of another healing"), "a network was loaded"
    assert told in said and "--restart" in said
    assert interrupted.read_bytes() == before


def test_a_damaged_leftover_is_refused_before_any_work(interrupted):
    interrupted.write_bytes(interrupted.read_bytes()[:-4])
    done = heal(*QUICK, "-o", "healed")
    assert done.exit_code == 4
    assert done.stderr.startswith("Error:") and "--restart" in done.stderr


@pytest.mark.slow
def test_restart_discards_what_was_left_and_begins_anew(interrupted):
    done = heal(*QUICK, "--func", "dyt", "-o", "healed", "--restart")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert "discarded healed.healing.safetensors, to begin anew" in said and "going on" not in said
    assert "calibrated" in done.stdout and not interrupted.exists()


FACTORY = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)), [torch.randn(3, 5, 4) for _ in range(8)]
"""


def test_a_network_of_ones_own_is_healed_in_its_own_batches(here):
    (here / "mine.py").write_text(FACTORY)
    look = ("--width", "3.25", "--title", "none")
    done = heal("py:mine.py:make", "--steps", "6", "-o", "healed", "--device", "cpu", "--json", *look)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["n_held_out"] == 6
    with Image.open(here / "healed-healing.png") as image:
        assert image.width == 650
    told = heal("py:mine.py:make", "--steps", "6", "-o", "healed", "--batch-size", "4")
    assert told.exit_code == 2 and "decides how large its batches are" in told.stderr


TWO_NORMS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)
    return nn.Sequential(*layers), [torch.randn(3, 5, 4) for _ in range(8)]
"""


def test_a_norm_that_is_kept_is_left_and_the_other_healed(here):
    (here / "two.py").write_text(TWO_NORMS)
    done = heal("py:two.py:make", "--keep", "1", "--steps", "6", "-o", "healed", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    (kept,) = json.loads(done.stdout)["keep"]["kept"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(here)
        healed = normscope.load("py:two.py:make", weights="healed", device="cpu").module
    assert isinstance(healed.get_submodule(kept), torch.nn.LayerNorm)
    assert sum(isinstance(module, normscope.PointwiseFunction) for module in healed) == 1
    assert (here / "healed-keep.png").stat().st_size > 10_000
    told = heal("py:two.py:make", "--keep", "1", "--steps", "6", "-o", "healed", "--device", "cpu")
    assert "norm put back" in told.stdout and kept in told.stdout


@pytest.mark.parametrize(
    ("options", "init"),
    [(("--func", "rmsnorm", "--steps", "6"), ""), (("--init", "theory", "--minutes", "0.02"), "theory")],
)
def test_what_is_not_calibrated_is_trained(here, options, init):
    (here / "mine.py").write_text(FACTORY)
    done = heal("py:mine.py:make", *options, "-o", "healed", "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert list(document["stages"]) == ["trained"] and document["init"] == init
    assert document["checks"][-1]["step"] == document["steps"] >= 6
    assert ("point-wise functions alone are calibrated" in done.stderr) is (init == "")
