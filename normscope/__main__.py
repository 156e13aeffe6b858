"""Entry point of ``python -m normscope`` and of the script ``normscope``."""

from normscope.cli import main

if __name__ == "__main__":
    main()
