"""What a user chooses as a data set; each module is one kind of source."""
