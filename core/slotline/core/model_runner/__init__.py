"""Model runner: inputs, attention dispatch, graphs and the forward pass."""
