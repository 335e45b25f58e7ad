"""From a plan to an engine: every factory is called here, weights are loaded, memory is sized."""
