"""Media of conversations as their processors make them: images, and recordings as log-mel features."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hetmesh.data.generated import Generated
from hetmesh.data.images import ImageProcessor
from hetmesh.data.media_files import read_recording
from hetmesh.data.stores.store import MALFORMED_FILE, Blob
from hetmesh.errors import HetmeshError, RecipeError, SampleError
from hetmesh.graph.sample import MediaItem

KEY = "[data.options]"

EXTRACTOR = "WhisperFeatureExtractor"
SIZES = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
"""Its sizes, and what they are where a file does not say."""

MAX_NUMBERS = 2**26
"""Samples that an extractor pads a recording to, numbers of its spectrum, and of a filter bank."""


class RecordingProcessor:
    """Makes log-mel features of recordings with the WhisperFeatureExtractor of a Hugging Face directory. Raises
    RecipeError: there is none. `key`: the recipe key that names the directory; errors begin with it."""

    def __init__(self, folder: Path, key: str) -> None:
        from transformers import WhisperFeatureExtractor

        try:
            config, _ = WhisperFeatureExtractor.get_feature_extractor_dict(folder, local_files_only=True)
            _check_sizes({**SIZES, **config})
            if (kind := config.get("feature_extractor_type", EXTRACTOR)) != EXTRACTOR:
                raise RecipeError(f"{key} = '{folder}': its feature extractor is {kind!r}, not {EXTRACTOR}")
            self._extractor: Any = WhisperFeatureExtractor.from_dict(config)
        except RecipeError:
            raise
        except Exception as error:  # whatever transformers makes of a broken file
            raise RecipeError(f"{key} = '{folder}': {error or type(error).__name__}") from error

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """Shape of the features of a recording: all are padded to the extractor's length, as Whisper wants it."""
        return self._extractor.feature_size, self._extractor.nb_max_frames

    def __call__(self, file: BinaryIO) -> Tensor:
        """float32 features `[mel bins, frames]` of the recording `file`. Raises OSError, ValueError: it cannot be read,
        or is longer than the extractor takes."""
        rate, most = self._extractor.sampling_rate, self._extractor.chunk_length
        sound = read_recording(file, rate)
        if len(sound) > self._extractor.n_samples:  # the extractor would cut it
            raise ValueError(f"it lasts {len(sound) / rate:.1f} s, more than the {most} s of the extractor")
        (features,) = self._extractor(sound, sampling_rate=rate, return_tensors="np").input_features
        return torch.from_numpy(np.ascontiguousarray(features, np.float32))


def _check_sizes(config: Mapping[str, Any]) -> None:
    """Raise ValueError for an extractor that would take memory without bound."""
    bins, rate, hop, seconds, window = (config[name] for name in SIZES)
    if not all(type(n) is int and 0 < n <= MAX_NUMBERS for n in (bins, rate, hop, seconds, window)):
        raise ValueError(f"{', '.join(SIZES)} must be positive whole numbers, got {[bins, rate, hop, seconds, window]}")
    if max(rate * seconds, rate * seconds // hop * window, bins * window) > MAX_NUMBERS:
        raise ValueError(
            f"a recording of {seconds} s is {rate * seconds} samples and {rate * seconds // hop} frames of {window}; "
            f"at most {MAX_NUMBERS} numbers are made"
        )


class MediaReader:
    """Reads media items with the processors of two Hugging Face directories, and those of `generated` kinds as they
    are; turns their errors into errors about samples. Without a processor, images or sound are refused."""

    def __init__(
        self, image_processor: str | None, audio_processor: str | None, generated: Mapping[str, Generated]
    ) -> None:
        self._processors: dict[str, ImageProcessor | RecordingProcessor | Generated] = {**generated}
        if image_processor is not None:
            self._processors["image"] = ImageProcessor(Path(image_processor).expanduser(), f"{KEY} image_processor")
        if audio_processor is not None:
            self._processors["audio"] = RecordingProcessor(Path(audio_processor).expanduser(), f"{KEY} audio_processor")

    def item(self, sample: str, kind: str, blob: Blob, position: int) -> MediaItem:
        """The metadata of an item of `sample` (its id), for which at most its header is read; `position` is that of its
        placeholder. Raises SampleError: it cannot be read."""
        with reading(sample, blob):
            return MediaItem(kind, self._processor(sample, kind).shape(blob), position)

    def load(self, sample: str, kind: str, blob: Blob) -> tuple[Tensor, int]:
        """An item as its processor makes it, and the bytes that were read for it; see `item`."""
        with reading(sample, blob):
            data = blob.read()
            return self._processor(sample, kind)(io.BytesIO(data)), len(data)

    def _processor(self, sample: str, kind: str) -> ImageProcessor | RecordingProcessor | Generated:
        if kind not in self._processors:
            raise SampleError(f"sample {sample!r}: it has {kind!r}, but {KEY} {kind}_processor is not given")
        return self._processors[kind]


@contextmanager
def reading(sample: str, file: object) -> Iterator[None]:
    """Turn what reading a media file may raise into an error about the sample."""
    from PIL.Image import DecompressionBombError

    try:
        yield
    except HetmeshError:
        raise
    except (OSError, ValueError, DecompressionBombError, *MALFORMED_FILE) as error:
        raise SampleError(f"sample {sample!r}: cannot read {file}: {error or type(error).__name__}") from error
