"""The nouns of llmpq and their file formats; needs the standard library only."""
