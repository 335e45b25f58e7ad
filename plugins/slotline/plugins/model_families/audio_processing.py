"""From a recording to a model's inputs, by the checkpoint's own feature extractor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slotline.registry.contracts.model_family import Modality, ProcessedItem
from slotline.registry.errors import ModelError, RequestError


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
        """Return the inputs of a recording: samples [n] between -1 and 1, or a pair of samples and their rate in Hz.

        Raises:
            RequestError: if the samples are invalid, have another rate, or are too long for the model.
        """
        samples, rate = self._read(audio)
        wanted, longest = int(self._extractor.sampling_rate), int(self._extractor.n_samples)
        if rate != wanted:
            raise RequestError(f"the audio has {rate!r} samples a second, the model takes {wanted}", fix="resample it")
        if len(samples) > longest:
            raise RequestError(
                f"the audio has {len(samples)} samples; the model hears {longest} at a time",
                fix=f"cut it into pieces of at most {longest / wanted:g} seconds, each a prompt of its own",
            )
        features = self._extractor(samples, sampling_rate=wanted, return_tensors="pt").input_features[0]
        return ProcessedItem(
            modality=self._modality.name,
            token_ids=[self._modality.placeholder_token_id] * self._num_states,
            inputs={"input_features": features},
        )

    def example(self) -> ProcessedItem:
        """Return a second of silence."""
        return self.process(np.zeros(min(int(self._extractor.sampling_rate), int(self._extractor.n_samples))))

    def _read(self, audio: Any) -> tuple[npt.NDArray[np.float32], object]:
        given, rate = audio if isinstance(audio, tuple) and len(audio) == 2 else (audio, self._extractor.sampling_rate)
        try:
            samples = np.asarray(given, np.float32)
        except (TypeError, ValueError):
            samples = np.zeros(0, np.float32)
        if samples.ndim != 1 or len(samples) == 0 or not np.isfinite(samples).all():
            raise RequestError(
                f"audio={audio!r:.60} is no recording", fix="give an array [n] of samples, or [(array, sampling rate)]"
            )
        return samples, rate
