"""Tools on top of captures, fits and swaps, each with its own records, figure and table."""
