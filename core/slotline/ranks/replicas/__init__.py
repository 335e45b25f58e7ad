"""Replicas of a model: engines behind one front, which sends each request to one of them, and shared experts."""
