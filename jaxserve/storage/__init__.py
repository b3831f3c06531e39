"""Model folders in buckets: `gs://` and `s3://` URLs wherever a folder of a model may stand."""
