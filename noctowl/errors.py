"""Errors that are part of the interface: each says what was found, what is allowed and what to do next.

The entry points print the message without a traceback and leave with exit code 2.
"""


class NoctowlError(Exception):
    """Base of every error that a user can mend."""


class ConfigError(NoctowlError):
    """The configuration does not make sense; lists every problem at once."""


class DataError(NoctowlError):
    """An annotation file, an image or a folder is missing, damaged or inconsistent."""


class ModelError(NoctowlError):
    """A checkpoint or model cannot be loaded, or does not fit what is asked of it."""
