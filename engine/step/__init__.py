"""One step: metadata, placement on the device, forward pass and sampling. Called by `engine.py` alone."""
