"""Images and recordings of conversations, read as the processors of a recipe want them."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from hetmesh.data.images import ImageProcessor, open_image, upright_size
from hetmesh.data.recordings import RecordingProcessor
from hetmesh.data.stores import Blob
from hetmesh.errors import HetmeshError, SampleError
from hetmesh.graph.sample import MediaItem

KEY = "[data.options]"
BROKEN = (SyntaxError, EOFError, LookupError, ArithmeticError, RuntimeError, TypeError, struct.error)
"""What Pillow and wave raise beside OSError and ValueError where a file's fields lead nowhere."""


class MediaReader:
    """Reads media items with two processors, whose errors it turns into errors about samples.

    Args:
        image_processor: a Hugging Face directory; None: images are refused.
        audio_processor: the same for `.wav` files; None reads `.npy` files only.
        pad_to_square, tiles: see `ImageProcessor.from_directory`.
        frames: see `RecordingProcessor`.

    Raises:
        RecipeError: a directory cannot be used.
    """

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
        """The metadata of an item, for which at most its header is read.

        Args:
            sample: its id, for errors.
            position: of its placeholder.
            alone: whether the sample has no other image.

        Raises:
            SampleError: it cannot be read.
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
    except (OSError, ValueError, DecompressionBombError, *BROKEN) as error:
        raise SampleError(f"sample {sample!r}: cannot read {file}: {error or type(error).__name__}") from error
