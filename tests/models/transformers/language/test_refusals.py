"""What a folder may lack, what may be wrong with it, and the code in it, which is never run."""

import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from loads import RunsWhenUnpickled, change_json, load_folder

from normscope.errors import ModelError


def test_layer_that_the_weights_lack_is_not_made_up(copy):
    folder = copy("llama")
    change_json(folder / "config.json", num_hidden_layers=3, layer_types=None)
    with pytest.raises(ModelError, match=r"do not fit LlamaForCausalLM: model.layers.2.* is missing, .*, and 6 more"):
        load_folder(folder)


@pytest.mark.parametrize(
    ("filename", "content", "sentence"),
    [
        ("config.json", None, "contains no config.json, and so no model of transformers."),
        ("tokenizer.json", None, "contains no tokenizer.json, so that no text can be read for "),
        (
            "model.safetensors",
            None,
            "contains neither model.safetensors nor model.safetensors.index.json; other formats",
        ),
        ("config.json", "{", "The file config.json of "),
        ("config.json", "[]", "contains no JSON object."),
        ("config.json", '{"model_type": "of tomorrow"}', "cannot make a model of "),
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}', "cannot make a model of "),
        ("tokenizer.json", "{}", "The tokenizer of "),
        ("model.safetensors", "no safetensors", "does not load with transformers "),
    ],
)
def test_incomplete_or_damaged_folder(copy, filename, content, sentence):
    folder = copy("llama")
    (folder / filename).unlink() if content is None else (folder / filename).write_text(content)
    with pytest.raises(ModelError, match=re.escape(sentence)):
        load_folder(folder)


def test_tokens_that_the_model_does_not_know(copy, texts, lines):
    folder = copy("llama")
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    space = vocabulary["Ġ"]  # bytes that are no printable character come last
    config = transformers.LlamaConfig.from_pretrained(folder, vocab_size=space)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    model = load_folder(folder, data=lines)
    assert sum(len(batch.samples) for batch in model.inputs) == sum(" " not in text for text in texts) == 1
    assert len(model.inputs.unreadable) == 3
    assert model.inputs.unreadable[0] == (
        f"lines.txt line 1: the tokenizer makes token {space} of it, and the model knows {space}"
    )


def test_padding_token_that_the_model_does_not_know(copy, lines):
    """Many folders add one to the tokenizer alone."""
    folder = copy("llama")
    change_json(folder / "tokenizer_config.json", pad_token="[PAD]")  # noqa: S106
    added = transformers.AutoTokenizer.from_pretrained(folder).pad_token_id
    config = transformers.LlamaConfig.from_pretrained(folder, vocab_size=added)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    batch = next(iter(load_folder(folder, data=lines).inputs))
    assert (batch.kwargs["input_ids"][~batch.valid] == 0).all()


def test_pickles_are_not_executed(copy, tmp_path):
    folder, trace = copy("llama"), tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save({"model.norm.weight": RunsWhenUnpickled(trace)}, path)
    only = r"other formats, which can run code, are not taken\. "
    with pytest.raises(ModelError, match=f"{only}.*--weights {re.escape(str(path))}"):
        load_folder(folder)
    with pytest.raises(ModelError, match="contains Python objects besides tensors"):
        load_folder(folder, weights=path)
    assert not trace.exists()
    torch.load(path, weights_only=False)  # the check can fail: unpickling does leave the trace
    assert trace.exists()


@pytest.fixture
def evil(copy, tmp_path):
    """Make a folder with modules that leave a trace when they are imported, and return it with the trace's path."""
    folder, trace = copy("llama"), tmp_path / "executed"
    (folder / "custom_generate").mkdir()
    for name in ("evil.py", "custom_generate/generate.py"):
        (folder / name).write_text(f"open({str(trace)!r}, 'w').close()\n")
    return folder, trace


@pytest.mark.parametrize(("model_type", "weights"), [("llama", "pretrained"), ("evil", "random")])
@pytest.mark.parametrize(
    ("filename", "changes", "named"),
    [
        ("config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, "auto_map in config.json"),
        ("config.json", {"text_config": {"auto_map": {"AutoModel": "evil.Model"}}}, "auto_map in config.json"),
        ("config.json", {"_attn_implementation": "evil/kernel"}, "_attn_implementation in config.json"),
        ("config.json", {"experts_implementation": "evil/kernel"}, "experts_implementation in config.json"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Slow", "evil.Fast"]}}, "auto_map in tokeni"),
    ],
)
def test_code_of_a_repository_is_not_run(evil, filename, changes, named, weights, model_type):
    folder, trace = evil
    change_json(folder / filename, **changes)
    if filename == "config.json" and "model_type" not in changes:
        change_json(folder / filename, model_type=model_type)
    with pytest.raises(ModelError, match=re.escape(f"asks for code that comes with its weights ({named}")):
        load_folder(folder, weights=weights)
    assert not trace.exists()


def test_transformers_own_class_is_taken_where_it_has_one(evil, caplog):
    """Code to generate with may lie beside a network that needs none of its own: nothing here generates."""
    folder, trace = evil
    load_folder(folder)
    assert "comes with code of its own" not in caplog.text
    change_json(folder / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert type(load_folder(folder).module).__module__.startswith("transformers.models.llama.")
    assert "comes with code of its own, which is not run: transformers has llama itself" in caplog.text
    assert not trace.exists()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("time_series", "is a PatchTSTModel, which takes past_values (time): texts, images, recordings, or images "),
        ("video", "is a VideoMAEModel, which takes pixel_values (video): texts, images, recordings, or images "),
        ("boxes", "is a LayoutLMv3Model, which takes input_ids ("),
    ],
)
def test_models_that_take_something_else(folders, kind, sentence):
    with pytest.raises(ModelError, match=rf"{re.escape(sentence)}.*and name that: py:FILE:FACTORY\.$"):
        load_folder(folders / kind)


def test_names_of_nothing(folders):
    for name, sentence in {
        "/no/such/folder": "There is no folder '/no/such/folder', and no repository of the hub can be called so",
        "two words": "There is no folder 'two words'",
        folders / "llama" / "model.safetensors": r"is a file\. Name the folder that it is in",
    }.items():
        with pytest.raises(ModelError, match=sentence):
            load_folder(name)


@pytest.mark.slow
def test_without_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from normscope.loading import load\n"
        "try: load('gpt2', weights='random', device='cpu')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("ModelError gpt2 cannot be loaded: ModuleNotFoundError: ")
    assert said.strip().endswith("Install it: pip install 'transformers>=5.3'.")
