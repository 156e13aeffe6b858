"""Runs the command line from a checkout: ``python cli.py plot``."""

from normscope.cli import main

main()
