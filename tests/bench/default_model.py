"""The default model for measurements, from the same folder as the tests use."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from chat.default_model import fetch_default_model
from chat.model import LoadedModel, load_model
from chat.settings import DtypeName, ModelSettings, WeightForm


def load_default_model(weights: WeightForm = "full", dtype: DtypeName = "auto") -> LoadedModel:
    folder = Path(platformdirs.user_cache_dir("keepwarm-tests")) / "models"
    fetch_default_model(folder)
    return load_model(ModelSettings(dtype=dtype, weights=weights), folder)
