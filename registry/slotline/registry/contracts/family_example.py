"""Examples of a model family: tiny checkpoints that it writes, on which the conformance suite checks it.

They are optional. An engine never calls them. Of a family without examples the suite can check only the descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from slotline.registry.contracts.model_family import ModelFamily

if TYPE_CHECKING:
    import torch


@frozen(kw_only=True, eq=False)
class FamilyExample:
    """Tiny checkpoint of a model family, with what the suite has to know of it.

    A good example loads in a few hundredths of a second: two layers, a hidden size below 100. Its random weights are
    wide, so that one wrong key changes every output, and no bias is 0 and no norm 1.

    Attributes:
        write: called as ``write(folder, seed)`` with an empty folder. It writes a checkpoint in the form that users
            have, with weights that depend on the seed. Names, shapes and configuration do not depend on it.
        task: the task that it is loaded for.
        tokens: the first token id of texts, and the one after the last. None for the whole vocabulary.
        dtypes: names of the dtypes in which a CPU can run it. The first is the one of all comparisons.
        item: from a number to a modality's name and an item as in a prompt's `multi_modal_data`, a different one for
            each number. None for a model that takes text alone.
        expected: called as ``expected(folder, token_ids, item)``, where `item` is the value of an item of a modality
            of type `cross` and otherwise None. A slow and independent computation, for instance by another library:
            logits [len(token_ids), vocab_size] float32 of a text, or for a task that pools the last hidden states
            [len(token_ids), hidden_size]. None if there is nothing to compare with.
        embeds_first: True if what `embed` gives is the first layer's input. False for models that norm it first.
        unread: patterns (`fnmatch`) of tensors in the checkpoint's safetensors files that no answer depends on.
        optional: patterns of tensors that a checkpoint may lack, since the model defines what they are then.
        tolerance: largest error in the first dtype between two ways of computing an output, as a part of the largest
            number of that output.
    """

    write: Callable[[Path, int], None]
    task: str = "generate"
    tokens: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    item: Callable[[int], tuple[str, Any]] | None = None
    expected: Callable[[Path, Sequence[int], Any], torch.Tensor] | None = None
    embeds_first: bool = True
    unread: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    tolerance: float = 1e-4


class ExampleFamily(ModelFamily, Protocol):
    """Family whose factory has examples."""

    @staticmethod
    def examples() -> Mapping[str, FamilyExample]:
        """Return examples of what the family serves, by a name in words: one for each form of its layers."""
        ...
