"""What a plugin should give, in float64, written for clarity; shares no code with any plugin."""
