"""The benchmarks run, and what they write holds its raw samples; their numbers are no business of a test."""

import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import timm
import torch

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"
STARNETS = timm.list_models(module="starnet")


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """Run a benchmark within this process, which has imported already, and return its samples."""
    monkeypatch.syspath_prepend(FOLDER)
    threads = torch.get_num_threads()

    def samples_of(name, *arguments):
        module = importlib.import_module(name)
        # One asks Triton for its interpreter, which only a new process can; the other says that there is a GPU.
        if name not in ("accuracy", "compiled_bytes"):
            monkeypatch.setattr(module, "in_own_process", lambda run, *given, threads: run(*given), raising=False)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--repeats", "1", "--results", str(tmp_path), *arguments])
        module.main()
        (path,) = tmp_path.glob(f"{name}-*.json")
        assert path.name in capsys.readouterr().out.replace("\n", "")
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["benchmark"] == name and record["machine"]["cores"] >= 1 and record["versions"]["torch"]
        samples = {}
        for one in record["measurements"]:
            samples[one["case"], one["way"], one["quantity"]] = one["samples"]
            assert all(isinstance(value, float) for value in one["samples"])
        return samples

    with mock.patch.dict(os.environ):
        yield samples_of
    torch.set_num_threads(threads)


def test_capture(measured):
    options = ("--models", "demo_vit", "--threads", "1", "--batches", "3", "--without", "nnsight,torchlens")
    samples = measured("capture", *options)
    seconds, inside, percent = (
        samples["demo_vit, 1 thread", "normscope", name]
        for name in ("pass", "in the hooks", "in the hooks, of the rest")
    )
    assert len(seconds) == 1
    for whole, within, share in zip(seconds, inside, percent, strict=True):
        assert 0 < within < whole
        assert share == pytest.approx(100 * within / (whole - within))
    assert len(samples["demo_vit, 3 batches of one sample", "normscope", "peak"]) == 3


def test_fit(measured, monkeypatch):
    monkeypatch.setattr(importlib.import_module("fit"), "IN_A_ROW", 2)
    samples = measured("fit", "--pairs", "40000", "--sites", "2", "--without", "lmfit")
    for curve in ("tanh", "isru"):
        assert samples[curve, "scipy curve_fit", "curve_fit takes"] == [1.0]
        for way, sites in (("search of 2 sites", 2), (".fit of 2 sites", 2), (".fit of one site", 1)):
            way = f"normscope{'' if way.startswith('.') else ', '}{way}"
            assert len(samples[curve, way, "a site"]) == 1
            for quantity in ("α off by", "RMSE off by"):
                off = samples[curve, way, quantity]
                assert len(off) == sites and max(off) < 1e-3
        assert max(samples[curve, "normscope.fit of 2 sites", "RMSE as told off by"]) < 1e-4
    own, peer = (samples["isru", way, "a site"] for way in ("normscope.fit of one site", "scipy curve_fit"))
    assert samples["isru", "normscope.fit of one site", "curve_fit takes"] == [pytest.approx(peer[0] / own[0])]
    assert len(samples["isru", "normscope.fit of 2 sites", "C off by"]) == 2
    assert ("tanh", "normscope.fit of 2 sites", "C off by") not in samples
    assert not any(way == "lmfit" for _, way, _ in samples)


def test_channels(measured):
    sizes = ("--sites", "2", "--channels", "96", "--tokens", "400", "--threads", "1")
    samples = measured("channels", *sizes)
    case = "2 sites, 1 thread"
    for way in ("normscope.fit", "scipy curve_fit"):
        (whole,) = samples[case, way, "all"]
        assert samples[case, way, "a site and curve"] == [pytest.approx(1000 * whole / 4)]
    for curve in ("tanh", "isru"):
        off = samples[f"{curve}, 16 channels", "normscope.fit", "RMSE off by"]
        assert len(off) == 16 and max(off) < 1e-3


def test_intervals(measured):
    sizes = ("--sources", "16", "--truth", "2000", "--repeats", "10")
    samples = measured("intervals", *sizes)
    for curve in ("tanh", "isru"):
        case = f"{curve}, spread 0.7, 16 sources"
        for way in ("normscope", "scipy curve_fit"):
            assert samples[case, way, "α tried"] == [10.0]
            (hits,) = samples[case, way, "α held"]
            assert samples[case, way, "α"] == [pytest.approx(10 * hits)]
        assert samples[case, "normscope", "α held"][0] > samples[case, "scipy curve_fit", "α held"][0]
        assert 0 < samples[case, "normscope", "R² true"][0] < 1
        assert (case, "scipy curve_fit", "R²") not in samples


