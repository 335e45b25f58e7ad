"""Logits processor `mirostat`: keeps as many tokens as hold a text's surprise near a target (Mirostat 2)."""

from slotline.registry.capability import Flag
from slotline.registry.contracts import LogitsProcessorCapabilities
from slotline.registry.descriptor import Descriptor, Kind

descriptor = Descriptor(
    kind=Kind.LOGITS_PROCESSOR,
    name="mirostat",
    summary="keeps as many tokens as hold a text's surprise near a target (Mirostat 2)",
    capabilities=LogitsProcessorCapabilities(
        parameters=("mirostat_tau", "mirostat_eta"),
        output_parameters=("mirostat_tau", "mirostat_eta"),
        argmax_invariant=True,
        needs_history=True,
        sequential=True,
        speculation=Flag(
            False, "its bound behind a draft follows from the logits before it, which another call may have had"
        ),
        order=1000,
        examples=(
            {"mirostat_tau": 1.0},
            {"mirostat_tau": 0.3, "mirostat_eta": 0.7, "temperature": 0.6},
            {"mirostat_tau": 2.0, "mirostat_eta": 1.0, "temperature": 1.7},
        ),
        bad_examples=(
            {"mirostat_tau": 0},
            {"mirostat_tau": "low"},
            {"mirostat_tau": float("nan")},
            {"mirostat_eta": 0.2},
            {"mirostat_tau": 3.0, "mirostat_eta": -0.1},
            {"mirostat_tau": 3.0, "top_k": 40},
            {"mirostat_tau": 3.0, "top_p": 0.9},
            {"mirostat_tau": 3.0, "min_p": 0.1},
        ),
    ),
    factory="slotline.plugins.logits_processors.mirostat.processor:Mirostat",
)
