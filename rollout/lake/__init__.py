"""The lake: schemas, staging, publishing, reading."""
