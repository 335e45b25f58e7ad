"""Speculative decoding: the extension `drafts`, which proposes drafts, verifies them and counts them.

The core knows tokens after the known ones that a step verifies, and nothing of where they come from. A step passes this
extension at these places (`SpecDecodeExtension`):

1. `gather` and `prepare_inputs`: drafts, places that rejection sampling decides, the mask of a tree (`step_drafts.py`).
   If a step in flight verifies drafts too, lengths on the host are upper bounds. The device corrects them.
2. `forward_kwargs` and `take_results`: inputs of layers that the drafter reads (`hidden_states.py`).
3. `settle_step`: under async scheduling, exact numbers once the step before was handed out (`async_spec_decode.py`).
4. `revise_tokens` and `keep_states`: rejection sampling, and the states that the drafter reads.
5. `extend_pending`: under async scheduling, verification and the next proposal on the device.
6. `accept_tokens`: which tokens the requests get (`verification.py`), and the counts.
7. `after_step`: the next proposal (`draft_runner.py`), or its arrival from the device.
"""

from __future__ import annotations

from slotline.registry.contracts import ExtensionCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.EXTENSION,
    name="drafts",
    capabilities=ExtensionCapabilities(order=60),
    factory="slotline.proposers.speculation.extension:build_drafts",
    summary="proposes tokens with the drafter, and has steps verify them",
)
