"""The version of hvtrain, apart from what the package offers, so that every room may import it."""

VERSION = "0.1.0"
