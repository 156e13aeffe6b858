"""Loading in tests: options and folders, comparisons of weights, and files that would run code."""

import json
import os
from types import SimpleNamespace

import torch
from torch import nn

from normscope.inputs.loaded_model import LoadOptions
from normscope.loading import load
from normscope.models.inputs.text import Tokenization


def options_with(**changes):
    """LoadOptions that differ from the defaults in what is given."""
    defaults = {"weights": "random", "data": None, "limit": None, "batch_size": 8, "seed": 0}
    return LoadOptions(**(defaults | {"device": torch.device("cpu"), "dtype": torch.float32} | changes))


def load_folder(folder, **changes):
    return load(f"transformers:{folder}", device="cpu", **changes)


def result_of(module, batch):
    with torch.no_grad():
        return module(*batch.args, **batch.kwargs)


def samples_of(inputs):
    return [sample for batch in inputs for sample in batch.samples]


def parameters(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def assert_same_weights(module, other):
    ours, theirs = module.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class RunsWhenUnpickled:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


class Reader(nn.Module):
    """Takes token ids, and has no table of embeddings."""

    def get_input_embeddings(self):
        raise NotImplementedError

    def forward(self, input_ids, attention_mask):
        return input_ids


class Bytes(Tokenization):
    """Bytes as tokens; ``errors`` are raised by their texts."""

    def __init__(self, longest, pad_id=0, multiple=1, errors=()):
        config = SimpleNamespace(is_encoder_decoder=False, attention_window=multiple)
        config.get_text_config = lambda: SimpleNamespace(max_position_embeddings=longest)
        super().__init__(Reader(), config, None)
        self.pad_id, self.remarks, self.errors = pad_id, [], dict(errors)

    def tokens(self, text):
        if text in self.errors:
            raise self.errors[text]
        return super().tokens(text)
