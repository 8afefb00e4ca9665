"""The one family of errors of the communication layer."""


class CommError(RuntimeError):
    """Anything that went wrong in communication; its text says what, where, what is allowed and what to do."""
