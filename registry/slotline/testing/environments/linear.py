"""Surroundings of a linear plugin: random weights of every declared scheme, and the comparison with the oracle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import lcm
from typing import Any

import torch
from attrs import evolve

from slotline.registry.contracts import Linear, LinearCapabilities, LinearContext, QuantizedWeight, WeightScheme
from slotline.registry.contracts.weights import ELEMENTS
from slotline.testing.check import Case, Failed, NotApplicable, Run
from slotline.testing.oracles import linear as oracle
from slotline.testing.subject import Subject

MAX_TOKENS = 96
DTYPES = ("float32", "bfloat16", "float16")
GROUPS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "tensor": ((0, 0),),
    "channel": ((1, 0),),
    "group": ((1, 32), (1, 64), (1, 128), (1, 16)),
    "block": ((128, 128), (64, 32), (16, 64)),
}


def schemes_of(subject: Subject) -> dict[str, WeightScheme]:
    """Return a scheme for each declared name and granularity, with offsets and act order, by its description.

    Raises:
        NotApplicable: if none of the suite's schemes is declared.
    """
    found = _described(subject.capabilities, subject.exhaustive)
    if not found:
        raise NotApplicable("no scheme of the suite is declared")
    return dict(found)


@lru_cache(maxsize=64)
def _described(offer: LinearCapabilities, exhaustive: bool) -> dict[str, WeightScheme]:
    return {scheme.describe(): scheme for scheme in _declared(offer, exhaustive)}


def _declared(offer: LinearCapabilities, exhaustive: bool) -> Iterator[WeightScheme]:
    for name in ELEMENTS:
        if offer.schemes.refusal(name) is not None:
            continue
        plain = not ELEMENTS[name].codebook
        for granularity, groups in GROUPS.items():
            if offer.granularities.refusal(granularity) is not None:
                continue
            fits = [g for g in groups if not g[1] or offer.scale_groups.refusal(g[1]) is None]
            for group in fits if exhaustive else dict.fromkeys((*fits[:1], *fits[-1:])):
                scheme = WeightScheme(name=name, group=group, activation=offer.activation)
                yield scheme
                if plain and offer.offsets.support and granularity in ("channel", "group"):
                    yield evolve(scheme, symmetric=False)
                if plain and offer.act_order.support and granularity == "group":
                    yield evolve(scheme, act_order=True)


def dtypes_of(subject: Subject) -> list[str]:
    """Return the declared dtypes of activations."""
    return [dtype for dtype in DTYPES if subject.capabilities.dtypes.refusal(dtype) is None]


def by_scheme(subject: Subject) -> Iterable[Case]:
    """Return a case for each declared scheme and dtype."""
    return [{"scheme": name, "dtype": dtype} for name in schemes_of(subject) for dtype in dtypes_of(subject)]


def by_first_dtype(subject: Subject) -> Iterable[Case]:
    """Return a case for each declared scheme in the first dtype."""
    return [{"scheme": name, "dtype": dtypes_of(subject)[0]} for name in schemes_of(subject)]


class LinearWorld:
    """One built plugin with weights of one scheme.

    Args:
        run: with the cases `scheme` and `dtype`.
        out_features, in_features: sizes that are wished for. The next declared ones are taken.
        ragged: True if groups need not divide the inputs.
        batch_invariant: True if a token's outputs must be bitwise the same in any batch.
    """

    def __init__(
        self,
        run: Run,
        out_features: int = 192,
        in_features: int = 256,
        *,
        ragged: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.run, self.scheme = run, schemes_of(run.subject)[run["scheme"]]
        self.dtype: torch.dtype = getattr(torch, run["dtype"])
        self.device = run.subject.device.type
        self.generator = torch.Generator().manual_seed(run.seed)
        offer = run.subject.capabilities
        step = 1 if ragged else max(self.scheme.group[1], 1)
        self.in_features = next_size(offer.in_features, in_features, step)
        self.out_features = next_size(offer.out_features, out_features, 1)
        self.context = LinearContext(
            contract=1,
            scheme=self.scheme,
            in_features=self.in_features,
            out_features=self.out_features,
            dtype=run["dtype"],
            device=self.device,
            max_tokens=MAX_TOKENS,
            batch_invariant=batch_invariant,
        )
        self.linear: Linear = run.subject.build(self.context)

    def weight(self, out_features: int | None = None) -> QuantizedWeight:
        """Return a random weight on the CPU. All codes occur, and scales differ by orders of magnitude."""
        return random_weight(self.scheme, out_features or self.out_features, self.in_features, self.generator)

    def pack(self, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        """Return the packed form of a copy of a weight."""
        packed = self.linear.pack(copied(weight, self.device))
        if not isinstance(packed, Mapping) or not packed:
            raise Failed(f"pack returned {type(packed).__name__}, expected tensors by name")
        for name, tensor in packed.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise Failed(f"pack returned {name!r}: {type(tensor).__name__}, expected tensors by name")
        return dict(packed)

    def inputs(self, tokens: int) -> torch.Tensor:
        """Return random activations [tokens, in_features]."""
        x = torch.randn(tokens, self.in_features, generator=self.generator)
        return x.to(self.dtype).to(self.device)

    def applied(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], out_features: int) -> torch.Tensor:
        """Return the plugin's product, checked for shape and dtype, and that it left its inputs unchanged."""
        before = x.clone()
        out = self.linear.apply(x, packed, out_features)
        if not isinstance(out, torch.Tensor) or out.shape != (x.shape[0], out_features) or out.dtype != x.dtype:
            found = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, torch.Tensor) else type(out).__name__
            raise Failed(f"apply returned {found}, expected {x.dtype} {(x.shape[0], out_features)}")
        if not torch.equal(torch.nan_to_num(before), torch.nan_to_num(x)):
            raise Failed("apply changed its inputs")
        return out

    def check(self, x: torch.Tensor, packed: Mapping[str, torch.Tensor], weight: QuantizedWeight, what: str) -> None:
        """Compare a product with the oracle.

        Raises:
            Failed: naming the output with the largest error.
        """
        out = self.applied(x, packed, weight.out_features)
        self.compare(out, x, weight, what)

    def compare(
        self, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, what: str, rounds: str | None = None
    ) -> None:
        """Compare outputs with the oracle. `rounds` is what the product rounds inputs to, None for what is declared."""
        wanted = oracle.product(x, oracle.weight_of(weight))
        rounds = self.run.subject.capabilities.activation if rounds is None else rounds
        bound = oracle.allowed(x, weight, self.dtype, rounds)
        error = (out.cpu().double() - wanted).abs()
        if not error.numel():
            return
        ratio = torch.nan_to_num(error / bound, nan=float("inf"))
        worst = int(ratio.argmax())
        token, output = divmod(worst, out.shape[1])
        where = f"{what}: token {token} of {out.shape[0]}, output {output} of {out.shape[1]}"
        self.run.measure(error=float(error[token, output]), allowed=float(bound[token, output]), what=where)


