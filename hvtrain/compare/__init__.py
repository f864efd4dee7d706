"""The same training under several strategies: how fast each is, how it learns, and what one may conclude."""
