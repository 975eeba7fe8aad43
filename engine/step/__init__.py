"""One step: metadata, placement on the device, forward pass and sampling."""
