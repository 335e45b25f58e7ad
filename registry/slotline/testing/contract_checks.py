"""Checks of the contract itself, the same for every kind, without computing any values.

Each kind's ``contract.py`` describes the kind with a `KindContract` and calls `register_contract_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_origin, get_type_hints
from unittest.mock import patch

from attrs import define, evolve, fields, fields_dict, frozen, has

from slotline.registry.built import built_contract, misfits_of, refused_call
from slotline.registry.capability import Flag
from slotline.registry.descriptor import HOST_CONTRACTS, ContractRange, DeviceInfo, Kind
from slotline.registry.errors import ConfigError, ContractError
from slotline.registry.loading import bind_contract, import_dotted, resolve_factory, resolve_options
from slotline.registry.negotiation import Need, part_reasons
from slotline.registry.probing import widened
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.import_check import imports_without_torch
from slotline.testing.subject import Subject, subject_of

UNKNOWN = "slotline_unknown_name"
"""A name that no contract will ever have: what is not known must be passed over or refused, not choked on.

The idea is RFC 8701's, which keeps protocols extensible by sending reserved values all the time.
"""

RESERVED_NAMES = ("auto",)
"""What means something else where a configuration names a plugin."""

DEVICES = (
    DeviceInfo(type="cpu"),
    DeviceInfo(type="cpu", name="a small one", features=frozenset({"unknown_feature"}), total_memory=1 << 20, cores=1),
    DeviceInfo(type="cuda"),
    DeviceInfo(type="cuda", name="an old one", compute_capability=(5, 2)),
    DeviceInfo(type="cuda", name="one of the future", compute_capability=(99, 0), total_memory=1 << 50, cores=9999),
    DeviceInfo(type=UNKNOWN),
)
"""Machines that a probe is shown: none has to be taken, and none may be an error."""


@frozen(kw_only=True)
class KindContract:
    """Facts of a kind for the checks.

    Attributes:
        kind: the kind.
        capabilities: its class of capabilities.
        context: a build context with declared values. `Subject.build` fills in contract and options. None for a kind
            whose factories take no argument.
        conditions: names that a `Limit` may refer to in addition to capabilities.
        within: what surrounds each check, for kinds whose factories need more than a context.
    """

    kind: Kind
    capabilities: type
    context: Callable[[Run], Any]
    conditions: tuple[str, ...] = ()
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def register_contract_checks(contract: KindContract) -> None:
    """Register the checks ``<kind>.contract.*`` of a kind."""
    for name, function, options in _CHECKS:
        register = check(contract.kind, f"{contract.kind.value}.contract.{name}", Level.CONTRACT, **options)
        register(_bound(function, contract))


def _bound(function: Callable[[KindContract, Run], None], contract: KindContract) -> Callable[[Run], None]:
    def bound(run: Run) -> None:
        with contract.within():
            function(contract, run)

    bound.__doc__ = function.__doc__
    return bound


# --- the descriptor


def descriptor_is_plain(contract: KindContract, run: Run) -> None:
    """The descriptor has the kind, a name that a configuration file can hold, and a summary of one line."""
    descriptor = run.subject.descriptor
    if descriptor.kind is not contract.kind:
        raise Failed(f"the descriptor's kind is {descriptor.kind!r}, expected {contract.kind!r}")
    if not descriptor.name.isascii() or descriptor.name in RESERVED_NAMES:
        raise Failed(
            f"the name {descriptor.name!r} cannot stand in a configuration file: ASCII, and not a reserved one"
        )
    if not isinstance(descriptor.summary, str) or len(descriptor.summary.splitlines()) > 1:
        raise Failed(f"the summary must be one line of text, it is {descriptor.summary!r}")


def capabilities_are_data(contract: KindContract, run: Run) -> None:
    """Capabilities are frozen, hashable data, each of the class that the contract gives it."""
    offer = run.subject.descriptor.capabilities
    types = get_type_hints(contract.capabilities)
    for item in fields(contract.capabilities):
        value, wanted = getattr(offer, item.name), types[item.name]
        wanted = get_origin(wanted) or wanted
        if hasattr(wanted, "refusal") and not (
            callable(getattr(value, "refusal", None)) and hasattr(value, "describe")
        ):
            raise Failed(f"{item.name} is {value!r}, which cannot be compared with a need: use {wanted.__name__}(...)")
        if wanted in (bool, int, str, tuple) and not isinstance(value, wanted):
            raise Failed(f"{item.name} is {value!r}, expected {wanted.__name__}")
        if "Mapping" not in str(types[item.name]):
            _expect_hashable(item.name, value)
        _expect_frozen(offer, item.name, value)
    if isinstance(getattr(offer, "lse_base", "e"), str) and getattr(offer, "lse_base", "e") not in ("e", "2"):
        raise Failed(f"lse_base is {offer.lse_base!r}, the contract knows 'e' and '2'")
    lowest = getattr(offer, "lowest_score", None)
    if lowest is not None and not lowest < 0:
        raise Failed(f"lowest_score is {lowest}, and scores of no sign are not told from masked ones then")
    if hasattr(offer, "preferred_block_sizes"):
        _expect_preferred_are_declared(offer)


def _expect_preferred_are_declared(offer: Any) -> None:
    limits = [(limit, limit.offer) for limit in offer.limits if limit.capability == "preferred_block_sizes"]
    for limit, align in [(None, offer.preferred_block_sizes), *limits]:
        named = [*align.exact, *([] if align.multiple_of is None else [align.multiple_of])]
        if refusals := [text for size in named if (text := offer.kernel_block_sizes.refusal(size))]:
            where = "" if limit is None else f" with {limit.when}"
            raise Failed(f"preferred_block_sizes{where} are not among kernel_block_sizes: {'; '.join(refusals)}")


def _expect_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise Failed(f"{name} is not frozen data: {value!r} holds something mutable ({error})") from error


def _expect_frozen(offer: Any, name: str, value: Any) -> None:
    try:
        setattr(offer, name, value)
    except AttributeError:
        return
    raise Failed(f"{type(offer).__name__}.{name} can be assigned to: a plan that was made from it would not hold")


def limits_name_capabilities(contract: KindContract, run: Run) -> None:
    """A limit narrows an existing capability, under a condition that can occur."""
    offer = run.subject.descriptor.capabilities
    if "limits" not in fields_dict(contract.capabilities):
        raise NotApplicable(f"plugins of kind {contract.kind.value} have no limits")
    names = [item.name for item in fields(contract.capabilities) if hasattr(getattr(offer, item.name), "refusal")]
    alone = {name for name in names if isinstance(getattr(offer, name), Flag)} | set(contract.conditions)
    for limit in offer.limits:
        if limit.capability not in names:
            raise Failed(f"a limit narrows {limit.capability!r}, which is no capability: {', '.join(names)}")
        name, equals, _ = limit.when.partition("=")
        if limit.when not in alone and not (equals and name in names):
            known = ", ".join(sorted(alone))
            raise Failed(
                f"a limit of {limit.capability} applies when {limit.when!r}, which never holds; "
                f"conditions are {known}, and capability=value"
            )


def unknown_capability_is_refused(contract: KindContract, run: Run) -> None:
    """A need that this version does not know is refused with a reason, by the offer and by each limit."""
    need = Need(capability=UNKNOWN, origin="a later version")
    if not part_reasons(run.subject.capabilities, [need]):
        raise Failed(f"the capabilities claim to cover {UNKNOWN!r}, which no contract knows")


# --- versions and options


def versions_are_bound(contract: KindContract, run: Run) -> None:
    """The plugin is bound to a common version, keeps it if the host learns a newer one, and is refused without one."""
    descriptor, host = run.subject.descriptor, HOST_CONTRACTS[contract.kind]
    if host.common(descriptor.contract) != run.subject.contract:
        raise Failed(f"host {host} and plugin {descriptor.contract} are bound to {run.subject.contract}")
    with patch.dict(HOST_CONTRACTS, {contract.kind: ContractRange(host.lowest, host.highest + 1)}):
        later = bind_contract(descriptor)
    if not descriptor.contract.lowest <= later <= descriptor.contract.highest:
        raise Failed(f"a host that speaks one version more binds {later}, the plugin speaks {descriptor.contract}")
    if later == run.subject.contract:
        run.subject.build(contract.context(run))
    beyond = ContractRange(host.highest + 1, host.highest + 1)
    try:
        bind_contract(evolve(descriptor, contract=beyond))
    except ContractError as error:
        if descriptor.name not in str(error) or str(beyond) not in str(error):
            raise Failed(f"the refusal names neither plugin nor version: {error}") from error
    else:
        raise Failed(f"a plugin that speaks {beyond} alone was bound to a host that speaks {host}")


def options_are_typed(contract: KindContract, run: Run) -> None:
    """The plugin's own table is a frozen attrs class with defaults, and unknown keys are refused by name."""
    options = resolve_options(run.subject.descriptor)
    if options is not None:
        made = _default_options(options)
        for name in fields_dict(options):
            _expect_frozen(made, name, getattr(made, name))
    try:
        subject_of(run.subject.descriptor, device=run.subject.device, options={UNKNOWN: 1})
    except ConfigError as error:
        if UNKNOWN not in str(error):
            raise Failed(f"the refusal of an unknown option does not name it: {error}") from error
    else:
        raise Failed(f"an unknown option {UNKNOWN!r} was accepted")


