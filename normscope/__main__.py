"""``python -m normscope``."""

from normscope.cli import main

main()
