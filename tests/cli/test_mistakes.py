"""What a user gets wrong: a status, a sentence that says what to do, and nothing run or written for nothing."""

import os

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import normscope
from normscope.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    seen = normscope.capture(nn.Sequential(nn.LayerNorm(8)), [torch.randn(4, 8)])
    normscope.save_capture(seen, folder / "seen.safetensors")
    (folder / "seen-raw").mkdir()
    return folder


MISTAKES = [
    (["plot", "demo_vitt"], 3, "There is no model 'demo_vitt'. Did you mean 'demo_vit' or 'demo_dit'?"),
    (["plot", "--func", "thanh"], 2, "There is no curve 'thanh'. Did you mean 'tanh'"),
    (["plot", "--layers", "blocks.0.norm3"], 2, "There is no norm site 'blocks.0.norm3'. Did you mean"),
    (["plot", "--color", "tokens"], 2, "There is no colouring 'tokens'. Did you mean 'token'?"),
    (["plot", "--style", "drak"], 2, "There is no style 'drak'. Did you mean 'dark'?"),
    (["plot", "--format", "gif"], 2, "There is no figure format 'gif'."),
    (["plot", "-o", "x.png", "--format", "pdf"], 2, "ends in .png, but --format asks for pdf"),
    (["plot", "demo_vit", "vit_b16", "-o", "x.png"], 2, "is one file, but there are 2 models"),
    (["plot", "--limit", "0"], 2, "0 is not at least 1."),
    (["plot", "--wieghts", "random"], 2, "--weights"),
    (["fit", "--per", "tokens"], 2, "There is no level 'tokens'. Did you mean 'token'?"),
    *[
        (["fit", "--per", "token", *option], 2, "--per token fits no curve")
        for option in (
            ["--func", "isru"],
            ["--pool", "all"],
            ["--weights-by", "x"],
            ["--amplitude", "theory"],
            ["--theory"],
            ["--alpha", "1"],
            ["--no-shift"],
        )
    ],
    (["plott"], 2, "plot"),
    (["plot", "--data", "nowhere"], 4, "There is no file or folder 'nowhere'"),
    (["plot", "--data", "empty"], 4, "holds no image"),
    (["plot", "--data", "broken"], 4, "can be read as an image"),
    (["plot", "--weights", "nowhere.safetensors"], 3, "There is no weights file"),
    (["plot", "--device", "cuda:7"], 5, "There is no device 'cuda:7'"),
    (["plot", "demo_vit", "--guidance", "4"], 2, "demo_vit is no diffusion model: guidance can have no effect on it."),
    (["fit", "demo_vit", "--by", "timestep"], 2, "demo_vit has no timesteps to keep apart; diffusion models have."),
    (["fit", "demo_vit", "--by", "timestp"], 2, "There is no part 'timestp'. Did you mean 'timestep'?"),
    (["plot", "demo_dit", "--by", "timestep", "-o", "x.png"], 2, "is one file, but --by timestep draws a figure"),
    (["plot", "--device", "tpu"], 2, "There is no device 'tpu'"),
    (["plot", "--dtype", "float8"], 2, "There is no dtype 'float8'"),
    (["plot", "nowhere.safetensors"], 4, "There is no capture file nowhere.safetensors"),
    (
        ["plot", "cut.safetensors"],
        4,
        "cut.safetensors: it is incomplete: it has 4,000 bytes, and its header promises",
    ),
    (["plot", "notes.txt"], 4, "Cannot read the capture notes.txt"),
    (["plot", "seen.safetensors", "--limit", "3"], 2, "--limit can have no effect"),
    (["fit", "seen.safetensors", "--sample", "3"], 2, "--sample can have no effect"),
    (["fit", "demo_vit", "--sample", "0"], 2, "0 is not at least 1."),
    (["capture", "demo_vit", "-o", "notes.txt/below.safetensors"], 2, "Cannot write"),
    (["capture", "demo_vit", "-o", "seen.safetensors", "--raw"], 2, "seen-raw exists already"),
    (["capture", "demo_vit"], 2, "--output"),
    (["fit", "demo_vit", "-o", "notes.txt/below.json"], 2, "Cannot write notes.txt/below.json"),
    (["fit", "demo_vit", "--json", "--csv"], 2, "--json and --csv both take all of stdout. Give one"),
    (["models", "--csv", "--json"], 2, "--json and --csv both take all of stdout."),
    (["fit", "demo_vit", "-o", "notes.txt/below.csv"], 2, "Cannot write notes.txt/below.csv"),
    (["fit", "demo_vit", "-o", "notes.txt/below.parquet"], 2, "Cannot write notes.txt/below.parquet"),
    (["plot", "demo_vit", "-o", "fifo.png"], 2, "Cannot write fifo.png: it exists, and is no regular file"),
    *[
        (
            [*command, "-o", name],
            2,
            f"--output {name} ends in {suffix}, but a figure's file ends in one of .png, .svg, .pdf.",
        )
        for command in (["plot", "demo_vit"], ["gradient", "demo_vit"], ["swap-bench", "demo_vit"])
        for name, suffix in (("x.html", ".html"), ("new/a.gif", ".gif"), ("notes.txt", ".txt"))
    ],
    (["compare", "demo_vit", "demo_dit", "-o", "x.html"], 2, "--output x.html ends in .html, but a figure's file ends"),
    (["plot", "demo_vit", "-o", "notes"], 2, "Cannot write notes/demo_vit-scurves.png: Not a directory"),
    *[
        ([*command, "0"], 2, "at least 1, not 0. To name the norm site with the number 0, add a comma: '0,'.")
        for command in (["fit", "demo_vit", "--layers"], ["swap", "demo_vit", "-o", "swapped", "--sites"])
    ],
    *[
        ([*command, "-o", name], 2, f"--output {name} ends in {suffix}, but a result's file ends in .csv, .parquet,")
        for command in (["fit", "demo_vit"], ["stats", "demo_vit"], ["layers", "demo_vit"], ["models"])
        for name, suffix in (("t.txt", ".txt"), ("new/t.html", ".html"))
    ],
    (["fit", "demo_vit", "demo_vitt"], 3, "There is no model 'demo_vitt'. Did you mean"),
    (["fit", "demo_vit", "nowhere.safetensors"], 4, "There is no capture file nowhere.safetensors"),
    (["capture", "seen.safetensors", "-o", "b.safetensors"], 2, "seen.safetensors names a file, not a model."),
    (["layers", "demo_vit", "notes.txt"], 2, "`gradient` and `compare` take captures"),
    (["plot", "--seed", str(2**63)], 2, "9223372036854775808 takes more than 64 bits"),
    (["plot", "--seed", str(-(2**63) - 1)], 2, "'--seed'"),
    (["plot", "--limit", str(2**64)], 2, "'--limit'"),
    (["plot", "--batch-size", str(2**63)], 2, "'--batch-size'"),
    (["capture", "demo_vit", "-o", "new", "--checkpoint-every", "nan"], 2, "nan is no number of seconds."),
    (["plot", "--batch-size", "0"], 2, "'--batch-size': 0 is less than 1."),
    (["plot", "--batch-size", "many"], 2, "'--batch-size': 'many' is neither a number nor auto."),
    (["plot", "--data", ""], 2, "--data is empty; name a file or a folder."),
    (["stats", "no_such_model"], 3, "no_such_model"),
    (["gradient", "demo_vit", "--style", "dusk"], 2, "There is no style 'dusk'"),
    (["gradient", "demo_vit", "demo_dit", "-o", "a.png"], 2, "Name a folder"),
    (["gradient", "demo_vit", "--by", "timestep"], 2, "has no timesteps"),
    (["compare", "seen.safetensors"], 2, "two or more captures"),
    (["compare", "demo_vit"], 2, "two or more captures"),
    (["compare", "seen.safetensors", "seen.safetensors", "--func", "best"], 2, "another at every site"),
    (["compare", "seen.safetensors", "demo_vit", "--style", "drak"], 2, "no style 'drak'"),
    (["compare", "seen.safetensors", "demo_vit", "-o", "a.png", "--format", "pdf"], 2, "--format asks for pdf"),
    (["report", "missing.safetensors"], 4, "There is no capture file missing.safetensors"),
    (["report", "demo_vit", "-o", "page.pdf"], 2, "its file ends in .html"),
    (["report", "demo_vit", "-o", "/dev/null/page.html"], 2, "/dev/null"),
    (["report", "demo_vit", "--func", "nothing"], 2, "nothing"),
    (["report", "demo_vit", "--swap-bench", "missing.json"], 4, "Cannot read missing.json"),
]


