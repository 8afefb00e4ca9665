"""FlagOS' operators: Triton kernels of this package, and of FlagGems without its Python layers around them.

Which is whose, ``docs/operators.md`` says. All of them are offered where FlagGems can be used, and nowhere else: it
knows the chip, and ``flagos`` then means one thing, whichever operator is asked for.
"""
