"""Files that are uploaded in parts."""
