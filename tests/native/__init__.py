"""Tests of the native part: the binding to FlagCX and hostcx."""
