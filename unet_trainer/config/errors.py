"""Errors that the user can mend."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can mend: shown as one message, without a traceback, exit code 2."""


class ConfigError(UserError):
    """The config cannot be used; the message lists every problem."""
