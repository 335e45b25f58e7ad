"""Plans and failures as text: the same data as their JSON, with a fixed width, equal in every run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from textwrap import fill
from types import MappingProxyType
from typing import Any, TypeAlias

from slotline.registry.contracts.cache_tensors import PLAIN
from slotline.registry.errors import ConfigError, NegotiationError
from slotline.registry.negotiation.codes import CODES
from slotline.registry.negotiation.columns import LABEL, hang, place, row, rows, table
from slotline.registry.negotiation.failure import Conflict, Failure, GroupFailure
from slotline.registry.negotiation.groups import NONE, CacheGroupPlan, GroupPlan, StateCachePlan, StateGroupPlan
from slotline.registry.negotiation.plan import Plan
from slotline.registry.negotiation.reasons import Note, Rejection
from slotline.registry.negotiation.weight_groups import WeightGroupPlan

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of a parameter, by the plan's dtype."""

_SCALES: Mapping[str, str] = MappingProxyType(
    {
        "checkpoint": "of the cache: the checkpoint's",
        "calculate": "of the cache: calculated from the first step, which runs without graphs",
        "1": "of the cache: 1",
    }
)
_AnyGroup: TypeAlias = GroupPlan | CacheGroupPlan | StateGroupPlan | WeightGroupPlan | GroupFailure


def explain_plan(plan: Plan, width: int = 100) -> str:
    """Return a text with the choices, their reasons, the rejections, and the differences from the request."""
    lines = [_headline(plan)]
    if plan.facts:
        lines += row("model", ", ".join(f"{key} {value}" for key, value in plan.facts.items()), width)
    if plan.measured:
        lines += row("measured", plan.measured, width)
    lines += rows("stages", _stages(plan), width)
    lines += rows("inline code", plan.inline_plugins, width)
    for group in plan.groups:
        lines += ["", *_group(group, width)]
    for state_group in plan.state_groups:
        lines += ["", *_state_group(state_group, width)]
    lines += _weights(plan, width)
    lines += ["", *(line for group in plan.cache_groups for line in _cache_group(group, width))]
    lines += rows("pool", plan.pool.lines() if plan.pool else (), width)
    for cache in plan.state_caches:
        lines += _state_cache(cache, width)
    lines += rows("", plan.states.lines(plan.pool) if plan.states else (), width)
    lines += _graphs(plan, width)
    lines += rows("parts", _parts(plan), width)
    lines += ["", "settings", *_settings(plan)]
    for label, notes in (("changed", plan.downgrades), ("warning", plan.warnings), ("note", plan.notes)):
        lines += [line for note in notes for line in ("", *_note(label, note, width))]
    return "\n".join(lines) + "\n"


def explain_failure(failure: Failure, width: int = 100) -> str:
    """Return a text with the reasons why there is no plan, the objections, and remedies."""
    lines = [*hang(f"no plan  {failure.code} ", failure.message, width)]
    for number, members in enumerate((failure.conflict, *failure.further)):
        lines += _conflict(members, width, "apart from that, " if number else "")
    if failure.remedies:
        label = "any one of these makes a plan possible (each was tried)"
        lines += ["", label, *(line for text in failure.remedies for line in hang("  ", text, width))]
    for group in failure.groups:
        lines += ["", *_group_failure(group, width)]
    for note in failure.notes:
        lines += ["", *_note("objection" if note.code == failure.code else "changed", note, width)]
    return "\n".join(lines) + "\n"


def explain_code(name: str, width: int = 100) -> str:
    """Return a code's long text.

    Raises:
        ConfigError: if the code does not exist.
    """
    code = CODES.get(name.upper())
    if code is None:
        close = get_close_matches(name.upper(), CODES, n=3)
        raise ConfigError(f"there is no code {name!r}", fix=f"did you mean {', '.join(close)}?" if close else None)
    parts = (f"{code.name}  {code.title}  ({code.severity.value})", code.explanation, f"What to do: {code.fix}")
    return "\n\n".join(fill(part, width, break_long_words=False) for part in parts) + "\n"


def why_not(outcome: Plan | NegotiationError | Failure, name: str, width: int = 100) -> str:
    """Return the reasons why a plugin was not chosen, group by group.

    Raises:
        ConfigError: if no candidate has that name.
    """
    failure = outcome.failure if isinstance(outcome, NegotiationError) else outcome
    groups = _all_groups(failure)
    lines = [line for group in groups for line in _why_not(group, name, width)]
    if not lines:
        known = sorted({item for group in groups for item in _names(group)})
        raise ConfigError(f"{name!r} took no part in the negotiation", fix=f"these did: {', '.join(known) or 'none'}")
    return "\n".join(lines) + "\n"


