"""Files, the text in them, and how passages of them are found."""
