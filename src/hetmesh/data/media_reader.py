"""Media of conversations as their processors make them: images, and recordings as log-mel features."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hetmesh.data.images import ImageProcessor, open_image, upright_size
from hetmesh.data.media_files import read_recording
from hetmesh.data.stores.store import MALFORMED_FILE, Blob, npy_shape
from hetmesh.errors import HetmeshError, RecipeError, SampleError
from hetmesh.graph.sample import MediaItem

KEY = "[data.options]"

EXTRACTOR = "WhisperFeatureExtractor"
SIZES = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
"""Its sizes, and what they are where a file does not say."""

MAX_NUMBERS = 2**26
"""Samples that an extractor pads a recording to, numbers of its spectrum, and of a filter bank."""


class RecordingProcessor:
    """Reads `.npy` files of log-mel features as they are, and makes those of all other files, which hold sound, with
    the WhisperFeatureExtractor of a Hugging Face directory.

    Args:
        folder: the directory; None reads `.npy` files only.
        key: the recipe key that names it; errors begin with it.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self.folder, self.key = folder, key

    @cached_property
    def _extractor(self) -> Any:
        if self.folder is None:
            hint = "give a directory with a preprocessor_config.json"
            raise RecipeError(f"{self.key}: needed to read recordings; {hint}")
        from transformers import WhisperFeatureExtractor

        try:
            config, _ = WhisperFeatureExtractor.get_feature_extractor_dict(self.folder, local_files_only=True)
            _check_sizes({**SIZES, **config})
            if (kind := config.get("feature_extractor_type", EXTRACTOR)) != EXTRACTOR:
                raise RecipeError(f"{self.key} = '{self.folder}': its feature extractor is {kind!r}, not {EXTRACTOR}")
            return WhisperFeatureExtractor.from_dict(config)
        except RecipeError:
            raise
        except Exception as error:  # whatever transformers makes of a broken file
            raise RecipeError(f"{self.key} = '{self.folder}': {error or type(error).__name__}") from error

    def shape(self, name: str, file: BinaryIO) -> tuple[int, ...]:
        """Shape of the features of the recording `file`, by its header: a recording's are padded to the extractor's
        length, as Whisper wants it. `name` tells a `.npy` file. Raises OSError, ValueError: it cannot be read."""
        if name.endswith(".npy"):
            return _npy_shape(file)
        return self._extractor.feature_size, self._extractor.nb_max_frames

    def __call__(self, name: str, file: BinaryIO) -> Tensor:
        """float32 features `[mel bins, frames]` of the recording `file`. Raises OSError, ValueError: it cannot be read,
        or is longer than the extractor takes."""
        if name.endswith(".npy"):
            _npy_shape(file)
            file.seek(0)
            return torch.from_numpy(np.load(file, allow_pickle=False).astype(np.float32))
        rate, most = self._extractor.sampling_rate, self._extractor.chunk_length
        sound = read_recording(file, rate)
        if len(sound) > self._extractor.n_samples:  # the extractor would cut it
            raise ValueError(f"it lasts {len(sound) / rate:.1f} s, more than the {most} s of the extractor")
        (features,) = self._extractor(sound, sampling_rate=rate, return_tensors="np").input_features
        return torch.from_numpy(np.ascontiguousarray(features, np.float32))


def _npy_shape(file: BinaryIO) -> tuple[int, ...]:
    length = file.seek(0, io.SEEK_END)
    file.seek(0)
    return npy_shape(file, length)


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
    """Reads media items with the processors of two Hugging Face directories, whose errors it turns into errors about
    samples; without one, images or sound are refused."""

    def __init__(self, image_processor: str | None, audio_processor: str | None) -> None:
        self._images: ImageProcessor | None = None
        if image_processor is not None:
            folder = Path(image_processor).expanduser()
            self._images = ImageProcessor(folder, f"{KEY} image_processor")
        recordings = None if audio_processor is None else Path(audio_processor).expanduser()
        self._recordings = RecordingProcessor(recordings, f"{KEY} audio_processor")

    def item(self, sample: str, kind: str, blob: Blob, position: int) -> MediaItem:
        """The metadata of an item of `sample` (its id), for which at most its header is read; `position` is that of its
        placeholder. Raises SampleError: it cannot be read."""
        with reading(sample, blob):
            if kind == "audio":
                with blob.open() as file:
                    return MediaItem(kind, self._recordings.shape(blob.name, file), position)
            processor = self._image_processor(sample)
            if processor.fixed_shape is not None:
                return MediaItem(kind, processor.fixed_shape, position)
            with blob.open() as file, open_image(file) as image:  # reads the header only
                return MediaItem(kind, processor.extent(*upright_size(image)), position)

    def load(self, sample: str, kind: str, blob: Blob) -> tuple[Tensor, int]:
        """An item as its processor makes it, and the bytes that were read for it; see `item`."""
        with reading(sample, blob):
            data = blob.read()
            if kind == "audio":
                return self._recordings(blob.name, io.BytesIO(data)), len(data)
            with open_image(io.BytesIO(data)) as image:
                return self._image_processor(sample)(image), len(data)

    def _image_processor(self, sample: str) -> ImageProcessor:
        if self._images is None:
            raise SampleError(f"sample {sample!r}: it has an image, but {KEY} image_processor is not given")
        return self._images


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
