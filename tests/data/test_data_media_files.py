"""Videos and recordings: headers tell what is read, frames are those of a decoder that begins at the beginning."""

from __future__ import annotations

import io
import struct
import sys
import wave

import av
import numpy as np
import pytest

from hetmesh.data import media_files
from hetmesh.data.media_files import read_frames, read_recording, recording_header, video_header
from hetmesh.data.media_reader import RecordingProcessor
from hetmesh.errors import RecipeError
from support.media_files import RATE, write_sound, write_video

X264 = {"x264-params": "bframes=3:b-adapt=0:keyint=12:scenecut=0"}
OPEN = {"x264-params": X264["x264-params"] + ":open-gop=1"}
X265 = {"x265-params": "bframes=3:b-adapt=0:keyint=12:scenecut=0:log-level=none"}
VIDEOS = {
    "h264.mp4": ("libx264", X264, 0),
    "open.mp4": ("libx264", OPEN, 0),
    "cut.mp4": ("libx264", OPEN, 7),
    "mpeg4.mp4": ("mpeg4", {"bf": "2", "g": "12"}, 0),
    "h264.mkv": ("libx264", X264, 0),
    "h265.mkv": ("libx265", X265, 0),
    "vp9.webm": ("libvpx-vp9", {"g": "12", "cpu-used": "8", "lag-in-frames": "16"}, 0),
    "h264.ts": ("libx264", X264, 0),
    "h264.avi": ("libx264", X264, 0),
    "mpeg4.avi": ("mpeg4", {"bf": "2", "g": "12"}, 0),
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    return {
        name: write_video(folder / name, codec, options=options, hidden=hidden)
        for name, (codec, options, hidden) in VIDEOS.items()
    }


def decoded(path):
    """All frames of a video as they come out of the decoder."""
    with av.open(str(path)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


@pytest.mark.parametrize("name", VIDEOS)
def test_frames_are_those_of_a_decoder_that_begins_at_the_beginning(videos, name):
    truth, draw = decoded(videos[name]), np.random.default_rng(0)
    with videos[name].open("rb") as file:
        header = video_header(file)
        assert (header.frames, header.height, header.width) == truth.shape[:3]
        assert header.fps == RATE
        some = [draw.choice(len(truth), int(draw.integers(1, 6)), replace=False).tolist() for _ in range(6)]
        for indices in ([0], [len(truth) - 1], [5, 5, 3], range(len(truth)), *some):
            read = read_frames(file, indices)
            assert read.pixels.dtype == np.uint8
            assert np.array_equal(read.pixels, truth[list(indices)])
            assert len(set(indices)) <= read.decoded <= read.needed


def test_hidden_frames_are_not_counted_where_fragments_leave_no_complete_index(tmp_path):
    path = write_video(tmp_path / "a.mp4", options=OPEN, hidden=7, movflags="frag_keyframe")
    truth = decoded(path)
    with path.open("rb") as file:
        assert video_header(file).frames == len(truth) < 40
        assert np.array_equal(read_frames(file, range(len(truth))).pixels, truth)


@pytest.mark.parametrize("name", ["h264.mp4", "h264.mkv", "h264.ts", "mpeg4.mp4"])
def test_nothing_is_decoded_that_no_wanted_frame_depends_on(videos, name):
    with av.open(str(videos[name])) as file:
        shown = sorted(packet.pts for packet in file.demux(video=0) if packet.size)
    with av.open(str(videos[name])) as file:
        keys = [shown.index(packet.pts) for packet in file.demux(video=0) if packet.size and packet.is_keyframe]
    later = 3  # frames that one shown before them may depend on
    assert len(keys) >= 3
    with videos[name].open("rb") as file:
        for index in (2, keys[1] + 5, len(shown) - 1):
            before = max(key for key in keys if key <= index)
            assert read_frames(file, [index]).decoded <= index - before + 1 + later
        assert read_frames(file, keys).decoded == len(keys)
        assert read_frames(file, range(len(shown))).decoded == len(shown)


def test_metadata_and_frames_are_those_of_transformers_own_reader(videos):
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import load_video

    processor = Qwen3VLVideoProcessor(fps=2, min_frames=2)
    theirs, metadata = load_video(
        str(videos["h264.mp4"]),
        backend="pyav",
        sample_indices_fn=lambda metadata, **_: processor.sample_frames(metadata),
    )
    with videos["h264.mp4"].open("rb") as file:
        ours = video_header(file).metadata()
        indices = processor.sample_frames(ours)
        assert np.array_equal(read_frames(file, indices).pixels, theirs)
    assert len(indices) == 8
    ours.frames_indices = indices
    assert {**ours, "frames_indices": list(indices)} == {**metadata, "frames_indices": list(metadata.frames_indices)}


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("form", ["mp4", "mkv"])
def test_videos_are_turned_as_they_say(tmp_path, degrees, mirrored, form):
    turned = write_video(tmp_path / f"turned.{form}", count=3, turned=(degrees, mirrored))
    want = np.rot90(decoded(turned), degrees // 90, axes=(1, 2))  # against the clock
    want = want[:, :, ::-1] if mirrored else want
    with turned.open("rb") as file:
        header = video_header(file)
        assert (header.height, header.width) == want.shape[1:3]
        assert np.array_equal(read_frames(file, range(3)).pixels, want)


def boxed(data, box, offset, numbers):
    """`data` with big-endian numbers written behind the name of a box of an mp4 file."""
    at = data.index(box) + 4 + offset
    value = struct.pack(f">{len(numbers)}I", *numbers)
    return data[:at] + value + data[at + len(value) :]


def bad_videos(videos, tmp_path):
    good, avi = videos["h264.mp4"].read_bytes(), videos["mpeg4.avi"].read_bytes()
    yield "empty", b"", "cannot be read: Invalid data"
    yield "text", b"a video\n" * 99, "cannot be read: Invalid data"
    yield "playlist", b"ffconcat version 1.0\nfile h264.mp4\n", "cannot be read"
    yield "cut in its header", good[:500], "cannot be read"
    yield "cut AVI", avi[: len(avi) // 2], r"its header says \d+ bytes, it has \d+"
    yield "sound", write_sound("wav", "pcm_s16le", np.zeros((1, 99)), 8000), r"it has no video, only \['audio'\]"
    for form in ("mkv", "mp4"):
        nothing = write_video(tmp_path / f"none.{form}", count=0).read_bytes()
        yield (
            f"no frames in {form}",
            nothing,
            "it has no frames|it has 0 frames|it has no video|cannot be read: End of file",
        )
    yield "a billion frames", boxed(good, b"stsz", 4, [1, 10**9]), "it has (no|0) frames"


def test_videos_that_cannot_be_read_say_why(videos, tmp_path, monkeypatch):
    monkeypatch.chdir(videos["h264.mp4"].parent)  # where the playlist would find another file
    for what, data, reason in bad_videos(videos, tmp_path):
        for ask in (video_header, lambda file: read_frames(file, [0])):
            with pytest.raises(ValueError, match=reason) as said:
                ask(io.BytesIO(data))
            assert not isinstance(said.value, av.FFmpegError), what


def test_frames_that_are_not_there_are_missed(videos):
    data = videos["h264.mp4"].read_bytes()
    cut = io.BytesIO(data[: int(len(data) * 0.8)])
    assert video_header(cut).frames == 40
    with pytest.raises(ValueError, match=r"its header says 40 frames, it has 3\d"):
        read_frames(cut, [0])
    for indices in ([40], [-1, 3], []):
        with pytest.raises(ValueError, match="it has 40 frames, wanted are those from"):
            read_frames(io.BytesIO(data), indices)
    avi = videos["mpeg4.avi"].read_bytes()
    at = avi.index(b"strh") + 40
    with videos["mpeg4.avi"].open("rb") as file:
        assert video_header(io.BytesIO(avi[:at] + struct.pack("<I", 10**9) + avi[at + 4 :])) == video_header(file)


def test_files_that_end_before_their_header_says_are_not_read_as_shorter_ones(videos, tmp_path):
    """FFmpeg takes the end of a Matroska or MP3 file as it comes."""
    draw = np.random.default_rng(0)
    noise, cover = draw.normal(0, 0.2, (1, 80_000)), b"ID3\x04\0\0\0\0\x40\0" + bytes(64 * 128)
    for variable in (False, True):
        mp3 = write_sound("mp3", "libmp3lame", noise, 16000, variable=variable)
        for data in (mp3, cover + mp3[mp3.index(b"\xff") :]):
            for ask in (recording_header, read_recording):
                ask(io.BytesIO(data), 16000)
                with pytest.raises(ValueError, match=r"its header says 5\.\d s, it ends after [1-3]\.\d s"):
                    ask(io.BytesIO(data[: len(data) * 3 // 5]), 16000)
    talk = write_video(tmp_path / "talk.mkv", sound=True).read_bytes()
    for data in (videos["h264.mkv"].read_bytes(), videos["vp9.webm"].read_bytes(), talk):
        for ask in (video_header, lambda file: read_frames(file, [0])):
            ask(io.BytesIO(data))
            with pytest.raises(ValueError, match=r"its header says 4\.\d s, it ends after [0-3]\.\d s"):
                ask(io.BytesIO(data[: len(data) // 2]))
    assert recording_header(io.BytesIO(talk), 16000) == 1024  # its sound ends before its pictures


def test_files_that_do_not_say_how_long_they_are_may_end_anywhere(tmp_path):
    """What FFmpeg says of their length is a guess: of MP3 from the bit rate, of a stream by its last frames."""
    quiet = np.concatenate([np.zeros((1, 40_000)), np.random.default_rng(0).normal(0, 0.3, (1, 40_000))], 1)
    for sound in (quiet, quiet[:, ::-1]):
        data = write_sound("mp3", "libmp3lame", sound, 16000, variable=True, options={"write_xing": "0"})
        for part in (data, data[: len(data) // 2]):
            assert recording_header(io.BytesIO(part), 16000) == len(read_recording(io.BytesIO(part), 16000)) > 10_000
    live = write_video(tmp_path / "live.mkv", live=True).read_bytes()
    assert video_header(io.BytesIO(live)).frames == 40
    assert 0 < video_header(io.BytesIO(live[: len(live) // 2])).frames < 40


def test_damaged_frames_are_not_read(videos):
    data = bytearray(videos["h264.mp4"].read_bytes())
    with av.open(io.BytesIO(bytes(data))) as file:
        last = [packet for packet in file.demux(video=0) if packet.is_keyframe][-1]
    data[last.pos + 40 : last.pos + last.size] = bytes(last.size - 40)
    with pytest.raises(ValueError, match=r"frame 36 is damaged|cannot be read: Invalid data"):
        read_frames(io.BytesIO(bytes(data)), [36])
    assert len(read_frames(io.BytesIO(bytes(data)), [0, 20]).pixels) == 2


def test_frames_of_several_sizes_are_not_read_together(tmp_path):
    """Parts of a transport stream may follow each other as they are."""
    parts = [write_video(tmp_path / f"{height}.ts", count=4, size=(height, 64)).read_bytes() for height in (48, 64)]
    file = io.BytesIO(b"".join(parts))
    assert read_frames(file, [1, 3]).pixels.shape == (2, 48, 64, 3)
    with pytest.raises(ValueError, match=r"frame 6 has \(64, 64\) pixels, those before it \(48, 64\)"):
        read_frames(file, [1, 6])


def test_pixels_are_counted_before_memory_is_taken(videos, monkeypatch):
    with videos["h264.mp4"].open("rb") as file:
        monkeypatch.setattr(media_files, "MOST_PIXELS", 10 * 48 * 64)
        assert len(read_frames(file, range(10)).pixels) == 10
        with pytest.raises(ValueError, match=r"11 frames of 48 x 64 pixels are 33792, more than 30720; sample fewer"):
            read_frames(file, range(11))
        monkeypatch.setattr(media_files, "MOST_PIXELS", 48 * 64 - 1)
        with pytest.raises(ValueError, match="cannot be read"):
            video_header(file)


def test_without_pyav_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    for ask in (video_header, lambda file: recording_header(file, 16000)):
        with pytest.raises(RecipeError, match=r"PyAV reads; it is not installed: pip install 'hetmesh\[media\]'"):
            ask(io.BytesIO())


SOUNDS = [
    ("wav", "pcm_u8", 8000, "mono"),
    ("wav", "pcm_s16le", 44100, "stereo"),
    ("wav", "pcm_s24le", 48000, "5.1"),
    ("flac", "flac", 48000, "7.1"),
    ("wav", "pcm_f32le", 8000, "16 channels"),
    ("wav", "pcm_s32le", 16000, "mono"),
    ("wav", "pcm_f32le", 22050, "stereo"),
    ("wav", "adpcm_ms", 8000, "mono"),
    ("flac", "flac", 44100, "stereo"),
    ("mp3", "libmp3lame", 44100, "stereo"),
    ("mp3", "libmp3lame", 22050, "mono"),
    ("ogg", "libopus", 48000, "mono"),
    ("ogg", "flac", 44100, "mono"),
    ("mp4", "aac", 44100, "mono"),
    ("matroska", "pcm_s16le", 16000, "mono"),
]
EXACT = ("pcm_s24le", "pcm_s32le", "pcm_f32le", "flac", "pcm_s16le")


@pytest.mark.parametrize(("form", "codec", "rate", "layout"), SOUNDS)
def test_as_many_samples_are_read_as_planned_and_they_sound_alike(form, codec, rate, layout):
    channels = av.AudioLayout(layout).nb_channels
    for samples in (100, 1023, 5001, 16001):
        tone = 0.5 * np.sin(np.arange(samples) / rate * 2 * np.pi * 440)
        data = io.BytesIO(write_sound(form, codec, np.stack([tone] * channels), rate, layout))
        planned, read = recording_header(data, 16000), read_recording(data, 16000)
        assert (read.dtype, read.shape) == (np.float32, (planned,))
        if codec in EXACT:
            assert planned == -(-samples * 16000 // rate)
    if codec in EXACT:
        want = 0.5 * np.sin(np.arange(planned) / 16000 * 2 * np.pi * 440)
        assert np.abs(read - want)[100:-100].max() < 2e-3
    else:  # a codec may shift it
        power = np.abs(np.fft.rfft(read[200:-200]))
        assert abs(power.argmax() * 16000 / (len(read) - 400) - 440) < 8000 / len(read) + 1


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_16_bit_wav_files_at_their_rate_stay_as_they_are_to_the_bit(channels):
    sound = np.random.default_rng(channels).integers(-(2**15), 2**15, (4001, channels)).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, 2, 16000, 0, "NONE", ""))
        out.writeframes(sound.tobytes())
    want = sound.mean(axis=1, dtype=np.float32) / 32768
    assert recording_header(file, 16000) == 4001
    assert np.array_equal(read_recording(file, 16000), want)


def bad_recordings(videos):
    wav = write_sound("wav", "pcm_s16le", np.zeros((1, 9000)), 16000)
    flac = write_sound("flac", "flac", np.random.default_rng(0).normal(0, 0.1, (1, 9000)), 16000)
    rate = lambda number: wav[:24] + struct.pack("<I", number) + wav[28:]  # noqa: E731
    yield "video", videos["h264.mp4"].read_bytes(), r"it has no audio, only \['video'\]", True
    yield "empty", b"", "cannot be read", True
    yield "text", b"a sound" * 99, "cannot be read", True
    yield "cut WAV", wav[:9000], r"its header says 18\d\d\d bytes, it has 9000", True
    yield "cut FLAC", flac[: len(flac) // 2], "cannot be read|its header says 9000 samples", False
    yield "no samples", write_sound("wav", "pcm_s16le", np.zeros((1, 99)), 16000)[:78], "it has", True
    yield "2 GHz", rate(2 * 10**9), r"it has 2000000000 samples per second, which is not in 1000\.\.1000000", True
    yield "1 Hz", rate(1), r"it has 1 samples per second, which is not in", True


def test_recordings_that_cannot_be_read_say_why(videos):
    for what, data, reason, known in bad_recordings(videos):
        for ask in (recording_header, read_recording)[not known :]:
            with pytest.raises(ValueError, match=reason) as said:
                ask(io.BytesIO(data), 16000)
            assert not isinstance(said.value, av.FFmpegError), what


def test_recordings_have_a_bound_and_may_come_from_a_pipe(monkeypatch):
    wav = write_sound("wav", "pcm_s16le", np.zeros((1, 9000)), 8000)
    at = wav.index(b"data") + 4
    piped = wav[:4] + b"\xff" * 4 + wav[8:at] + b"\xff" * 4 + wav[at + 4 :]
    assert recording_header(io.BytesIO(piped), 8000) == len(read_recording(io.BytesIO(piped), 8000)) == 9000
    unpadded = write_sound("wav", "pcm_u8", np.zeros((1, 9001)), 8000)[:-1]  # its header counts an even number of bytes
    assert recording_header(io.BytesIO(unpadded), 8000) == len(read_recording(io.BytesIO(unpadded), 8000)) == 9001
    monkeypatch.setattr(media_files, "MOST_SAMPLES", 17_999)
    assert recording_header(io.BytesIO(wav), 8000) == 9000
    for ask in (recording_header, read_recording):
        with pytest.raises(ValueError, match=r"it has 1\d+ samples at 16000 per second, need 1\.\.17999"):
            ask(io.BytesIO(wav), 16000)


def test_the_sound_of_a_video_is_read(tmp_path):
    with write_video(tmp_path / "talk.mp4", count=3, sound=True).open("rb") as file:
        assert recording_header(file, 16000) == len(read_recording(file, 16000)) == 1024
        assert video_header(file).frames == 3


@pytest.mark.parametrize("form", ["flac", "mp3"])
def test_features_of_any_recording_are_as_many_as_planned(tmp_path, form):
    from transformers import WhisperFeatureExtractor

    WhisperFeatureExtractor(feature_size=6, hop_length=1000, chunk_length=1).save_pretrained(tmp_path)
    tone = 0.3 * np.sin(np.arange(30001) * 0.05)[None]
    data = write_sound(form, {"flac": "flac", "mp3": "libmp3lame"}[form], tone, 44100)
    processor = RecordingProcessor(tmp_path, "key")
    features = processor(f"a.{form}", io.BytesIO(data))
    assert tuple(features.shape) == processor.shape(f"a.{form}", io.BytesIO(data)) == (6, 16)
    assert features.std() > 0
    long = write_sound(form, {"flac": "flac", "mp3": "libmp3lame"}[form], np.tile(tone, 2), 44100)
    with pytest.raises(ValueError, match=r"it lasts 1\.\d s, more than the 1 s of the extractor"):
        processor(f"a.{form}", io.BytesIO(long))
