"""The one family of errors of the communication layer."""


class CommError(RuntimeError):
    """Anything that went wrong in communication; its text says what, where, what is allowed and what to do."""


class AgreementError(CommError):
    """The ranks of a group could not agree: one is missing, or they differ in what must be equal."""


class CollectiveTimeout(CommError):  # noqa: N818 - as torch's and the field's own word for it
    """A call did not complete within its limit: names group, call, the ranks that are not in it, and the limit."""


class PeerLost(CommError):  # noqa: N818 - it says what happened; "Error" would add nothing
    """A call cannot complete: names group, call and the ranks whose processes are gone, or have left it."""
