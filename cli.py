"""Runs the command line from a checkout: ``python cli.py plot``."""

from normscope.__main__ import main

main()
