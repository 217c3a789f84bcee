"""Byte sizes as people write them: 4096, "512MiB", "1.5GB"."""

from __future__ import annotations

import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(size: int | str, name: str = "size") -> int:
    """The number of bytes, as the engine's configuration reads it. `name` is for the error."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(found[2].lower()) if found else None
    fraction = found is not None and "." in found[1] and unit == 1
    if found is None or unit is None or fraction or isinstance(size, bool):
        raise ValueError(
            f"{name}: {size!r} is not a byte size; write bytes (4096) or a number with KB, MB, GB, "
            f"TB or KiB, MiB, GiB, TiB, such as 512MiB or 1.5GiB"
        )
    return int(found[1]) * unit if found[1].isdigit() else int(float(found[1]) * unit)
