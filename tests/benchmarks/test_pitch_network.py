"""The pretrained network that benchmarks take from the package registry is what its makers trained."""

import importlib
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
LOWEST, HIGHEST = 32.7, 1975.5  # Hz, of the first and the last of its pitches, which are as far apart as keys


@pytest.fixture
def pitch_network(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("pitch_network")


def package_of(weights, monkeypatch, pitch_network):
    """Let pip bring a package with these weights, and return how often it did."""
    brought = []

    def download(command):
        brought.append(command[-1])
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
            wheel.writestr("torchfcpe/assets/fcpe_c_v001.pt", weights)
            wheel.writestr("torchfcpe-0.0.4.dist-info/LICENSE", "MIT License")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(pitch_network.subprocess, "run", download)
    return brought


def test_weights_are_fetched_once_with_their_license(pitch_network, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # SHA-256 of "abc", of FIPS 180-2
    monkeypatch.setattr(pitch_network, "SHA256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    brought = package_of("abc", monkeypatch, pitch_network)
    path = pitch_network.fetched()
    assert path == pitch_network.fetched() and brought == ["torchfcpe==0.0.4"]
    assert path.read_text() == "abc" and path.with_name("LICENSE").read_text() == "MIT License"


def test_other_weights_are_refused_and_not_kept(pitch_network, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    package_of("others", monkeypatch, pitch_network)
    with pytest.raises(SystemExit, match=r"fcpe_c_v001\.pt is not that of torchfcpe==0\.0\.4"):
        pitch_network.fetched()
    assert not list(tmp_path.rglob("*.pt"))


def test_a_package_that_pip_does_not_bring_is_said_in_a_sentence(pitch_network, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pitch_network.subprocess, "run", lambda command: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match=r"pip cannot download torchfcpe==0\.0\.4\."):
        pitch_network.fetched()


@pytest.mark.slow
def test_it_hears_the_pitch_of_tones(pitch_network):
    """Truth from outside: the frequency of the tone. A wrong layer, weight or band of the spectrum moves it."""
    if not pitch_network.cached().is_file():
        pytest.skip("python benchmarks/calibration.py --models torchfcpe has not been run")
    pytest.importorskip("torchaudio", exc_type=Exception)
    network, learned, held_out = importlib.import_module("calibration").inputs_of("torchfcpe", 2)
    assert len(learned) == len(held_out) == 2
    assert not {batch.samples[0].source for batch in learned} & {batch.samples[0].source for batch in held_out}
    pitches = LOWEST * (HIGHEST / LOWEST) ** torch.linspace(0, 1, pitch_network.PITCHES)
    seconds = torch.arange(16_000) / 16_000
    for frequency in (110.0, 220.0, 441.0, 880.0):
        tone = 0.2 * sum(torch.sin(2 * torch.pi * n * frequency * seconds) / n for n in range(1, 9))
        with torch.no_grad():
            likelihoods = network.module(pitch_network.log_mel(tone[None]))[0]
        heard = pitches[likelihoods.argmax(1)].median()
        # Its pitches are 20 cents apart, or 1.1 %.
        assert heard.item() == pytest.approx(frequency, rel=0.011)
        assert likelihoods.max(1).values.median() > 0.9
