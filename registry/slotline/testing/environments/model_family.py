"""Surroundings of a model family: its example checkpoints, and texts whose steps are cut in any way."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Any

import torch
from attrs import define, field

from slotline.registry.contracts.family_example import FamilyExample
from slotline.registry.contracts.model_family import Modality, ModelContext, ModelFacts
from slotline.registry.loading import resolve_factory
from slotline.testing.check import Case, Failed, NotApplicable, Run
from slotline.testing.environments.model_calls import KeptKeys, Rows
from slotline.testing.subject import Subject

WITHOUT = "the factory has no examples(), so no model of the family can be made (see ExampleFamily)"
LONGEST = 40
"""Most tokens of a text, unless a check says otherwise."""

_folders: dict[tuple[Any, str, int], Path] = {}


def examples_of(subject: Subject) -> dict[str, FamilyExample]:
    """Return the examples of a plugin by name.

    Raises:
        NotApplicable: if it has none.
    """
    offered = getattr(resolve_factory(subject.descriptor), "examples", None)
    found = dict(offered()) if callable(offered) else {}
    if not found:
        raise NotApplicable(WITHOUT)
    return found


def by_example(subject: Subject) -> Iterable[Case]:
    """Return a case for each example."""
    return [{"example": name} for name in examples_of(subject)]


def generating(subject: Subject) -> Iterable[Case]:
    """Return a case for each example that generates tokens."""
    return [{"example": name} for name, one in examples_of(subject).items() if one.task == "generate"]


def with_items(subject: Subject) -> Iterable[Case]:
    """Return a case for each example that takes items besides text."""
    return [{"example": name} for name, one in examples_of(subject).items() if one.item is not None]


def empty_folder() -> Path:
    """Return an empty folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="slotline-family-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@define(eq=False)
class Text:
    """One request: its tokens, what its items become, and how many tokens are computed.

    Attributes:
        number: names the request among those of a cache.
        tokens: ids as the model reads them.
        embeds: [len(tokens), hidden_size], in place of tokens. None for a text without items among its tokens.
        layer_embeds: [layers, len(tokens), hidden_size], what is added behind the first layers. None without items.
        states: [n, hidden_size], what layers of type ``cross`` read. None without them.
        axes: [axes, len(tokens)] int64, positions less the tokens' places. None for models with one position.
        item: the value of a cross item, as a user gives it.
    """

    number: int
    tokens: list[int]
    computed: int = 0
    embeds: torch.Tensor | None = None
    layer_embeds: torch.Tensor | None = None
    states: torch.Tensor | None = None
    axes: torch.Tensor | None = None
    item: Any = None

    def again(self) -> Text:
        """Return the same text from its beginning, as another request."""
        return Text(self.number, self.tokens, 0, self.embeds, self.layer_embeds, self.states, self.axes, self.item)

    @property
    def left(self) -> int:
        """Number of tokens that are not computed."""
        return len(self.tokens) - self.computed


