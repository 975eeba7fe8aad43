"""From S3 to disk: content-addressed, verified before it is visible, within a budget."""

from services.staging.stager import Stager

__all__ = ["Stager"]
