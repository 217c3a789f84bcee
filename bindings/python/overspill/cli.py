"""The script `overspill`: `prepare` is done here, everything else by the compiled command."""

from __future__ import annotations

import os
import sys

from .command import CommandError, command_path


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["prepare"]:
        from .prepare.cli import main as prepare

        return prepare(arguments[1:])
    try:
        path = command_path()
    except CommandError as error:
        print(f"overspill: {error}", file=sys.stderr)
        return 1
    os.execv(path, [path, *arguments])


if __name__ == "__main__":
    sys.exit(main())
