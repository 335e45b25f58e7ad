"""Environment of a state backend: layers with random parameters, slots in padded pages, batches.

In hostile surroundings all state tensors of a slot lie in one padded page, unwritten memory is NaN, inputs are strided
slices of larger buffers, and memory that the backend allocates without filling it is NaN too.
"""

from slotline.testing.environments.state.problem import Problem, make_problem, with_unknown_names
from slotline.testing.environments.state.surroundings import Part, Surroundings, surround

__all__ = ["Part", "Problem", "Surroundings", "make_problem", "surround", "with_unknown_names"]