@pytest.mark.parametrize(("arguments", "status", "sentence"), MISTAKES, ids=lambda value: str(value)[:50])
def test_mistakes_give_their_status_and_a_sentence(folder, monkeypatch, arguments, status, sentence):
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "a.png").write_bytes(b"no image")
    for name in ("notes.txt", "notes"):
        (folder / name).write_text("not a capture")
    (folder / "cut.safetensors").write_bytes((folder / "seen.safetensors").read_bytes()[:4000])
    if not (folder / "fifo.png").exists():
        os.mkfifo(folder / "fifo.png")
    before = sorted(folder.rglob("*"))
    done = CliRunner().invoke(app, arguments)  # in this process: starting so many takes minutes
    assert done.exit_code == status, done.stderr
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
    assert isinstance(done.exception, SystemExit)  # and not the traceback that anything else would end in
    assert done.stdout == ""
    assert "held-out digits" not in done.stderr, "a network was run for nothing"
    assert sorted(folder.rglob("*")) == before


def test_a_folder_with_a_dot_takes_figures(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "version.two").mkdir()
    done = CliRunner().invoke(app, ["plot", "seen.safetensors", "--dpi", "30", "-o", "version.two"])
    assert done.exit_code == 0, done.output
    assert len(list((folder / "version.two").iterdir())) == 1
