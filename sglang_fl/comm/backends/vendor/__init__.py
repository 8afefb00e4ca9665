"""Vendors' own communication libraries, one folder each."""
