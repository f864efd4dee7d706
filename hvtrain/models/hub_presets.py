"""Presets of keras-hub, folders that save_to_preset wrote: what lies in them, and what of a model is keras-hub's."""

import json
import sys
from pathlib import Path
from typing import Any

import keras

from hvtrain.errors import ConfigError

CONFIG_FILE = "config.json"
"""In every preset, and in no run folder."""


def preset_folder(preset: str, setting: str) -> str:
    """The folder's whole path, since keras-hub downloads what has the name of a preset that it knows.

    Raises ConfigError, which names the setting, if there is no preset.
    """
    path = Path(preset)
    if not (path / CONFIG_FILE).is_file():
        what = f"has no {CONFIG_FILE}" if path.is_dir() else "is not a folder"
        raise ConfigError(
            f"{setting}={preset} {what}; give a folder that save_to_preset of keras-hub wrote: nothing is downloaded"
        )
    return str(path.resolve())


def task_config(folder: str, kind: type) -> dict[str, Any]:
    """The options of a task model in a preset, without its backbone; empty if it is of another class, or has none."""
    path = Path(folder) / "task.json"
    saved = json.loads(path.read_text()) if path.is_file() else {}
    if saved.get("class_name") != kind.__name__:
        return {}
    return {key: value for key, value in saved["config"].items() if key not in ("backbone", "preprocessor")}


def backbone_of(model: keras.Model) -> keras.Model | None:
    """The backbone of keras-hub in a model: what presets have the weights of, whatever the task. None without one."""
    return _inside(model, "Backbone")


def task_of(model: keras.Model) -> keras.Model | None:
    """The task model of keras-hub in a model: its backbone and a head. None without one."""
    return _inside(model, "Task")


def _inside(model: keras.Model, kind: str) -> Any:
    if (hub := sys.modules.get("keras_hub")) is None:
        return None
    return next((layer for layer in model._flatten_layers() if isinstance(layer, getattr(hub.models, kind))), None)