def diff(before: Plan, after: Plan) -> str:
    """Return the differences between two plans, one line per key: ``key: old -> new``."""
    old, new = _flat(before.decision()), _flat(after.decision())
    changed = sorted(key for key in old.keys() | new.keys() if old.get(key, "-") != new.get(key, "-"))
    if not changed:
        return f"plan {before.short_digest}: no difference\n"
    head = f"plan {before.short_digest} -> {after.short_digest}"
    return "\n".join([head, *(f"  {key}: {old.get(key, '-')} -> {new.get(key, '-')}" for key in changed)]) + "\n"


def _headline(plan: Plan) -> str:
    device = plan.device
    version = "" if device.compute_capability is None else " {}.{}".format(*device.compute_capability)
    name = f"{device.name} ({device.type}{version})" if device.name else f"{device.type}{version}"
    counts = f"{len(plan.downgrades)} changed, {_count(len(plan.warnings), 'warning')}"
    return f"plan {plan.short_digest}  {name}  {plan.dtype}/{plan.kv_dtype}  {counts}"


def _stages(plan: Plan) -> Iterator[str]:
    """Yield each stage's device, layers and weights."""
    for index, stage in enumerate(plan.stages):
        weights = stage.num_parameters * _BYTES[plan.dtype] / 2**20
        yield (
            f"{index} on {stage.device}: layers {stage.first_layer} to {stage.end_layer - 1}, "
            f"{stage.num_parameters:,} parameters, {weights:,.1f} MiB"
        )


def _group(group: GroupPlan, width: int) -> list[str]:
    layer = group.layers[0]
    facts = [_count(len(group.layers), "layer"), f"heads {layer.num_heads}/{layer.num_kv_heads}"]
    facts.append(
        f"head size {layer.head_size}" + ("" if layer.head_size == layer.head_size_v else f"/{layer.head_size_v}")
    )
    facts += [f"window {layer.window}"] if layer.window is not None else []
    facts += [f"chunk {layer.chunk}"] if layer.chunk is not None else []
    facts += [f"soft cap {layer.soft_cap:g}"] if layer.soft_cap is not None else []
    facts += ["sinks"] if layer.sinks else []
    facts += ["ALiBi"] if layer.alibi_slopes is not None else []
    facts += ["tokens of an image or a drafted block see all of it"] if layer.keys_ahead else []
    facts += ["position bias"] if layer.position_bias is not None else []
    facts += [f"MLA, latent {layer.head_size_v}"] if layer.mla else []
    facts += [f"index picks {layer.index_topk} keys"] if layer.index_topk is not None else []
    if users := sum(one.index_from is not None for one in group.layers):
        facts.append(f"{_count(users, 'layer')} by the picks of another")
    facts += [f"inputs {', '.join(each.name for each in layer.inputs)}"] if layer.inputs else []
    inline = ", inline" if group.inline else ""
    chosen = f"{_named(group.backend, group)}, contract {group.contract}{inline}: {group.reason}"
    lines = [*hang(f"group {group.name}  ", ", ".join(facts), width), *row("backend", chosen, width, indent=2)]
    cache = f"cache {group.cache_group}, " if group.cache_group else ""
    blocks = f"{cache}block {group.block_size}, kernel block {group.kernel_block_size}, layout {group.layout}"
    lines += row("blocks", blocks, width, indent=2)
    lines += row("queries", f"{group.query_len} in uniform batches, {group.max_query_len} at most", width, indent=2)
    lines += row("graphs", ", ".join(f"{phase} {state}" for phase, state in group.graphs), width, indent=2)
    if group.cascade != NONE:
        lines += row("cascade", f"a prefix that requests share is read once, {group.cascade}", width, indent=2)
    elif group.cascade_refusal:
        text = f"a prefix that all requests share is read for each of them: {group.cascade_refusal}"
        lines += row("cascade", text, width, indent=2)
    if group.fast_prefill:
        text = "runs only for the tokens whose logits are wanted, in steps without a graph"
        lines += row("prefill", text, width, indent=2)
    if group.last_queries:
        text = "the last layer may leave out unwanted queries, in steps without a graph"
        lines += row("prefill", text, width, indent=2)
    if group.cache_format != PLAIN:
        lines += row("format", f"{group.cache_format}, which spec and backend share", width, indent=2)
    if group.workspace:
        size = f"{group.workspace:,} bytes beside the cache, taken before the pool is sized"
        lines += row("workspace", size, width, indent=2)
    if group.edges:
        lines += row("edges", f"{', '.join(group.edges)}: left to the backend", width, indent=2)
    for reason in group.kept_edges:
        lines += row("edges", f"{reason.code} {reason.text}", width, indent=2)
    if group.approximate:
        lines += row("approximate", group.approximate, width, indent=2)
    if group.kv_scales:
        lines += row("scales", _SCALES[group.kv_scales], width, indent=2)
    return lines + _rejected(group.rejected, width, "rejected")


