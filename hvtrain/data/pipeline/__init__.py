"""How examples become batches: order, decoding, augmentation, and examples that cannot be read."""
