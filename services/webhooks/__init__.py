"""Webhooks outside the dispatcher: addresses, signatures, a receiver, and the commands that list and resend them."""
