"""Mistakes of a user: a status, a sentence with the remedy, and nothing run or written."""

import shlex
from pathlib import Path

import pytest
import torch
from command_line import invoke, words
from torch import nn
from typer.testing import CliRunner

import normscope
from normscope.cli import app
from normscope.swaps.store.store import save_swapped

FACTORIES = Path(__file__).with_name("factories.py")
DRAWING = (
    "plot",
    "fit",
    "stats",
    "curves",
    "gradient",
    "compare",
    "swap demo_vit -o new",
    "heal demo_vit -o new",
    "swap-bench",
)
# Command lines with their exit status and a part of the sentence.
MISTAKES = [
    ("plott", 2, "plot"),
    ("plot --wieghts random", 2, "--weights"),
    ("plot --limit 0", 2, "0 is not at least 1."),
    ("plot --dpi 19", 2, "19 is not from 20 to 1200."),
    ("plot --seed 9223372036854775808", 2, "9223372036854775808 is not from -9223372036854775808"),
    ("plot --batch-size many", 2, "'--batch-size': 'many' is not a whole number."),
    ("plot --width 14cm", 2, "'--width': '14cm' is not a number of inches."),
    ("heal demo_vit -o new --minutes five", 2, "'five' is not a number."),
    ("plot --sample 3 --workers=2", 2, "plot has no --sample and --workers; `normscope capture` has"),
    (
        "fit demo_vit --device-map auto",
        2,
        "fit has no --device-map; `normscope capture` has, and writes a file that fit",
    ),
    ("plot --data ''", 2, "'--data': it is empty; name a file or a folder."),
    ("plot -o ''", 2, "'--output' / '-o': it is empty; name a file or a folder."),
    ("curves --plot -", 2, "'--plot': streams are not supported; name a file or a folder."),
    ("plot demo_vit --weights ''", 2, "weights is an empty path. Name a file or a folder, or leave it out."),
    ("plot demo_vit --weights notes.txt", 3, "is damaged, no file of weights, or contains Python objects besides"),
    ("plot demo_vit --dtype ''", 2, "There is no dtype ''."),
    ("capture demo_vit -o new --checkpoint-every nan", 2, "nan is not at least 0 seconds."),
    *((f"{command} --width 1", 2, "1.0 is not from 2 to 100 inches") for command in DRAWING),
    # models, data and devices
    ("plot demo_vitt", 3, "There is no model 'demo_vitt'. Did you mean 'demo_vit' or 'demo_dit'?"),
    ("plot --data nowhere", 4, "There is no file or folder 'nowhere'"),
    ("plot --data empty", 4, "contains no image"),
    ("plot --data broken", 4, "can be read as an image"),
    ("plot py:nowhere.py:make", 4, "There is no file 'nowhere.py' to take a function from"),
    ("timeline nowhere.jsonl", 4, "Cannot read nowhere.jsonl"),
    ("plot empty", 3, "'empty' is a folder. Name the library of its model, transformers:empty"),
    (f"plot py:{FACTORIES}:overflowing", 4, "All tokens at 1 norm site"),
    ("plot --device cuda:7", 5, "The device 'cuda:7' is not available: "),
    ("plot --device tpu", 2, "There is no device 'tpu'"),
    (
        "capture demo_vit --guidance 4 -o seen.safetensors",
        2,
        "demo_vit is no diffusion model: guidance can have no effect on it.",
    ),
    ("fit demo_vit --by timestep", 2, "demo_vit has no timesteps to keep apart; diffusion models have."),
    ("fit demo_vit --by timestp", 2, "There is no part 'timestp'. Did you mean 'timestep'?"),
    # captures
    ("plot nowhere.safetensors", 4, "There is no capture file nowhere.safetensors"),
    ("plot cut.safetensors", 4, "cut.safetensors: it is incomplete, damaged, or no safetensors file"),
    ("plot notes.txt", 4, "Cannot read the capture notes.txt"),
    ("plot seen.safetensors --limit 3 --seed 1", 2, "--limit, --seed can have no effect"),
    ("capture seen.safetensors -o b.safetensors", 2, "seen.safetensors names a file, not a model."),
    ("layers demo_vit notes.txt", 2, "`compare` and `report` take captures"),
    ("swap demo_vit.safetensors -o new", 2, "names a file, not a model"),
    ("compare seen.safetensors", 2, "two or more captures"),
    (
        "merge seen.safetensors ./seen.safetensors -o new",
        4,
        "seen.safetensors and ./seen.safetensors: both hold sample",
    ),
    ("merge seen.safetensors no.safetensors -o new", 4, "Cannot read the capture no.safetensors: No such file or"),
    # what is written
    ("capture demo_vit", 2, "--output"),
    ("capture demo_vit -o notes.txt", 2, "Cannot write notes.txt: it exists, and is not a capture."),
    ("heal demo_vit -o new --device-map auto", 2, "heal takes a network on one device; leave --device-map out"),
    ("swap-bench demo_vit --device-map auto --quick", 2, "Under --device-map nothing is timed: leave --quick out."),
    ("swap demo_vit -o new --init calibrated --device-map auto", 2, "--init calibrated takes a network on one device;"),
    ("fit demo_vit --columns ''", 2, "There is no column ''. There are: "),
    ("fit demo_vit --layers least:3", 2, "least:3 is for `normscope swap` and `swap-bench`"),
    ("fit mynets.py", 2, "py:mynets.py:FUNCTION names a function in it"),
    ("capture demo_vit -o new.csv", 2, "new.csv ends in .csv, but a capture's file ends in .safetensors"),
    ("fit demo_vit --columns site,alhpa", 2, "There is no column 'alhpa'. Did you mean 'alpha'?"),
    ("fit demo_vit -o notes.txt/below.csv", 2, "Cannot write notes.txt/below.csv"),
    *(
        (f"{command} -o t.txt", 2, "--output t.txt ends in .txt, but a result's")
        for command in ("fit demo_vit", "models")
    ),
    *(
        (f"{command} -o new/a.gif", 2, "--output new/a.gif ends in .gif, but a figure's file ends in one of")
        for command in ("plot demo_vit", "gradient demo_vit", "swap-bench demo_vit", "compare demo_vit demo_dit")
    ),
    ("plot demo_vit -o notes", 2, "Cannot write notes/demo_vit-scurves.png: Not a directory"),
    ("plot --format gif", 2, "There is no figure format 'gif'."),
    ("plot -o x.png --format pdf", 2, "ends in .png, but --format asks for pdf"),
    ("plot demo_vit vit_b16 -o x.png", 2, "is one file, but each model has a figure. Name a folder."),
    ("plot demo_dit --by timestep -o x.png", 2, "is one file, but each timestep has a figure. Name a folder."),
    ("swap-bench demo_vit -o one.PDF", 2, "one.PDF is one file, but each model has two. Name a folder."),
    *((f"{command} --plot new.txt", 2, "--plot new.txt ends in .txt, but") for command in ("fit", "stats", "curves")),
    ("fit seen.safetensors seen.safetensors --plot new.png", 2, "each model has a figure"),
    ("fit seen.safetensors --per channel --plot new.png", 2, "--plot draws the fits of each site by itself"),
    ("plot --color tokens", 2, "There is no colouring 'tokens'. Did you mean 'token'?"),
    ("plot --style drak", 2, "There is no style 'drak'. Did you mean 'dark'?"),
    ("plot seen.safetensors --xscale log", 2, "no scale of x 'log'"),
    ("report demo_vit -o page.pdf", 2, "its file ends in .html"),
    ("report demo_vit --swap-bench missing.json", 4, "Cannot read missing.json"),
    # sites and fits
    ("plot --layers blocks.0.norm3", 2, "There is no norm site 'blocks.0.norm3'. Did you mean"),
    ("fit demo_vit --layers 0", 2, "at least 1, not 0. The norm site with the number 0 is '0-0'"),
    ("fit demo_vit --layers 99", 2, "The number of layers is 99, but there are 17 norm sites; 'all' takes all."),
    ("stats demo_vit --layers qk", 2, "No norm here is qk; there are final, pre-norm."),
    ("plot --func 'x/(1+abs(y))'", 2, "A formula needs a name, such as 'mine=x/(1+abs(y))'. The formula"),
    ("compare seen.safetensors seen.safetensors --func best", 2, "another at every site"),
    ("fit --per tokens", 2, "There is no level 'tokens'. Did you mean 'token'?"),
    *(
        (f"fit --per token {option}", 2, "--per token fits no curve")
        for option in ("--func isru", "--pool all", "--weights-by x", "--amplitude theory", "--theory", "--alpha 1")
    ),
    ("fit seen.safetensors --weights-by gamma", 4, "by_gamma=True"),
    ("gradient seen.safetensors", 4, "normscope capture --diagonal"),
    # swaps
    ("swap demo_vit -o new --func dytt", 2, "There is no replacement 'dytt'. Did you mean 'dyt'"),
    ("swap demo_vit -o new --func gelu", 2, "derf, free, best, rmsnorm, NAME=FORMULA."),
    ("fit demo_vit --func gelu", 2, "free, best, all, NAME=FORMULA."),
    ("swap demo_vit -o new --func free --init paper", 2, "free is what was fitted: there is no paper start of it"),
    ("swap demo_vit -o new --func best --per channel", 2, "--per channel fits one curve in each channel"),
    ("swap demo_vit -o new --shift --init theory", 2, "leave --shift and --no-shift out"),
    ("swap demo_vit -o full", 2, "the folder exists, and mine in it would be lost"),
    ("swap demo_vit -o .", 2, "the folder that this runs in"),
    ("swap-bench demo_vit --sites=least:many", 2, "least:8 takes the eight least harmful"),
    ("swap-bench demo_vit --sites least:18", 2, "asks for more norms than there are: 17"),
    (f"swap-bench py:{FACTORIES}:groups --func rmsnorm --device cpu", 3, "rmsnorm cannot take the place of"),
    ("swap-bench demo_vit --init best", 2, "There is no initialization 'best'"),
    ("swap demo_vit -o new --func rmsnorm --init calibrated", 2, "There is no calibrated start of rmsnorm"),
    ("swap demo_vit -o new --refit norms", 2, "--refit norms is what --init calibrated may change"),
    ("swap demo_vit -o new --keep 2 --max-drift 0.1", 2, "give one of them"),
    ("swap demo_vit -o new --keep 0", 2, "'--keep': 0 is not at least 1."),
    ("swap demo_vit -o new --keep 17 --limit 8", 2, "--keep 17 leaves nothing to swap: there are 17 norms"),
    ("swap demo_vit -o new --max-drift -1", 2, "'--max-drift': -1.0 is not at least 0."),
    ("swap demo_vit -o new --keep 2 --layers least:4", 2, "--layers least:4 and --keep both choose norms"),
    ("swap-bench demo_vit --quick --full", 2, "leave --full out"),
    ("swap-bench demo_vit --weights swapped", 2, "a swap leaves 17 point-wise functions"),
    ("heal demo_vit -o new --minutes -1", 2, "minutes has to be a time above 0, not -1.0."),
    ("heal demo_vit -o new --minutes 2 --steps 9", 2, "9 steps and 2.0 minutes are two lengths of one training"),
    ("heal demo_vit -o new --train norm", 2, "There is no set of trained weights 'norm'. Did you mean 'norms'"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.randn(4, 8)])
    normscope.save_capture(seen, folder / "seen.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "seen.safetensors").read_bytes()[:4000])
    for name in ("empty", "broken", "full"):
        (folder / name).mkdir()
    (folder / "broken" / "a.png").write_bytes(b"no image")
    for name in ("notes.txt", "notes", "full/mine"):
        (folder / name).write_text("not a capture")
    network = normscope.load("demo_vit")
    normscope.swap(network.module, "dyt", normscope.find_norms(network).sites, init="paper")
    save_swapped(network.module, folder / "swapped", network.about)
    return folder


@pytest.mark.parametrize(("command", "status", "sentence"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistakes_end_with_a_sentence_and_a_status(folder, monkeypatch, command, status, sentence):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    done = CliRunner().invoke(app, shlex.split(command))  # in this process: starting so many takes minutes
    assert done.exit_code == status, done.stderr
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
    assert isinstance(done.exception, SystemExit)  # and not the traceback that anything else would end in
    assert done.stdout.count("\n") <= 1, "more than a heading"
    assert "held-out digits" not in done.stderr, "a network was run for nothing"
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("swap demo_vit -o new --keep 2", "Norms to keep are chosen in one process"),
        ("swap demo_vit -o new --init calibrated", "Calibration runs in one process, and torchrun started 2"),
        ("swap-bench demo_vit --init calibrated", "Calibration runs in one process, and torchrun started 2"),
        ("heal demo_vit -o new", "torchrun started 2"),
    ],
)
def test_work_that_ranks_cannot_divide_is_refused(tmp_path, command, sentence):
    ranks = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    done = invoke(command, status=2, cwd=tmp_path, **ranks)
    assert sentence in words(done.stderr)
    assert "samples" not in done.output and not list(tmp_path.iterdir())


def test_a_folder_with_a_dot_takes_figures(folder):
    (folder / "version.two").mkdir()
    invoke("plot seen.safetensors --dpi 30 -o version.two", cwd=folder)
    assert len(list((folder / "version.two").iterdir())) == 1