def _default_options(options: type) -> Any:
    try:
        return options()
    except TypeError as error:
        raise Failed(f"{options.__name__} has options without a default: {error}") from error


# --- the module and the probe


def descriptor_imports_no_torch(contract: KindContract, run: Run) -> None:
    """Importing the descriptor does not import torch: discovery, `slotline plugins` and `explain` must be fast."""
    imports_without_torch(run.subject)


def probe_only_narrows(contract: KindContract, run: Run) -> None:
    """The probe returns, for any machine, a reason or capabilities no wider than those declared."""
    descriptor = run.subject.descriptor
    if descriptor.probe is None:
        raise NotApplicable("the plugin has no probe")
    probe = import_dotted(descriptor.probe, "the probe") if isinstance(descriptor.probe, str) else descriptor.probe
    for device in (run.subject.device, *DEVICES):
        try:
            answer = probe(device)
        except Exception as error:  # a plugin may raise anything
            raise Failed(f"the probe raises for {device}: {type(error).__name__}: {error}") from error
        if isinstance(answer, str):
            if not answer.strip():
                raise Failed(f"the probe refuses {device} without a reason")
        elif not isinstance(answer, contract.capabilities):
            raise Failed(f"the probe answers {answer!r} for {device}, not {contract.capabilities.__name__} or a text")
        elif wider := list(widened(answer, descriptor.capabilities)):
            raise Failed(f"the probe claims more than the descriptor for {device}: {'; '.join(wider)}")


