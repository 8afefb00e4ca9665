"""Collectives in real processes."""
