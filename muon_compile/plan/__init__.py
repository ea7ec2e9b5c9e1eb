"""What the step will do, as plain data. No torch."""
