"""Engine: the step loop and the life of a request."""

from slotline.core.engine.engine import Engine as Engine
