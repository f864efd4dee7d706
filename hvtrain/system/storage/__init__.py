"""Object storage: data, weights and runs at addresses such as s3://BUCKET/FOLDER."""