def test_figure(measured, monkeypatch):
    monkeypatch.setattr(importlib.import_module("figure"), "DPI", 30)
    samples = measured("figure", "--pairs", "40000", "--scatter-up-to", "40000")
    own = samples["39,936 pairs", "normscope, all rows", "draw and write"]
    empty = samples["nothing", "empty, all rows", "draw and write"]
    found = samples["39,936 pairs", "normscope, all rows", "of an empty figure of the same axes"]
    assert found == [a / b for a, b in zip(own, empty, strict=True)]


@pytest.mark.skipif(not shutil.which("chromedriver"), reason="no chromedriver is installed (Debian: chromium-driver)")
def test_page(measured):
    samples = measured("page", "--models", "demo_vit")
    page = {quantity: own for (_, way, quantity), own in samples.items() if way == "page"}
    assert 0 < page["usable"][0] < page["painted"][0] and page["loaded, as its driver is told"][0] > 0
    assert page["both"] == [page["fits"][0] + page["written"][0]]
    each = page["R² of each fit off by"]
    assert len(each) == 17 * 3 and page["R² off by"] == [max(each)] and max(each) < 1e-9
    answers = {way: own for (_, way, quantity), own in samples.items() if quantity == "answers after"}
    assert len(answers["by density"]) == 3 == len(answers["a step of the explorer's slider of α"])
    assert len(answers) == 17 and all(one > 0 for own in answers.values() for one in own)


def test_commands(measured, monkeypatch):
    module = importlib.import_module("commands")
    monkeypatch.setattr(module, "PEER", "import numpy")
    monkeypatch.setattr(module, "CAPTURES", ())
    monkeypatch.setattr(module, "COMMANDS", ("--help",))
    monkeypatch.setattr(module, "LONG", "models")
    monkeypatch.setattr(module, "TABLE", "model")
    samples = measured("commands", "--without", "torch,torchaudio,diffusers,transformers,matplotlib")
    peer, own = (samples["", way, "from start to exit"][0] for way in ("import numpy", "normscope --help"))
    assert samples["", "normscope --help", "of import numpy"] == [pytest.approx(own / peer)]
    to_first, to_exit = (
        samples["", "normscope models", f"{end}"][0] for end in ("to the first table", "from start to exit")
    )
    assert 0 < to_first < to_exit
    assert not any("torch" in way for _, way, _ in samples)


