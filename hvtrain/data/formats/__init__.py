"""File formats: TFRecord, Parquet."""