def _state_group(group: StateGroupPlan, width: int) -> list[str]:
    tensors = [f"{tensor.name} {list(tensor.shape)} {tensor.dtype}" for tensor in group.layers[0].tensors]
    facts = ", ".join([_count(len(group.layers), "layer"), *tensors])
    inline = ", inline" if group.inline else ""
    chosen = f"{_named(group.backend, group)}, contract {group.contract}{inline}: {group.reason}"
    lines = [*hang(f"state group {group.name}  ", facts, width), *row("backend", chosen, width, indent=2)]
    lines += row("queries", f"{group.max_query_len} at most", width, indent=2)
    lines += row("graphs", ", ".join(f"{phase} {state}" for phase, state in group.graphs), width, indent=2)
    return lines + _rejected(group.rejected, width, "rejected")


def _weights(plan: Plan, width: int) -> list[str]:
    """Return the format of quantized weights and the groups of modules."""
    if not plan.weight_format:
        return []
    lines = ["", *row("weights", plan.weight_format, width)]
    for group in plan.weight_groups:
        lines += ["", *_weight_group(group, width)]
    return lines


def _weight_group(group: WeightGroupPlan, width: int) -> list[str]:
    module = group.modules[0]
    experts = f"{module.experts} experts of " if module.experts else ""
    facts = [_count(len(group.modules), "module"), f"{experts}{module.in_features} -> {module.out_features}"]
    facts.append(group.scheme.describe())
    inline = ", inline" if group.inline else ""
    chosen = f"{_named(group.plugin, group)}, contract {group.contract}{inline}: {group.reason}"
    lines = [*hang(f"weight group {group.name}  ", ", ".join(facts), width), *row(group.kind, chosen, width, indent=2)]
    text = f"{_size(group.num_bytes)}, {_size(group.plain_bytes)} in full precision"
    lines += row("memory", text, width, indent=2)
    if group.measured:
        times = ", ".join(f"{name} {one:,.1f} and {many:,.1f} us" for name, one, many in group.measured)
        lines += row("measured", f"a token alone and among many: {times}", width, indent=2)
    return lines + _rejected(group.rejected, width, "rejected")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"


def _rejected(rejected: Sequence[Rejection], width: int, label: str) -> list[str]:
    if not rejected:
        return []
    size = max(len(item.name) for item in rejected) + 2
    lines: list[str] = []
    for item in rejected:
        for number, reason in enumerate(item.reasons):
            first = not lines
            head = (f"  {label}" if first else "").ljust(LABEL) + (item.name if number == 0 else "").ljust(size)
            origin = f" ({reason.origin})" if reason.origin and reason.origin not in reason.text else ""
            lines += hang(f"{head}{reason.code} ", reason.text + origin, width)
    return lines


def _cache_group(group: CacheGroupPlan, width: int) -> list[str]:
    waste = f", inexact for {', '.join(group.inexact)}" if group.inexact else ""
    text = (
        f"{group.name}: kv_spec {_named(group.kv_spec, group)} holds {_count(len(group.layers), 'layer')} "
        f"of kind {', '.join(group.kinds)}{waste}: {group.reason}"
    )
    return [*row("cache", text, width), *_rejected(group.rejected, width, "rejected")]


def _state_cache(cache: StateCachePlan, width: int) -> list[str]:
    waste = f", inexact for {', '.join(cache.inexact)}" if cache.inexact else ""
    text = (
        f"kv_spec {_named(cache.kv_spec, cache)} holds the states of {_count(len(cache.layers), 'layer')} "
        f"of kind {', '.join(cache.kinds)}{waste}: {cache.reason}"
    )
    return [*row("states", text, width), *_rejected(cache.rejected, width, "rejected")]


