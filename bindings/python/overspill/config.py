"""Configurations as Python gives them: a mapping, a file, or text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Config = Mapping[str, Any] | str | os.PathLike[str]


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        try:
            import yaml
        except ImportError as error:
            raise ImportError(
                f"{name} is YAML, which needs PyYAML (pip install pyyaml); or give a dict or JSON"
            ) from error

        # Of YAML 1.2, as the engine reads it: to PyYAML, 1e-8 without a point is a string.
        class Loader(yaml.SafeLoader):
            pass

        number = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
        Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
        content = yaml.load(text, Loader)
    if not isinstance(content, dict):
        raise ValueError(f"{name}: expected keys and values, as docs/configuration.md shows")
    return content


def load_config(config: Config | None) -> dict[str, Any]:
    """The configuration as a dict of its own. Text with a line end or a brace is not a path."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return json.loads(json.dumps(config, default=os.fspath))  # type: ignore[no-any-return]
    text = os.fspath(config)
    if "\n" in text or "{" in text:
        return _parse(text, "the configuration")
    return _parse(Path(text).read_text(encoding="utf-8"), text)
