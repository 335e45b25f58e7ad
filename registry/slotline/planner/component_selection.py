"""Choice of the task, drafter, logits processors and structured-output plugin of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve, frozen

from slotline.planner.offers import Offers, narrowed
from slotline.planner.refusals import cannot_hold
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import AttentionLayer, ModelFacts
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import NegotiationError
from slotline.registry.negotiation import Candidate, GroupPlan, Need, Plan, Reason, Setting, candidates, part_reasons
from slotline.registry.negotiation.graphs import required_level

_NOT_SUPPLIED = {
    "needs_grammar": "the state of a grammar",
}
"""Capabilities that a drafter may need and that this version of the runner does not supply."""


def choose_task(loaded: LoadedConfig, facts: ModelFacts, family: Descriptor[Any]) -> Setting:
    """Return the task that the configuration names, or the one that the checkpoint was made for.

    Raises:
        NegotiationError: if the model does not serve the task, or another configured plugin cannot work with it.
    """
    config, served = loaded.config, [t for t in facts.tasks if family.capabilities.tasks.refusal(t) is None]
    if config.task == "auto" and served:
        task = served[0]
    elif config.task in served:
        task = config.task
    else:
        raise NegotiationError(
            f"task = {config.task!r} ({loaded.origins['task'].where}): {facts.architecture} in {str(facts.path)!r} "
            f"serves {', '.join(served) or 'no task'}",
            fix=f"set task = {served[0]!r}, or take another model" if served else "take another model",
        )
    sampling = [f"drafter.name = {config.drafter.name!r}"] if config.drafter.name else []
    sampling += [f"[logits_processors.{name}]" for name in config.logits_processors]
    if sampling and task != "generate":
        raise NegotiationError(
            f"{', '.join(sampling)}: task {task!r} samples no tokens", fix='remove them, or set task = "generate"'
        )
    origin = loaded.origins["task"].where if config.task != "auto" else "auto: what the checkpoint was made for"
    if task == "generate" and "transcription" in served:
        origin += "; also serves transcription"
    return Setting(key="task", asked=config.task, resolved=task, origin=origin, explicit=config.task != "auto")


def refuse_variance(loaded: LoadedConfig, facts: ModelFacts, family: Descriptor[Any]) -> None:
    """Refuse settings that make a request's numbers depend on its batch, if `batch_invariant` is set.

    Attention backends are checked in negotiation. The family is checked again when it loads the model.

    Raises:
        NegotiationError: with every reason.
    """
    config = loaded.config
    if not config.batch_invariant:
        return
    texts = []
    if refusal := family.capabilities.batch_invariant.refusal(True):
        texts.append(f"model family {family.name!r}: {refusal}")
    if facts.state_layers:
        kinds = ", ".join(dict.fromkeys(layer.state_kind for layer in facts.state_layers))
        texts.append(f"{facts.architecture} keeps states ({kinds}), and no state backend promises it")
    if not config.optimize:
        texts.append("optimize = false: transformers' own modules leave it to the matrix library")
    if config.offload_gib:
        texts.append(f"offload_gib = {config.offload_gib:g}: weights are not on the device when they are looked at")
    if texts:
        raise cannot_hold(loaded, "batch_invariant", "true", texts, "false")


def choose_drafter(
    loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo, max_model_len: int, family: Descriptor[Any]
) -> Descriptor[Any] | None:
    """Return the drafter that the configuration names, if any, with the capabilities that its probe left.

    Raises:
        NegotiationError: with every reason why it cannot be used.
    """
    config = loaded.config.drafter
    if not config.name:
        return None
    descriptor = registry.load(Kind.DRAFTER, config.name, required=True)
    descriptor = narrowed(descriptor, info, f"drafter {config.name!r}", "remove [drafter]")
    offer, origin = descriptor.capabilities, f"drafter.tokens = {config.tokens}"
    needs = (device_need(info), Need(capability="max_tokens", value=config.tokens, origin=origin))
    texts = texts_of(part_reasons(offer, needs))
    texts += [
        f"needs {what}, which this version does not supply" for n, what in _NOT_SUPPLIED.items() if getattr(offer, n)
    ]
    if offer.needs_layers and (refusal := family.capabilities.taps.refusal(True)):
        texts.append(f"needs hidden states of chosen layers; model family {family.name!r}: taps {refusal}")
    if loaded.config.batch_invariant and offer.probabilities.support:
        texts.append("batch_invariant = true: its guesses' probabilities decide what is sampled, and hang on the batch")
    if config.tokens >= max_model_len - 1:
        texts.append(f"{origin} does not fit beside a prompt into max_model_len={max_model_len}")
    if texts:
        raise NegotiationError(
            f"drafter {config.name!r} cannot be used: {'; '.join(texts)}",
            fix="lower drafter.tokens, name another drafter, or remove [drafter]",
        )
    return descriptor


@frozen(kw_only=True)
class StructuredOutputChoice:
    """The plugin for structured output, or the reason why there is none.

    Attributes:
        descriptor: the plugin's descriptor, or None.
        setting: `structured_output.backend`, asked and resolved, with every reason against the others.
        refusal: the reason and the remedy, if there is no plugin.
    """

    descriptor: Descriptor[Any] | None
    setting: Setting
    refusal: tuple[str, str] | None = None


def choose_structured_output(
    loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo, task: str
) -> StructuredOutputChoice:
    """Return the structured-output plugin that the configuration names, or the best usable plugin.

    Raises:
        NegotiationError: if the named plugin cannot be used, or if the task samples no tokens.
    """
    key, asked = "structured_output.backend", loaded.config.structured_output.backend
    named, origin = asked not in ("auto", "none"), loaded.origins[key].where
    if asked == "none":
        return _no_structured_output(asked, f'{key} = "none" ({origin})', f'set {key} = "auto"')
    if task != "generate":
        why = f"task {task!r} samples no tokens"
        if named:
            raise NegotiationError(f"{key} = {asked!r} ({origin}): {why}", fix="remove it")
        return _no_structured_output(asked, why, 'set task = "generate"')
    if named:
        registry.load(Kind.STRUCTURED_OUTPUT, asked, required=True)
    needs = (device_need(info),)
    found = {c.name: (c, refusal_of(c, needs)) for c in candidates(registry, Kind.STRUCTURED_OUTPUT, info)}
    against = "; ".join(f"{name}: {why}" for name, (_, why) in found.items() if why is not None)
    if named and (refusal := found[asked][1]) is not None:
        raise NegotiationError(f"{key} = {asked!r} ({origin}) cannot be used: {refusal}", fix="remove it")
    usable = [found[asked][0]] if named else [candidate for candidate, why in found.values() if why is None]
    if not usable:
        because = f"auto: {against or 'no plugin for it is installed'}"
        return _no_structured_output(asked, because, "pip install 'slotline[structured]'")
    best = max(usable, key=lambda c: (c.capabilities.priority, c.name))
    assert best.descriptor is not None  # otherwise there would be a reason against it
    if not named:
        origin = "; ".join(filter(None, (f"auto: {best.capabilities.priority_reason or 'the first'}", against)))
    return StructuredOutputChoice(
        descriptor=evolve(best.descriptor, capabilities=best.capabilities),  # narrowed by the probe
        setting=Setting(key=key, asked=asked, resolved=best.name, origin=origin, explicit=named),
    )


def _no_structured_output(asked: str, because: str, fix: str) -> StructuredOutputChoice:
    setting = Setting(
        key="structured_output.backend", asked=asked, resolved="none", origin=because, explicit=asked == "none"
    )
    return StructuredOutputChoice(descriptor=None, setting=setting, refusal=(because, fix))


def refusal_of(candidate: Candidate, needs: Sequence[Need]) -> str | None:
    """Return the reasons why a candidate cannot be used for some needs, or None."""
    if reason := candidate.blocked or candidate.load_error or candidate.probe_refusal:
        return reason
    if candidate.contract is None:
        return candidate.contract_error or "no common contract version"
    return "; ".join(texts_of(part_reasons(candidate.capabilities, needs))) or None


def choose_tree(
    loaded: LoadedConfig, drafter: Descriptor[Any] | None, plan: Plan, offers: Offers, *, stages: int
) -> Setting | None:
    """Decide how a drafter's trees are verified. None without trees.

    ``request_trees`` is a tree for each request, ``tree`` the same tree for all, ``chain`` the path of first children.
    Backends are chosen without regard to trees: a backend that slows every step costs more than a tree gains.
    """
    if drafter is None or not drafter.capabilities.tree.support:
        return None
    texts = _tree_refusals(loaded, plan, offers, "tree_mask")
    if plan.state_groups:
        texts.append("states follow one path")
    if stages > 1:
        texts.append(f"the model runs over {stages} pipeline stages")
    form = "chain" if texts else "request_trees"
    if form != "chain" and (texts := _tree_refusals(loaded, plan, offers, "request_trees")):
        form, texts = "tree", ["all requests get the same tree", *texts]
    return Setting(
        key="drafter.tree",
        asked="request_trees" if drafter.capabilities.request_trees.support else "tree",
        resolved=form,
        origin=f"drafter {drafter.name!r} proposes trees" + "".join(f"; {text}" for text in texts),
    )


def _tree_refusals(loaded: LoadedConfig, plan: Plan, offers: Offers, capability: str) -> list[str]:
    wanted = Need(capability=capability, value=True, origin="trees")
    every = (text for group in plan.groups for text in _backend_refusals(loaded, offers, group, wanted))
    return list(dict.fromkeys(every))


def choose_tree_graphs(
    loaded: LoadedConfig, tree: Setting | None, plan: Plan, offers: Offers
) -> tuple[Setting | None, bool]:
    """Decide if steps that verify trees replay graphs. Return the choice of `choose_tree` with the reason, and whether.

    Trees of requests are captured in each group whose attention is captured in verifying steps. They have a fixed
    number of nodes there.
    """
    if tree is None or tree.resolved == "chain" or dict(plan.graphs.phases).get("verify", "none") == "none":
        return tree, False
    texts = [] if tree.resolved == "request_trees" else ["masks that all requests share are not captured"]
    trees = Need(capability="request_trees", value=True, origin="trees")
    for group in plan.groups if not texts else ():
        if group.captured("verify") or group.captured("mixed"):
            level = required_level("verify")
            wanted = Need(capability="graphs", value=level, origin="trees")
            texts += _backend_refusals(loaded, offers, group, wanted, trees)
    text = f"{tree.origin}; {'; '.join(('steps with trees are not captured', *texts))}" if texts else tree.origin
    return evolve(tree, origin=text), not texts


def choose_draft_graphs(
    loaded: LoadedConfig,
    drafter: Descriptor[Any] | None,
    plan: Plan,
    offers: Offers,
    layers: Sequence[AttentionLayer],
) -> Setting | None:
    """Decide if the drafter's own steps are captured. None without a drafter.

    Args:
        offers: the attention backends' descriptors on this machine.
        layers: the drafter's own attention layers.

    Raises:
        NegotiationError: if capturing was asked for and is not possible, also if there is no drafter.
    """
    key, asked = "drafter.graphs", loaded.config.drafter.graphs
    if drafter is None:
        _refuse_without_drafter(loaded, key, asked, "there is no drafter to capture")
        return None
    texts = []
    if dict(plan.graphs.phases).get("verify", "none") == "none":
        texts.append("no verifying step is captured")
    if refusal := drafter.capabilities.graphs.refusal(True):
        texts.append(f"drafter {drafter.name!r}: graphs {refusal}")
    if drafter.capabilities.block_attention != "none":
        texts.append(f"drafter {drafter.name!r}: blocks of several queries are not captured")
    if drafter.capabilities.state != "none":
        texts.append(f"drafter {drafter.name!r} keeps a state by row, and a graph knows no rows")
    if loaded.config.drafter.max_model_len:
        texts.append("drafter.max_model_len changes the positions of longer requests for the drafter")
    own, planned_once = {layer.index for layer in layers}, Need(capability="plan_once", value=True, origin="drafter")
    for group in plan.groups:
        if own.isdisjoint(layer.index for layer in group.layers):
            continue
        if not (group.captured("decode") and group.captured("verify")):
            texts.append(f"attention group {group.name!r} is not captured")
        texts += _backend_refusals(loaded, offers, group, planned_once)
    return _decided(loaded, key, asked, texts)


def choose_adaptive(loaded: LoadedConfig, drafter: Descriptor[Any] | None, tree: Setting | None) -> Setting | None:
    """Decide if the number of verified drafts adapts to what pays. None without a drafter.

    Args:
        tree: the choice of how the drafter's trees are verified. None without trees.

    Raises:
        NegotiationError: if it was asked for and is not possible, also if there is no drafter.
    """
    key, asked = "drafter.adaptive", loaded.config.drafter.adaptive
    if drafter is None:
        _refuse_without_drafter(loaded, key, asked, "there is no drafter whose drafts could be fewer")
        return None
    name, texts = f"drafter {drafter.name!r}", []
    if tree is not None and tree.resolved != "chain":
        texts.append(f"{name}: its trees are verified whole")
    if asked == "auto" and drafter.capabilities.probabilities.support:
        texts.append(f"{name} gives probabilities: a seed's text would depend on the lengths, and so on timing")
    return _decided(loaded, key, asked, texts)


def _refuse_without_drafter(loaded: LoadedConfig, key: str, asked: bool | str, refusal: str) -> None:
    """Refuse a drafter's setting that was asked for without a drafter.

    Raises:
        NegotiationError: if `asked` is true.
    """
    if asked is True:
        raise NegotiationError(
            f"{key} = true ({loaded.origins[key].where}): {refusal}",
            fix=f'name one as drafter.name, or set {key} to "auto"',
        )


def _decided(loaded: LoadedConfig, key: str, asked: bool | str, texts: Sequence[str]) -> Setting:
    """Return the setting as it was asked for. "auto" becomes true if no text speaks against it.

    Raises:
        NegotiationError: if true was asked for, with every text.
    """
    origin, against = loaded.origins[key].where, "; ".join(texts)
    if asked is True and texts:
        raise NegotiationError(f"{key} = true ({origin}): {against}", fix=f'set {key} to "auto" or false')
    return Setting(
        key=key,
        asked=str(asked).lower(),
        resolved=str(asked is not False and not texts).lower(),
        origin=origin if asked != "auto" else f"auto: {against or 'nothing forbids it'}",
        explicit=asked != "auto",
    )


def plans_once(loaded: LoadedConfig, offers: Offers, group: GroupPlan) -> bool:
    """Return True if a plan made at capture serves every replay, common prefixes excepted."""
    return not _backend_refusals(
        loaded, offers, group, Need(capability="plan_once", value=True, origin="configuration")
    )


def _backend_refusals(loaded: LoadedConfig, offers: Offers, group: GroupPlan, wanted: Need, *more: Need) -> list[str]:
    """Return the backend's reasons against further needs, given the layers' own needs, which may narrow it."""
    backend = offers[Kind.ATTENTION, group.backend]
    others = [Need(capability=feature, value=True, origin="model") for feature in _features(group.layers[0])]
    others.append(Need(capability="batch_invariant", value=loaded.config.batch_invariant, origin="configuration"))
    reasons = part_reasons(backend.capabilities, (wanted, *more, *others))
    return [f"attention backend {group.backend!r}: {reason.text}" for reason in reasons]


def _features(layer: AttentionLayer) -> tuple[str, ...]:
    """Return the capabilities that this layer needs of its backend and other layers may not."""
    features = {
        "mla": layer.mla,
        "sliding_window": layer.window is not None,
        "chunked": layer.chunk is not None,
        "soft_cap": layer.soft_cap is not None,
        "sinks": layer.sinks,
        "alibi": layer.alibi_slopes is not None,
        "keys_ahead": layer.keys_ahead,
        "position_bias": layer.position_bias is not None,
        "index_topk": layer.index_topk is not None,
    }
    return tuple(name for name, needed in features.items() if needed)


def choose_processors(
    loaded: LoadedConfig, registry: PluginRegistry, info: DeviceInfo, *, drafting: bool
) -> tuple[Descriptor[Any], ...]:
    """Return the default logits processors and the configured ones, with the capabilities that their probes left.

    Raises:
        NegotiationError: if a processor cannot run on this device or with a drafter, with every reason.
    """
    chosen = {d.name: d for d in registry.candidates(Kind.LOGITS_PROCESSOR) if d.capabilities.default}
    for name in loaded.config.logits_processors:
        chosen[name] = registry.load(Kind.LOGITS_PROCESSOR, name, required=True)
    fix = "do without it, or remove what it cannot work with"
    drafter = f"drafter.name = {loaded.config.drafter.name!r}"
    needs = (device_need(info), Need(capability="speculation", value=drafting, origin=drafter))
    processors = [narrowed(d, info, f"logits processor {name!r}", fix) for name, d in chosen.items()]
    for descriptor in processors:
        if texts := texts_of(part_reasons(descriptor.capabilities, needs)):
            raise NegotiationError(f"logits processor {descriptor.name!r} cannot be used: {'; '.join(texts)}", fix=fix)
    return tuple(processors)


def device_need(info: DeviceInfo) -> Need:
    """Return the need for a plugin that runs on this type of device."""
    return Need(capability="devices", value=info.need, origin=f"device {info.type}")


def texts_of(reasons: Sequence[Reason]) -> list[str]:
    """Return each reason as a sentence with its code and origin."""
    return [f"{reason.code} {reason.text} ({reason.origin})" for reason in reasons]