def _graphs(plan: Plan, width: int) -> list[str]:
    graphs = plan.graphs
    phases = ", ".join(f"{phase} {state}" for phase, state in graphs.phases)
    reason = f"; {graphs.reason}" if graphs.reason else ""
    texts = [f"{graphs.resolved} ({phases}), asked {graphs.asked}{reason}"]
    return rows("graphs", texts + ([f"measured: {graphs.measured}"] if graphs.measured else []), width)


def _parts(plan: Plan) -> Iterator[str]:
    for part in plan.parts:
        yield f"{part.kind} {_named(part.name, part)}: {part.origin}"


def _settings(plan: Plan) -> list[str]:
    cells = [(s.key, s.asked, "->", s.resolved, place(s.origin, s.key)) for s in plan.settings]
    return table([("key", "asked", "", "resolved", "from"), *cells], "  ")


def _note(label: str, note: Note, width: int) -> list[str]:
    title = CODES[note.code].title
    lines = row(label, f"{note.code} {title}: {note.text} [{note.key}]", width)
    lines += rows("because", note.because, width, indent=2)
    lines += rows("to avoid", note.to_avoid, width, indent=2)
    return lines


def _conflict(members: Sequence[Conflict], width: int, lead: str) -> list[str]:
    if not members:
        return []
    alone = "nothing that could be chosen offers this"
    together = "these needs cannot hold together; without any one of them the rest of them can"
    lines = ["", lead + (alone if len(members) == 1 else together)]
    return lines + [line for member in members for line in _member(member, width)]


def _member(member: Conflict, width: int) -> list[str]:
    text = f"{member.key} = {member.value} ({member.origin})"
    if member.inherent:
        text += ": given, no setting changes it"
    elif not member.sufficient:
        text += ": giving this up does not suffice for the whole request"
    return hang("  - ", text, width)


def _group_failure(group: GroupFailure, width: int) -> list[str]:
    what = {"kv_spec": "cache spec for", "state": "state group"}.get(group.kind, "group")
    head = f"{what} {group.name}, {_count(group.layers, 'layer')}"
    return [head, *(_rejected(group.rejected, width, "refused") or ["  there is no candidate"])]


def _all_groups(outcome: Plan | Failure | None) -> Sequence[_AnyGroup]:
    if outcome is None:
        return ()
    if isinstance(outcome, Plan):
        return (*outcome.groups, *outcome.state_groups, *outcome.weight_groups, *outcome.cache_groups)
    return outcome.groups


def _chosen(group: _AnyGroup) -> str | None:
    if isinstance(group, GroupPlan | StateGroupPlan):
        return group.backend
    if isinstance(group, WeightGroupPlan):
        return group.plugin
    return group.kv_spec if isinstance(group, CacheGroupPlan) else None


def _why_not(group: _AnyGroup, name: str, width: int) -> list[str]:
    of_cache = isinstance(group, CacheGroupPlan) or (isinstance(group, GroupFailure) and group.kind == "kv_spec")
    label = f"cache {group.name}" if of_cache else group.name
    if not isinstance(group, GroupFailure) and _chosen(group) == name:
        return row(label, f"{name} was chosen: {group.reason}", width)
    return [
        line
        for item in group.rejected
        if item.name == name
        for line in rows(label, [f"{r.code} {r.text}{_origin(r.origin)}" for r in item.reasons], width)
    ]


def _origin(origin: str) -> str:
    return f" ({origin})" if origin else ""


def _names(group: _AnyGroup) -> list[str]:
    chosen = _chosen(group)
    return ([] if chosen is None else [chosen]) + [item.name for item in group.rejected]


def _named(name: str, item: Any) -> str:
    source = " ".join(text for text in (item.distribution, item.version) if text)
    return f"{name} ({source})" if source else name


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Return nested mappings and lists as dotted keys. Items with a name are keyed by it."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and all(isinstance(item, Mapping) and "name" in item for item in value):
        items = [(str(item["name"]), item) for item in value]
    else:
        return {prefix: str(value)}
    dot = f"{prefix}." if prefix else ""
    return {path: text for key, item in items for path, text in _flat(item, f"{dot}{key}").items()}
