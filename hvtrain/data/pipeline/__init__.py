"""How examples become batches: order, decoding and augmentation."""
