"""Videos and recordings by PyAV (FFmpeg): what headers say of them, frames by number, samples at a rate.

transformers' `load_video` is not used: its pyav reader sees no frames in containers without a count (mkv), gives fewer
than were asked for where a file ends early or its edit list hides some, decodes everything before the first one wanted
and ignores how pictures are turned. Frames are counted in the order in which they are shown, as there.
"""

from __future__ import annotations

import bisect
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hetmesh.errors import RecipeError

MOST_PIXELS = 2**29
"""Pixels of the frames of a video that are read together: 256 frames of 1920 x 1080, say; each takes three bytes."""
MOST_SAMPLES = 2**26
"""Samples of the longest recording: 70 minutes at 16,000 per second."""
RATES = range(1_000, 1_000_001)
"""Samples per second from which a recording is resampled; the filters of others would take memory without bound."""
FORMATS = "mov,matroska,avi,mpegts,mpeg,flv,asf,gif,ogg,wav,w64,flac,mp3,aac,aiff,caf,amr"
"""FFmpeg's demuxers of files that hold their media themselves; a playlist would name others."""
COUNTED = ("wav", "w64", "aiff", "flac")
"""Formats whose header says how many samples uncompressed or FLAC recordings have."""
MATROSKA = re.compile(rb"\x1a\x45\xdf\xa3.*\x44\x89[\x84\x88]", re.DOTALL)
"""How a file begins that says its duration. Those of streams do not."""
MP3 = re.compile(rb"\xff[\xe2-\xff].{11,36}(?:Xing|Info)\0\0\0[\x01\x03\x05\x07\x09\x0b\x0d\x0f](.{4})", re.DOTALL)
"""How the first frame of a file begins that counts its frames. The duration of others is guessed from the bit rate."""
HEAD_BYTES = 4096
"""Among which these are."""
SLACK = 0.5
"""Seconds by which a file may end before its header says: not all last frames say how long they are."""


@dataclass(frozen=True)
class VideoHeader:
    """What is known of a video before it is decoded.

    Attributes:
        frames: that are shown.
        fps: frames per second, on average.
        height, width: pixels, turned as the file says.
    """

    frames: int
    fps: float
    height: int
    width: int

    def metadata(self) -> Any:
        """The same as transformers' `VideoMetadata`: `video_processor.sample_frames` says which frames it wants."""
        from transformers.video_utils import VideoMetadata

        seconds = self.frames / self.fps
        return VideoMetadata(self.frames, self.fps, self.width, self.height, seconds, video_backend="pyav")


def check_pixels(frames: int, height: int, width: int) -> None:
    """Raise ValueError for more frames than are read together."""
    if frames * height * width > MOST_PIXELS:
        raise ValueError(
            f"{frames} frames of {height} x {width} pixels are {frames * height * width}, more than {MOST_PIXELS}; "
            "sample fewer frames, or make the video smaller"
        )


def video_header(file: BinaryIO) -> VideoHeader:
    """The header of a video, of which one frame is decoded, since nothing else says how it is turned. Where the
    container has no complete index (mkv, webm, ts), packets are counted, which reads the file through.

    Raises:
        ValueError: it is broken, has no video, no frames or no frame rate.
        RecipeError: PyAV is not installed.
    """
    with _opened(file, "video") as (container, stream):
        said, frames, first = _frames_said(stream), 0, None
        for packet in container.demux(stream):
            if first is None and (packet.size or packet.dts is None):  # the last one, empty, makes the decoder finish
                first = next(iter(packet.decode()), None)
            if said is not None and first is not None:
                break
            frames += packet.size > 0 and not packet.is_discard
        frames = frames if said is None else said
        if not frames or first is None:
            raise ValueError("it has no frames")
        if not (fps := stream.average_rate or stream.guessed_rate):
            raise ValueError("it has no frame rate")
        height, width, _ = _turned(np.broadcast_to(np.uint8(0), (first.height, first.width, 3)), first).shape
        return VideoHeader(frames, float(fps), height, width)


class DecodedFrames(NamedTuple):
    """Frames of a video: uint8 `[n, height, width, 3]`, RGB, turned as the file says; how many were decoded, and how
    many had to be: those asked for and, from the key frame before each, all that it may depend on."""

    pixels: np.ndarray
    decoded: int
    needed: int


