"""``normscope heal``, end to end on a network that comes with it."""

import json
from pathlib import Path

import pytest
import torch
from command_line import document, invoke, words
from PIL import Image

import normscope
from normscope.swaps.distances import output_errors
from normscope.tools.heal.training import TrainingState

QUICK = "heal demo_vit --steps 16 --device cpu --func dyisru --layers 'blocks.0.*,norm' --limit 64"


@pytest.mark.slow
def test_a_network_is_healed_and_written(here):
    told = document(f"{QUICK} -o healed")
    assert told["after"]["median"] < told["before"]["median"]
    assert told["closed"] == pytest.approx(1 - told["after"]["median"] / told["before"]["median"])
    assert list(told["stages"]) == ["calibrated", "trained"]
    assert (told["model"], told["func"], told["steps"], told["sites"]) == ("demo_vit", "dyisru", 16, 3)
    assert sorted(path.name for path in here.iterdir()) == ["healed", "healed-healing.png"]
    with Image.open("healed-healing.png") as image:
        assert json.loads(image.text["Description"])["model"] == "demo_vit"
    # What was written has the drift that was told.
    network = normscope.load("demo_vit", device="cpu")
    swapped = normscope.load_swapped("healed", device="cpu")
    errors = output_errors(network.module, swapped.module, list(network.inputs), network.outputs)
    # Batches of another size sum in another order, in float32.
    assert float(errors.quantile(0.5)) == pytest.approx(told["after"]["median"], rel=1e-4)


@pytest.mark.slow
def test_a_table_for_people_and_what_was_interrupted(here, monkeypatch):
    check, checks = TrainingState.check, []

    def interrupted(state, *found):
        checks.append(state.step)
        if len(checks) == 3:
            raise KeyboardInterrupt
        return check(state, *found)

    monkeypatch.setattr(TrainingState, "check", interrupted)
    stopped = invoke(f"{QUICK} -o out/healed", status=130)
    assert "the same command goes on from out/healed.healing.safetensors" in words(stopped.stderr)
    assert [path.name for path in (here / "out").iterdir()] == ["healed.healing.safetensors"]
    monkeypatch.setattr(TrainingState, "check", check)
    done = invoke(f"{QUICK} -o out/healed")
    assert "going on from out/healed.healing.safetensors" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("demo_vit · embedded demo_vit")
    rows = [line for line in lines if line.startswith(("start values", "calibrated", "train"))]
    assert len(rows) == 3 and "%" in rows[-1] and sum(row.endswith("yes") for row in rows) == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    checked = [line.partition(":")[0] for line in told]
    assert checked == [f"step {step}" for step in (4, 6, 7, 8, 10, 11, 12, 14, 15, 16)], told
    assert all(": loss " in line and ", drift on the samples that decide 0." in line for line in told), told
    assert lines[-2:] == ["out/healed", "out/healed-healing.png"]
    assert sorted(path.name for path in (here / "out").iterdir()) == ["healed", "healed-healing.png"]
    # The same as without an interruption.
    whole = invoke(f"{QUICK} -o whole")
    assert [line for line in whole.stdout.splitlines() if line in rows] == rows


@pytest.fixture(scope="module")
def leftover(tmp_path_factory):
    """What an interrupted healing of QUICK to a folder ``healed`` left beside it, as bytes."""

    def interrupt(state, *found):
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingState, "check", interrupt)
        invoke(f"{QUICK} -o {folder / 'healed'}", status=130)
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
        ("--func dyt", "its func is 'dyisru', not 'dyt'"),
        ("--steps 20", "its steps is 16, not 20"),
        ("--no-shift", "its shift is None, not False"),
        ("--weights random", "its weights is 'pretrained', not 'random'"),
    ],
)
def test_what_another_healing_left_is_refused_before_any_work(interrupted, other, told):
    before = interrupted.read_bytes()
    said = words(invoke(f"{QUICK} {other} -o healed", status=2).stderr)
    assert said.startswith("loading demo_vit … Error: healed.healing.safetensors is of another healing")
    assert told in said and "--restart" in said
    assert interrupted.read_bytes() == before


def test_a_damaged_leftover_is_refused_before_any_work(interrupted):
    interrupted.write_bytes(interrupted.read_bytes()[:-4])
    done = invoke(f"{QUICK} -o healed", status=4)
    assert "Error: Cannot read the healing" in done.stderr and "--restart" in done.stderr


@pytest.mark.slow
def test_restart_discards_what_was_left_and_begins_anew(interrupted):
    done = invoke(f"{QUICK} --func dyt -o healed --restart")
    said = words(done.stderr)
    assert "discarded healed.healing.safetensors, to begin anew" in said and "going on" not in said
    assert "calibrated" in done.stdout and not interrupted.exists()


FACTORIES = Path(__file__).parents[1] / "factories.py"


@pytest.mark.usefixtures("here")
def test_a_network_of_ones_own_is_healed_in_its_own_batches():
    told = document(f"heal py:{FACTORIES}:small --steps 6 -o healed --device cpu --width 3.25 --title none")
    assert told["n_held_out"] == 6
    with Image.open("healed-healing.png") as image:
        assert image.width == 650
    refused = invoke(f"heal py:{FACTORIES}:small --steps 6 -o healed --batch-size 4", status=2)
    assert "decides how large its batches are" in refused.stderr


def test_a_norm_that_is_kept_is_left_and_the_other_healed(here):
    keep = f"heal py:{FACTORIES}:two --keep 1 --steps 6 -o healed --device cpu"
    (kept,) = document(keep)["keep"]["kept"]
    healed = normscope.load(f"py:{FACTORIES}:two", weights="healed", device="cpu").module
    assert isinstance(healed.get_submodule(kept), torch.nn.LayerNorm)
    assert sum(isinstance(module, normscope.PointwiseFunction) for module in healed) == 1
    assert (here / "healed-keep.png").stat().st_size > 10_000
    told = invoke(keep)
    assert "norm put back" in told.stdout and kept in told.stdout


@pytest.mark.parametrize(
    ("options", "init"), [("--func rmsnorm --steps 6", ""), ("--init theory --minutes 0.02", "theory")]
)
@pytest.mark.usefixtures("here")
def test_what_is_not_calibrated_is_trained(options, init):
    done = invoke(f"heal py:{FACTORIES}:small {options} -o healed --device cpu --json")
    told = json.loads(done.stdout)
    assert list(told["stages"]) == ["trained"] and told["init"] == init
    assert told["checks"][-1]["step"] == told["steps"] >= 6
    assert ("point-wise functions alone are calibrated" in words(done.stderr)) is (init == "")
