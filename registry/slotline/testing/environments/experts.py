"""Surroundings of an experts plugin: random mixtures of every declared scheme, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts import Experts, ExpertsContext, QuantizedWeight, WeightScheme
from slotline.registry.contracts.weights import ELEMENTS, concatenate, stack
from slotline.testing.check import Case, Failed, NotApplicable, Run
from slotline.testing.environments.linear import GROUPS, copied, next_size, random_weight
from slotline.testing.oracles import experts as oracle
from slotline.testing.subject import Subject

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai")
CONSTANTS: Mapping[str, float] = {"alpha": 1.702, "limit": 7.0}
MAX_TOKENS = 64


def schemes_of(subject: Subject) -> dict[str, WeightScheme]:
    """Return a scheme for each declared name and granularity, by its description.

    Raises:
        NotApplicable: if none of the suite's schemes is declared.
    """
    offer, found = subject.capabilities, []
    for name in ELEMENTS:
        for granularity, groups in GROUPS.items():
            fits = [g for g in groups if not g[1] or offer.scale_groups.refusal(g[1]) is None]
            if offer.schemes.refusal(name) is None and offer.granularities.refusal(granularity) is None and fits:
                found.append(WeightScheme(name=name, group=fits[0], activation=offer.activation))
                if offer.offsets.support and granularity == "group" and not ELEMENTS[name].codebook:
                    found.append(evolve(found[-1], symmetric=False))
    if not found:
        raise NotApplicable("no scheme of the suite is declared")
    return {scheme.describe(): scheme for scheme in found}


def dtypes_of(subject: Subject) -> list[str]:
    """Return the declared dtypes of activations."""
    every = ("float32", "bfloat16", "float16")
    return [dtype for dtype in every if subject.capabilities.dtypes.refusal(dtype) is None]


def activations_of(subject: Subject) -> list[str]:
    """Return the declared activations that the suite knows.

    Raises:
        NotApplicable: if there is none.
    """
    found = [name for name in ACTIVATIONS if subject.capabilities.activations.refusal(name) is None]
    if not found:
        raise NotApplicable("no activation of the suite is declared")
    return found


def by_scheme(subject: Subject) -> Iterable[Case]:
    """Return a case for each declared scheme and dtype."""
    return [{"scheme": name, "dtype": dtype} for name in schemes_of(subject) for dtype in dtypes_of(subject)]


def once(subject: Subject) -> Iterable[Case]:
    """Return a case of the first scheme and dtype."""
    return list(by_scheme(subject))[:1]


class ExpertsWorld:
    """One built plugin with the weights of one mixture.

    Args:
        run: with the cases `scheme` and `dtype`.
        activation: by default the first declared one.
        interleaved, bias: form of the mixture.
        joined: True if gate and up were two weights, each with scales of its own.
        batch_invariant: True if a token's outputs must be bitwise the same in any batch.
    """

    def __init__(
        self,
        run: Run,
        *,
        activation: str = "",
        interleaved: bool = False,
        bias: bool = False,
        joined: bool = False,
        experts: int = 5,
        batch_invariant: bool = False,
    ) -> None:
        self.run, self.scheme = run, schemes_of(run.subject)[run["scheme"]]
        self.dtype: torch.dtype = getattr(torch, run["dtype"])
        self.device, offer = run.subject.device.type, run.subject.capabilities
        self.generator = torch.Generator().manual_seed(run.seed)
        step = max(self.scheme.group[1], 1)
        self.experts = min(experts, offer.max_experts.limit or experts)
        self.in_features = next_size(offer.in_features, 128, step)
        self.out_features = next_size(offer.out_features, 128, 2 * step)
        activation = activation or activations_of(run.subject)[0]
        self.context = ExpertsContext(
            contract=1,
            scheme=self.scheme,
            experts=self.experts,
            in_features=self.in_features,
            out_features=self.out_features,
            interleaved=interleaved,
            activation=activation,
            constants=CONSTANTS if activation == "swiglu_oai" else {},
            dtype=run["dtype"],
            device=self.device,
            max_tokens=MAX_TOKENS,
            batch_invariant=batch_invariant,
        )
        self.bias, self.joined = bias, joined
        self.plugin: Experts = run.subject.build(self.context)
        self.weights, self.biases = self.mixture()
        self.packed = self.pack()

    def mixture(self) -> tuple[tuple[QuantizedWeight, QuantizedWeight], tuple[torch.Tensor | None, ...]]:
        """Return random weights of all experts, whose outputs are of the size of their inputs, and biases."""
        inner = self.out_features // 2
        shapes = ((self.out_features, self.in_features), (self.in_features, inner))
        parts = (2 if self.joined else 1, 1)
        weights = tuple(
            stack([self._weight(*shape, count) for _ in range(self.experts)])
            for shape, count in zip(shapes, parts, strict=True)
        )
        biases = tuple(
            torch.randn(self.experts, shape[0], generator=self.generator).to(self.dtype) if self.bias else None
            for shape in shapes
        )
        return weights, biases  # type: ignore[return-value]

    def _weight(self, out_features: int, in_features: int, parts: int) -> QuantizedWeight:
        """Return a random weight that is joined of some parts. The second one is twice as large."""
        shape = (out_features // parts, in_features)
        found = [_scaled(random_weight(self.scheme, *shape, self.generator)) for _ in range(parts)]
        if parts == 1:
            return found[0]
        return concatenate([evolve(one, scales=one.scales * (1 + place)) for place, one in enumerate(found)])

    def pack(self) -> dict[str, torch.Tensor]:
        """Return the packed form of copies of the weights."""
        gate_up, down = (copied(weight, self.device) for weight in self.weights)
        biases = [None if bias is None else bias.to(self.device).clone() for bias in self.biases]
        packed = self.plugin.pack(gate_up, down, *biases)
        if not isinstance(packed, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in packed.values()):
            raise Failed(f"pack returned {type(packed).__name__}, expected tensors by name")
        return dict(packed)

    def inputs(self, tokens: int, k: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return activations, distinct experts of each token and their weights."""
        k = min(k, self.experts)
        x = torch.randn(tokens, self.in_features, generator=self.generator).to(self.dtype)
        scores = torch.rand(tokens, self.experts, generator=self.generator)
        ids = scores.topk(k).indices
        shares = torch.rand(tokens, k, generator=self.generator).to(self.dtype)
        return x.to(self.device), ids.to(self.device), shares.to(self.device)

    def applied(self, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the plugin's output, checked for shape and dtype, and that it left its inputs unchanged."""
        before = [tensor.clone() for tensor in (x, ids, shares)]
        out = self.plugin.apply(x, self.packed, ids, shares)
        if not isinstance(out, torch.Tensor) or out.shape != x.shape or out.dtype != x.dtype:
            found = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
            raise Failed(f"apply returned {found}, expected {x.dtype} {tuple(x.shape)}")
        for old, new in zip(before, (x, ids, shares), strict=True):
            if not torch.equal(torch.nan_to_num(old), torch.nan_to_num(new)):
                raise Failed("apply changed its inputs")
        return out

    def check(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor], what: str) -> None:
        """Compare an output with the oracle."""
        self.compare(self.applied(*given), given, what)

    def compare(self, out: torch.Tensor, given: tuple[torch.Tensor, ...], what: str) -> None:
        """Compare outputs with the oracle.

        Raises:
            Failed: naming the output with the largest error.
        """
        wanted, size = oracle.mixture(given[0], self.weights, self.biases, given[1], given[2], self.context)
        bound = oracle.allowed(wanted, size, self.dtype, self.run.subject.capabilities.activation)
        error = (out.cpu().double() - wanted).abs()
        if not error.numel():
            return
        worst = int(torch.nan_to_num(error / bound, nan=float("inf")).argmax())
        token, output = divmod(worst, out.shape[1])
        where = f"{what}: token {token} of {out.shape[0]}, output {output} of {out.shape[1]}"
        self.run.measure(error=float(error[token, output]), allowed=float(bound[token, output]), what=where)


def _scaled(weight: QuantizedWeight) -> QuantizedWeight:
    """Return a weight whose products are of the size of their inputs."""
    factor = float(weight.dequantize().square().sum(1).mean().sqrt())
    factor = 2.0 ** round(torch.tensor(factor).log2().item())
    offsets = None if weight.offsets is None else weight.offsets / factor
    return evolve(weight, scales=weight.scales / factor, offsets=offsets)


def seen(world: ExpertsWorld) -> Any:
    """Return activations of which every expert gets one."""
    x, _, shares = world.inputs(world.experts, 1)
    return x, torch.arange(world.experts, device=x.device)[:, None], shares
