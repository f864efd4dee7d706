"""How examples become batches: order, decoding, augmentation, and what happens to examples that cannot be read."""
