"""Whole texts: adapters in mixed batches give the text of a model that they are merged into."""

from __future__ import annotations

from slotline.conformance.lora.numerics import once, ranks
from slotline.registry.descriptor import Kind
from slotline.testing.check import Failed, Level, NotApplicable, Run, check
from slotline.testing.environments.lora import LoraWorld, dtypes_of
from slotline.testing.environments.lora_engine import AdapterEngine, TextRequest, TinyModel

REQUESTS, LENGTH = 20, 12
NEAR_TIE = 1e-3
"""Greedy text may part from the merged model's where its two best logits, of size 30 or so, are closer than this:
float32 sums in another order differ by 1e-5 there, another adapter by whole numbers."""


@check(Kind.LORA, "lora.engine.text", Level.ENGINE, cases=once, cost=0.5, profile="mixed")
def engine_text(run: Run) -> None:
    """Greedy text of requests with different adapters and none, batched together, equals that of merged weights."""
    if "float32" not in dtypes_of(run.subject):
        raise NotApplicable("texts are compared in float32, which is not declared")
    rng = run.rng
    with LoraWorld(run, "float32", max_tokens=40) as world:
        choice = ranks(run.subject)
        names = [f"a{index}" for index in range(world.max_adapters + 2)]
        adapters = {name: world.adapter(choice[index % len(choice)]) for index, name in enumerate(names)}
        model = TinyModel(world)
        requests = [
            TextRequest(tuple(rng.randrange(48) for _ in range(rng.randint(1, 8))), rng.choice([None, *names]))
            for _ in range(REQUESTS)
        ]
        engine = AdapterEngine(world, model, adapters)
        texts = engine.generate(requests, LENGTH)
        for request, text in zip(requests, texts, strict=True):
            steps = model.plain(request, adapters.get(request.adapter or ""), LENGTH)
            for position, (logits, token) in enumerate(zip(steps, text, strict=True)):
                best = logits.topk(2)
                if token == int(best.indices[0]):
                    continue
                if float(best.values[0] - best.values[1]) < NEAR_TIE:
                    break  # from here on they are different texts
                merged = [int(step.argmax()) for step in steps]
                raise Failed(
                    f"prompt {list(request.prompt)} with adapter {request.adapter!r}: text {text} parts at token "
                    f"{position} from that of merged weights, {merged}"
                )
        run.measured.update(swaps=engine.swaps)
