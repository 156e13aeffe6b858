"""Loading in tests: options and folders, comparisons of weights, and files that would run code."""

import json
import os

import torch

from normscope.inputs.loaded_model import LoadOptions
from normscope.loading import load


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
