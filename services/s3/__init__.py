"""S3: objects in and out, with one error table. Knows no adapter and no job."""
