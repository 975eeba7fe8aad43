"""Copies adapters from S3 to disk: content-addressed, verified before they are visible, within a budget."""

from services.adapters.staging.stager import Stager

__all__ = ["Stager"]
