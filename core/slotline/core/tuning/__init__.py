"""Tuning: engines with each backend, block size and graph mode built and timed one after the other."""

from slotline.core.tuning.cases import Cases, cases_for
from slotline.core.tuning.tuned_file import tuned_file
from slotline.core.tuning.tuner import Tuner, Tuning

__all__ = ["Cases", "Tuner", "Tuning", "cases_for", "tuned_file"]
