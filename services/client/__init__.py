"""The client library for producers: needs no torch, no database driver and no worker."""
