"""Places where people look at runs later, one file each: what a user chooses as tracker=."""
