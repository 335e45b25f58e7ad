"""Engine builder: from a plan to an engine."""
