"""From S3 to disk: content-addressed, verified before it is visible, within a budget."""

from services.adapters.staging.stager import Stager

__all__ = ["Stager"]
