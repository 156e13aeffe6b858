"""Weights and swaps that something changed: a sentence, or weights that are named by another sha256; no code is run."""

import importlib
import warnings
from pathlib import Path

import pytest


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("mutations")


@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.faults)])
@pytest.mark.parametrize("kind", ["weights", "swaps"])
def test_no_mutated_file_is_mistaken_for_another(mutations, kind, number):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of pickle protocols that there are not
        counts = getattr(mutations, f"mutated_{kind}")(number, seed=7)
    assert counts.keys() <= mutations.FINE, counts
    assert sum(counts.values()) == number
    assert counts[mutations.REFUSED] > 0.8 * number


def test_the_counter_sees_code_that_is_run(mutations, monkeypatch):
    """A reader that unpickles everything is what it is there for."""
    import timm.models
    import torch

    careful = timm.models.load_state_dict

    def trusting(path, weights_only):
        if path.endswith(".safetensors"):
            return careful(path)
        state = torch.load(path, weights_only=False)
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}

    monkeypatch.setattr(timm.models, "load_state_dict", trusting)
    counts = mutations.mutated_weights(80, seed=7)
    assert counts["SystemExit: code was run"] > 0
