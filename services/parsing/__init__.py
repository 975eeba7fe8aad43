"""What people and records write, parsed or refused by name: addresses, names, NAME=VALUE, pydantic errors. Pure."""
