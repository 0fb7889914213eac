"""The errors a user can meet. Each message says what was asked, what was found and what to do."""


class ThinwireError(Exception):
    """Base of all errors raised on purpose by thinwire."""


class UsageError(ThinwireError, ValueError):
    """Bad input: a setting, a file or a flag. On the command line one line, exit code 2."""


class StorageError(ThinwireError):
    """A file could not be written: the disk is full, or the directory is gone. Exit code 3."""


class LabError(ThinwireError):
    """The emulated network cannot be built here, or does not keep to what was asked of it."""


class PeerLost(ThinwireError):
    """Another rank died, hangs or cannot be reached; the message names it."""


class BadPayload(ThinwireError):
    """A peer sent bytes that its codec cannot have made; the message names it."""

    sender: int | None = None
    """Its rank in the group, until the wire has named it."""


class NonFinite(ThinwireError):
    """A replica keeps producing NaN or infinity; the message names it."""
