"""The operator's side of the dead-letter topic: look at what lies there, mend it, and send it back."""
