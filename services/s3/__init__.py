"""S3: uploads and downloads objects, with one error table. Knows no adapter or job."""
