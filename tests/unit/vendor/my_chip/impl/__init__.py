"""The functions behind the methods."""
