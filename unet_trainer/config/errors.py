"""Errors that the user can fix."""

from __future__ import annotations


class UserError(ValueError):
    """Something the user can fix: shown as one message without a traceback, exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """The config cannot be used; the message lists every problem."""
