"""Choice of the weight format of a checkpoint, and of the plugins that multiply by its quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, frozen

from slotline.planner.weight_timing import product_times
from slotline.registry.config import LoadedConfig
from slotline.registry.contracts import ModelFacts
from slotline.registry.contracts.experts import ExpertsContext
from slotline.registry.contracts.linear import LinearContext
from slotline.registry.contracts.model_family import SAVED_WEIGHTS
from slotline.registry.contracts.weight_format import WeightFormat, WeightFormatContext
from slotline.registry.contracts.weights import WeightModule, WeightScheme
from slotline.registry.descriptor import Descriptor, DeviceInfo, Kind
from slotline.registry.discovery import PluginRegistry
from slotline.registry.errors import ModelError, NegotiationError
from slotline.registry.json_file import read_json, read_object
from slotline.registry.loading import bind_contract
from slotline.registry.negotiation import Candidate, Need, Plan, Reason, Rejection, Setting, candidates, part_reasons
from slotline.registry.negotiation.failure import Failure, GroupFailure
from slotline.registry.negotiation.offers import not_asked_for, usability
from slotline.registry.negotiation.weight_groups import WeightGroupPlan
from slotline.registry.tensor_reader import SafetensorsReader

_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_FULL = "use the checkpoint in bfloat16, float16 or float32"


@frozen(kw_only=True, eq=False)
class FormatChoice:
    """Weight format of a checkpoint.

    Attributes:
        descriptor: the plugin.
        format: the built reader.
        method: the checkpoint's `quant_method`, or the value of `weights.quantize`.
        online: True if plain weights are quantized at load.
        saved: True if they were, and are read from a saved folder.
    """

    descriptor: Descriptor[Any]
    format: WeightFormat
    method: str
    online: bool
    saved: bool = False


@frozen(kw_only=True, eq=False)
class WeightsChoice:
    """Plugins for the quantized weights of a plan.

    Attributes:
        source: the weight format.
        groups: the decisions.
        descriptors: of the chosen plugins, by slot and name.
    """

    source: FormatChoice
    groups: tuple[WeightGroupPlan, ...]
    descriptors: Mapping[tuple[str, str], Descriptor[Any]]


def choose_format(
    loaded: LoadedConfig,
    registry: PluginRegistry,
    path: Path,
    family: Descriptor[Any],
    *,
    saved: str = "",
    hint: Callable[[], str] = str,
) -> FormatChoice | None:
    """Return the format that reads a checkpoint's quantized weights, or that quantizes them at load. None if neither.

    Args:
        saved: the method by which weights were quantized before they were saved.
        hint: returns what to add to the fix if the family does not take quantized weights.

    Raises:
        ModelError: if no plugin reads them.
        NegotiationError: if weights cannot be quantized as asked.
    """
    asked = loaded.config.weights.quantize or saved
    config, method = _quantization_of(registry, path)
    if asked and method:
        raise NegotiationError(
            f"weights.quantize = {asked!r} ({loaded.origins['weights.quantize'].where}): {path} already holds "
            f"quantized weights ({method})",
            fix='set weights.quantize = "", or take the checkpoint in full precision',
        )
    if not (asked or method):
        return None
    descriptor = _reader(registry, path, asked or method, online=bool(asked))
    if refusal := family.capabilities.quantized.refusal(True):
        raise ModelError(
            f"{path} is to run with quantized weights ({asked or method}), and model family {family.name!r}: {refusal}",
            fix=_FULL if method else f'set weights.quantize = ""{hint()}',
        )
    context = WeightFormatContext(
        contract=bind_contract(descriptor),
        path=path,
        config=config,
        tensors=SafetensorsReader(path),
        method=asked or method,
        options=registry.options(loaded, descriptor),
    )
    return FormatChoice(
        descriptor=descriptor,
        format=registry.build(descriptor, context),
        method=asked or method,
        online=bool(asked),
        saved=bool(saved),
    )


def choose_weights(
    loaded: LoadedConfig,
    registry: PluginRegistry,
    info: DeviceInfo,
    facts: ModelFacts,
    source: FormatChoice,
    plan: Plan,
    device: str,
    whole: ModelFacts | None = None,
) -> WeightsChoice:
    """Return the plugin of each group of modules with equal schemes and sizes.

    Args:
        whole: facts of the whole model, if `facts` are of a rank's part.

    Raises:
        NegotiationError: naming a module, its scheme and the reason of every plugin, if none serves a group. Also if
            ranks would divide a group with one scale.
    """
    found: dict[Any, list[WeightModule]] = {}
    ranked = whole is not None and whole is not facts
    uncut = {module.name: module for module in (whole or facts).weight_modules}
    for module in facts.weight_modules:
        name = module.name if source.online else module.stored
        scheme = source.format.scheme_of(name, module.kind) if name else None
        if scheme is not None:
            scheme = _permitting(scheme, loaded.config.weights.activation)
            _refuse_cut_groups(uncut[module.name], module, scheme)
            slot = Kind.EXPERTS if module.kind == "experts" else Kind.LINEAR
            extra = (module.experts, module.interleaved, module.activation, module.constants, module.bias)
            split = scheme.act_order and uncut[module.name].in_features != module.in_features
            found.setdefault((slot, scheme, split, module.in_features, module.out_features, extra), []).append(module)
    if not found:
        raise ModelError(
            f"{facts.path} holds quantized weights by its configuration ({source.method}), and none of its "
            f"{len(facts.weight_modules)} modules has any",
            fix="download config.json and the weights again, or remove the quantization configuration",
        )
    offers = {slot: candidates(registry, slot, info) for slot in dict.fromkeys(key[0] for key in found)}
    groups, descriptors, names = [], {}, dict[str, int]()
    for (slot, scheme, split, *_), modules in found.items():
        name = _name(modules, names)
        chooser = _Chooser(loaded, registry, info, plan, device, slot, scheme, tuple(modules), name, ranked, split)
        group, descriptor = chooser.choose(offers[slot])
        groups.append(group)
        descriptors[slot.value, descriptor.name] = descriptor
    return WeightsChoice(source=source, groups=tuple(groups), descriptors=descriptors)


def _permitting(scheme: WeightScheme, asked: Literal["auto", "none", "int8", "fp8"]) -> WeightScheme:
    """Return a scheme with the rounding of activations that the configuration permits."""
    if asked == "auto" or (permitted := "" if asked == "none" else asked) == scheme.activation:
        return scheme
    return evolve(scheme, activation=permitted, dynamic=True)


def with_weights(plan: Plan, loaded: LoadedConfig, registry: PluginRegistry, choice: WeightsChoice) -> Plan:
    """Return the plan with the decisions for quantized weights."""
    source = choice.source
    done = "quantizes the weights at load" if source.online and not source.saved else "reads the weights"
    record = registry.record(Kind.WEIGHT_FORMAT, source.descriptor.name)
    settings = []
    for key, slot in (("linear", "linear"), ("experts", "experts")):
        names = dict.fromkeys(group.plugin for group in choice.groups if group.kind == slot)
        asked = getattr(loaded.config.weights, key)
        if names:
            origin = loaded.origins[f"weights.{key}"].where if asked != "auto" else "default"
            settings.append(
                Setting(
                    key=f"weights.{key}",
                    asked=asked,
                    resolved=", ".join(names),
                    origin=origin,
                    explicit=asked != "auto",
                )
            )
    if (asked := loaded.config.weights.activation) != "auto":
        where = loaded.origins["weights.activation"].where
        settings.append(Setting(key="weights.activation", asked=asked, resolved=asked, origin=where, explicit=True))
    if source.online:
        asked = loaded.config.weights.quantize
        origin = loaded.origins["weights.quantize"].where if asked else SAVED_WEIGHTS
        explicit = bool(asked)
        settings.append(
            Setting(key="weights.quantize", asked=asked, resolved=source.method, origin=origin, explicit=explicit)
        )
    for group in choice.groups:
        registry.mark_selected(Kind(group.kind), group.plugin)
    registry.mark_selected(Kind.WEIGHT_FORMAT, source.descriptor.name)
    return evolve(
        plan,
        weight_format=f"{source.descriptor.name} ({record.distribution} {record.version}) {done}: {source.method}",
        weight_groups=choice.groups,
        settings=(*plan.settings, *settings),
    )


@frozen(eq=False)
class _Chooser:
    """Choice of the plugin for one group of modules."""

    loaded: LoadedConfig
    registry: PluginRegistry
    info: DeviceInfo
    plan: Plan
    device: str
    slot: Kind
    scheme: WeightScheme
    modules: tuple[WeightModule, ...]
    name: str
    ranked: bool = False
    split: bool = False

    @property
    def asked(self) -> str:
        return str(getattr(self.loaded.config.weights, self.slot.value))

    def choose(self, offered: Sequence[Candidate]) -> tuple[WeightGroupPlan, Descriptor[Any]]:
        reasons = [(candidate, self._reasons(candidate)) for candidate in self._with_named(offered)]
        fits = [candidate for candidate, against in reasons if not against]
        if not fits:
            raise self._refusal(reasons)
        chosen, reason, times = self._best(fits)
        assert chosen.descriptor is not None  # it fits
        descriptor = evolve(chosen.descriptor, capabilities=chosen.capabilities)
        built = self.registry.build(descriptor, self.context(descriptor))
        lost = Reason(code="N191", text=f"{chosen.name} was preferred: {reason}")
        return (
            WeightGroupPlan(
                name=self.name,
                kind=self.slot.value,
                modules=self.modules,
                scheme=self.scheme,
                plugin=chosen.name,
                distribution=chosen.distribution,
                version=chosen.version,
                contract=chosen.contract or 1,
                inline=chosen.inline,
                num_bytes=len(self.modules) * self._num_bytes(built),
                plain_bytes=sum(map(_elements, self.modules)) * _BYTES[self.plan.dtype],
                reason=reason,
                measured=tuple(sorted(((name, *us) for name, us in times.items()), key=lambda item: item[1] + item[2])),
                rejected=tuple(_rejection(item, against or (lost,)) for item, against in reasons if item is not chosen),
            ),
            descriptor,
        )

    def context(self, descriptor: Descriptor[Any]) -> LinearContext | ExpertsContext:
        """Return the input of a plugin's factory."""
        return kernel_context(
            self.loaded, self.registry, descriptor, self.modules[0], self.scheme, self.plan.dtype, self.device
        )

    def _num_bytes(self, built: Any) -> int:
        first = self.modules[0]
        return int(built.num_bytes() if first.experts else built.num_bytes(first.out_features, first.in_features))

    def _with_named(self, offered: Sequence[Candidate]) -> list[Candidate]:
        known = {candidate.name for candidate in offered}
        return [*offered, *([Candidate(name=self.asked)] if self.asked not in ("auto", *known) else [])]

    def _reasons(self, candidate: Candidate) -> tuple[Reason, ...]:
        where = f"weights.{self.slot.value} ({self.loaded.origins[f'weights.{self.slot.value}'].where})"
        choice = () if self.asked in ("auto", candidate.name) else (not_asked_for((self.asked,), where),)
        if unusable := usability(candidate):
            return (*unusable, *choice)
        rounds = candidate.capabilities.activation
        rounding: tuple[Reason, ...] = ()
        if rounds and rounds != self.scheme.activation:
            permitted = self.scheme.activation or "none"
            text = f"rounded activations: it rounds them to {rounds}, the scheme permits {permitted}"
            ruled = self.loaded.config.weights.activation != "auto"
            origin = self.loaded.origins["weights.activation"].where if ruled else f"model: {self.name}"
            rounding = (Reason(code="N118", text=text, origin=origin),)
        return (*part_reasons(candidate.capabilities, self._needs()), *rounding, *choice)

    def _needs(self) -> Iterable[Need]:
        scheme, first, origin = self.scheme, self.modules[0], f"model: {self.name}"
        needs = {
            "schemes": scheme.name,
            "granularities": scheme.granularity,
            "scale_groups": scheme.group[1] or None,
            "ragged": bool(scheme.group[1]) and first.in_features % scheme.group[1] > 0,
            "offsets": not scheme.symmetric,
            "in_features": first.in_features,
            "out_features": first.out_features,
            **(
                {"activations": first.activation, "bias": first.bias, "max_experts": first.experts}
                if first.experts
                else {"act_order": scheme.act_order, "split_order": self.split}
            ),
        }
        yield Need(capability="devices", value=self.info.need, origin=f"device {self.info.type}")
        yield Need(capability="dtypes", value=self.plan.dtype, origin="dtype of activations")
        for capability, value in needs.items():
            yield Need(capability=capability, value=value, origin=origin)
        if self.loaded.config.batch_invariant:
            yield Need(capability="batch_invariant", value=True, origin="batch_invariant = true")

    def _best(self, fits: list[Candidate]) -> tuple[Candidate, str, dict[str, tuple[float, float]]]:
        if len(fits) == 1:
            named = f"named in weights.{self.slot.value}"
            return fits[0], named if self.asked != "auto" else "the only candidate that fits", {}
        by_priority = sorted(fits, key=lambda item: (-item.capabilities.priority, item.name))
        names = tuple(item.name for item in by_priority)
        ranking = self.registry.hooks.rank_candidates(self.slot.value, self.name, names, self.info)
        if ranking is not None:
            first = min(by_priority, key=lambda item: ranking.place(item.name))
            return first, f"{len(fits)} candidates fit; {ranking.label} puts it first", {}
        if self.ranked:
            return by_priority[0], f"{len(fits)} candidates fit; decided by priority, as ranks measure apart", {}
        if self.slot is Kind.LINEAR and "cpu" in (self.info.type, *self.info.compatible_with):
            times = product_times(self.registry, by_priority, self.context, self.info)
            best = min(by_priority, key=lambda item: sum(times[item.name]))
            return best, f"{len(fits)} candidates fit; the fastest on this machine", times
        return by_priority[0], f"{len(fits)} candidates fit; decided by priority", {}

    def _refusal(self, reasons: Sequence[tuple[Candidate, tuple[Reason, ...]]]) -> NegotiationError:
        first = self.modules[0]
        texts = [
            f"{item.name}: {'; '.join(f'{r.code} {r.text}' for r in against)}"
            for item, against in reasons
            if self.asked in ("auto", item.name)
        ]
        sizes = f"{first.in_features} inputs, {first.out_features} outputs"
        message = (
            f"no {self.slot.value} plugin multiplies by {first.name} and {len(self.modules) - 1} more of scheme "
            f"{self.scheme.describe()} ({sizes}): {'. '.join(texts) or 'none is installed'}"
        )
        failure = Failure(
            code="N502",
            message=message,
            groups=(
                GroupFailure(
                    name=self.name,
                    kind=self.slot.value,
                    layers=len(self.modules),
                    rejected=tuple(_rejection(item, against) for item, against in reasons),
                ),
            ),
        )
        fix = f"install or name a {self.slot.value} plugin that serves the scheme, or {_FULL}"
        if self.asked != "auto":
            fix = f'set weights.{self.slot.value} = "auto"'
        return NegotiationError(f"N502 {message}", fix=fix, failure=failure)


