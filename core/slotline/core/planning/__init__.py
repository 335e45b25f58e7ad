"""From a configuration to a plan: the model looked at, plugins negotiated, and why; no weights are read."""
