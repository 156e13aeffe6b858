"""From a name to a network in eval mode, its weights, and inputs to run it on."""