# --- the factory and what it builds


def factory_takes_a_context(contract: KindContract, run: Run) -> None:
    """The factory is called with only a build context, and may be called again for another engine."""
    factory = resolve_factory(run.subject.descriptor)
    context = contract.context(run)
    _expect_call(factory, "the factory", [] if context is None else [object()])
    for _ in range(2):
        if run.subject.build(context) is None:
            raise Failed("the factory returned None instead of a built object")


def methods_fit(contract: KindContract, run: Run) -> None:
    """The built object has the protocol's methods, and they can be called as the core calls them."""
    built = run.subject.build(contract.context(run))
    _expect_methods(contract, run.subject, built)


def _expect_methods(contract: KindContract, subject: Subject, built: Any) -> None:
    for text in misfits_of(
        built_contract(contract.kind, subject.capabilities), subject.capabilities, built, strict=True
    ):
        raise Failed(text)


def _expect_call(function: Callable[..., Any], name: str, positional: list[Any]) -> None:
    if refusal := refused_call(function, name, positional):
        raise Failed(refusal)


def unknown_context_fields(contract: KindContract, run: Run) -> None:
    """The factory accepts a build context of a later version, with an unknown field."""
    context = contract.context(run)
    if context is None:
        raise NotApplicable("the factory takes no context")
    values = {item.name: getattr(context, item.name) for item in fields(type(context))}
    built = run.subject.build(_later(type(context))(**values))
    _expect_methods(contract, run.subject, built)


def _later(context: type) -> type:
    """Return the context's class as a later version may have it."""

    class Later(context):  # type: ignore[misc]
        slotline_unknown_name: str = "of a later version"

    Later.__name__ = context.__name__
    return define(Later, frozen=True, kw_only=True, slots=False) if has(context) else Later


_CHECKS: tuple[tuple[str, Callable[[KindContract, Run], None], Mapping[str, Any]], ...] = (
    ("descriptor", descriptor_is_plain, {"cost": 0.001}),
    ("capabilities", capabilities_are_data, {"cost": 0.001}),
    ("limits", limits_name_capabilities, {"cost": 0.001}),
    ("unknown_capability", unknown_capability_is_refused, {"cost": 0.001}),
    ("options", options_are_typed, {"cost": 0.02}),
    ("probe", probe_only_narrows, {"cost": 0.02}),
    ("factory", factory_takes_a_context, {"cost": 0.03}),
    ("methods", methods_fit, {"cost": 0.03}),
    ("versions", versions_are_bound, {"cost": 0.04}),
    ("unknown_context_fields", unknown_context_fields, {"cost": 0.05}),
    ("no_torch", descriptor_imports_no_torch, {"cost": 0.5}),
)
