"""The one exception users see: a single clear line that says what, where and what was expected."""

__all__ = ["InsertlmError"]


class InsertlmError(Exception):
    """Bad input of any kind. The command line prints the message as one line and exits with code 2."""
