"""Fails when it is imported."""

import no_such_package  # noqa: F401
