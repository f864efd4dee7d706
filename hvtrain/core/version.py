"""The version of hvtrain, separate from the package's API, so that every subpackage may import it."""

VERSION = "0.1.0"