def test_a_missing_peer_is_said_in_a_sentence(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    common = importlib.import_module("common")
    peers = ("numpy", "no_such_library")
    parser = common.options("", repeats=1, peers=peers)
    sentence = (
        "no_such_library is not installed. Run pip install -e '.[bench]', or leave it out: --without no_such_library"
    )
    with pytest.raises(SystemExit) as refusal:
        common.peers_left(parser, parser.parse_args([]), peers)
    assert refusal.value.code == sentence
    assert common.peers_left(parser, parser.parse_args(["--without", "no_such_library"]), peers) == ["numpy"]


def test_only_peers_can_be_left_out(measured, capsys):
    with pytest.raises(SystemExit, match="2"):
        measured("fit", "--without", "lmfti")
    assert "there is no peer 'lmfti' to leave out; the peers are scipy, lmfit" in capsys.readouterr().err


def test_prenorm(measured, monkeypatch, tmp_path):
    decoder = importlib.import_module("decoder")
    monkeypatch.setattr(sys, "argv", ["decoder.py", "--folder", str(tmp_path), "--name", "gpt2-128", "--steps", "2"])
    decoder.main()
    asked = ("--folder", str(tmp_path), "--models", "gpt2-128", "--texts", "16", "--minutes", "0.2")
    samples = measured("prenorm", *asked)
    assert samples["gpt2-128", "original", "KL"] == [0.0] * 96
    assert samples["gpt2-128", "original", "top-1"] == [100.0]
    # After two steps no token is much likelier than any other of the 8,192.
    assert 2000 < samples["gpt2-128", "original", "perplexity"][0] < 9000
    for way in ("fitted", "calibrated", "calibrated, two kept", "healed"):
        assert min(samples["gpt2-128", way, "KL"]) > 0


def test_healing(measured):
    asked = ("--models", "demo_vit", "--steps", "12", "--limit", "64", "--trains", "all,norms", "--ablations")
    samples = measured("healing", *asked)
    for train in ("all", "norms", "all, weight and α as they are", "all, the output alone"):
        found = {name: own[0] for (_, way, name), own in samples.items() if way == f"dyt, {train}"}
        left = min(found[f"drift, {stage}"] for stage in ("start", "calibrated", "trained"))
        assert found["closed"] == pytest.approx(100 * (1 - left / found["drift, start"])) and found["closed"] > 0
        assert found["training"] == 12 and found["drift, check 6 of 12"] > 0
        assert 0 < found["CPU until check 3 of 12"] < found["CPU until check 9 of 12"] < found["CPU"]
    ends = [
        samples["demo_vit, 12 steps", way, "drift, check 6 of 12"][0]
        for _, way, _ in samples
        if way.startswith("dyt, all")
    ]
    assert len(set(ends)) == 3  # each ablation does something


def test_calibration_stands_beside_what_was_measured_with_norms_kept(measured):
    asked = ("calibration", "--models", "demo_vit", "--curves", "dyt", "--limit", "48")
    before = measured(*asked)
    closed = {way: before["demo_vit", f"dyt, {way}", "closed"][0] for way in ("fit", "norms", "neighbours")}
    assert closed["fit"] == 0 < closed["norms"] < closed["neighbours"]
    for way, share in closed.items():
        # Of an even number of inputs torch takes the lower of the two in the middle.
        left, start = (
            statistics.median_low(before["demo_vit", f"dyt, {case}", "relative L2"]) for case in (way, "fit")
        )
        assert share == pytest.approx(100 * (1 - left / start))
    after = measured(*asked, "--keep", "2")
    assert {key: own for key, own in after.items() if key in before} == before
    new = after.keys() - before.keys()
    assert {way for _, way, _ in new} == {"dyt, fit, 2 norms kept", "dyt, neighbours, 2 norms kept"}
    closed = {way: after["demo_vit", way, "closed"][0] for _, way, name in after if name == "closed"}
    assert closed["dyt, fit"] == 0 < closed["dyt, fit, 2 norms kept"]
    assert closed["dyt, neighbours"] < closed["dyt, neighbours, 2 norms kept"] < 100
    assert after["demo_vit", "dyt, neighbours, 2 norms kept", "CPU of the choice"][0] > 0


def test_docstrings_are_a_line_each_and_always_the_same(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    docstrings = importlib.import_module("calibration").docstrings
    texts = docstrings(["textwrap", "calendar"])
    assert texts == docstrings(["textwrap", "calendar"]) and len(set(texts)) == len(texts) > 10
    assert all(60 <= len(text) <= 800 and "\n" not in text for text in texts)


def test_a_conversion_learns_from_files_by_module_and_judges_by_whole_docstrings(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    conversion = importlib.import_module("conversion")
    conversion.written_texts(tmp_path / "texts", 50)
    lines = {path.stem: path.read_text().splitlines() for path in (tmp_path / "texts").iterdir()}
    assert len({line for own in lines.values() for line in own}) == sum(map(len, lines.values())) == 50
    assert set(lines["ast"]) <= set(importlib.import_module("calibration").docstrings(["ast"]))
    said = (
        "Return the larger of two numbers, or the first. Both are compared as they are, without a conversion to float."
    )
    assert conversion.first_and_rest(said) == tuple(said.split(". ", 1)[n] + ("." if n == 0 else "") for n in (0, 1))
    assert conversion.first_and_rest(said.partition(".")[0]) is None


def test_swaps(measured):
    samples = measured("swaps", "--models", "demo_vit", "--limit", "2")
    for func in ("dyt", "dyisru", "derf"):
        moved = {init: samples["demo_vit", f"{func}, {init}", "relative L2"] for init in ("fit", "paper")}
        assert all(len(own) == 2 for own in moved.values())
        (share,) = samples["demo_vit", f"{func}, fit", "of paper's"]
        assert share == pytest.approx(100 * sum(moved["fit"]) / sum(moved["paper"]))  # of two, the median is the mean
    assert samples["demo_vit", "rmsnorm", "relative L2"] < samples["demo_vit", "identity", "relative L2"]


def test_speed(measured):
    samples = measured("speed", "--models", "demo_vit", "--seconds", "0", "--threads", "1")
    case = "demo_vit, the whole network (1×1×8×8), forward"
    assert samples[case, "native, eager", "time"][0] > 0
    assert samples[case, "native, eager", "of native"] == [1.0]
    assert samples[case, "dyt, eager", "of native"][0] > 0


def test_pointwise(measured):
    samples = measured("pointwise", "--threads", "1")
    for dtype in ("float32", "bfloat16"):
        assert samples[f"{dtype}, 1 thread", "F.layer_norm", "of F.layer_norm"] == [1.0]
        loop, plain = (samples[f"{dtype}, 1 thread", f"DyT, {way}", "time"][0] for way in ("loop", "plain torch"))
        assert 0 < loop < plain


def test_accuracy(measured):
    samples = measured("accuracy")
    for of, way in (("f", "float32"), ("f", "half precision"), ("f′", "float32 and half precision")):
        (in_a_sum,) = samples[f"{of} of tanh", way, "in a sum"]
        (rounded,) = samples[f"{of} of tanh", way, "rounded"]
        assert 0 < in_a_sum < rounded < 1e-5


def test_machine_code(measured):
    samples = measured("machine_code", "--targets", "90", "--dtypes", "float32")
    case = "backward, float32, (32768, 4096)"
    executed, loop = (samples[case, "DyISRU", name][0] for name in ("sm_90", "sm_90 loop"))
    assert 0 < loop < executed
    assert samples[case, "DyISRU", "sm_90 loads of 128 bits"] == [8.0]


def test_machine_code_of_a_capture(measured):
    samples = measured("machine_code_capture", "--targets", "90", "--dtypes", "bfloat16")
    for kernel in ("describe", "add_pairs"):
        [instructions], [ceiling] = (samples["bfloat16", kernel, name] for name in ("sm_90", "sm_90 at most"))
        assert 10 < instructions <= ceiling
    assert 2 * 9.6 < samples["bfloat16", "add_pairs", "sm_90 atomic operations"][0] <= 20  # millions


def test_compiled_bytes(measured):
    samples = measured("compiled_bytes")
    by_hand = {"modulated": (2, 2, 4), "added": (4, 4, 5)}
    for block, tensors in by_hand.items():
        for channels in ("768", "1,152"):
            for way, count in zip(("LayerNorm", "DyT, plain torch", "DyT, operator"), tensors, strict=True):
                moved, stated, kernels = (
                    samples[f"{block}, {channels} channels", way, name][0]
                    for name in ("read and written", "loads and stores", "kernels")
                )
                assert count <= moved < count + 0.02  # scale and shift are 1/256 of x each, all others far less
                again = (way, channels) == ("LayerNorm", "1,152")  # whose rows do not stay in registers
                assert count + again <= stated < count + again + 0.02
                assert kernels == (2 if way == "DyT, operator" else 1)


def test_architectures(tmp_path):
    chosen = ("--timm", "vgg,starnet", "--transformers", "GPT2LMHeadModel,BrosModel")
    subprocess.run([sys.executable, FOLDER / "architectures.py", "--results", tmp_path, *chosen], check=True)
    (path,) = tmp_path.glob("architectures-*.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["versions"]["timm"] and record["machine"]["cores"] >= 1
    vgg, starnet, gpt2, bros = record["rows"]
    assert (vgg["name"], vgg["outcome"], vgg["norms"]) == ("vgg11", "no norm", {})
    assert "normalization of activations" in vgg["reason"]
    parameters = {name: sum(p.numel() for p in timm.create_model(name).parameters()) for name in STARNETS}
    assert starnet["name"] == min(parameters, key=parameters.get)
    assert starnet["parameters"] == parameters[starnet["name"]] and starnet["network"] == "StarNet"
    assert (gpt2["family"], gpt2["norms"]) == ("gpt2", {"LayerNorm": 9})  # two of each of four blocks, and the last
    for worked in (starnet, gpt2):
        assert worked["outcome"] == "works" and 0 < worked["worst"] < 1
    assert bros["outcome"] == "not built" and "bbox" in bros["reason"]  # it reads boxes as well
    assert all(row["exit_status"] is None for row in record["rows"])


@pytest.mark.parametrize(
    ("task", "outcome"),
    [("time.sleep(60)", "time"), ("builtins.bytearray(8 * 10**9)", "traceback"), ("os._exit(9)", "memory")],
)
def test_a_process_that_does_not_finish_is_replaced(task, outcome, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    architectures = importlib.import_module("architectures")
    with architectures.Pool(1, 1 if outcome == "time" else 60, 4) as pool:
        assert pool.ask(eval, "1 + 1", seconds=60) == 2
        with pytest.raises(architectures.UnfinishedError) as raised:
            pool.ask(eval, f"__import__('{task.partition('.')[0]}').{task.partition('.')[2]}")
        assert raised.value.args[0] == outcome
        assert pool.ask(eval, "2 + 2", seconds=60) == 4


@pytest.mark.faults
def test_scale(measured):
    samples = measured("scale", "--images", "160")
    case = "160 images"
    assert samples[case, "1 process, 1 thread each", "speed-up"] == [1.0]
    assert samples[case, "3 processes, 1 thread each", "command"][0] > 0
    assert 0.9 < samples[case, "1 process, 1 thread each", "of that after a tenth"][0] < 1.1


def test_host_time(measured):
    samples = measured("host_time")
    for case in ("forward, no gradient wanted", "forward, gradients wanted", "backward"):
        [native], [ours] = (samples[case, way, "host time"] for way in ("nn.LayerNorm", "DyT"))
        assert samples[case, "DyT", "over nn.LayerNorm"] == [pytest.approx(ours / native)]
        [operator] = samples[case, "DyT by torch's operator", "host time"]
        assert native > 0 and operator > ours