class FamilyWorld:
    """The plugin's family with one example.

    Args:
        run: with the case `example`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.example = examples_of(run.subject)[run["example"]]
        self.family: Any = run.subject.build(None)
        self.device = run.subject.device.type
        self._numbers = 0

    # --- folders

    def folder(self, seed: int = 0) -> Path:
        """Return the example's folder of a seed. No check changes it."""
        key = (resolve_factory(self.run.subject.descriptor), self.run["example"], seed)
        if key not in _folders:
            folder = empty_folder() / "example"
            folder.mkdir()
            self.example.write(folder, seed)
            _folders[key] = folder
        return _folders[key]

    def copy(self, seed: int = 0) -> Path:
        """Return a copy of the example's folder, which a check may break."""
        folder = empty_folder() / "example"
        shutil.copytree(self.folder(seed), folder)
        return folder

    # --- models

    def inspect(self, folder: Path | None = None) -> ModelFacts:
        """Return what the family finds out of a folder."""
        found: ModelFacts = self.family.inspect(self.folder() if folder is None else folder)
        return found

    def context(self, folder: Path | None = None, dtype: str = "") -> ModelContext:
        """Return the context of a load."""
        return ModelContext(
            contract=self.run.subject.contract,
            facts=self.inspect(folder),
            device=self.device,
            dtype=dtype or self.example.dtypes[0],
            task=self.example.task,
            options=self.run.subject.options,
        )

    def load(self, folder: Path | None = None, dtype: str = "") -> Any:
        """Return the model of a folder."""
        return self.family.load(self.context(folder, dtype))

    # --- texts

    def rng(self) -> Random:
        """Return random choices that are the same for each call."""
        return self.run.rng

    def ids(self, facts: ModelFacts, rng: Random, length: int) -> list[int]:
        """Return random token ids that are no placeholders."""
        free = self.free_ids(facts)
        return [rng.choice(free) for _ in range(length)]

    def free_ids(self, facts: ModelFacts) -> list[int]:
        """Return all token ids of texts that are no placeholders."""
        first, end = self.example.tokens or (0, facts.vocab_size)
        taken = {number for m in facts.modalities for number in (m.placeholder_token_id, m.prompt_token_id)}
        return [number for number in range(first, end) if number not in taken]

    def text(self, model: Any, rng: Random, length: int, *, item: int | None = None) -> Text:
        """Return a text of random tokens.

        Args:
            model: the loaded model.
            rng: random choices.
            length: number of tokens, without those of an item.
            item: number of the item that the text holds. None for no item, except for models where each text has one.
        """
        facts: ModelFacts = model.facts
        length = min(length, facts.max_model_len)
        self._numbers += 1
        text = Text(self._numbers, self.ids(facts, rng, length))
        every = next((m for m in facts.modalities if m.cross), None)
        if any(m.raw for m in facts.modalities):
            raise NotApplicable("its prompts are items alone, which the suite cannot cut into steps")
        if facts.position_axes > 1:
            text.axes = torch.zeros(facts.position_axes, length, dtype=torch.int64)
        if every is not None and self.example.item is None:
            raise NotApplicable("its prompts have an item each, and the example has none")
        if every is not None or item is not None:
            self._add_item(model, text, rng.randrange(8) if item is None else item)
        return text

    def _add_item(self, model: Any, text: Text, number: int) -> None:
        assert self.example.item is not None
        facts: ModelFacts = model.facts
        name, value = self.example.item(number)
        modality = next((m for m in facts.modalities if m.name == name), None)
        if modality is None:
            raise Failed(f"the example's item is of the modality {name!r}, and the facts have no such modality")
        processed = model.process(name, value)
        with torch.inference_mode():
            (encoded,) = model.encode(name, [processed.inputs])
        wanted = sum(token == modality.placeholder_token_id for token in processed.token_ids)
        expect_shape("encode", encoded, (wanted, (1 + facts.layer_embeds) * facts.hidden_size))
        if modality.cross:
            text.states, text.item = encoded, value
            if modality.prompt:
                text.tokens[0] = facts.decoder_start
            return
        self._replace(model, text, modality, processed, encoded)

    def _replace(self, model: Any, text: Text, modality: Modality, processed: Any, encoded: torch.Tensor) -> None:
        """Put the tokens of an item behind a third of the text's own."""
        facts: ModelFacts = model.facts
        place, size = len(text.tokens) // 3, facts.hidden_size
        text.tokens[place:place] = list(processed.token_ids)
        at = [i for i, token in enumerate(text.tokens) if token == modality.placeholder_token_id]
        with torch.inference_mode():
            text.embeds = model.embed(torch.tensor(text.tokens, device=self.device)).clone()
            text.embeds[at] = encoded[:, :size].to(text.embeds.dtype)
            if facts.layer_embeds:
                added = text.embeds.new_zeros(facts.layer_embeds, len(text.tokens), size)
                added[:, at] = encoded[:, size:].unflatten(1, (facts.layer_embeds, size)).transpose(0, 1).to(added)
                text.layer_embeds = added
        if facts.position_axes > 1:
            positions, _ = model.axis_positions(text.tokens, [(modality.name, processed.inputs)])
            text.axes = torch.as_tensor(positions) - torch.arange(len(text.tokens))

    # --- steps

    def step(
        self,
        model: Any,
        cache: KeptKeys,
        parts: Sequence[tuple[Text, int]],
        *,
        wanted: Sequence[int] | None = None,
        change: Callable[[dict[str, Any]], AbstractContextManager[Any] | None] | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """Run one step and check each call of attention. Return hidden states of the wanted tokens, or of all.

        Args:
            model: the loaded model.
            cache: keys and states of the requests.
            parts: each request of the step, and the number of its next tokens that are computed.
            wanted: places in the step. None for all.
            change: called with the tensors of the step by name before the forward pass.
            more: passed on to `forward`.
        """
        inputs = self._inputs(model, parts)
        inputs["wanted"] = None if wanted is None else torch.tensor(wanted, dtype=torch.int64, device=self.device)
        if change is not None:
            change(inputs)
        rows = [Rows(text.number, count, _num_states(text)) for text, count in parts]
        cache.begin(rows, inputs["wanted"])
        positional = [inputs.pop(name) for name in ("input_ids", "positions")]
        wanted_tensor, embeds = inputs.pop("wanted"), inputs.pop("inputs_embeds", None)
        if model.facts.state_layers:
            inputs["advance"] = cache.advance
        with torch.inference_mode():
            given = () if embeds is None else (embeds,)
            hidden: torch.Tensor = model.forward(*positional, cache.attend, wanted_tensor, *given, **inputs, **more)
        cache.end()
        for text, count in parts:
            text.computed += count
        tokens = sum(count for _, count in parts) if wanted is None else len(wanted)
        expect_shape("forward", hidden[:tokens], (tokens, model.facts.hidden_size))
        return hidden

    def _inputs(self, model: Any, parts: Sequence[tuple[Text, int]]) -> dict[str, Any]:
        facts: ModelFacts = model.facts
        spans = [(text, text.computed, text.computed + count) for text, count in parts]
        tokens = [token for text, start, end in spans for token in text.tokens[start:end]]
        places = [place for _, start, end in spans for place in range(start, end)]
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(tokens, dtype=torch.int64, device=self.device),
            "positions": torch.tensor(places, dtype=torch.int64, device=self.device),
        }
        if any(text.embeds is not None for text, _ in parts):
            inputs["inputs_embeds"] = _joined(model, spans, inputs["input_ids"])
        if facts.position_axes > 1:
            offsets = [text.axes[:, start:end] for text, start, end in spans if text.axes is not None]
            inputs["position_offsets"] = torch.cat(offsets, 1).to(self.device)
        if states := [t.states for t, start, _ in spans if start == 0 and t.states is not None]:
            inputs["encoder_states"] = torch.cat(states)
        added = [(text.layer_embeds, start, end) for text, start, end in spans]
        if "inputs_embeds" in inputs and any(values is not None for values, _, _ in added):
            size = (facts.layer_embeds, len(tokens), facts.hidden_size)
            values, first = inputs["inputs_embeds"].new_zeros(size), 0
            for part, start, end in added:
                if part is not None:
                    values[:, first : first + end - start] = part[:, start:end]
                first += end - start
            inputs["layer_embeds"] = (torch.arange(len(tokens), device=self.device), values)
        return inputs

    def whole(self, model: Any, text: Text, cache: KeptKeys | None = None) -> torch.Tensor:
        """Return the hidden states of a text that is computed alone in one step, float32 on the host."""
        own = text.again()
        return self.step(model, cache or KeptKeys(model.facts), [(own, own.left)]).float().cpu()

    def answers(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of hidden states if the example generates, otherwise the states, float32 on the host."""
        if self.example.task != "generate":
            return hidden.float().cpu()
        with torch.inference_mode():
            logits = model.compute_logits(hidden)
        expect_shape("compute_logits", logits, (len(hidden), model.facts.vocab_size))
        found: torch.Tensor = logits.float().cpu()
        return found

    # --- comparisons

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Compare two outputs [n, ...].

        Raises:
            Failed: naming the row with the largest error.
        """
        if found.shape != expected.shape:
            raise Failed(f"{what}: got {list(found.shape)}, expected {list(expected.shape)}")
        if not expected.numel():
            return
        allowed = self.example.tolerance * max(1.0, float(expected.abs().max()))
        off = (found.double() - expected.double()).abs().flatten(1).max(1).values
        row = int(torch.nan_to_num(off, nan=float("inf")).argmax())
        self.run.measure(error=float(off[row]), allowed=allowed, what=f"{what}, row {row} of {len(found)}")


def _num_states(text: Text) -> int:
    """Return the rows of encoder states that begin with a text's next step."""
    return len(text.states) if text.computed == 0 and text.states is not None else 0


def _joined(model: Any, spans: Sequence[tuple[Text, int, int]], input_ids: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of a step: those of texts with items, and the tokens' own."""
    found, first = [], 0
    for text, start, end in spans:
        own = input_ids[first : first + end - start]
        first += end - start
        with torch.inference_mode():
            found.append(model.embed(own).clone() if text.embeds is None else text.embeds[start:end])
    return torch.cat(found)


def expect_shape(what: str, found: Any, shape: tuple[int, ...]) -> None:
    """Raise `Failed` unless a method returned a tensor of a shape."""
    if not isinstance(found, torch.Tensor):
        raise Failed(f"{what} returned {type(found).__name__}, expected a tensor {list(shape)}")
    if tuple(found.shape) != shape:
        raise Failed(f"{what} returned {list(found.shape)}, expected {list(shape)}")


def cuttable(facts: ModelFacts) -> bool:
    """Return True if a text can be computed in several steps."""
    return all(layer.attention_type != "encoder_only" for layer in facts.layers)


def require_cuttable(facts: ModelFacts) -> None:
    """Raise `NotApplicable` if texts are computed whole."""
    if not cuttable(facts):
        raise NotApplicable("its texts are computed whole: tokens see later ones")


def tensors_in(folder: Path) -> dict[str, Path]:
    """Return the tensors of a folder's safetensors files, and the file of each.

    Raises:
        NotApplicable: if there are none.
    """
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    if not found:
        raise NotApplicable("the example's weights are in no safetensors file")
    return found


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    """Write a safetensors file again with changed tensors."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    changed = {name: tensor.contiguous() for name, tensor in change(tensors).items()}
    file.unlink()
    save_file(changed, file, metadata)


@define
class Patterns:
    """Names of tensors with their numbers left out, and one name of each."""

    found: dict[str, list[str]] = field(factory=dict)

    @classmethod
    def of(cls, names: Iterable[str]) -> Patterns:
        """Return the patterns of names."""
        patterns = cls()
        for name in names:
            pattern = ".".join("#" if part.isdigit() else part for part in name.split("."))
            patterns.found.setdefault(pattern, []).append(name)
        return patterns

    def some(self, rng: Random, most: int | None = None) -> list[str]:
        """Return a random name of each pattern, or of random patterns if there are more than `most`."""
        names = [rng.choice(names) for names in self.found.values()]
        return names if most is None or len(names) <= most else rng.sample(names, most)
