"""The tiny DiT that is embedded in this package: digits of 8×8 pixels, from −1 to 1, without an autoencoder."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

from normscope.inputs.loaded_model import LoadedModel, LoadOptions
from normscope.models.diffusion import dit_inputs, loaded_model, scheduler_of
from normscope.models.weights.checkpoints import load_embedded

_TRAJECTORIES = 64
_CALIBRATION_TIMESTEPS = 10  # unless they are named


def load(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the embedded DiT.

    To learn from there are its trajectories from the next seed, at more timesteps.
    """
    module, provenance, facts = load_embedded(
        name, options, lambda facts: DiTTransformer2DModel(**facts["config"]), trained_on="scikit-learn's digits"
    )
    inputs_of = partial(
        dit_inputs, facts["config"], scheduler_of(name, facts["scheduler"]), guidance=1.0, trajectories=_TRAJECTORIES
    )
    calibration = None
    if options.data is None:
        timesteps = _CALIBRATION_TIMESTEPS if options.timesteps is None else options.timesteps
        calibration = inputs_of(replace(options, seed=options.seed + 1, timesteps=timesteps))
    return loaded_model(name, module, inputs_of(options), provenance, calibration)
