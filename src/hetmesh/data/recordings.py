"""Recordings as Whisper's encoder wants them: log-mel features `[mel bins, frames]`, ready-made or from WAV files."""

from __future__ import annotations

import wave
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hetmesh.errors import RecipeError


class RecordingProcessor:
    """Reads `.npy` files of log-mel features as they are, and makes the features of `.wav` files (16-bit PCM) with the
    WhisperFeatureExtractor of a Hugging Face directory.

    Args:
        folder: a directory with a preprocessor_config.json; None reads `.npy` files only.
        key: the recipe key that names it; errors begin with it.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self.folder, self.key = folder, key

    @cached_property
    def _extractor(self) -> Any:
        if self.folder is None:
            raise RecipeError(
                f"{self.key}: needed to read .wav files; give a directory with a preprocessor_config.json"
            )
        from transformers import WhisperFeatureExtractor

        try:
            return WhisperFeatureExtractor.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise RecipeError(f"{self.key} = '{self.folder}': {error}") from error

    def shape(self, name: str, file: BinaryIO) -> tuple[int, ...]:
        """Shape of the features of the recording `file`, from its header at most; `name` says of what format it is.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        if name.endswith(".npy"):
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return read(file)[0]
        return (self._extractor.feature_size, self._extractor.nb_max_frames)

    def __call__(self, name: str, file: BinaryIO) -> Tensor:
        """float32 features `[mel bins, frames]` of the recording `file`.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        if name.endswith(".npy"):
            return torch.from_numpy(np.load(file, allow_pickle=False).astype(np.float32))
        rate = self._extractor.sampling_rate
        features = self._extractor(_waveform(file, rate), sampling_rate=rate, return_tensors="np").input_features[0]
        return torch.from_numpy(np.ascontiguousarray(features, np.float32))


def _waveform(source: BinaryIO, rate: int) -> np.ndarray:
    try:
        with wave.open(source) as file:
            if file.getframerate() != rate or file.getsampwidth() != 2:
                raise ValueError(
                    f"it has {file.getframerate()} samples per second of {8 * file.getsampwidth()} bits, "
                    f"need {rate} of 16 bits"
                )
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
    except wave.Error as error:
        raise ValueError(f"not a WAV file: {error}") from error
    return samples.mean(axis=1, dtype=np.float32) / 32768
