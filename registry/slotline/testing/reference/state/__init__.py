"""Two correct state backends in plain torch: token by token, and by chunks. `descriptor` is that of the first."""

from slotline.testing.reference.state.backend import ReferenceState, descriptor, descriptor_of
from slotline.testing.reference.state.chunked import ChunkedState, chunked_descriptor

__all__ = ["ChunkedState", "ReferenceState", "chunked_descriptor", "descriptor", "descriptor_of"]
