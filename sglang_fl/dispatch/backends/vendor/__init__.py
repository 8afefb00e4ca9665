"""Vendors' own operators, one folder each."""
