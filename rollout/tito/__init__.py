"""Messages to token ids and back: token in, token out."""
