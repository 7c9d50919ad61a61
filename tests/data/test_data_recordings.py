"""Extractors and calls of recordings refuse what they would cut or cannot take."""

from __future__ import annotations

import io
import json

import pytest

from hetmesh.data.media_reader import RecordingProcessor
from hetmesh.errors import RecipeError, SampleError
from hetmesh.models.split.audio_calls import Frames, PaddedFrames


def test_other_extractors_and_shapes_are_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "Other"}))
    with pytest.raises(RecipeError, match=r"its feature extractor is 'Other', not WhisperFeatureExtractor"):
        RecordingProcessor(tmp_path, "key").shape("x.wav", io.BytesIO())
    for call, shape in ((Frames(6), (6, 2)), (PaddedFrames(6, 16), (6, 16)), (PaddedFrames(6, 16), (6, 16, 17))):
        with pytest.raises(SampleError, match="recordings must be of shape"):
            call.check(shape)
