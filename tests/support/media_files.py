"""Small videos and recordings, written by PyAV."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np

RATE = 10
"""Frames per second."""


def pictures(count: int, height: int = 48, width: int = 64) -> list[np.ndarray]:
    """Frames of a coarse pattern that moves, so that encoders make frames which depend on later ones."""
    cells = np.random.default_rng(0).integers(0, 255, (30, 40, 3)).astype(np.uint8)
    large = np.kron(cells, np.ones((8, 8, 1), np.uint8))
    return [np.ascontiguousarray(large[i // 2 : i // 2 + height, i % 60 : i % 60 + width]) for i in range(count)]


def write_video(
    path: Path,
    codec: str = "libx264",
    count: int = 40,
    options: Mapping[str, str] | None = None,
    hidden: int = 0,
    turned: tuple[int, bool] | None = None,
    sound: bool = False,
    size: tuple[int, int] = (48, 64),
    movflags: str = "faststart",
    live: bool = False,
) -> Path:
    """A video of `pictures`, in the format of the file's name.

    Args:
        options: of the encoder.
        hidden: frames at the beginning that an edit list leaves out, as where a phone has cut a video.
        turned: how it shall be shown: degrees against the clock, then whether mirrored.
        sound: whether it has a second of silence too.
        size: height and width.
        movflags: of an mp4 file.
        live: whether an mkv file is as a stream's, which says no duration.
    """
    head = {"movflags": movflags} if path.suffix == ".mp4" else {"live": "1"} if live else {}
    with av.open(str(path), "w", options={**head, **({"avoid_negative_ts": "disabled"} if hidden else {})}) as file:
        stream: Any = file.add_stream(codec, rate=RATE, options=dict(options or {}))
        (stream.height, stream.width), stream.pix_fmt = size, "yuv420p"
        if turned is not None:
            stream.set_display_rotation(*turned)
        audio: Any = file.add_stream("aac", rate=16000, layout="mono") if sound else None
        file.start_encoding()  # else nothing is written without frames
        for i, picture in enumerate(pictures(count, *size)):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts = i
            _mux(file, stream.encode(frame), hidden)
        _mux(file, stream.encode(), hidden)
        if sound:
            quiet = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            quiet.sample_rate, quiet.pts = 16000, 0
            _mux(file, [*audio.encode(quiet), *audio.encode()], 0)
    return path


def _mux(file: Any, packets: Any, hidden: int) -> None:
    for packet in packets:
        early = int(hidden / RATE / packet.time_base)
        packet.pts, packet.dts = packet.pts - early, packet.dts - early
        file.mux(packet)


def write_sound(
    form: str,
    codec: str,
    sound: np.ndarray,
    rate: int,
    layout: str = "mono",
    variable: bool = False,
    options: Mapping[str, str] | None = None,
) -> bytes:
    """A recording of `sound`, float32 `[channels, samples]` in -1..1; of a `variable` rate of bits; `options` of the
    format."""
    out = io.BytesIO()
    with av.open(out, "w", format=form, options=dict(options or {})) as file:
        quality = {"flags": "+qscale", "global_quality": "0"} if variable else {}
        stream: Any = file.add_stream(codec, rate=rate, layout=layout, options=quality)
        packed = np.ascontiguousarray(sound.T, np.float32).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, "flt", layout)
        frame.sample_rate, frame.pts = rate, 0
        context = stream.codec_context
        resampler = av.AudioResampler(context.format, layout, rate, context.frame_size or None)
        for part in (*resampler.resample(frame), *resampler.resample(None)):
            file.mux(stream.encode(part))
        file.mux(stream.encode())
    return out.getvalue()