def read_frames(file: BinaryIO, indices: Sequence[int]) -> DecodedFrames:
    """The frames `indices`, counted in the order in which they are shown. Nothing is decoded after the last one, and
    between two of them nothing that a key frame makes superfluous.

    Raises:
        ValueError: it is broken, has no video, or lacks a frame; frames of several sizes, or more than `MOST_PIXELS`.
        RecipeError: PyAV is not installed.
    """
    wanted = sorted({int(index) for index in indices})
    with _opened(file, "video") as (container, stream):
        packets = [packet for packet in container.demux(stream) if packet.size]
        shown = [packet.pts for packet in packets if not packet.is_discard]
        if (said := _frames_said(stream)) is not None and said != len(shown):
            raise ValueError(f"its header says {said} frames, it has {len(shown)}")
        if not wanted or not 0 <= wanted[0] <= wanted[-1] < len(shown):
            raise ValueError(f"it has {len(shown)} frames, wanted are those from {wanted[:1]} to {wanted[-1:]}")
        # AVI stores no times: frames are counted as they come out of the decoder.
        timed = container.format.name != "avi" and None not in shown and len(set(shown)) == len(shown)
        order = {pts: i for i, pts in enumerate(sorted(shown))} if timed else {}
        spans = _spans(packets, [sorted(shown)[i] for i in wanted]) if timed else [(0, len(packets))]
        pixels, places, decoded = np.empty(0, np.uint8), {index: place for place, index in enumerate(wanted)}, 0
        left = set(wanted)
        for frame in _decoded(stream.codec_context, packets, spans):
            index = order.get(frame.pts, -1) if timed else decoded
            decoded += 1
            if index not in left:
                continue
            if frame.is_corrupt:
                raise ValueError(f"frame {index} is damaged")
            image = _turned(frame.to_ndarray(format="rgb24"), frame)
            if len(left) == len(wanted):
                check_pixels(len(wanted), *image.shape[:2])
                pixels = np.empty((len(wanted), *image.shape), np.uint8)
            if image.shape != pixels.shape[1:]:
                raise ValueError(f"frame {index} has {image.shape[:2]} pixels, those before it {pixels.shape[1:3]}")
            pixels[places[index]] = image
            left.remove(index)
            if not left and not timed:
                break
        if left:
            raise ValueError(f"frame {min(left)} of {len(shown)} is missing")
    needed = sum(end - start for start, end in spans) if timed else wanted[-1] + 1
    asked = [places[int(index)] for index in indices]
    return DecodedFrames(pixels if asked == sorted(places.values()) else pixels[asked], decoded, needed)


def _frames_said(stream: Any) -> int | None:
    """The frames that the container's index shows; None: it has no complete one."""
    entries = stream.index_entries
    if len(entries) != stream.frames or not stream.frames:
        return None
    return sum(entry.size > 0 and not entry.is_discard for entry in entries)


def _spans(packets: Sequence[Any], times: Sequence[int]) -> list[tuple[int, int]]:
    """Stretches of packets, `(first, one past the last)`, of frames shown at rising `times` and all that these need."""
    at = {packet.pts: i for i, packet in enumerate(packets) if not packet.is_discard}
    keys = [i for i, packet in enumerate(packets) if packet.is_keyframe]
    spans: list[tuple[int, int]] = []
    for time in times:
        key = bisect.bisect_right(keys, at[time]) - 1
        while key > 0 and packets[keys[key]].pts > time:  # shown before its key frame, it may depend on earlier ones
            key -= 1
        start, end = keys[key] if key >= 0 else 0, at[time] + 1
        if spans and start < spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((start, end))
    return spans


def _decoded(codec: Any, packets: Sequence[Any], spans: Sequence[tuple[int, int]]) -> Iterator[Any]:
    for start, end in spans:
        for packet in packets[start:end]:
            yield from codec.decode(packet)
        yield from codec.decode(None)
        codec.flush_buffers()


def _turned(pixels: np.ndarray, frame: Any) -> np.ndarray:
    """`[height, width, 3]` as its frame shall be shown, turned and mirrored by its display matrix."""
    if (matrix := frame.side_data.get("DISPLAYMATRIX")) is None:
        return pixels
    right, below, _, right_of_rows, below_of_rows = np.frombuffer(matrix, np.int32)[:5].astype(int)
    if abs(right) < abs(below):  # x becomes y
        pixels, right, below_of_rows = pixels.swapaxes(0, 1), right_of_rows, below
    return pixels[:: -1 if below_of_rows < 0 else 1, :: -1 if right < 0 else 1]


def recording_header(file: BinaryIO, rate: int) -> int:
    """How many samples `read_recording` gives, and what it raises. Uncompressed WAV, W64 and AIFF files and FLAC files
    say it; all others (MP3, Ogg, AAC, videos, compressed WAV files, FLAC files without a length) are decoded for it."""
    with _opened(file, "audio") as (container, stream):
        samples = _samples_said(container, stream)
        if samples is None:
            given = 0
            for frame in container.decode(stream):
                samples, given = (samples or 0) + frame.samples, frame.sample_rate
            return _resampled_length(samples or 0, given or rate, rate)
        return _resampled_length(samples, stream.rate, rate)


