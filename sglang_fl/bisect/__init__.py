"""Finds what makes a server's answers differ from SGLang's own: the layer, then the operator, by starting servers.

A room of its own beside ``cli``, which holds one module per command and nothing that runs for minutes.
"""
