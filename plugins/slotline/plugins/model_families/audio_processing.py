"""From a recording to a model's inputs, by the checkpoint's own feature extractor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slotline.registry.contracts.model_family import Modality, ProcessedItem
from slotline.registry.errors import ModelError, RequestError
from slotline.text.recordings import Samples, as_samples


class AudioProcessing:
    """A checkpoint's feature extractor, run on one recording at a time.

    Args:
        path: the checkpoint's folder.
        modality: of recordings.
        num_states: what the encoder makes of each recording, however short: it is padded with silence.

    Raises:
        ModelError: if the folder has no feature extractor that can be loaded.
    """

    def __init__(self, path: Path, modality: Modality, num_states: int) -> None:
        try:
            from transformers import WhisperFeatureExtractor

            self._extractor: Any = WhisperFeatureExtractor.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises many kinds, by file and version
            raise ModelError(
                f"no feature extractor in {str(path)!r}: {str(error).splitlines()[0] if str(error) else error!r}",
                fix="put the checkpoint's preprocessor_config.json there",
            ) from error
        self._modality = modality
        self._num_states = num_states

    def process(self, audio: Any) -> ProcessedItem:
        """Return the inputs of a recording.

        Args:
            audio: samples [n] between -1 and 1, a pair of samples and their rate in Hz, the bytes of a file, or a
                mapping with the extractor's own `input_features` [mel bins, frames] of one window.

        Raises:
            RequestError: if it is no recording, or too long for the model.
        """
        if isinstance(audio, Mapping):
            return self._item(self._num_states, input_features=self._window(audio))
        samples = self._heard(audio, "each a prompt of its own")
        features = self._extractor(samples, sampling_rate=self._rate, return_tensors="pt").input_features[0]
        return self._item(self._num_states, input_features=features)

    def example(self) -> ProcessedItem:
        """Return a second of silence."""
        return self.process(np.zeros(min(self._rate, int(self._extractor.n_samples))))

    @property
    def _rate(self) -> int:
        return int(self._extractor.sampling_rate)

    def _heard(self, audio: Any, pieces: str) -> Samples:
        """Return the samples of a recording that the model can hear at a time."""
        samples, longest = as_samples(audio, self._rate), int(self._extractor.n_samples)
        if len(samples) > longest:
            raise RequestError(
                f"the audio has {len(samples)} samples; the model hears {longest} at a time",
                fix=f"cut it into pieces of at most {longest / self._rate:g} seconds, {pieces}",
            )
        return samples

    def _window(self, audio: Mapping[str, Any]) -> torch.Tensor:
        features = audio.get("input_features")
        wanted = (int(self._extractor.feature_size), int(self._extractor.nb_max_frames))
        if not isinstance(features, torch.Tensor) or features.shape != wanted or not features.isfinite().all():
            shape = list(getattr(features, "shape", ()))
            raise RequestError(
                f"input_features {shape} of the audio are no window of {list(wanted)} finite numbers",
                fix="give what the model's feature extractor returns for one window",
            )
        return features.float()

    def _item(self, count: int, **inputs: torch.Tensor) -> ProcessedItem:
        """Return an item of `count` embeddings."""
        return ProcessedItem(
            modality=self._modality.name, token_ids=[self._modality.placeholder_token_id] * count, inputs=inputs
        )


class MaskedProcessing(AudioProcessing):
    """Recordings of Qwen2-Audio, which has no embeddings for the silence that fills the window."""

    def process(self, audio: Any) -> ProcessedItem:
        """Return the inputs of a recording and a mask of its frames, see `AudioProcessing.process`."""
        samples = self._heard(audio, "each an item of its own")
        found = self._extractor(
            samples,
            sampling_rate=self._rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = found["attention_mask"][0]
        frames = (int(mask.sum()) - 1) // 2 + 1  # behind the convolutions, whose stride is 2
        count = (frames - 2) // 2 + 1  # behind the pooling of two
        if count < 1:
            raise RequestError(
                f"the audio has {len(samples)} samples, too few for one embedding", fix="give a longer recording"
            )
        return self._item(count, input_features=found["input_features"][0], feature_attention_mask=mask)

    def example(self) -> ProcessedItem:
        """Return a whole window of silence, which has the most embeddings."""
        return self.process(np.zeros(int(self._extractor.n_samples)))


class WindowsProcessing(AudioProcessing):
    """Recordings of Voxtral: as many windows as the recording needs, the last one filled with silence.

    Args:
        num_states: what the encoder makes of each window.
    """

    def process(self, audio: Any) -> ProcessedItem:
        """Return the inputs [windows, mel bins, frames] of a recording, see `AudioProcessing.process`."""
        found = self._extractor(
            as_samples(audio, self._rate),
            sampling_rate=self._rate,
            truncation=False,
            padding=True,
            pad_to_multiple_of=int(self._extractor.n_samples),
            return_tensors="pt",
        )
        windows = found["input_features"][0].unflatten(1, (-1, int(self._extractor.nb_max_frames))).transpose(0, 1)
        return self._item(self._num_states * len(windows), input_features=windows.contiguous())
