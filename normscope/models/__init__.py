"""From a name to a network in eval mode, its weights, and inputs to run it on."""

from normscope.models.registry import embedded_models, list_models, load

__all__ = ["embedded_models", "list_models", "load"]
