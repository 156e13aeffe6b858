"""``python -m normscope``, and what the script ``normscope`` runs."""

import sys


def main() -> None:
    """Run the command line and exit with its status, also where it is interrupted while still being imported."""
    try:
        from normscope.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