def random_weight(
    scheme: WeightScheme, out_features: int, in_features: int, generator: torch.Generator
) -> QuantizedWeight:
    """Return a random weight on the CPU. All codes occur, and scales differ by orders of magnitude."""
    shape, element = (out_features, in_features), scheme.element
    sizes = scheme.scale_shape(*shape)
    if element.codes.startswith("float8"):
        every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
        every = every[(every & 127) != 127]  # without NaN
        codes = every[torch.randint(len(every), shape, generator=generator)].view(torch.float8_e4m3fn)
        magnitude = 448.0
    else:
        kind = getattr(torch, element.codes)
        codes = torch.randint(element.low, element.high + 1, shape, generator=generator, dtype=kind)
        magnitude = max(map(abs, element.codebook)) if element.codebook else float(element.high)
    scales = torch.exp2(torch.randint(-6, 1, sizes, generator=generator).float()) / magnitude
    if scheme.name != "mxfp4":
        scales = scales * (0.5 + torch.rand(sizes, generator=generator))
    else:
        scales = torch.exp2(torch.randint(-8, -2, sizes, generator=generator).float())
    offsets = None if scheme.symmetric else torch.randn(sizes, generator=generator) * scales * magnitude
    return QuantizedWeight(
        scheme=scheme,
        codes=codes,
        scales=scales,
        offsets=offsets,
        g_idx=_order(scheme, in_features, generator) if scheme.act_order else None,
        input_scale=torch.tensor(0.05) if scheme.activation and not scheme.dynamic else None,
    )


def _order(scheme: WeightScheme, in_features: int, generator: torch.Generator) -> torch.Tensor:
    index = torch.arange(in_features, dtype=torch.int32) // scheme.group[1]
    return index[torch.randperm(in_features, generator=generator)]


def copied(weight: QuantizedWeight, device: Any) -> QuantizedWeight:
    """Return a copy of a weight on a device, which a plugin may overwrite."""
    names = ("codes", "scales", "offsets", "g_idx", "input_scale")
    tensors: dict[str, Any] = {name: getattr(weight, name) for name in names}
    moved: dict[str, Any] = {name: None if t is None else t.clone().to(device) for name, t in tensors.items()}
    return QuantizedWeight(scheme=weight.scheme, **moved)


def next_size(offer: Any, wished: int, step: int) -> int:
    """Return the smallest declared size from `wished` on that is a multiple of `step`.

    Raises:
        NotApplicable: if there is none below a large one.
    """
    size = -(-wished // step) * step
    stride = lcm(step, offer.multiple_of or 1) if not offer.exact else step
    if not offer.exact:
        size = -(-wished // stride) * stride
    while size <= 1 << 16:
        if offer.refusal(size) is None:
            return size
        size += stride
    raise NotApplicable(f"no declared size from {wished} on: {offer.describe()}")
