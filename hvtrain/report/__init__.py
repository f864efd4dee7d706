"""What people look at when a run has ended: a page of it, or of several beside each other."""
