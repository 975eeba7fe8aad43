"""What a producing program needs and nothing else: no torch, no database driver, no worker."""
