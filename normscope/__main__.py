"""Entry point of ``python -m normscope`` and of the script ``normscope``."""

import sys


def main() -> None:
    """Run the command line and exit with its status, also if it is interrupted while being imported."""
    try:
        from normscope.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
