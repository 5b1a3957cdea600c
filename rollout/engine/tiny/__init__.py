"""The checkpoint that ships with the package, and how it was made."""
