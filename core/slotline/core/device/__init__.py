"""Device access: transfer buffers, scopes and memory."""
