"""What a trainer does with published rows."""
