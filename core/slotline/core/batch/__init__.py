"""Data of a step: requests, their table, and the objects that a step passes on."""
