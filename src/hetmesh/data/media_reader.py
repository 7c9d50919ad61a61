"""Media of conversations as their processors want them: images, and recordings as log-mel features, ready-made or from
WAV files."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hetmesh.data.images.image_processor import ImageProcessor, open_image, upright_size
from hetmesh.data.stores.store import MALFORMED_FILE, Blob, npy_shape
from hetmesh.errors import HetmeshError, RecipeError, SampleError
from hetmesh.graph.sample import MediaItem

KEY = "[data.options]"

FRAMES = ("padded", "counted", "own")
"""How many frames a WAV file has: padded or cut to the extractor's length, as Whisper wants it; padded to it, none cut,
with the number before as its size; or as many as it is long."""

EXTRACTOR = "WhisperFeatureExtractor"
SIZES = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "chunk_length": 30, "n_fft": 400}
"""Its sizes, and what they are where a file does not say."""

MAX_NUMBERS = 2**26
"""Samples of the longest recording, numbers of its spectrum, and of a filter bank."""


class RecordingProcessor:
    """Reads `.npy` files of log-mel features as they are, and makes the features of `.wav` files (16-bit PCM) with the
    WhisperFeatureExtractor of a Hugging Face directory.

    Args:
        folder: the directory; None reads `.npy` files only.
        key: the recipe key that names it; errors begin with it.
        frames: which of `FRAMES` a WAV file gives.
    """

    def __init__(self, folder: Path | None, key: str, frames: str = "padded") -> None:
        self.folder, self.key, self.frames = folder, key, frames

    @cached_property
    def _extractor(self) -> Any:
        if self.folder is None:
            hint = "give a directory with a preprocessor_config.json"
            raise RecipeError(f"{self.key}: needed to read .wav files; {hint}")
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

    def shape(self, name: str, file: BinaryIO) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape of the features of the recording `file` and its size, from its header at most; `name` says of what
        format it is. Raises OSError, ValueError: it cannot be read, or is longer than the extractor takes."""
        if name.endswith(".npy"):
            shape = _npy_shape(file)
            return shape, shape[-1:] if self.frames == "counted" else ()
        bins, longest = self._extractor.feature_size, self._extractor.nb_max_frames
        if self.frames == "padded":
            return (bins, longest), ()
        with _opened(file, self._extractor.sampling_rate) as wav:
            frames = self._count(wav.getnframes())
        return ((bins, longest), (frames,)) if self.frames == "counted" else ((bins, frames), ())

    def _count(self, samples: int) -> int:
        if samples > self._extractor.n_samples:
            seconds = samples / self._extractor.sampling_rate
            most = self._extractor.chunk_length
            raise ValueError(f"it lasts {seconds:.1f} s, more than the {most} s of the extractor")
        return -(-samples // self._extractor.hop_length)

    def __call__(self, name: str, file: BinaryIO) -> Tensor:
        """float32 features `[mel bins, frames]` of the recording `file`. Raises OSError, ValueError: it cannot be read,
        or is longer than the extractor takes."""
        if name.endswith(".npy"):
            _npy_shape(file)
            file.seek(0)
            return torch.from_numpy(np.load(file, allow_pickle=False).astype(np.float32))
        rate = self._extractor.sampling_rate
        waveform = _waveform(file, rate)
        frames = None if self.frames == "padded" else self._count(len(waveform))
        options: dict[str, Any] = {"sampling_rate": rate, "return_tensors": "np"}
        if frames is not None and self.frames == "own":  # a window of silence is all that a frame sees of the padding
            silence = frames * self._extractor.hop_length + self._extractor.n_fft - len(waveform)
            waveform = np.pad(waveform, (0, silence), constant_values=self._extractor.padding_value)
            options["padding"] = "do_not_pad"
        features = self._extractor(waveform, **options).input_features[0]
        if self.frames == "own":
            features = features[:, :frames]
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


def _opened(source: BinaryIO, rate: int) -> wave.Wave_read:
    try:
        file: wave.Wave_read = wave.open(source)  # noqa: SIM115  (the caller closes it)
    except (wave.Error, EOFError, RuntimeError) as error:
        raise ValueError(f"not a WAV file: {error}") from error
    if file.getframerate() != rate or file.getsampwidth() != 2:
        raise ValueError(
            f"it has {file.getframerate()} samples per second of {8 * file.getsampwidth()} bits, need {rate} of 16 bits"
        )
    return file


def _waveform(source: BinaryIO, rate: int) -> np.ndarray:
    with _opened(source, rate) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
    return samples.mean(axis=1, dtype=np.float32) / 32768


class MediaReader:
    """Reads media items with the processors of two Hugging Face directories, whose errors it turns into errors about
    samples; without one, images or `.wav` files are refused. The options are those of `ImageProcessor.from_directory`
    and `RecordingProcessor`."""

    def __init__(
        self,
        image_processor: str | None,
        audio_processor: str | None,
        *,
        pad_to_square: bool,
        tiles: bool | None,
        frames: str,
    ) -> None:
        self._images: ImageProcessor | None = None
        if image_processor is not None:
            folder = Path(image_processor).expanduser()
            self._images = ImageProcessor.from_directory(folder, f"{KEY} image_processor", pad_to_square, tiles)
        recordings = None if audio_processor is None else Path(audio_processor).expanduser()
        self._recordings = RecordingProcessor(recordings, f"{KEY} audio_processor", frames)

    def item(self, sample: str, kind: str, blob: Blob, position: int, *, alone: bool) -> MediaItem:
        """The metadata of an item of `sample` (its id), for which at most its header is read. Raises SampleError: it
        cannot be read.

        Args:
            position: of its placeholder.
            alone: whether the sample has no other image.
        """
        with _reading(sample, blob):
            if kind == "audio":
                with blob.open() as file:
                    shape, size = self._recordings.shape(blob.name, file)
                    return MediaItem(kind, tuple(shape), position, size=size)
            processor = self._image_processor(sample)
            if processor.fixed_shape is not None:
                return MediaItem(kind, processor.fixed_shape, position)
            with blob.open() as file, open_image(file) as image:  # reads the header only
                shape, size = processor.extent(*upright_size(image), alone)
                return MediaItem(kind, shape, position, size=size)

    def load(self, sample: str, kind: str, blob: Blob, *, alone: bool) -> tuple[Tensor, int]:
        """An item as its processor makes it (`ImageProcessor`, `RecordingProcessor`), and the bytes that were read for
        it; see `item`."""
        with _reading(sample, blob):
            data = blob.read()
            if kind == "audio":
                return self._recordings(blob.name, io.BytesIO(data)), len(data)
            with open_image(io.BytesIO(data)) as image:
                return self._image_processor(sample)(image, alone), len(data)

    def _image_processor(self, sample: str) -> ImageProcessor:
        if self._images is None:
            raise SampleError(f"sample {sample!r}: it has an image, but {KEY} image_processor is not given")
        return self._images


@contextmanager
def _reading(sample: str, file: object) -> Iterator[None]:
    """Turn what reading a media file may raise into an error about the sample."""
    from PIL.Image import DecompressionBombError

    try:
        yield
    except HetmeshError:
        raise
    except (OSError, ValueError, DecompressionBombError, *MALFORMED_FILE) as error:
        raise SampleError(f"sample {sample!r}: cannot read {file}: {error or type(error).__name__}") from error
