"""Planner: from a configuration and a model to a plan."""
