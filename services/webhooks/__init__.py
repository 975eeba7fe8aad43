"""The operator's side of webhooks: see what was not delivered, and have it sent again."""
