"""Tuning: engines with each backend, block size and graph mode built and timed one after the other."""

from slotline.cli.tuning.cases import Cases, cases_for
from slotline.cli.tuning.tuned_file import tuned_file
from slotline.cli.tuning.tuner import Tuner, Tuning

__all__ = ["Cases", "Tuner", "Tuning", "cases_for", "tuned_file"]
