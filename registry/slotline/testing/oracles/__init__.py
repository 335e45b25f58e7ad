"""Expected results of plugins in float64, written for clarity. They share no code with any plugin."""
