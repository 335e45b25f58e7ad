"""Choice of compilation: a model's forward passes by torch.compile (`compile.mode`)."""

from __future__ import annotations

from typing import Any

from slotline.planner.refusals import cannot_hold
from slotline.registry.config import Config, LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.descriptor import Descriptor
from slotline.registry.negotiation import Setting
from slotline.registry.ranks import Place

KEY = "compile.mode"


def compiler_backend(config: Config) -> str:
    """Return the backend of torch.compile for the model, "" if it is not compiled."""
    return config.compile.backend if config.compile.mode == "stock" else ""


def capture_refusal(config: Config) -> str:
    """Return the reason why a compiled model is not captured, "" for a model that is not compiled."""
    return (
        f"{KEY} = {config.compile.mode!r}: torch.compile launches the forward pass" if compiler_backend(config) else ""
    )


def choose_compilation(
    loaded: LoadedConfig,
    facts: ModelFacts,
    family: Descriptor[Any],
    place: Place,
    *,
    drafter: Descriptor[Any] | None,
    lora: Descriptor[Any] | None,
    fast_prefill: bool,
    stages: int,
    form: str,
) -> tuple[Setting, ...]:
    """Return the setting that records that the model is compiled. Empty if it is not.

    Args:
        fast_prefill: whether prompt tokens skip the last layers.
        stages: number of pipeline stages.
        form: of the weights, see `ModelContext.load_format`.

    Raises:
        NegotiationError: with every reason why it cannot be compiled.
    """
    config = loaded.config
    if not compiler_backend(config):
        return ()
    texts = []
    if refusal := family.capabilities.compiled.refusal(True):
        texts.append(f"model family {family.name!r}: compiled {refusal}")
    if facts.state_layers:
        texts.append(f"{facts.architecture} keeps states, which no compiled operation serves")
    if fast_prefill:
        texts.append(f"prompt tokens skip the last layers of {facts.architecture} (cache.kv_sharing_fast_prefill)")
    if facts.weight_modules or config.weights.quantize:
        texts.append("products with quantized weights are calls of plugins")
    if lora is not None:
        texts.append(f"lora.name = {lora.name!r}: adapters are added by calls of a plugin")
    if drafter is not None and drafter.capabilities.needs_layers:
        texts.append(f"drafter {drafter.name!r} reads hidden states between layers")
    if place.size > 1 or stages > 1 or config.parallel.expert > 1:
        texts.append("the model is divided, and ranks and stages are joined between its modules")
    if config.offload_gib:
        texts.append(f"offload_gib = {config.offload_gib:g}: weights come when their layer runs")
    if config.batch_invariant:
        texts.append("batch_invariant = true: a compiler may add up otherwise for other numbers of tokens")
    if form == "sharded":
        texts.append(f"weights in {str(facts.path)!r} were saved after the passes")
    if texts:
        raise cannot_hold(loaded, KEY, repr(config.compile.mode), texts, "'none'")
    origin = loaded.origins[KEY].where
    said = f"{origin}; each forward pass whole, by {config.compile.backend!r}, in place of the optimising passes"
    return (Setting(key=KEY, asked=config.compile.mode, resolved=config.compile.mode, origin=said, explicit=True),)
