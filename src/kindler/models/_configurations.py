"""Configurations of Hugging Face, as JSON that may come from anyone: which entries name code or files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kindler.errors import ConfigError

# What would be downloaded, or imported from packages that the file names.
_CODE = (
    *("auto_map", "custom_pipelines", "custom_generate", "attn_implementation", "experts_implementation"),
    *("quantization_config", "trust_remote_code", "use_pretrained_backbone", "use_timm_backbone"),
    "use_kernels",
)
# Entries of such names are files, folders or names on a hub if they are text, and sizes if they are numbers.
_PLACES = ("path", "file", "url", "repo", "hub", "remote", "weights", "backbone", "pretrained", "kernel")
_OWN_NAME = "name_or_path"  # where it came from; nobody reads that
_PLAIN: tuple[Any, ...] = (None, False, "", "eager", "sdpa", [], {})


def names_something(key: str, value: Any) -> bool:
    """Whether an entry names code, or something elsewhere."""
    name = key.lstrip("_").lower()
    if value in _PLAIN or name == _OWN_NAME:
        return False
    text = isinstance(value, str) or (isinstance(value, list) and any(isinstance(v, str) for v in value))
    return name.startswith(_CODE) or (text and any(word in name for word in _PLACES))


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path.name} cannot be read: {exc}") from exc
