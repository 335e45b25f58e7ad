"""Two right state backends in plain torch: token by token, and by chunks; `descriptor` is the first one's."""

from slotline.testing.reference.state.backend import ReferenceState, descriptor, descriptor_of
from slotline.testing.reference.state.chunked import ChunkedState, chunked_descriptor

__all__ = ["ChunkedState", "ReferenceState", "chunked_descriptor", "descriptor", "descriptor_of"]
