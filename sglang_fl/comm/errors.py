"""The one family of errors of the communication layer."""


class CommError(RuntimeError):
    """Anything that went wrong in communication; its text says what, where, what is allowed and what to do."""


class AgreementError(CommError):
    """The ranks of a group could not agree: one is missing, or they differ in what must be equal."""
