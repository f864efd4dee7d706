"""File formats: tables, TFRecord, Parquet, tar files, images, text and its tokenizers."""
