"""Tests; a package, so that its parts can import each other under one name."""
