"""File formats: idx, TFRecord, Parquet. Most of it works without TensorFlow."""
