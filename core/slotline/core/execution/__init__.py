"""One step on the devices: inputs gathered and staged, layers routed to backends, graphs replayed."""
