"""The conformance suite: `pytest --pyargs slotline.conformance`, with `-p slotline.testing.plugin`.

One package of checks for each kind of plugin. `slotline.testing.check` defines a check.
"""
