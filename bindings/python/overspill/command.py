"""Plans and benchmarks by the `overspill` command's JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class CommandError(RuntimeError):
    """The command failed; the text is what it wrote."""


def command_path() -> str:
    """OVERSPILL_COMMAND, the command inside this package, or the one on the PATH."""
    given = os.environ.get("OVERSPILL_COMMAND")
    if given:
        return given
    packaged = Path(__file__).parent / "bin" / "overspill"
    if packaged.is_file():
        return str(packaged)
    own = Path(sys.argv[0]).resolve()
    for folder in os.get_exec_path():
        found = shutil.which("overspill", path=folder)
        # The Python script of the same name would call itself for ever.
        if found and Path(found).resolve() != own and not _is_script(found):
            return found
    raise CommandError(
        "the overspill command was not found; build it (./dev build) and set OVERSPILL_COMMAND, "
        "or install this package with OVERSPILL_WITH_COMMAND=ON"
    )


def _is_script(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _run(arguments: Sequence[str]) -> None:
    done = subprocess.run([command_path(), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise CommandError((done.stderr or done.stdout).strip())


def _overrides(settings: Mapping[str, Any] | None) -> list[str]:
    arguments = []
    for key, value in (settings or {}).items():
        arguments += ["--set", f"{key}={json.dumps(value)}"]
    return arguments


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    hardware: str | os.PathLike[str] | None = None,
    ranks: int | None = None,
    settings: Mapping[str, Any] | None = None,
    advice: bool = True,
) -> dict[str, Any]:
    """Whether a run fits, its step time and bytes: `overspill plan --json`.

    `config`: a training file, a model's config.json, or the file's keys. `settings` overrides keys.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        if isinstance(config, Mapping):
            file = Path(folder) / "config.yaml"
            file.write_text(json.dumps(config, default=os.fspath), encoding="utf-8")
        else:
            file = Path(config)
        arguments = ["plan", str(file), "--json", str(output), *_overrides(settings)]
        if hardware is not None:
            arguments += ["--hardware", os.fspath(hardware)]
        if ranks is not None:
            arguments += ["--ranks", str(ranks)]
        if not advice:
            arguments.append("--no-advice")
        _run(arguments)
        return json.loads(output.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def bench(
    kind: str,
    *,
    paths: Sequence[str | os.PathLike[str]] = (),
    quick: bool = False,
    profile: str | os.PathLike[str] | None = None,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures nvme, copy, optimizer, compute, collective or all: `overspill bench KIND --json`.

    `paths`: the drives' directories. `profile`: a hardware profile to write or fill in.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bench.json"
        command = ["bench", kind, "--json", str(output)]
        for path in paths:
            command += ["--path", os.fspath(path)]
        if quick:
            command.append("--quick")
        if profile is not None:
            command += ["--profile", os.fspath(profile)]
        _run([*command, *arguments])
        return json.loads(output.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
