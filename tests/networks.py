"""Tiny networks that tests of several folders share; weights depend on ``seed`` alone."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

import normscope
from normscope.inputs.batch import Batch, Sample, as_batches
from normscope.norms.bound_inputs import unpacked
from normscope.norms.trace import find_norms
from normscope.tools.check.evidence import Evidence


def numbered_batches(number, x_of, size=8, seed=0, data=""):
    """Batches of ``x_of(generator, size)`` whose samples are sources of their own, numbered throughout."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            (x_of(generator, size),),
            samples=tuple(Sample(f"{data}{i}", i, i, data) for i in range(n * size, (n + 1) * size)),
        )
        for n in range(number)
    ]


def network_of(forward, kind="Network", **parts):
    """A network of named modules, parameters and buffers, whose forward is a function of it and of its inputs."""
    network = type(kind, (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        network.register_buffer(name, part) if type(part) is torch.Tensor else setattr(network, name, part)
    return network


def residual(norm, width):
    """A pre-norm block: a norm and a linear layer beside the stream."""
    return network_of(
        lambda self, x: x + self.layer(self.norm(x)).relu(), "Block", norm=norm, layer=nn.Linear(width, width)
    )


def inputs_of(model, names, batches, run=lambda model, batch: model(batch)):
    """Run a network without gradients and return the inputs of its modules, call by call, by name."""
    inputs = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda _, args, __, calls=calls: calls.append(args[0].detach()))
        for name, calls in inputs.items()
    ]
    with torch.no_grad():
        for batch in batches:
            run(model, batch)
    for hook in hooks:
        hook.remove()
    return inputs


def report_of(model, *inputs):
    """Find the norms of a network with one batch of arguments for its forward."""
    return find_norms(model, next(as_batches([inputs])))


def evidence_of(model, batches, **about):
    """Return a network's evidence for the questions of a check."""
    seen = normscope.capture(model, batches, about=about)
    return Evidence(seen, model, unpacked(model, batches)[1])


class OneNorm(nn.Module):
    """A LayerNorm, or another norm, alone: ``norm``."""

    def __init__(self, norm: int | nn.Module = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(norm) if isinstance(norm, int) else norm

    def forward(self, x):
        return self.norm(x)


class PreNorm(nn.Module):
    """Residual pre-norm blocks (``norms.0``, ``layers.0``, …) and a linear head: (…, width) to (…, classes)."""

    def __init__(self, depth: int = 3, width: int = 8, classes: int = 7, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).relu()
        return self.head(x)


class PostNorm(nn.Module):
    """A post-norm block between a first norm and a linear head: (…, width) to (…, classes)."""

    def __init__(self, width: int = 6, classes: int = 2, norm: type[nn.Module] = nn.LayerNorm, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.inner, self.out = norm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.last, self.head = norm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.first(x)
        return self.head(self.last(x + self.out(self.inner(x).relu())))


class ChannelsFirst(nn.LayerNorm):
    """A LayerNorm over axis 1, as timm's LayerNorm2d."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Detector(OneNorm):
    """Takes a list of images of different sizes, as torchvision's detectors do."""

    def forward(self, images, targets=None):
        if any(image.ndim != 3 for image in images):
            raise ValueError("images is expected to be a list of 3d tensors")
        return [self.norm(image) for image in images]


def wrapped(inner):
    """A module that only calls another."""
    return network_of(lambda self, *args, **kwargs: self.inner(*args, **kwargs), "Wrapper", inner=inner)


def numbered_samples(number, first=0, name="text"):
    """Return samples that are sources of their own: ``text 0``, ``text 1``, …"""
    return tuple(Sample(f"{name} {i}", i, i) for i in range(first, first + number))


def sums_of(x, y):
    """Return n, Σx, Σy, Σx², Σxy and Σy² of pairs."""
    return torch.stack([torch.ones_like(x).sum(), x.sum(), y.sum(), (x * x).sum(), (x * y).sum(), (y * y).sum()])


def values_of(model):
    """Copy a network's parameters and buffers, by name."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(values, others):
    """True if two sets of tensors have the same names and bits."""
    return values.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in values.items())


class State:
    """Everything of a network that a call must restore: objects, values, order, flags, gradients and hooks."""

    def __init__(self, model):
        self.modules = [(name, id(module), module.training) for name, module in model.named_modules()]
        self.tensors = dict(model.state_dict(keep_vars=True))
        self.values = values_of(model)
        self.gradients = [(part.requires_grad, part.grad) for part in model.parameters()]
        self.hooks = [(dict(part._forward_hooks), dict(part._forward_pre_hooks)) for part in model.modules()]

    def assert_same(self, model):
        now = State(model)
        assert (self.modules, list(self.tensors), self.hooks) == (now.modules, list(now.tensors), now.hooks)
        assert all(tensor is now.tensors[name] for name, tensor in self.tensors.items())
        assert same(self.values, now.values)
        assert all(
            old[0] == new[0] and old[1] is new[1] for old, new in zip(self.gradients, now.gradients, strict=True)
        )


def loaded_from(folder):
    """Import pointwise.py of a swapped folder."""
    spec = importlib.util.spec_from_file_location("pointwise", Path(folder, "pointwise.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_llama(folder, layers=2):
    """Save a tiny Llama, a tokenizer of three words and two lines of text; return the path of the lines."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<pad>", "one", "two", "three"])}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))  # noqa: S106 - a token of text
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 2}
    torch.manual_seed(7)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, tie_word_embeddings=True, **sizes))
    nn.init.normal_(network.model.norm.weight)
    network.save_pretrained(folder)
    (folder / "lines.txt").write_text("one two three\nthree two\n")
    return folder / "lines.txt"
