"""Extractors refuse what they would cut or cannot take."""

from __future__ import annotations

import json

import pytest

from hetmesh.data.media_reader import RecordingProcessor
from hetmesh.errors import RecipeError


def test_other_extractors_are_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "Other"}))
    with pytest.raises(RecipeError, match=r"its feature extractor is 'Other', not WhisperFeatureExtractor"):
        RecordingProcessor(tmp_path, "key")