def read_recording(file: BinaryIO, rate: int) -> np.ndarray:
    """The first sound of a recording or video, float32 `[samples]` in -1..1: the mean of its channels, `rate` a second.

    Raises:
        ValueError: it is broken, ends early, has no sound, another rate than one of `RATES`, several, or more than
            `MOST_SAMPLES` samples.
        RecipeError: PyAV is not installed.
    """
    with _opened(file, "audio") as (container, stream):
        from av import AudioResampler

        said = _samples_said(container, stream)
        # Not planar: PyAV finds the planes of eight channels and more where there are none.
        resampler, parts, given, samples = AudioResampler(format="flt", rate=rate), [], rate, 0
        for frame in container.decode(stream):
            given, samples = frame.sample_rate, samples + frame.samples
            _resampled_length(samples, given, rate)
            parts += [_mono(part) for part in resampler.resample(frame)]
        parts += [_mono(part) for part in resampler.resample(None)]
        if said is not None and said != samples:
            raise ValueError(f"its header says {said} samples, it has {samples}")
    waveform = np.zeros(_resampled_length(samples, given, rate), np.float32)
    read = np.concatenate(parts)[: len(waveform)] if parts else waveform  # the filter may give one more or less
    waveform[: len(read)] = read
    return waveform


def _mono(frame: Any) -> np.ndarray:
    return frame.to_ndarray().reshape(-1, frame.layout.nb_channels).mean(axis=1)


def _samples_said(container: Any, stream: Any) -> int | None:
    """The number of samples that the header gives; None: it gives none, or none to rely on."""
    codec = stream.codec_context.name
    if container.format.name not in COUNTED or not codec.startswith(("pcm_", "flac")) or not stream.duration:
        return None
    return int(stream.duration * stream.time_base * stream.rate)


def _resampled_length(samples: int, given: int, rate: int) -> int:
    """How many samples at `rate` those of the rate `given` become. Raises ValueError: there are none, or too many."""
    if given != rate and given not in RATES:
        raise ValueError(f"it has {given} samples per second, which is not in {RATES.start}..{RATES.stop - 1}")
    length = -(-samples * rate // given)
    if not 0 < length <= MOST_SAMPLES:
        raise ValueError(f"it has {length} samples at {rate} per second, need 1..{MOST_SAMPLES}")
    return length


def pyav(what: str) -> Any:
    """PyAV's module. Raises RecipeError: it is not installed; `what` needs it, and begins the message."""
    try:
        import av
    except ImportError as error:
        raise RecipeError(f"{what}, which PyAV reads; it is not installed: pip install 'hetmesh[media]'") from error
    return av


@contextmanager
def _opened(file: BinaryIO, kind: str) -> Iterator[tuple[Any, Any]]:
    """The container in `file` and its first stream of a kind, "video" or "audio". Turns what PyAV raises into
    ValueErrors."""
    av = pyav(f"[data] has a file of which the {kind} is wanted")
    length, _ = file.seek(0, io.SEEK_END), file.seek(0)
    head, _ = file.read(HEAD_BYTES), file.seek(0)
    said = int.from_bytes(head[4:8], "little") + 8
    if head[:4] == b"RIFF" and length + 1 < said < 2**31:  # more: it was written to a pipe
        raise ValueError(f"its header says {said} bytes, it has {length}")
    limits = {"max_pixels": str(MOST_PIXELS)}
    opened = partial(av.open, file, "r", options=limits, container_options={"format_whitelist": FORMATS})
    try:
        _check_end(file, head, opened)
        with opened() as container:
            streams = [s for s in container.streams if not s.disposition & s.disposition.attached_pic]  # a cover
            stream = next((s for s in streams if s.type == kind), None)
            if stream is None:
                raise ValueError(f"it has no {kind}, only {sorted({s.type for s in streams})}")
            if stream.codec_context is None:
                raise ValueError(f"there is no decoder for its {kind}")
            stream.codec_context.options = limits
            stream.codec_context.thread_count = 1  # workers are processes
            yield container, stream
    except av.FFmpegError as error:
        raise ValueError(f"its {kind} cannot be read: {error.strerror}") from error


def _check_end(file: BinaryIO, head: bytes, opened: Callable[[], Any]) -> None:
    """Raise ValueError for a Matroska or MP3 file that ends before its header says: FFmpeg reads it as a shorter one.
    `opened`: opens it as a container."""
    if head[:3] == b"ID3":
        file.seek(10 + sum(seven_bits << 7 * i for i, seven_bits in enumerate(head[9:5:-1])))
        head = file.read(HEAD_BYTES)
        file.seek(0)
    mp3, frames, end = MP3.match(head), 0, 0.0
    if not mp3 and not MATROSKA.match(head):
        return
    with opened() as container:
        for packet in container.demux():
            if packet.pts is not None:
                frames += 1
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        said = int.from_bytes(mp3[1]) * end / max(frames, 1) if mp3 else (container.duration or 0) / 1e6
    file.seek(0)
    if end + SLACK < said:
        raise ValueError(f"its header says {said:.1f} s, it ends after {end:.1f} s")
