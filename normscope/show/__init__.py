"""Figures and tables of records."""
