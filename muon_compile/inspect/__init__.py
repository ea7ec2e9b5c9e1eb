"""Pictures and files for people, out of plain data."""
