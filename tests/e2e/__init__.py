"""Tests that start real SGLang servers and engines, one at a time."""