def _refuse_cut_groups(whole: WeightModule, own: WeightModule, scheme: WeightScheme) -> None:
    """Refuse a division of a module among ranks that divides a group with one scale.

    Raises:
        NegotiationError: naming the module and the sizes.
    """
    rows, columns = scheme.group
    inputs, outputs = own.in_features, own.out_features
    cut_inputs, cut_outputs = whole.in_features != inputs, whole.out_features != outputs
    if own.experts:  # the inputs of the second product are what the first one gives for gate or up
        inputs, outputs, cut_inputs = outputs // 2, outputs // 2, cut_outputs
    if cut_inputs and columns > 1 and inputs % columns and not scheme.act_order:
        raise _cut_group(own, scheme, f"{inputs} inputs, and {columns}")
    if cut_outputs and rows > 1 and outputs % rows and own.kind != "head":
        raise _cut_group(own, scheme, f"{outputs} outputs, and {rows}")


def _cut_group(module: WeightModule, scheme: WeightScheme, sizes: str) -> NegotiationError:
    return NegotiationError(
        f"{module.name}, {scheme.describe()}, cannot be divided among ranks: a rank would have {sizes} share a scale",
        fix="set parallel.tensor to another number, or take a checkpoint with smaller groups",
    )


def kernel_context(
    loaded: LoadedConfig,
    registry: PluginRegistry,
    descriptor: Descriptor[Any],
    module: WeightModule,
    scheme: WeightScheme,
    dtype: str,
    device: str,
) -> LinearContext | ExpertsContext:
    """Return the input of a linear or experts plugin's factory for a group of modules like this one."""
    common: dict[str, Any] = {
        "contract": bind_contract(descriptor),
        "scheme": scheme,
        "in_features": module.in_features,
        "out_features": module.out_features,
        "dtype": dtype,
        "device": device,
        "max_tokens": loaded.config.scheduler.max_batched_tokens,
        "batch_invariant": loaded.config.batch_invariant,
        "options": registry.options(loaded, descriptor),
    }
    if not module.experts:
        return LinearContext(**common)
    return ExpertsContext(
        experts=module.experts,
        interleaved=module.interleaved,
        activation=module.activation,
        constants=dict(module.constants),
        **common,
    )


