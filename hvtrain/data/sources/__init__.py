"""The data sets that a user can choose; each module is one kind of source."""
