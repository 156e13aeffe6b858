"""``normscope heal`` of embedded and of own networks."""

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
FACTORIES = Path(__file__).parents[1] / "factories.py"
OWN = f"heal py:{FACTORIES}:two --steps 6 --device cpu"


@pytest.mark.slow
def test_a_network_is_healed_and_written(here):
    report = document(f"{QUICK} -o healed")
    assert report["after"]["median"] < report["before"]["median"]
    assert report["closed"] == pytest.approx(1 - report["after"]["median"] / report["before"]["median"])
    assert list(report["stages"]) == ["calibrated", "trained"]
    assert (report["model"], report["func"], report["steps"], report["sites"]) == ("demo_vit", "dyisru", 16, 3)
    assert sorted(path.name for path in here.iterdir()) == ["healed", "healed-healing.png"]
    with Image.open("healed-healing.png") as image:
        assert json.loads(image.text["Description"])["model"] == "demo_vit"
    network = normscope.load("demo_vit", device="cpu")
    swapped = normscope.load_swapped("healed", device="cpu")
    errors = output_errors(network.module, swapped.module, list(network.inputs), network.outputs)
    # Batches of another size sum in another order, in float32.
    assert float(errors.quantile(0.5)) == pytest.approx(report["after"]["median"], rel=1e-4)


@pytest.mark.slow
def test_an_interrupted_healing_resumes_to_the_same_table(here, monkeypatch):
    check, checks = TrainingState.check, []

    def interrupt_third(state, *arguments):
        checks.append(state.step)
        if len(checks) == 3:
            raise KeyboardInterrupt
        return check(state, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingState, "check", interrupt_third)
        stopped = invoke(f"{QUICK} -o out/healed", status=130)
    assert "the same command goes on from out/healed.healing.safetensors" in words(stopped.stderr)
    assert [path.name for path in (here / "out").iterdir()] == ["healed.healing.safetensors"]
    done = invoke(f"{QUICK} -o out/healed")
    assert "going on from out/healed.healing.safetensors" in done.stderr
    lines = done.stdout.splitlines()
    rows = [line for line in lines if line.startswith(("uncalibrated", "calibrated", "train"))]
    assert len(rows) == 3 and "%" in rows[-1] and sum(row.endswith("yes") for row in rows) == 1
    steps = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1].strip(":")) for line in steps] == [4, 6, 7, 8, 10, 11, 12, 14, 15, 16]
    assert all(": loss " in line and ", drift on validation inputs 0." in line for line in steps)
    assert lines[-2:] == ["out/healed", "out/healed-healing.png"]
    assert sorted(path.name for path in (here / "out").iterdir()) == ["healed", "healed-healing.png"]
    whole = invoke(f"{QUICK} -o whole")
    assert [line for line in whole.stdout.splitlines() if line in rows] == rows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return the checkpoint of an interrupted healing of OWN to a folder ``healed``."""

    def interrupt(*_):
        raise KeyboardInterrupt

    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingState, "check", interrupt)
        invoke(f"{OWN} -o {folder / 'healed'}", status=130)
    return (folder / "healed.healing.safetensors").read_bytes()


@pytest.fixture
def interrupted(here, checkpoint):
    path = here / "healed.healing.safetensors"
    path.write_bytes(checkpoint)
    return path


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--func dyisru", "its func is 'dyt', not 'dyisru'"),
        ("--steps 20", "its steps is 6, not 20"),
        ("--no-shift", "its shift is None, not False"),
        ("--weights random", "its weights is 'pretrained', not 'random'"),
    ],
)
def test_the_checkpoint_of_another_healing_is_refused_before_any_work(interrupted, option, sentence):
    before = interrupted.read_bytes()
    printed = words(invoke(f"{OWN} {option} -o healed", status=2).stderr)
    assert printed.startswith(f"loading py:{FACTORIES}:two … Error: healed.healing.safetensors is of another healing")
    assert sentence in printed and "--restart" in printed
    assert interrupted.read_bytes() == before


def test_a_damaged_checkpoint_is_refused_before_any_work(interrupted):
    interrupted.write_bytes(interrupted.read_bytes()[:-4])
    done = invoke(f"{OWN} -o healed", status=4)
    assert "Error: Cannot read the healing" in done.stderr and "--restart" in done.stderr


@pytest.mark.slow
def test_restart_discards_a_checkpoint(interrupted):
    done = invoke(f"{OWN} --func dyisru -o healed --restart")
    assert "discarded healed.healing.safetensors, to begin anew" in words(done.stderr)
    assert "going on" not in done.stderr and not interrupted.exists()


@pytest.mark.usefixtures("here")
def test_an_own_network_is_healed_in_its_own_batches():
    report = document(f"heal py:{FACTORIES}:small --steps 6 -o healed --device cpu --width 3.25")
    assert report["n_held_out"] == 6
    with Image.open("healed-healing.png") as image:
        assert image.width == 650
    refused = invoke(f"heal py:{FACTORIES}:small --steps 6 -o healed --batch-size 4", status=2)
    assert "decides how large its batches are" in refused.stderr


@pytest.mark.slow
def test_a_kept_norm_stays_and_the_other_is_healed(here):
    done = invoke(f"{OWN} --keep 1 -o healed --json")
    (kept,) = json.loads(done.stdout)["keep"]["kept"]
    healed = normscope.load(f"py:{FACTORIES}:two", weights="healed", device="cpu").module
    assert isinstance(healed.get_submodule(kept), torch.nn.LayerNorm)
    assert sum(isinstance(module, normscope.PointwiseFunction) for module in healed) == 1
    assert (here / "healed-keep.png").stat().st_size > 10_000


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("options", "init"), [("--func rmsnorm --steps 6", ""), ("--init theory --minutes 0.02", "theory")]
)
def test_replacements_without_calibration_are_trained(options, init):
    done = invoke(f"heal py:{FACTORIES}:small {options} -o healed --device cpu --json")
    report = json.loads(done.stdout)
    assert list(report["stages"]) == ["trained"] and report["init"] == init
    assert report["checks"][-1]["step"] == report["steps"] >= 6
    assert ("point-wise functions alone are calibrated" in words(done.stderr)) is (init == "")
