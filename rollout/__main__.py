"""The `rollout` command's start: refuses foreign `flows` and `tasks` packages, then hands over to `flows.cli`."""

from __future__ import annotations

import sys

from rollout.guard import ShadowedPackage, check_packages


def main() -> None:
    """Run the command line interface."""
    try:
        check_packages()
    except ShadowedPackage as error:
        sys.exit(_refuse(error))
    from flows.cli import main as run_cli

    run_cli()


def _refuse(error: ShadowedPackage) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