def weights_capture_refusal(choice: WeightsChoice | None) -> str | None:
    """Return the reason why a plan's products cannot be captured in graphs, or None."""
    for group in choice.groups if choice is not None else ():
        assert choice is not None
        level = choice.descriptors[group.kind, group.plugin].capabilities.graphs.value
        if level == 0:
            return f"{group.kind} plugin {group.plugin!r} of {group.name} cannot be captured"
    return None


def _elements(module: WeightModule) -> int:
    """Return the number of elements of a module's weights."""
    if module.experts:
        return module.experts * module.in_features * (module.out_features + module.out_features // 2)
    return module.in_features * module.out_features


def _name(modules: Sequence[WeightModule], seen: dict[str, int]) -> str:
    """Return a group's name: the last parts of its modules' names, with a number if another group has the same."""
    parts = dict.fromkeys(module.name.rpartition(".")[2] for module in modules)
    name = "+".join(parts)
    number = seen[name] = seen.get(name, -1) + 1
    return f"{name}_{number}" if number else name


def _rejection(candidate: Candidate, reasons: tuple[Reason, ...]) -> Rejection:
    return Rejection(
        name=candidate.name, distribution=candidate.distribution, version=candidate.version, reasons=reasons
    )


def _reader(registry: PluginRegistry, path: Path, method: str, *, online: bool) -> Descriptor[Any]:
    """Return the weight format for a method.

    Raises:
        ModelError: naming the installed ones, if none reads it.
        NegotiationError: if none quantizes by it.
    """
    every = [one for one in registry.candidates(Kind.WEIGHT_FORMAT) if bool(one.capabilities.online.support) == online]
    for descriptor in every:
        if descriptor.capabilities.methods.refusal(method) is None:
            return descriptor
    known = "; ".join(f"{one.name} ({one.capabilities.methods.describe()})" for one in every) or "none"
    if online:
        raise NegotiationError(
            f"weights.quantize = {method!r}: no weight_format plugin quantizes so; installed are {known}",
            fix='use one of these, or set weights.quantize = ""',
        )
    raise ModelError(
        f"{path} holds quantized weights (quant_method {method!r}), which no weight_format plugin reads; installed are "
        f"{known}",
        fix=f"install a weight_format plugin for {method!r}, or {_FULL}",
    )


def _quantization_of(registry: PluginRegistry, path: Path) -> tuple[Mapping[str, Any], str]:
    """Return a checkpoint's quantization configuration and its method, both empty for plain weights."""
    raw = read_json(path / "config.json")
    nested = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else {}
    keys = ("quantization_config", "compression_config")
    found = next((one[key] for one in (raw, nested) for key in keys if isinstance(one.get(key), dict)), None)
    if found is None:
        found = _of_own_file(registry, path)
    if not found or _cache_alone(found):
        return {}, ""
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"
    return found, str(method if method is not None else "unnamed")


def _of_own_file(registry: PluginRegistry, path: Path) -> Mapping[str, Any] | None:
    """Return the configuration in a file of its own that a weight format knows, with the format's method."""
    for descriptor in registry.candidates(Kind.WEIGHT_FORMAT):
        for name in descriptor.capabilities.files:
            if (path / name).is_file():
                content = read_object(path / name)
                content = content.get("quantization", content)
                method = sorted(descriptor.capabilities.methods.values or ("",))[0]
                return {"quant_method": method, **content}
    return None


def _cache_alone(config: Mapping[str, Any]) -> bool:
    """Return True for a compressed-tensors configuration that quantizes only the cache."""
    return config.get("kv_cache_scheme") is not None and not config.get("config_groups") and "bits" not in config
